"""The course of a secure sum between server and sites: who is asked what in which step, and who is left out.

:func:`hold` is the server's side and :func:`answer` a site's; what stands in between brings a payload to each site and the
uploads back. The cryptography is ``privacy.secure_sum``'s. Until a site masks its numbers, too few sites mean that nothing is
opened and nothing was used. After that the numbers are in this sum or in none, so the server waits for the sites to come back.

A site's part (:class:`Parties`) lies in files that its own user alone can read:

    node.key, peers.pub                          its own key, and the public keys of all sites with their numbers
    state/<run>/client-<k>/sums/party-<session>  secrets and questions of the sum under way, whole or not at all
    state/<run>/client-<k>/sums/values-<session> the numbers that it adds
    state/<run>/client-<k>/sums/told-<session>   its last answer; the two files above are deleted then
    state/summed/numbers-<fingerprint>           which session these numbers were masked for

Numbers are masked for one session, ever. Two sums that differ by one site would give that site's numbers away with only its own
share of the noise, and a site that has sent masked numbers cannot know whether the others let them be opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rescene.core.errors import RunError
from rescene.core.record import Tree, map_tensors
from rescene.deploy.exchange import SUM_STEPS
from rescene.deploy.keys import read_node_key, read_peers
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.engine.checkpoint import reach, save_atomically
from rescene.methods.upload_schema import Form, KnownSizes, Misfit, fields, tensor
from rescene.privacy import secure_sum as sums
from rescene.privacy.secure_sum import Blobs, Party, Sign, Verify, blob, raw
from rescene.privacy.totals import COMMITTED, KEYS, SEALED, SHARE, SIGNATURE, Values, check_part, layout

DEAL, RECEIVE, MASK, AGREE, REVEAL = STEPS = SUM_STEPS
ROW = SEALED + COMMITTED

# step, payloads, form -> uploads
Ask = Callable[[str, Mapping[int, dict[str, Tree]], Form], dict[int, dict[str, Tree]]]
# step, clients -> the same, or those of the first time it was decided
Decide = Callable[[str, Sequence[int]], list[int]]
Note = Callable[..., None]


def byte(*shape: int) -> Form:
    """The form of a uint8 tensor of this shape."""
    return tensor(torch.uint8, *shape, low=0, high=255)


KEYS_FORM: Form = fields({"keys": byte(KEYS)})


@dataclass(frozen=True)
class Sum:
    """One sum, as the server holds it."""

    session: str
    least: int
    verify: Verify
    ask: Ask
    decide: Decide
    note: Note

    def hold(self, keys: Blobs, form: Form) -> tuple[dict[str, Tensor], list[int]]:
        """The sum and who is in it; nothing and nobody if too few sites got as far as masking.

        ``keys`` are what the sites showed of themselves, ``form`` is that of their numbers.
        """
        wrong = sums.wrong_keys(self.session, keys, self.verify)
        self._name(wrong)
        clients = self.decide("keys", [k for k in sorted(keys) if k not in wrong])
        keys = {k: keys[k] for k in clients}
        shown = _shown("keys", keys, KEYS)
        found = self._asked(DEAL, dict.fromkeys(clients, shown), fields({"dealt": byte(len(clients), ROW)}))
        dealt = {k: raw(upload["dealt"]) for k, upload in found.items()}
        dealers = self.decide(DEAL, sorted(dealt))
        group = self.decide(RECEIVE, self._group(clients, {k: dealt[k] for k in dealers}))
        if len(group) < self.least:
            return {}, []
        masked = self._masked(keys, group, form)
        signatures = self._signatures(keys, group, {k: part[0] for k, part in masked.items()})
        values = self._opened(keys, dealt, group, {k: part[1] for k, part in masked.items()}, signatures)
        return values, sorted(masked)

    def _asked(self, step: str, payloads: Mapping[int, dict[str, Tree]], form: Form) -> dict[int, dict[str, Tree]]:
        """Nobody is asked on behalf of too few."""
        return self.ask(step, payloads, form) if len(payloads) >= self.least else {}

    def _group(self, clients: Sequence[int], dealt: Blobs) -> list[int]:
        """Those whose shares enough others could open, so that they may go away from now on."""
        payloads = {client: _shown("dealt", sums.column(dealt, clients, client), ROW) for client in dealt}
        form = fields({"fits": tensor(torch.bool, len(dealt), low=0, high=1)})
        found = self._asked(RECEIVE, payloads, form)
        good = {k: upload["fits"].tolist() for k, upload in found.items()}
        group = []
        for place, dealer in enumerate(sorted(dealt)):
            doubtful = [k for k in sorted(good) if not good[k][place]]
            if len(good) - len(doubtful) >= self.least:
                group += [dealer] if dealer in good else []
                for k in doubtful:
                    self.note("warning", "W436", f"site {k} cannot open the shares that site {dealer} dealt to it")
            elif len(good) >= self.least:
                self._name({dealer: f"its shares cannot be opened by {len(doubtful)} of {len(good)} sites"})
        return group

    def _masked(self, keys: Blobs, group: Sequence[int], form: Form) -> dict[int, tuple[bytes, dict[str, Tensor]]]:
        """Signature and masked numbers of those who masked, as far as they have the same shapes."""
        answer = fields({"signature": byte(SIGNATURE), "values": shapes_only(form)})
        found = self._asked(MASK, dict.fromkeys(group, {"clients": list(group)}), answer)
        signatures = {k: raw(upload["signature"]) for k, upload in found.items()}
        wrong = self._unsigned("group", keys, group, (), signatures)
        self._name(dict.fromkeys(wrong, "it has not signed the group it masks for"))
        shapes = {k: layout(upload["values"]) for k, upload in found.items() if k not in wrong}
        most = max(shapes.values(), key=list(shapes.values()).count, default=())
        self._name({k: "its numbers have another shape than the others'" for k in shapes if shapes[k] != most})
        masked = self._needed(MASK, [k for k in sorted(shapes) if shapes[k] == most])
        return {k: (signatures[k], found[k]["values"]) for k in masked}

    def _signatures(self, keys: Blobs, group: Sequence[int], groups: Blobs) -> dict[int, bytes]:
        """Those under the list of who masked."""
        shown = _shown("signatures", groups, SIGNATURE)
        found = self._asked(AGREE, dict.fromkeys(sorted(groups), shown), fields({"signature": byte(SIGNATURE)}))
        given = {k: raw(upload["signature"]) for k, upload in found.items()}
        wrong = self._unsigned("list", keys, group, sorted(groups), given)
        self._name(dict.fromkeys(wrong, "it has not signed the list of those who masked"), summed=groups)
        signers = self._needed(AGREE, [k for k in sorted(given) if k not in wrong])
        return {k: given[k] for k in signers}

    def _opened(
        self,
        keys: Blobs,
        dealt: Blobs,
        group: Sequence[int],
        masked: Mapping[int, dict[str, Tensor]],
        signatures: Blobs,
    ) -> dict[str, Tensor]:
        num, shown = len(group), _shown("signatures", signatures, SIGNATURE)
        form = fields({"seed": byte(SHARE), "has": tensor(torch.bool, num, low=0, high=1), "shares": byte(num, SHARE)})
        found = self._asked(REVEAL, dict.fromkeys(sorted(signatures), shown), form)
        seeds = {k: raw(upload["seed"]) for k, upload in found.items()}
        told = {
            k: {other: raw(upload["shares"][i]) for i, other in enumerate(group) if bool(upload["has"][i])}
            for k, upload in found.items()
        }
        outcome = sums.opened(self.session, self.least, keys, dealt, group, masked, seeds, told)
        self._name(dict.fromkeys(outcome.liars, "it lied about a share"), summed=masked)
        if outcome.values is None:
            raise self._stuck(f"the masks of {_sites(outcome.closed)} cannot be taken away with {len(found)} answers")
        return outcome.values

    def _unsigned(self, step: str, keys: Blobs, group: Sequence[int], masked: Sequence[int], given: Blobs) -> list[int]:
        return sums.unsigned_by(step, self.session, self.least, keys, group, masked, given, self.verify)

    def _needed(self, step: str, clients: list[int]) -> list[int]:
        """Enough sites, or the run stops here: numbers that were masked go into this sum or into none."""
        if len(clients) < self.least:
            raise self._stuck(f"{len(clients)} sites have answered {step}, and {self.least} must")
        return self.decide(step, clients)

    def _stuck(self, why: str) -> RunError:
        return RunError(
            "E445",
            "the sum over sites cannot be opened",
            why=why,
            fix="start the sites that are away and resume the run: it goes on with this sum; events.jsonl names them",
        )

    def _name(self, wrong: Mapping[int, str], summed: Collection[int] = ()) -> None:
        """Who lied. The numbers of ``summed`` came before they did, under masks that only the whole sum is freed of."""
        for client, why in sorted(wrong.items()):
            fate = (
                "is believed no more, but its numbers are in the sum" if client in summed else "is left out of the sum"
            )
            self.note("error", "E441", f"site {client} {fate}: {why}", client=client)


def answer(
    party: Party, values: Callable[[], Values], step: str, payload: Mapping[str, Tree], sign: Sign, verify: Verify
) -> tuple[Party, dict[str, Tree]]:
    """A site's answer to one step, and what it has to keep for the next. ``values`` reads its numbers, once in a sum."""
    clients = _clients(payload)
    if step == DEAL:
        party = sums.deal(party, _rows(clients, payload["keys"], KEYS), verify)
        return party, {"dealt": party.dealt}
    if step == RECEIVE:
        party = sums.receive(party, _rows(clients, payload["dealt"], ROW))
        return party, {"fits": torch.tensor(sums.fits(party))}
    if step == MASK:
        party, masked = sums.mask(party, values(), clients, sign)
        return party, {"signature": party.signed["group"], "values": masked}
    given = _rows(clients, payload["signatures"], SIGNATURE)
    if step == AGREE:
        party = sums.agree(party, given, sign, verify)
        return party, {"signature": party.signed["list"]}
    seed, told = sums.reveal(party, given, verify)
    shares = _table([told.get(other, bytes(SHARE)) for other in party.group], SHARE)
    return party, {"seed": blob(seed), "has": torch.tensor([k in told for k in party.group]), "shares": shares}


