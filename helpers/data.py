"""Images and labels for the chapters: MNIST, Fashion-MNIST, or scikit-learn's small digits.

    data = load_data("mnist")
    print(data)             # Data: mnist, 60,000 training and 10,000 test images, from the cache
    data.train_images       # float32 [60000, 1, 28, 28], from 0 to 1

MNIST and Fashion-MNIST are four IDX files each. They are looked for in three places, in order:
the folder that the variable COURSE_DATA names, this user's cache, and public mirrors. Whatever is
found is checked before it is used. Where no place has the set, `load_data` says so and hands out
the digits that come with scikit-learn: real handwriting too, and no network needed.

COURSE_OFFLINE=1 asks for no network at all. This module does not import MXNet.
"""

import contextlib
import gzip
import hashlib
import http.client
import io
import math
import numbers
import os
import secrets
import struct
import time
import urllib.request
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

# In the order of Dataset's first four fields. The names are the same for both sets.
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

# `sums_of` says what the published sums are of: the contents once unpacked, or the .gz file.
SETS = {
    "mnist": {
        "counts": (60_000, 10_000),  # training, test
        "mirrors": [
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ],
        "hash": "sha256",
        "sums_of": "contents",
        "sums": {
            FILES[0]: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            FILES[1]: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            FILES[2]: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            FILES[3]: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    },
    "fashion_mnist": {
        "counts": (60_000, 10_000),
        "mirrors": [
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ],
        "hash": "md5",
        "sums_of": "gz",
        "sums": {
            FILES[0]: "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            FILES[1]: "25c81989df183df01b3e8a0aad5dffbe",
            FILES[2]: "bef4ecab320f06d8554ea6380940ec79",
            FILES[3]: "bb300cfdad3c16e7a12a480ee83cd310",
        },
    },
}

SILENCE, PATIENCE = 10, 300  # seconds a mirror may say nothing; seconds one file may take in all
REMEMBER = 3600  # seconds for which a failed download is not tried again
GZIP_EXTRA = 65_536  # bytes by which packing can make a file longer, generously
_failed = {}  # name -> (time, reason) of a failed download, where the cache can't hold the note


class DataUnavailable(RuntimeError):
    """No place has the data set; the message lists each place and why."""


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
    """The data set "mnist", "fashion_mnist" or "digits" as NumPy arrays in a `Dataset`.

    With a `limit`, the first `limit` training images and at most `limit` test images.
    Where the set can't be had: prints a line and returns "digits", or with `fallback=False`
    raises DataUnavailable. `.name` and `.source` say what it was in the end.

    Raises ValueError for another name or a limit below 1, TypeError for a limit that is not a
    whole number. Warns where the cache holds a damaged file or can't be written.
    """
    known = [*SETS, "digits"]
    if name not in known:
        raise ValueError(f"load_data(name={name!r}): name must be one of {', '.join(known)}")
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, numbers.Integral):
            raise TypeError(f"load_data(limit={limit!r}): limit must be a whole number or None")
        if limit < 1:
            raise ValueError(f"load_data(limit={limit}): limit must be at least 1, or None for all")
    tried = []
    for place, read in _PLACES.items() if name != "digits" else ():
        try:
            return _dataset(read(name), 255, limit, name, place)
        except DataUnavailable as reason:
            tried.append(f"{place}: {' '.join(str(reason).split())}")
    if tried and not fallback:
        raise DataUnavailable(
            "\n  ".join([f"{name} can't be had from any of {len(tried)} places:", *tried])
            + f"\nSet COURSE_DATA to a folder with {', '.join(FILES)}, each packed (.gz) or not. "
            f"A failed download is tried again after an hour, or once {_note(name)} is deleted."
        )
    if tried:
        print(
            f"{name} can't be had here, so this is scikit-learn's digits instead. For {name}, set "
            f"COURSE_DATA to a folder with the IDX files. What was tried: {'; '.join(tried)}"
        )
    return _dataset(_digits(), 16, limit, "digits", "scikit-learn")


def _dataset(arrays, white, limit, name, source):
    """Four arrays, images `[n, 28, 28]` from 0 to `white`, as a Dataset."""
    arrays = [a[:limit] for a in arrays]  # cut before the conversion, which takes four times more
    for i in (0, 2):
        arrays[i] = arrays[i][:, np.newaxis].astype(np.float32)
        arrays[i] /= white
    for i in (1, 3):
        arrays[i] = arrays[i].astype(np.int32)
    return Dataset(*arrays, name, source)


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


