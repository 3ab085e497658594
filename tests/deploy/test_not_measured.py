"""Behind a guarantee the sites answer no evaluation: everybody is told before the run, and nothing is made up after it."""

import json
import math
from pathlib import Path

import pytest
import yaml
from local_sites import events
from own_sites import NAMES, own_sites, plan_of, run_plan, write_images
from test_lens_sites import SEEN, small_lens

import rescene
from rescene.api import Result
from rescene.cli.running import print_summary
from rescene.config import resolve
from rescene.core.errors import RunError
from rescene.core.noised_accuracy import points_off
from rescene.deploy.checks import check_site
from rescene.deploy.operator import accuracy_rows, declined, left_out_rows
from rescene.deploy.plan_file import accuracy_warning, with_plan
from rescene.privacy.mechanism import count_deviation
from rescene.privacy.promise import HOW_TO_MEASURE
from rescene.report import load_run, write_report
from rescene.report.groups import group_runs
from rescene.report.summary import model_card, verdict

PLAN = plan_of((NAMES, 1))


@pytest.fixture
def run(tmp_path):
    """A run of sums with a guarantee across three sites, without Flower; ``sites.json`` as the operator's watch writes it."""
    lens = small_lens(tmp_path / "lens.safetensors")
    folders, folder = own_sites(tmp_path, lens=lens), tmp_path / "run"
    run_plan(PLAN, folder, folders, [*SEEN, f"model.lens={lens}", "federation.per_round=3"])
    sites = ", ".join(f'{{"client": {k}, "name": "{name}"}}' for k, name in enumerate(("graz", "lyon", "turin")))
    (folder / "sites.json").write_text(f'{{"federation": "clinic", "sites": [{sites}]}}')
    return folder


def test_the_run_says_at_its_start_that_accuracy_will_not_be_measured(run, tmp_path):
    (told,) = [event for event in events(run) if event["code"] == "W560"]
    assert "evaluation_sigma" in told["message"] and "test: FOLDER" in told["message"]
    test = str(write_images(tmp_path / "test", dict.fromkeys(NAMES, 4), site=9))
    recipes = {
        "guarantee": (SEEN, PLAN),
        "test images": (SEEN, plan_of((NAMES, 1), test=test)),
        "no guarantee": (["method=fedavg"], PLAN),
    }
    warned = {
        name: accuracy_warning(with_plan(resolve("smoke", more), plan, 3, tmp_path / "none").recipe)
        for name, (more, plan) in recipes.items()
    }
    assert [name for name, warning in warned.items() if warning] == ["guarantee"]


def test_a_run_with_another_task_says_it_once(tmp_path):
    lens = small_lens(tmp_path / "lens.safetensors")
    folders, settings = own_sites(tmp_path, lens=lens), [*SEEN, f"model.lens={lens}", "federation.per_round=3"]
    for plan in (plan_of((NAMES[:2], 1)), plan_of((NAMES[:2], 1), (NAMES[2:], 1))):
        run_plan(plan, tmp_path / "run", folders, settings)
    told = [event["code"] for event in events(tmp_path / "run")]
    assert told.count("W560") == 1 and told.count("I401") == 1


def test_the_report_says_that_the_run_finished_and_shows_no_figure_that_nobody_measured(run, tmp_path, capsys):
    found = load_run(run)
    assert found.results.aa is None and found.results.forgetting is None and found.results.bwt is None
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "has finished; its accuracy was not measured." in page and "No run has finished" not in page
    assert "Left out: nothing" not in page and page.count("its floor allows no evaluation") >= 3
    assert "evaluation_sigma" in page.split("<nav")[0]
    card = model_card(found)
    assert "not measured" in card.split("## Accuracy")[1].split("##")[0] and "it forgot" not in card
    print_summary([Result(run, json.loads((run / "results.json").read_text()))], tmp_path / "report.html")
    said = capsys.readouterr().out
    assert "accuracy not measured" in said
    assert "no images sent" in said, "sums were sent, and no image"


def test_status_and_report_list_the_same_answers_as_left_out(run):
    rows = left_out_rows([run], ["graz", "lyon", "turin"])
    assert [row["name"] for row in rows[:3]] == ["graz", "lyon", "turin"] and "E413" in rows[0]["state"]


