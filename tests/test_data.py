"""`load_data` against things it did not make: IDX files written here, a web server, scikit-learn.

A small set of 60 and 20 images stands in for the published one; no test needs a network.
"""

import collections
import gzip
import hashlib
import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest

from helpers import data
from helpers.data import DataUnavailable, load_data

ROOT = Path(__file__).resolve().parents[1]
USERS_FOLDER = os.environ.get("COURSE_DATA")
PUBLISHED = data.FILES, data.MIRRORS, data.SUMS
LONGEST = data.LONGEST
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(array):
    """An IDX file, written from the format's description: 0, 0, type 8, dimensions; big-endian."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def make_arrays():
    """A small set of random pixels and labels, by file name."""
    random = np.random.RandomState(1)
    arrays = {}
    for part, n in (("train", 60), ("t10k", 20)):
        arrays[f"{part}-images-idx3-ubyte"] = random.randint(0, 256, (n, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = random.randint(0, 10, n)
    return arrays


ARRAYS = make_arrays()
PLAIN = {file: idx(array) for file, array in ARRAYS.items()}
PACKED = {file: gzip.compress(content, mtime=0) for file, content in PLAIN.items()}
SHAPES = {file: array.shape for file, array in ARRAYS.items()}
SUMS = [hashlib.sha256(PLAIN[file]).hexdigest() for file in NAMES]


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` by path; counts connections; `before(path)` may hold an answer back."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.paths, self.connections = {}, [], 0
        self.before = lambda path: None
        self.claim = {}  # path -> a Content-Length that is not true
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def url(self, folder):
        return f"http://127.0.0.1:{self.server_port}/{folder}/"

    def put(self, folder, files):
        self.files |= {f"/{folder}/{file}.gz": content for file, content in files.items()}
        return self.url(folder)

    def handle_error(self, *args):
        pass  # a client that hangs up early is part of the tests

    def process_request(self, *args):
        self.connections += 1
        super().process_request(*args)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append(self.path)
        self.server.before(self.path)
        content = self.server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", self.server.claim.get(self.path, len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def small_world(monkeypatch, tmp_path):
    """No settings of the user's, an empty cache, a small set, no mirror, nothing remembered."""
    for variable in ("COURSE_DATA", "COURSE_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(data, "FILES", {file: SHAPES[file] for file in NAMES})
    monkeypatch.setattr(data, "SUMS", SUMS)
    monkeypatch.setattr(data, "MIRRORS", [])
    monkeypatch.setattr(data, "LONGEST", 2**17)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "many-devices" / "mnist"


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def mirrored(server, monkeypatch):
    """The server with the small MNIST, as the only mirror."""
    monkeypatch.setattr(data, "MIRRORS", [server.put("a", PACKED)])
    return server


@pytest.fixture
def course(tmp_path, monkeypatch):
    """An empty $COURSE_DATA/mnist."""
    folder = tmp_path / "course" / "mnist"
    folder.mkdir(parents=True)
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "course"))
    return folder


def fill(folder, files, suffix=".gz"):
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / (file + suffix)).write_bytes(content)


def check(dataset, source, arrays=ARRAYS):
    """The data set is the small one, value for value."""
    assert (dataset.name, dataset.source) == ("mnist", source)
    for images, file in ((dataset.train_images, TRAIN_IMAGES), (dataset.test_images, TEST_IMAGES)):
        assert images.dtype == np.float32
        expected = (arrays[file].reshape(-1, 1, 28, 28) / 255).astype(np.float32)
        np.testing.assert_allclose(images, expected, rtol=1e-6)
        assert images.shape == expected.shape
    for labels, file in ((dataset.train_labels, TRAIN_LABELS), (dataset.test_labels, TEST_LABELS)):
        assert labels.dtype == np.int32
        np.testing.assert_array_equal(labels, arrays[file])


