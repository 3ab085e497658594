"""What holds for any order of events: crashes and resumptions, questions to a site's ledger. (Splits: test_data_partition.)"""

import tempfile
from pathlib import Path

import pytest
import torch
import trust_crash
from hypothesis import given, settings
from hypothesis import strategies as st

from rescene.core.errors import RunError
from rescene.engine.checkpoint import Checkpoints
from rescene.privacy.accounting import Composition, total_epsilon
from rescene.privacy.ledger import Charge, Declined, Ledger
from rescene.privacy.noise import Noise

REPEATABLE = settings(deadline=None, derandomize=True)
BUDGET = trust_crash.world.overrides(Path("x"), "rescene")["method.budget"]


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    return trust_crash.Crashes("rescene", tmp_path_factory.mktemp("any") / "rescene")


def buffers(folder):
    saved = Checkpoints(folder / "checkpoints").load()
    return saved.tree["state"].buffers if saved and saved.tree["state"] is not None else ()


@pytest.mark.slow
@settings(REPEATABLE, max_examples=8)
@given(data=st.data())
def test_any_order_of_steps_crashes_and_resumptions_is_the_undisturbed_run(crashes, data):
    """On the way a buffer never exceeds its budget, and that of a finished task never changes."""
    place = st.sampled_from(sorted(crashes.places)).flatmap(
        lambda name: st.integers(1, crashes.places[name]).map(lambda number: f"{name}#{number}")
    )
    folder, final = crashes._new_folder(), buffers(crashes.root / "whole")
    assert len(final) == 2
    for kill_at in data.draw(st.lists(place, min_size=1, max_size=3)):
        trust_crash.world.end(crashes._start(folder, kill_at=kill_at))  # a place that is not reached again: it ends
        for kept, last in zip(buffers(folder), final, strict=False):
            assert torch.bincount(kept.labels).max() <= BUDGET
            assert torch.equal(kept.images, last.images) and torch.equal(kept.labels, last.labels)
    crashes._compare(folder, "any order")
    assert not crashes.found.differ


CHARGES = st.builds(
    Charge, st.sampled_from(["a", "b"]), st.integers(0, 1), st.integers(0, 3), st.just("release"),
    st.sampled_from([1.0, 4.0]), st.just(1), st.just(1.0),
)  # fmt: skip


@settings(REPEATABLE, max_examples=40)
@given(asked=st.lists(st.tuples(CHARGES, st.sampled_from("qr"), st.booleans()), max_size=12))
def test_a_ledger_only_grows_and_never_answers_twice_differently(asked):
    """Any order of questions, repetitions, refusals and restarts with half a line at the end."""
    with tempfile.TemporaryDirectory() as spare:
        path, given_out, spent = Path(spare) / "ledger.jsonl", {}, 0.0
        for charge, question, crash in asked:
            before = path.read_bytes() if path.exists() else b""
            if crash and path.exists():
                path.write_bytes(before + b'{"kind": "rel')
            try:
                found = Ledger(path).once(charge, question, 1e-5, 2, lambda: {"sums": Noise().normal(2, 2)})["sums"]
                known = given_out.setdefault(charge.key, (question, charge, found))
                assert torch.equal(known[2], found) and known[0] == question
            except Declined:
                assert charge.key not in given_out
            except RunError as error:
                assert error.code == "E412" and given_out[charge.key][0] != question
            assert path.read_bytes().startswith(before)  # nothing that was written is ever taken back
            used = [(one.sigma, Composition(one.steps, 1, one.rate)) for _, one, _ in given_out.values()]
            epsilon = total_epsilon(used, 1e-5) if used else 0.0
            assert epsilon >= spent
            spent = epsilon
