"""What a student is told of a failure: the true cause first, the call that shows it, and what was
not run."""

import re

import in_process
import pytest
import sandboxed
from marking import assignment, judge

STUB = "def split_even(batch, devices):\n    "
RIGHT = """
def split_even(batch, devices):
    if len(batch) % len(devices):
        raise ValueError
    size = len(batch) // len(devices)
    return [batch[i * size : (i + 1) * size].copyto(d) for i, d in enumerate(devices)]
"""


@pytest.mark.parametrize("line, name", [
    ("%timeit split_even(1, 2)", "%timeit split_even(1, 2)"), ("!ls -l", "!ls -l"),
    ("names = !ls", "names = !ls"), ("took = %timeit -o f()", "took = %timeit -o f()"),
    ("split_even?", "split_even?"), ("?split_even", "?split_even")])
@pytest.mark.parametrize("source", ["{line}\n" + RIGHT, RIGHT + "\n{line}\n",
                                    "def f():\n    {line}\n" + RIGHT])
def test_a_magic_is_named_as_one(line, name, source):
    marks = in_process.judge_cell("ps1", "even", source.replace("{line}", line))
    number = source.split("{line}")[0].count("\n") + 1
    for mark in marks:
        assert (mark.points, mark.outcome) == (0, "stopped")
        assert f"line {number} of it, `{name}`, is a magic" in mark.why
        assert mark.why.endswith("Take it out") and mark.why.startswith("not run")
        assert "SyntaxError" not in mark.why


def test_what_only_looks_like_one_is_python():
    source = RIGHT + "text = '''\n%timeit\n!ls\n'''\nrest = (7\n% 4)\n"
    assert all(mark.points for mark in in_process.judge_cell("ps1", "even", source))
    (mark, _) = in_process.judge_cell("ps1", "even", RIGHT + "x = = 1\n")
    assert "SyntaxError: invalid syntax (line 7 of the solution)" in mark.why


@pytest.mark.parametrize("body, cause", [
    ("return [mx.nd.dot(batch, mx.nd.ones((77, 1)))]", "MXNetError: (Check|Error|Shape|Incom)"),
    ("return [batch.reshape((5, 7, 11))]", "MXNetError: NDArray.Reshape: Check failed"),
    ("return [mx.nd.concat(batch, mx.nd.ones((3, 3, 3)), dim=0).asnumpy()]", "MXNetError: "),
    ("return [batch.copyto(mx.gpu(40))]", "MXNetError: "),
    ("return [mx.nd.FullyConnected(batch)]", "(MXNetError|AssertionError|TypeError): ")])
def test_mxnet_s_cause_stands_first(body, cause):
    (mark, _) = in_process.judge_cell("ps1", "even", STUB + body)
    assert "(line 2 of the solution), in split_even(" in mark.why, mark.why
    assert re.search(cause, mark.why), mark.why
    for noise in ("../src", "src/operator", "Traceback", "Stack trace", "[bt]", ".so", ".cc:"):
        assert noise not in mark.why, mark.why


def test_a_name_that_another_cell_has():
    read = assignment.read_assignment("ps1")
    cell = judge.Cell("even", STUB + "return cut(batch, devices)", read.exercises[0].given)
    for others, said in ((["def cut(b, d): pass"], True), (["cut(1, 2)"], False)):
        marks = judge.judge_exercise(read, read.exercises[0], [cell],
                                     assignment.load_tests("ps1"), in_process.Process(1), others)
        assert "NameError: name 'cut' is not defined (line 2 of the solution)" in marks[0].why
        assert ("Another cell" in marks[0].why) == said


@pytest.fixture(scope="module")
def pool():
    with sandboxed.start(1) as pool:
        yield pool


def judge_even(pool, source):
    return pool.submit(sandboxed.judge_cell, "ps1", "even", source,
                       {"work": 2}).result()[0]


def test_the_case_that_hung_is_named_and_the_tests_after_it_were_not_run(pool):
    hung, after = judge_even(pool, STUB + "if len(devices) == 3:\n        while True: pass\n"
                        + "\n".join(RIGHT.splitlines()[2:]))
    assert hung.why == (
        "6 examples, devices cpu(1), cpu(2), cpu(3): stopped: it worked for more than 2 seconds, "
        "in split_even(float32 array of shape (6, 3, 2) on cpu(0), [cpu(1), cpu(2), cpu(3)])")
    assert (hung.outcome, after.outcome) == ("stopped", "stopped")
    assert after.why == ("not run, as the solution was stopped before: it worked for more than 2 "
                         "seconds")
    assert hung.call.endswith("split_even(batch, [mx.cpu(1), mx.cpu(2), mx.cpu(3)])")


def test_a_cell_that_cannot_be_read_says_so_in_each_test(pool):
    for source, cause in (("while True: pass", "stopped: it worked for more than 2 seconds"),
                          (RIGHT + "1 / 0", "ZeroDivisionError: division by zero (line 7 of")):
        for mark in judge_even(pool, source):
            assert mark.points == 0 and mark.why.startswith(
                f"not run, as the cell could not be read to its end: {cause}")


def test_a_wrong_value_names_the_call():
    (mark, _) = in_process.judge_cell("ps1", "even", STUB + "return [batch] * len(devices)")
    assert mark.why.endswith(
        "in split_even(float32 array of shape (6, 2) on cpu(0), [cpu(0), cpu(1)])")
    assert mark.call.startswith("batch = mx.nd.array([[0.0, 1.0], [2.0, 3.0]")
    assert mark.call.endswith("\nsplit_even(batch, [mx.cpu(0), mx.cpu(1)])")
