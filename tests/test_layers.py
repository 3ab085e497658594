"""Imports point one way, and the command line starts without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rescene

ROOT = Path(rescene.__file__).parent
BELOW_ALL = {"errors", "rng", "record", "hyperparameters", "run_state", "versions", "documents"}
LEVEL = {
    "functional": 0, "nets": 1, "data": 1, "privacy": 2, "lens": 2, "steps": 3, "methods": 4, "config": 5, "engine": 6,
    "deploy": 7, "audit": 8,
    "report": 8, "api": 8, "conformance": 8, "bench": 8, "paper": 9, "use": 7, "trackers": 7, "cli": 10,
    "pytest_plugin": 11,
}  # fmt: skip


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "rescene":
                yield from (f"rescene.{alias.name}" for alias in node.names)


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem in LEVEL or p.stem in BELOW_ALL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_layer_imports_only_layers_above_it(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "rescene" or len(parts) == 1 or parts[1] in {*BELOW_ALL, "__version__"}:
            continue
        other = parts[1]
        assert own not in BELOW_ALL, f"{own} is below all layers and imports {other}"
        assert other == own or LEVEL[other] < LEVEL[own], f"{own} imports {other}, which is not above it"


def test_report_reads_files_only():
    for path in (ROOT / "report").rglob("*.py"):
        names = [n for n in imports(path) if n.startswith("rescene.") and n != "rescene.__version__"]
        assert all(n.split(".")[1] in {"report", "functional", *BELOW_ALL} for n in names), (path.name, names)


def test_help_loads_no_torch():
    code = "import sys, rescene.cli.app; import typer.main; typer.main.get_command(rescene.cli.app.app); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_package_offers_its_parts_lazily():
    assert rescene.functional.herd and callable(rescene.run)
    with pytest.raises(AttributeError):
        _ = rescene.no_such_thing
