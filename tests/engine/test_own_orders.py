"""Runs in which every site meets the classes in an order of its own: figures with known answers, resume, refusals."""

import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import rescene
from engine.stopping import stopped_after
from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.data import Dataset, Images, SiteOrders, Task, Transform
from rescene.engine import RunFolder, prepare
from rescene.engine.continuation import continued
from rescene.engine.evaluate import evaluate
from rescene.engine.loop import run
from rescene.methods import method_class, method_names
from rescene.report import write_report
from shipped_methods import SHIPPED
from small_images import coloured_noise

TINY = {
    "tasks.order": "per-site",
    "tasks.limit": None,
    "federation.num_clients": 3,
    "model.width": 4,
    "train.batch_size": 16,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Six classes of coloured noise."""
    return coloured_noise(tmp_path_factory.mktemp("orders"), 18, 6, num_classes=6, step=35)


@pytest.fixture(scope="module")
def setting(images):
    return {**TINY, "data.path": images}


@pytest.fixture(scope="module")
def finished(setting, tmp_path_factory):
    return rescene.run("smoke", out=tmp_path_factory.mktemp("own-orders") / "run", method="fedavg", **setting)


class Says(torch.nn.Module):
    """A network that gives the picture's red value as its answer."""

    def forward(self, x):
        return torch.nn.functional.one_hot(x[:, 0, 0, 0].round().long(), 4).float()


def test_the_matrix_is_the_mean_over_sites_of_their_own_tasks():
    answers = [0, 0, 1, 1, 2, 0, 3, 0]  # two test images of each of four classes; those of 2 and 3 are half right
    pixels = torch.tensor(answers, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    test = Images(pixels, torch.arange(4).repeat_interleave(2))
    dataset = Dataset("told", tuple("abcd"), test, test, Transform((0.0,) * 3, (1 / 255,) * 3, 1))
    orders = SiteOrders((((0, 1), (2, 3)), ((1, 2), (0, 3))))
    none, new = torch.arange(0), [torch.arange(0, 6), torch.arange(6, 8)]  # a, b and c come in the first step, d later
    steps = [Task(t, orders.in_play(t), 3 + t, None, none, new[t]) for t in (0, 1)]

    first, second = (evaluate(Says(), dataset, steps[: t + 1], orders) for t in (0, 1))
    assert first.overall == pytest.approx(100 * 5 / 6) and second.overall == 75.0, "all classes that anybody has met"
    assert first.per_task == [(100 + 75) / 2], "site 0: a and b, site 1: b and c"
    assert second.per_task == [(100 + 75) / 2, (50 + 75) / 2]
    assert first.by_site == [100.0, 75.0] and second.by_site == [75.0, 75.0]
    assert second.within_task[1] == pytest.approx((75 + 75) / 2), (
        "among c and d alone, ties go to the first: c right twice"
    )


def test_with_the_same_order_for_all_the_matrix_is_the_usual_one():
    test = Images(torch.randint(4, (40, 3, 8, 8), dtype=torch.uint8), torch.arange(4).repeat_interleave(10))
    dataset = Dataset("told", tuple("abcd"), test, test, Transform((0.0,) * 3, (1 / 255,) * 3, 1))
    index = torch.arange(40).split(20)
    steps = [Task(t, (2 * t, 2 * t + 1), 2 * t + 2, None, index[t], index[t]) for t in (0, 1)]
    usual = evaluate(Says(), dataset, steps)
    own = evaluate(Says(), dataset, steps, SiteOrders((((0, 1), (2, 3)),) * 3))
    assert own.per_task == pytest.approx(usual.per_task) and own.within_task == pytest.approx(usual.within_task)
    assert own.by_site == pytest.approx([usual.overall] * 3) and own.confusion == usual.confusion


def test_sites_keep_their_images_and_train_on_their_own_classes(setting):
    own, one = (
        prepare(resolve("smoke", setting | {"method": "fedavg", "tasks.order": o}).recipe)
        for o in ("per-site", "natural")
    )
    for site in range(3):
        held, before = (torch.cat([parts[site] for parts in e.shards]).sort().values for e in (own, one))
        assert torch.equal(held, before)
        for task, parts in zip(own.tasks, own.shards, strict=True):
            labels = set(own.dataset.train.labels[parts[site]].tolist())
            assert labels <= set(own.orders.steps[site][task.index]) <= set(task.classes) <= set(range(task.num_seen))
    seen = [len({c for site in range(3) for c in own.orders.met(site, t)}) for t in range(3)]
    assert [task.num_seen for task in own.tasks] == seen and seen[-1] == 6 and seen[0] > 2


def test_the_results_tell_averages_orders_and_sites(finished):
    values, after = finished.values, finished.values["incremental_accuracy"]
    assert values["aa"] == after[-1] and values["aia"] == pytest.approx(sum(after) / 3)
    names = [name for task in values["tasks"] for name in task["classes"]]
    assert len(names) == len(set(names)) == 6 == len(values["confusion"])
    right = [row[i] for i, row in enumerate(values["confusion"])]
    assert values["aa"] == pytest.approx(100 * sum(right) / 36)
    for site in values["orders"]:
        assert sorted(sum(site["tasks"], [])) == sorted(names) and len(site["accuracy"]) == 3
        assert site["accuracy"][-1] == pytest.approx(values["aa"]), "in the end every site has met every class"
    assert [sum(v is None for v in row) for row in values["accuracy_matrix"]] == [2, 1, 0]
    assert values["cost"]["nominal"] is None and sum(task["test_size"] for task in values["tasks"]) == 36


def test_a_run_that_dies_ends_the_same(finished, setting, tmp_path):
    resolved = resolve("smoke", setting | {"method": "fedavg"})
    with stopped_after(7):  # in the second task
        run(resolved, RunFolder(tmp_path / "run"))
    assert rescene.run("smoke", out=tmp_path / "run", method="fedavg", **setting).values == finished.values


def test_report_and_leaderboard_take_it(finished, blank_figures):
    page = write_report([finished.folder], finished.folder / "r.html").read_text()
    assert "Order of classes" in page and "each site its own" in page
    checked = CliRunner().invoke(app, ["leaderboard", "check", str(finished.folder), "--rounds", "0"])
    assert checked.exit_code == 0, checked.output


def test_sums_do_not_depend_on_the_order(setting, tmp_path):
    """A known answer: the sites of Moments send the same sums in the end, whatever came first."""
    lens = {"method": "moments", "model.name": "linear", "model.lens": "waves", "train.augment": False, "model.width": None,
            "federation.num_rounds": 1, "method.num_features": 12}  # fmt: skip
    found = {
        order: rescene.run("smoke", out=tmp_path / order, **{**setting, **lens, "tasks.order": order}).values
        for order in ("natural", "per-site")
    }
    confusions = []
    for values in found.values():
        names = [name for task in values["tasks"] for name in task["classes"]]
        place = [names.index(name) for name in sorted(names)]
        confusions.append(torch.tensor(values["confusion"])[place][:, place])
    assert torch.equal(*confusions) and found["natural"]["aa"] == found["per-site"]["aa"] > 50
    assert found["natural"]["aia"] != found["per-site"]["aia"]


@pytest.mark.parametrize("name", [n for n in method_names() if method_class(n).own_orders])
def test_every_method_that_claims_it_runs(name, setting, tmp_path):
    more = {"method.local_ce": "all"} if name in ("fedlwf", "fedweit") else {}
    values = rescene.run("smoke", out=tmp_path / "run", method=name, **setting | {"tasks.limit": 2} | more).values
    assert len(values["orders"]) == 3 and not values["events_summary"]["client_failures"]
    assert all(math.isfinite(value) for value in values["incremental_accuracy"])


@pytest.mark.parametrize("name", ["rescene", "icarl", "glfc"])
def test_a_method_that_cannot_says_so_and_names_those_that_can(name):
    with pytest.raises(ConfigError, match="orders of their own") as refused:
        resolve("smoke", {"method": name, "tasks.order": "per-site"})
    assert refused.value.code == "E570" and "fedavg, fedewc" in refused.value.fix


@pytest.mark.parametrize(
    "against",
    [
        {"method.local_ce": "new"},
        {"method": "fedewc", "method.anchor": "last_round"},
        {"method": "fedlwf"},
        {"tasks.drift": 1},
        {"tasks.plan": [["Bag", "Coat"]]},
        {"tasks.scenario": "domain"},
        {"federation.partition": "lazy-dirichlet"},
        {"federation.exclude": [0]},
        {"federation.faults.attack": "flip", "federation.faults.attackers": [0]},
        {"privacy.mechanism": "dp-sgd", "privacy.epsilon": 8, "model.norm": "group"},
    ],
    ids=lambda against: next(reversed(against.values())) if len(against) == 1 else "-".join(map(str, against.values())),
)
def test_settings_that_need_one_order_are_refused(against):
    with pytest.raises(ConfigError) as refused:
        resolve("smoke", {"method": "fedavg", "tasks.order": "per-site", **against})
    assert refused.value.code == "E571" and "tasks.order=natural" in refused.value.fix


def test_across_sites_there_is_one_order():
    plan = {"tasks": [{"classes": ["a", "b"], "rounds": 2}]}
    with pytest.raises(ConfigError) as refused:
        resolve("smoke", {"method": "fedavg", "tasks.order": "per-site", "sites": plan})
    assert refused.value.code == "E572"


def test_new_classes_cannot_join_later(finished):
    with pytest.raises(ConfigError) as refused:
        continued(finished.folder, [["7"]], None)
    assert refused.value.code == "E508" and "tasks.order=per-site" in refused.value.why


def test_the_cost_can_be_told_before(setting, tmp_path):
    found = CliRunner().invoke(app, ["cost", "demo-orders", f"data.path={setting['data.path']}", "tasks.limit=2"])
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("name", ["fedavg", "joint"])
def test_a_step_may_bring_nothing_that_is_new_to_everybody(name, setting, tmp_path, blank_figures):
    """With many sites somebody meets every class at once; later steps have no test images of their own."""
    many = setting | {"federation.num_clients": 8, "federation.partition": "iid"}
    found = rescene.run("smoke", out=tmp_path / "run", method=name, **many)
    assert [task["test_size"] for task in found.values["tasks"]] == [36, 0, 0]
    assert all(value is not None for value in found.values["accuracy_matrix"][-1])
    assert "each site its own" in write_report([found.folder], tmp_path / "r.html").read_text()


def test_the_page_names_the_methods_that_can():
    page = (Path(__file__).parents[2] / "docs" / "arrivals.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if re.match(r"\| `\w+`.*\| yes", line)]
    told = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert told == {name for name in SHIPPED if method_class(name).own_orders}
