"""Judges solutions: runs an assignment's tests on what solutions return.

    python -m marking.judge < JOB       judges one submission; job and report are JSON

The tests are here and the solutions elsewhere. A call sends copies of its arguments; what is
expected stands before anything is sent, and what comes back is looked at and thrown away.

A test ends in one of three ways. `judged`: points, and the reason where some are missing.
`stopped`: the solution broke or had to be ended, with the reason. `not judged`: the marking itself
failed, which is no fault of the student's.
"""

import ast
import concurrent.futures
import itertools
import json
import re
import resource
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from marking import calls, cases, notebook, process
from marking.assignment import Assignment, Exercise, Test, load_tests
from marking.channel import Array, Function
from marking.exchange import KINDS, Exchange
from marking.harmless import WORDS, shorten

MEMORY = 2 * 2**30    # bytes of addresses for the judge itself
CALLS = 100_000       # most calls of the judge's functions in one case
TIME = 240            # seconds by the clock for an exercise, the judge's own work included
SHOWN = 10**5         # characters of an answer in the feedback
JUDGED, STOPPED, NOT_JUDGED = "judged", "stopped", "not judged"


def find_helpers(folder):
    """The files of helpers/ that students get: those of `helpers.devices`, and their imports."""
    needed = ["__init__", "device"]
    for module in needed:   # it grows on the way
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                package, _, name = (node.module or "").partition(".")
                found = [name] if name else [one.name for one in node.names]
                needed += [each for each in found if package == "helpers" and each not in needed]
    return [f"{module}.py" for module in needed]


HANDED_OUT = find_helpers(process.REPOSITORY / "helpers")


class Mark(NamedTuple):
    exercise: str        # grade_id of the test
    points: float | None
    of: float
    why: str             # "" where nothing is missing
    outcome: str
    call: str = ""       # the call that failed, as a student can type it


@dataclass
class Cell:
    """A student's solution cell, for its own exercise and for those below it.

    given: how many of the assignment's given cells stand above it. broke: why it could not be read
    to its end, "" if it could.
    """

    exercise: str
    source: str
    given: int
    broke: str = ""


