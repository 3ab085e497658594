"""A site's own privacy floor and ledger: the server cannot lower the one or get around the other."""

import json

import pytest
import yaml
from local_sites import LocalPost, across, events, hashes, in_process, sites
from own_sites import NAMES, model_of, own_sites, plan_of, run_plan

from rescene.config import resolve
from rescene.deploy.site import Site

RELEASE = ["method.start=noise", "privacy.mechanism=release", "privacy.noise_multiplier=4", "privacy.num_nets=1"]
MOMENTS = ["method.start=coloured", "method.num_steps=0"]
PLAN = plan_of((NAMES, 2))


def limit(folder, **privacy):
    section = yaml.safe_load((folder / "site.yaml").read_text())
    (folder / "site.yaml").write_text(yaml.safe_dump(section | {"privacy": privacy}))


def ledger(folder):
    path = folder / "state" / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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
    few = ["federation.num_clients=2", "federation.per_round=2", "federation.engine=one-by-one", "device=cpu"]
    resolved = resolve(
        "smoke", [*few, *RELEASE, *sums, "privacy.noise=seeded", "tasks.limit=1", "federation.num_rounds=1"]
    )
    in_process(resolved, tmp_path / "here")
    folders = sites(tmp_path, count=2)
    across(resolved, tmp_path / "there", LocalPost(folders))
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there") and len(ledger(folders[0])) == 2
