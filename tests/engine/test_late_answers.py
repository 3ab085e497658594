"""Sites that answer when they can: what arrives when, what it counts, what is dropped, and that resuming loses nothing."""

import json
import re
from pathlib import Path

import pytest
import torch

import rescene
from engine.stopping import stopped_after
from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.engine import RunFolder
from rescene.engine.faults import LateAnswers
from rescene.engine.loop import run
from rescene.engine.run_parts import check_transport
from rescene.engine.transport import Call
from rescene.functional.model_average import changed_likewise
from rescene.methods import method_class, method_names
from rescene.methods.base import LateAnswer
from rescene.report import write_report
from shipped_methods import SHIPPED
from small_images import coloured_noise

SITES, ROUNDS = 4, 4
LENS = {"model.name": "linear", "model.lens": "waves", "train.augment": False, "method.num_features": 12}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    path = coloured_noise(tmp_path_factory.mktemp("late"), 16, 6, num_classes=4, step=50)
    return {"data.path": path, "model.width": 4, "train.batch_size": 16, "federation.num_clients": SITES,
            "federation.per_round": SITES, "federation.num_rounds": ROUNDS, "federation.partition": "iid"}  # fmt: skip


@pytest.fixture(scope="module")
def finished(setting, tmp_path_factory):
    more = {"federation.delay": 3, "federation.staleness": 2}
    return rescene.run("smoke", out=tmp_path_factory.mktemp("late-run") / "run", method="fedavg", **setting | more)


def drawn(task, r, site, delay):
    return Rng(0).at("delay", task, r, site).integer() % (delay + 1)


