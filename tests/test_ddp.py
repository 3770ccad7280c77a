"""notebooks/ddp_train.py, which readers keep: its DDP equals PyTorch's."""

import gzip
import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from helpers.cluster import Failed, torchrun

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "notebooks/ddp_train.py"
CLOSE = {"type float32": 1e-5, "type bfloat16": 0.02, "mixed types": 1e-5}  # others: 1e-12


def load():
    spec = spec_from_file_location("ddp_train", SCRIPT)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def found(request):
    """What each rank of tests/fixtures/ddp_cases.py found, for 1 to 4 processes."""
    lines = torchrun(ROOT / "tests/fixtures/ddp_cases.py", request.param, arguments=[SCRIPT],
                     log=None)[0]
    ranks = json.loads(lines.strip().splitlines()[-1])
    assert len(ranks) == request.param
    return ranks


@pytest.mark.parametrize("case", [
    "size 1e-06", "size 0.001", "size 0.004", "size 25", "type float32", "type bfloat16",
    "mixed types", "unused last", "used on one rank", "accumulated"])
def test_trains_as_pytorchs_own_does(found, case):
    for rank in found:
        assert rank[case]["apart"] < CLOSE.get(case, 1e-12)
        assert rank[case]["replicas equal"] and rank[case]["no gradient kept"]


@pytest.mark.parametrize("case, early", [
    ("size 1e-06", [7, 11]), ("size 0.001", [4, 8]), ("size 0.004", [1, 3]), ("size 25", [0, 1]),
    ("unused last", [0, 11]), ("accumulated", [4, 8])])
def test_a_complete_bucket_is_sent_before_the_backward_pass_has_ended(found, case, early):
    assert all(rank[case]["early"] == early for rank in found), "sent by then, of so many"


def test_all_ranks_begin_with_rank_0s_buffers(found):
    assert all(rank["buffers"] == [[5.0] * 16, [0, 2, 4, 6, 8, 10]] for rank in found)


def test_large_gradients_do_not_overflow_on_the_way(found):
    assert all(rank["large"] == 40_000 for rank in found), "float16 ends at 65,504"


def test_mistakes_are_named(found):
    for rank in found:
        assert "no_sync" in rank["twice"] and "no_sync" in rank["after"]
        assert "not called" in rank["forgotten"] and rank["nested"] == 0
        assert "bucket_size_mb=0" in rank["no size"]
        if len(found) > 1:
            assert "modules differ" in rank["differ"] and "modules differ" in rank["frozen on one"]


# --- what a user meets beside numbers -----------------------------------------------------------

@pytest.fixture(scope="module", params=[2, 3])
def behaviours(request):
    """What each rank of tests/fixtures/ddp_behaviours.py found."""
    lines = torchrun(ROOT / "tests/fixtures/ddp_behaviours.py", request.param, arguments=[SCRIPT],
                     timeout=400, log=None)[0]
    ranks = json.loads(lines.strip().splitlines()[-1])
    assert len(ranks) == request.param
    return ranks


