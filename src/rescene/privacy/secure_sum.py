"""The secure sum of Bonawitz et al. 2017 (CCS, "Practical secure aggregation"): the server learns the sum and no part of it.

Every pair of sites agrees on a mask that one adds and the other takes away, and every site adds a mask of its own. Masked
numbers tell nothing; in the sum the pairs' masks cancel. So that a site may go away at any moment, each gives the others
shares (t of n, Shamir) of its key for the pairs' masks and of the seed of its own mask::

    begin    site -> server   public keys and a hash of the seed
    deal     server -> sites  all keys         site -> server  two shares for each other site, sealed; a hash of each share
    receive  server -> sites  what was dealt   site -> server  whose shares it could open and fit their hashes
    mask     server -> sites  the group        site -> server  its numbers + masks with everybody of the group
    agree    server -> sites  who masked       site -> server  its signature under that list
    reveal   server -> sites  t signatures     site -> server  for each of the group ONE share: of the seed if it masked, of the
                                                               key if it went away
    opened   server           rebuilds those secrets, takes the masks away

Keys, group and list are signed with the sites' own long-lived keys, which the sites know of each other, so a server cannot make
up sites, nor tell one site another list than the others. A site never gives both shares of one peer: with both the server could
open that peer's numbers alone. A site answers each step once; the same question again gets the same answer, another one is
refused. Masks and seals are bound to the session and to the very list of keys (``_transcript``).

The parts: X25519 keys, HKDF-SHA256, ChaCha20-Poly1305 for the shares, AES-256 in counter mode for the masks and ECDSA P-384
signatures (package ``cryptography``); Shamir's sharing over GF(2**128) (package ``pycryptodome``). Numbers are int32 and int64
tensors, added modulo 2**32 and 2**64.

What the server still sees: who took part, when, how large messages are, and the sum. What a hostile server can do: choose who
is asked and drop answers, so that a sum has as few as t sites in it (``totals.threshold``); stop everything; and with colluding sites
subtract their parts from the sum. What a hostile site can do: send any numbers, which nobody can see in a sum; or deal shares
that fit their hashes but not each other and then go away, which spoils the sum and names the site.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rescene.core.errors import RunError
from rescene.core.record import record
from rescene.privacy.totals import COMMITTED, KEYS, SEALED, SHARE, Values, added, layout

try:
    from Crypto.Protocol.SecretSharing import Shamir
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256, SHA384
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise RunError(
        "E439",
        "sums across sites need the packages cryptography and pycryptodome",
        why="without them nothing can be masked, and parts are never sent bare",
        fix='pip install "rescene[deploy]"',
    ) from None

WORD = 32  # bytes of a key, a seed, a hash, a share
HALF = 16  # Shamir's sharing takes so many bytes at a time
COORDINATE = 48  # bytes of each of the two numbers of a P-384 signature
BLOCK = 1 << 18  # bytes of mask at a time: they stay in the processor's cache
UNSIGNED: dict[torch.dtype, np.dtype[Any]] = {torch.int32: np.dtype("<u4"), torch.int64: np.dtype("<u8")}
PURPOSE = b"rescene secure sum 1 "

Blobs = Mapping[int, bytes]  # by client
Sign = Callable[[bytes], bytes]
Verify = Callable[[int, bytes, bytes], bool]  # client, signature, message


@record
class Party:
    """A site in one sum: its secrets, which numbers it brings, and every question it has answered."""

    session: str
    client: int
    least: int  # t: shares that rebuild a secret, and sites that must be in the sum
    cipher: Tensor  # private key of the seals
    mask: Tensor  # private key of the pairs' masks
    seed: Tensor  # of its own mask
    signed: dict[str, Tensor]  # its signatures, by step
    numbers: str  # fingerprint of what it adds
    clients: tuple[int, ...] = ()  # whose keys it was shown, ascending
    keys: Tensor | None = None  # [n, 192], in the same order
    dealt: Tensor | None = None  # [n, 144]: for each of them a seal and two hashes
    dealers: tuple[int, ...] = ()
    received: Tensor | None = None  # [dealers, 144]
    shares: dict[str, Tensor] | None = None  # by dealer: [64], those that fit
    group: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()


def begin(
    session: str, client: int, least: int, values: Values, sign: Sign, fresh: Callable[[int], bytes] = os.urandom
) -> Party:
    """A party with fresh secrets from the operating system; an audit also tries a source that can be guessed."""
    if least < 2:
        raise _refused("E443", "a sum of one site is that site's own numbers")
    cipher, mask, seed = (fresh(WORD) for _ in range(3))
    body = public_of(cipher) + public_of(mask) + seed_hash(session, client, seed)
    signature = sign(_statement("keys", session, client, body))
    signed = {"keys": blob(signature)}
    return Party(session, client, least, blob(cipher), blob(mask), blob(seed), signed, fingerprint(values))


def keys_of(party: Party) -> bytes:
    """What a party shows of itself: two public keys, the hash of its seed, and its signature under them."""
    public = public_of(raw(party.cipher)) + public_of(raw(party.mask))
    seed = seed_hash(party.session, party.client, raw(party.seed))
    return public + seed + raw(party.signed["keys"])


def seed_hash(session: str, client: int, seed: bytes) -> bytes:
    """What everybody may know of the seed of a party's own mask."""
    return _hash("seed", session, client, seed)


