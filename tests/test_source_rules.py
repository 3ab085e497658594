"""The rules about the source find what they must: each gets a small package with a planted violation, and one without."""

import pytest

from source_rules import budget_computations, circles, method_mentions, repeated_names, upward_imports


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
    "an entry point": "import pkgutil\npkgutil.resolve_name('rescene.engine.loop:run')",
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
    "inside a function": {
        "core/a.py": "from rescene.core import b",
        "core/b.py": "def f():\n    from rescene.core import a",
    },
    "through the package": {
        "core/__init__.py": "from rescene.core.a import f",
        "core/a.py": "from rescene.core import f",
    },
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


COMPUTATIONS = {
    "a product": "def f(epsilon, n):\n    return epsilon * n",
    "of an attribute": "total = run.privacy.epsilon * 3",
    "of a method": "total = 2 * promise.epsilon()",
    "of a key": "total = row['epsilon'] + 1",
    "of a key with more words": "total = row['epsilon, whole run'] + 1",
    "of a key that is looked up": "total = row.get('epsilon', 0.0) + 1",
    "of an attribute that is looked up": "total = getattr(run, 'epsilon') + 1",
    "of a noise multiplier": "wide = mechanism.sigma * 3",
    "one of two names": "spent, n = run.epsilon, 3\ntotal = n * spent",
    "in a loop": "for one in epsilons:\n    total = one * 2",
    "in a comprehension": "total = [2 * one for one in (run.epsilon for run in runs)]",
    "in a text": "words = f'{2 * run.epsilon:g}'",
    "of a limit": "half = floor.epsilon_max / 2",
    "in place": "total = 0.0\ntotal += run.epsilon",
    "a name for it": "def f(run, n):\n    spent = run.epsilon\n    return n * spent",
    "a name of a name": "def f(run, n):\n    if run:\n        spent = run.epsilon\n    e = spent\n    return n * e",
    "a name in an expression": "(spent := run.epsilon or 0.0)\ntotal = 3 * spent",
    "one branch": "total = (run.epsilon if run else 0.0) * 2",
    "behind float": "total = float(run.epsilon) ** 2",
    "a sum": "total = sum(run.epsilon for run in runs)",
    "an extreme": "worst = max(run.epsilon for run in runs)",
    "a function of it": "import math\nup = math.ceil(epsilon)",
    "its negative": "down = -epsilon",
    "accounting": "from rescene.privacy.accounting import epsilon_of",
    "on several lines": "from rescene.privacy.accounting import (\n    Composition,\n    sigma_for,\n)",
    "the module": "from rescene.privacy import accounting",
    "the module, plainly": "import rescene.privacy.accounting as a",
    "relative": "from ..privacy.accounting import epsilon_of",
    "from a file that has it too": "from rescene.privacy.mechanism import sigma_for",
    "the sampler": "from rescene.privacy.noise import discrete_gaussian",
    "noise of a site": "y = x + d * site.noise.normal(3)",
}


@pytest.mark.parametrize("text", COMPUTATIONS.values(), ids=COMPUTATIONS)
@pytest.mark.parametrize("folder", ["deploy", "config"])
def test_a_computation_with_epsilon_is_found(tmp_path, text, folder):
    calculus = "def epsilon_of(): ...\ndef sigma_for(): ..."
    root = planted(tmp_path, {f"{folder}/site.py": text, "privacy/accounting.py": calculus})
    found = budget_computations(root)
    assert len(found) == 1 and found[0].startswith(f"{folder}/site.py")


def test_an_epsilon_may_be_passed_on_compared_and_printed(tmp_path):
    text = (
        "from rescene.privacy.accounting import Composition, check_target\nfrom rescene.privacy.noise import Noise\n"
        "import math\nsection = Section(epsilon=privacy.epsilon)\nprint(f'{run.epsilon:.2f}', round(run.epsilon, 2))\n"
        "is_fine = math.isfinite(run.epsilon) and run.epsilon < floor.epsilon_max\ncoins = site.noise.chosen(3, 0.5)\n"
        "settings = EPSILON + ['privacy.epsilon=8']\nrow = {'epsilon': run.epsilon, 'sigma': sigma}"
    )
    computing = "def f(epsilon):\n    return 2 * epsilon"
    root = planted(tmp_path, {"cli/verbs.py": text, "privacy/mechanism.py": computing, "audit/attack.py": computing})
    assert budget_computations(root) == []


