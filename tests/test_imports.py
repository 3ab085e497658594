"""Every package that the program imports is declared: by the base, or by the extra whose files import it."""

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import rescene

ROOT = Path(__file__).parents[1]
SOURCE = Path(rescene.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The files of an extra. They are loaded when somebody uses the extra, never before.
EXTRAS_OF = {
    "audit/masked.py": ["deploy"],
    "deploy/executor.py": ["deploy"],
    "deploy/flower.py": ["deploy"],
    "deploy/keys.py": ["deploy"],
    "privacy/accounting.py": ["privacy"],
    "privacy/noise.py": ["privacy"],
    "privacy/secure_sum.py": ["deploy"],
    "privacy/dp_sgd.py": ["privacy"],
    "trackers.py": ["tensorboard", "wandb", "mlflow", "trackio"],
    "lens/backbone.py": ["onnx"],
    "sweeps/cluster.py": ["slurm"],
    "sweeps/search.py": ["search"],
    "nets/timm_networks.py": ["timm"],
    "api.py": ["notebooks"],
    "data/objects.py": ["notebooks"],
    "use/formats.py": ["onnx"],
}
# Loaded in a notebook, by pytest itself, and by torch builds that bring Triton.
GUESTS = {"notebook.py": "IPython", "testing/pytest_plugin.py": "pytest", "accel/triton_kernels.py": "triton"}
INSTALLED = functools.cache(packages_distributions)
NOT_INSTALLED = {"mlflow": ["mlflow-skinny"]}  # by the tests, and its import has another name; other names are the same


def imported(path):
    """Names of foreign packages, wherever in the file they are imported."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in (full.partition(".")[0] for full in names):
            if name != "rescene" and name not in sys.stdlib_module_names:
                yield name


def names(requirements):
    return {re.match(r"[A-Za-z0-9-]+", text)[0].lower() for text in requirements}


def declared(extras=()):
    return names(PROJECT["dependencies"]).union(*(names(PROJECT["optional-dependencies"][extra]) for extra in extras))


def distributions(name):
    """Under which names a package is installed."""
    found = INSTALLED().get(name) or NOT_INSTALLED.get(name, [name])
    return {one.lower().replace("_", "-") for one in found}


def undeclared(where, found):
    """Packages among ``found`` that a file at ``where`` may not import."""
    may = declared(EXTRAS_OF.get(where, ()))
    return sorted(name for name in set(found) if not distributions(name) & may and GUESTS.get(where) != name)


def test_every_import_is_declared():
    files = {str(path.relative_to(SOURCE)): path for path in SOURCE.rglob("*.py")}
    wrong = {where: undeclared(where, imported(path)) for where, path in files.items()}
    assert {where: found for where, found in wrong.items() if found} == {}
    assert set(EXTRAS_OF) | set(GUESTS) <= set(files)


@pytest.mark.parametrize("extra", ["deploy", "privacy", "tensorboard", "wandb", "mlflow", "trackio", "onnx"])
def test_a_file_of_no_extra_may_not_import_what_an_extra_brings(extra):
    brought = names(PROJECT["optional-dependencies"][extra]) - declared()
    assert brought and undeclared("cli/app.py", brought) == sorted(brought)
