"""A mistake in a method of a user is an error that names the method, the verb and the line; a mistake of ours is none of his."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import rescene
from rescene.core import plugins
from rescene.core.errors import RunError
from rescene.engine import method_mistakes
from rescene.methods import registry
from rescene.methods.base import Method, ModelState
from rescene.methods.fedavg import FedAvg
from rescene.testing.conformance import drive, federation_of, make_world

SMALL = {"federation.num_rounds": 1, "tasks.limit": 1, "model.width": 4}


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


def test_a_mistake_in_the_server_names_the_method_the_verb_and_the_line(tmp_path):
    class Server(FedAvg):
        name: ClassVar[str] = "server"

        def server_round(self, state, uploads, round, federation, rng):
            return replace(state, model=self.mean(uploads))

        def mean(self, uploads):
            return torch.nn.functional.pad(uploads["no such site"], (1, 1))  # of mean

    with pytest.raises(
        RunError, match="E328.*the method server failed in server_round: KeyError: 'no such site'"
    ) as caught:
        rescene.run("smoke", method=Server, out=tmp_path / "run", **SMALL)
    assert caught.value.where == f"{line_of('# of mean')} in mean"
    assert caught.value.where in caught.value.fix, "the table of a sweep shows no more"
    assert isinstance(caught.value.__cause__, KeyError), "the traceback is kept"


def test_a_verb_that_is_missing_names_the_class(tmp_path):
    class Missing(Method):
        name: ClassVar[str] = "missing"
        client_round = FedAvg.client_round
        weighting: str = "images"
        local_ce: str = "all"

    with pytest.raises(RunError, match="failed in server_round: .*does not define server_round") as caught:
        rescene.run("smoke", method=Missing, out=tmp_path / "run", **SMALL)
    assert caught.value.where == "test_method_mistakes.py, class Missing"


@pytest.mark.parametrize(
    ("verb", "returned", "told"),
    [
        ("init", {"model": {}}, "init of the method odd must return the server's state, it returned a dict"),
        ("begin_task", None, "begin_task of the method odd must return the server's state, it returned None"),
        ("broadcast", 7, "broadcast of the method odd must return a dict, it returned an int"),
        ("server_round", {"model": {}}, "server_round of the method odd must return the server's state, it returned a"),
        ("server_round", ModelState(None, {}), "must return the server's state, it returned a ModelState"),
        ("end_task", None, "end_task of the method odd must return the server's state, it returned None"),
        ("end_task", ModelState({"w": object()}, {}), "the method odd failed in end_task: .*the state.model.w is a"),
    ],
)
def test_what_a_verb_of_the_server_returns_is_checked_at_once(tmp_path, verb, returned, told):
    class Odd(FedAvg):
        name: ClassVar[str] = "odd"

    setattr(Odd, verb, lambda self, *given: returned)
    with pytest.raises(RunError, match=f"E328.*{told}") as caught:
        rescene.run("smoke", method=Odd, out=tmp_path / "run", **SMALL)
    assert caught.value.where.startswith("test_method_mistakes.py:")


def test_what_is_no_mistake_of_the_method_keeps_its_own_error():
    ours, own = FedAvg(), Forgetful()
    bug, memory, sites = KeyError("a bug of ours"), MemoryError(), RunError("E320", "too few sites")
    for method, error in ((ours, bug), (own, memory), (own, sites)):
        with pytest.raises(type(error)) as caught, method_mistakes.naming_mistakes(method, "server_round"):
            raise error
        assert caught.value is error