def replayed(delay, staleness, num_tasks=2):
    """What must happen, round by round, if all sites are drawn in every round: by the addresses alone."""
    busy, counts, events = {}, dict.fromkeys(("sent", "on_time", "late", "rounds_late", "dropped"), 0), []
    for now in range(num_tasks * ROUNDS):
        free = [site for site in range(SITES) if site not in busy]
        for site, (asked, due) in sorted(busy.items()):
            if due > now:
                continue
            del busy[site]
            kind = "dropped" if now - asked > staleness else "late"
            counts[kind] += 1
            counts["rounds_late"] += now - asked if kind == "late" else 0
            events.append(("W571" if kind == "dropped" else "W570", now // ROUNDS, now % ROUNDS, site))
        for site in free:
            late = drawn(now // ROUNDS, now % ROUNDS, site, delay)
            counts["sent"] += 1
            counts["on_time"] += not late
            if late:
                busy[site] = (now, now + late)
    return counts | {"under_way": len(busy)}, events


def test_answers_come_when_their_addresses_say(finished):
    counts, expected = replayed(delay=3, staleness=2)
    assert counts["late"] and counts["dropped"] and counts["under_way"], "the seed shows every case"
    assert finished.values["late_answers"] == counts
    events = [json.loads(line) for line in (finished.folder / "events.jsonl").read_text().splitlines()]
    told = [(e["code"], e["task"], e["round"], e["client"]) for e in events if e["code"] in ("W570", "W571")]
    assert told == expected
    words = " ".join(e["message"] for e in events if e["code"] in ("W570", "W571"))
    assert set(re.findall(r"is (\d \w+) late", words)) == {"1 round", "2 rounds", "3 rounds"}
    assert any(e["code"] == "W371" and "up to 3 rounds late" in e["message"] for e in events)
    assert finished.values["events_summary"]["client_failures"] == 0


@pytest.mark.parametrize("steps", [3, 7, 9])
def test_a_run_that_dies_keeps_the_answers_under_way(finished, setting, tmp_path, steps):
    more = {"method": "fedavg", "federation.delay": 3, "federation.staleness": 2}
    with stopped_after(steps):
        run(resolve("smoke", setting | more), RunFolder(tmp_path / "run"))
    saved = RunFolder(tmp_path / "run").checkpoints.load()
    assert saved.tree["under_way"], "somebody is busy"
    again = rescene.run("smoke", out=tmp_path / "run", **setting | more)
    assert again.values == finished.values
    same = [(place / "model" / "final.safetensors").read_bytes() for place in (again.folder, finished.folder)]
    assert same[0] == same[1]


def test_without_delay_nothing_is_new(setting, tmp_path):
    values = rescene.run("smoke", out=tmp_path / "run", method="fedavg", **setting | {"tasks.limit": 1}).values
    assert "late_answers" not in values and "simulated" not in values
    assert "under_way" not in RunFolder(tmp_path / "run").checkpoints.load().tree


def test_a_late_change_is_made_to_the_weights_of_today():
    before, after = {"w": torch.tensor([1.0]), "n": torch.tensor(3)}, {"w": torch.tensor([5.0]), "n": torch.tensor(9)}
    today = {"w": torch.tensor([10.0, 20.0]), "n": torch.tensor(7)}  # a class came since then
    moved = changed_likewise(today, before, after, weight=0.5)
    assert moved["w"].tolist() == [12.0, 20.0] and moved["n"].item() == 7
    method = method_class("fedavg")()
    late = LateAnswer({"model": after, "num_images": 2}, {"model": before}, (0,), 3, (1 + 3) ** -0.5)
    assert method.late(late, {"model": today})["model"]["w"].tolist() == [12.0, 20.0], "(1 + 3)^-0.5 is a half"
    assert method.late(LateAnswer({"num_images": 0}, {}, (0,), 1, 1.0), {"model": today}) == {"num_images": 0}


def test_a_round_of_late_and_punctual_sites_by_hand(monkeypatch):
    """Two sites, one on time and one a round late: theta + mean of the changes, the late one times 2^-0.5."""

    def draw(self):
        return {("delay", 0, 0, 1): 1}.get(self.path, 0)

    monkeypatch.setattr(Rng, "integer", draw)
    heard, counts, none = [], {}, torch.arange(0)
    late = LateAnswers(
        method_class("fedavg")(weighting="uniform"),
        1,
        None,
        0.5,
        2,
        Rng(0),
        lambda *a, **k: heard.append(a[1]),
        lambda: counts,
    )
    task = Task(0, (0, 1), 2, None, none, none)

    def call(r, theta):
        return Call("client_round", {"model": {"w": torch.tensor([theta])}}, Rng(0), task, r, 0, {}, lambda: None)

    def answers(**moved):
        return {int(k[1:]): ({"model": {"w": torch.tensor([v])}, "num_images": 1}, None) for k, v in moved.items()}

    assert late.concerns(call(0, 0.0)) and not late.concerns(call(-1, 0.0))
    first = late.on_time(call(0, 10.0), answers(s0=12.0, s1=14.0))
    assert list(first) == [0] and late.free([0, 1]) == [0] and not late.arrived(call(0, 10.0))
    there = late.arrived(call(1, 12.0)) | late.on_time(call(1, 12.0), answers(s0=13.0))
    assert late.free([0, 1]) == [0, 1] and heard == ["W570"]
    assert there[1][0]["model"]["w"].item() == pytest.approx(12 + 4 * 2**-0.5)
    state = late.method.server_round(_Theta(12.0), {k: there[k][0] for k in sorted(there)}, 1, None, Rng(0))
    assert state.model["w"].item() == pytest.approx(12 + (1 + 4 * 2**-0.5) / 2)


def _Theta(value):
    from rescene.methods.base import ModelState

    return ModelState(model={"w": torch.tensor([value])}, notes={})


def moments_run(setting, folder, **more):
    lens = {key: value for key, value in setting.items() if key != "model.width"} | LENS | {"method": "moments"}
    return rescene.run("smoke", out=folder, **lens | more)


def parts_of(found):
    return {part.client: part for part in RunFolder(found.folder).checkpoints.load().tree["state"].parts}


def test_sums_that_come_late_are_the_same_sums(setting, tmp_path):
    """A known answer: once all are there, Moments has the model of the run in which all were on time."""
    rounds = {"federation.num_rounds": 8}  # enough for every site to be free, asked and heard in both tasks
    on_time, late = (moments_run(setting, tmp_path / f"delay{d}", **rounds | {"federation.delay": d}) for d in (0, 2))
    assert late.values["late_answers"]["late"] > 0
    assert sum(int(part.counts.sum()) for part in parts_of(late).values()) == 4 * 16
    assert torch.equal(*(torch.tensor(one.values["confusion"]) for one in (on_time, late)))


def test_a_sum_that_arrives_in_the_next_task_counts_for_its_own_classes(setting, tmp_path):
    few = {"federation.num_rounds": 2, "federation.delay": 3}
    late, held = (
        moments_run(setting, tmp_path / n, **few | more) for n, more in (("a", {}), ("b", {"federation.delay": 0}))
    )
    first = [k for k in range(SITES) if drawn(0, 0, k, 3) > 1]  # asked in the first round, heard in the second task
    assert first, "the seed shows the case"
    whole, found = parts_of(held), parts_of(late)
    for site in first:
        assert found[site].counts[:2].tolist() == whole[site].counts[:2].tolist()
        assert torch.equal(found[site].sums[:2], whole[site].sums[:2])


def test_a_sum_that_crosses_tasks_keeps_its_classes():
    method = method_class("moments")()
    late = LateAnswer({"sums": torch.ones(2, 1)}, {}, (0, 1), 2, 0.5)
    assert method.late(late, {})["classes"] == [0, 1] and method.late(LateAnswer({}, {}, (0,), 1, 1.0), {}) == {}


def test_a_dropped_sum_is_told_again(setting, tmp_path):
    """A site whose answer was too old stands as if it had not been asked, so no image is lost while the task lasts."""
    old = {"federation.num_rounds": 12, "federation.delay": 2, "federation.staleness": 1, "tasks.limit": 1}
    found = moments_run(setting, tmp_path / "run", **old)
    assert any(drawn(0, 0, site, 2) == 2 for site in range(SITES)), (
        "the first answer of a site, with its sums, is too old"
    )
    assert found.values["late_answers"]["dropped"] > 0
    assert sum(int(part.counts.sum()) for part in parts_of(found).values()) == 2 * 16, "every image once"


def test_the_page_counts_them(finished, blank_figures, tmp_path):
    counts, _ = replayed(delay=3, staleness=2)
    page = write_report([finished.folder], tmp_path / "r.html").read_text()
    assert f"{counts['late']} of {counts['sent']} late, {counts['dropped']} dropped" in page


def test_the_recipe_shows_every_case(setting, tmp_path):
    """Recipe ``demo-late`` on few images: late answers count, the oldest are dropped, and the counts add up."""
    few = {key: value for key, value in setting.items() if key != "federation.num_rounds"}
    counts = rescene.run("demo-late", out=tmp_path / "run", **few).values["late_answers"]
    assert counts["late"] and counts["dropped"] and counts["rounds_late"] == counts["late"], (
        "one round late, or dropped"
    )
    assert counts["sent"] == sum(counts[kind] for kind in ("on_time", "late", "dropped", "under_way"))


@pytest.mark.parametrize("name", [name for name in method_names() if method_class(name).late_verbs])
def test_every_method_that_can_takes_the_recipe(name):
    federation = resolve("demo-late", {"method": name}).recipe.federation
    assert federation.num_rounds > federation.delay > federation.staleness, "nobody is busy during a whole task"


def test_methods_that_cannot_say_so():
    able = [name for name in method_names() if method_class(name).late_verbs]
    assert {"fedavg", "fedprox", "moments", "afl", "fedcgs"} <= set(able)
    with pytest.raises(ConfigError) as refused:
        resolve("smoke", {"method": "rescene", "federation.delay": 1})
    assert refused.value.code == "E573" and ", ".join(able) in refused.value.fix
    with pytest.raises(ConfigError) as refused:
        resolve(
            "smoke",
            {
                "method": "fedavg",
                "federation.delay": 1,
                "privacy.mechanism": "dp-sgd",
                "privacy.epsilon": 8,
                "model.norm": "group",
            },
        )
    assert refused.value.code == "E574"


def test_real_sites_are_spared():
    class Far:
        here = False

    with pytest.raises(ConfigError) as refused:
        check_transport(resolve("smoke", {"method": "fedavg", "federation.delay": 1}), Far())
    assert refused.value.code == "E177" and "late" in refused.value.why


def test_the_page_names_the_methods_that_can():
    page = (Path(__file__).parents[2] / "docs" / "arrivals.md").read_text(encoding="utf-8")
    part = page.partition("## Sites answer late")[2]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `") and "federation." not in line]
    told = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert told == {name for name in SHIPPED if method_class(name).late_verbs}
