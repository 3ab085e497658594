"""A network of a plug-in, or of timm, across sites: the same bits as in one process, dropout too."""

import importlib.util

import pytest
from local_sites import TINY, LocalPost, across, hashes, in_process, sites
from torch import nn

import rescene
from rescene.config import resolve

has_timm = importlib.util.find_spec("timm") is not None
NETWORKS = [
    "plugged-at-sites",
    pytest.param("timm:test_resnet", marks=[pytest.mark.slow, pytest.mark.skipif(not has_timm, reason="needs timm")]),
]


@rescene.register_model("plugged-at-sites")
def network():
    first = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*first, nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 10))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_bits_as_in_one_process(tmp_path, name):
    small = ["federation.num_rounds=1", "tasks.limit=1", "model.width=null"]
    resolved = resolve("smoke", [*TINY, "method=fedavg", f"model.name={name}", *small])
    expected = in_process(resolved, tmp_path / "here")
    found = across(resolved, tmp_path / "there", LocalPost(sites(tmp_path)))
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here") and found["aa"] == expected["aa"]
