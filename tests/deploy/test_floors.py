"""A site's own privacy floor and ledger: the server cannot lower the one or get around the other."""

import json

import pytest
import yaml
from local_sites import TINY, LocalPost, across, events, hashes, in_process, sites
from own_sites import NAMES, SMALL, model_of, own_sites, plan_of, run_plan

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.deploy.plan_file import Held, add_classes, close_task, read_plan, with_plan, write_plan
from rescene.deploy.site import Site
from rescene.privacy.accounting import Composition, total_epsilon
from rescene.privacy.ledger import Ledger

RELEASE = ["method.start=noise", "privacy.mechanism=release", "privacy.noise_multiplier=4", "privacy.num_nets=1"]
MOMENTS = ["method.start=coloured", "method.num_steps=0"]
PLAN = plan_of((NAMES, 2))


def limit(folder, **privacy):
    section = yaml.safe_load((folder / "site.yaml").read_text())
    (folder / "site.yaml").write_text(yaml.safe_dump(section | {"privacy": privacy}))


def ledger(folder):
    """Without the floor that it took from the first run."""
    path = folder / "state" / "ledger.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["kind"] != "floor"]


def test_a_deployed_site_keeps_its_ledger_and_gives_the_same_bytes_again(tmp_path):
    folders = own_sites(tmp_path)
    post = LocalPost(folders)
    run_plan(PLAN, tmp_path / "run", folders, [*RELEASE, "federation.per_round=3"], post)
    kinds = [row["kind"] for row in ledger(folders[0])]
    assert kinds == ["intent", "release"] * 2
    letters = [letter for letter in post.letters if b"client_round" in letter.head]
    first = Site.open(folders[0]).answer(letters[-3])
    for path in (folders[0] / "state").rglob("answer-*.bin"):
        path.unlink()
    assert Site.open(folders[0]).answer(letters[-3]) == first and len(ledger(folders[0])) == 4


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"epsilon_max": 0.01}, "above its limit"),
        ({"min_sigma": 5}, "below its floor"),
        ({"max_participations": 1}, "participations"),
        ({"delta_max": 1e-9}, "delta"),
    ],
)
def test_a_site_over_its_limit_declines_and_the_round_goes_on(tmp_path, privacy, words):
    folders = own_sites(tmp_path)
    limit(folders[1], **privacy)
    run_plan(PLAN, tmp_path / "run", folders, [*RELEASE, "federation.per_round=3"])
    told = [e for e in events(tmp_path / "run") if e["client"] == 1 and e["code"] in ("W310", "E413")]
    assert any(words in event["message"] for event in told)
    intents = [row for row in ledger(folders[1]) if row["kind"] == "intent"]
    assert len(intents) == ("max_participations" in privacy)
    assert len(ledger(folders[0])) == 4 and model_of(tmp_path / "run")


@pytest.mark.parametrize("overrides", [["method=fedavg"], [], [*RELEASE, "privacy.noise=seeded"]])
def test_a_site_with_a_floor_sends_nothing_without_a_mechanism_and_no_counts(tmp_path, overrides):
    folders = own_sites(tmp_path)
    limit(folders[1])
    run_plan(plan_of((NAMES, 1)), tmp_path / "run", folders, [*overrides, "federation.per_round=3"])
    told = [e["message"] for e in events(tmp_path / "run") if e["client"] == 1 and e["code"] == "E413"]
    assert any("client_round" in message for message in told) and any("evaluation" in message for message in told)
    assert not ledger(folders[1])


@pytest.mark.parametrize("sums", [[], ["privacy.send=sums"], ["privacy.send=sums", *MOMENTS]], ids=len)
def test_a_share_under_a_mechanism_has_the_bits_of_one_process(tmp_path, sums):
    few = [*TINY, "federation.num_clients=2", "tasks.limit=1", "federation.num_rounds=1"]
    resolved = resolve("smoke", [*few, *RELEASE, *sums, "privacy.noise=seeded"])
    in_process(resolved, tmp_path / "here")
    folders = sites(tmp_path, count=2)
    across(resolved, tmp_path / "there", LocalPost(folders))
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there") and len(ledger(folders[0])) == 2


def test_a_task_closed_early_keeps_the_noise_of_all_its_rounds_and_spends_less_than_is_promised(tmp_path):
    folders, path, folder = own_sites(tmp_path), tmp_path / "plan.yaml", tmp_path / "run"
    write_plan(path, plan_of((NAMES, 3), rounds=3))

    def close(node, data):  # while the first round is under way
        if Held.of(folder).begun and not read_plan(path).tasks[0].closed:
            close_task(path, folder)
        return data

    asked = [
        *(word for word in RELEASE if "noise_multiplier" not in word),
        "privacy.epsilon=8",
        "federation.per_round=3",
    ]
    results = run_plan(read_plan(path), folder, folders, asked, LocalPost(folders, change=close), path)
    assert results["tasks"][0]["rounds"] == 1 and results["leakage"] is None
    said = results["privacy"]
    assert said["releases_per_record"] == 3 and said["epsilon"] == pytest.approx(8, abs=1e-3)
    charges = Ledger(folders[0] / "state" / "ledger.jsonl").charges()
    assert [charge.sigma for charge in charges] == pytest.approx([said["noise_multiplier"]])
    assert total_epsilon([(charge.sigma, Composition(charge.steps, 1)) for charge in charges], said["delta"]) < 5
    with pytest.raises(ConfigError, match="reckoned for 2"):  # a task longer than that would spend more
        with_plan(resolve("smoke", [*SMALL, *asked]), plan_of((NAMES, 3), rounds=2), 3, tmp_path / "none")


@pytest.mark.slow
def test_a_method_that_replays_cannot_outgrow_the_tasks_that_its_noise_was_reckoned_for(tmp_path):
    """With a target of epsilon: two tasks at the noise of one and of two would add up to 10.5, and the report say 8."""
    replay = ["method=refed", "model.norm=group", "privacy.mechanism=dp-sgd", "privacy.delta=1e-3"]
    folders, path = own_sites(tmp_path), tmp_path / "plan.yaml"
    first, both = plan_of((NAMES[:2], 1)), plan_of((NAMES[:2], 1), (NAMES[2:], 1))
    for one in folders:
        limit(one, epsilon_max=1000, delta_max=1e-3)  # three runs on the same images
    target, folder = [*replay, "privacy.epsilon=8"], tmp_path / "target"
    write_plan(path, first)
    run_plan(first, folder, folders, target)
    with pytest.raises(ConfigError, match="reckoned for 1 task"):
        run_plan(both, folder, folders, target)
    with pytest.raises(ConfigError, match="reckoned for 1 task"):
        add_classes(path, folder, list(NAMES[2:]), 1, None)
    assert read_plan(path) == first
    given, folder = [*replay, "privacy.noise_multiplier=2"], tmp_path / "given"
    before = run_plan(first, folder, folders, given)["privacy"]["epsilon"]
    add_classes(path, folder, list(NAMES[2:]), 1, None)
    after = run_plan(read_plan(path), folder, folders, given)["privacy"]
    spent = [charge for charge in Ledger(folders[0] / "state" / "ledger.jsonl").charges() if charge.sigma == 2]
    assert after["epsilon"] > before and len(spent) <= after["releases_per_record"]
    assert run_plan(both, tmp_path / "planned", folders, target)["privacy"]["epsilon"] == pytest.approx(8, abs=1e-3)