def shapes_only(form: Form) -> Form:
    """The form without its bounds on values, of a dict that is not empty: masked numbers may be anything."""

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        if not value:
            raise Misfit(f"{name} is empty")
        form(map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), value), name, sizes)

    return check


def _clients(payload: Mapping[str, Tree]) -> list[int]:
    found = payload["clients"]
    if not isinstance(found, list) or not all(type(k) is int for k in found) or sorted(set(found)) != found:
        raise RunError("E442", "the list of sites is not one of numbers in order", where="secure sum")
    return found


def _shown(name: str, rows: Blobs, width: int) -> dict[str, Tree]:
    """A table with a row for each site, and whose they are, as a payload."""
    clients = sorted(rows)
    return {"clients": clients, name: _table([rows[k] for k in clients], width)}


def _table(rows: Collection[bytes], width: int) -> Tensor:
    return blob(b"".join(rows)).reshape(len(rows), width)


def _rows(clients: Sequence[int], table: Tensor, width: int) -> dict[int, bytes]:
    if not isinstance(table, Tensor) or table.dtype != torch.uint8 or tuple(table.shape) != (len(clients), width):
        raise RunError("E442", "the message does not have a row for each site", where="secure sum")
    return {client: raw(row) for client, row in zip(clients, table, strict=True)}


