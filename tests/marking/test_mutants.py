"""Right solutions with one mistake each, made by program: the tests must notice every one.

A sample of 200, the same in each run; `MUTANTS=all` judges all of them. What survives is listed in
`survivors/psN.toml` with the reason why it is right by the assignment's text.
"""

import ast
import os
import random
import time
import tomllib
from pathlib import Path

import book
import mutate
import near
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


def read_survivors():
    """{"psN exercise | solution | change": why it is right}."""
    found = {}
    for path in sorted((Path(__file__).parent / "survivors").glob("*.toml")):
        for group in tomllib.loads(path.read_text())["right"]:
            assert group["why"].strip()
            for mutant in group["mutants"]:
                assert f"{path.stem} {mutant}" not in found, mutant
                found[f"{path.stem} {mutant}"] = group["why"]
    return found


@pytest.fixture(scope="module")
def mutants():
    return make_mutants()


def test_every_mutant_is_caught_or_listed_as_right(mutants, capsys):
    listed = read_survivors()
    chosen = list(mutants) if ALL else random.Random(17).sample(sorted(mutants), SAMPLE)
    begin = time.monotonic()
    marks = near.judge_all({key: mutants[key] for key in chosen})
    survived = {key for key, found in marks.items()
                if found and all(mark.points == mark.of for mark in found)}
    failed = {key: mark.why for key, found in marks.items()
              for mark in found or () if mark.outcome == near.judge.NOT_JUDGED}
    with capsys.disabled():
        print(f"\n{len(mutants)} mutants made, {len(chosen)} judged in "
              f"{time.monotonic() - begin:.0f} s: {len(chosen) - len(survived)} caught, "
              f"{len(survived)} survivors, {len(survived & set(listed))} of them listed as right")
    assert not failed   # no mistake of a solution may look like one of the marking
    assert not survived - set(listed)
    assert not {key for key in chosen if key in listed} - survived   # caught after all


def test_the_list_names_mutants_that_there_are(mutants):
    assert len(mutants) >= 1000
    assert not set(read_survivors()) - set(mutants)


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
