"""The conformance suite as third parties run it: on the examples, on a method that breaks the contract, on bad input."""

import subprocess
import sys
from pathlib import Path

import pytest

from rescene.testing.conformance import CHECKS

EXAMPLES = [Path(__file__).parents[2] / "examples" / name for name in ("anchored.py", "herded_memory.py")]
CARELESS = """
from typing import ClassVar
import torch
from rescene.methods import Method, register

@register
class Careless(Method):
    name: ClassVar[str] = "careless-one"
    title: ClassVar[str] = "Careless"
    paper: ClassVar[str] = "-"
    leaves_site: ClassVar[str] = "noise"

    def client_round(self, payload, shard, client_state, rng):
        return {"noise": torch.randn(3)}, client_state

    def server_round(self, state, uploads, round, federation, rng):
        return state
"""


def check(file, *options):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "rescene.testing.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "--rescene",
        str(file),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=file.parent)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_conforms_and_is_short(file):
    code, output = check(file)
    assert code == 0 and f"{len(CHECKS)} passed" in output, output
    assert len(file.read_text(encoding="utf-8").splitlines()) < 80


def test_there_is_an_example_of_each_kind():
    assert {file.stem for file in EXAMPLES} >= {"herded_memory", "anchored"}


@pytest.mark.slow
def test_a_method_that_uses_the_global_stream_is_caught(tmp_path):
    (tmp_path / "careless_one.py").write_text(CARELESS)
    code, output = check(tmp_path / "careless_one.py", "-k", "streams or charged")
    assert code == 1 and "the global random stream was used" in output
    assert "1 failed, 1 passed" in output


@pytest.mark.slow
def test_what_cannot_be_checked_is_said(tmp_path):
    empty, careless = tmp_path / "nothing_here.py", tmp_path / "careless_one.py"
    empty.write_text("x = 1\n")
    careless.write_text(CARELESS)
    assert "E106" in check(careless, "--rescene-set", "steps")[1]
    told = check(careless, str(empty), "--rescene-set", "no_such=1")[1]
    assert "Extra inputs" in told and "nothing_here.py registers no method" in told
