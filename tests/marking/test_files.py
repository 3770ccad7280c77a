"""What a student's file may be called, and what may be in a zip."""

import codecs
import errno
import io
import os
import stat
import zipfile
from pathlib import Path

import pytest
from hand_in import make_source, put
from marking import assignment, files


@pytest.mark.parametrize("name, meant", [
    ("ps1.ipynb", "ps1"), ("ps1 (1).ipynb", "ps1"), ("ps1_final.ipynb", "ps1"),
    ("PS1.IPYNB", "ps1"), ("ps1-Copy1.ipynb", "ps1"), ("Copy of ps2.ipynb", "ps2"),
    ("ps1.ipynb.txt", "ps1"),
    ("ada_123_assignsubmission_file_ps1.ipynb", "ps1"), ("lovelaceada_55_901_ps3-2.zip", "ps3"),
    ("ps1.zip", "ps1"), ("ps1v2.ipynb", "ps1"), ("ps11.ipynb", None), ("ps0.ipynb", None),
    ("maps1.ipynb", None), ("ps1_ps2.ipynb", None), ("homework.ipynb", None), ("ps1.pdf", None),
    ("ps1", None), ("ps1_as_ps1.ipynb", "ps1")])
def test_which_assignment_a_name_means(name, meant):
    assert files.find_meant(name) == meant


def hand_in(folder, *names):
    for name in names:
        path = folder / "ada" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return files.find_submissions(folder)


@pytest.mark.parametrize("names, chosen, unread", [
    (["ps1.ipynb"], "ps1.ipynb", []), (["ps1/ps1.ipynb"], "ps1/ps1.ipynb", []),
    (["ps1 (1).ipynb"], "ps1 (1).ipynb", []), (["x/y/ps1_final.zip"], "x/y/ps1_final.zip", []),
    (["ps1.ipynb", "ps1 (1).ipynb"], "ps1.ipynb", ["ps1 (1).ipynb: ps1.ipynb is what was read"]),
    (["ps1.ipynb", "homework.ipynb", "ps1.pdf", "notes.txt", "ps1/helpers/gpu.py"], "ps1.ipynb",
     ["homework.ipynb: its name doesn't say which", "ps1.pdf: it is no notebook"]),
    (["ps1.ipynb", ".ipynb_checkpoints/ps1-checkpoint.ipynb", "__MACOSX/ps1.ipynb", "._ps1.ipynb"],
     "ps1.ipynb", [])])
def test_the_one_file_that_can_be_meant(tmp_path, names, chosen, unread):
    found = hand_in(tmp_path, *names)
    (one,) = found.submissions
    assert (files.show(one.path), one.assignment, one.doubtful) == (chosen, "ps1", ())
    if not chosen.endswith("zip"):
        assert files.read_submission(tmp_path, one) == (
            chosen, [] if chosen.endswith("ps1.ipynb") else [f"Read: {chosen}"])
    said = [f"{files.show(one.path)}: {one.why}" for one in found.unread]
    assert len(said) == len(unread) and all(map(str.startswith, said, unread)), said


def test_the_hand_out_is_left_out_beside_what_was_written(tmp_path):
    read = assignment.read_assignment("ps1")
    stubs = {one.name: assignment.make_stub(one.answer) for one in read.exercises}
    stubs |= {key: assignment.PLACEHOLDER for key, *_ in read.words}
    for change, chosen in ((stubs, "ps1 (1).ipynb"), ({**stubs, "even": "x = 1"}, "ps1.ipynb")):
        put(tmp_path, "ada", make_source(**change))
        put(tmp_path, "ada", make_source(), "ps1 (1).ipynb")
        found = files.find_submissions(tmp_path)
        assert [one.path for one in found.submissions] == [("ada", chosen)]
    put(tmp_path, "ada", make_source(**stubs))
    (left,) = files.find_submissions(tmp_path).unread
    assert (left.path[1], left.why) == ("ps1.ipynb", "it is as it was handed out")


