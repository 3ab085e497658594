"""Wheel and sdist: built, installed into an environment of its own away from the checkout, and used there.

Dependencies are those of this environment, so that the test needs no network; `make fresh` installs them anew.
"""

import json
import os
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["federation.num_clients=3", "federation.per_round=2", "federation.num_rounds=1", "tasks.limit=1"]
pytestmark = pytest.mark.slow


def said(*command, cwd):
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    said(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The Python of a new environment that holds the wheel, with this one's dependencies behind it."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    [wheel] = built.glob("*.whl")
    said(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        wheel,
        cwd=folder,
    )
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    # an editable install there is not followed
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return python


def test_the_wheel_runs_away_from_the_checkout(installed, tmp_path):
    place = said(installed, "-c", "import rescene; print(rescene.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(installed.parents[1])
    said(installed.parent / "rescene", "run", "smoke", *SMALL, "--out", "run", "-q", cwd=tmp_path)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["method"] == "rescene"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000  # templates are inside
    assert "paper/main" in said(installed.parent / "rescene", "paper", "list", cwd=tmp_path)  # and the paper's numbers


def test_the_wheel_brings_the_conformance_suite(installed, tmp_path):
    said(installed.parent / "rescene", "method", "new", "mine", cwd=tmp_path)
    shown = said(installed, "-m", "pytest", "--rescene", "mine.py", "-k", "unkind or streams", cwd=tmp_path)
    assert "2 passed" in shown


def test_the_wheel_is_small_and_typed(built):
    [wheel] = built.glob("*.whl")
    assert wheel.stat().st_size < 12e6
    assert "rescene/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_the_sdist_is_whole(built):
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[-1] for name in opened.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "constraints.txt", "locks/base.txt", "pyproject.toml", "docs/conf.py", "tests/conftest.py",
            "src/rescene/data/embedded/fashion-mini.npz", "examples/anchored.py",
            "release/lint.py", "containers/cpu.Containerfile"} <= names  # fmt: skip
    assert not [name for name in names if name.startswith((".venv", "runs/", "docs/_build", "docs/generated"))]