def wrong_keys(session: str, keys: Blobs, verify: Verify) -> dict[int, str]:
    """Clients whose keys cannot be used, and why."""
    found, seen, probe = dict[int, str](), set[bytes](), X25519PrivateKey.generate()
    for client, blob_ in sorted(keys.items()):
        both, body = (blob_[:WORD], blob_[WORD : 2 * WORD]), blob_[: 3 * WORD]
        if len(blob_) != KEYS:
            found[client] = "its keys have another length"
        elif not verify(client, blob_[3 * WORD :], _statement("keys", session, client, body)):
            found[client] = "its keys are not signed with its own key for this sum"
        elif seen & set(both) or both[0] == both[1]:
            found[client] = "its keys are another site's"
        elif not all(_agreed(probe, key) for key in both):
            found[client] = "its keys agree with nobody's"
        seen |= set(both)
    return found


def deal(party: Party, keys: Blobs, verify: Verify) -> Party:
    """Take everybody's keys and make two shares for each, of the own mask key and of the own seed."""
    clients, shown = tuple(sorted(keys)), blob(b"".join(keys[k] for k in sorted(keys)))
    if party.keys is not None:
        return _same(party, party.clients == clients and torch.equal(party.keys.reshape(-1), shown), "keys")
    if len(clients) < party.least:
        raise _refused("E443", f"the sum would have {len(clients)} sites, and {party.least} must be in it")
    if keys.get(party.client) != keys_of(party):
        raise _refused("E442", "the list of keys does not hold this site's own")
    wrong = wrong_keys(party.session, keys, verify)
    if wrong:
        client, why = next(iter(wrong.items()))
        raise _refused("E441", f"site {client} cannot be in a sum: {why}")
    party = replace(party, clients=clients, keys=shown.reshape(len(clients), KEYS))
    two = [_split(raw(secret), party.least, len(clients)) for secret in (party.seed, party.mask)]
    rows = []
    for place, other in enumerate(clients):
        pair = two[0][place] + two[1][place]
        sealed = ChaCha20Poly1305(_seal_key(party, party.client, other)).encrypt(bytes(12), pair, None)
        rows.append(sealed + _share_hashes(party.session, party.client, other, pair))
    return replace(party, dealt=blob(b"".join(rows)).reshape(len(clients), SEALED + COMMITTED))


def receive(party: Party, dealt: Mapping[int, bytes]) -> Party:
    """Open the shares that others dealt to this site; ``shares`` then holds those that fit their hashes."""
    _in_order(party.dealt is not None, "shares")
    dealers, rows = tuple(sorted(dealt)), blob(b"".join(dealt[k] for k in sorted(dealt)))
    if party.received is not None:
        same = party.dealers == dealers and torch.equal(party.received.reshape(-1), rows)
        return _same(party, same, "shares")
    _within(dealers, party.clients, party, "dealers")
    shares = {}
    for dealer, row in dealt.items():
        try:
            pair = ChaCha20Poly1305(_seal_key(party, dealer, party.client)).decrypt(bytes(12), row[:SEALED], None)
        except InvalidTag:
            continue
        if hmac.compare_digest(_share_hashes(party.session, dealer, party.client, pair), row[SEALED:]):
            shares[str(dealer)] = blob(pair)
    received = rows.reshape(len(dealers), SEALED + COMMITTED)
    return replace(party, dealers=dealers, received=received, shares=shares)


def fits(party: Party) -> list[bool]:
    """Whether each dealer's shares fit, in their order."""
    assert party.shares is not None
    return [str(dealer) in party.shares for dealer in party.dealers]