class Solution:
    """A solution whose functions can be called, in the process `running`.

    Raises RuntimeError where the process doesn't come up, which is no student's fault.
    """

    def __init__(self, running, given, cells, names, others=()):
        """cells: the student's, as `Cell`, of which the last one is judged. names: what it is to
        define. others: sources of cells that aren't read, to explain what is missing."""
        self.lines, self.numbers, self.deadline = running.lines, itertools.count(), float("inf")
        self.earlier, self.others = cells[:-1], others
        self.failed = ""   # why no call will come back any more
        try:
            self._expect("started", self.lines[0])
            self.lines[0].send([given, names])
            for line in self.lines:
                self._expect("given", line)
            running.start_clock()
        except process.Ended as error:
            raise RuntimeError(f"a solution's process could not be started: {error}\n"
                               f"{running.describe_output()}") from error
        for cell in cells:
            if not self.failed:
                self._read(running, cell, cell is cells[-1])
        self.deadline = time.monotonic() + TIME

    def _read(self, running, cell, last):
        """Have a cell read. One that ends the process ends all that comes after it."""
        cell.broke = ""
        try:
            for line in self.lines:
                line.send([cell.exercise, cell.source, cell.given, last])
            for line in self.lines:
                match line.receive():
                    case "read":
                        pass
                    case {"broke": str(why)}:
                        cell.broke = shorten(why)
                    case _:
                        line.end("what it told the judge is no answer")
            if not last:
                running.start_clock()   # the next one has time and memory of its own
        except process.Ended as error:
            cell.broke = f"stopped: {error}"
            self.failed = (f"not run, as your cell {cell.exercise!r} above it could not be read to "
                           f"its end: {cell.broke}")
        if last and cell.broke:
            self.failed = f"not run, as the cell could not be read to its end: {cell.broke}"

    def explain(self, error):
        """What is known of a name that the solution has not found; "" for any other error."""
        match = re.search(r"\bNameError: (?:name )?'?(\w+)'? is not defined", str(error))
        if not match:
            return ""
        for cell in self.earlier:
            if cell.broke and notebook.defines(cell.source, match[1]):
                return (f". It is in your cell {cell.exercise!r}, which could not be read to its "
                        f"end: {cell.broke}")
        if any(notebook.defines(source, match[1]) for source in self.others):
            return (". Another cell of your notebook has it, but only solution cells are read, up "
                    "to this one: join the two")
        return ""

    def call(self, case):
        """(arguments as sent, `cases.Reply`) for a case. Raises process.Ended, and cases.Wrong
        where one of the judge's functions was called with what it can't take."""
        return self._ask(self.lines[0], case)

    def call_ranks(self, ranks):
        """(the same for each rank, their `Exchange`) for `cases.Ranks`."""
        world = len(ranks.cases)
        exchange = ranks.exchange = Exchange(world)

        def work(rank):
            try:
                return self._ask(self.lines[rank], ranks.cases[rank], [rank, world], exchange)
            except cases.Wrong as error:
                return error
            finally:
                exchange.leave(rank)

        with concurrent.futures.ThreadPoolExecutor(world) as pool:
            return list(pool.map(work, range(world))), exchange

    def _ask(self, line, case, place=(), exchange=None):
        known, functions = [], {}
        sent = [self._number(value, known, functions) for value in case.args]
        line.send([case.function, [self._name(value, functions) for value in sent], *place])
        fault = None
        for _ in range(CALLS):
            if time.monotonic() > self.deadline:
                line.end(f"it kept the judge busy for more than {TIME} seconds")
            match line.receive():
                case {"start": str(kind), "arrays": list(arrays), "detail": str(detail)} if (
                        exchange and kind in KINDS
                        and all(isinstance(one, Array) for one in arrays)):
                    self._carry(line, exchange.start, place[0], kind,
                                [one.values for one in arrays], detail)
                case {"finish": int(number)} if exchange:
                    self._carry(line, exchange.finish, place[0], number)
                case {"call": int(number), "arguments": tuple(args), "named": dict(named)} if (
                        number in functions and all(isinstance(key, str) for key in named)):
                    try:
                        answer = {"returned": functions[number](*args, **named)}
                    except cases.Wrong as error:
                        fault = fault or error
                        answer = {"raised": "ValueError", "why": str(error)}
                    except TypeError as error:
                        if error.__traceback__.tb_next:   # not of other arguments than it has
                            raise
                        why = str(error)[:WORDS].rpartition("<locals>.")[2]
                        fault = fault or cases.Wrong(why)
                        answer = {"raised": "TypeError", "why": why}
                    self._answer(line, answer)
                case {"returned": result, "arguments": list(args), "objects": list(objects)}:
                    if fault:
                        raise fault
                    return sent, cases.Reply(result, None, args,
                                             self._check(line, objects, known))
                case {"raised": str(kind), "kinds": list(kinds), "why": str(why),
                      "arguments": list(args), "objects": list(objects)}:
                    if fault:
                        raise fault
                    error = cases.Raised(kind[:WORDS], kinds, why[:WORDS])
                    return sent, cases.Reply(None, error, args,
                                             self._check(line, objects, known))
                case _:
                    line.end("what it told the judge is no answer")
        line.end(f"it called what it was given more than {CALLS:,} times")

    def _carry(self, line, work, *given):
        try:
            result = work(*given)
            if isinstance(result, list):
                result = [Array(values) for values in result]
            self._answer(line, {"returned": result})
        except cases.Wrong as error:
            self._answer(line, {"raised": "RuntimeError", "why": str(error)})

    def _answer(self, line, answer):
        try:
            line.send(answer)
        except TypeError:
            line.end("it asked for more than fits into a message")

    def _expect(self, word, line):
        if line.receive() != word:
            line.end("what it told the judge is no answer")

    def _check(self, line, objects, known):
        if len(objects) != len(known):
            line.end("what it told the judge is no answer")
        return objects

    def _number(self, value, known, functions):
        """The argument with an identity for each array, and its functions noted."""
        if isinstance(value, Array):
            for place, one in enumerate(known):
                if one is value:
                    return value._replace(identity=place)
            known.append(value)
            return value._replace(identity=len(known) - 1)
        if type(value) in (list, tuple):
            return type(value)(self._number(item, known, functions) for item in value)
        if isinstance(value, dict):
            return {k: self._number(v, known, functions) for k, v in value.items()}
        if callable(value):
            # Never the same again: a late call is not taken for another's.
            functions[next(self.numbers)] = value
        return value

    def _name(self, value, functions):
        if type(value) in (list, tuple):
            return type(value)(self._name(item, functions) for item in value)
        if callable(value):
            return Function(next(n for n, work in functions.items() if work is value))
        return value


def judge_exercise(assignment, exercise, cells, tests, running, others=()):
    """A `Mark` for each test of an exercise.

    cells: the student's solution cells up to the exercise's own. tests: from `load_tests`. running:
    a `process.Process`, or what speaks as it does. others: cells that aren't read.
    """
    try:
        solution = Solution(running, assignment.given, cells, exercise.functions, others)
    except Exception as error:
        return [Mark(test.grade_id, None, test.points, describe_fault(error), NOT_JUDGED)
                for test in exercise.tests]
    careless = []   # what is done to things that are nobody's business costs the last test
    return [run_test(test, tests[test.grade_id], assignment.parameters, solution, careless,
                     test is exercise.tests[-1])
            for test in exercise.tests]


