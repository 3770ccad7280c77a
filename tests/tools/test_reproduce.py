"""`make reproduce`: how it goes on, and what it counts and stores."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reproduce

ROOT = Path(__file__).resolve().parents[2]
ROWS = {row.name: row for row in reproduce.ROWS}



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


def test_a_run_that_goes_on_ends_where_an_unbroken_one_does(tmp_path, monkeypatch):
    name = "trainer-2x128-0.6-warm"
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
        mx.npx.reset_np()  # which `network` has set for ResNet-18
    return seen


@pytest.mark.parametrize(("tail", "sizes"), [
    ("actual", [16, 16, 8]), ("nominal", [16, 16, 16]), ("dropped", [16, 16])])
def test_a_step_divides_by_the_size_that_its_row_names(tail, sizes, monkeypatch):
    steps = steps_of(replace(ROWS[f"tail-{tail}"], images=40), 1, monkeypatch)
    assert steps == [(0.1, size) for size in sizes]


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


def test_published_rows_are_not_trained_on_other_data_than_mnist(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "read_data", lambda quick: ("digits", None))
    with pytest.raises(SystemExit, match="ours-1x256: was published for MNIST.*COURSE_DATA"):
        reproduce.run(ROWS["ours-1x256"], 0, tmp_path / "runs", quick=False)
    assert not (tmp_path / "runs").exists()



# --- what notebooks read ----------------------------------------------------------------------


def test_results_are_stored_when_all_runs_are_finished_and_not_before(tmp_path, capsys):
    names = "lenet-128-0.2", "lenet-one-device"
    rows = [replace(ROWS[name], epochs=1, seeds=1) for name in names]
    run = {"data": "mnist", "commit": "abc", "date": "2026-11-01", "machine": "m", "epochs": [
        {"losses": [2.0, 1.0], "accuracies": [0.5, 0.6], "seconds": 3.0}]}
    folder, to = tmp_path / "runs", tmp_path / "results"
    reproduce.write(folder / "lenet-128-0.2-0.json", run)
    reproduce.store("lenet", rows, folder, to)
    assert not to.exists() and "lenet-one-device lacks the seeds [0]" in capsys.readouterr().out
    later = {"commit": "def", "date": "2026-11-02"}
    reproduce.write(folder / "lenet-one-device-0.json", run | later)
    reproduce.store("lenet", rows, folder, to)
    stored = json.loads((to / "lenet.json").read_text())
    assert (stored["data"], stored["commit"]) == ("mnist", "abc and def")
    assert (stored["date"], stored["machine"]) == ("2026-11-01 and 2026-11-02", "m")
    due = [[{"losses": [2.0, 1.0], "accuracies": [0.5, 0.6]}]]
    assert stored["runs"]["lenet-one-device"] == due


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
