"""A lens across sites: a server without an image builds the network of its sites, and all see the same."""

import json

from local_sites import TINY, LocalPost, across, hashes, in_process, sites
from own_sites import NAMES, own_sites, plan_of, run_plan, write_images

from rescene.config import resolve
from rescene.use import open_model

LENS = ["model.name=mlp", "model.width=16", "model.lens=waves", "train.augment=false"]
SUMS = ["method.start=coloured", "method.num_steps=0", "privacy.mechanism=release", "privacy.noise_multiplier=0.2",
        "privacy.threshold=1", "privacy.send=sums", "privacy.pool=true", "privacy.mean_grid=4", "privacy.covariance_grid=2",
        "privacy.covariance_colour=true", "privacy.noise=seeded", "tasks.limit=2", "train.server_epochs=2"]  # fmt: skip


def test_the_same_bits_as_in_one_process(tmp_path):
    images = write_images(tmp_path / "images", dict.fromkeys(NAMES, 30))  # few: every site looks at all of them
    resolved = resolve("smoke", [*TINY, *LENS, *SUMS, f"data.path={images}", "data.image_size=16"])
    expected = in_process(resolved, tmp_path / "here")
    data = {"path": str(images), "image_size": 16}
    found = across(resolved, tmp_path / "there", LocalPost(sites(tmp_path, data=data)))
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here") and found["aa"] == expected["aa"]


def test_sites_with_images_of_their_own(tmp_path):
    plan = plan_of((NAMES[:2], 1), (NAMES[2:], 1))
    results = run_plan(plan, tmp_path / "run", own_sites(tmp_path), LENS)
    assert len(results["accuracy_matrix"]) == 2 and results["evaluated"] == "at the sites"
    about = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert about["arch"]["channels"] == 19 and about["picture_size"] == open_model(tmp_path / "run").image_size == 16
