"""Attacks on a secure sum: does a server that lies learn more than the noised sum of the round?

The sites are real ones as far as sums go (``rescene.deploy.summing``: their keys, files and refusals), in a temporary folder. The server
drives them as it likes: it asks twice, in another order, under another run, and shows different lists to different sites.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from rescene.audit.rows import Found
from rescene.audit.sums import CLAIM, DELTA, ONCE, RISK, SURE, canary_scores, claimed_sums
from rescene.core.errors import RunError
from rescene.core.record import Tree
from rescene.deploy.keys import make_node_key, read_peers, write_peers
from rescene.deploy.summing import AGREE, DEAL, MASK, REVEAL, Parties, Sum
from rescene.methods.upload_schema import Form, fields, tensor
from rescene.privacy import secure_sum as sums
from rescene.privacy.accounting import epsilon_of
from rescene.privacy.epsilon_bounds import success_lower_bound, two_world_bound
from rescene.privacy.secure_sum import Blobs
from rescene.privacy.totals import Values, threshold

NUM = 64  # numbers of a site
SITES, HONEST = 5, 2
LEAST = threshold(SITES, 0.5, HONEST)
VICTIM = SITES - 1
FORM = fields({"n": tensor(torch.int32, NUM)})
TRACED = 120  # sums in which the server guesses what went in
SEEDS = 4096  # a server tries these, and every second of the last hour
DRAWS = 300
FEW = 64  # of so many sites that should be honest the control has one: an eighth of the noise


@dataclass(frozen=True)
class MaskedWorld:
    """Sites with one vector each, and a server that knows nothing but what they answer."""

    root: Path
    least: int
    values: Mapping[int, dict[str, Tensor]]

    def folder(self, client: int) -> Path:
        """The folder of one site."""
        return self.root / f"site-{client}"

    def party(self, client: int, run: str) -> Parties:
        """A site's side of the secure sum of one run."""
        return Parties(self.folder(client), self.folder(client) / "state" / run / f"client-{client}", client)

    def keys(self, session: str, clients: Sequence[int], run: str = "run") -> dict[int, bytes]:
        """What those show who begin this sum."""
        found = {}
        for client in clients:
            with suppress(RunError):
                shown = self.party(client, run).begin(session, self.least, SITES, self.values[client])
                found[client] = _raw(shown["keys"])
        return found

    def asked(
        self, session: str, step: str, payloads: Mapping[int, dict[str, Tree]], run: str = "run"
    ) -> dict[int, dict[str, Tree]]:
        """The answers of those who do not refuse."""
        found: dict[int, dict[str, Tree]] = {}
        for client, payload in payloads.items():
            with suppress(RunError):
                answer = self.party(client, run).answer(session, step, payload)
                assert isinstance(answer, dict)
                found[client] = answer
        return found

    def held(self, session: str, keys: Blobs, run: str = "run") -> dict[str, Tensor]:
        """The sum that a server opens by the rules; nothing if it cannot."""
        verify = sums.verifier(read_peers(self.folder(0) / "peers.pub"))

        def ask(step: str, payloads: Mapping[int, dict[str, Tree]], form: Form) -> dict[int, dict[str, Tree]]:
            return self.asked(session, step, payloads, run)

        one = Sum(session, self.least, verify, ask, lambda step, clients: list(clients), lambda *told, **more: None)
        with suppress(RunError):
            return one.hold(keys, FORM)[0]
        return {}

    def found(self, first: Values, second: Values) -> int:
        """How many of the victim's numbers the difference of two sums is."""
        if not first or not second:
            return 0
        return int(((first["n"] - second["n"]) == self.values[VICTIM]["n"]).sum())


@contextmanager
def world(least: int = LEAST) -> Iterator[MaskedWorld]:
    """A temporary world of sites with keys and values to sum. ``least`` is the number of answers that a sum needs."""
    with tempfile.TemporaryDirectory() as place:
        root, generator = Path(place), torch.Generator().manual_seed(0)
        values = {
            k: {"n": torch.randint(-(2**20), 2**20, (NUM,), dtype=torch.int32, generator=generator)}
            for k in range(SITES)
        }
        one = MaskedWorld(root, least, values)
        for client in range(SITES):
            one.folder(client).mkdir()
            make_node_key(one.folder(client))
        for client in range(SITES):
            write_peers(one.folder(client) / "peers.pub", {k: one.folder(k) / "node.pub" for k in range(SITES)})
        yield one