TITLES = {"fedavg": "FedAvg", "raw-upload": "Raw upload", "moments": "Moments", "rescene": "ReSCENE"}
MENTIONS = {
    "its name": "x = 'fedavg'",
    "its name with a dash": "x = {'raw-upload': 1}",
    "a setting": "x = ['method=fedavg']",
    "a setting that is a word": "x = 'try method=moments or another'",
    "in a sentence": "fix = 'use fedavg here'",
    "in an f-string": "fix = f'{x}: fedavg {y}'",
    "its title": "words = 'as FedAvg does'",
    "from its file": "from rescene.methods.fedavg import FedAvg",
    "its file": "from rescene.methods import fedavg",
    "its file, plainly": "import rescene.methods.fedavg",
    "its file, relative": "from ..methods import moments",
    "its file by name": "from importlib import import_module\nimport_module('rescene.methods.moments')",
    "behind the package": "import rescene\nrescene.methods.moments.Moments()",
    "a comparison": "is_ours = m.name == 'moments'",
    "a comparison with several": "is_ours = recipe.method.name in ('moments', 'other')",
    "a comparison of a key": "is_ours = config['method']['name'] != 'rescene'",
    "a match": "match method.name:\n    case 'moments':\n        pass",
    "past the contract": "size = getattr(experiment.method, 'sketch_columns', None)",
    "past the contract, asked": "if hasattr(method, 'budget'):\n    pass",
}


@pytest.mark.parametrize("text", MENTIONS.values(), ids=MENTIONS)
def test_knowledge_of_a_method_is_found(tmp_path, text):
    found = method_mentions(planted(tmp_path, {"engine/loop.py": text}), TITLES)
    assert found and all(place.startswith("engine/loop.py") for place in found)


def test_the_contract_and_ordinary_words_are_no_knowledge(tmp_path):
    text = (
        '"""FedAvg does this too."""\nimport rescene\nfrom rescene.methods import Method, register\n'
        "from rescene.methods.base import Uploads\nx = ['rescene run', 'local', 'fedavg2', 'method=all', 'my-fedavg']\n"
        "verb = getattr(method, name)\nsize = method.sent_size('inputs', 3)\nis_it = kind == 'moments'"
    )
    files = {"engine/loop.py": text, "methods/fedavg.py": "name = 'fedavg'", "paper/numbers.py": "row = 'fedavg'"}
    assert method_mentions(planted(tmp_path, files), TITLES) == []


REPEATED = {
    "two classes": ("class Uploads: ...", "class Uploads: ..."),
    "a class and an alias": ("class Uploads: ...", "Uploads = dict[str, int]"),
    "two aliases": ("Uploads = Literal['images']", "Uploads: TypeAlias = dict[str, int]"),
    "a class and an import": ("class Uploads: ...", "from rescene.core.styles import Kind as Uploads"),
}


@pytest.mark.parametrize("texts", REPEATED.values(), ids=REPEATED)
def test_a_name_with_two_meanings_is_found(tmp_path, texts):
    root = planted(tmp_path, {"core/styles.py": texts[0], "methods/base.py": texts[1]})
    assert repeated_names(root) == {"Uploads": ["core/styles.py", "methods/base.py"]}


def test_two_files_of_one_name_are_found(tmp_path):
    assert set(repeated_names(planted(tmp_path, {"core/theory.py": "", "engine/theory.py": ""}))) == {"theory.py"}


def test_one_meaning_one_folder_and_values_are_allowed(tmp_path):
    files = {
        "core/a.py": "Row = dict[str, int]\nLIMIT = 3\nfrom rescene.methods.base import Method",
        "methods/base.py": "Row = dict[str, int]\nLIMIT = 4\nclass Method: ...\nclass Memory: ...",
        "methods/other.py": "class Memory: ...",
    }
    assert repeated_names(planted(tmp_path, files)) == {}
