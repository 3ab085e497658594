"""Pictures on the wire: what comes out, what it costs, and what a stranger's bytes can do (nothing)."""

import random
import struct
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rescene
from rescene.core.errors import RunError
from rescene.core.record import num_bytes
from rescene.engine import wire
from rescene.methods import method_class
from rescene.testing.conformance import drive, federation_of, make_world
from rescene.training import Training

SHAPES = [(3, 3, 8, 8), (1, 3, 1, 1), (2, 1, 5, 1), (2, 2, 1, 7), (4, 5, 6, 9), (1, 3, 33, 31)]
EMPTY = [(0, 3, 8, 8), (2, 3, 0, 8), (2, 0, 8, 8)]


def pictures(shape, seed=0):
    """A slope plus noise, in normalised units."""
    slope = torch.linspace(-2, 2, max(shape[-1], 1))[: shape[-1]]
    return slope + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def through(images, form):
    return wire.decode(wire.encode(images, form), form, tuple(images.shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_form_keeps_what_it_promises(shape):
    images = pictures(shape)
    assert torch.equal(through(images, "float32"), images)
    assert torch.equal(through(images, "float16"), images.half().float())
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    half_a_level = (high - low) / 255 / 2
    assert ((through(images, "uint8") - images).abs() <= half_a_level + 1e-6).all()


@given(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_prediction_is_reversible_for_any_levels(shape, seed):
    levels = torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(wire._levels(wire._residuals(levels)), levels)


def test_the_median_predictor_by_hand():
    levels = torch.tensor([[[[10, 20], [30, 25]]]], dtype=torch.uint8)
    # corner 10 from nothing; 20 from its left; 30 from above; 25 from median(30, 20, 30 + 20 - 10) = 30
    assert wire._residuals(levels).flatten().tolist() == [10, 10, 20, 256 - 5]
    colours = torch.tensor([7, 10, 12], dtype=torch.uint8).reshape(1, 3, 1, 1)
    assert wire._residuals(colours).flatten().tolist() == [256 - 3, 10, 2]


@pytest.mark.parametrize("form", wire.FORMS)
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_nothing_is_sent_for_no_pictures(form, shape):
    message = wire.encode(torch.zeros(shape), form)
    assert wire.decode(message, form, shape).shape == shape and len(message) == 21


@pytest.mark.parametrize("form", wire.FORMS)
def test_flat_pictures_pass_unchanged(form):
    images = torch.tensor([0.5, -1.25, 0.0]).reshape(3, 1, 1, 1).expand(3, 3, 4, 4)
    assert torch.equal(through(images, form), images)


def test_values_beyond_float16_stop_at_its_end():
    images = torch.tensor([1e6, -1e6, 65504.0, 1.0]).reshape(1, 1, 2, 2)
    assert through(images, "float16").flatten().tolist() == [65504.0, -65504.0, 65504.0, 1.0]


def test_uint8_stretches_over_any_range():
    images = torch.tensor([0.0, 2.55e37, 1e37, 5e36]).reshape(1, 1, 2, 2)
    assert torch.allclose(through(images, "uint8"), images, rtol=0.02)


@pytest.mark.parametrize("form", wire.FORMS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_sent(form, value):
    images = pictures((2, 3, 4, 4))
    images[1, 2, 3, 0] = value
    with pytest.raises(RunError, match="not finite"):
        wire.encode(images, form)


def test_a_range_wider_than_float32_is_not_sent_as_levels():
    with pytest.raises(RunError, match="not finite"):
        wire.encode(torch.tensor([3e38, -3e38]).reshape(1, 1, 1, 2), "uint8")


@pytest.mark.parametrize("images", [torch.zeros(3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.float64)])
def test_only_float32_pictures_are_sent(images):
    with pytest.raises(RunError, match="only float32 pictures"):
        wire.encode(images, "uint8")


@pytest.mark.parametrize("form", wire.FORMS)
def test_the_receiver_gets_what_it_expects_or_refuses(form):
    message, shape = wire.encode(pictures((2, 3, 4, 4)), form), (2, 3, 4, 4)
    other = wire.FORMS[wire.FORMS.index(form) - 1]
    for bad, where, said in [
        (message, (other, shape), "was expected"),
        (message, (form, (1, 3, 4, 4)), "was expected"),
        (b"\x89PNG" + message[4:], (form, shape), "not a message of pictures"),
        (message[:12], (form, shape), "too few"),
        (message[:30], (form, shape), "instead of"),
        (message[:-1], (form, shape), "instead of|exactly"),
        (message + b"\0", (form, shape), "instead of|exactly"),
    ]:
        with pytest.raises(RunError, match=said) as refused:
            wire.decode(bad, *where)
        assert refused.value.code == "E323" and refused.value.fix


@pytest.mark.parametrize("form", ["float16", "float32"])
def test_values_that_are_not_finite_are_refused_on_arrival(form):
    message = bytearray(wire.encode(pictures((1, 3, 4, 4)), form))
    message[-4:] = struct.pack("<f", float("nan")) if form == "float32" else struct.pack("<2e", 1.0, float("inf"))
    with pytest.raises(RunError, match="not finite"):
        wire.decode(bytes(message), form, (1, 3, 4, 4))


@pytest.mark.parametrize("affine", [(float("nan"), 1.0), (0.0, float("inf")), (3e38, 3e38)])
def test_an_offset_or_scale_that_leads_nowhere_is_refused(affine):
    message = bytearray(wire.encode(pictures((1, 3, 4, 4)), "uint8"))
    message[21:29] = struct.pack("<2f", *affine)
    with pytest.raises(RunError, match="not finite"):
        wire.decode(bytes(message), "uint8", (1, 3, 4, 4))


def peak_of(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_takes_no_memory():
    shape, header = (1, 3, 8, 8), wire.encode(pictures((1, 3, 8, 8)), "uint8")[:29]
    bomb = header + zlib.compress(bytes(64 << 20), 9)

    def refused():
        with pytest.raises(RunError, match="exactly 192 bytes"):
            wire.decode(bomb, "uint8", shape)

    assert peak_of(refused) < 1 << 20


def test_a_header_that_lies_takes_no_memory():
    lie = struct.pack("<4sB4I", b"RSW1", 2, 2**31, 3, 2**16, 2**16)

    def refused():
        with pytest.raises(RunError, match="was expected"):
            wire.decode(lie, "uint8", (1, 3, 8, 8))

    assert peak_of(refused) < 1 << 20


def damaged(message, chance):
    """A message after one to four accidents: bytes changed, cut off, added, doubled or taken out."""
    data = bytearray(message)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        kind = chance.choice(["change", "change", "cut", "add", "double", "remove"])
        if kind == "change" and place < len(data):
            data[place] = chance.choice([0, 255, chance.randrange(256), data[place] ^ (1 << chance.randrange(8))])
        elif kind == "cut":
            del data[place:]
        elif kind == "add":
            data[place:place] = chance.randbytes(chance.randint(1, 9))
        elif kind == "double":
            data[place:place] = data[place : place + 9]
        else:
            del data[place : place + chance.randint(1, 9)]
    return bytes(data)


@pytest.mark.parametrize("form", wire.FORMS)
def test_damaged_messages_are_refused_or_give_finite_pictures(form):
    chance, shape = random.Random(0), (2, 3, 6, 5)
    message, num_refused = wire.encode(pictures(shape), form), 0
    for _ in range(1500):
        try:
            images = wire.decode(damaged(message, chance), form, shape)
        except RunError as error:
            assert error.code == "E323"
            num_refused += 1
        else:
            assert images.shape == shape and images.dtype == torch.float32 and images.isfinite().all()
    assert num_refused > 500


def test_damage_to_the_levels_never_passes():
    """zlib's own checksum covers them."""
    shape = (2, 3, 6, 5)
    message = wire.encode(pictures(shape), "uint8")
    for place in range(21 + 16, len(message)):
        bad = bytearray(message)
        bad[place] ^= 0x10
        try:
            same = torch.equal(wire.decode(bytes(bad), "uint8", shape), through(pictures(shape), "uint8"))
        except RunError:
            continue
        assert same, place


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sends_the_same_bytes():
    images = pictures((4, 3, 32, 32))
    for form in wire.FORMS:
        message = wire.encode(images, form)
        assert wire.encode(images.cuda(), form) == message
        assert torch.equal(wire.decode(message, form, (4, 3, 32, 32), "cuda").cpu(), through(images, form))


def test_float32_is_the_upload_itself():
    upload = {"images": pictures((2, 3, 4, 4)), "labels": torch.tensor([0, 1])}
    assert wire.sent(upload, "float32") is upload
    assert wire.received(upload, "float32", (3, 4, 4), "cpu") is upload
    model = {"model": {"w": torch.zeros(2)}}
    assert wire.sent(model, "uint8") is model and wire.received(model, "uint8", (3, 4, 4), "cpu") is model


@pytest.mark.parametrize(
    "change",
    [
        {"labels": None},
        {"labels": torch.tensor(2)},
        {"images": "x"},
        {"images": pictures((2, 3, 4, 4))},
        {"labels": torch.zeros(3)},
    ],
)
def test_an_upload_of_another_make_is_refused(change):
    upload = {"images": pictures((2, 3, 4, 4)), "labels": torch.tensor([0, 1])}
    with pytest.raises(RunError, match="cannot pass the wire"):
        wire.received(wire.sent(upload, "uint8") | change, "uint8", (3, 4, 4), "cpu")


@pytest.mark.parametrize("name", ["rescene", "feddm", "fedaf", "raw-upload", "joint"])
@pytest.mark.parametrize("form", ["float16", "uint8"])
def test_the_server_sees_what_was_decoded_and_the_ledger_what_was_sent(name, form, monkeypatch):
    messages, seen, world = [], [], make_world()
    few = {"joint": {}, "raw-upload": {"ipc": 2}}.get(name, {"ipc": 2, "num_steps": 2})
    method = method_class(name)(**few, train=Training(server_epochs=1, batch_size=8))
    federation = federation_of(method, world, form="batched", wire=form)
    federation.observe = lambda uploads: seen.extend(u["images"] for u in uploads.values() if "images" in u)
    plain = wire.sent
    monkeypatch.setattr(
        wire, "sent", lambda upload, form: messages.append((upload, plain(upload, form))) or messages[-1][1]
    )
    drive(method, world, federation)
    assert federation.ledger.sums["uplink_bytes"] == sum(num_bytes(message) for _, message in messages)
    made = [upload["images"] for upload, _ in messages if "images" in upload]
    assert len(made) == len(seen) and any(len(images) for images in made)
    for images, arrived in zip(made, seen, strict=True):
        assert torch.equal(arrived, through(images, form))
    for upload, message in messages:
        if "images" in upload and len(upload["images"]):
            assert len(message["images"]) == len(wire.encode(upload["images"], form)) < num_bytes(upload["images"])
            assert message["labels"] is upload["labels"]


def test_a_run_records_its_form_and_keeps_the_papers_column(tmp_path):
    small = {"federation.num_clients": 2, "federation.per_round": 1, "federation.num_rounds": 1, "tasks.limit": 1}
    runs = {
        form: rescene.run("smoke", out=tmp_path / form, **small, **{"federation.wire": form}).values
        for form in ("float32", "uint8")
    }
    assert [runs[form]["config"]["federation"]["wire"] for form in runs] == ["float32", "uint8"]
    plain, packed = (runs[form]["cost"] for form in runs)
    assert plain["nominal"] == packed["nominal"]
    assert packed["measured"]["uplink_bytes"] < plain["measured"]["uplink_bytes"] / 4
    assert packed["measured"]["downlink_bytes"] == plain["measured"]["downlink_bytes"]
