"""Where a server can reconstruct the sites' images, or gets a generator of them, no table says that there are none."""

from pathlib import Path

import pytest

import rescene
from rescene.cli.deploy_verbs import _trial_facts
from rescene.cli.running import _scores
from rescene.core.method_style import GENERATOR, RECONSTRUCTED, style_of
from rescene.deploy.trial import Trial
from rescene.methods import method_class, method_names
from rescene.paper import Store
from rescene.paper.compare import compare
from rescene.paper.paper_tables import copies
from rescene.paper.recipes import paper_recipe
from rescene.report.groups import group_runs
from rescene.report.load import load_run
from rescene.report.summary import _privacy, departure
from rescene.report.tables import comparison_grid

RESULTS = Path(__file__).parents[2] / "results"
STORED = {  # the second is older than the record of styles; the record of the third calls a generator weights
    "fashion-mini/glfc-s0": RECONSTRUCTED,
    "cifar10/glfc-beta0.5-s0": RECONSTRUCTED,
    "fashion-mini/fedcil-s0": GENERATOR,
}


def test_one_method_says_so_and_older_records_get_it():
    assert [name for name in method_names() if method_class(name).reconstructs] == ["glfc"]
    recorded = {"title": "G", "colour": "#009e73", "marker": "P", "uploads": "weights"}
    assert style_of("glfc", recorded).reconstructs and style_of("GLFC").reconstructs
    assert not style_of("glfc", recorded | {"reconstructs": False}).reconstructs
    assert style_of("my own", recorded | {"reconstructs": True}).reconstructs
    assert not style_of("my own", recorded).reconstructs and not style_of("fedavg", recorded).reconstructs
    assert [name for name in method_names() if method_class(name).uploads == "generator"] == ["fedcil"]
    assert style_of("fedcil", recorded).without_images() == GENERATOR
    assert style_of("fedavg", recorded).without_images() == "no images"


@pytest.mark.parametrize("name", STORED)
def test_tables_and_page_of_a_stored_run(name):
    run = load_run(RESULTS / name)
    (group,) = group_runs([run])
    assert STORED[name] in comparison_grid([group]).rows[0]
    assert departure(group).finding == STORED[name]
    assert _scores(rescene.load(RESULTS / name))["near-copies"] == STORED[name]


def test_the_card_says_what_the_server_can_do():
    card = _privacy(load_run(RESULTS / "fashion-mini/glfc-s0"))
    assert "the server can reconstruct images of the sites" in card and "no images" not in card
    card = _privacy(load_run(RESULTS / "fashion-mini/fedcil-s0"))
    assert "Leakage: the server gets a generator that paints pictures" in card and "no images" not in card
    assert "no images were uploaded" in _privacy(load_run(RESULTS / "fashion-mini/fedavg-s0"))


def test_a_trial_round_of_a_site():
    none = {"num_images": 0, "near_copies": 0.0, "pairs": [], "surrogates": None, "nearest": None}
    words = [RECONSTRUCTED, "no images are sent"]
    told = [_trial_facts(Trial("r", "m", "weights", [], word, False, **none)) for word in words]
    assert [facts["near-copies of own images"] for facts in told] == words


def test_a_figure_stands_only_beside_the_data_on_which_it_was_measured():
    store = Store([RESULTS / "cifar10", RESULTS / "office31"])
    lines = [line for table in ("main", "office31") for line in compare(paper_recipe(table), store, costs=False)]
    told = {line.cell.data: copies(line) for line in lines if line.cell.method == "glfc" and line.runs}
    assert told == {"cifar10": f"{RECONSTRUCTED} (9 of 10 at 46 to 50 dB)", "office31": RECONSTRUCTED}
