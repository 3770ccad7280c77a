"""`make reproduce`: what it lifts out of chapters, how it goes on, and what it counts."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reproduce
from lift import lift

ROOT = Path(__file__).resolve().parents[1]
ROWS = {row.name: row for row in reproduce.ROWS}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("COURSE_OFFLINE", "1")


# --- definitions taken out of chapters --------------------------------------------------------


def test_a_lifted_function_is_the_chapters_and_runs_without_the_rest_of_it():
    four = lift("lenet_from_scratch", "layers", "init_params")
    assert [p.shape for p in four.init_params()[::2]] == [shape for shape, *_ in four.layers]
    assert four.init_params.__code__.co_filename.endswith("04_lenet_from_scratch.py")


@pytest.mark.parametrize("name", ["no_such_name", "print", "replicas"])
def test_what_a_chapter_does_not_define_just_once_cannot_be_lifted(name):
    with pytest.raises(LookupError, match=name):
        lift("lenet_from_scratch", "layers", name)


@pytest.mark.parametrize(("model", "parameters"), [
    # convolutions: channels out x (channels in x height x width + 1); dense: out x (in + 1)
    ("cnn", 20 * 10 + 50 * (20 * 25 + 1) + 128 * (50 * 4 * 4 + 1) + 10 * 129),
    ("tutorial", 6 * 26 + 16 * (6 * 9 + 1) + 120 * (16 * 5 * 5 + 1) + 84 * 121 + 10 * 85),
])
def test_the_networks_have_the_published_sizes(model, parameters):
    import mxnet as mx

    net = reproduce.network(model)
    net.initialize()
    assert net(mx.nd.zeros((2, 1, 28, 28))).shape == (2, 10)
    assert sum(p.data().size for p in net.collect_params().values()) == parameters


# --- interrupted and run again ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["ours-2x512", "trainer-2x128-0.6-warm"])
def test_a_run_that_goes_on_ends_where_an_unbroken_one_does(name, tmp_path, monkeypatch):
    read = reproduce.read_data
    monkeypatch.setattr(reproduce, "read_data", lambda quick: (
        "few", [(images[:600], labels[:600]) for images, labels in read(quick)[1]]))
    row = replace(ROWS[name], batch=64, rate=0.05)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reproduce.run(replace(row, epochs=2), 0, whole, quick=True)
    reproduce.run(replace(row, epochs=1), 0, broken, quick=True)
    first = json.loads((broken / f"{name}-0.json").read_text())["epochs"]
    reproduce.run(replace(row, epochs=2), 0, broken, quick=True)

    one, two = (json.loads((f / f"{name}-0.json").read_text())["epochs"] for f in (whole, broken))
    assert two[:1] == first, "what was done is kept"
    assert [e["loss"] for e in one] == [e["loss"] for e in two]
    assert [e["accuracy"] for e in one] == [e["accuracy"] for e in two]
    assert one[0]["loss"] > one[1]["loss"], "or nothing was learned, and anything would be equal"
    weights = [reproduce.mx.nd.load(str(f / f"{name}-0-after-2.params")) for f in (whole, broken)]
    assert all((a == b).asnumpy().all() for a, b in zip(*weights))


# --- rates and sizes of steps -----------------------------------------------------------------


def steps_of(row, epochs, monkeypatch):
    """(rate, size) of each of a row's steps, of 40 images."""
    import mxnet as mx

    seen, real = [], mx.gluon.Trainer.step
    monkeypatch.setattr(mx.gluon.Trainer, "step", lambda self, size, **options: (
        real(self, size, **options), seen.append((self.learning_rate, size))))
    rng = np.random.default_rng(0)
    data = rng.random((40, 1, 28, 28), dtype="float32"), rng.integers(0, 10, 40, dtype="int32")
    try:
        job = reproduce.WithGluon(replace(row, batch=16), 0, [data, data])
        for number in range(epochs):
            job.epoch(number, "")
    finally:
        mx.npx.reset_np()  # which networks of chapter 08 have set
    return seen


@pytest.mark.parametrize(("tail", "sizes"), [
    ("actual", [16, 16, 8]), ("nominal", [16, 16, 16]), ("dropped", [16, 16])])
def test_a_step_divides_by_the_size_that_its_row_names(tail, sizes, monkeypatch):
    steps = steps_of(replace(ROWS[f"tail-{tail}"], images=40), 1, monkeypatch)
    assert steps == [(0.1, size) for size in sizes]