def mask(party: Party, values: Values, group: Collection[int], sign: Sign) -> tuple[Party, dict[str, Tensor]]:
    """The party's numbers under its own mask and those it has with every other site of the group."""
    _in_order(party.received is not None, "masked numbers")
    if fingerprint(values) != party.numbers:
        raise _refused("E444", "these are not the numbers that this site began the sum with")
    chosen = tuple(sorted(group))
    if party.group:
        _same(party, party.group == chosen, "masked numbers")
    else:
        _within(chosen, party.dealers, party, "sites of the group")
        party = replace(party, group=chosen)
        party = _with_signature(party, "group", sign(_statement("group", party.session, party.client, _group(party))))
    masks = [(_own_mask(party.session, party.client, raw(party.seed)), 1)]
    secret, keys = X25519PrivateKey.from_private_bytes(raw(party.mask)), _by_client(party)
    for other in chosen:
        if other != party.client:
            key = _pair_mask(_transcript(party), secret, keys[other], party.client, other)
            masks.append((key, _sign_of(party.client, other)))
    return party, _with_masks(values, masks)


def agree(party: Party, groups: Blobs, sign: Sign, verify: Verify) -> Party:
    """Sign the list of those who masked, if each of them has signed that its masks are for the very group of this site."""
    _in_order(bool(party.group), "its signature")
    masked = tuple(sorted(groups))
    if party.masked:
        return _same(party, party.masked == masked, "its signature")
    _within(masked, party.group, party, "sites that masked")
    wrong = _not_signed("group", party.session, groups, _group(party), verify)
    if wrong:
        raise _refused("E441", f"site {wrong[0]} has not signed that it masks for this group")
    party = replace(party, masked=masked)
    return _with_signature(party, "list", sign(_statement("list", party.session, party.client, _list(party))))


def reveal(party: Party, signatures: Blobs, verify: Verify) -> tuple[bytes, dict[int, bytes]]:
    """The own seed, and for every other site of the group one share: of its seed if it masked, of its key if it went away.

    ``signatures`` are those of enough sites under the same list of who masked. An honest site signs one list, so two different
    lists cannot both have enough.
    """
    _in_order(bool(party.masked), "shares")
    _within(tuple(sorted(signatures)), party.masked, party, "sites that signed")
    wrong = _not_signed("list", party.session, signatures, _list(party), verify)
    if wrong:
        raise _refused("E441", f"site {wrong[0]} has not signed the list of those who masked")
    assert party.shares is not None
    told = {}
    for other in party.group:
        if str(other) in party.shares and other != party.client:
            pair = raw(party.shares[str(other)])
            told[other] = pair[:SHARE] if other in party.masked else pair[SHARE:]
    return raw(party.seed), told


def unsigned_by(
    step: str,
    session: str,
    least: int,
    keys: Blobs,
    group: Sequence[int],
    masked: Sequence[int],
    signatures: Blobs,
    verify: Verify,
) -> list[int]:
    """Who has not signed its group (``step`` group) or the list of those who masked (list); the server looks as the sites do."""
    body = _group_of(_transcript_of(session, least, keys), group) + (_numbers(masked) if step == "list" else b"")
    return _not_signed(step, session, signatures, body, verify)


@record
class Opened:
    """A sum, or why there is none: sites that lied about a share, and sites of which too few shares came."""

    values: dict[str, Tensor] | None
    liars: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()


def opened(
    session: str,
    least: int,
    keys: Blobs,
    dealt: Mapping[int, bytes],
    group: Sequence[int],
    masked: Mapping[int, Values],
    seeds: Blobs,
    told: Mapping[int, Blobs],
) -> Opened:
    """The sum over ``masked``. ``told[k]`` are the shares that site k gave, by the site whose secret they rebuild.

    A share that does not fit the hash its dealer sent with it is not used, and who gave it is a liar. One whose shares all fit
    and yet rebuild another secret has dealt wrong ones, and is a liar too.
    """
    clients, secrets, liars, closed = sorted(keys), dict[int, bytes](), set[int](), set[int]()
    for dealer in group:
        gone, fitting = dealer not in masked, dict[int, bytes]()
        check = partial(_is_secret, session, dealer, keys[dealer], gone)
        own = seeds.get(dealer)
        if own is not None and not gone:
            if check(own):
                secrets[dealer] = own
                continue
            liars.add(dealer)
        for giver, given in told.items():
            share = given.get(dealer)
            if share is None:
                continue
            if hmac.compare_digest(
                _hash(_kind(gone), session, dealer, giver, share), _committed(dealt, clients, dealer, giver, gone)
            ):
                fitting[clients.index(giver) + 1] = share
            else:
                liars.add(giver)
        if len(fitting) < least:
            closed.add(dealer)
            continue
        secret = _combined(dict(sorted(fitting.items())[:least]))
        if check(secret):
            secrets[dealer] = secret
        else:
            liars.add(dealer)
            closed.add(dealer)
    if closed:
        return Opened(None, tuple(sorted(liars)), tuple(sorted(closed)))
    masks = [(_own_mask(session, k, secrets[k]), -1) for k in masked]
    transcript = _transcript_of(session, least, keys)
    for gone_ in set(group) - masked.keys():
        secret_key = X25519PrivateKey.from_private_bytes(secrets[gone_])
        for k in masked:
            pair = _pair_mask(transcript, secret_key, keys[k], gone_, k)
            masks.append((pair, -_sign_of(k, gone_)))
    return Opened(_with_masks(added(masked.values()), masks), tuple(sorted(liars)))


