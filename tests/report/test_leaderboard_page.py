"""Rows of the leaderboard against figures computed by hand, and its page with and without its script."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from browser import CHROMIUM, browser

from rescene.core.verification import Verified
from rescene.report.leaderboard import InPaper, MethodFacts, csv_of, entries, page_of, write_leaderboard
from rescene.report.load import load_runs

LEAVES = {"moments": "noised sums", "rescene": "condensed images"}  # of other methods: weights


def put_run(root, name, aa, seed=0, *, finished=True, **more):
    """A run folder with two tasks and two sites."""
    folder = root / name
    folder.mkdir(parents=True)
    config = {
        "seed": seed,
        "method": {"name": more.get("method", "fedavg")},
        "tasks": {"scenario": "class"},
        "federation": {"beta": more.get("beta", 0.5), "num_clients": 2, "per_round": 2, "num_rounds": 3},
        "model": {"name": "convnet", "lens": None},
        "data": {"held_out": more.get("held_out", "drawn")},
        "train": {"lr": more.get("lr", 0.1), "server_epochs": 1},
    }
    results = {
        **{"method": config["method"]["name"], "seed": seed, "aa": aa, "aia": aa + 10, "config": config},
        "accuracy_matrix": [[aa + 20, None], [aa - 5, aa + 5]],
        "tasks": [{"index": i, "classes": [f"c{i}"], "test_size": 10} for i in range(2)],
        "cost": {"measured": {"uplink_bytes": 4000, "client_flops": 3e9, "server_flops": 0}},
        "leakage": {"near_copies": more["copies"], "num_images": 4} if "copies" in more else None,
        "privacy": more.get("privacy", {"private": False}),
        "style": {"title": more.get("title", "FedAvg"), "colour": "#0072b2", "marker": "o"}
        | {"uploads": more.get("uploads", "weights")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "env.json").write_text(json.dumps({"data": "toys"}))
    if finished:
        (folder / "results.json").write_text(json.dumps(results))
    return folder


def rows_of(root, verified=(), **more):
    """The rows, with what the methods of these folders say of themselves."""
    runs, _ = load_runs(sorted(path.parent for path in root.rglob("config.yaml")))
    facts = {run.folder: MethodFacts(run.style, LEAVES.get(run.method, "weights"), verified) for run in runs}
    return entries(runs, facts, **more)


@pytest.fixture
def kept(tmp_path):
    """Two seeds of one method, a private one, and one that sends images; one run is not finished."""
    root = tmp_path / "results"
    put_run(root, "a0", 40.0, 0)
    put_run(root, "a1", 44.0, 1)
    put_run(root, "going", 0.0, 2, finished=False)
    told = {"private": True, "epsilon": 8.0, "images": "drawn"}
    put_run(root, "sums", 60.0, method="moments", title="Moments", uploads="images", privacy=told)
    put_run(root, "images", 70.0, method="rescene", title="<i>Pictures</i>", uploads="images", copies=0.97, beta=0.1)
    return root


def test_rows_by_hand(kept):
    fedavg = next(row for row in rows_of(kept) if row.method == "fedavg")
    assert (fedavg.n, fedavg.aa.mean, round(fedavg.aa.std, 4)) == (2, 42.0, 2.8284)  # |44 - 40| / sqrt 2
    assert fedavg.worst_task.mean == 37.0  # (35 + 39) / 2
    assert fedavg.bytes_per_site_and_task == 1000.0  # 4000 bytes, two sites, two tasks
    assert (fedavg.leaves_text, fedavg.guarantee, fedavg.reading) == ("weights", "none", "ours")
    assert [folder.name for folder in fedavg.folders] == ["a0", "a1"]


def test_what_leaves_a_site_and_what_is_guaranteed(kept):
    rows = {row.method: row for row in rows_of(kept)}
    assert (rows["moments"].leaves_text, rows["moments"].guarantee) == ("noised sums", "epsilon 8")
    assert rows["rescene"].leaves_text == "condensed images, 97 % near-copies"


def test_problems_are_kept_apart_and_other_settings_are_other_rows(kept):
    put_run(kept, "faster", 90.0, 0, lr=0.5)
    rows = rows_of(kept)
    assert [row.problem.split for row in rows] == ["beta 0.5", "beta 0.5", "beta 0.5", "beta 0.1"]  # most methods first
    inside = [(row.label, row.n) for row in rows if row.method == "fedavg"]
    assert [n for _, n in inside] == [1, 2] and inside[0][0] != inside[1][0]


def test_runs_with_other_test_images_are_another_problem(kept):
    put_run(kept, "last", 90.0, 0, held_out="last")
    told = {row.aa.mean: row.problem.tasks for row in rows_of(kept) if row.method == "fedavg"}
    assert told == {42.0: "2 class tasks", 90.0: "2 class tasks, the last images as test"}


def test_the_problem_with_the_papers_figures_comes_first(kept):
    assert rows_of(kept)[0].problem.split == "beta 0.5"  # two methods, and one at beta 0.1
    place = {(kept / "images").resolve(): InPaper("paper's", "41.00")}
    assert [row.problem.split for row in rows_of(kept, in_paper=place)] == ["beta 0.1", "beta 0.5", "beta 0.5"]


def test_the_papers_reading_and_the_verification_come_from_outside(kept):
    place = {(kept / "a1").resolve(): InPaper("paper's", "41.00")}
    compared = (Verified("published code", "tests/x.py::test_y", "1e-6, a step"),)
    row = next(row for row in rows_of(kept, compared, in_paper=place) if row.n == 2)
    assert (row.reading, row.paper_aa, row.verified) == ("paper's", "41.00", compared)
    html, table = page_of([row], kept), csv_of([row], kept)
    told = "published code: 1e-6, a step (tests/x.py::test_y)"
    assert "<summary>published code</summary>" in html and told in html and told in table
    assert "not verified" in page_of(rows_of(kept), kept)


def test_the_page_holds_everything_without_its_script_and_fetches_nothing(kept, tmp_path):
    html = page_of(rows_of(kept), tmp_path)
    body = re.sub("<script>.*?</script>", "", html, flags=re.DOTALL)
    assert body.count("<tr data-data=") == 3 and "42.00" in body and "± 2.83" in body
    assert ">results/a0<" in body and re.findall('href="([^"]*)"', body) == ["leaderboard.csv"]  # the site holds no run
    assert "<i>Pictures" not in body and "&lt;i&gt;Pictures" in body
    assert not re.search("https?://", html) and "default-src 'none'" in html


def test_the_table_has_the_same_numbers(kept, tmp_path):
    (named,) = (row for row in csv.DictReader(csv_of(rows_of(kept), tmp_path).splitlines()) if row["n"] == "2")
    assert (named["aa"], named["aa_std"], named["bytes_per_site_and_task"]) == ("42.0", "2.83", "1000")


def test_data_sets_of_the_paper_come_first(kept):
    for number, name in enumerate(("amazon", "cifar100", "cifar10")):
        folder = put_run(kept, f"more-{number}", 50.0)
        (folder / "env.json").write_text(json.dumps({"data": name}))
    found = list(dict.fromkeys(row.problem.data for row in rows_of(kept, data_names={"toys": "office31"})))
    assert found == ["cifar10", "cifar100", "office31", "amazon"]


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")
def test_the_stored_page_fits_1280_pixels():
    inside = "(box => [box.scrollWidth, box.clientWidth])(document.querySelector('.scroll'))"
    with browser() as tab:
        tab.open(Path(__file__).parents[2] / "docs" / "leaderboard" / "index.html", width=1280)
        needed, there = tab.ask(inside)
        assert needed <= there


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")
def test_filters_and_sorting_in_a_browser(kept, tmp_path):
    page, _ = write_leaderboard(rows_of(kept), tmp_path / "board", tmp_path)
    names = (
        "[...document.querySelector('.board').tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[0].textContent)"
    )
    choose = (
        "{{const f = document.querySelector('form'); f.elements.{}.value = '{}'; f.dispatchEvent(new Event('input'));}}"
    )
    with browser() as tab:
        for width in (1280, 390):
            tab.open(page, width=width)
            assert tab.ask("document.documentElement.scrollWidth") <= width
            assert tab.ask("document.querySelector('output').value") == "3 of 3 rows"
        tab.ask("document.querySelectorAll('.board th button')[3].click()")
        assert tab.ask(names)[0] == "<i>Pictures</i>" and tab.ask(names)[-1] == "FedAvg"
        tab.ask(choose.format("guarantee", "epsilon 8"))
        assert tab.ask(names) == ["Moments"] and tab.ask("location.hash") == "#guarantee=epsilon+8"
        assert all(Path(address).suffix == ".html" for address in tab.requests)


def test_a_data_set_has_one_name_and_a_lens_is_said_where_its_work_is_not_counted(kept):
    (plain, *_) = rows_of(kept)
    assert plain.problem.data == "toys" and "+ lens" not in plain.client_flops_text
    renamed = rows_of(kept, data_names={"toys": "playthings"})
    assert {row.problem.data for row in renamed} == {"playthings"}
    behind = replace(plain, problem=replace(plain.problem, network="linear behind leaves"))
    assert behind.client_flops_text == f"{plain.client_flops_text} + lens"
