"""The benchmark of torch.compile against the hand-written path: its rule, and that every way trains the same network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compile_or_kernels import verdicts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_or_kernels.py"


def test_what_does_not_win_by_a_tenth_is_deleted():
    speeds = {"kernels": 109.0, "operations": 90.0, "compiled": 100.0, "plain": 20.0}
    others = {"condensation": {"kernels": 11.5, "operations": 10.0}}
    assert verdicts({"server": {"images_per_s": speeds}, "others": others}) == {
        "kernels in server training": "DELETE: 1.09x",
        "CUDA graph in server training": "keep: 5.45x",
        "kernels in condensation": "keep: 1.15x",
    }


@pytest.mark.slow
def test_every_way_reaches_the_same_loss():
    done = subprocess.run([sys.executable, str(SCRIPT), "--dry-run", "--turns", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[0])
    assert set(losses) == {"kernels", "operations", "compiled", "plain"}
    assert max(losses.values()) - min(losses.values()) < 1e-3
