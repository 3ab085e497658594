"""A site's memory of what it has released: one append-only file per site, on the site's own disk.

The server is the one to be protected from, so the site keeps the books. Order of events: check the budget, write the intent,
draw the noise, write the release, fsync, and only then hand it out. So

- the same place asked again gets the same bytes (a resumed run replays; averaging repeated answers gains nothing);
- the same place with another question is refused; a spent budget declines; an unreadable file stops everything;
- a participation counts from its intent on, even if the machine dies before the release.

The floor (``floor.yaml`` beside the file: epsilon_max, min_sigma, max_participations) is the site's own. It can only be
stricter than what the server asks for. It counts every earlier run in the file in full, because a record may be in all of them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import load, save
from torch import Tensor

from rescene.documents import read_yaml
from rescene.errors import ConfigError, ResceneError, RunError
from rescene.privacy.accounting import Composition, total_epsilon

try:
    from fcntl import LOCK_EX, flock
except ImportError:  # not on this system: one process per ledger is then the operator's duty
    flock = None  # type: ignore[assignment]

Released = dict[str, Tensor]


class Declined(ResceneError):
    """The site does not take part this time (E413): its budget is spent or its floor is above what was asked."""


@dataclass(frozen=True)
class Charge:
    """One participation: its place, and what it costs a record."""

    run: str
    task: int
    round: int
    mechanism: str
    sigma: float
    steps: int
    rate: float
    reuses: bool = False  # records of earlier tasks, kept in the site's memory, are used as well

    @property
    def key(self) -> str:
        return f"{self.run}/{self.task}/{self.round}"


@dataclass(frozen=True)
class Floor:
    """What the site allows at most, whatever the server says. None: no limit of its own."""

    epsilon_max: float | None = None
    min_sigma: float | None = None
    max_participations: int | None = None


class Ledger:
    def __init__(self, path: Path, floor: Floor | None = None) -> None:
        self.path = path
        self._floor = floor  # given, or else in the file beside

    def once(
        self, charge: Charge, question: str, delta: float, most: int | None, draw: Callable[[], Released]
    ) -> Released:
        """The release at this place: the recorded one, or a new one if the budget allows it."""
        with self._open() as file:
            intents, releases = self._read(file)
            if charge.key in intents and intents[charge.key]["question"] != question:
                raise RunError(
                    "E412",
                    "the same round was asked twice with different questions",
                    where=f"{self.path}, {charge.key}",
                    why="a second answer about the same round is a second release that nobody accounted for",
                    fix="use the folder of the run that began this round, or start a new run",
                )
            if charge.key in releases:
                return _unpacked(releases[charge.key])
            if charge.key not in intents:
                self._check_budget(charge, list(intents.values()), delta, most)
                self._append(file, {"kind": "intent", "question": question, "charge": asdict(charge)})
            found = draw()
            self._append(file, {"kind": "release", "key": charge.key, **_packed(found)})
            return found

    def participations(self, run: str, task: int) -> int:
        with self._open() as file:
            return sum(
                row["charge"]["run"] == run and row["charge"]["task"] == task for row in self._read(file)[0].values()
            )

    def charges(self) -> list[Charge]:
        """Everything that was ever begun, in order."""
        with self._open() as file:
            return [Charge(**row["charge"]) for row in self._read(file)[0].values()]

    def floor(self) -> Floor:
        """The site's own limits; a floor that cannot be understood allows nothing."""
        path = self.path.parent / "floor.yaml"
        if self._floor is not None:
            return self._floor
        if not path.exists():
            return Floor()
        try:
            found = read_yaml(path)
            unknown = found.keys() - {field.name for field in fields(Floor)}
            if unknown or not all(float(value) > 0 for value in found.values()):
                raise ValueError(f"unknown {sorted(unknown)}" if unknown else "limits must be above 0")
            return Floor(**found)
        except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
            raise RunError(
                "E411",
                "the site's privacy floor cannot be read, so nothing is sent",
                where=str(path),
                why=str(error),
                fix="epsilon_max, min_sigma, max_participations: positive numbers",
            ) from None

    def _check_budget(self, charge: Charge, intents: list[dict[str, Any]], delta: float, most: int | None) -> None:
        floor, earlier = self.floor(), [Charge(**row["charge"]) for row in intents]
        same = [c for c in earlier if (c.run, c.task) == (charge.run, charge.task)]
        limits = [limit for limit in (most, floor.max_participations) if limit is not None]
        if limits and len(same) >= min(limits):
            raise self._declined(charge, f"{len(same)} participations in this task are all it allows")
        if floor.min_sigma is not None and charge.sigma < floor.min_sigma:
            raise self._declined(charge, f"noise multiplier {charge.sigma:g} is below its floor {floor.min_sigma:g}")
        if floor.epsilon_max is None:
            return
        if charge.mechanism == "paper-experiment":
            raise self._declined(charge, "the paper's experiment promises no epsilon, and this site has a limit on it")
        used = [c for c in earlier if c.run != charge.run or c.task == charge.task or charge.reuses]
        steps: Counter[tuple[float, float]] = Counter()
        for c in (*used, charge):
            steps[c.sigma, c.rate] += c.steps
        spent = total_epsilon([(sigma, Composition(n, 1, rate)) for (sigma, rate), n in steps.items()], delta)
        if spent > floor.epsilon_max:
            raise self._declined(charge, f"epsilon would be {spent:.2f}, above its limit {floor.epsilon_max:g}")

    def _declined(self, charge: Charge, why: str) -> Declined:
        return Declined("E413", f"site declines: {why}", where=f"task {charge.task}, round {charge.round}")

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """The file, locked, so that two processes cannot spend the same budget."""
        try:
            new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "a+b")  # noqa: SIM115 - closed below, errors of opening are told apart
        except OSError as error:
            raise self._unusable(str(error)) from None
        with file:
            if flock is not None:
                flock(file, LOCK_EX)
            if new and hasattr(os, "O_DIRECTORY"):  # the name must survive a crash too
                folder = os.open(self.path.parent, os.O_DIRECTORY)
                os.fsync(folder)
                os.close(folder)
            yield file

    def _read(self, file: BinaryIO) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Intents and releases by key. A last line without its end was never fsynced, so never sent: it is cut off."""
        file.seek(0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            file.truncate(len(whole))
        intents: dict[str, dict[str, Any]] = {}
        releases: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                body = {key: value for key, value in row.items() if key != "sha256"}
                if row["sha256"] != _fingerprint(body):
                    raise ValueError("the line does not match its fingerprint")
                if row["kind"] == "intent":
                    intents[Charge(**row["charge"]).key] = row
                else:
                    releases[row["key"]] = row
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._unusable(f"line {number}: {error}") from None
        return intents, releases

    def _append(self, file: BinaryIO, row: dict[str, Any]) -> None:
        line = json.dumps(row | {"sha256": _fingerprint(row)}) + "\n"
        try:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise self._unusable(str(error)) from None

    def _unusable(self, why: str) -> RunError:
        return RunError(
            "E411",
            "the privacy ledger cannot be used, so nothing is sent",
            where=str(self.path),
            why=why,
            fix="restore the file from a backup; without it the site cannot know what it has already released",
        )


def _fingerprint(row: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _packed(tensors: Released) -> dict[str, Any]:
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return {"data": base64.b64encode(save(plain)).decode()}


def _unpacked(row: dict[str, Any]) -> Released:
    return load(base64.b64decode(row["data"]))
