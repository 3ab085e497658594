"""The ledger: the same bytes again, budgets, floors, and a closed door when anything is wrong."""

import json
from dataclasses import replace

import pytest
import torch

from rescene.errors import RunError
from rescene.privacy.accounting import Composition, epsilon_of
from rescene.privacy.ledger import Charge, Declined, Ledger
from rescene.privacy.mechanism import Mechanism, Site
from rescene.privacy.noise import Noise
from rescene.rng import Rng
from rescene.steps import Condensation, condense

CHARGE = Charge("run", 0, 0, "release", 2.0, 1, 1.0)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "site" / "ledger.jsonl")


def fresh():
    return {"sums": Noise().normal(3, 4)}


def ask(ledger, charge=CHARGE, question="q", most=None, draw=fresh):
    return ledger.once(charge, question, 1e-5, most, draw)["sums"]


def test_the_same_place_gets_the_same_bytes_even_in_another_process(ledger):
    first = ask(ledger)
    assert torch.equal(first, ask(ledger)) and torch.equal(first, ask(Ledger(ledger.path)))
    assert not torch.equal(first, ask(ledger, replace(CHARGE, round=1)))
    assert ledger.participations("run", 0) == 2


def test_the_same_place_with_another_question_is_refused(ledger):
    ask(ledger)
    with pytest.raises(RunError) as caught:
        ask(ledger, question="another model")
    assert caught.value.code == "E412"
    ask(ledger)  # and nothing is lost


def test_a_spent_budget_declines_and_loses_nothing(ledger):
    first = [ask(ledger, replace(CHARGE, round=r), most=2) for r in range(2)]
    size = ledger.path.stat().st_size
    with pytest.raises(Declined, match="2 participations"):
        ask(ledger, replace(CHARGE, round=2), most=2)
    assert ledger.path.stat().st_size == size
    assert torch.equal(first[1], ask(ledger, replace(CHARGE, round=1), most=2)), "what was released can be sent again"
    ask(ledger, replace(CHARGE, task=1), most=2)  # another task has other records


def test_a_participation_counts_from_its_intent_on(ledger):
    def dies():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(ledger, draw=dies)
    assert ledger.participations("run", 0) == 1
    ask(ledger, most=1)  # nothing was sent: the same place may draw now
    with pytest.raises(Declined):
        ask(ledger, replace(CHARGE, round=1), most=1)


@pytest.mark.parametrize(
    ("floor", "allowed"),
    [("max_participations: 2", 2), ("min_sigma: 2.5", 0), ("epsilon_max: {}", 3), ("min_sigma: 2.0", 5)],
)
def test_the_sites_floor_is_above_the_servers_wish(ledger, floor, allowed):
    ledger.path.parent.mkdir()
    limit = epsilon_of(2.0, Composition(1, 3), 1e-5) + 1e-6
    (ledger.path.parent / "floor.yaml").write_text(floor.format(limit))
    done = 0
    for r in range(5):
        try:
            ask(ledger, replace(CHARGE, round=r), most=100)
            done += 1
        except Declined:
            pass
    assert done == allowed


def test_the_floor_on_epsilon_counts_other_runs_and_refuses_what_has_no_epsilon(ledger):
    ledger.path.parent.mkdir()
    (ledger.path.parent / "floor.yaml").write_text(f"epsilon_max: {epsilon_of(2.0, Composition(1, 1), 1e-5) + 1e-6}")
    with pytest.raises(Declined, match="promises no epsilon"):
        ask(ledger, replace(CHARGE, mechanism="paper-experiment"))
    ask(ledger)
    with pytest.raises(Declined, match="epsilon would be"):
        ask(ledger, replace(CHARGE, run="another run", task=3))


@pytest.mark.parametrize("text", ["epsilon_max: 0", "epsilon_maximum: 3", "epsilon_max: many", "- 1", "a: ["])
def test_a_floor_that_cannot_be_understood_allows_nothing(ledger, text):
    ledger.path.parent.mkdir()
    (ledger.path.parent / "floor.yaml").write_text(text)
    with pytest.raises(RunError) as caught:
        ask(ledger)
    assert caught.value.code == "E411" and not ledger.path.read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: [lines[0][:40] + b"\n", *lines[1:]],
        lambda lines: [lines[0].replace(b'"sigma": 2.0', b'"sigma": 9.0'), *lines[1:]],
        lambda lines: [*lines, b"\x00\xff\n"],
        lambda lines: [*lines, b"[]\n"],
    ],
)
def test_an_unreadable_ledger_fails_closed(ledger, spoil):
    ask(ledger)
    ledger.path.write_bytes(b"".join(spoil(ledger.path.read_bytes().splitlines(keepends=True))))
    drawn = []
    with pytest.raises(RunError) as caught:
        ask(ledger, replace(CHARGE, round=1), draw=lambda: drawn.append(1) or fresh())
    assert caught.value.code == "E411" and not drawn and "backup" in caught.value.fix


def test_a_line_cut_by_a_crash_was_never_sent_and_is_dropped(ledger):
    ask(ledger)
    whole = ledger.path.read_bytes()
    begin = whole.index(b"\n") + 1
    ledger.path.write_bytes(whole[: begin + 30])  # the release was being written
    ask(ledger)
    rows = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["intent", "release"]


def test_a_ledger_that_cannot_be_written_stops_the_upload(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError) as caught:
        ask(Ledger(tmp_path / "file" / "ledger.jsonl"))
    assert caught.value.code == "E411"


@pytest.mark.parametrize("kind", ["release", "per-example", "paper-experiment"])
def test_condensation_replays_the_ledger_bit_for_bit(tiny_world, ledger, kind):
    mechanism = Mechanism(kind, 0.5, 2.0, Composition(1, 1), kappa=1.0, threshold=0.0, typical_count=10.0)
    settings = Condensation(ipc=2, num_steps=2, start="noise")

    def made(ledger, **place):
        shard = replace(tiny_world["shards"][1], site=Site(mechanism, Noise(), "run", ledger=ledger, **place))
        return condense(tiny_world["net"], [shard], [Rng(0)], settings, 7)[0]

    first, again = made(ledger), made(ledger)
    assert torch.equal(first.images, again.images) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.images, made(None).images), "without a ledger the noise is fresh"
    with pytest.warns(UserWarning, match="site declines"):
        refused = made(ledger, round=1, max_participations=1)
    assert len(refused.labels) == 0 and refused.num_declined == 1
