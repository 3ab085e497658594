"""Moments across sites: the very sums of the simulator, and with seeded noise the very bits."""

import pytest
from local_sites import TINY, LocalPost, across, hashes, in_process, sites
from own_sites import NAMES, write_images

from rescene.config import resolve
from rescene.engine import RunFolder

LENS = ["model.name=linear", "model.lens=waves", "train.augment=false", "method=moments", "tasks.limit=2"]
NOISE = ["privacy.mechanism=release", "privacy.noise_multiplier=0.2", "privacy.clip=1", "privacy.noise=seeded"]


@pytest.mark.parametrize("noise", [[], NOISE], ids=["exact", "seeded noise"])
def test_the_same_sums_as_in_one_process(tmp_path, noise):
    images = write_images(tmp_path / "images", dict.fromkeys(NAMES, 12))
    settings = [word for word in TINY if not word.startswith(("method", "model"))]
    resolved = resolve("smoke", [*settings, *LENS, *noise, f"data.path={images}", "data.image_size=16"])
    expected = in_process(resolved, tmp_path / "here")
    data = {"path": str(images), "image_size": 16}
    found = across(resolved, tmp_path / "there", LocalPost(sites(tmp_path, data=data)))
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here") and found["aa"] == expected["aa"]
    one, other = (RunFolder(tmp_path / name).checkpoints.load().tree["state"].parts for name in ("here", "there"))
    assert len(one) == len(other) > 1
    for a, b in zip(one, other, strict=True):
        assert a.client == b.client and all(getattr(a, n).equal(getattr(b, n)) for n in ("counts", "sums", "second"))
