"""The secure sum: the same bits as the plain sum, with sites that go away or lie, and questions that are refused."""

import functools
from dataclasses import replace

import pytest

pytest.importorskip("cryptography", reason="pip install 'rescene[deploy]'")
pytest.importorskip("Crypto", reason="pip install 'rescene[deploy]'")

import torch
from sum_world import KEYS, SIGNING, World, numbers

from rescene.core.errors import RunError
from rescene.core.record import num_bytes
from rescene.deploy.summing import AGREE, DEAL, MASK, RECEIVE, REVEAL, STEPS
from rescene.methods.upload_schema import fields, tensor
from rescene.privacy import secure_sum as sums
from rescene.privacy.totals import added, protocol_bytes


def same(found, clients, values=numbers):
    plain = added(values(k) for k in clients)
    return found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


def test_the_sum_of_ten_is_the_plain_sum_to_the_bit():
    found, clients = World().hold()
    assert clients == list(range(10)) and same(found, clients)
    assert found["a"].dtype == torch.int32 and found["b"].dtype == torch.int64


def test_it_wraps_around_as_plain_numbers_do():
    largest = lambda client: {"a": torch.full((1000,), 2**31 - 1, dtype=torch.int32), "b": torch.full((3, 7), -(2**63))}  # noqa: E731
    found, clients = World(values=largest).hold()
    assert same(found, clients, largest)


@pytest.mark.parametrize("step", [KEYS, *STEPS])
def test_three_of_ten_may_go_away_at_every_step(step):
    order = [KEYS, *STEPS]
    lost = lambda now, client: client in (0, 4, 9) and order.index(now) >= order.index(step)  # noqa: E731
    found, clients = World(lost=lost).hold()
    went_before_masking = order.index(step) <= order.index(MASK)
    assert clients == ([1, 2, 3, 5, 6, 7, 8] if went_before_masking else list(range(10)))
    assert same(found, clients)


def test_one_goes_away_at_each_of_three_steps():
    gone = {DEAL: 2, MASK: 5, REVEAL: 7}

    def lost(now, client):
        return any(client == k and [KEYS, *STEPS].index(now) >= STEPS.index(s) + 1 for s, k in gone.items())

    found, clients = World(lost=lost).hold()
    assert clients == [0, 1, 3, 4, 6, 7, 8, 9] and same(found, clients)


@pytest.mark.parametrize("step", [KEYS, DEAL, RECEIVE])
def test_too_few_before_masking_open_nothing(step):
    world = World(lost=lambda now, client: client < 4 and now == step)
    assert world.hold() == ({}, [])
    assert not any(party.group for party in world.parties.values())


@pytest.mark.parametrize("step", [MASK, AGREE, REVEAL])
def test_too_few_after_masking_stop_the_run(step):
    """At the last step six sites tell their own seeds; the seeds of the four others need seven shares."""
    world = World(
        lost=lambda now, client: client < 4 and STEPS.index(now) >= STEPS.index(step) if now != KEYS else False
    )
    with pytest.raises(RunError, match="E445"):
        world.hold()


def flip(data, at=0):
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def lying(now, liar, how):
    return lambda step, client, upload: how(upload) if (step, client) == (now, liar) else upload


def with_part(name, change):
    return lambda upload: upload | {name: change(upload[name])}


def flipped(table):
    changed = table.clone()
    changed.view(-1)[:: max(table.shape[-1], 1)] ^= 1
    return changed


@pytest.mark.parametrize(
    "how",
    [
        lambda keys: flip(keys),
        lambda keys: flip(keys, 70),
        lambda keys: flip(keys, 150),
        lambda keys: bytes(64) + keys[64:],
        lambda keys: keys[:-1],
    ],
    ids=["cipher key", "seed hash", "signature", "zero keys", "short"],
)
def test_a_site_that_lies_about_a_key_is_named_and_left_out(how):
    world = World(change=lying(KEYS, 3, how))
    found, clients = world.hold()
    assert clients == [0, 1, 2, 4, 5, 6, 7, 8, 9] and same(found, clients)
    assert world.told == [("E441", 3)]


def test_a_key_that_was_signed_for_another_sum_is_left_out():
    other = World(session="another").parties[3]
    world = World(change=lying(KEYS, 3, lambda keys: sums.keys_of(other)))
    assert world.hold()[1] == [0, 1, 2, 4, 5, 6, 7, 8, 9] and world.told == [("E441", 3)]


def test_keys_that_agree_with_nobody_are_named():
    """Signed by the site itself, but a point of small order: everybody would know the masks."""
    session, sign = "s", sums.signer(SIGNING[3])
    body = bytes(32) + bytes([1]) + bytes(31) + bytes(32)
    keys = body + sign(sums._statement("keys", session, 3, body))
    world = World(change=lying(KEYS, 3, lambda _: keys))
    assert world.hold()[1] == [0, 1, 2, 4, 5, 6, 7, 8, 9] and world.told == [("E441", 3)]


