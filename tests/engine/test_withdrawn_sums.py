"""A site takes its sums back: the model is the one that never met it, at once and without training."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError, RunError
from rescene.engine import RunFolder
from rescene.engine.withdrawal import forget
from small_images import some_of_fashion_mini

SETTING = {"model.name": "linear", "model.lens": "waves", "train.augment": False, "method": "moments", "tasks.limit": 2,
           "federation.num_clients": 4, "federation.per_round": 2, "federation.num_rounds": 1, "data.image_size": 16}  # fmt: skip
NOISE = {"privacy.mechanism": "release", "privacy.noise_multiplier": 0.2, "privacy.clip": 1, "privacy.noise": "seeded"}
GONE = 1


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return some_of_fashion_mini(tmp_path_factory.mktemp("images"), 40, 20)


def run(images, folder, **more):
    return rescene.run("smoke", out=folder, **{**SETTING, "data.path": images, **more})


def withdraw(folder, out, client=GONE):
    return forget(RunFolder(folder), resolve(folder / "config.yaml"), client, RunFolder(out))


def head(folder):
    return load_file(folder / "model" / "final.safetensors")


@pytest.mark.parametrize("more", [{}, NOISE], ids=["exact", "noised"])
def test_the_model_is_the_one_that_never_met_the_site(images, tmp_path, more):
    whole, never = (
        run(images, tmp_path / "run", **more),
        run(images, tmp_path / "x", **more, **{"federation.exclude": [GONE]}),
    )
    record = withdraw(whole.folder, tmp_path / "new")
    with_it, without, wanted = head(whole.folder), head(tmp_path / "new"), head(never.folder)
    for key in wanted:
        assert torch.allclose(without[key], wanted[key], rtol=1e-6, atol=1e-6), key
    assert not torch.allclose(without["head.weight"], with_it["head.weight"], rtol=1e-3)
    assert record["exact"] and record["epochs"] == 0 and len(record["remains"]) == 1
    assert record["accuracy_after"] == rescene.load(tmp_path / "new").aa == never.aa
    assert [part.client for part in RunFolder(tmp_path / "new").checkpoints.load().tree["state"].parts] == [0, 2, 3]


def test_what_was_subtracted_is_told_by_class(images, tmp_path):
    folder = run(images, tmp_path / "run").folder
    record = withdraw(folder, tmp_path / "new")
    held = [row["counts"][GONE] for row in json.loads((folder / "partition.json").read_text())["tasks"]]
    assert [row["sums"] for row in record["removed"]] == [n for counts in held for n in counts if n]
    assert {row["task"] for row in record["removed"]} == {0, 1}
    assert record["num_images"] + record["num_images_left"] == 160
    (own,) = (p for p in RunFolder(folder).checkpoints.load().tree["state"].parts if p.client == GONE)
    assert record["bytes"] == sum(t.numel() * t.element_size() for t in (own.counts, own.sums, own.second))
    told = (tmp_path / "new" / "events.jsonl").read_text()
    assert "were subtracted, and the model solved anew" in told and "trained anew" not in told


def test_the_only_site_with_sums_cannot_leave(images, tmp_path):
    folder = run(images, tmp_path / "run", **{"federation.exclude": [0, 2]}).folder
    source = RunFolder(folder)
    saved = source.checkpoints.load()
    alone = tuple(part for part in saved.tree["state"].parts if part.client == GONE)
    source.checkpoints.save(saved.step, saved.tree | {"state": replace(saved.tree["state"], parts=alone)}, saved.facts)
    with pytest.raises(RunError, match="E419"):
        withdraw(folder, tmp_path / "new")


def test_sums_are_no_centre_for_surrogates():
    """privacy.centre needs pictures of earlier rounds, which a server of sums has none of."""
    with pytest.raises(ConfigError, match="privacy.centre"):
        resolve("smoke", SETTING | NOISE | {"privacy.send": "sums", "privacy.centre": "released"})


def test_where_no_task_is_announced_every_image_is_told_of_at_most_once(images, tmp_path):
    """tasks.drift: classes fade in and out over the rounds, and sites tell of an image when they first hold it."""
    drifting = {"tasks.drift": 1, "federation.num_rounds": 3, "federation.per_round": 4}
    found = run(images, tmp_path / "run", **drifting)
    state = RunFolder(found.folder).checkpoints.load().tree["state"]
    counts = sum(part.counts for part in state.parts)
    assert counts.tolist() == [40] * 4, "all images, each once"
    assert found.aa > 50