def second_sum() -> Found:
    """A sum of all sites, then one of all but the victim: in the same run, in another, begun before the first or after it.

    The difference of two such sums is the victim's part. The control forgets which numbers it has masked.
    """
    with world() as one:
        found = _subtracted(one, forgets=False)
    with world() as other:
        lost = _subtracted(other, forgets=True)
    words = f"sites that forget what they masked give {lost} of {NUM}"
    return Found(found, 0, lost == NUM, f"of {NUM} numbers of a site", words)


def _subtracted(one: MaskedWorld, forgets: bool) -> int:
    everybody, others = range(SITES), range(SITES - 1)
    before = one.keys("before", others, run="other")
    whole = one.held("whole", one.keys("whole", everybody))
    if forgets:
        for client in everybody:
            for kept in (one.folder(client) / "state" / "summed").iterdir():
                kept.unlink()
    rest = [one.held("before", before, run="other")]
    for run in ("run", "third"):
        rest.append(one.held(f"again-{run}", one.keys(f"again-{run}", others, run), run))
    return max(one.found(whole, part) for part in rest)


def two_lists() -> Found:
    """The server tells one group of sites that the victim masked its numbers and the others that it went away.

    Shares of both its secrets open its numbers alone. More than half of the sites must sign a list, and each signs one. The
    control lets two sites open a sum.
    """
    with world() as one:
        found = _split(one)
    with world(least=2) as other:
        lost = _split(other)
    return Found(
        found, 0, lost == NUM, f"of {NUM} numbers of a site", f"where 2 of {SITES} may open a sum, {lost} of {NUM}"
    )


def _split(one: MaskedWorld) -> int:
    """As few sites as open a sum get the list with the victim. Then all others get the one without it."""
    log: dict[str, dict[int, dict[str, Tree]]] = {}
    verify = sums.verifier(read_peers(one.folder(0) / "peers.pub"))

    def ask(step: str, payloads: Mapping[int, dict[str, Tree]], form: Form) -> dict[int, dict[str, Tree]]:
        if step == AGREE:
            raise RunError("E445", "the server goes its own way from here")
        log[step] = one.asked("split", step, payloads)
        return log[step]

    keys = one.keys("split", range(SITES))
    with suppress(RunError):
        Sum("split", one.least, verify, ask, lambda step, clients: list(clients), lambda *t, **m: None).hold(keys, FORM)
    everybody, others = list(range(SITES)), list(range(SITES - 1))
    dealt = {k: _raw(answer["dealt"]) for k, answer in log[DEAL].items()}
    masked = log[MASK]
    opened = []
    for told, asked in ((everybody, others[: one.least]), (others, others)):
        agreed = one.asked("split", AGREE, dict.fromkeys(asked, _signed(told, masked)))
        answers = one.asked("split", REVEAL, dict.fromkeys(others, _signed(sorted(agreed), agreed)))
        opened.append(_opened(one, keys, dealt, {k: masked[k] for k in told}, answers))
    return one.found(*opened)


def _signed(clients: Sequence[int], answers: Mapping[int, Mapping[str, Tree]]) -> dict[str, Tree]:
    rows = [answers[k]["signature"] for k in clients]
    table = torch.stack([row for row in rows if isinstance(row, Tensor)]) if rows else torch.zeros(0, 96).byte()
    return {"clients": list(clients), "signatures": table}


def _opened(
    one: MaskedWorld,
    keys: Blobs,
    dealt: Blobs,
    masked: Mapping[int, Mapping[str, Tree]],
    answers: Mapping[int, Mapping[str, Tree]],
) -> dict[str, Tensor]:
    """What the server can rebuild from the shares it was given."""
    group, told = sorted(keys), dict[int, dict[int, bytes]]()
    for giver, answer in answers.items():
        has, shares = answer["has"], answer["shares"]
        assert isinstance(has, Tensor) and isinstance(shares, Tensor)
        told[giver] = {k: _raw(shares[i]) for i, k in enumerate(group) if bool(has[i])}
    seeds = {k: _raw(answer["seed"]) for k, answer in answers.items()}
    parts = {k: answer["values"] for k, answer in masked.items()}
    values = sums.opened("split", one.least, keys, dealt, group, parts, seeds, told).values
    return values or {}


def traces(tries: int = TRACED) -> Found:
    """Which of two vectors went into a masked upload? Inner product, lowest bits and highest bits guess, sum after sum."""
    generator = torch.Generator().manual_seed(0)
    pair = torch.randint(-(2**20), 2**20, (2, NUM), dtype=torch.int32, generator=generator)
    coins = torch.randint(2, (tries,), generator=generator)
    shown = torch.stack([_of_two("trace", {"n": pair[coin]})[1] for coin in coins])
    found, broken = (_guessed(pair, coins, uploads) for uploads in (shown, pair[coins]))
    return Found(found, 0.5, broken > 0.5, "share", f"masks off: {broken:.0%}", f"{tries} sums")


