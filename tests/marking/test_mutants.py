"""Right solutions with one mistake each, made by program: the tests must notice every one.

A sample of 200, the same in each run; `MUTANTS=all`, at night, judges all of them. What survives
although it is right by the assignment's text, each looked at once, is in `survivors.txt`: by its
assignment the first digits of `identify`.
"""

import ast
import hashlib
import os
import random
import time
from pathlib import Path

import book
import in_process
import mutate
import pytest
from marking import assignment

SAMPLE = 200
ALL = os.environ.get("MUTANTS") == "all"


def make_mutants():
    """{"psN exercise | solution | change": (assignment, exercise, source)}."""
    jobs, here = {}, [name for name in assignment.list_names() if not book.can_run(name)]
    solutions = [(name, e.name, "the model answer", e.answer) for name in here
                 for e in assignment.read_assignment(name).exercises]
    solutions += [(s.assignment, s.exercise, s.what, s.source)
                  for s in book.solutions() if not s.loses and s.assignment in here]
    for name, exercise, what, source in solutions:
        mutants = mutate.mutate(source)
        (one,) = (e for e in assignment.read_assignment(name).exercises if e.name == exercise)
        if what == "the model answer" and one.ranks == 1:   # in ranks, arguments are no arrays
            functions = [node.name for node in ast.parse(source).body]
            tests = assignment.load_tests(name)
            sent = [call.args for test in one.tests for case in tests[test.grade_id]()
                    for call in getattr(case, "cases", [case])]
            mutants += mutate.wrap(source, functions, dicts=any(
                isinstance(value, dict) for args in sent for value in args))
        for change, changed in mutants:
            jobs[f"{name} {exercise} | {what} | {change}"] = name, exercise, changed
    return jobs


def identify(key):
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def read_survivors():
    """What `identify` gives for each mutant that may survive."""
    words = (Path(__file__).parent / "survivors.txt").read_text().split()
    return {word for word in words if not word.startswith("ps")}


@pytest.fixture(scope="module")
def mutants():
    return make_mutants()


def test_every_mutant_is_caught_or_listed_as_right(mutants, capsys):
    listed = read_survivors()
    chosen = list(mutants) if ALL else random.Random(17).sample(sorted(mutants), SAMPLE)
    begin = time.monotonic()
    marks = in_process.judge_all({key: mutants[key] for key in chosen})
    survived = {key for key, found in marks.items()
                if found and all(mark.points == mark.of for mark in found)}
    new = {f"{key}: {identify(key)}" for key in survived if identify(key) not in listed}
    failed = {key: mark.why for key, found in marks.items()
              for mark in found or () if mark.outcome == in_process.judge.NOT_JUDGED}
    with capsys.disabled():
        print(f"\n{len(mutants)} mutants made, {len(chosen)} judged in "
              f"{time.monotonic() - begin:.0f} s: {len(chosen) - len(survived)} caught, "
              f"{len(survived)} survivors, {len(survived) - len(new)} of them listed as right")
    assert not failed   # no mistake of a solution may look like one of the marking
    assert not new   # add a case, or, if it is right by the text, what stands after the colon
    assert not {key for key in chosen if identify(key) in listed} - survived   # caught after all


def test_the_list_names_mutants_that_there_are(mutants):
    assert len(mutants) >= 1000
    assert not read_survivors() - set(map(identify, mutants))


def test_a_mutant_is_another_program_that_runs():
    source = ("def f(a, k):\n    '''Text.'''\n"
              "    for i in range(k):\n        a[i] += 1\n    return a\n")
    changed = mutate.mutate(source)
    programs = {ast.dump(ast.parse(text)) for text in (source, *(m.source for m in changed))}
    assert len(programs) == len(changed) + 1
    assert len({m.change for m in changed}) == len(changed)
    texts = [m.source for m in changed]
    for expected in ("a[i] -= 1", "a[i] += 2", "a[i] += 0", "range(k - 1)",
                     "range(1, k)", "a[i] = 1", "pass"):
        assert any(expected in text for text in texts), expected
    around = list(mutate.wrap(source, ["f"], dicts=True))
    for mutant in around:
        exec(compile(mutant.source, "<mutant>", "exec"), {})
    assert len(around) == len(mutate.AROUND)
