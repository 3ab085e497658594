"""A method states how it looks; nothing else knows its name."""

import importlib.util
import re
from pathlib import Path
from typing import ClassVar

import pytest

import rescene.report
from rescene.core import method_style
from rescene.core.errors import ConfigError
from rescene.core.method_style import GLYPHS, style_of
from rescene.methods import Method, method_class, method_names, register
from shipped_methods import SHIPPED

ROOT = Path(__file__).parents[2]


def test_the_styles_for_older_runs_are_those_of_the_registry():
    spec = importlib.util.spec_from_file_location("method_styles", ROOT / "benchmarks" / "method_styles.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.STYLES.read_text("utf-8") == script.styles(), "run: python benchmarks/method_styles.py"


def test_every_method_has_a_title_and_says_what_it_sends():
    for name in method_names():
        style = method_class(name).style()
        assert style.title and style.sends and style.uploads and style.marker in GLYPHS, name


def test_a_method_without_a_colour_gets_a_stable_one():
    class Own(Method):
        name: ClassVar[str] = "my own"

    style = Own.style()
    assert style.title == "my own" and (style.colour, style.marker) == (
        style_of("my own").colour,
        style_of("my own").marker,
    )


def test_a_method_that_says_nothing_of_itself_is_shown_by_its_name_and_as_not_said():
    class Own(Method):
        name: ClassVar[str] = "own"

    assert (Own.title, Own.paper, Own.leaves_site) == ("own", "not said", "not said")
    assert (Own.leaving(None), Own.leaving_in_short(None), Own.style().sends) == ("not said", "not said", "")


def test_a_method_that_extends_another_one_does_not_go_by_its_title():
    fedavg = method_class("fedavg")

    class Own(fedavg):
        name: ClassVar[str] = "own"

    class Quicker(fedavg):  # no new name, so not a new method
        pass

    assert Own.title == "own" and Quicker.title == fedavg.title == "FedAvg"
    assert Own.leaves_site == fedavg.leaves_site


def test_a_method_without_a_name_is_refused_when_it_is_registered():
    class Own(Method):
        pass

    with pytest.raises(ConfigError, match="the method Own has no name") as caught:
        register(Own)
    assert caught.value.code == "E111" and 'name = "own"' in caught.value.fix


@pytest.mark.parametrize(("key", "value"), [("colour", "red"), ("marker", "x"), ("uploads", "pictures")])
def test_a_style_that_cannot_be_drawn_is_refused_when_the_method_is_registered(key, value):
    class Own(Method):
        name: ClassVar[str] = "own"
        title: ClassVar[str] = "Own"

    setattr(Own, key, value)
    with pytest.raises(ConfigError, match="cannot be drawn") as caught:
        register(Own)
    assert caught.value.code == "E179" and value in caught.value.why


def test_no_file_of_the_report_or_of_core_names_a_method():
    """The product's own name aside, which stands in commands, imports and the head of a page."""
    words = {word for name in SHIPPED for word in (name, method_class(name).title.lower())}
    words -= {"rescene", "local", "joint", "target", "moments"}  # also plain words
    names = re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b", re.IGNORECASE)
    folders = [Path(module.__file__).parent for module in (rescene.report, method_style)]
    for path in (
        path for folder in folders for path in folder.glob("*") if path.suffix in (".py", ".j2", ".js", ".css")
    ):
        assert not names.findall(path.read_text("utf-8")), path.name
        plain_words = r"""(==|!=|\bin\b|[{,]) *["'](rescene|joint|local|target|moments)["'] *([:,)}]|$)"""
        assert not re.findall(plain_words, path.read_text("utf-8"), re.MULTILINE), path.name