def _of_two(
    session: str, values: dict[str, Tensor], fresh: Callable[[int], bytes] = os.urandom
) -> tuple[bytes, Tensor]:
    """The keys that a site shows in a sum of two, and its masked numbers."""
    signing = _node_keys()
    sign, verify = sums.signer(signing[0]), sums.verifier({k: key.public_key() for k, key in enumerate(signing)})
    begun = [sums.begin(session, 0, 2, values, sign, fresh)]
    begun += [sums.begin(session, 1, 2, values, sums.signer(signing[1]))]
    keys = {k: sums.keys_of(party) for k, party in enumerate(begun)}
    parties = [sums.deal(party, keys, verify) for party in begun]
    dealt = {k: sums.raw(party.dealt) for k, party in enumerate(parties) if party.dealt is not None}
    received = sums.receive(parties[0], sums.column(dealt, list(keys), 0))
    return keys[0], sums.mask(received, values, list(keys), sign)[1]["n"]


@lru_cache(maxsize=1)
def _node_keys() -> list[ec.EllipticCurvePrivateKey]:
    return [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]


def _guessed(pair: Tensor, coins: Tensor, uploads: Tensor) -> float:
    """The share of right guesses of the best of three statistics, at least."""
    wide = pair.double()
    scores = [
        uploads.double() @ (wide[1] - wide[0]) - (wide[1].square().sum() - wide[0].square().sum()) / 2,
        _agreeing(uploads & 1, pair & 1),
        _agreeing(uploads < 0, pair < 0),
    ]
    right = [int(((score > 0) == coins.bool()).sum()) for score in scores]
    return max(success_lower_bound(r, len(coins), SURE / len(scores)) for r in right)


def _agreeing(bits: Tensor, pair: Tensor) -> Tensor:
    return ((bits == pair[1]).sum(dim=1) - (bits == pair[0]).sum(dim=1)).double()


def guesses(num_seeds: int = SEEDS) -> Found:
    """Does any small seed, or any second of the last hour, lead to a secret of the site? Its hash and its keys tell a right guess.

    The control draws its secrets as a program would that seeds numpy with the time.
    """
    now = int(time.time())
    tried = [*range(num_seeds), *range(now - 3600, now + 1)]
    values = {"n": torch.zeros(NUM, dtype=torch.int32)}
    found, broken = (_rebuilt(_of_two("guess", values, fresh)[0], tried) for fresh in (os.urandom, _timed(now - 1234)))
    words = f"secrets from the time of day: {broken} of 3"
    return Found(found, 0, broken == 3, "of 3 secrets", words, f"{len(tried):,} seeds")


def _timed(seed: int) -> Callable[[int], bytes]:
    return np.random.RandomState(seed).bytes


def _rebuilt(shown: bytes, tried: Sequence[int]) -> int:
    """How many of a site's secrets one of these seeds gives: the two private keys and the seed of its own mask."""
    words = [shown[at : at + sums.WORD] for at in range(0, 3 * sums.WORD, sums.WORD)]
    best = 0
    for seed in tried:
        fresh = _timed(seed)
        cipher, mask, own = (fresh(sums.WORD) for _ in range(3))
        if sums.seed_hash("guess", 0, own) == words[2]:  # cheap to look at; public keys are not
            best = max(best, 1 + (sums.public_of(cipher) == words[0]) + (sums.public_of(mask) == words[1]))
    return best


def honest_few(draws: int = DRAWS, seed: int = 0) -> Found:
    """Canaries in a sum of which the server knows every part but those of the honest sites, and takes it away."""
    sound = replace(claimed_sums(), honest_sites=HONEST)
    shown = two_world_bound(*canary_scores(sound, draws, seed, honest=HONEST), DELTA, RISK)
    weak = replace(claimed_sums(), honest_sites=FEW)
    broken = two_world_bound(*canary_scores(weak, draws, seed, honest=1), DELTA, RISK)
    words = f"1 honest site in the place of {FEW} shows {broken:.2f}"
    return Found(shown, epsilon_of(sound.sigma, ONCE, DELTA), broken > CLAIM, "epsilon", words)


def _raw(data: Tree) -> bytes:
    assert isinstance(data, Tensor)
    return sums.raw(data)