# The three places. Each returns the set's four arrays, or raises DataUnavailable with the reason.


def _from_course_data(name):
    """The folder is the user's: nothing in it is changed, whatever state it is in."""
    if not os.environ.get("COURSE_DATA"):
        raise DataUnavailable("the variable is not set")
    root = Path(os.path.expanduser(os.environ["COURSE_DATA"]))
    return [_first_good(root, name, file) for file in FILES]


def _first_good(root, name, file):
    reasons = []
    for path in (f"{name}/{file}.gz", f"{name}/{file}", f"{file}.gz", file):
        try:
            return _read(root / path, name, file, users=True)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:
            reasons.append(f"{path} {_why(error)}")
    raise DataUnavailable("; ".join(reasons) or f"{root} has no {name}/{file}.gz")


def _from_cache(name):
    arrays, reasons = [], []
    for file in FILES:
        path = _cache(name) / f"{file}.gz"
        try:
            arrays.append(_read(path, name, file))
        except (OSError, ValueError) as error:
            reasons.append(f"{path.name} {_why(error)}")
            if isinstance(error, OSError):
                continue
            # Damaged. Kept, not deleted: someone may want to know what went wrong.
            done = f"set aside as {path.name}.corrupt"
            try:
                os.replace(path, f"{path}.corrupt")
            except OSError as trouble:
                done = f"and can't be set aside {_why(trouble)}"
            # stacklevel 3 points at the line that called load_data
            warnings.warn(f"in the cache, {path.name} {error}: {done}", stacklevel=3)
    if reasons:
        raise DataUnavailable(reasons[0])
    return arrays


def _from_download(name):
    if os.environ.get("COURSE_OFFLINE", "") not in ("", "0"):
        raise DataUnavailable("COURSE_OFFLINE asks for no network")
    if reason := _remembered(name):
        raise DataUnavailable(f"not tried again so soon after it failed: {reason}")
    arrays, unwritten, mirrors = [], None, list(SETS[name]["mirrors"])
    for file in FILES:
        path = _cache(name) / f"{file}.gz"
        try:  # an earlier attempt, or another process, may have left this one already
            arrays.append(_read(path, name, file))
        except (OSError, ValueError):
            packed, array = _fetch(name, file, mirrors)
            arrays.append(array)
            unwritten = _write(path, packed) or unwritten
    if unwritten:
        warnings.warn(
            f"the cache {_cache(name)} could not be written {unwritten}: {name} is here and whole, "
            "but must be downloaded again next time",
            stacklevel=3,
        )
    return arrays


_PLACES = {"COURSE_DATA": _from_course_data, "the cache": _from_cache, "a download": _from_download}


def _fetch(name, file, mirrors):
    """One file from the first mirror that has it right: as it came, and as an array."""
    reasons = []
    for mirror in list(mirrors):
        try:
            packed = _get(f"{mirror}{file}.gz", _form(name, file)[-1] + GZIP_EXTRA)
            return packed, _checked(packed, name, file, packed=True)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reasons.append(f"{mirror}{file}.gz {_why(error)}")
            mirrors.append(mirrors.pop(0))  # the next file need not wait for this mirror as well
    reason = "; ".join(reasons) or "no mirror is known"
    _failed.pop(name, None)
    if _write(_note(name), reason.encode()):
        _failed[name] = (time.time(), reason)
    raise DataUnavailable(reason)


def _get(url, most):
    """The bytes at `url`, at most `most` of them, with a progress bar."""
    end, got = time.monotonic() + PATIENCE, bytearray()
    with (
        urllib.request.urlopen(url, timeout=SILENCE) as reply,
        tqdm(total=reply.length, desc=url.split("/")[-1], unit="B", unit_scale=True) as bar,
    ):
        # read1 returns what has come so far; read would wait for a whole block, however slow.
        while len(got) != bar.total and (block := reply.read1(65_536)):
            got += block
            bar.update(len(block))
            if len(got) > most or time.monotonic() > end:
                raise ValueError(f"came to over {most:,} bytes or took over {PATIENCE} s")
    if bar.total and len(got) < bar.total:
        raise ValueError(f"broke off after {len(got):,} of {bar.total:,} bytes")
    return bytes(got)


