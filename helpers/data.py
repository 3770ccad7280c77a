"""Images and labels for the chapters: MNIST, or scikit-learn's small digits.

    data = load_data("mnist")
    print(data)             # Data: mnist, 60,000 training and 10,000 test images, from the cache
    data.train_images       # float32 [60000, 1, 28, 28], from 0 to 1

MNIST is four IDX files. They are looked for in three places, in order: the folder that the
variable COURSE_DATA names, this user's cache, and public mirrors. Whatever is found is checked
before it is used. Where no place has them, `load_data` says so in a sentence and hands out the
digits that come with scikit-learn: real handwriting too, and no network needed.
`load_data("mnist", fallback=False)` tells all about each place.

COURSE_OFFLINE=1 asks for no network at all. This module does not import MXNet.
"""

import contextlib
import hashlib
import http.client
import os
import tempfile
import time
import urllib.request
import warnings
import zlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from helpers.engine import is_on

# The shape of each file's values, in the order of Dataset's first four fields.
FILES = {
    "train-images-idx3-ubyte": (60_000, 28, 28), "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28), "t10k-labels-idx1-ubyte": (10_000,),
}  # fmt: skip
MIRRORS = ["https://ossci-datasets.s3.amazonaws.com/mnist/",
           "https://storage.googleapis.com/cvdf-datasets/mnist/"]
# SHA-256 of the published contents once unpacked, in the order of FILES.
SUMS = ["ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"]

# Variables that say how to reach the network: behind a proxy, or with a certificate of its own.
NETWORK = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY",
           "SSL_CERT_FILE", "SSL_CERT_DIR")
LONGEST = 2**26  # bytes; every file of MNIST is shorter, packed or not: no more is ever read


class DataUnavailable(RuntimeError):
    """No place has MNIST; the message lists each place and why."""