def run_test(test, generate, parameters, solution, careless, last):
    """The `Mark` of one test: all points, or none at the first case that fails.

    careless: (case, reason) found in the exercise so far, none or one, which cost the `last` test.
    """
    if solution.failed:
        return Mark(test.grade_id, 0, test.points, solution.failed, STOPPED)
    outcome, why, case = JUDGED, "", None
    try:
        for case in generate():
            judge_case = judge_ranks if isinstance(case, cases.Ranks) else judge_call
            try:
                done = judge_case(case, parameters, solution)
            except cases.Wrong as error:
                outcome = STOPPED if isinstance(error, cases.Broke) else JUDGED
                why = f"{case.what}: {error}{solution.explain(error)}"
                break
            for call, *given in done if not careless else ():
                try:
                    cases.find_carelessness(call, parameters[call.function], *given)
                except cases.Wrong as error:
                    careless.append((case, f"{case.what}: {error}"))
                    break
        if last and careless and not why:
            case, why = careless[0]
    except process.Ended as error:
        outcome, why = STOPPED, f"{case.what}: stopped: {error}"
        solution.failed = f"not run, as the solution was stopped before: {error}"
    except MemoryError:
        outcome, why = STOPPED, (f"{case.what}: stopped: what came back is more than the judge can "
                                 "hold")
    except Exception as error:
        return Mark(test.grade_id, None, test.points, describe_fault(error), NOT_JUDGED)
    if not why:
        return Mark(test.grade_id, test.points, test.points, "", outcome)
    return Mark(test.grade_id, 0, test.points,
                f"{shorten(why)}, in {calls.shorten_call(case, parameters)}", outcome,
                calls.write_call(case, parameters))


def judge_call(case, parameters, solution):
    """[(case, arguments as sent, reply)]. Raises Wrong."""
    sent, reply = solution.call(case)
    cases.find_fault(case, parameters[case.function], sent, reply)
    return [(case, sent, reply)]


def judge_ranks(ranks, parameters, solution):
    """(case, arguments as sent, reply) for each rank. Raises Wrong.

    An error that a rank raised by itself is told before those that it caused on others.
    """
    results, exchange = solution.call_ranks(ranks)
    for result in results:
        if isinstance(result, cases.Wrong):
            raise result
    order = sorted(range(len(results)), key=lambda rank: rank in exchange.told)
    for rank in order:
        if exchange.fault and (rank in exchange.told or not results[rank][1].raised):
            raise cases.Wrong(exchange.fault)
        case = ranks.cases[rank]
        try:
            cases.find_fault(case, parameters[case.function], *results[rank])
        except cases.Wrong as error:
            raise type(error)(f"rank {rank}: {error}") from None
    record = exchange.count()
    if ranks.messages:
        ranks.messages(record)
    return [(case, *result) for case, result in zip(ranks.cases, results)]


def describe_fault(error):
    """What is said where the marking failed: the error, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return shorten(f"{type(error).__name__}: {error}") + (
        f" ({Path(place.filename).name}:{place.lineno})")


def refuse(assignment, why, outcome=JUDGED):
    """The report on a submission that earns nothing, or, where not judged, has no points at all."""
    points = None if outcome == NOT_JUDGED else 0
    return {"answers": {}, "notes": [],
            "marks": [Mark(test.grade_id, points, test.points, why, outcome)
                      for exercise in assignment.exercises for test in exercise.tests]}


def judge_submission(assignment, text, hidden):
    """Judge a notebook's text: {"answers": {grade_id: source}, "marks": [Mark, ...], "notes":
    sentences for its author}.

    hidden: folders that its solutions must not see.
    """
    try:
        found = notebook.read_notebook(assignment, text)
    except notebook.Refused as error:
        return refuse(assignment, str(error))
    tests, marks, cells = load_tests(assignment.name), [], []
    with tempfile.TemporaryDirectory(prefix="judge-") as folder:
        work_folder = process.make_work_folder(Path(folder), HANDED_OUT)
        for exercise in assignment.exercises:
            # Those that can't be judged too, as later ones may call what they define.
            cells += [Cell(exercise.name, source, exercise.given)
                      for source in found.answers[exercise.name]
                      if len(source) <= notebook.LONGEST]
            if fault := found.faults.get(exercise.name):
                marks += [Mark(t.grade_id, 0, t.points, fault, JUDGED) for t in exercise.tests]
            else:
                marks += judge_answer(assignment, exercise, cells, found.others, tests, work_folder,
                                      hidden)
    shown = {name: "\n\n".join(sources)[:SHOWN] for name, sources in found.answers.items()}
    return {"answers": shown, "marks": marks, "notes": found.notes}


def judge_answer(assignment, exercise, cells, others, tests, work_folder, hidden):
    """Marks for one solution cell, the last of `cells`, behind walls. Those before it are read
    first, as in the student's notebook."""
    with process.Process(work_folder, hidden, ranks=exercise.ranks) as running:
        return judge_exercise(assignment, exercise, cells, tests, running, others)


def main():
    process.end_with_parent()
    process.adopt_orphans()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    job = json.load(sys.stdin)
    name, given, parameters, exercises, words = job["assignment"]
    exercises = [Exercise(*e[:4], [Test(*t) for t in e[4]], *e[5:]) for e in exercises]
    assignment = Assignment(name, given, parameters, exercises, words)
    report = judge_submission(assignment, job["text"], job["hidden"])
    process.end_children()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