def _sites(clients: Sequence[int]) -> str:
    return f"site{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}"


try:
    from fcntl import LOCK_EX, flock
except ImportError:  # not on this system: the server sends one letter at a time, unless it thinks one is lost
    flock = None  # type: ignore[assignment]


class Parties:
    """The sums of one site in one run. ``folder`` is the site's, ``files`` the run's part of it."""

    def __init__(self, folder: Path, files: Path, client: int) -> None:
        self._folder, self._sums, self._client = folder, files / "sums", client

    def begin(self, session: str, least: int, num_sites: int, values: Values) -> dict[str, Tree]:
        """The site's keys for a new sum; what is left of earlier ones is deleted. The same sum again has the same keys."""
        plain = {name: value.detach().cpu().contiguous() for name, value in values.items()}
        check_part(plain, num_sites)
        with self._locked():
            self._refuse_second(sums.fingerprint(plain), session)
            party = self._read(session)
            if party is None:
                if self._path(session, "told").exists():
                    raise self._over()
                for old in self._sums.glob("*-*"):
                    old.unlink()
                party = sums.begin(session, self._client, least, plain, sums.signer(read_node_key(self._folder)))
                save_atomically(self._path(session, "values"), pack_message(plain).data)
                self._write(party)
            if party.numbers != sums.fingerprint(plain):
                raise RunError("E444", "this site began the sum with other numbers", where="secure sum")
            return {"keys": sums.blob(sums.keys_of(party))}

    def answer(self, session: str, step: str, payload: Tree) -> Tree:
        """The site's answer to a step; it is on disk before it is given."""
        asked = hashlib.sha256(pack_message({"step": step, "payload": payload}).data).hexdigest()
        with self._locked():
            told = self._path(session, "told")
            if told.exists():
                kept = unpack_message(told.read_bytes()).tree
                if kept["asked"] != asked:
                    raise self._over()
                self._delete_secrets(session)  # a site that died in between left them
                return kept["upload"]
            party = self._read(session)
            if party is None:
                raise RunError("E442", "this site is in no such sum", where="secure sum")
            sign = sums.signer(read_node_key(self._folder))
            verify = sums.verifier(read_peers(self._folder / "peers.pub"))
            values = self._path(session, "values")
            after, upload = answer(party, lambda: unpack_message(values.read_bytes()).tree, step, payload, sign, verify)
            if step == MASK:
                self._claim(party.numbers, session)
            if step == REVEAL:
                save_atomically(told, pack_message({"asked": asked, "upload": upload}).data)
                reach("told", told)
                self._delete_secrets(session)
            elif after is not party:
                self._write(after)
            return upload

    def _delete_secrets(self, session: str) -> None:
        for kind in ("party", "values"):
            self._path(session, kind).unlink(missing_ok=True)

    def _refuse_second(self, numbers: str, session: str) -> None:
        """E444 if these numbers were masked for another sum."""
        path = self._summed(numbers)
        if path.exists() and path.read_text() != session:
            raise RunError(
                "E444",
                "these numbers were masked for another sum; nothing is sent",
                where="secure sum",
                why="the difference of two sums that differ by one site is that site's own part",
                fix="resume the run that began the other sum, or ask in another round",
            )

    def _claim(self, numbers: str, session: str) -> None:
        self._refuse_second(numbers, session)
        path = self._summed(numbers)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_atomically(path, session.encode())

    def _summed(self, numbers: str) -> Path:
        return self._folder / "state" / "summed" / f"numbers-{numbers}"

    def _over(self) -> RunError:
        return RunError("E442", "this sum is over; this site answers nothing more about it", where="secure sum")

    def _read(self, session: str) -> Party | None:
        try:
            found: Party = unpack_message(self._path(session, "party").read_bytes()).tree
            return found
        except FileNotFoundError:
            return None

    def _write(self, party: Party) -> None:
        save_atomically(self._path(party.session, "party"), pack_message(party).data)

    def _path(self, session: str, kind: str) -> Path:
        return self._sums / f"{kind}-{session}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A letter that comes twice may be read by two processes at once."""
        self._sums.mkdir(parents=True, exist_ok=True)
        with open(self._sums / "lock", "w") as file:
            if flock is not None:
                flock(file, LOCK_EX)
            yield
