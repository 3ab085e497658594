"""A layer imports only layers below it, nothing goes in circles, and the command line starts without torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rescene
from source_rules import LAYERS, LEVEL, circles, imported_layers, sources, upward_imports

ROOT = Path(rescene.__file__).parent
REPOSITORY = Path(__file__).parents[1]


def test_a_layer_imports_only_layers_below_it():
    assert upward_imports(ROOT) == []


def test_imports_have_no_circles():
    assert circles(ROOT) == []


def test_every_folder_is_a_layer_and_every_layer_is_there():
    assert {source.folder for source in sources(ROOT)} - {"__init__", "__main__"} == set(LEVEL)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/extend.md"])
def test_people_see_the_same_layers(page):
    drawn = re.findall(
        r"^core < .*\n(?: .*<.*\n)*", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert drawn == [LAYERS]


def test_report_reads_files_only():
    report = [source for source in sources(ROOT) if source.folder == "report"]
    assert report
    assert {source.place: imported_layers(source) - {"report", "functional", "core"} for source in report} == {
        source.place: set() for source in report
    }


def test_help_loads_no_torch():
    code = "import sys, rescene.cli.app; import typer.main; typer.main.get_command(rescene.cli.app.app); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_package_offers_its_parts_lazily():
    assert rescene.functional.herd and callable(rescene.run)
    with pytest.raises(AttributeError):
        _ = rescene.no_such_thing
