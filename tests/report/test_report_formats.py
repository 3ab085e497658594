"""One grid, six forms: the same figures, marked and escaped as each form needs it."""

from __future__ import annotations

import csv
import io
import json

import pytest
from page_parser import Page

from rescene.core.errors import ConfigError
from rescene.report.tables import KINDS, TableCell, TableGrid, render

GRID = TableGrid(
    "Table 1: β = 0.1",
    ("method", "AA", "near-copies"),
    (
        ("ReSCENE", TableCell(77.1234, 0.5, 3, best=True), TableCell(99.0, digits=0)),
        ("a_b|<i>&", TableCell(10.0, None, 1, note="1 of 3"), "no images"),
        ("–", TableCell(None), TableCell(float("nan"))),
    ),
    ("E_srv = 10 & 5 %",),
)


def test_text_lines_up_and_stars_the_best() -> None:
    title, _, head, rule, first, second, third, _, note = render(GRID, "text").splitlines()
    assert (title, note) == (GRID.title, GRID.notes[0])
    assert first.split() == ["ReSCENE", "77.12*", "±", "0.50", "99"]
    assert len(first) == len(rule) == len(head)  # figures end where their column ends
    assert second.index("10.00 (1 of 3)") + len("10.00 (1 of 3)") == first.index("0.50") + len("0.50")
    assert third.split() == ["–", "–", "–"]


def test_text_folds_sentences_and_keeps_what_is_shorter_on_one_line() -> None:
    why = "a reason of many words " * 8
    lines = render(
        TableGrid("", ("ours", "why", "to run"), ((TableCell(1.5), why.strip(), "rescene run x"),)), "text"
    ).splitlines()
    assert len(lines) == 5 and lines[2].startswith("1.50  a reason") and lines[2].endswith("rescene run x")
    assert " ".join(line[6:86].strip() for line in lines[2:]) == why.strip()


def test_markdown_is_bold_and_escapes_what_would_break_the_table() -> None:
    lines = render(GRID, "markdown").splitlines()
    assert "| ReSCENE | **77.12** ± 0.50 | 99 |" in lines
    assert r"| a\_b\|\<i>& | 10.00 (1 of 3) | no images |" in lines
    assert "|---|--:|--:|" in lines


def test_latex_is_booktabs_with_grey_deviation() -> None:
    text = render(GRID, "latex")
    assert r"ReSCENE & \textbf{77.12} {\scriptsize\textcolor{gray}{$\pm$ 0.50}} & 99 \\" in text
    assert r"a\_b|$<$i$>$\& & 10.00 {\scriptsize 1 of 3} & no images \\" in text
    assert r"-- & -- & -- \\" in text and r"E\_srv = 10 \& 5 \%" in text and r"$\beta$ = 0.1" in text
    assert text.isascii() and text.count("{") == text.count("}")
    assert [text.index(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == sorted(
        text.index(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")
    )


def test_csv_carries_every_digit_and_n() -> None:
    first, second, third = csv.DictReader(io.StringIO(render(GRID, "csv")))
    assert (first["AA"], first["AA std"], first["AA n"], first["near-copies"]) == ("77.1234", "0.5", "3", "99.0")
    assert (second["AA note"], second["AA std"], second["near-copies"]) == ("1 of 3", "", "no images")
    assert third["AA"] == third["near-copies"] == "" and "near-copies std" not in first


def test_json_is_strict_and_complete() -> None:
    told = json.loads(render(GRID, "json"), parse_constant=pytest.fail)
    assert told["rows"][0]["AA"] == {"mean": 77.1234, "std": 0.5, "n": 3, "best": True, "note": ""}
    assert told["rows"][2]["near-copies"]["mean"] is None and told["notes"] == list(GRID.notes)


def test_html_escapes_and_nests() -> None:
    text = render(GRID, "html")
    page = Page(text)
    assert text.isascii() and page.count("b") == 1 and page.count("i") == 0
    assert "padding" in text and page.count("style") == 1  # columns do not touch
    rules = text[text.index("<style>") + len("<style>") : text.index("</style>")].strip().split("\n")
    assert all(rule.startswith(".rescene") for rule in rules)  # the page around it keeps its own looks
    assert "a_b|<i>&" in page.text and "77.12 ± 0.50" in page.text and "Table 1: β = 0.1" in page.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_table_has_every_form(kind: str) -> None:
    assert "method" in render(TableGrid("", ("method", "AA"), ()), kind)


def test_unknown_form_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean latex") as caught:
        render(GRID, "latx")
    assert caught.value.code == "E140"


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1 entries for 2 columns"):
        TableGrid("", ("a", "b"), (("x",),))
