"""Class means: right to the pixel, kept through a resume, and not there where they would be a leak."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rescene
from rescene.config import resolve
from rescene.engine.experiment import prepare
from rescene.engine.loop import run
from rescene.engine.observers.leakage_watch import ClassMeans, LeakageWatch, may_record
from rescene.engine.run_folder import RunFolder

SMALL = {"tasks.limit": 2, "federation.num_rounds": 2, "model.width": 8}
PRIVATE = {"privacy.mechanism": "release", "method.start": "coloured", "method.num_steps": 0, "privacy.epsilon": 8}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run, and everything that was uploaded in it, by task."""
    seen, look = [], LeakageWatch.look

    def watched(self, uploads):
        seen.extend((self.task.index, u["images"].clone(), u["labels"].clone()) for u in uploads.values())
        look(self, uploads)

    path = tmp_path_factory.mktemp("means") / "r"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeakageWatch, "look", watched)
        rescene.run("smoke", out=path, **SMALL)
    return path, seen


def test_they_are_the_means_of_all_uploads_and_of_all_real_images(finished):
    path, seen = finished
    rows, tensors = (
        json.loads((path / "surrogates.json").read_text())["means"],
        load_file(path / "surrogates.safetensors"),
    )
    e = prepare(resolve("smoke", SMALL).recipe)
    assert {row["task"] for row in rows} == {0, 1} and len(rows) == len(tensors["real_means"])
    for i, row in enumerate(rows):
        label = e.dataset.classes.index(row["class"])
        sent = torch.cat([images[labels == label] for task, images, labels in seen if task == row["task"]])
        real = e.dataset.train.pixels[e.dataset.train.labels == label]
        assert (row["num_uploads"], row["num_real"]) == (len(sent), len(real))
        mean, truth = sent.mean(dim=0), e.dataset.transform.normalise(real).mean(dim=0)
        assert row["rms"] == pytest.approx(float((mean - truth).square().mean().sqrt()), abs=1e-5)
        for name, wanted in (("surrogate_means", mean), ("real_means", truth)):
            apart = tensors[name][i].int() - e.dataset.transform.to_pixels(wanted).int()
            assert int(apart.abs().max()) <= 1  # sums in another order may round otherwise


def test_an_interrupted_run_ends_with_the_same_means(finished, tmp_path):
    def stop(event):
        if event["event"] == "round" and event["task"] == 1 and event["round"] == 1:
            raise KeyboardInterrupt

    resolved = resolve("smoke", SMALL)
    with pytest.raises(KeyboardInterrupt):
        run(resolved, RunFolder(tmp_path / "r"), stop)
    rescene.run("smoke", out=tmp_path / "r", **SMALL)
    for name in ("surrogates.json", "surrogates.safetensors"):
        assert (tmp_path / "r" / name).read_bytes() == (finished[0] / name).read_bytes()


def test_a_run_with_a_guarantee_records_none(tmp_path):
    rescene.run("smoke", out=tmp_path / "r", **SMALL, **PRIVATE)
    assert "means" not in json.loads((tmp_path / "r" / "surrogates.json").read_text())
    assert not {"real_means", "surrogate_means"} & load_file(tmp_path / "r" / "surrogates.safetensors").keys()


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        ({}, True),
        (PRIVATE, False),
        (PRIVATE | {"privacy.noise": "seeded"}, True),  # guarantees nothing
        ({"federation.exclude": [1]}, False),  # a site that left is in the mean
    ],
)
def test_where_they_may_be_recorded(overrides, allowed):
    assert may_record(resolve("smoke", overrides).recipe, 2) is allowed


def test_where_they_may_not_be_a_checkpoint_brings_none_back():
    e = prepare(resolve("smoke", SMALL).recipe)
    told, silent = ClassMeans(e.dataset, True), ClassMeans(e.dataset, False)
    images, labels = torch.zeros(2, *e.dataset.train.pixels.shape[1:]), torch.tensor(e.tasks[0].classes[:1] * 2)
    told.look(images, labels)
    told.end(e.tasks[0])
    silent.restore(told.tree())
    silent.look(images, labels)
    assert told.gallery()[1] and silent.gallery() == ({}, []) and silent.tree() == {"sums": {}, "done": {}}