def test_of_two_none_is_chosen(tmp_path):
    found = hand_in(tmp_path, "ps1 (1).ipynb", "ps1_final.ipynb")
    (one,) = found.submissions
    assert one.path is None
    assert files.explain_doubt(one) == ("which of ps1 (1).ipynb and ps1_final.ipynb is meant can't "
                                        "be told: hand in one of them, as ps1.ipynb")
    assert [(one.path[1], one.assignment) for one in found.unread] == [
        ("ps1 (1).ipynb", "ps1"), ("ps1_final.ipynb", "ps1")]


def test_a_file_in_no_student_s_folder(tmp_path):
    (tmp_path / "ps1.ipynb").touch()
    (tmp_path / "list.csv").touch()
    found = hand_in(tmp_path, "ps1.ipynb")
    assert [(one.student, one.path, one.why) for one in found.unread] == [
        ("", ("ps1.ipynb",), "it lies in no student's folder")]


@pytest.mark.parametrize("names, found", [
    (["doejane_12345_678901_ps1.ipynb", "roebo_LATE_12346_678902_ps1-2.ipynb",
      "roebo_12346_9_ps2.zip"],
     {"doejane": ["doejane_12345_678901_ps1.ipynb", None],
      "roebo": ["roebo_LATE_12346_678902_ps1-2.ipynb", "roebo_12346_9_ps2.zip"]}),
    (["doejane_1_5_ps1.ipynb", "doejane_2_6_ps1.ipynb"],    # two of that name
     {"doejane_1": ["doejane_1_5_ps1.ipynb"], "doejane_2": ["doejane_2_6_ps1.ipynb"]}),
    (["Jane Doe_12_assignsubmission_file_/ps1.ipynb",
      "Bo Roe_34_assignsubmission_file/x (1)/ps1.zip",
      "Bo Roe_34_assignsubmission_onlinetext_/onlinetext.html"],
     {"Jane Doe": ["ps1.ipynb"], "Bo Roe": ["x (1)/ps1.zip"]}),
    (["Jane Doe_12_assignsubmission_file_ps1.ipynb", "Jane Doe/ps1.ipynb"],
     {"Jane Doe_12": ["Jane Doe_12_assignsubmission_file_ps1.ipynb"], "Jane Doe": ["ps1.ipynb"]}),
    (["ada_1_2/ps1.ipynb", "list_1_2_of_names.csv", "a_1_2_homework.ipynb"],
     {"ada_1_2": ["ps1.ipynb"], "a": [None]})])
def test_whose_it_is_in_a_learning_platform_s_download(tmp_path, names, found):
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    handed = files.find_submissions(tmp_path)
    assert not handed.unusable
    those = {}
    for one in handed.submissions:
        those.setdefault(one.student, []).append(one.path and files.show(one.path))
        if one.path:
            assert files.read_file(tmp_path, one.path)
    assert those == found
    assert set(handed.renamed.values()) <= set(found)
    assert set(handed.renamed) == {name.split("/")[0] for name in names} - {
        "Jane Doe", "ada_1_2", "list_1_2_of_names.csv"}


def test_a_folder_that_can_t_be_used_says_nothing_of_what_was_handed_in(tmp_path, monkeypatch):
    """Root may read everything, so what the system says is put in its place."""
    locked = tmp_path / "ben"
    (locked / "ps2").mkdir(parents=True)
    (locked / "ps2/ps2.ipynb").touch()
    look, lstat = os.access, os.lstat

    def refuse(path):
        if locked in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return lstat(path)

    monkeypatch.setattr(files.os, "access", lambda path, mode: path != locked and look(path, mode))
    monkeypatch.setattr(files.os, "lstat", refuse)
    found = hand_in(tmp_path, "ps1.ipynb")
    assert found.unusable == {"ben": "there is no permission to read it"}
    assert [(one.student, one.assignment, one.path) for one in found.submissions] == [
        ("ada", "ps1", ("ada", "ps1.ipynb")), ("ben", "ps1", None)]


@pytest.mark.parametrize("content", [
    "{}".encode(), codecs.BOM_UTF8 + "{}".encode(), codecs.BOM_UTF16_LE + "{}".encode("utf-16-le"),
    codecs.BOM_UTF16_BE + "{}".encode("utf-16-be")])
