"""Figures that people wrote by hand stand in a generated table, in a stored run or in the paper."""

import re
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev

import pytest

from rescene.paper import Store, printed
from rescene.paper.missing_runs import SLOWER
from rescene.paper.recipes import recipe_names

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- rescene paper: \w+ -->\n.*?<!-- end -->", re.DOTALL)
FIGURE = re.compile(r"(?<![\d.])[1-9]\d*\.\d\d(?!\.?\d)")  # also at the end of a sentence
PAGES = (
    *("README.md", "docs/paper.md", "results/controls/README.md"),
    *(f"docs/methods/{name}.md" for name in ("fedcbdr", "glfc", "refed", "rescene")),
)


@pytest.fixture(scope="module")
def known():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/paper.md")]
    found = {figure for text in texts for block in BLOCK.findall(text) for figure in FIGURE.findall(block)}
    for number in (number for name in recipe_names(lite=False) for number in printed(name)):
        found |= {f"{value:.2f}" for value in (number.mean, number.std) if value is not None}
    seeds = {}
    for run in Store([ROOT / "results"]).all():
        seeds.setdefault(re.sub(r"-s\d+$", "", str(run.folder)), []).append((run.results.aa, run.results.aia))
        work = run.results.cost.measured.client_flops
        values = (run.results.aa, run.results.aia, work / 1e15 if work else None)
        found |= {f"{value:.2f}" for value in values if value is not None}
    for values in (values for runs in seeds.values() if len(runs) > 1 for values in zip(*runs, strict=True)):
        found |= {f"{mean(values):.2f}", f"{stdev(values):.2f}"}
    found |= set(FIGURE.findall((files("rescene.paper") / "explained.csv").read_text(encoding="utf-8")))
    return found | {str(factor) for factor in SLOWER.values()}


def unknown(text, known):
    return sorted(set(FIGURE.findall(BLOCK.sub("", text))) - known)


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_in_a_sentence_is_known(page, known):
    text = (ROOT / page).read_text(encoding="utf-8").replace("Python 3.11", "")
    assert unknown(text, known) == []


def test_a_wrong_digit_is_noticed(known):
    text = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    assert unknown(text.replace("FedCBDR 64.11", "FedCBDR 64.71"), known) == ["64.71"]
