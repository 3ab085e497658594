"""``federation.total`` in one process: the same numbers as ``ask`` gives, added up, and nothing else."""

import pytest
import torch

from rescene.core.errors import RunError
from rescene.methods.base import Method
from rescene.methods.upload_schema import fields, tensor
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism
from rescene.privacy.totals import added, check_part, most_colluders, protocol_bytes, threshold
from rescene.testing.conformance import federation_of, make_world


class Counting(Method):
    """Sends random numbers and how many images it has, and remembers that it did."""

    name = "counting"
    title = "Counting"
    sums_securely = True

    def count(self, payload, shard, client_state, rng):
        own = torch.randint(-1000, 1000, (5,), generator=rng.generator())
        part = {"own": own, "small": own.int(), "num": torch.tensor([len(shard.index)])}
        if payload.get("large"):
            part["small"] = torch.full((5,), 2**30, dtype=torch.int32)
        return part, {"asked": 1}

    def expects(self, verb, payload, place):
        return fields(
            {
                "own": tensor(torch.int64, 5),
                "small": tensor(torch.int32, 5),
                "num": tensor(torch.int64, 1, low=0, high=payload.get("most", 1e9)),
            }
        )


def world_of(honest_sites=None, quorum=0.5):
    world = make_world()
    federation = federation_of(Counting(), world)
    federation.settings.quorum = quorum
    if honest_sites:
        federation.mechanism = Mechanism("release", 1.0, 5.0, Composition(1, 1), honest_sites=honest_sites)
    federation.move(world.tasks[0], 0)
    return federation, world


def test_the_total_is_the_sum_of_what_ask_gives():
    asked, _ = world_of()
    parts = asked.ask(asked.clients, "count", {})
    federation, _ = world_of()
    total = federation.total(federation.clients, "count", {})
    assert total.clients == tuple(parts)
    assert {k: v.tolist() for k, v in total.values.items()} == {k: v.tolist() for k, v in added(parts.values()).items()}
    assert {v.dtype for v in total.values.values()} == {torch.int32, torch.int64}
    assert federation.client_states == asked.client_states


def test_keys_and_shares_are_metered():
    asked, _ = world_of()
    asked.ask(asked.clients, "count", {})
    federation, _ = world_of()
    federation.total(federation.clients, "count", {})
    num = len(federation.clients)
    up, down = protocol_bytes(num)
    assert federation.traffic == [asked.traffic[0] + num * up, asked.traffic[1] + num * down]
    assert federation.traffic_of[0] == [asked.traffic_of[0][0] + up, asked.traffic_of[0][1] + down]


def test_a_sum_of_too_few_is_not_opened_and_not_remembered():
    federation, world = world_of(honest_sites=len(world_of()[0].clients), quorum=0.0)
    federation.settings.absent = lambda clients, call: ([0], [])
    total = federation.total(federation.clients, "count", {})
    assert (total.values, total.clients) == ({}, ())
    assert not federation.client_states and "not opened" in str(world.events)


def test_numbers_that_could_overflow_are_refused():
    federation, _ = world_of()
    with pytest.raises(RunError, match="E436"):
        federation.total(federation.clients, "count", {"large": True})


def test_a_sum_that_no_images_have_is_refused():
    federation, _ = world_of()
    with pytest.raises(RunError, match="E438"):
        federation.total(federation.clients, "count", {"most": 1})


def test_only_whole_numbers_are_added():
    with pytest.raises(RunError, match="E435"):
        check_part({"x": torch.zeros(3)}, 2)
    check_part({"x": torch.tensor([2**30 - 1], dtype=torch.int32)}, 2)
    with pytest.raises(RunError, match="E436"):
        check_part({"x": torch.tensor([-(2**63)])}, 2)


@pytest.mark.parametrize("num_sites", range(2, 13))
@pytest.mark.parametrize("quorum", [0.0, 0.5, 0.7, 1.0])
def test_the_threshold_holds_what_it_promises(num_sites, quorum):
    for honest in range(2, num_sites + 1):
        least = threshold(num_sites, quorum, honest)
        colluders = most_colluders(num_sites, least, honest)
        assert honest <= least <= num_sites and colluders >= 0
        assert least - colluders >= honest  # honest sites in the smallest sum
        assert (num_sites - colluders) + 2 * colluders < 2 * least  # answers the server can get to two questions