class Dataset(NamedTuple):
    """Images float32 `[n, 1, 28, 28]` from 0 to 1, labels int32 `[n]` from 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    name: str
    source: str

    def __str__(self):
        sizes = f"{len(self.train_images):,} training and {len(self.test_images):,} test images"
        return f"Data: {self.name}, {sizes}, from {self.source}"


def load_data(name="mnist", limit=None, fallback=True):
    """The data set "mnist" or "digits" as NumPy arrays in a `Dataset`.

    With a `limit`, the first `limit` training images and at most `limit` test images.
    Where MNIST can't be had: prints a sentence and returns "digits", or with `fallback=False`
    raises DataUnavailable. `.name` and `.source` say what it was in the end. A download that failed
    is tried again after an hour, once a variable of NETWORK has changed, or once the file
    `download-failed` in the cache is deleted.

    Raises ValueError for another name, a limit below 1, or a COURSE_OFFLINE that is neither 1 nor
    0, TypeError for a limit that is not a whole number. Warns where the cache holds a damaged file
    or can't be written.
    """
    if name not in ("mnist", "digits"):
        raise ValueError(f"load_data(name={name!r}): name must be mnist or digits")
    if isinstance(limit, bool) or not isinstance(limit, int | np.integer | None):
        raise TypeError(f"load_data(limit={limit!r}): limit must be a whole number or None")
    if limit is not None and limit < 1:
        raise ValueError(f"load_data(limit={limit}): limit must be at least 1, or None for all")
    if name == "digits":
        return _dataset(_digits(), 16, limit, name, "scikit-learn")
    is_on("COURSE_OFFLINE")  # here: a place's ValueError would only make us try the next one
    troubles = []  # told here, where each warning can point at the line that called us
    arrays, place, reasons = _search({
        "COURSE_DATA": _from_course_data,
        "the cache": partial(_from_cache, tell=troubles.append),
        "a download": partial(_from_download, tell=troubles.append)})
    for trouble in dict.fromkeys(troubles):  # a cache that can't be written is one for all files
        warnings.warn(trouble, stacklevel=2)
    if arrays:
        if reasons and os.getenv("COURSE_DATA"):  # whoever set it expects it to be used
            print(f"{reasons[0]}; mnist is from {place}")
        return _dataset(arrays, 255, limit, name, place)
    if not fallback:
        raise DataUnavailable("\n  ".join(["mnist can't be had here.", *reasons]))
    folder, _, download = (reason.split("\n")[0] for reason in reasons)
    print(f"mnist can't be had here ({folder}; {download}), so these are scikit-learn's digits.")
    return load_data("digits", limit)


def find_mnist():
    """Where `load_data` would find MNIST without a download; nothing is changed on the way.

    Returns `(place, reasons)`: "COURSE_DATA", "the cache" or None, and for each place before it a
    sentence on why it isn't there.
    """
    _, place, reasons = _search({"COURSE_DATA": _from_course_data, "the cache": _look_in_cache})
    return place, reasons


def _search(places):
    """`(arrays, place, reasons)` of the first that has all files; of none: `(None, None, reasons)`.

    places: `{place: function of a file's name}`; reasons: a text for each place before.
    """
    reasons = []
    for place, read in places.items():
        try:
            return [read(file) for file in FILES], place, reasons
        except (OSError, ValueError) as error:
            reasons.append(str(error))
    return None, None, reasons


def _dataset(arrays, white, limit, name, source):
    """Four arrays, images `[n, 28, 28]` from 0 to `white`, as a Dataset."""
    images = [np.divide(a[:limit, np.newaxis], white, dtype=np.float32) for a in arrays[::2]]
    labels = [a[:limit].astype(np.int32) for a in arrays[1::2]]
    return Dataset(images[0], labels[0], images[1], labels[1], name, source)


def _digits():
    """scikit-learn's 1,797 digits: 1,437 for training, 360 for test, always the same ones.

    Each of the 8 x 8 pixels becomes a block of 3 x 3, and a border of 2 makes 28 x 28. No value
    is invented on the way: `images[:, 0, 2:26:3, 2:26:3] * 16` is scikit-learn's array again.
    """
    from sklearn.datasets import load_digits  # slow to import, and seldom needed

    small, labels = load_digits(return_X_y=True)
    images = small.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    # RandomState's stream is frozen for all versions of NumPy; that of default_rng is not.
    train, test = np.split(np.random.RandomState(0).permutation(len(images)), [1437])
    return images[train], labels[train], images[test], labels[test]


# The three places. Each returns the values of one file. Where it doesn't have the file it raises
# OSError; where it has another than the published one, ValueError. The message says which place it
# is and, in its first line, why. `tell` takes a text that the caller is to be warned with.


def _from_course_data(file):
    """The folder is the user's: nothing in it is changed, whatever state it is in."""
    folder = os.getenv("COURSE_DATA")
    if not folder:
        raise FileNotFoundError(f"COURSE_DATA is {'not set' if folder is None else 'empty'}")
    root = Path(os.path.expanduser(folder))
    try:
        for path in (f"mnist/{file}.gz", f"mnist/{file}", f"{file}.gz", file):
            if (root / path).is_file():
                return _read(root / path, file)
        fault = (f"has no mnist/{file}.gz" if root.is_dir() else
                 "is not a folder" if root.exists() else "does not exist")
    except (OSError, ValueError) as error:
        fault = f"can't be used: {_why(error)}"
    raise FileNotFoundError(f"COURSE_DATA={folder} {fault}")


def _look_in_cache(file):
    path = _cache() / f"{file}.gz"
    try:
        return _read(path, file)
    except OSError as error:
        raise OSError(f"the cache, {path}: {_why(error)}") from error
    except ValueError as error:
        raise ValueError(f"the cache, {path}: {error}") from error


def _from_cache(file, tell):
    """A damaged file is set aside, not deleted: someone may want to know what went wrong."""
    try:
        return _look_in_cache(file)
    except ValueError as error:
        path = _cache() / f"{file}.gz"
        tell(f"damaged, moving to {path.name}.corrupt: {error}")
        os.replace(path, f"{path}.corrupt")
        raise