def names_below(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def refusal():
    with pytest.raises(DataUnavailable) as caught:
        load_data("mnist", fallback=False)
    return str(caught.value)


def peak_memory(action):
    """What `action` returns, and the most bytes that Python and NumPy held while it ran."""
    tracemalloc.start()
    try:
        return action(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


PACKED_NAMES = sorted(f"{file}.gz" for file in NAMES)


# From COURSE_DATA.


@pytest.mark.parametrize("suffix", [".gz", ""], ids=["packed", "unpacked"])
@pytest.mark.parametrize("place", ["mnist", "."], ids=["by name", "directly"])
def test_course_data(course, suffix, place):
    fill(course.parent / place, PACKED if suffix else PLAIN, suffix)
    check(load_data("mnist", fallback=False), "COURSE_DATA")


def test_a_line_that_says_what_it_is(course):
    fill(course, PACKED)
    line = "Data: mnist, 60 training and 20 test images, from COURSE_DATA"
    assert str(load_data("mnist")) == line
    assert "1,437 training and 360 test" in str(load_data("digits"))


def flip_last_byte(content):
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGE = {
    "cut short, packed": (TRAIN_IMAGES, ".gz", PACKED[TRAIN_IMAGES][:-500], "has 46,"),
    "cut short, unpacked": (TRAIN_IMAGES, "", PLAIN[TRAIN_IMAGES][:-500], "has 46,556 that begin"),
    "cut within the header": (TRAIN_IMAGES, "", PLAIN[TRAIN_IMAGES][:7], "has 7 that begin"),
    "empty": (TRAIN_IMAGES, "", b"", "has 0 that begin"),
    "empty, packed": (TRAIN_IMAGES, ".gz", b"", "has 0 that begin"),
    "not gzip": (TRAIN_IMAGES, ".gz", b"<html>No such page</html>", "has 25 that begin"),
    "broken gzip": (TRAIN_IMAGES, ".gz", PACKED[TRAIN_IMAGES][:10] + b"\xff" * 40, "not a whole"),
    "cut within the gzip header": (TRAIN_IMAGES, ".gz", PACKED[TRAIN_IMAGES][:5], "has 0 that"),
    "not IDX": (TRAIN_IMAGES, "", b"<html>No such page</html>", "has 25 that begin with 3c68746d"),
    "wrong sum": (TRAIN_IMAGES, "", flip_last_byte(PLAIN[TRAIN_IMAGES]), "not the published sum"),
    "wrong sum, packed": (
        TEST_LABELS,
        ".gz",
        gzip.compress(flip_last_byte(PLAIN[TEST_LABELS])),
        "not the published sum",
    ),
    "bytes too many": (TRAIN_LABELS, "", PLAIN[TRAIN_LABELS] + b"0", "should have 68 bytes"),
    "a label too few": (TRAIN_LABELS, "", idx(ARRAYS[TRAIN_LABELS][1:]),
                        "has 67 that begin with 000008010000003b"),
    "other type": (TRAIN_LABELS, "", b"\0\0\x0d" + PLAIN[TRAIN_LABELS][3:], "00000d01"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_in_course_data_is_named_and_left_alone(case, course, capsys):
    file, suffix, content, reason = DAMAGE[case]
    fill(course, PACKED)
    (course / f"{file}.gz").unlink()
    (course / (file + suffix)).write_bytes(content)
    before = names_below(course)
    message = refusal()
    assert f"COURSE_DATA={course.parent} can't be used: {file}: " in message and reason in message
    assert names_below(course) == before
    assert (course / (file + suffix)).read_bytes() == content
    assert load_data("mnist").name == "digits"
    assert reason in capsys.readouterr().out


def test_damage_in_course_data_does_not_keep_the_cache_from_being_used(course, cache, capsys):
    fill(course, PACKED)
    (course / f"{TEST_IMAGES}.gz").write_bytes(b"")
    fill(cache, PACKED)
    check(load_data("mnist"), "the cache")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"COURSE_DATA={course.parent} can't be used: {TEST_IMAGES}: should have")
    assert line.endswith("; mnist is from the cache")


@pytest.mark.parametrize("suffix", [".gz", ""], ids=["packed", "unpacked"])
def test_header_that_lies_about_its_size(course, suffix):
    """100 bytes that claim 4,294,967,295 images: refused for what is there, at no cost."""
    lie = struct.pack(">4I", 0x803, 2**32 - 1, 28, 28) + bytes(84)
    fill(course, PACKED)
    (course / f"{TRAIN_IMAGES}.gz").unlink()
    (course / (TRAIN_IMAGES + suffix)).write_bytes(gzip.compress(lie) if suffix else lie)
    message, peak = peak_memory(refusal)
    assert TRAIN_IMAGES in message
    assert "has 100 that begin with 00000803ffffffff" in message
    assert peak < 4e6


@pytest.mark.parametrize("bomb", ["packed", "unpacked"])
def test_a_huge_file_takes_no_memory(course, bomb):
    fill(course, PACKED)
    (course / f"{TRAIN_IMAGES}.gz").unlink()
    if bomb == "packed":  # 64 MiB of zeros, in a file that is small enough to pass
        content = gzip.compress(PLAIN[TRAIN_IMAGES][:16] + bytes(2**26), 9)
        assert len(content) < data.LONGEST
        (course / f"{TRAIN_IMAGES}.gz").write_bytes(content)
        del content
    else:
        with open(course / TRAIN_IMAGES, "wb") as stream:
            stream.truncate(2**36)  # 64 GiB, none of it on disk
    message, peak = peak_memory(refusal)
    assert f"{TRAIN_IMAGES}: should have 47,056 bytes" in message
    assert "has over 47,056 that begin" in message
    assert peak < 4e6


@pytest.mark.parametrize("folder, fault", [
    (None, "COURSE_DATA is not set"),
    ("", "COURSE_DATA is empty"),
    ("/not/there", "COURSE_DATA=/not/there does not exist"),
    ("~/not there", "COURSE_DATA=~/not there does not exist"),
    ("a file", "COURSE_DATA=a file is not a folder"),
    ("a file/below", "COURSE_DATA=a file/below does not exist"),
    ("empty", f"COURSE_DATA=empty has no mnist/{TRAIN_IMAGES}.gz"),
    ("x" * 5000, f"COURSE_DATA={'x' * 5000} can't be used: File name too long"),
])
def test_course_data_that_leads_nowhere_is_named(folder, fault, tmp_path, monkeypatch, capsys):
    (tmp_path / "a file").write_text("")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    if folder is not None:
        monkeypatch.setenv("COURSE_DATA", folder)
    assert refusal().splitlines()[1] == f"  {fault}"
    load_data("mnist")
    assert capsys.readouterr().out == (
        f"mnist can't be had here ({fault}; COURSE_OFFLINE=1 allows no download), "
        "so these are scikit-learn's digits.\n")


def test_course_data_that_may_not_be_read_is_named(course):
    """Root may read everything, so it is somebody else here."""
    fill(course, PACKED)
    course.parent.chmod(0o000)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65_534)
        assert f"COURSE_DATA={course.parent} can't be used: Permission denied" in refusal()
    finally:
        os.seteuid(user)
        course.parent.chmod(0o700)


@pytest.mark.parametrize("folder", [None, "", "/not/there"])
def test_another_place_than_the_one_that_was_named_is_told(folder, cache, monkeypatch, capsys):
    fill(cache, PACKED)
    if folder is not None:
        monkeypatch.setenv("COURSE_DATA", folder)
    check(load_data("mnist"), "the cache")
    line = "COURSE_DATA=/not/there does not exist; mnist is from the cache\n"
    assert capsys.readouterr().out == (line if folder else "")


# From the cache.


def test_cache(cache):
    fill(cache, PACKED)
    check(load_data("mnist"), "the cache")


def test_cache_is_below_home_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fill(tmp_path / ".cache" / "many-devices" / "mnist", PACKED)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    check(load_data("mnist"), "the cache")


@pytest.mark.parametrize("content", [b"", PACKED[TEST_LABELS][:20], PACKED[TRAIN_LABELS]])
def test_damaged_cache_file_is_set_aside_and_fetched_again(cache, mirrored, content):
    fill(cache, PACKED | {TEST_LABELS: content})
    words = f"damaged, moving to {TEST_LABELS}.gz.corrupt: the cache, {cache}/{TEST_LABELS}.gz: "
    with pytest.warns(UserWarning, match=words) as caught:
        check(load_data("mnist"), "a download")
    assert [w.filename for w in caught] == [__file__]
    assert mirrored.paths == [f"/a/{TEST_LABELS}.gz"]
    assert (cache / f"{TEST_LABELS}.gz.corrupt").read_bytes() == content
    assert names_below(cache) == sorted([*PACKED_NAMES, f"{TEST_LABELS}.gz.corrupt"])
    check(load_data("mnist"), "the cache")


# Where it is, for those who only look.


def test_who_only_looks_changes_nothing(course, cache, mirrored):
    fill(cache, PACKED | {TEST_LABELS: b"damaged"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place, (folder, ours) = data.find_mnist()
        assert place is None and folder == f"COURSE_DATA={course.parent} has no mnist/{NAMES[0]}.gz"
        assert ours.startswith(f"the cache, {cache}/{TEST_LABELS}.gz: {TEST_LABELS}: should have")
        assert names_below(cache) == PACKED_NAMES and mirrored.connections == 0
        fill(cache, PACKED)
        assert data.find_mnist() == ("the cache", [folder])
        fill(course, PACKED)
        assert data.find_mnist() == ("COURSE_DATA", [])


# From a mirror.


def test_download(cache, mirrored, capsys):
    check(load_data("mnist", fallback=False), "a download")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(f"{file}.gz" in shown.err for file in NAMES) and "100%" in shown.err
    assert names_below(cache) == PACKED_NAMES
    for file in NAMES:
        assert gzip.decompress((cache / f"{file}.gz").read_bytes()) == PLAIN[file]
    assert sorted(mirrored.paths) == sorted(f"/a/{file}.gz" for file in NAMES)
    check(load_data("mnist"), "the cache")
    assert len(mirrored.paths) == 4


def other(file):
    return gzip.compress(flip_last_byte(PLAIN[file]))


@pytest.mark.parametrize("fault", ["wrong sum", "broken off", "too long", "404", "refused"])
def test_a_bad_mirror_then_a_good_one(fault, cache, server, monkeypatch):
    bad = server.put("bad", {file: other(file) for file in NAMES})
    if fault == "broken off":
        server.put("bad", {file: PACKED[file][:-9] for file in NAMES})
        server.claim = {f"/bad/{file}.gz": len(PACKED[file]) for file in NAMES}
    elif fault == "too long":
        server.put("bad", dict.fromkeys(NAMES, bytes(1_000_000)))
    elif fault == "404":
        bad = server.url("nothing-here")
    elif fault == "refused":
        bad = closed_port()
    good = server.put("good", PACKED)
    monkeypatch.setattr(data, "MIRRORS", [bad, good])
    check(load_data("mnist", fallback=False), "a download")
    assert names_below(cache) == PACKED_NAMES


def test_every_mirror_bad_is_a_reason_each(cache, server, monkeypatch):
    bad = [
        server.put("wrong", {file: other(file) for file in NAMES}),
        server.put("cut", {file: PACKED[file][:-9] for file in NAMES}),
        server.put("broken", {file: PACKED[file][:-9] for file in NAMES}),
        server.put("long", dict.fromkeys(NAMES, bytes(1_000_000))),
        server.url("nothing-here"),
        closed_port(),
    ]
    server.claim = {f"/broken/{TRAIN_IMAGES}.gz": len(PACKED[TRAIN_IMAGES])}
    monkeypatch.setattr(data, "MIRRORS", bad)
    message = refusal()
    assert all(mirror in message for mirror in bad)
    for reason in (
        "not the published sum",
        "has 47,",
        "that begin with 00000000",
        "404",
        "Connection refused",
    ):
        assert reason in message
    assert names_below(cache) == ["download-failed"]


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def test_a_silent_mirror_is_given_up(server, monkeypatch):
    monkeypatch.setattr(data._get, "__defaults__", (0.3,))
    monkeypatch.setattr(data, "MIRRORS", [server.put("a", PACKED)])
    release = threading.Event()
    server.before = lambda path: release.wait(20)
    try:
        assert "timed out" in refusal()
    finally:
        release.set()


def test_two_processes_at_once(cache, mirrored, tmp_path):
    """Neither gets its first file before both have asked for it; then both write the cache."""
    both = threading.Barrier(2)

    def hold(path):
        if TRAIN_IMAGES in path:
            both.wait(60)

    mirrored.before = hold
    (tmp_path / "table.json").write_text(json.dumps([data.FILES, data.MIRRORS, data.SUMS]))
    script = (
        "import json, sys; from helpers import data; "
        "data.FILES, data.MIRRORS, data.SUMS = json.load(open(sys.argv[1])); "
        "print(data.load_data('mnist', fallback=False))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "table.json")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for run in runs:
        out, err = run.communicate(timeout=90)
        assert run.returncode == 0, err
        assert out == "Data: mnist, 60 training and 20 test images, from a download\n"
    assert mirrored.paths.count(f"/a/{TRAIN_IMAGES}.gz") == 2
    assert names_below(cache) == PACKED_NAMES
    check(load_data("mnist"), "the cache")


def test_no_two_writers_share_a_temporary_name(cache, mirrored, monkeypatch):
    """Nor do two in one process: two threads, or a process on another machine with our id."""
    used, replace = [], os.replace
    monkeypatch.setattr(data.os, "replace", lambda a, b: (used.append(str(a)), replace(a, b)))
    for _ in range(2):
        load_data("mnist", fallback=False)
        for path in cache.iterdir():
            path.unlink()
    assert len(used) == len(set(used)) == 8


# A cache that can't be written.


def test_cache_below_a_plain_file(mirrored, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="no writing to the cache .Not a directory") as caught:
        check(load_data("mnist"), "a download")
    # one for each file, but the same text for the same line: Python shows it once
    assert len({(str(w.message), w.filename, w.lineno) for w in caught}) == 1
    assert caught[0].filename == __file__
    assert names_below(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_disk_full(mirrored, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
        trouble = done.stderr.strip() if done.returncode else None
    except OSError as error:
        trouble = str(error)
    if trouble:
        pytest.skip(f"needs the right to mount a small disk: {trouble}")
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
        with pytest.warns(UserWarning, match="no writing to the cache .No space left on device"):
            check(load_data("mnist"), "a download")
        # the small files fit, the big one doesn't, and nothing half-written stays behind
        assert names_below(disk) == sorted(f"{f}.gz" for f in (TRAIN_LABELS, TEST_IMAGES,
                                                               TEST_LABELS))  # fmt: skip
        assert all(gzip.decompress(p.read_bytes()) for p in disk.rglob("*.gz"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_interrupt_leaves_no_file_behind(cache, mirrored, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(data.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_data("mnist")
    assert list(cache.iterdir()) == []


# No network, and what is remembered of it.


def test_offline_makes_no_connection(mirrored, monkeypatch):
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    assert "COURSE_OFFLINE=1 allows no download" in refusal()
    assert mirrored.connections == 0


@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_offline_is_1_or_0(value, mirrored, monkeypatch):
    monkeypatch.setenv("COURSE_OFFLINE", value)
    with pytest.raises(ValueError, match=f"COURSE_OFFLINE={value}: must be 1 or 0"):
        load_data("mnist")
    assert mirrored.connections == 0


def test_offline_0_means_no(mirrored, monkeypatch):
    monkeypatch.setenv("COURSE_OFFLINE", "0")
    assert load_data("mnist").source == "a download"


def test_failure_is_remembered(cache, server, monkeypatch, capsys):
    monkeypatch.setattr(data, "MIRRORS", [server.url("a"), server.url("b")])
    assert "404" in refusal()
    assert server.connections == 2
    assert "404" in refusal()
    assert load_data("mnist").name == "digits"
    assert "the download failed less than an hour ago)" in capsys.readouterr().out
    assert server.connections == 2
    assert names_below(cache) == ["download-failed"]
    assert "404" in (cache / "download-failed").read_text()


@pytest.mark.parametrize("how", ["an hour passes", "note deleted"])
def test_failure_is_forgotten(how, cache, server, monkeypatch):
    monkeypatch.setattr(data, "MIRRORS", [server.url("a")])
    assert "404" in refusal()
    note = cache / "download-failed"
    server.put("a", PACKED)
    assert f"less than an hour ago\n    to try again now, delete {note}\n" in refusal()
    if how == "note deleted":
        note.unlink()
    else:
        os.utime(note, times=(time.time() - 3601,) * 2)
    check(load_data("mnist", fallback=False), "a download")


# Falling back, or not.


def test_fallback_is_told_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(data, "MIRRORS", [closed_port()])
    dataset = load_data("mnist")
    assert capsys.readouterr().out == (
        "mnist can't be had here (COURSE_DATA is not set; the download failed), "
        "so these are scikit-learn's digits.\n")
    assert (dataset.name, dataset.source) == ("digits", "scikit-learn")
    assert len(dataset.train_images) == 1437


def test_without_fallback_every_place_is_listed(course, cache, monkeypatch, capsys):
    port = closed_port()
    monkeypatch.setattr(data, "MIRRORS", [port])
    fill(course, {TRAIN_IMAGES: b"damaged"})
    message = refusal()
    assert capsys.readouterr().out == ""
    assert issubclass(DataUnavailable, RuntimeError)
    lines = message.splitlines()
    assert lines[0] == "mnist can't be had here." and len(lines) == 5
    for line, beginning, reason in zip(lines[1:], (
            f"  COURSE_DATA={course.parent} can't be used: {TRAIN_IMAGES}",
            f"  the cache, {cache}", "  the download failed", f"    {port}: <urlopen error"), (
            "has 7 that begin", "No such file", "", "Connection refused"), strict=True):
        assert line.startswith(beginning) and reason in line


# Arguments.


@pytest.mark.parametrize("limit, counts", [
    (1, (1, 1)), (20, (20, 20)), (45, (45, 20)), (60, (60, 20)), (10**12, (60, 20)),
    (np.int64(7), (7, 7)), (None, (60, 20)),
])  # fmt: skip
def test_limit(limit, counts, course):
    fill(course, PACKED)
    some = load_data("mnist", limit=limit)
    assert (len(some.train_images), len(some.test_images)) == counts
    cut = {file: array[: counts["t10k" in file]] for file, array in ARRAYS.items()}
    check(some, "COURSE_DATA", arrays=cut)


def test_limit_of_digits():
    every, some = load_data("digits"), load_data("digits", limit=500)
    np.testing.assert_array_equal(some.train_images, every.train_images[:500])
    np.testing.assert_array_equal(some.train_labels, every.train_labels[:500])
    np.testing.assert_array_equal(some.test_images, every.test_images)


@pytest.mark.parametrize("name", ["mnist", "digits"])
@pytest.mark.parametrize("limit, error", [
    (0, ValueError), (-3, ValueError), (True, TypeError), (False, TypeError), ("2", TypeError),
    (2.0, TypeError), ([2], TypeError),
])  # fmt: skip
def test_bad_limit(name, limit, error):
    with pytest.raises(error) as caught:
        load_data(name, limit=limit)
    message = str(caught.value)
    assert f"limit={limit!r}" in message
    assert ("at least 1" if error is ValueError else "whole number") in message


@pytest.mark.parametrize("name", ["cifar", "MNIST", "", None, 3, ["mnist"]])
def test_unknown_name(name):
    with pytest.raises(ValueError) as caught:
        load_data(name)
    assert "must be mnist or digits" in str(caught.value) and repr(name) in str(caught.value)


# The digits, against scikit-learn's.


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    ours = load_data("digits")
    assert (ours.name, ours.source) == ("digits", "scikit-learn")
    assert ours.train_images.shape == (1437, 1, 28, 28)
    assert ours.test_images.shape == (360, 1, 28, 28)
    for images, labels in (
        (ours.train_images, ours.train_labels),
        (ours.test_images, ours.test_labels),
    ):
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        assert labels.shape == images.shape[:1]
        assert images.min() == 0 and images.max() == 1
        assert not images[:, :, [0, 1, 26, 27]].any() and not images[..., [0, 1, 26, 27]].any()
        assert len(set(labels)) == 10
    # Every image with its label is there exactly once: so the two parts are disjoint, too.
    mine = collections.Counter()
    for images, labels in (
        (ours.train_images, ours.train_labels),
        (ours.test_images, ours.test_labels),
    ):
        for shift in range(3):  # each pixel is the whole of its 3 x 3 block
            small = images[:, 0, 2 + shift : 26 : 3, 2 + shift : 26 : 3] * 16
            mine.update(
                (shift, s.astype(int).tobytes(), int(n)) for s, n in zip(small, labels, strict=True)
            )
    expected = collections.Counter(
        (shift, s.astype(int).tobytes(), int(n))
        for s, n in zip(theirs.images, theirs.target, strict=True)
        for shift in range(3)
    )
    assert mine == expected


def test_digits_are_split_the_same_way_each_time_and_mixed():
    np.random.seed(1)
    one = load_data("digits")
    np.random.seed(2)
    state = np.random.get_state()[1].copy()
    two = load_data("digits")
    assert (np.random.get_state()[1] == state).all(), "the caller's random numbers were touched"
    for a, b in zip(one[:4], two[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.train_labels[:10], np.arange(10)), "still in their first order"


def test_digits_need_no_place_at_all(mirrored, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_data("digits", fallback=False)
    assert mirrored.connections == 0 and capsys.readouterr().out == ""


# The published set.


def test_published_tables():
    shapes, mirrors, sums = PUBLISHED
    assert tuple(shapes) == NAMES
    assert list(shapes.values()) == [(60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,)]
    assert len(mirrors) >= 2
    assert [len(bytes.fromhex(s)) for s in sums] == [32] * 4 and len(set(sums)) == 4
    assert LONGEST > 16 + 60_000 * 28 * 28


@pytest.mark.skipif(not USERS_FOLDER, reason="needs the real MNIST: set COURSE_DATA to its folder")
def test_real_mnist(monkeypatch):
    monkeypatch.setattr(data, "FILES", PUBLISHED[0])
    monkeypatch.setattr(data, "SUMS", PUBLISHED[2])
    monkeypatch.setattr(data, "LONGEST", LONGEST)
    monkeypatch.setenv("COURSE_DATA", USERS_FOLDER)
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    mnist = load_data("mnist", fallback=False)
    assert str(mnist) == "Data: mnist, 60,000 training and 10,000 test images, from COURSE_DATA"
    assert mnist.train_images.shape == (60_000, 1, 28, 28)
    assert mnist.test_images.shape == (10_000, 1, 28, 28)
    assert mnist.train_images.min() == 0 and mnist.train_images.max() == 1
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(mnist.train_labels).tolist() == counts
    assert np.bincount(mnist.test_labels).sum() == 10_000
    assert mnist.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert round(float(mnist.train_images.mean()), 4) == 0.1307  # the figure everyone normalises by
    assert round(float(mnist.train_images.std()), 4) == 0.3081


def test_no_mxnet_is_imported():
    script = "import sys, helpers.data; sys.exit('mxnet' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0