REFUSED = {  # behaviour: words of the reason or of the way out
    "step_before_finish": "was not called", "step_after_no_sync_only": "was not called",
    "clipped_before": "clip, scale or clear after", "clipped_after_no_sync": "clip, scale",
    "cleared_before": "clip, scale or clear after", "replaced_before": "clip, scale or clear",
    "unfrozen_after": "unfrozen", "replaced_parameter": "replaced", "added_layer": "added",
    "sparse_gradients": "sparse=False", "create_graph": "torch.autograd.grad",
    "two_backward_passes": "no_sync()", "checkpointed_twice_reentrant": "reentrant",
    "step_in_an_earlier_hook": "was not called", "cleared_in_an_earlier_hook": "removed",
    "step_in_a_hook": "was not called", "nested": "DDP already", "nested_in_pytorchs": "wrap its",
    "two_alive_of_one_module": "Two DDPs", "copied": "model.module",
    "copied_shallow": "model.module", "pickled": "model.module", "saved_whole": "model.module",
    "lazy_parameters": "no values yet", "on_meta": "no values yet", "other_shapes": "differ",
    "other_number": "differ", "other_order": "differ", "other_type": "differ",
    "other_bucket_size": "bucket_size_mb", "bucket_size_0": "should be more than 0",
    "bucket_size_none": "TypeError", "not_a_module": "AttributeError",
    "pytorchs_options": "find_unused_parameters", "a_comm_hook": "register_comm_hook",
    "attributes_of_the_module": "no attribute 'note'", "join": "no attribute 'join'",
    "forgotten": "was not called", "a_hook_after_wrapping": "clip, scale or clear after",
    "an_update_by_hand_before_finish": "was not called", "stateless": "replaced",
    "a_closure_without_finish": "was not called", "finished_after_the_last": "no_sync()",
    "weight_norm_after_wrapping": "added", "parametrization_removed_after_wrapping": "replaced",
    "converted_into_new_parameters": "replaced", "loaded_by_assigning": "replaced",
    "averaged_whole": "model.module", "a_list_of_modules": "ModuleList",
}
DOCUMENTED = {  # behaviour: what the first paragraph of DDP's docstring says of it
    "documented_unscaled_before": "then unscale, clip, step",
    "documented_autograd_grad": "torch.autograd.grad() stay the rank's own",
    "documented_loaded_on_one_rank": "load_state_dict()",
    "documented_buffers": "so do buffers after the start",
    "documented_ranks_count_alike": "however many examples each has",
}


def test_what_is_not_refused_is_right_or_documented(behaviours):
    right = behaviours[0].keys() - REFUSED.keys()
    assert right
    for name in right:
        assert [rank[name] for rank in behaviours] == [True] * len(behaviours), name


def test_what_is_refused_has_a_reason(behaviours):
    for name, words in REFUSED.items():
        for rank in behaviours:
            assert words in rank[name], name


def test_what_nothing_can_notice_is_in_the_first_paragraph():
    first = " ".join(load().DDP.__doc__.split("\n\n")[1].split())
    for name, words in DOCUMENTED.items():
        assert words in first, name
    assert "Send nothing else between the backward pass and its finish" in first


# --- the program ---------------------------------------------------------------------------------

