"""A layer imports only layers below it, and the command line starts without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rescene

ROOT = Path(rescene.__file__).parent
DRAWN = """\
core < functional < nets, data < accel, lens < training < privacy < methods < config < engine
     < deploy, use, trackers, notebook < audit, report, api, bench, testing < paper, sweeps < cli
"""
LEVEL = {name.strip(): level for level, names in enumerate(DRAWN.split("<")) for name in names.split(",")}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "rescene":
                yield from (f"rescene.{alias.name}" for alias in node.names)


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem in LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_layer_imports_only_layers_below_it(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "rescene" or len(parts) == 1 or parts[1] == "__version__":
            continue
        other = parts[1]
        assert other == own or LEVEL[other] < LEVEL[own], f"{own} imports {other}, which is not below it"


def test_contributors_see_the_same_layers():
    page = Path(__file__).parents[1] / "CONTRIBUTING.md"
    assert DRAWN in page.read_text(encoding="utf-8")


def test_report_reads_files_only():
    for path in (ROOT / "report").rglob("*.py"):
        names = [n for n in imports(path) if n.startswith("rescene.") and n != "rescene.__version__"]
        assert all(n.split(".")[1] in {"report", "functional", "core"} for n in names), (path.name, names)


def test_help_loads_no_torch():
    code = "import sys, rescene.cli.app; import typer.main; typer.main.get_command(rescene.cli.app.app); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_package_offers_its_parts_lazily():
    assert rescene.functional.herd and callable(rescene.run)
    with pytest.raises(AttributeError):
        _ = rescene.no_such_thing