def test_the_rate_rises_over_the_first_epoch_where_the_row_says_so(monkeypatch):
    rates = [rate for rate, _ in steps_of(ROWS["trainer-2x128-0.6-warm"], 2, monkeypatch)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.6, 0.6])
    cold = [rate for rate, _ in steps_of(ROWS["trainer-2x128-0.6"], 1, monkeypatch)]
    assert cold == [0.6] * 3


def test_a_lower_rate_from_the_second_epoch_on_where_the_row_says_so(monkeypatch):
    rates = [rate for rate, _ in steps_of(ROWS["norm-later-1x64"], 3, monkeypatch)]
    assert rates == [0.1] * 3 + [0.001] * 6


def test_frozen_statistics_are_the_devices_mean_and_stay(monkeypatch):
    """And training normalises by them; `norm-later` goes on changing them."""
    import mxnet as mx

    rng = np.random.default_rng(0)
    data = rng.random((40, 1, 28, 28), dtype="float32"), rng.integers(0, 10, 40, dtype="int32")
    changed = {}
    try:
        for name in ("norm-frozen-32x2", "norm-later-32x2"):
            job = reproduce.WithGluon(replace(ROWS[name], k=2, batch=16), 0, [data, data])
            running = job.net.collect_params(".*running.*").values()
            job.epoch(0, "")
            means = [np.mean([a.asnumpy() for a in p.list_data()], axis=0) for p in running]
            assert max(np.ptp([a.asnumpy() for a in p.list_data()], axis=0).max()
                       for p in running) > 1e-6, "the devices must differ, or this shows nothing"
            job.epoch(1, "")
            changed[name] = max(np.abs(a.asnumpy() - mean).max()
                                for p, mean in zip(running, means) for a in p.list_data())
            x = mx.np.array(data[0][:4])
            with mx.autograd.train_mode():
                training = job.net(x).asnumpy()
            apart = np.abs(training - job.net(x).asnumpy()).max()
            assert (apart < 1e-6) == (name == "norm-frozen-32x2")
    finally:
        mx.npx.reset_np()
    assert changed["norm-frozen-32x2"] < 1e-6 < 1e-4 < changed["norm-later-32x2"]


def test_a_row_with_group_norm_has_no_running_statistics():
    import mxnet as mx

    try:
        names = list(reproduce.network("thin", "group").collect_params())
    finally:
        mx.npx.reset_np()
    assert sum("groupnorm" in name for name in names) == 2 * 17
    assert not any("running" in name for name in names)


# --- accuracies and ratios --------------------------------------------------------------------


def test_rows_that_fill_up_the_last_batch_are_counted_apart():
    rng = np.random.default_rng(0)
    images = rng.random((150, 1, 28, 28), dtype="float32")
    job = reproduce.WithGluon(ROWS["trainer-1x64"], 0, [(images, rng.integers(0, 10, 150))] * 2)
    scores = job.net(reproduce.mx.nd.array(images)).asnumpy()
    labels = scores.argmax(axis=1)
    labels[: len(labels) // 3] += 1  # a third is wrong, all of it among the filling rows' originals
    job = reproduce.WithGluon(ROWS["trainer-1x64"], 0, [(images, labels)] * 2)
    judged = job.judge()
    assert judged["accuracy"] == pytest.approx(100 / 150)
    assert judged["padded_accuracy"] == pytest.approx(100 / 192)  # 42 more, all of them wrong


def test_the_ratio_is_the_median_over_rounds():
    rounds = [[100, 150], [100, 180], [50, 100]]
    summary = reproduce.summary({"kept": rounds, "discarded": [[1, 9]]})
    assert summary == pytest.approx((100, 150, 1.8, 1.5, 2.0))


def test_where_too_few_rounds_were_kept_all_are_counted():
    summary = reproduce.summary({"kept": [[10, 10]], "discarded": [[10, 20], [10, 30]]})
    assert summary == pytest.approx((10, 20, 2.0, 1.0, 3.0))


def test_published_rows_are_not_trained_on_other_data_than_mnist(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "read_data", lambda quick: ("digits", None))
    with pytest.raises(SystemExit, match="ours-1x256: was published for MNIST.*COURSE_DATA"):
        reproduce.run(ROWS["ours-1x256"], 0, tmp_path / "runs", quick=False)
    assert not (tmp_path / "runs").exists()


def test_a_row_that_takes_more_memory_than_there_is_does_not_start():
    with pytest.raises(SystemExit, match="too little memory"):
        reproduce.check_memory("resnet18-2x512", 1e6)


# --- what is stored, drawn and told -----------------------------------------------------------


def test_resnets_runs_are_the_same_in_store_chapter_and_readme():
    stored = json.loads((ROOT / "notebooks/src/results/resnet18.json").read_text())["runs"]
    cells = json.loads((ROOT / "notebooks/08_resnet18.ipynb").read_text())["cells"]
    printed = "".join(line for cell in cells for output in cell.get("outputs", [])
                      for line in output.get("text", []))
    readme = (ROOT / "tests/bench/README.md").read_text()
    minutes = []
    for name, (run,) in stored.items():
        row, least = ROWS[name], [epoch["seconds"] / 60 for epoch in run]
        what = f"{row.k} device{'s' * (row.k > 1)}, batch {row.batch}"
        first, second = run
        assert f"{what}: two epochs took {sum(least):.1f} min\n" in printed
        assert (f"{what}: of all 10,000 test images {first['accuracy']:.2%} right after epoch 1, "
                f"{second['accuracy']:.2%} after epoch 2\n") in printed
        (line,) = [line for line in readme.splitlines() if f"{what}, rate {row.rate} (†)" in line]
        assert f"| {reproduce.digits(epoch['accuracy'] for epoch in run)} |" in line
        minutes.append(sum(least) / len(least))
    assert len(minutes) == 2
    assert "{:.1f} minutes on one device and {:.1f} on two".format(*minutes) in readme.replace(
        "\n", " ")


# --- the command ------------------------------------------------------------------------------


def command(folder, *arguments):
    """The script in a copy of the folder, so that its results are its own."""
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "tests/bench/reproduce.py", *arguments], cwd=folder,
                          env=env, capture_output=True, text=True)


