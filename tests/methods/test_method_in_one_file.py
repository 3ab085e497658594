"""A method in one file gets everything that a built-in one has, and nothing else is touched."""

import json
import subprocess
import sys

import pytest

METHOD = '''"""Half step: FedAvg whose server goes half of the way."""

from dataclasses import replace
from typing import ClassVar

from rescene.core.hyperparameters import hyper
from rescene.methods import register
from rescene.methods.fedavg import FedAvg


@register
class HalfStep(FedAvg):
    name: ClassVar[str] = "half_step"
    title: ClassVar[str] = "Half step"
    paper: ClassVar[str] = "for a test"
    colour: ClassVar[str | None] = "#123456"
    marker: ClassVar[str | None] = "X"

    part: float = hyper(0.5, "s", "[ours]", "how far the server goes", gt=0, le=1)

    def server_round(self, state, uploads, round, federation, rng):
        moved = super().server_round(state, uploads, round, federation, rng)
        mix = {
            key: (value + self.part * (moved.model[key] - value)).to(value.dtype) for key, value in state.model.items()
        }
        return replace(moved, model=mix)

    def nominal_memory_bytes(self, arch, num_classes):
        return 12.0
'''


LOOK = """
import sys
from pathlib import Path
from rescene.core.plugins import load_plugin
load_plugin(Path(sys.argv[1]))
from rescene.config import resolve
from rescene.testing.conformance import CHECKS
from rescene.data import stand_in
from rescene.engine import prepare_sizes
from rescene.engine.forecast import forecast
from rescene.methods import method_class, method_names
from rescene.paper.costs import client_resource_rows
from rescene.training import Training

method, fedavg = method_class("half_step"), method_class("fedavg")
assert "half_step" in method_names()
assert (method.title, method.colour, method.marker) == ("Half step", "#123456", "X")
assert [row["name"] for row in method.table()] == ["weighting", "local_ce", "part"]
assert method.compute == fedavg.compute

def foreseen(name):
    recipe = resolve("smoke", {"method": name, "model.width": 2}).recipe
    return forecast(prepare_sizes(recipe, stand_in("fashion-mini"))).measured()

assert foreseen("half_step") == foreseen("fedavg") and foreseen("half_step")["client_flops"] > 0
mine, theirs = client_resource_rows(["cifar10"], ["half_step", "fedavg"], seeds=[0])
assert mine["forecast"] == theirs["forecast"]
assert mine["nominal"]["client_state_bytes"] == theirs["nominal"]["client_state_bytes"] + 12
for check in CHECKS:
    check(method(train=Training(local_epochs=1, batch_size=8)))
"""


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "half_step.py"
    path.write_text(METHOD)
    return path


def test_name_style_cost_paper_row_and_contract(plugin):
    done = subprocess.run([sys.executable, "-c", LOOK, str(plugin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_sweep_is_planned_with_its_cost(plugin):
    words = ["sweep", "smoke", "method=half_step,fedavg", "model.width=2", "--plugin", str(plugin), "--plan", "--json"]
    done = subprocess.run([sys.executable, "-m", "rescene", *words], capture_output=True, text=True, cwd=plugin.parent)
    assert done.returncode == 0, done.stderr
    cells = [row for row in json.loads(done.stdout) if "client_flops" in row]
    assert len(cells) == 2 and cells[0]["client_flops"] == cells[1]["client_flops"] > 0


BARE = '''"""Two verbs and a name, and not a word about itself."""

from dataclasses import replace

from rescene.methods import register
from rescene.methods.base import Method


@register
class Bare(Method):
    name = "bare"

    def client_round(self, payload, shard, client_state, rng):
        return {"model": payload["model"]}, client_state

    def server_round(self, state, uploads, round, federation, rng):
        return replace(state, model=next(iter(uploads.values()))["model"])
'''

COMMANDS = """
import contextlib
import sys
from rescene.cli.app import main
path, folder = sys.argv[1:]
for words in (
    f"run smoke method=bare --out {folder}",
    "list methods",
    "list methods --verified",
    "method explain bare",
    "privacy smoke method=bare",
):
    sys.argv = ["rescene", *words.split(), "--plugin", path]
    with contextlib.suppress(SystemExit):
        main()
"""


def test_a_method_that_says_nothing_of_itself_is_run_and_shown(tmp_path):
    path, folder = tmp_path / "bare.py", tmp_path / "run"
    path.write_text(BARE)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(path), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "error" not in done.stderr, done.stderr
    assert "What leaves a site: not said." in done.stdout
    assert "method: bare (bare)\npaper: not said\nleaves the site: not said" in done.stdout
    assert json.loads((folder / "results.json").read_text())["style"]["title"] == "bare"