def test_a_site_that_deals_wrong_shares_to_all_is_named_and_left_out():
    world = World(change=lying(DEAL, 6, with_part("dealt", flipped)))
    found, clients = world.hold()
    assert clients == [0, 1, 2, 3, 4, 5, 7, 8, 9] and same(found, clients)
    assert ("E441", 6) in world.told


def test_a_site_that_calls_one_share_wrong_harms_nobody():
    def doubt(fits):
        fits = fits.clone()
        fits[2] = False
        return fits

    world = World(change=lying(RECEIVE, 6, with_part("fits", doubt)))
    found, clients = world.hold()
    assert clients == list(range(10)) and same(found, clients) and [code for code, _ in world.told] == ["W436"]


def test_a_site_that_reveals_wrong_shares_is_named_and_they_are_not_used():
    lost = lambda now, client: now == MASK and client == 0 or now == REVEAL and client == 1  # noqa: E731
    world = World(change=lying(REVEAL, 6, with_part("shares", flipped)), lost=lost)
    found, clients = world.hold()
    assert clients == list(range(1, 10)) and same(found, clients) and ("E441", 6) in world.told


def test_a_site_that_lies_about_its_own_seed_is_named_and_the_others_rebuild_it():
    world = World(change=lying(REVEAL, 6, with_part("seed", flipped)))
    found, clients = world.hold()
    assert clients == list(range(10)) and same(found, clients) and world.told == [("E441", 6)]


def test_shares_that_fit_their_hashes_and_not_each_other_name_their_dealer(monkeypatch):
    """The one lie that spoils a sum: found only when the dealer is gone and its secret is rebuilt."""
    world = World(lost=lambda now, client: client == 6 and now in (AGREE, REVEAL))
    true = sums._split

    def wrong(secret, least, num):
        shares = true(secret, least, num)
        return [flip(share) if i == 2 else share for i, share in enumerate(shares)]

    before = world.one

    def one(step, client, payload):
        with monkeypatch.context() as patch:
            if client == 6:
                patch.setattr(sums, "_split", wrong)
            return before(step, client, payload)

    world.one = one
    with pytest.raises(RunError, match="E445"):
        world.hold()
    assert world.told == [("E441", 6)]


def test_masked_numbers_look_random_and_never_the_same():
    zeros = lambda client: {"a": torch.zeros(200_000, dtype=torch.int32)}  # noqa: E731
    seen = []
    for session in ("one", "two"):
        world = World(num=3, least=2, session=session, values=zeros, form=lambda *_: None)
        world.change = lambda step, client, upload: (
            seen.append(upload["values"]["a"]) or upload if step == MASK else upload
        )
        world.hold()
    for part in seen:
        x = part.double() / 2**31
        assert abs(float(x.mean())) < 0.01 and abs(float(x.var()) - 1 / 3) < 0.01
    assert all((a == b).float().mean() < 1e-4 for i, a in enumerate(seen) for b in seen[:i])


def asked(**options):
    """A world after a whole sum, and every payload that went to site 2."""
    if options:
        return held(**options)
    world, payloads = held_once()
    again = World(num=0)
    again.parties, again.verify = dict(world.parties), world.verify
    return again, payloads


@functools.cache
def held_once():
    return held()


def held(**options):
    world, payloads = World(**options), {}
    one = world.one

    def keep(step, client, payload):
        if client == 2:
            payloads[step] = payload
        return one(step, client, payload)

    world.one = keep
    world.hold()
    world.one = one
    return world, payloads


def test_the_same_question_again_gets_the_same_answer():
    world, payloads = asked()
    for step, payload in payloads.items():
        first, second = world.one(step, 2, payload), world.one(step, 2, payload)
        assert repr(first) == repr(second)


@pytest.mark.parametrize("step", STEPS)
def test_another_question_in_the_same_step_is_refused(step):
    world, payloads = asked()
    before = world.parties[2]
    fewer = {key: value[:-1] if len(value) else value for key, value in payloads[step].items()}
    if step == REVEAL:
        fewer["clients"] = [*fewer["clients"][:-1], 77]
        fewer["signatures"] = fewer["signatures"][: len(fewer["clients"])]
    with pytest.raises(RunError, match="E442"):
        world.one(step, 2, fewer)
    assert repr(world.parties[2]) == repr(before)


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_question_before_its_turn_is_refused(step):
    _, payloads = asked()
    with pytest.raises(RunError, match="E442"):
        World().one(step, 2, payloads[step])


def test_shares_of_another_sum_do_not_open():
    _, payloads = asked(session="before")
    world, now = World(), {}
    world.change = lambda step, client, upload: now.setdefault((step, client), upload)
    one = world.one

    def swapped(step, client, payload):
        return one(step, client, payloads[RECEIVE] if (step, client) == (RECEIVE, 2) else payload)

    world.one = swapped
    world.hold()
    assert not now[RECEIVE, 2]["fits"].any()


