"""The site: its generated pages say everything the program has, and it builds without a warning and fetches nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from generate import commands, keys, methods, status

from rescene.cli.app import app
from rescene.config import resolve
from rescene.methods import method_class
from shipped_methods import SHIPPED

DOCS = Path(__file__).parents[2] / "docs"


def test_every_command_and_option_is_in_the_reference():
    page = commands.page()
    for name, command in commands.leaves(typer.main.get_command(app), "rescene"):
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert all(f"`{option}`" in section for p in command.params for option in p.opts if option.startswith("--")), (
            name
        )
        assert command.help.split(".")[0].split("(")[0][:20].strip() in section, f"{name} does not say what it does"


def test_every_key_is_in_the_reference():
    page = keys.page()
    wanted = [key for key in resolve("demo").flat() if not key.startswith(("method", "sites"))]
    assert len(wanted) > 30 and [key for key in wanted if f"| `{key}` |" not in page] == []


def test_every_method_has_a_page_with_its_hyperparameters_and_what_leaves_the_site():
    pages = methods.pages()
    assert pages.keys() == set(SHIPPED) and len(SHIPPED) >= 24
    for name, text in pages.items():
        method = method_class(name)
        assert all(f"`method.{row['name']}`" in text for row in method.table()), name
        assert "leaves the site" in text and "```text" in text
    assert "| 0 | 81.97 | 84.19 | 97 % |" in pages["rescene-plus"] and "no images" in pages["fedavg"]
    assert "| reconstructed by the server |" in pages["glfc"] and "no images" not in pages["glfc"]
    toctree = (DOCS / "index.md").read_text(encoding="utf-8")
    assert all(f"generated/methods/{name}\n" in toctree for name in pages)


SECTIONS = ("equation", "hyperparameters", "cost", "leaves the site", "how it was verified")


def written_page(name):
    """What was written about a method; the three references share a page."""
    return (methods.WRITTEN / f"{'references' if name in methods.REFERENCES else name}.md").read_text(encoding="utf-8")


def sections_of(text):
    """Name in small letters -> text. A section begins with a line `## Name` or with a paragraph `**Name.** ...`."""
    found = re.split(r"^(?:## (.+)|\*\*([^*]+?)\.?\*\*)", text, flags=re.M)
    names = [(one or other).lower() for one, other in zip(found[1::3], found[2::3], strict=True)]
    return dict(zip(names, found[3::3], strict=True))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_written_page_has_the_usual_sections_and_names_every_comparison(name):
    sections = sections_of(written_page(name))
    lacking = [word for word in SECTIONS if not any(word in section for section in sections)]
    assert lacking == [] or (name in methods.REFERENCES and lacking == [*SECTIONS[:4]])
    places = {one.where.partition("::")[0] for one in method_class(name).verifications()}
    assert [place for place in sorted(places) if f"`{place}`" not in sections["how it was verified"]] == []


def numbers(text):
    """Names of deviations; `X-1..3` and `X-1, 2` stand for each.

    >>> sorted(numbers("| FOT-3..5 | FOT-7, 8 |"))
    ['FOT-3', 'FOT-4', 'FOT-5', 'FOT-7', 'FOT-8']
    """
    found = set()
    for name, first, rest in re.findall(r"\b([A-Z]+)-(\d+)((?:\.\.\d+|, \d+)*)", text):
        found |= {f"{name}-{k}" for k in [first, *re.findall(r", (\d+)", rest)]}
        found |= {f"{name}-{k}" for last in re.findall(r"\.\.(\d+)", rest) for k in range(int(first), int(last) + 1)}
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_deviations_of_a_page_stand_in_the_list_of_all(name):
    text = written_page(name)
    label = "REF" if name in methods.REFERENCES else name.replace("-", "").upper()
    own = {one for one in numbers(text) if one.startswith(f"{label}-")}
    stated = numbers((methods.WRITTEN.parent / "deviations.md").read_text(encoding="utf-8"))
    assert own == {one for one in stated if one.startswith(f"{label}-")}
    assert own or "deviations.md" in text or name == "moments", "numbered there, or it is our own"


def test_a_page_that_links_to_what_is_generated_says_where_it_comes_from():
    """docs/generated is not in a clone, so the link leads nowhere there: beside it, or once on the index, stands `make docs`."""
    for page in [page for page in DOCS.rglob("*.md") if "generated" not in page.parts]:
        paragraphs = re.split(r"\n\s*\n", page.read_text(encoding="utf-8"))
        linked = [text for text in paragraphs if re.search(r"\]\((\.\./)?generated/", text)]
        told = [text for text in paragraphs if "make docs" in text]
        assert not linked or told, page
        assert page.name == "index.md" or all(text in told for text in linked), page


def test_pages_that_the_program_and_the_release_name_exist():
    """A message, a comment or a release document says `docs/cost.md`: the page is there."""
    root = DOCS.parent
    files = [
        path
        for folder in ("src", "benchmarks", "release", "examples")
        for path in (root / folder).rglob("*")
        if path.suffix in {".py", ".md", ".yaml", ".j2"}
    ]
    named = {
        (path.name, page)
        for path in files
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [(name, page) for name, page in sorted(named) if not (root / page).exists()] == []


def test_the_status_page_is_made_from_the_results():
    text = status.page()
    assert "paper/main" in text and "results/cifar10/rescene-beta0.5-s0" in text and "not yet measured" in text


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-b",
        "html",
        "-d",
        tmp_path / "trees",
        DOCS,
        tmp_path / "html",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list((tmp_path / "html").rglob("*.html"))
    assert len(pages) > 35
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+", text)
        assert loaded == [], page.name
    assert 'id="e405"' in (tmp_path / "html" / "generated" / "errors.html").read_text(encoding="utf-8")
