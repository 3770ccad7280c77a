"""Right solutions with one mistake each, made by program: a score of what the hidden tests notice.

Some changes leave a solution right by the assignment's text, so the score has no due value: read
what survived when an assignment or its tests have changed. A sample of 60, the same in each run;
`MUTANTS=all`, at night, judges all of them.
"""

import ast
import collections
import os
import random

import book
import in_process
import mutate
import pytest
from marking import assignment

SAMPLE = 60
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


@pytest.fixture(scope="module")
def mutants():
    return make_mutants()


def test_most_mutants_are_caught_and_none_looks_like_a_fault_of_the_marking(mutants, capsys):
    chosen = list(mutants) if ALL else random.Random(17).sample(sorted(mutants), SAMPLE)
    marks = in_process.judge_all({key: mutants[key] for key in chosen}, work=8)
    survived = [key for key, found in marks.items()
                if found and all(mark.points == mark.of for mark in found)]
    made, left = (collections.Counter(key.partition(" |")[0] for key in keys)
                  for keys in (chosen, survived))
    with capsys.disabled():
        print(f"\n{len(chosen)} of {len(mutants)} mutants judged, {len(survived)} survived")
        if ALL:
            for exercise in sorted(made):
                print(f"{exercise}: {made[exercise] - left[exercise]} of {made[exercise]} caught")
            print(*survived, sep="\n")
    assert not {key: mark.why for key, found in marks.items()
                for mark in found or () if mark.outcome == in_process.judge.NOT_JUDGED}
    assert len(survived) < len(chosen) / 4


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