@pytest.mark.parametrize("step", [DEAL, RECEIVE, MASK, AGREE, REVEAL])
def test_a_site_refuses_a_sum_of_too_few(step):
    """Ten sites in all; the server shows this one six, itself among them."""
    world, payloads = asked()
    few = {key: value[:6] for key, value in payloads[step].items()}
    party = world.parties[2]
    unasked = {
        DEAL: replace(party, keys=None, dealt=None, received=None, group=(), masked=()),
        RECEIVE: replace(party, received=None, group=(), masked=()),
        MASK: replace(party, group=(), masked=()),
        AGREE: replace(party, masked=()),
        REVEAL: party,
    }
    world.parties[2] = unasked[step]
    with pytest.raises(RunError, match="E443"):
        world.one(step, 2, few)


def test_a_server_that_shows_different_groups_gets_no_shares():
    """Site 2 is told that three others are not of the group. With their keys, as of sites that went away, and its seed it would
    stand alone; but nobody else has signed such a group, and it has not signed theirs."""
    world = World()
    one = world.one

    def split(step, client, payload):
        if (step, client) == (MASK, 2):
            payload = {"clients": [0, 1, 2, 3, 7, 8, 9]}
        return one(step, client, payload)

    world.one = split
    found, clients = world.hold()
    assert 2 not in clients and same(found, clients) and ("E441", 2) in world.told


def test_a_site_does_not_sign_for_one_that_masked_for_another_group():
    world, payloads = asked()
    world.parties[2] = replace(world.parties[2], masked=())
    forged = payloads[AGREE] | {"signatures": payloads[AGREE]["signatures"].flip(0)}
    with pytest.raises(RunError, match="E441"):
        world.one(AGREE, 2, forged)


def test_a_site_reveals_nothing_without_enough_signatures_under_its_list():
    world, payloads = asked()
    # right sites, under the group and not the list
    forged = payloads[REVEAL] | {"signatures": payloads[AGREE]["signatures"]}
    with pytest.raises(RunError, match="E441"):
        world.one(REVEAL, 2, forged)


def test_of_each_peer_one_share_is_told():
    world, payloads = asked(lost=lambda now, client: client == 5 and now in (MASK, AGREE, REVEAL))
    party = world.parties[2]
    shown = payloads[REVEAL]
    signatures = dict(zip(shown["clients"], map(sums.raw, shown["signatures"]), strict=True))
    _, told = sums.reveal(party, signatures, world.verify)
    for other, share in told.items():
        pair = sums.raw(party.shares[str(other)])
        assert share == (pair[32:] if other == 5 else pair[:32])


def test_the_bytes_of_the_protocol_are_those_that_are_metered():
    up, down = dict.fromkeys(range(10), 192), dict.fromkeys(range(10), 0)
    world = World()
    one = world.one

    def count(step, client, payload):
        upload = one(step, client, payload)
        down[client] += num_bytes({k: v for k, v in payload.items() if k != "clients"})
        up[client] += num_bytes({k: v for k, v in upload.items() if k not in ("values", "has", "fits")})
        return upload

    world.one = count
    world.hold()
    assert set(zip(up.values(), down.values(), strict=True)) == {protocol_bytes(10)}


def test_numbers_have_a_fingerprint_of_their_own():
    first = sums.fingerprint(numbers(0))
    assert first == sums.fingerprint(numbers(0)) != sums.fingerprint(numbers(1))
    assert sums.fingerprint({"a": torch.zeros(2, dtype=torch.int64)}) != sums.fingerprint(
        {"b": torch.zeros(2, dtype=torch.int64)}
    )


def backwards(client):
    """The same numbers in another order, as a site has them that reads them from its ledger."""
    return dict(reversed(numbers(client).items()))


def test_the_order_of_names_makes_no_other_numbers():
    """Else a site that reads its numbers from disk could be asked for them in a second sum."""
    assert list(backwards(0)) != list(numbers(0)) and sums.fingerprint(backwards(0)) == sums.fingerprint(numbers(0))


def test_the_order_of_names_at_a_site_does_not_matter_to_the_sum():
    mixed = lambda client: backwards(client) if client % 3 else numbers(client)  # noqa: E731
    found, clients = World(values=mixed, form=lambda *_: None).hold()
    assert clients == list(range(10)) and same(found, clients)


def test_masked_numbers_keep_the_order_in_which_the_method_states_them():
    """Else an answer whose names are not in the order of the alphabet would not have the form asked for."""
    form = fields({"b": tensor(torch.int64, 3, 7), "a": tensor(torch.int32, 1000)})
    found, clients = World(values=backwards, form=form).hold()
    assert clients == list(range(10)) and list(found) == ["b", "a"] and same(found, clients)


def test_other_numbers_than_at_the_beginning_are_refused():
    world = World()
    world.values = lambda client: numbers(client, seed=1)
    with pytest.raises(RunError, match="E444"):
        world.hold()
