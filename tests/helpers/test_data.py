"""`load_data` against things it did not make: IDX files written here, a web server, scikit-learn.

A small set of 60 and 20 images stands in for the published one; no test needs a network.
"""

import collections
import gzip
import hashlib
import http.server
import os
import re
import socket
import struct
import threading
import time
import tracemalloc
import warnings

import numpy as np
import pytest

from helpers import data
from helpers.data import DataUnavailable, load_data

USERS_FOLDER = os.environ.get("COURSE_DATA")
PUBLISHED = {"FILES": data.FILES, "SUMS": data.SUMS, "LONGEST": data.LONGEST}
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


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


PACKED_NAMES = sorted(f"{file}.gz" for file in NAMES)


# From COURSE_DATA.


@pytest.mark.parametrize(("place", "files", "suffix"), [("mnist", PACKED, ".gz"), (".", PLAIN, "")])
def test_course_data(course, place, files, suffix):
    fill(course.parent / place, files, suffix)
    found = load_data("mnist", fallback=False)
    check(found, "COURSE_DATA")
    assert str(found) == "Data: mnist, 60 training and 20 test images, from COURSE_DATA"


def flip_last_byte(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(("file", "suffix", "content", "reason"), [
    (TRAIN_IMAGES, ".gz", PACKED[TRAIN_IMAGES][:-500], "has 46,"),
    (TRAIN_IMAGES, ".gz", PACKED[TRAIN_IMAGES][:10] + b"\xff" * 40, "not a whole"),
    (TRAIN_IMAGES, ".gz", b"<html>No such page</html>", "has 25 that begin with 3c68746d"),
    (TRAIN_IMAGES, "", flip_last_byte(PLAIN[TRAIN_IMAGES]), "not the published sum"),
    (TEST_LABELS, ".gz", gzip.compress(flip_last_byte(PLAIN[TEST_LABELS])), "not the published"),
    (TRAIN_LABELS, "", PLAIN[TRAIN_LABELS] + b"0", "should have 68 bytes"),
    (TRAIN_LABELS, "", idx(ARRAYS[TRAIN_LABELS][1:]), "has 67 that begin with 000008010000003b"),
], ids=["cut", "broken", "not gzip", "sum", "sum, packed", "too many", "too few"])
def test_damage_in_course_data_is_named_and_left_alone(file, suffix, content, reason, course,
                                                       cache, capsys):
    fill(course, PACKED)
    (course / f"{file}.gz").unlink()
    (course / (file + suffix)).write_bytes(content)
    message = refusal()
    assert f"COURSE_DATA={course.parent} can't be used: {file}: " in message and reason in message
    assert (course / (file + suffix)).read_bytes() == content and len(names_below(course)) == 4
    assert load_data("mnist").name == "digits"
    assert reason in capsys.readouterr().out
    fill(cache, PACKED)
    check(load_data("mnist"), "the cache")
    assert capsys.readouterr().out.endswith("; mnist is from the cache\n")


@pytest.mark.parametrize("bomb", ["packed", "unpacked"])
def test_a_huge_file_takes_no_memory(course, bomb):
    fill(course, PACKED)
    (course / f"{TRAIN_IMAGES}.gz").unlink()
    if bomb == "packed":  # 32 MiB of zeros, in a file that is small enough to pass
        content = gzip.compress(PLAIN[TRAIN_IMAGES][:16] + bytes(2**25), 9)
        assert len(content) < data.LONGEST
        (course / f"{TRAIN_IMAGES}.gz").write_bytes(content)
        del content
    else:
        with open(course / TRAIN_IMAGES, "wb") as stream:
            stream.truncate(2**36)  # 64 GiB, none of it on disk
    tracemalloc.start()
    try:
        assert "has over 47,056 that begin" in refusal()
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("folder, fault", [
    (None, "COURSE_DATA is not set"),
    ("", "COURSE_DATA is empty"),
    ("~/not there", "COURSE_DATA=~/not there does not exist"),
    ("empty", f"COURSE_DATA=empty has no mnist/{TRAIN_IMAGES}.gz"),
    ("x" * 5000, f"COURSE_DATA={'x' * 5000} can't be used: File name too long"),
])
def test_course_data_that_leads_nowhere_is_named(folder, fault, tmp_path, monkeypatch, capsys):
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


# From the cache.


def test_cache_is_below_home_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fill(tmp_path / ".cache" / "many-devices" / "mnist", PACKED)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    check(load_data("mnist"), "the cache")


@pytest.mark.parametrize("content", [b"", PACKED[TRAIN_LABELS]])
def test_damaged_cache_file_is_set_aside_and_fetched_again(cache, mirrored, content):
    fill(cache, PACKED | {TEST_LABELS: content})
    words = f"damaged, moving to {TEST_LABELS}.gz.corrupt: the cache, {cache}/{TEST_LABELS}.gz: "
    with pytest.warns(UserWarning, match=words) as caught:
        check(load_data("mnist"), "a download")
    assert [w.filename for w in caught] == [__file__], "the line that called load_data"
    assert mirrored.paths == [f"/a/{TEST_LABELS}.gz"]
    assert (cache / f"{TEST_LABELS}.gz.corrupt").read_bytes() == content
    check(load_data("mnist"), "the cache")


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
    assert shown.out == "" and all(f"{file}.gz" in shown.err for file in NAMES)
    assert names_below(cache) == PACKED_NAMES
    assert sorted(mirrored.paths) == sorted(f"/a/{file}.gz" for file in NAMES)
    check(load_data("mnist"), "the cache")
    assert len(mirrored.paths) == 4


def test_bad_mirrors_have_a_reason_each_and_a_good_one_after_them_is_used(cache, server,
                                                                         monkeypatch):
    reasons = {
        server.put("wrong", {file: gzip.compress(flip_last_byte(PLAIN[file])) for file in NAMES}):
            "not the published sum",
        server.put("broken", {file: PACKED[file][:-900] for file in NAMES}): "has 46,",
        server.put("long", dict.fromkeys(NAMES, bytes(1_000_000))): "that begin with 00000000",
        server.url("nothing-here"): "404",
        closed_port(): "Connection refused"}
    server.claim = {f"/broken/{TRAIN_IMAGES}.gz": len(PACKED[TRAIN_IMAGES])}
    monkeypatch.setattr(data, "MIRRORS", list(reasons))
    message = refusal()
    for line, (mirror, reason) in zip(message.splitlines()[-5:], reasons.items()):
        assert mirror in line and reason in line
    assert names_below(cache) == ["download-failed"]
    (cache / "download-failed").unlink()
    monkeypatch.setattr(data, "MIRRORS", [*reasons, server.put("good", PACKED)])
    check(load_data("mnist", fallback=False), "a download")
    assert names_below(cache) == PACKED_NAMES


def test_a_silent_mirror_is_given_up(server, monkeypatch):
    monkeypatch.setattr(data._get, "__defaults__", (0.3,))
    monkeypatch.setattr(data, "MIRRORS", [server.put("a", PACKED)])
    release = threading.Event()
    server.before = lambda path: release.wait(60)
    try:
        assert "timed out" in refusal()
    finally:
        release.set()


def test_two_at_once(cache, mirrored):
    """Neither gets its first file before both have asked for it; then both write the cache."""
    both, found = threading.Barrier(2), []
    mirrored.before = lambda path: both.wait(60) if TRAIN_IMAGES in path else None
    threads = [threading.Thread(target=lambda: found.append(load_data("mnist", fallback=False)))
               for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        check(each, "a download")
    assert mirrored.paths.count(f"/a/{TRAIN_IMAGES}.gz") == len(found) == 2
    assert names_below(cache) == PACKED_NAMES


def test_a_cache_that_can_not_be_written_is_told_once(mirrored, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="no writing to the cache .Not a directory") as caught:
        check(load_data("mnist"), "a download")
    assert [w.filename for w in caught] == [__file__]
    assert names_below(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_interrupt_leaves_no_file_behind(cache, mirrored, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(data.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_data("mnist")
    assert list(cache.iterdir()) == []


# No network, and what is remembered of it.


def test_offline_makes_no_connection_and_is_1_or_0(mirrored, monkeypatch):
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    assert "COURSE_OFFLINE=1 allows no download" in refusal()
    monkeypatch.setenv("COURSE_OFFLINE", "yes")
    with pytest.raises(ValueError, match="COURSE_OFFLINE=yes: must be 1 or 0"):
        load_data("mnist")
    assert mirrored.connections == 0
    monkeypatch.setenv("COURSE_OFFLINE", "0")
    assert load_data("mnist").source == "a download"


@pytest.mark.parametrize("how", ["an hour passes", "note deleted", "a certificate is named"])
def test_a_failure_is_remembered_for_an_hour(how, cache, server, monkeypatch, capsys):
    monkeypatch.setattr(data, "MIRRORS", [server.url("a")])
    note = cache / "download-failed"
    assert "404" in refusal() and "404" in note.read_text()
    server.put("a", PACKED)
    message = refusal()
    assert f"    to try again now, delete {note}\n" in message
    assert "404" in message and load_data("mnist").name == "digits"
    assert re.search(r"\(.*failed less than an hour ago: http\S+: .*404.*\)",
                     capsys.readouterr().out), "the cause is in the brackets"
    assert server.connections == 1
    if how == "note deleted":
        note.unlink()
    elif how == "a certificate is named":
        monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/proxy.pem")
    else:
        os.utime(note, times=(time.time() - 3601,) * 2)
    check(load_data("mnist", fallback=False), "a download")


# Falling back, or not.


def test_fallback_is_told_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(data, "MIRRORS", [mirror := closed_port()])
    dataset = load_data("mnist")
    said = capsys.readouterr().out
    assert said.startswith("mnist can't be had here (COURSE_DATA is not set; the download failed: "
                           f"{mirror}")
    assert "Connection refused" in said and said.count("\n") == 1
    assert (dataset.name, dataset.source) == ("digits", "scikit-learn")
    assert len(dataset.train_images) == 1437


# Arguments.


@pytest.mark.parametrize("limit, counts", [
    (1, (1, 1)), (45, (45, 20)), (10**12, (60, 20)), (np.int64(7), (7, 7)), (None, (60, 20))])
def test_limit(limit, counts, course):
    fill(course, PACKED)
    some = load_data("mnist", limit=limit)
    assert (len(some.train_images), len(some.test_images)) == counts
    cut = {file: array[: counts["t10k" in file]] for file, array in ARRAYS.items()}
    check(some, "COURSE_DATA", arrays=cut)


@pytest.mark.parametrize("arguments, error, words", [
    ({"limit": 0}, ValueError, "limit=0.* at least 1"),
    ({"limit": True}, TypeError, "limit=True.*whole number"),
    ({"limit": 2.0}, TypeError, "limit=2.0.*whole number"),
    ({"name": "MNIST"}, ValueError, "name='MNIST'.*must be mnist or digits")])
def test_what_does_not_fit_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        load_data(**arguments)


# The digits, against scikit-learn's.


def test_digits_are_scikit_learns_always_split_alike_and_need_no_place(mirrored, capsys):
    from sklearn.datasets import load_digits

    theirs = load_digits()
    np.random.seed(2)
    state = np.random.get_state()[1].copy()
    ours = load_data("digits", fallback=False)
    assert (np.random.get_state()[1] == state).all(), "the caller's random numbers were touched"
    assert (len(ours.train_images), len(ours.test_images)) == (1437, 360)
    images = np.concatenate([ours.train_images, ours.test_images])
    labels = np.concatenate([ours.train_labels, ours.test_labels])
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    small = images[:, 0, 2:26:3, 2:26:3]
    blocks = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    assert np.array_equal(images[:, 0], blocks), "each pixel is a block of 3 x 3 in a border of 2"
    # Every image with its label is there exactly once: so the two parts are disjoint, too.
    assert collections.Counter(
        ((16 * a).astype(int).tobytes(), int(n)) for a, n in zip(small, labels, strict=True)
    ) == collections.Counter(
        (a.astype(int).tobytes(), int(n)) for a, n in zip(theirs.images, theirs.target))
    assert not np.array_equal(ours.train_labels[:10], np.arange(10)), "still in their first order"
    some = load_data("digits", limit=500)
    assert np.array_equal(some.train_images, ours.train_images[:500])
    assert len(some.test_images) == 360
    assert mirrored.connections == 0 and capsys.readouterr().out == ""


@pytest.mark.skipif(not USERS_FOLDER, reason="needs the real MNIST: set COURSE_DATA to its folder")
def test_real_mnist(monkeypatch):
    for name, value in PUBLISHED.items():
        monkeypatch.setattr(data, name, value)
    monkeypatch.setenv("COURSE_DATA", USERS_FOLDER)
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    mnist = load_data("mnist", fallback=False)
    assert mnist.train_images.shape == (60_000, 1, 28, 28) and len(mnist.test_images) == 10_000
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(mnist.train_labels).tolist() == counts
    assert round(float(mnist.train_images.mean()), 4) == 0.1307  # the figure everyone normalises by
    assert round(float(mnist.train_images.std()), 4) == 0.3081
