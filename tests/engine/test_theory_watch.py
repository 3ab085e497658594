"""The theory of a real run: computed again from the images, beside the training and never part of it, through a resume."""

import csv
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import rescene
from rescene.core.json_files import row_of
from rescene.engine.loop import Run
from rescene.engine.observers import theory_watch as theory
from rescene.engine.observers.theory_watch import TheoryWatch

SMALL = {"federation.num_clients": 4, "federation.per_round": 3, "federation.num_rounds": 4, "tasks.limit": 2, "method.ipc": 4,
         "method.num_steps": 2, "method.real_batch": 16, "method.budget": 12, "method.recent_fraction": 0.5,
         "model.width": 16}  # fmt: skip


def run(folder, **more):
    return rescene.run("smoke", out=folder, **{**SMALL, **{key.replace("__", "."): v for key, v in more.items()}})


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A run, and for every task what the watch was given and what it found."""
    calls, task_of, round_of = [], TheoryWatch.task, TheoryWatch.round

    def watched_task(self, task, before, after):
        rows = task_of(self, task, before, after)
        told = [row_of(row) for row in rows]
        calls.append({"task": task, "before": before, "after": after, "rows": told, "experiment": self.experiment})
        return rows

    models = {}

    def watched_round(self, task, number, model, state):
        models[task.index, number] = model
        round_of(self, task, number, model, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TheoryWatch, "task", watched_task)
        patch.setattr(TheoryWatch, "round", watched_round)
        result = run(tmp_path_factory.mktemp("seen") / "r")
    return result, calls, models


def unit_mean(net, images):
    with torch.no_grad():
        return F.normalize(net.eval().features(images), dim=1).double().mean(dim=0)


@pytest.mark.slow
def test_a_model_that_diverged_ends_no_run(tmp_path):
    """Its features are no numbers: there is nothing to say about its herding, and the run goes on."""
    result = run(tmp_path / "r", train__lr=1e20)
    found = json.loads((tmp_path / "r" / "results.json").read_text())
    assert len(found["accuracy_matrix"]) == 2, "both tasks were held"
    assert result.aa <= 60


def test_the_distances_are_those_of_the_images(seen):
    """m_H, m_P, m_W and mu of every class, each from its own pictures with plain loops."""
    _, calls, models = seen
    for call in calls:
        e, task, before = call["experiment"], call["task"], call["before"]
        net, normalise = e.arch.restore(before.model), e.dataset.transform.normalise
        pool = {
            name: torch.cat([getattr(part, name) for part in before.pool]) for name in ("images", "labels", "rounds")
        }
        kept = call["after"].buffers[-1]
        assert [row["class"] for row in call["rows"]] == [e.dataset.classes[c] for c in task.classes]
        for row, label in zip(call["rows"], task.classes, strict=True):
            real = normalise(e.dataset.train.pixels[[i for i in task.train if e.dataset.train.labels[i] == label]])
            mu, own = unit_mean(net, real), pool["labels"] == label
            recent = own & (pool["rounds"] >= 3)  # the last half of four rounds
            m_p, m_w = unit_mean(net, pool["images"][own]), unit_mean(net, pool["images"][recent])
            m_h = unit_mean(net, kept.images[kept.labels == label])
            assert row["pool_to_real"] == pytest.approx(float((m_p - mu).norm()), abs=1e-5)
            assert row["window_to_real"] == pytest.approx(float((m_w - mu).norm()), abs=1e-5)
            assert row["kept_to_real"] == pytest.approx(float((m_h - mu).norm()), abs=1e-5)
            assert row["herded_to_real"] == pytest.approx(row["kept_to_real"], abs=1e-5)  # ReSCENE keeps what is herded
            assert row["target_distance"] == pytest.approx(float((m_h - m_w).norm()), abs=1e-5)
            assert row["num_kept"] == 12 < row["num_pool"] == int(own.sum())
            assert row["num_window"] == int(recent.sum())
            assert sum(row["rounds"]["num"]) == row["num_pool"]
            mine = kept.rounds[kept.labels == label].tolist()
            assert row["rounds"]["num_kept"] == [mine.count(r) for r in row["rounds"]["round"]]
            assert row["rounds"]["recent"] == [r >= 3 for r in row["rounds"]["round"]]


def test_staleness_is_that_of_the_models_on_the_way(seen):
    _, calls, models = seen
    for call in calls:
        e, task, before = call["experiment"], call["task"], call["before"]
        normalise, labels = e.dataset.transform.normalise, e.dataset.train.labels
        for row, label in zip(call["rows"], task.classes, strict=True):
            own = [i for i in task.train.tolist() if labels[i] == label]
            real = normalise(e.dataset.train.pixels[own[:: -(-len(own) // theory.REAL_PER_CLASS)]])
            for at, number in enumerate(row["rounds"]["round"]):
                model = models[task.index, number]
                then, end = e.arch.restore(model), e.arch.restore(before.model)
                part = next(part for part in before.pool if part.rounds[0] == number)
                images = part.images[part.labels == label]
                got = {key: values[at] for key, values in row["rounds"].items()}
                delta = (unit_mean(then, images) - unit_mean(then, real)).norm()
                drifts = [float((unit_mean(end, x) - unit_mean(then, x)).norm()) for x in (images, real)]
                moved = sum(
                    float((before.model[k] - v).square().sum()) for k, v in model.items() if v.is_floating_point()
                )
                assert got["matching_error"] == pytest.approx(float(delta), abs=1e-5)
                assert [got["surrogate_drift"], got["real_drift"]] == pytest.approx(drifts, abs=1e-5)
                assert got["model_distance"] == pytest.approx(math.sqrt(moved), rel=1e-4)
                assert got["staleness_bound"] == pytest.approx(
                    got["matching_error"] + 2 * row["smoothness"] * got["model_distance"], abs=1e-6
                )


def test_the_record_and_its_tables(seen):
    result, calls, _ = seen
    record = json.loads((result.folder / "results.json").read_text())["theory"]
    assert record["classes"] == [row for call in calls for row in call["rows"]]
    assert (record["recent_fraction"], record["num_rounds"]) == (0.5, 4)
    with open(result.folder / "csv" / "theory.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [row["class"] for row in record["classes"]]
    assert float(rows[0]["target_bound"]) == record["classes"][0]["target_bound"] and "rounds" not in rows[0]
    with open(result.folder / "csv" / "theory_rounds.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(row["rounds"]["round"]) for row in record["classes"])


def test_watching_changes_nothing(seen, tmp_path, monkeypatch):
    result, _, _ = seen
    monkeypatch.setattr(TheoryWatch, "round", lambda *args: None)
    monkeypatch.setattr(TheoryWatch, "task", lambda *args: [])
    blind = run(tmp_path / "r")
    assert blind.values["theory"] is None and not (blind.folder / "csv/theory.csv").exists()
    assert {**result.values, "theory": None} == blind.values
    one, other = (load_file(r.folder / "model" / "final.safetensors") for r in (result, blind))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_a_run_stopped_inside_a_task_knows_its_earlier_rounds(seen, tmp_path, monkeypatch):
    commit = Run.commit

    def commit_then_stop(self, number):
        commit(self, number)
        if number == 4:  # begin, three rounds
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "commit", commit_then_stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r")
    monkeypatch.undo()
    assert run(tmp_path / "r").values["theory"] == seen[0].values["theory"]


@pytest.mark.slow
def test_rounds_nobody_watched_have_no_staleness(seen, tmp_path, monkeypatch):
    """A checkpoint of an older version: the task-end figures are there, those of its rounds are not."""
    watch = TheoryWatch.round
    monkeypatch.setattr(
        TheoryWatch, "round", lambda self, task, number, *rest: number > 2 and watch(self, task, number, *rest)
    )
    found, whole = run(tmp_path / "r").values["theory"]["classes"], seen[0].values["theory"]["classes"]
    for row, full in zip(found, whole, strict=True):
        for number, delta in zip(row["rounds"]["round"], row["rounds"]["matching_error"], strict=True):
            assert (delta is None) == (number <= 2)
        assert row["kept_to_real"] == full["kept_to_real"]


def test_another_buffer_is_measured_as_it_is(tmp_path):
    rows = run(tmp_path / "r", method__buffer="earliest").values["theory"]["classes"]
    assert any(abs(row["kept_to_real"] - row["herded_to_real"]) > 1e-3 for row in rows)


@pytest.mark.slow
def test_methods_that_keep_nothing_have_no_theory(tmp_path):
    assert run(tmp_path / "none", method__buffer="none").values["theory"] is None
    assert rescene.run("smoke", out=tmp_path / "fedavg", method="fedavg").values["theory"] is None
    raw = rescene.run("smoke", out=tmp_path / "raw", **{"method": "raw-upload", "tasks.limit": 1})
    assert len(raw.values["theory"]["classes"]) == 2


def test_a_pool_of_another_kind_is_left_alone(seen):
    call = seen[1][0]
    watch = TheoryWatch(SimpleNamespace(experiment=call["experiment"]))
    for pool in (torch.zeros(3), (torch.zeros(3),), None):
        other = SimpleNamespace(model=call["before"].model, pool=pool, buffers=pool)
        watch.round(call["task"], 1, other.model, other)
        assert watch.rounds == {} and watch.task(call["task"], other, other) == []


def test_sketches_keep_distances(seen, monkeypatch):
    experiment, models = seen[1][0]["experiment"], seen[2]
    a, b = models[0, 1], models[0, 4]
    exact = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a if a[k].is_floating_point()))

    def sketched(size):
        monkeypatch.setattr(theory, "SKETCH_SIZE", size)
        watch = TheoryWatch(SimpleNamespace(experiment=experiment))
        return float((watch._sketch(a) - watch._sketch(b)).double().norm())

    assert sketched(2**17) == pytest.approx(exact, rel=1e-5)
    assert sketched(2**12) == pytest.approx(exact, rel=0.1) and sketched(2**12) != pytest.approx(exact, rel=1e-5)