# The cache, and the note of a failed download in it.


def _cache(name):
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # unset, or relative, which its specification says to ignore
        base = os.path.expanduser("~/.cache")
    return Path(base, "many-devices", name)


def _note(name):
    """The file whose content says why the last download failed, and its time says when."""
    return _cache(name) / "download-failed"


def _remembered(name):
    when, reason = _failed.get(name, (0, ""))
    with contextlib.suppress(OSError, ValueError):  # no note, or one that isn't text
        when, reason = max((when, reason), (_note(name).stat().st_mtime, _note(name).read_text()))
    return reason if 0 <= time.time() - when < REMEMBER else None


def _write(path, content):
    """Write a file whole or not at all; returns None, or the reason why it can't be written.

    Nobody sees half a file: it grows under a name that no other process uses, then takes its
    place in one step. Of two processes that do so at once, the later one wins, with a whole file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        return _why(error)
    finally:
        with contextlib.suppress(OSError):  # where all went well, it has moved already
            temporary.unlink()


# Checks. ValueError here means: these bytes are not the file that they should be.


def _form(name, file):
    """What the file must be: its values' shape, its header, its length in bytes once unpacked."""
    count = SETS[name]["counts"][file.startswith("t10k")]
    shape = (count, 28, 28) if "images" in file else (count,)
    # IDX begins with a magic number (8 for unsigned bytes, then how many dimensions), then these.
    header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
    return shape, header, len(header) + math.prod(shape)


def _read(path, name, file, users=False):
    most = _form(name, file)[-1] + GZIP_EXTRA
    with open(path, "rb") as stream:
        content = stream.read(most + 1)  # no more than that, however long the file is
    if len(content) > most:
        raise ValueError(f"is over {most:,} bytes, too long for this file")
    return _checked(content, name, file, packed=path.suffix == ".gz", users=users)


def _checked(content, name, file, packed, users=False):
    """The file's values as a uint8 array `[n, 28, 28]` or `[n]`, once they are known to be right.

    `users` says that the file comes from COURSE_DATA. There, MNIST must match its sums too, but
    Fashion-MNIST may be unpacked or packed anew, for which no sums are published.
    """
    shape, header, size = _form(name, file)
    plain = content
    if packed:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
                plain = stream.read(size + 1)  # one more, to see that a file is too long
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"is not a whole gzip file ({error})") from error
    if len(plain) != size or not plain.startswith(header):
        more = "at least " if len(plain) > size else ""
        raise ValueError(
            f"begins with {_claim(plain[: len(header)])} and has {more}{len(plain):,} bytes "
            f"in all, where {name}'s begins with {_claim(header)} and has {size:,}"
        )
    matching = [s for s in SETS if _sum_matches(s, file, plain, content if packed else None)]
    if matching and name not in matching:  # easily mixed up, for the file names are the same
        raise ValueError(f"belongs to {matching[0]}, not to {name}")
    if not matching and not (users and SETS[name]["sums_of"] == "gz"):
        raise ValueError(f"has not the published {SETS[name]['hash']} sum")
    values = np.frombuffer(plain, np.uint8, offset=len(header)).reshape(shape)
    if len(shape) == 1 and values.max() > 9:
        raise ValueError(f"has the label {values.max()}, where labels go from 0 to 9")
    return values


def _claim(header):
    """A header in words, be it cut short or not a header at all."""
    magic, *shape = (header[i : i + 4] for i in range(0, max(len(header), 1), 4))
    shape = " x ".join(f"{int.from_bytes(n, 'big'):,}" for n in shape)
    return f"{magic.hex() or 'nothing'}, claims {shape or 'nothing'}"


def _sum_matches(name, file, plain, packed):
    facts = SETS[name]
    subject = plain if facts["sums_of"] == "contents" else packed or b""
    digest = hashlib.new(facts["hash"], subject, usedforsecurity=False)
    return digest.hexdigest() == facts["sums"][file]


def _why(error):
    """The cause in a few words, without the paths and numbers that Python puts around it."""
    cause = getattr(error, "reason", None)  # urllib wraps the cause
    error = cause if isinstance(cause, Exception) else error
    return f"({getattr(error, 'strerror', None) or str(error) or type(error).__name__})"
