"""The set-up of a run: initial weights, participants, devices."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rescene.config import resolve
from rescene.engine.experiment import pick_device, prepare
from rescene.errors import ConfigError


def test_initial_weights_from_a_file(tmp_path):
    donor = prepare(resolve("smoke", ["seed=9"]).recipe).initial_net()
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    net = prepare(resolve("smoke", [f"model.init={tmp_path / 'w.safetensors'}"]).recipe).initial_net()
    given = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(value, given[key]) for key, value in net.state_dict().items())


def test_initial_weights_that_do_not_fit_are_refused(tmp_path):
    donor = prepare(resolve("smoke", ["model.width=8"]).recipe).initial_net()
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ConfigError):
        prepare(resolve("smoke", [f"model.init={tmp_path / 'w.safetensors'}"]).recipe).initial_net()


def test_participants_depend_on_seed_task_and_round_only():
    a, b = (prepare(resolve("smoke", [f"method={name}"]).recipe) for name in ("rescene", "fedavg"))
    for task in a.tasks:
        for r in range(5):
            drawn = a.participants(task, r)
            assert drawn == b.participants(task, r) and len(set(drawn)) == 2 and drawn == sorted(drawn)
    assert len({tuple(a.participants(a.tasks[0], r)) for r in range(20)}) > 1


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError):
        pick_device("warp")
    assert pick_device("cpu").type == "cpu"