def final_weights(path):
    return torch.load(path)["net"]


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def killed_in_epoch_2(arguments):
    """Start the program and kill all its processes once its first epoch is printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node=2", SCRIPT, *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, env=environment)
    try:
        first = running.stdout.readline()
    finally:
        family = [*psutil.Process(running.pid).children(recursive=True), running]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        running.communicate()
    assert first.startswith("epoch 1: ")


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    torchrun(SCRIPT, 2, arguments=["--epochs", "3", "--snapshot", whole], log=None)
    killed_in_epoch_2(["--epochs", "3", "--snapshot", killed])
    assert torch.load(killed)["epochs"] < 3, "it was over before it was killed"
    assert not same_bits(final_weights(whole), final_weights(killed))
    printed = torchrun(SCRIPT, 2, log=None,
                       arguments=["--epochs", "3", "--snapshot", killed, "--resume"])[0]
    assert "epoch 1:" not in printed and "epoch 3:" in printed
    assert same_bits(final_weights(whole), final_weights(killed))
    printed = torchrun(SCRIPT, 2, log=None,
                       arguments=["--epochs", "2", "--snapshot", killed, "--resume"])[0]
    assert "has 3 epochs already" in printed
    with pytest.raises(Failed, match="its steps had 128 images, these have 60"):
        torchrun(SCRIPT, 2, log=None, arguments=["--epochs", "4", "--snapshot", killed, "--resume",
                                                 "--batch-size", "30"])


def test_a_kill_while_it_is_written_leaves_the_last_snapshot(tmp_path, monkeypatch):
    script = load()
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    path = tmp_path / "snapshot.pt"
    script.save_snapshot(path, {"epochs": 1})

    def half(snapshot, path):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(script.torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        script.save_snapshot(path, {"epochs": 2})
    assert torch.load(path) == {"epochs": 1}


def test_pytorchs_own_takes_one_line(tmp_path):
    source = SCRIPT.read_text()
    ours = "model = DDP(net)  # or PyTorch's own: nn.parallel.DistributedDataParallel(net)"
    assert source.count(ours) == 1
    other = tmp_path / "with_pytorchs.py"
    other.write_text(source.replace(ours, "model = nn.parallel.DistributedDataParallel(net)"))
    for script, name in ((SCRIPT, "ours.pt"), (other, "theirs.pt")):
        torchrun(script, 2, log=None, arguments=["--epochs", "1", "--snapshot", tmp_path / name])
    ours, theirs = final_weights(tmp_path / "ours.pt"), final_weights(tmp_path / "theirs.pt")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-5), name


@pytest.mark.parametrize("arguments, words", [
    (["--epochs", "0"], "--epochs 0: should be 1 or more"),
    (["--batch-size", "0"], "--batch-size 0: should be 1 or more"),
    (["--lr", "0"], "--lr 0.0: should be more than 0"),
    (["--resume"], "say from where, by --snapshot FILE"),
    (["--resume", "--snapshot", "nowhere.pt"], "there is no nowhere.pt")])
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(Failed, match=words):
        torchrun(SCRIPT, 1, arguments=arguments, log=None)


def test_every_image_is_counted_once_by_one_rank():
    script = load()
    assert "images[rank::k]" in SCRIPT.read_text()
    taken = [i for rank in range(3) for i in range(1000)[rank::3]]
    assert sorted(taken) == list(range(1000))
    assert script.count_right(torch.nn.Flatten(), torch.eye(10)[:, None], torch.arange(10),
                              "cpu") == 10


def test_trains_without_any_data():
    printed = torchrun(SCRIPT, 2, log=None)[0]
    shares = [float(line.split("%")[0].split()[-1]) for line in printed.strip().splitlines()]
    assert len(shares) == 3 and shares[-1] > 80, printed


def test_without_torchrun_it_says_what_to_do():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2 and "torchrun --standalone --nproc-per-node=2" in done.stderr


def test_reads_mnists_own_files(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype="uint8")
    labels = np.array([3, 1, 4, 1, 5], dtype="uint8")
    for name, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
        with gzip.open(tmp_path / f"train-{name}-ubyte.gz", "wb") as file:
            file.write(bytes(header) + array.tobytes())
    script = load()
    x, y = script.read_mnist(tmp_path, "train")
    assert x.shape == (5, 1, 28, 28) and np.allclose(x[:, 0].numpy(), images / 255 - 0.13)
    assert y.tolist() == labels.tolist()


def test_buckets_have_one_type_and_at_most_their_size():
    script = load()
    sizes = [(3, "float32"), (1, "float32"), (9, "float64"), (4, "float32"), (1, "float64")]
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=getattr(torch, t))) for n, t in sizes]
    place = {p: i for i, p in enumerate(parameters)}
    found = [[place[p] for p in bucket] for bucket in script.fill_buckets(parameters, 20)]
    assert found == [[0, 1], [2], [3], [4]], "16 bytes; 72 alone; 16 more don't fit; 8"


def test_a_rank_that_waits_learns_that_another_has_ended():
    script = """
import torch
from ranks import ranks

def part():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    if torch.distributed.get_rank() == 0:
        model(torch.ones(1, 3)).sum().backward()

if __name__ == "__main__":
    ranks(part, seconds=40)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "notebooks",
                          capture_output=True, text=True, timeout=120)
    assert "Connection" in done.stderr and "TimeoutError" not in done.stderr


def test_the_error_of_a_rank_is_raised_and_not_what_it_causes_on_another():
    script = """
import torch
from ranks import ranks

def part():
    if torch.distributed.get_rank() == 1:
        raise ConnectionError("Connection refused: the cause")
    torch.distributed.all_reduce(torch.ones(1))

if __name__ == "__main__":
    ranks(part, seconds=40)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "notebooks",
                          capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ConnectionError: Connection refused: the cause", done.stderr