def test_the_command_does_a_row_once_and_names_its_data(tmp_path):
    for folder in ("helpers", "tests/bench", "notebooks/src"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    first = command(tmp_path, "--quick", "--only", "trainer-2x64")
    assert first.returncode == 0, first.stderr
    results = json.loads((tmp_path / "build/reproduce-quick.json").read_text())
    (run,) = results["runs"].values()
    assert run["data"] in first.stdout and len(run["epochs"]) == 1
    assert f"{run['epochs'][0]['padded_accuracy']:.4f}".lstrip("0") in first.stdout
    again = command(tmp_path, "--quick", "--only", "trainer-2x64")
    assert again.returncode == 0 and "epoch 1/1" not in again.stdout


def test_a_row_that_is_not_there_is_an_error(tmp_path):
    failed = command(ROOT, "--only", "nothing")
    assert failed.returncode == 2 and "no row's name begins so" in failed.stderr


# --- what chapters draw -----------------------------------------------------------------------


def test_results_are_stored_when_all_runs_are_finished_and_not_before(tmp_path, capsys):
    rows = [replace(ROWS[name], epochs=1, seeds=1) for name in ("lenet-128-0.2", "lenet-nothing")]
    run = {"data": "mnist", "commit": "abc", "date": "2026-11-01", "machine": "m", "epochs": [
        {"losses": [2.0, 1.0], "accuracies": [0.5, 0.6], "seconds": 3.0}]}
    folder, to = tmp_path / "runs", tmp_path / "results"
    reproduce.write(folder / "lenet-128-0.2-0.json", run)
    reproduce.store("lenet", rows, folder, to)
    assert not to.exists() and "lenet-nothing lacks the seeds [0]" in capsys.readouterr().out
    reproduce.write(folder / "lenet-nothing-0.json", run | {"commit": "def",
                                                                       "date": "2026-11-02"})
    reproduce.store("lenet", rows, folder, to)
    stored = json.loads((to / "lenet.json").read_text())
    assert (stored["data"], stored["commit"]) == ("mnist", "abc and def")
    assert (stored["date"], stored["machine"]) == ("2026-11-01 and 2026-11-02", "m")
    assert stored["runs"]["lenet-nothing"] == [[{"losses": [2.0, 1.0], "accuracies": [0.5, 0.6]}]]


@pytest.mark.parametrize("path", sorted(reproduce.RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_what_is_stored_is_what_the_rows_ask_for(path):
    stored = json.loads(path.read_text())
    assert stored["data"] == "mnist" and "dirty" not in stored["commit"]
    asked = {row.name: row for row in reproduce.ROWS if row.chapter == path.stem}
    assert stored["runs"].keys() == asked.keys() != set()
    for name, runs in stored["runs"].items():
        assert [len(epochs) for epochs in runs] == [asked[name].epochs] * asked[name].seeds
        kept = set(reproduce.STORED[path.stem])
        assert all(epoch.keys() == kept for run in runs for epoch in run)
        assert all(len(epoch.get("accuracies", [0] * asked[name].k)) == asked[name].k
                   for run in runs for epoch in run)