def column(dealt: Mapping[int, bytes], clients: Sequence[int], client: int) -> dict[int, bytes]:
    """What each dealer dealt to one client, of the rows it sent for all."""
    size, place = SEALED + COMMITTED, sorted(clients).index(client)
    return {dealer: rows[place * size : (place + 1) * size] for dealer, rows in dealt.items()}


def fingerprint(values: Values) -> str:
    """Of a site's numbers, in whatever order they come: the same ones are never in two sums."""
    found = hashlib.sha256(repr(layout(values)).encode())
    for _, value in sorted(values.items()):
        found.update(_unsigned(value).data.cast("B"))
    return found.hexdigest()


def signer(key: ec.EllipticCurvePrivateKey) -> Sign:
    """A function that signs bytes with this key: ECDSA with SHA-384, as two numbers of fixed length."""

    def sign(message: bytes) -> bytes:
        numbers = decode_dss_signature(key.sign(message, ec.ECDSA(SHA384())))
        return b"".join(number.to_bytes(COORDINATE, "big") for number in numbers)

    return sign


def verifier(keys: Mapping[int, ec.EllipticCurvePublicKey]) -> Verify:
    """A function that checks such signatures by client number."""

    def verify(client: int, signature: bytes, message: bytes) -> bool:
        numbers = (int.from_bytes(signature[:COORDINATE], "big"), int.from_bytes(signature[COORDINATE:], "big"))
        try:
            keys[client].verify(encode_dss_signature(*numbers), message, ec.ECDSA(SHA384()))
        except (InvalidSignature, KeyError):
            return False
        return True

    return verify


