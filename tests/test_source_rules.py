"""The rules about the source find what they must: each gets a small package with a planted violation, and one without."""

import pytest
from source_rules import circles, upward_imports


def planted(root, files):
    """A package of these files (place -> text), each with the folders above it made into packages."""
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in [one for one in path.parents if one == root or root in one.parents]:
            (folder / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    return root


UPWARDS = {
    "from": "from rescene.engine import loop",
    "plain": "import rescene.engine.loop",
    "of the package": "from rescene import engine",
    "relative": "from ..engine import loop",
    "relative, the package": "from .. import engine",
    "inside a function": "def late():\n    from rescene.engine.loop import run",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rescene.engine import loop",
    "import_module": "from importlib import import_module\nimport_module('rescene.engine.loop')",
    "renamed import_module": "from importlib import import_module as load\nload(f'rescene.engine.{1}')",
    "importlib.import_module": "import importlib\nimportlib.import_module('..engine.loop', __package__)",
    "built in": "__import__('rescene.engine')",
    "a table of modules": "HOMES = {'run': 'rescene.engine.loop'}",
    "behind the package": "import rescene\nrescene.engine.loop.run()",
    "behind the package's other name": "import rescene as r\nr.engine.loop.run()",
    "the package's own front door": "import rescene\nrescene.run('demo')",
    "a name that is put together": "from importlib import import_module\nimport_module('rescene' + '.engine')",
    "beside": "from rescene.functional.sibling import f",
}


@pytest.mark.parametrize("text", UPWARDS.values(), ids=UPWARDS)
def test_an_import_upwards_is_found(tmp_path, text):
    root = planted(tmp_path, {"core/errors.py": text, "engine/loop.py": "", "functional/sibling.py": ""})
    (found,) = upward_imports(root)
    assert found.startswith("core/errors.py imports")


def test_imports_downwards_are_allowed(tmp_path):
    text = (
        '"""See rescene.engine."""\nimport torch\nimport rescene\nfrom importlib import import_module\nrescene.__version__\n'
        "from rescene.core import errors\nfrom . import sibling\nfrom ..core.errors import E\nimport_module('timm')\n"
        "import_module(f'rescene.functional.{1}')\ninstalled('rescene.observers')"
    )
    assert upward_imports(planted(tmp_path, {"functional/herding.py": text, "core/errors.py": ""})) == []


CIRCLES = {
    "two files": {"core/a.py": "from rescene.core.b import f", "core/b.py": "import rescene.core.a"},
    "relative": {"core/a.py": "from .b import f", "core/b.py": "from . import a"},
    "inside a function": {"core/a.py": "from rescene.core import b", "core/b.py": "def f():\n    from rescene.core import a"},
    "through the package": {"core/__init__.py": "from rescene.core.a import f", "core/a.py": "from rescene.core import f"},
    "import_module": {
        "core/a.py": "from rescene.core import b",
        "core/b.py": "import importlib\nimportlib.import_module('rescene.core.a')",
    },
    "three files, one a package": {
        "core/a.py": "from rescene.data import Task",
        "data/__init__.py": "from rescene.data.tasks import Task",
        "data/tasks.py": "from rescene.core.a import f",
    },
}


@pytest.mark.parametrize("files", CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_found(tmp_path, files):
    assert len(circles(planted(tmp_path, files))) == 1


def test_a_package_that_offers_its_files_is_no_circle(tmp_path):
    files = {
        "core/__init__.py": "from rescene.core.a import f",
        "core/a.py": "from rescene.core import b",  # a file, not a name of the package
        "core/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rescene.core.a import f",
    }
    assert circles(planted(tmp_path, files)) == []
