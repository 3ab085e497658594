"""Messages between server and site: exact, cached by hash, and safe against anything that comes in."""

import hashlib
import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rescene.core.errors import RunError
from rescene.deploy.message_bytes import LARGE, ChunksMissing, pack_message, unpack_message
from rescene.engine.checkpoint import DTYPES
from rescene.methods.base import ModelState

DTYPE = st.sampled_from(list(DTYPES))
SHAPE = st.lists(st.integers(0, 4), max_size=3)


def tensor(dtype, shape):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 7).to(dtype)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.builds(tensor, DTYPE, SHAPE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_every_tree_comes_back_as_it_was(tree):
    assert same(unpack_message(pack_message(tree).data).tree, tree)


def test_a_record_comes_back_and_its_tensors_can_be_written_to():
    state = ModelState(model={"w": torch.ones(3)[::2]}, notes={"loss": 0.5})
    found = unpack_message(pack_message(state).data).tree
    found.model["w"] += 1
    assert isinstance(found, ModelState) and found.model["w"].tolist() == [2, 2] and found.notes == {"loss": 0.5}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_harm(data):
    with pytest.raises(RunError, match="refused"):
        unpack_message(data)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_damaged_message_is_refused_or_harmless(data):
    whole = bytearray(pack_message({"images": torch.rand(4, 3), "labels": torch.arange(4), "n": [1, "a"]}).data)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for message in (bytes(whole), bytes(whole[:cut])):
        try:
            unpack_message(message)
        except RunError as error:
            assert error.code in ("E340", "E341")


def signed(text, body=b""):
    """A message with this header, as somebody makes it who knows the format."""
    text += b" " * (-(len(text) + 40) % 8)
    return struct.pack("<4sI32s", b"RSM2", len(text), hashlib.sha256(text).digest()) + text + body


def forged(header, body=b""):
    return signed(json.dumps(header).encode(), body)


SUM = hashlib.sha256(bytes(8)).hexdigest()
CHUNK = {"sha256": SUM, "here": True, "tensors": {"a": ["I64", [1]]}}


def test_what_is_forged_here_would_pass_if_it_were_well_made():
    honest = {"skeleton": {"$dict": {"a": {"$tensor": [0, "a"]}}}, "chunks": [CHUNK]}
    assert unpack_message(forged(honest, bytes(8))).tree["a"].tolist() == [0]


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"skeleton": {"$dict": {"a": {"$tensor": [0, "a"]}}}, "chunks": [CHUNK, CHUNK]}, bytes(16)),
        (
            {"skeleton": {"$dict": {"a": {"$tensor": [0, "a"]}, "b": {"$tensor": [0, "a"]}}}, "chunks": [CHUNK]},
            bytes(8),
        ),
        ({"skeleton": {"$dict": {}}, "chunks": [CHUNK]}, bytes(8)),
        ({"skeleton": {"$dict": {}, "more": 1}, "chunks": []}, b""),
        ({"skeleton": [[], []], "chunks": []}, b""),
        ({"chunks": [], "skeleton": None}, b""),
        ({"skeleton": None, "chunks": [], "more": 0}, b""),
    ],
)
def test_nothing_travels_beside_the_content(header, body):
    with pytest.raises(RunError, match="E340"):
        unpack_message(forged(header, body))


def test_the_space_between_tensors_is_empty():
    data = bytearray(pack_message({"a": torch.tensor([1], dtype=torch.int8)}).data)
    body, header = b"\1\0\0\0\0\0\0\7", json.loads(data[40:-8])
    header["chunks"][0]["sha256"] = hashlib.sha256(body).hexdigest()
    with pytest.raises(RunError, match="between its tensors"):
        unpack_message(forged(header, body))


def test_the_receiver_looks_before_memory_is_taken():
    seen = []
    unpack_message(pack_message({"w": torch.ones(3)}).data, look=lambda tree: seen.append(tree["w"].device.type))
    assert seen == ["meta"]


def test_a_long_header_is_not_read():
    with pytest.raises(RunError, match="header of"):
        unpack_message(signed(b"[" * 3000), header_limit=2000)


@pytest.mark.parametrize(
    "header",
    [
        {"skeleton": None, "chunks": [{"sha256": "", "here": True, "tensors": {"a": ["F32", [1 << 30, 1 << 30]]}}]},
        {"skeleton": None, "chunks": [{"sha256": "", "here": True, "tensors": {"a": ["F32", [-1, -8]]}}]},
        {"skeleton": None, "chunks": [{"sha256": "", "here": True, "tensors": {"a": ["object", [1]]}}]},
        {"skeleton": {"$record": "os.system", "fields": {}}, "chunks": []},
        {"skeleton": {"$tensor": [5, "a"]}, "chunks": []},
        {"skeleton": {"$dict": [1]}, "chunks": []},
        {"skeleton": {"$record": "rescene.methods.base.ModelState", "fields": {"evil": 1}}, "chunks": []},
        {"chunks": 3},
        [],
    ],
)
def test_a_forged_header_is_refused(header):
    with pytest.raises(RunError, match="E340"):
        unpack_message(forged(header))


def test_deep_nesting_and_foreign_versions_are_refused():
    deep = b'{"chunks": [], "skeleton": ' + b'{"$list": [' * 50_000 + b"]}" * 50_000 + b"}"
    with pytest.raises(RunError, match="E340"):
        unpack_message(signed(deep))
    with pytest.raises(RunError, match="another version"):
        unpack_message(b"RSM9" + pack_message(1).data[4:])


def test_a_limit_is_kept_before_anything_is_read():
    with pytest.raises(RunError, match="more than the 100 allowed"):
        unpack_message(pack_message(torch.zeros(100)).data, limit=100)


def test_what_the_receiver_has_is_named_and_not_sent_again():
    tree = {"model": {"w": torch.rand(10)}, "teacher": {"w": torch.rand(LARGE)}}
    first = pack_message(tree)
    held = unpack_message(first.data).large
    assert set(held) == first.large and len(held) == 1
    second = pack_message(tree, known=first.large)
    assert len(second.data) < LARGE < len(first.data)
    assert same(unpack_message(second.data, held).tree, tree)
    with pytest.raises(ChunksMissing) as caught:
        unpack_message(second.data)
    assert caught.value.digests == list(first.large)
    with pytest.raises(RunError, match="checksum"):
        unpack_message(second.data, {digest: b"\1" * len(body) for digest, body in held.items()})