def blob(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor, which a message can carry."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def raw(data: Tensor) -> bytes:
    """The bytes of such a tensor."""
    return data.numpy().tobytes()


def _with_masks(values: Values, masks: Sequence[tuple[bytes, int]]) -> dict[str, Tensor]:
    """Numbers plus (1) or minus (-1) the streams of these keys, modulo the size of their type."""
    found = {name: value.clone().contiguous() for name, value in values.items()}
    flat = [_unsigned(value) for _, value in sorted(found.items())]  # the streams run in the same order at all sites
    zeros, stream = bytes(BLOCK), bytearray(BLOCK + 16)
    for key, sign in masks:
        cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()  # each key has one stream, used once
        add = np.add if sign > 0 else np.subtract
        for numbers in flat:
            step = BLOCK // numbers.itemsize
            for at in range(0, len(numbers), step):
                part = numbers[at : at + step]
                cipher.update_into(zeros[: part.nbytes] if part.nbytes < BLOCK else zeros, stream)
                add(part, np.frombuffer(stream, part.dtype, len(part)), out=part)
    return found


def _unsigned(value: Tensor) -> np.ndarray[Any, Any]:
    """The same memory as numbers that wrap around by definition."""
    plain: np.ndarray[Any, Any] = value.detach().contiguous().numpy().reshape(-1)
    return plain.view(UNSIGNED[value.dtype])


def _split(secret: bytes, least: int, num: int) -> list[bytes]:
    halves = [Shamir.split(least, num, secret[at : at + HALF], ssss=False) for at in (0, HALF)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def _combined(shares: Mapping[int, bytes]) -> bytes:
    return b"".join(
        Shamir.combine([(number, share[at : at + HALF]) for number, share in shares.items()], ssss=False)
        for at in (0, HALF)
    )


def _is_secret(session: str, client: int, keys: bytes, gone: bool, secret: bytes) -> bool:
    """Whether this is the mask key (of one that is gone) or the seed that the client's keys name."""
    if gone:
        return hmac.compare_digest(public_of(secret), keys[WORD : 2 * WORD])
    return hmac.compare_digest(seed_hash(session, client, secret), keys[2 * WORD : 3 * WORD])


def _share_hashes(session: str, dealer: int, to: int, pair: bytes) -> bytes:
    """Shares are as random as keys, so their hashes tell nothing of them."""
    both = zip((False, True), (pair[:SHARE], pair[SHARE:]), strict=True)
    return b"".join(_hash(_kind(gone), session, dealer, to, share) for gone, share in both)


def _committed(dealt: Mapping[int, bytes], clients: Sequence[int], dealer: int, giver: int, gone: bool) -> bytes:
    row = column({dealer: dealt[dealer]}, clients, giver)[dealer]
    return row[SEALED + WORD :] if gone else row[SEALED : SEALED + WORD]


def _kind(gone: bool) -> str:
    return "share of key" if gone else "share of seed"


def _seal_key(party: Party, dealer: int, to: int) -> bytes:
    """One key for each direction between two sites, used for one message."""
    other = to if dealer == party.client else dealer
    secret = X25519PrivateKey.from_private_bytes(raw(party.cipher))
    agreed = _agreed(secret, _by_client(party)[other][:WORD])
    assert agreed is not None  # looked at in ``deal``
    return _derived(agreed, _transcript(party), f"seal {dealer} {to}")


def _pair_mask(transcript: bytes, secret: X25519PrivateKey, keys: bytes, one: int, other: int) -> bytes:
    agreed = _agreed(secret, keys[WORD : 2 * WORD])
    assert agreed is not None
    return _derived(agreed, transcript, f"mask {min(one, other)} {max(one, other)}")


def _own_mask(session: str, client: int, seed: bytes) -> bytes:
    return _derived(seed, session.encode(), f"own mask {client}")


def _sign_of(one: int, other: int) -> int:
    """Of a pair the lower number adds the mask, the higher one takes it away."""
    return 1 if one < other else -1


def _agreed(secret: X25519PrivateKey, public: bytes) -> bytes | None:
    try:
        return secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order: what is agreed would be known to everybody
        return None


def _derived(secret: bytes, salt: bytes, purpose: str) -> bytes:
    return HKDF(SHA256(), WORD, salt, PURPOSE + purpose.encode()).derive(secret)


def public_of(secret: bytes) -> bytes:
    """The public X25519 key of a secret one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _statement(step: str, session: str, client: int, body: bytes) -> bytes:
    """What a site signs."""
    return PURPOSE + f"{step} {session} {client} ".encode() + body


def _hash(purpose: str, session: str, *more: int | bytes) -> bytes:
    *places, secret = more
    assert isinstance(secret, bytes)
    head = PURPOSE + f"{purpose} {session} {' '.join(map(str, places))} ".encode()
    return hashlib.sha256(head + secret).digest()


def _by_client(party: Party) -> dict[int, bytes]:
    assert party.keys is not None
    return {client: raw(row) for client, row in zip(party.clients, party.keys, strict=True)}


def _transcript(party: Party) -> bytes:
    return _transcript_of(party.session, party.least, _by_client(party))


def _transcript_of(session: str, least: int, keys: Blobs) -> bytes:
    """Stands for the session and the list of keys as one site saw it."""
    found = hashlib.sha256(PURPOSE + f"list {session} {least} {sorted(keys)} ".encode())
    for client in sorted(keys):
        found.update(keys[client])
    return found.digest()


def _group(party: Party) -> bytes:
    return _group_of(_transcript(party), party.group)


def _group_of(transcript: bytes, group: Sequence[int]) -> bytes:
    return transcript + _numbers(group)


def _list(party: Party) -> bytes:
    return _group(party) + _numbers(party.masked)


def _numbers(clients: Sequence[int]) -> bytes:
    return f" {sorted(clients)}".encode()


def _not_signed(step: str, session: str, signatures: Blobs, body: bytes, verify: Verify) -> list[int]:
    return [k for k, s in sorted(signatures.items()) if not verify(k, s, _statement(step, session, k, body))]


def _with_signature(party: Party, step: str, signature: bytes) -> Party:
    return replace(party, signed=party.signed | {step: blob(signature)})


def _within(chosen: Sequence[int], among: Sequence[int], party: Party, what: str) -> None:
    if len(set(chosen)) != len(chosen) or not set(chosen) <= set(among) or party.client not in chosen:
        raise _refused("E442", f"the {what} are not of this sum, or this site is not among them")
    if len(chosen) < party.least:
        raise _refused("E443", f"the sum would have {len(chosen)} sites, and {party.least} must be in it")


def _same(party: Party, same: bool, what: str) -> Party:
    if not same:
        raise _refused("E442", f"this site was asked for {what} before, with another question; it answers once")
    return party


def _in_order(ready: bool, what: str) -> None:
    if not ready:
        raise _refused("E442", f"this site was asked for {what} before their turn")


def _refused(code: str, what: str) -> RunError:
    return RunError(code, what, where="secure sum", fix="nothing was sent; the sum goes on without this site")
