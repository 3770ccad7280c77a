"""A later solution cell may call what an earlier one defines. An earlier one that is wrong costs
the later exercise nothing; one that ends the process ends what comes after it."""

import re
import types

import book
import pytest
import sandboxed
from marking import assignment, judge

UNEVEN = next(e.answer for e in assignment.read_assignment("ps1").exercises if e.name == "uneven")
PAIRS = """
def split_pairs(images, labels, order, devices):
    parts = [mx.nd.array(a.asnumpy()[order], a.context, a.dtype) for a in (images, labels)]
    return list(zip(*(split_uneven(part, devices) for part in parts)))
"""
ALONE = next(e.answer for e in assignment.read_assignment("ps1").exercises if e.name == "pairs")
KEEP = "kept = bytearray(b'x') * (600 << 20)\n"
TAKE = "_ = bytearray(b'x') * (500 << 20)\ndel _\n"
# (what, the cell above, the cell that is judged, why it loses points: None where it has them all)
CASES = [
    ("it is there", UNEVEN, PAIRS, None),
    ("it is not", "", PAIRS, "NameError: name 'split_uneven' is not defined \\(line 4 of the sol"),
    ("it is wrong", "def split_uneven(batch, devices):\n"
     "    return [batch.copyto(d) for d in devices]", PAIRS, "array 0 of pair 0 has shape"),
    ("it is not written yet", f"def split_uneven(batch, devices):\n    {assignment.UNWRITTEN}",
     PAIRS, "NotImplementedError: not written yet \\(line 2 of the cell 'uneven'\\)"),
    ("it is no Python", "def split_uneven(:", PAIRS,
     "NameError.*It is in your cell 'uneven', which could not be read to its end: SyntaxError"),
    ("it has a magic", "%time\n" + UNEVEN, PAIRS, "NameError.*`%time`, is a magic"),
    ("it breaks after that", UNEVEN + "\n1 / 0", PAIRS, None),
    ("it breaks, and nobody needs it", "1 / 0", ALONE, None),
    ("it exits", UNEVEN + "\nimport sys\nsys.exit()", PAIRS, None),
    ("it ends its process", UNEVEN + "\nimport os\nos._exit(0)", PAIRS,
     "not run, as your cell 'uneven' above it .*stopped: its process ended by itself"),
    ("it works without end", UNEVEN + "\nwhile True: pass", PAIRS,
     "'uneven' above it .*stopped: it (worked for more|was not done after)"),
    ("both work", UNEVEN + "\nimport time\nbegin = time.process_time()\n"
     "while time.process_time() < begin + 2.7: pass",
     PAIRS + "\nimport time\nbegin = time.process_time()\n"
     "while time.process_time() < begin + 2.7: pass", None),
    ("it takes too much memory", "kept = []\nwhile True: kept.append(bytearray(b'x') * 10**7)\n"
     + UNEVEN, PAIRS, "'uneven' above it .*more than 1 GiB of memory"),
    ("it keeps memory", KEEP + UNEVEN, TAKE + PAIRS, None),
    ("both in one are too much", UNEVEN, KEEP + TAKE + PAIRS + UNEVEN, "more than 1 GiB of memory"),
    ("it answers for the later one", UNEVEN + "\nimport sys\n"
     "sys._getframe(0).f_back.f_locals['line'].send('read')\n", "x = 1", "no answer|NameError"),
]
LIMITS = {"work": 4, "patience": 30, "memory": 2**30}


@pytest.fixture(scope="module")
def pool():
    with sandboxed.start() as pool:
        yield pool


@pytest.fixture(scope="module")
def judged(pool, request):
    """Marks of the cases that this run asks for, two at a time."""
    chosen = [item.callspec.params["case"] for item in request.session.items
              if "judged" in getattr(item, "fixturenames", ())]
    return {case[0]: pool.submit(sandboxed.judge_cell, "ps1", "pairs", case[2], LIMITS, False,
                                 [("uneven", case[1])]) for case in chosen}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_an_earlier_cell(case, judged):
    what, _, _, why = case
    marks, left = judged[what].result()
    if why is None:
        assert [(mark.points, mark.why) for mark in marks] == [(mark.of, "") for mark in marks]
    else:
        assert marks[0].points == 0 and re.search(why, marks[0].why), marks
    assert left == 0


def answers(name):
    return {exercise.name: exercise.answer
            for exercise in assignment.read_assignment(name).exercises}


def test_a_given_cell_below_takes_its_names_back(pool):
    """As in a notebook: exercise 3 of ps3 begins with cells that define `net`, `loss`, `start`."""
    earlier = [("loss", "loss = net = start = None\n" + answers("ps3")["loss"]),
               ("replicas", "def start(seed): pass\n" + answers("ps3")["replicas"])]
    marks, _ = pool.submit(sandboxed.judge_cell, "ps3", "step", answers("ps3")["step"], LIMITS,
                           False, earlier).result()
    assert all(mark.points == mark.of for mark in marks), marks
    # What stands above both is the student's to change.
    marks, _ = pool.submit(sandboxed.judge_cell, "ps3", "step", answers("ps3")["step"], LIMITS,
                           False, [("loss", "autograd = None")]).result()
    assert "'NoneType' object has no attribute 'record'" in marks[0].why


BUCKETED = """
class BucketedDDP(NaiveDDP):
    def __init__(self, module, bucket_bytes):
        nn.Module.__init__(self)
        if not bucket_bytes > 0:
            raise ValueError
        self.module, self.buckets, size = module, [], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self.buckets or size + p.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.nbytes
            p.register_post_accumulate_grad_hook(self.mark_ready)
        self.ready, self.sent = set(), []

    def mark_ready(self, p):
        self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            flat = torch.cat([p.grad.flatten() for p in self.buckets[len(self.sent)]])
            self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_synchronization(self):
        for bucket, (flat, work) in zip(self.buckets, self.sent):
            work.wait()
            means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for p, mean in zip(bucket, means):
                p.grad = mean.view_as(p)
        self.ready.clear()
        self.sent.clear()
"""
FLATTEN = """
def flatten_with_zeros(tensors):
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))
"""


@pytest.mark.parametrize("name, exercise, earlier, answer", [
    pytest.param("ps7", "bucketed", [("naive", answers("ps7")["naive"])], BUCKETED,
                 marks=book.can_run("ps7"), id="a class of the one before"),
    pytest.param("ps8", "linear", [("sharded", FLATTEN + answers("ps8")["sharded"])],
                 answers("ps8")["linear"].replace("self.flatten(", "flatten_with_zeros(").replace(
                     "layer.flatten(", "flatten_with_zeros("),
                 marks=book.can_run("ps8"), id="a function beside the one before")])
def test_ranks_too(pool, name, exercise, earlier, answer):
    marks, left = pool.submit(sandboxed.judge_cell, name, exercise, answer,
                              {"work": 8, "memory": 2**31}, False, earlier).result()
    assert all(mark.points == mark.of for mark in marks), marks
    assert left == 0


class Line:
    """A connection on which the answers are known."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.send = lambda tree: None

    def receive(self):
        return self.answers.pop(0)


def test_a_cell_that_broke_on_one_rank_alone_is_broken():
    running = types.SimpleNamespace(lines=[
        Line("started", "given", {"broke": "ValueError: rank 0"}), Line("given", "read")])
    running.start_clock = lambda: None
    solution = judge.Solution(running, [], [judge.Cell("linear", "", 0)], [])
    assert "ValueError: rank 0" in solution.failed
