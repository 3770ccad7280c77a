"""What ran when: some work, recorded by MXNet's profiler, as events in lanes.

A lane is what one thread did: `cpu(0)` and `cpu(1)` have one each, and the first also looks after
what a store keeps in host memory. What a program itself notes with a `profiler.Domain("link")` is
a lane `link`.
"""

import json
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

COMMUNICATION = {"CopyCPU2CPU", "ElementwiseSum", "KVStoreReduce", "add_n"}
REPEATED = {"operator", "Custom Operator"}  # domains in which MXNet notes its operators once more
# What the engine does for itself, and how Python waits: that stands in the queue of `cpu(0)`,
# whichever device it waits for.
HOUSEKEEPING = {"DeleteVariable", "WaitForVar"}
_tracks = {}  # number of a device or domain: its name
_folder = tempfile.TemporaryDirectory(prefix="trace-")  # removed when the process ends


class Event(NamedTuple):
    """One operator, or one thing that a program noted; times in ms since the recording began."""

    lane: str
    name: str
    start: float
    duration: float

    @property
    def end(self):
        return self.start + self.duration

    @property
    def kind(self):
        """A key of `helpers.plotting.KINDS`."""
        if self.lane == "Python":
            return "Python"
        if self.name in COMMUNICATION or not self.lane.startswith("cpu("):
            return "communication"
        if self.name.endswith("_update"):
            return "update"
        return "compute"


class Recording(NamedTuple):
    """Events in the order in which they began; times in ms since the recording began.

    handed_out: when Python had handed out all the work; length: when all of it was done.
    """

    events: list
    handed_out: float
    length: float

    @property
    def lanes(self):
        """`{name: its events}`, sorted by name."""
        found = {}
        for event in self.events:
            found.setdefault(event.lane, []).append(event)
        return dict(sorted(found.items()))

    @property
    def rows(self):
        """The lanes as `helpers.plotting.timeline` wants them, below a row for Python."""
        rows = {"Python": [(0.0, self.handed_out, "Python")]}  # unless the program noted it
        for lane, events in self.lanes.items():
            rows[lane] = [(event.start, event.duration, event.kind) for event in events]
        return rows


def record(work, *arguments):
    """The `Recording` of `work(*arguments)`, from its call until all it handed out is done.

    Raises RuntimeError where an event lies outside of that time.
    """
    from mxnet import nd, profiler

    path = _file()
    nd.waitall()
    profiler.set_state("run")
    try:
        begin = time.time()  # the profiler's clock
        work(*arguments)
        handed_out = time.time()
        nd.waitall()
        end = time.time()
    finally:
        nd.waitall()
        profiler.set_state("stop")
        profiler.dump(finished=False)
        events = read(path.read_text(), begin)
    length = 1e3 * (end - begin)
    for event in events:
        if event.start < -1 or event.end > length + 1:
            raise RuntimeError(f"record: {event} lies outside of 0 to {length:.3f} ms")
    return Recording(events, 1e3 * (handed_out - begin), length)


@cache
def _file():
    """Where the profiler writes. It's told once a process."""
    from mxnet import profiler

    path = Path(_folder.name, "trace.json")
    profiler.set_config(profile_imperative=True, profile_symbolic=True, profile_api=False,
                        continuous_dump=False, filename=str(path))
    return path


def read(text, begin):
    """The events of a trace, in the order in which they began.

    text: JSON as MXNet 1.9.1's profiler writes it, in the format of Chrome's trace viewer: an
    event has `ph`, "B" or "b" for begin and "E" or "e" for end; `ts`, µs; `pid`, the number of a
    device or domain; `tid`, a thread. "M" gives a number its name.
    begin: s, on the same clock; from here an event's ms are counted.

    It repairs two things (`Profiler::DumpProfile` in src/profiler/profiler.cc): each file but a
    process's first begins with a stray comma, and only the first names the devices, so names are
    remembered. Left out are the engine's `HOUSEKEEPING`, and what a `CustomOp` called `send` does
    within, such as `send::CopyCPU2CPU`, in whatever thread. Raises ValueError for an end without a
    begin, a begin without an end, or a number that has no name.
    """
    raw = json.loads(text.replace("[\n,", "[", 1))["traceEvents"]
    for entry in raw:
        if entry["ph"] == "M":
            _tracks[entry["pid"]] = entry["args"]["name"]
    spans = _spans(raw)

    homes = {}  # thread: its device
    for track, thread, *_ in spans:
        if track.startswith("cpu/"):
            homes[thread] = track
    events = []
    for track, thread, name, start, duration in spans:
        lane = track
        if track.startswith("cpu"):  # "cpu/0", or host memory: "cpu pinned/"
            lane = homes.get(thread, track)
        if lane.startswith("cpu/"):
            lane = f"cpu({lane.removeprefix('cpu/')})"  # as MXNet's contexts are printed
        events.append(Event(lane, name, round(start / 1e3 - begin * 1e3, 3), duration / 1e3))
    return sorted(events, key=lambda event: event.start)


def _spans(raw):
    """Track, thread, name, start and duration (µs) of each pair of a begin and an end."""
    begun = {}
    spans = []
    for entry in raw:
        if entry["ph"] not in "BEbe":
            continue
        if entry["name"] in HOUSEKEEPING or "::" in entry["name"]:
            continue
        if entry["pid"] not in _tracks:
            raise ValueError(f"read: no name for the track of {entry}; was another trace written "
                             "before the first of this process?")
        track = _tracks[entry["pid"]]
        if track in REPEATED:
            continue
        key = entry["pid"], entry["tid"], entry["name"]
        if entry["ph"] in "Bb":
            begun[key] = entry["ts"]
        elif key not in begun:
            raise ValueError(f"read: {entry} ends and didn't begin")
        else:
            start = begun.pop(key)
            spans.append((track, entry["tid"], entry["name"], start, entry["ts"] - start))
    if begun:
        raise ValueError(f"read: no end of {sorted(begun)}")
    return spans
