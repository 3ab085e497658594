"""Trees of values: saved, measured and put together again; streams that depend on their address alone."""

import gc
import json
import weakref
from copy import copy

import pytest
import torch

from rescene.core.errors import RunError
from rescene.core.record import check_tree, map_tensors, num_bytes, pack, record, tensors, unpack
from rescene.core.rng import Rng


@record
class Sample:
    images: torch.Tensor
    parts: tuple
    name: str


def tree():
    return {
        "a": Sample(torch.arange(4.0), ({"x": torch.ones(2), "n": 3}, None), "s"),
        "b": [1, 2.5, True, "text", torch.zeros(0, 3)],
        "empty": {},
    }


def test_packing_and_unpacking_give_the_tree_back():
    skeleton, chunks = pack(tree())
    back = unpack(json.loads(json.dumps(skeleton)), chunks)
    assert isinstance(back["a"], Sample) and isinstance(back["a"].parts, tuple) and isinstance(back["b"], list)
    assert back["b"][:4] == [1, 2.5, True, "text"] and back["empty"] == {}
    assert all(torch.equal(x, y) for x, y in zip(tensors(tree()), tensors(back), strict=True))


def test_what_was_packed_is_let_go_at_once():
    """A checkpoint is the whole state; Python looks for cycles of old objects only now and then."""
    gc.disable()
    try:
        value = torch.ones(3)
        left = weakref.ref(value)
        pack({"model": {"weight": value}, "pool": [value]})
        del value
        assert left() is None
    finally:
        gc.enable()


def test_an_error_passes_between_processes():
    error = RunError("E320", "too few", where="task 1", why="quorum", fix="start them")
    assert str(copy(error)) == str(error)  # copied by the steps of pickle, which is what worker processes use
    assert vars(copy(error)) == vars(error)


def test_a_node_of_tensors_is_one_chunk():
    _, chunks = pack({"model": {"w": torch.ones(2), "b": torch.ones(1)}, "pool": [{"x": torch.ones(3)}]})
    assert [sorted(chunk) for chunk in chunks] == [["b", "w"], ["x"]]


def test_bytes_on_the_wire():
    assert num_bytes({"images": torch.zeros(20, 3, 32, 32)}) == 245_760
    assert num_bytes({"n": 12, "s": "ab", "none": None, "t": torch.zeros(3, dtype=torch.uint8)}) == 2 + 4 + 3


def test_only_values_may_travel():
    check_tree(tree())
    with pytest.raises(TypeError, match=r"value\.a\.b is a Linear"):
        check_tree({"a": {"b": torch.nn.Linear(1, 1)}})
    with pytest.raises(TypeError):
        check_tree({1: 2})
    with pytest.raises(TypeError):
        pack({"a": object()})


def test_an_unknown_record_is_named():
    with pytest.raises(KeyError, match="plug-in"):
        unpack({"$record": "nowhere.Thing", "fields": {}}, [])


def test_mapping_keeps_the_shape_of_the_tree():
    doubled = map_tensors(lambda t: t * 2, tree())
    assert doubled["a"].images.tolist() == [0.0, 2.0, 4.0, 6.0] and doubled["a"].name == "s"


def test_a_stream_is_its_address():
    a = Rng(1).at("client", 3, 2).generator()
    b = Rng(1).at("client").at(3).at(2).generator()
    assert torch.equal(torch.randn(4, generator=a), torch.randn(4, generator=b))
    others = {Rng(1).at("client", 3, 2).integer(), Rng(1).at("client", 2, 3).integer(), Rng(2).at("client", 3, 2).integer(),
              Rng(1).at("client", "3", 2).integer(), Rng(1).at("client", 32).integer()}  # fmt: skip
    assert len(others) == 5


def test_addresses_are_the_same_on_every_machine():
    assert Rng(0).at("split", 0).integer() == 8690416663531918594
