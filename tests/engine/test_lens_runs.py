"""Whole runs through a lens: the same in every engine, across sites, and after an interruption."""

import pytest
import torch
from safetensors.torch import load_file

import rescene
from rescene.config import resolve
from rescene.engine.loop import Run
from small_images import some_of_fashion_mini

SMALL = {"model.name": "mlp", "model.lens": "waves", "model.width": 16, "train.augment": False, "tasks.limit": 2,
         "federation.num_clients": 3, "federation.per_round": 2, "federation.num_rounds": 2, "train.server_epochs": 2,
         "federation.evaluate_every": 0, "method.start": "coloured", "method.num_steps": 0, "method.ipc": 4,
         "data.image_size": 16}  # fmt: skip
SUMS = {"privacy.mechanism": "release", "privacy.noise_multiplier": 0.2, "privacy.send": "sums", "privacy.pool": True,
        "privacy.mean_grid": 4, "privacy.covariance_grid": 4, "privacy.covariance_colour": True, "privacy.noise": "seeded",
        "privacy.threshold": 1.0}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A tenth of fashion-mini, for looking through a lens takes longer than all the rest."""
    return some_of_fashion_mini(tmp_path_factory.mktemp("images"), 150, 50)


@pytest.fixture(scope="module")
def run(images):
    return lambda folder, **more: rescene.run(
        "smoke", out=folder, **{**SMALL, **SUMS, "data.path": str(images), **more}
    )


def same(one, other):
    a, b = (load_file(made.folder / "model" / "final.safetensors") for made in (one, other))
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    return run(tmp_path_factory.mktemp("lens") / "whole")


def test_sums_through_a_lens_teach(whole):
    values = whole.values
    assert values["aa"] > 40 and values["events_summary"]["client_failures"] == 0
    numbers = 19 * 16
    each = 4 * (numbers + numbers * (numbers + 1) // 2 + 1) + 8  # of a class: mean, covariance, count; label
    sent, rest = divmod(values["cost"]["measured"]["uplink_bytes"], each)
    assert rest == 0 and 8 <= sent <= 16  # two classes of two sites in two rounds of two tasks, few of them suppressed


def test_one_by_one_is_the_same_run(run, whole, tmp_path):
    assert same(run(tmp_path / "single", **{"federation.engine": "one-by-one"}), whole)


def test_an_interrupted_run_ends_with_the_same_bits(run, whole, tmp_path, monkeypatch):
    perform = Run.perform

    def stop_after(self, step):
        perform(self, step)
        if step.task.index == 1 and step.round == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "perform", stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped")
    monkeypatch.setattr(Run, "perform", perform)
    resumed = run(tmp_path / "stopped")
    assert same(resumed, whole)
    assert (resumed.folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()


def test_pictures_travel_as_bytes_too(images, tmp_path):
    """Coded uploads have the channels of the lens."""
    found = rescene.run("smoke", out=tmp_path / "r", **{**SMALL, "data.path": str(images), "federation.wire": "uint8"})
    assert found.values["events_summary"]["client_failures"] == 0 and found.values["aa"] > 40


def test_the_forecast_of_bytes_is_what_such_a_run_sends(images):
    from rescene.engine.experiment import prepare

    recipe = resolve("smoke", [f"{key}={value}" for key, value in {**SMALL, "data.path": images}.items()]).recipe
    made = prepare(recipe)
    told = made.method.nominal_bytes(made.arch, classes_per_task=2, num_classes=4)
    assert told.up == 2 * 4 * 19 * 4 * 4 * 4  # classes, images, channels, side, side, float32
