"""Recordings: what a trace of MXNet's profiler says is read right, and what is wrong is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import trace
from helpers.trace import Event, Recording, read

BEGIN = 1_795_641_703.25  # s, as of today's clocks


@pytest.fixture(autouse=True)
def no_names(monkeypatch):
    """Names of devices that another test or another recording has left behind."""
    monkeypatch.setattr(trace, "_tracks", {})


def named(pid, name):
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def span(name, start, end, pid=0, tid=None, phases="BE"):
    """A begin and an end, in ms after BEGIN."""
    return [{"ph": phase, "pid": pid, "tid": 70 + pid if tid is None else tid, "name": name,
             "ts": round(BEGIN * 1e6) + round(at * 1e3)} for phase, at in zip(phases, (start, end))]


def text(*entries, comma=False):
    """As the profiler writes it: from the second file on with a comma too many."""
    inside = json.dumps({"traceEvents": entries})
    return inside.replace("[", "[\n,", 1) if comma else inside.replace("[", "[\n", 1)


NAMES = [named(0, "cpu/0"), named(1, "cpu/1"), named(2, "cpu pinned/"), named(9, "link"),
         named(8, "operator"), named(7, "Custom Operator")]


@pytest.mark.parametrize("comma", [False, True])
def test_events_are_in_the_order_in_which_they_began_and_count_from_the_beginning(comma):
    entries = [*NAMES, *span("dot", 2, 5, pid=1), *span("dot", 1, 1.5),
               *span("ElementwiseSum", 1.5, 4)]
    assert read(text(*entries, comma=comma), BEGIN) == [
        Event("cpu(0)", "dot", 1.0, 0.5), Event("cpu(0)", "ElementwiseSum", 1.5, 2.5),
        Event("cpu(1)", "dot", 2.0, 3.0)]


def test_begins_and_ends_may_be_mixed_and_another_beginning_moves_all():
    first, second = span("dot", 1, 3), span("dot", 2, 4, pid=1)
    entries = [*NAMES, second[0], first[0], second[1], first[1]]
    assert [(e.lane, e.start, e.end) for e in read(text(*entries), BEGIN - 0.1)] == [
        ("cpu(0)", 101, 103), ("cpu(1)", 102, 104)]


def test_names_are_remembered_since_only_the_first_file_has_them():
    read(text(*NAMES), BEGIN)
    (event,) = read(text(*span("dot", 1, 2, pid=1), comma=True), BEGIN)
    assert event.lane == "cpu(1)"


def test_host_memory_is_in_the_lane_of_the_thread_that_looks_after_it():
    entries = [*NAMES, *span("dot", 1, 2), *span("CopyCPU2CPU", 2, 3, pid=2, tid=70),
               *span("CopyCPU2CPU", 4, 5, pid=2, tid=99)]
    assert [e.lane for e in read(text(*entries), BEGIN)] == ["cpu(0)", "cpu(0)", "cpu pinned/"]


def test_what_is_noted_in_a_domain_is_a_lane_and_repetitions_and_housekeeping_are_left_out():
    entries = [*NAMES, *span("message", 1, 2, pid=9, phases="be"),
               *span("dot", 1, 2, pid=8, phases="be"), *span("x::y", 1, 2, pid=7, phases="be"),
               *span("DeleteVariable", 1, 2), *span("WaitForVar", 1, 2),
               *span("send::CopyCPU2CPU", 1, 2), *span("dot", 3, 4),
               *span("message", 3, 4, pid=9, tid=70, phases="be"),  # in the thread of a device
               {"ph": "C", "name": "Memory: cpu/0", "pid": 5}]
    assert sorted(read(text(*entries), BEGIN)) == [
        Event("cpu(0)", "dot", 3.0, 1.0), Event("link", "message", 1.0, 1.0),
        Event("link", "message", 3.0, 1.0)]


@pytest.mark.parametrize(("entries", "words"), [
    ([*NAMES, span("dot", 1, 2)[0]], "no end"),
    ([*NAMES, span("dot", 1, 2)[1]], "didn't begin"),
    (span("dot", 1, 2), "no name"),
])
def test_a_trace_that_is_not_whole_is_refused(entries, words):
    with pytest.raises(ValueError, match=words):
        read(text(*entries), BEGIN)


def test_an_event_has_a_kind():
    for lane, name, kind in [
            ("cpu(0)", "dot", "compute"), ("cpu(1)", "ElementwiseSum", "communication"),
            ("link", "message", "communication"), ("cpu(0)", "sgd_mom_update", "update"),
            ("Python", "step", "Python")]:
        assert Event(lane, name, 0.0, 1.0).kind == kind


def test_lanes_and_rows():
    events = [Event("link", "message", 0.0, 2.0), Event("cpu(1)", "dot", 1.0, 1.0),
              Event("cpu(0)", "dot", 2.0, 1.0)]
    recording = Recording(events, 0.5, 4.0)
    assert list(recording.lanes) == ["cpu(0)", "cpu(1)", "link"]
    assert recording.lanes["cpu(1)"] == [events[1]]
    assert recording.rows == {
        "Python": [(0.0, 0.5, "Python")], "cpu(0)": [(2.0, 1.0, "compute")],
        "cpu(1)": [(1.0, 1.0, "compute")], "link": [(0.0, 2.0, "communication")]}
    noted = Recording([Event("Python", "step", 0.0, 0.25)], 0.5, 4.0)
    assert noted.rows == {"Python": [(0.0, 0.25, "Python")]}


# --- with MXNet, in a process of its own: what another test has profiled would be in the trace ---

PROGRAM = """
import json, threading
from types import SimpleNamespace
from helpers import trace
from mxnet import cpu, nd, profiler

def multiply(count, then=None):
    matrix = nd.ones((200, 200), ctx=cpu(1))
    for _ in range(count):
        nd.dot(matrix, matrix)
    if then:
        raise then

track = profiler.Domain("link")

def carry():
    task = profiler.Task(track, "message")
    task.start()
    task.stop()

def both():
    threads = [threading.Thread(target=carry) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

found = []
for count in [3, 5]:
    recording = trace.record(multiply, count)
    found.append([event.name for event in recording.lanes["cpu(1)"]].count("dot"))
    assert 0 < recording.handed_out <= recording.length
    for event in recording.events:
        assert -1 < event.start <= event.end < recording.length + 1
try:
    trace.record(multiply, 1, KeyError("work"))
except KeyError:
    found.append("raised")
found.append([event.name for event in trace.record(multiply, 2).events].count("dot"))
found.append([event.name for event in trace.record(both).lanes["link"]])
trace.time = SimpleNamespace(time=lambda: 5.0)
try:
    trace.record(multiply, 1)
except RuntimeError as error:
    found.append("lies outside" in str(error))
print(json.dumps(found))
"""


def test_recordings_of_mxnet_one_after_the_other_also_after_an_error(tmp_path):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, 5, "raised", 2, ["message"] * 2, True]
    assert list(tmp_path.iterdir()) == [], "nothing is left when the process ends"