def test_a_byte_order_mark(tmp_path, content):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada/ps1.ipynb").write_bytes(content)
    one = files.Submission("ada", "ps1", ("ada", "ps1.ipynb"))
    assert files.read_submission(tmp_path, one) == ("{}", [])


def pack(entries, **changes):
    """The bytes of a zip. changes: what becomes of its first entry."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, content in entries.items():
            one = zipfile.ZipInfo(path)
            one.compress_type = zipfile.ZIP_DEFLATED
            for name, value in changes.items():
                setattr(one, name, value)
            packed.writestr(one, content)
            changes = {}
    return stream.getvalue()


LINK = (stat.S_IFLNK | 0o777) << 16


@pytest.mark.parametrize("entries, chosen", [
    ({"ps1/ps1.ipynb": "a", "ps1/helpers/gpu.py": "b"}, "ps1/ps1.ipynb"),
    ({"ps1.ipynb": "a"}, "ps1.ipynb"), ({"homework.ipynb": "a"}, "homework.ipynb"),
    ({"ps1_final.ipynb": "a", "x.ipynb": ""}, "ps1_final.ipynb"),
    ({"ps1.ipynb": "a", "ps1_old.ipynb": "b"}, "ps1.ipynb"),
    ({"ps1/ps1.ipynb": "a", "__MACOSX/ps1/._ps1.ipynb": "b",
      "ps1/.ipynb_checkpoints/ps1.ipynb": "c"}, "ps1/ps1.ipynb"),
    ({"ps1\\ps1.ipynb": "a"}, "ps1/ps1.ipynb")])
def test_a_zip_with_one_notebook_that_can_be_meant(entries, chosen):
    assert files.unpack(pack(entries), "ps1.zip", "ps1") == (chosen, b"a")


@pytest.mark.parametrize("content, why", [
    (pack({"../ps1.ipynb": "a"}), r"\.\./ps1.ipynb in ps1.zip leads out"),
    (pack({"ps1.ipynb": "a", "x/../../y": ""}), "leads out"),
    (pack({"/ps1.ipynb": "a"}), "leads out"), (pack({"C:/ps1.ipynb": "a"}), "leads out"),
    (pack({"ps1.ipynb": "/etc/passwd"}, external_attr=LINK), "ps1.ipynb in ps1.zip is a link"),
    (pack({"x": "/etc", "ps1.ipynb": "a"}, external_attr=LINK), "x in ps1.zip is a link"),
    (pack({"ps1.ipynb": "a"}, compress_type=zipfile.ZIP_LZMA), "packed in a way"),
    (pack({"a/ps1.ipynb": "a", "b/ps1.ipynb": "b"}), "which of a/ps1.ipynb and b/ps1.ipynb"),
    (pack({"ps1.pdf": "a"}), "has no notebook in it"), (pack({}), "has no notebook in it"),
    (b"PK", "can't be unpacked"), (pack({"ps1.ipynb": "a" * 99})[:60], "can't be unpacked"),
    (pack({str(n): "" for n in range(files.MOST + 1)}), "more than 1000 files"),
    (pack({"ps1.ipynb": b" " * (files.LARGEST + 1)}),
     "unpacked, is larger than 64 MiB: clear its outputs"),
    (pack({"ps1.ipynb": "a", "data.bin": b" " * files.LARGEST}), "unpacked, is larger than 64")])
def test_a_zip_that_is_not_unpacked(content, why):
    with pytest.raises(files.Refused, match=why):
        files.unpack(content, "ps1.zip", "ps1")


def test_a_zip_that_lies_about_its_size():
    content = bytearray(pack({"ps1.ipynb": b" " * (files.LARGEST + 1)}))
    for signature, place in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
        begin = content.index(signature) + place
        content[begin:begin + 4] = (10).to_bytes(4, "little")
    with pytest.raises(files.Refused, match="can't be unpacked"):
        files.unpack(bytes(content), "ps1.zip", "ps1")
