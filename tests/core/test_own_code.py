"""A change of a user's own code is noticed, and a change that does nothing is not; by its file, and without one."""

import importlib.util
import itertools
import sys

import pytest

from rescene.core import own_code
from rescene.core.own_code import hashes_of, same_code

FILE = '''
"""What it is for."""
import math
from typing import ClassVar
from torch import nn

GAIN = 1.0
TABLE = {"a": 1}
TABLE["b"] = 2

def scaled(x):
    return GAIN * x

class Base:
    def end(self):
        return 1

class Idea(Base):
    """An idea."""

    FACTOR: ClassVar[float] = 1.0

    def mix(self, a, b, share=0.5, *, more=0.25):
        # towards b
        return {k: scaled(a[k] + 0.5 * (b[k] - a[k])) for k in a}

    @staticmethod
    def table():
        return TABLE

    @property
    def area(self):
        other = 2
        return math.pi * other

def other():
    return 1
'''
CHANGES = {
    "the first constant of a comprehension": ("0.5 * (b", "0.0 * (b"),
    "a default": ("share=0.5", "share=0.4"),
    "a default by keyword": ("more=0.25", "more=0.5"),
    "a class attribute": ("float] = 1.0", "float] = 0.1"),
    "a constant behind a function that it calls": ("GAIN = 1.0", "GAIN = 0.1"),
    "a function that it calls": ("GAIN * x", "GAIN + x"),
    "a property": ("math.pi *", "math.e *"),
    "the class that it extends": ("return 1\n\nclass Idea", "return 2\n\nclass Idea"),
}
IN_FILES = {
    "a table": ('{"a": 1}', '{"a": 3}'),
    "what is put into a table": ('TABLE["b"] = 2', 'TABLE["b"] = 3'),
    "where a name comes from": ("import math\n", "import cmath as math\n"),
}
NOTHING = {
    "a comment": ("# towards b", "# towards the other"),
    "a docstring": ('"""An idea."""', '"""Another sentence."""'),
    "the docstring of the file": ("What it is for.", "What it does."),
    "a line above": ("import math\n", "\n\nimport math\n"),
    "layout": ("a, b, share=0.5", "a,\n        b,\n        share=0.5"),
    "another function": ("def other():\n    return 1", "def other():\n    return 2"),
    "one more function": ("def other():", "def more():\n    return 3\n\ndef other():"),
    "an import for something else": ("from torch import nn", "from torch import nn, optim"),
    "a name that is a variable inside": ("def other():", "other = 3\ndef other():"),
    "what a script does": ("def other():", 'if __name__ == "__main__":\n    print(Idea)\ndef other():'),
}
count = itertools.count()


def hashes(tmp_path, text, change=("", ""), name="Idea"):
    """Of a class in a file; every file has a module of its own."""
    assert change[0] in text
    path = tmp_path / f"idea_{next(count)}.py"
    path.write_text(text.replace(*change, 1) if change[0] else text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    kind = getattr(module, name)
    return hashes_of([kind], own_code.functions_of(kind))


@pytest.fixture
def without_files(monkeypatch):
    monkeypatch.setattr(own_code, "source_hash", lambda *things: None)


@pytest.mark.parametrize("change", [pytest.param(value, id=key) for key, value in (CHANGES | IN_FILES).items()])
def test_a_change_in_the_file_is_noticed(tmp_path, change):
    before, after = hashes(tmp_path, FILE), hashes(tmp_path, FILE, change)
    assert "source" in before and not same_code(before, after)


@pytest.mark.parametrize("change", [pytest.param(value, id=key) for key, value in NOTHING.items()])
def test_what_does_nothing_is_not_a_change(tmp_path, change):
    before, after = hashes(tmp_path, FILE), hashes(tmp_path, FILE, change)
    assert "source" in before and same_code(before, after)


@pytest.mark.parametrize("change", [pytest.param(value, id=key) for key, value in CHANGES.items()])
def test_a_change_is_noticed_without_a_file(tmp_path, without_files, change):
    before, after = hashes(tmp_path, FILE), hashes(tmp_path, FILE, change)
    assert "instructions" in before and not same_code(before, after)


@pytest.mark.parametrize("change", [pytest.param(value, id=key) for key, value in NOTHING.items()])
def test_what_does_nothing_is_not_a_change_without_a_file(tmp_path, without_files, change):
    assert same_code(hashes(tmp_path, FILE), hashes(tmp_path, FILE, change))


def test_a_function_inside_a_function_is_known_by_its_values():
    def made(factor):
        return lambda x: factor * x

    one, same, other = (hashes_of([f], [f]) for f in (made(1.0), made(1.0), made(0.1)))
    assert "instructions" in one and same_code(one, same) and not same_code(one, other)


def test_a_class_inside_a_function_may_have_another_docstring_and_line(tmp_path):
    text = 'def made(x):\n    class Inner:\n        """One."""\n        SIZE = 3\n    return Inner\nEnd = lambda: made(1)\n'

    def told(text):
        space = {"__name__": "none"}
        exec(text, space)
        return hashes_of([space["End"]], [])

    before = told(text)
    assert "instructions" in before and same_code(before, told("\n\n" + text.replace("One.", "Two.")))
    assert not same_code(before, told(text.replace("SIZE = 3", "SIZE = 4")))


def test_a_file_that_was_edited_after_it_was_loaded_counts_as_it_was(tmp_path):
    path = tmp_path / "edited_idea.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    own_code.remember_source(module)
    spec.loader.exec_module(module)
    path.write_text(FILE.replace("GAIN = 1.0", "GAIN = 0.1"))
    assert same_code(hashes_of([module.Idea], []), hashes(tmp_path, FILE))


def test_the_text_gives_one_hash_under_every_python(tmp_path):
    """The value was computed under Python 3.11; a stored hash must not change with the interpreter."""
    assert hashes(tmp_path, FILE)["source"] == "5facb479c5b83988"
