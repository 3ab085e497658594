"""The Triton kernels without a GPU: a process of its own runs ``kernel_checks.py`` in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("kernel_checks.py")


def test_kernels_agree_with_torch_in_tritons_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed: it exists for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CHECKS)]
    env = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\[100%\]", done.stdout), done.stdout  # not one was left out
    assert "skipped" not in done.stdout