def test_a_site_is_told_by_its_check(tmp_path):
    folder = own_sites(tmp_path)[0]
    behind = resolve("smoke", [*SEEN, "model.lens=leaves"]).recipe

    def told(recipe):
        return [row["result"] for row in check_site(folder, recipe) if row["check"].startswith("accuracy")]

    assert "will not be measured" in told(behind)[0] and "evaluation_sigma" in told(behind)[0]
    assert told(resolve("smoke", ["method=fedavg"]).recipe) == []
    section = yaml.safe_load((folder / "site.yaml").read_text())
    noisy = section | {"privacy": {"epsilon_max": 8, "evaluation_sigma": 2}}
    (folder / "site.yaml").write_text(yaml.safe_dump(noisy))
    assert "with noise" in told(behind)[0]


def test_one_model_is_counted_once_and_everybody_says_how_far_noise_moves_its_accuracy(tmp_path, capsys):
    """Behind a floor each answer is charged: the last round of a task and the task's end have the same model."""
    lens = small_lens(tmp_path / "lens.safetensors")
    floors = {"epsilon_max": 20, "evaluation_sigma": 2}
    folders = own_sites(tmp_path, lens=lens, privacy=floors)
    run_plan(PLAN, tmp_path / "run", folders, [*SEEN, f"model.lens={lens}", "federation.per_round=3"])
    ledger = [json.loads(line) for line in (folders[0] / "state" / "ledger.jsonl").read_text().splitlines()]
    assert sum(line.get("charge", {}).get("mechanism") == "evaluation" for line in ledger) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["accuracy"] == pytest.approx(rows[1]["accuracy"][0])
    (line,) = [line for line in verdict(group_runs([load_run(tmp_path / "run")])).lines if "noise" in line]
    assert "points (one deviation)" in line
    (row,) = accuracy_rows(tmp_path / "run")
    assert row["state"] == line, "deploy status has the figure of the report"
    print_summary([rescene.load(tmp_path / "run")], tmp_path / "report.html")
    assert line in capsys.readouterr().out
    (tmp_path / "run" / "results.json").unlink()
    assert "Sites put noise" in accuracy_rows(tmp_path / "run")[0]["state"], "also while the run goes on"


def test_the_rule_for_the_number_of_held_out_images_is_that_of_the_mechanism():
    off = points_off([count_deviation(2.0, 3)] * 3, 4, 300, 70.0)
    assert off == pytest.approx(420 * math.sqrt(3 * 4) / 300, rel=0.01) and f"{off:.0f} points" in HOW_TO_MEASURE
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    assert "420 sqrt(sites x classes) / (held-out images of all sites)" in page and f"{off:.0f} points" in page


def test_who_declined_is_told_on_the_first_screen_and_to_the_operator(tmp_path):
    lens = small_lens(tmp_path / "lens.safetensors")
    folders = own_sites(tmp_path, lens=lens)
    section = yaml.safe_load((folders[1] / "site.yaml").read_text())
    (folders[1] / "site.yaml").write_text(yaml.safe_dump(section | {"privacy": {"epsilon_max": 8, "min_sigma": 50.0}}))
    run_plan(PLAN, tmp_path / "run", folders, [*SEEN, f"model.lens={lens}", "federation.per_round=3"])
    (told,) = declined(tmp_path / "run", ["graz", "lyon", "turin"])
    assert told.startswith("lyon, task 1, round 1:") and "below its floor 50" in told
    assert any("declined to send" in line for line in verdict(group_runs([load_run(tmp_path / "run")])).lines)


def test_a_task_of_which_no_site_sends_anything_does_not_end(tmp_path):
    """The model would guess its classes behind a guarantee. Once the floors allow it, the same command goes on."""
    lens = small_lens(tmp_path / "lens.safetensors")
    folders = own_sites(tmp_path, lens=lens, privacy={"epsilon_max": 8, "min_sigma": 50.0})
    settings = [*SEEN, f"model.lens={lens}", "federation.per_round=3"]
    with pytest.raises(RunError, match="E377"):
        run_plan(PLAN, tmp_path / "run", folders, settings)
    own_sites(tmp_path, lens=lens, privacy={"epsilon_max": 8, "min_sigma": 0.5})
    results = run_plan(PLAN, tmp_path / "run", folders, settings)
    assert results["privacy"]["epsilon"] == pytest.approx(8.0, abs=0.01)
    assert load_run(tmp_path / "run").finished
