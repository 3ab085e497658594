"""A site's part in secure sums, in files that its own user alone can read.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rescene.core.errors import RunError
from rescene.core.record import Tree
from rescene.deploy.keys import read_node_key, read_peers
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.summing import MASK, REVEAL, answer
from rescene.engine.checkpoint import reach, write_atomically
from rescene.privacy import secure_sum as sums
from rescene.privacy.secure_sum import Party
from rescene.privacy.totals import Values, check_part

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
                write_atomically(self._path(session, "values"), pack_message(plain).data)
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
            sign, verify = (
                sums.signer(read_node_key(self._folder)),
                sums.verifier(read_peers(self._folder / "peers.pub")),
            )
            values = self._path(session, "values")
            after, upload = answer(party, lambda: unpack_message(values.read_bytes()).tree, step, payload, sign, verify)
            if step == MASK:
                self._claim(party.numbers, session)
            if step == REVEAL:
                write_atomically(told, pack_message({"asked": asked, "upload": upload}).data)
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
        write_atomically(path, session.encode())

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
        write_atomically(self._path(party.session, "party"), pack_message(party).data)

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