def _from_download(file, tell):
    if is_on("COURSE_OFFLINE"):
        raise ConnectionError("COURSE_OFFLINE=1 allows no download")
    # An earlier attempt, or another process, may have left this one in the cache already.
    with contextlib.suppress(OSError, ValueError):
        return _from_cache(file, tell)
    note = _cache() / "download-failed"
    if reason := _remembered(note):
        first = reason.partition("\n")[0]
        raise ConnectionError(f"the download failed less than an hour ago: {first}\n"
                              f"    to try again now, delete {note}\n    {reason}")
    reasons = []
    for mirror in MIRRORS:
        try:
            packed = _get(f"{mirror}{file}.gz")
            values = _checked(packed, file)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reasons.append(f"{mirror}: {_why(error)}")
            continue
        if trouble := _write(_cache() / f"{file}.gz", packed):
            tell(f"mnist is not kept: no writing to the cache ({trouble})")
        return values
    reason = "\n    ".join(reasons)
    _write(note, f"{_network()}\n{reason}".encode())
    raise ConnectionError(f"the download failed: {reason}")


def _get(url, silence=10):
    """The bytes at `url`, at most LONGEST of them, with a progress bar.

    A mirror that says nothing for `silence` seconds is given up.
    """
    with urllib.request.urlopen(url, timeout=silence) as reply:
        with tqdm.wrapattr(reply, "read", total=reply.length, desc=url.split("/")[-1]) as stream:
            # In blocks, so that the bar moves. Past the end, `read` returns b"".
            return b"".join(stream.read(65_536) for _ in range(LONGEST // 65_536))


def _cache():
    folder = os.getenv("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder, "many-devices", "mnist")


def _remembered(note):
    """Why the last download failed, if that was less than an hour ago and over this network."""
    with contextlib.suppress(OSError, ValueError):  # no note, or one that isn't text
        network, _, reason = note.read_text("utf-8").partition("\n")
        if network == _network() and 0 <= time.time() - note.stat().st_mtime < 3600:
            return reason


def _network():
    """What NETWORK's variables say, as a sum: a proxy's address may hold a password."""
    said = [os.getenv(name, "") for name in NETWORK]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _write(path, content):
    """Write a file whole or not at all; returns None, or the reason why it can't be written.

    Nobody sees half a file: it grows in a folder that no other process uses, then takes its place
    in one step. Of two processes that do so at once, the later one wins, with a whole file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
            Path(folder, "part").write_bytes(content)
            os.replace(Path(folder, "part"), path)
    except OSError as error:
        return _why(error)


def _read(path, file):
    with open(path, "rb") as stream:
        return _checked(stream.read(LONGEST), file)


def _checked(content, file):
    """The values in a file, packed or not, as a uint8 array; ValueError where they aren't right."""
    shape = FILES[file]
    # IDX begins with a magic number (8 for unsigned bytes, then how many dimensions), then these.
    header = np.array([0x800 + len(shape), *shape], ">u4").tobytes()
    size = len(header) + int(np.prod(shape))
    plain = content
    if content.startswith(b"\x1f\x8b"):  # gzip
        try:  # 31: with gzip's header. One byte more, to see that there is more than there should.
            plain = zlib.decompressobj(wbits=31).decompress(content, size + 1)
        except zlib.error as error:
            raise ValueError(f"{file}: not a whole gzip file ({error})") from error
    if len(plain) != size or not plain.startswith(header):
        has = f"over {size:,}" if len(plain) > size else f"{len(plain):,}"
        raise ValueError(f"{file}: should have {size:,} bytes that begin with {header.hex()}, "
                         f"has {has} that begin with {plain[: len(header)].hex()}")
    if dict(zip(FILES, SUMS))[file] != hashlib.sha256(plain).hexdigest():
        raise ValueError(f"{file}: not the published sum")
    return np.frombuffer(plain, np.uint8, offset=len(header)).reshape(shape)


def _why(error):
    """What went wrong, on one line, without the path that Python adds to it."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())
