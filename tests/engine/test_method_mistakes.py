"""A mistake in a method of a user is an error that names the method, the verb and the line; a mistake of ours is none of his."""

from typing import ClassVar

import pytest
import torch

from rescene.core import plugins
from rescene.core.errors import RunError
from rescene.methods import registry
from rescene.methods.fedavg import FedAvg
from rescene.testing.conformance import drive, federation_of, make_world


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(plugins, "_registered", [])


def line_of(words):
    """Where these words stand in this file, as an error says it."""
    with open(__file__, encoding="utf-8") as file:
        return f"test_method_mistakes.py:{1 + next(n for n, line in enumerate(file) if words in line)}"


class Forgetful(FedAvg):
    name: ClassVar[str] = "forgetful"
    answer: ClassVar = {"num_images": 0}

    def client_round(self, payload, shard, client_state, rng):  # of Forgetful
        return self.answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"num_images": 0}, "a dict"),
        (None, "None"),
        (({"num_images": 0}, None, None), "(dict, NoneType, NoneType)"),
        ((None, {"num_images": 0}), "(NoneType, dict)"),
        ([{"num_images": 0}, None], "a list"),
    ],
)
@pytest.mark.parametrize("form", ["batched", "one-by-one", "debug"])
def test_an_answer_without_the_memory_is_told_in_words(monkeypatch, answer, told, form):
    monkeypatch.setattr(Forgetful, "answer", answer)
    world = make_world()
    with pytest.raises(RunError) as caught:
        drive(Forgetful(), world, federation_of(Forgetful(), world, form=form))
    assert caught.value.code == "E328"
    assert caught.value.what == f"client_round of the method forgetful must return (answer, memory), it returned {told}"
    assert caught.value.where == f"{line_of('# of Forgetful')} in client_round"
    assert not world.events, "one error says it, not one for each site"


def test_a_batched_verb_is_named_too():
    class Batched(FedAvg):
        name: ClassVar[str] = "batched"

        def client_round_batched(self, payload, shards, states, streams):
            return [{"num_images": 0} for _ in shards]

    world = make_world()
    with pytest.raises(RunError, match="E328.*client_round_batched of the method batched must return"):
        drive(Batched(), world, federation_of(Batched(), world, form="batched"))


@pytest.mark.parametrize("registered", [True, False])
def test_an_error_in_torch_is_placed_in_the_users_own_file(registered):
    """``debug`` stops at the first client that fails. Its line is the user's, not that of the library that raised."""

    class Deep(FedAvg):
        name: ClassVar[str] = "deep"

        def client_round(self, payload, shard, client_state, rng):
            return {"logits": shard.net(payload["model"])(torch.zeros(1))}, None  # of Deep

    if registered:
        registry.register(Deep)
    world = make_world()
    with pytest.raises(RunError, match="E321.*failed in client_round") as caught:
        drive(Deep(), world, federation_of(Deep(), world, form="debug"))
    assert (f"{line_of('# of Deep')} in client_round" in caught.value.where) == registered
