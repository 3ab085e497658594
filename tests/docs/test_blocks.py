"""Every command block of README and docs is run, or not_run.yaml says why not; every command named in them exists."""

import re
import shutil
import subprocess
import sys

import pytest
import typer.main
from blocks import MARKS, PAGES, ROOT, Mark, commands, unused_starts
from generate.commands import leaves
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.methods import registry

SMALL = ["federation.num_clients=3", "federation.per_round=2", "federation.num_rounds=1", "tasks.limit=1", "train.server_epochs=1",
         "train.local_epochs=1"]  # fmt: skip
KNOWN = dict(leaves(typer.main.get_command(app), "rescene"))


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Where the reader of a page stands: beside a folder of images and stored runs, without CIFAR."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for c, name in enumerate(["ant", "bee", "cat", "dog", "eel"]):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(25):
            picture = random.integers(0, 60, (32, 32, 3)) + np.array([40 * c, 190 - 40 * c, 90])
            Image.fromarray(picture.clip(0, 255).astype("uint8")).save(tmp_path / "images" / name / f"{i}.png")
    shutil.copytree(ROOT / "results" / "fashion-mini", tmp_path / "runs" / "demo")
    shutil.copytree(ROOT / "results" / "theory" / "demo" / "s0", tmp_path / "runs" / "one")
    for folder in ("cifar10", "controls/rescene-beta0.5-noaug-min-s0"):
        shutil.copytree(ROOT / "results" / folder, tmp_path / "results" / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("RESCENE_RUNS", raising=False)
    registry.method_names()  # loads every method, so that only those of the page are forgotten afterwards
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def rehearsed(words):
    """The same command, but a run or a sweep only says what it would do."""
    extra = {"run": "--dry-run", "sweep": "--plan"}.get(words[0])
    return words if extra is None or extra in words else [*words, extra]


def made_small(words):
    """The same command on three sites, one round, one task."""
    small = words[0] in ("run", "sweep", "demo") and not {"--dry-run", "--plan"} & set(words)
    return [*words, *SMALL] if small else words


def run(command, adapt):
    """None if all is well, else what the command said."""
    program, *words = command.words if command.language != "python" else ("python", "-c", command.text)
    words = [word.replace("runs/...", "runs/one") for word in words]
    if program == "python":
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        return None if done.returncode == 0 else f"{command}\n{done.stdout}{done.stderr}"
    if program != "rescene":
        return f"{command}: how would a test run this? Mark it in tests/docs/not_run.yaml"
    if words[:2] == ["run", "cifar10"]:  # its images are not here; all keys and values are checked
        words = ["show", *(word for word in words[1:] if word != "--dry-run")]
    result = CliRunner().invoke(app, adapt(words), input="y\n")  # to whatever is asked
    return None if result.exit_code == 0 else f"{command}\n{result.output}{result.exception!r}"


def problems(page, marks, adapt):
    return [said for command in commands(page) if command.mark in marks and (said := run(command, adapt))]


def pages_with(*marks):
    return [page for page in PAGES if any(command.mark in marks for command in commands(page))]


def quick_first(page):
    """The README runs with every test run, the other pages with ``make check``."""
    marks = () if page.name == "README.md" else pytest.mark.slow
    return pytest.param(page, id=page.name, marks=marks)


@pytest.mark.parametrize("page", map(quick_first, pages_with("")))
def test_the_commands_of_a_page_work(page, reader):
    found = problems(page, {""}, rehearsed)
    assert not found, "\n\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("", "slow"), ids=lambda page: page.name)
def test_the_commands_of_a_page_do_what_they_say(page, reader):
    found = problems(page, {"", "slow"}, made_small)
    assert not found, "\n\n".join(found)


def test_every_command_that_a_page_names_exists():
    """In text as well as in blocks: `rescene deploy init ...` is a command, and its options are options."""
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`(rescene [^`\n]+)`", text) + [
            c.text for c in commands(page) if c.text.startswith("rescene ")
        ]
        for words in (name.split("  #")[0].split() for name in named):
            if words[1].startswith("-"):
                continue
            depth = next((n for n in (3, 2) if " ".join(words[:n]) in KNOWN), 0)
            group = any(known.startswith(" ".join(words[:2]) + " ") for known in KNOWN)  # `rescene paper`, or a|b
            options = {o for p in KNOWN[" ".join(words[:depth])].params for o in p.opts} if depth else set()
            used = {word.split("=")[0].rstrip(",;)") for word in words if re.match(r"--\w", word)} - {
                "--debug",
                "--help",
            }
            if not (depth or group) or (depth and used - options):
                wrong.append(f"{page.name}: {' '.join(words)}")
    assert wrong == []


def test_marks_choose_commands(tmp_path):
    text = (
        "```\nrescene a; rescene b x  # y\nrescene c\n```\n```\n$ rescene e\nprinted\n```\n```python\nimport a\n```\n"
    )
    marks = [Mark("not run", "far", ("rescene a", "import a")), Mark("slow", "long", ("rescene b", "rescene a"))]
    found = commands(tmp_path / "page.md", text, marks)
    assert [(c.text, c.mark) for c in found] == [("rescene a", "not run"), ("rescene b x", "slow"), ("rescene c", ""), ("rescene e", ""),
                                                 ("import a", "not run")]  # fmt: skip


def test_every_mark_is_for_a_command_of_its_page():
    assert set(MARKS) <= {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {page.name: unused for page in PAGES if (unused := unused_starts(page))} == {}


def test_a_mark_without_a_command_is_found(tmp_path):
    marks = [Mark("slow", "long", ("rescene run", "rescene gone"))]
    assert unused_starts(tmp_path / "page.md", "```\nrescene run demo\n```\n", marks) == ["rescene gone"]


def test_no_page_has_a_comment_that_serves_a_test():
    assert [page.name for page in PAGES if re.search(r"<!-- (not run|slow):", page.read_text(encoding="utf-8"))] == []
