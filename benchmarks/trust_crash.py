"""kill -9 at every named place and at random moments, SIGTERM at random moments: the resumed run ends with the same bits.

    python benchmarks/trust_crash.py [--full] [--seed 0]

Short: every place once, 10 random kills, 3 SIGTERMs. Full: every place at its first, middle and last visit, 100 kills, 20 SIGTERMs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import smallworld as world
from trust import options, tell

from rescene.engine import checkpoint


@dataclass
class Found:
    """What became of the kills."""

    kills: int = 0
    differ: list[str] = field(default_factory=list)  # where the end was another
    most_lost: int = 0  # finished rounds that had to be run again

    @property
    def figure(self) -> str:
        return f"{self.kills} kills, {len(self.differ)} differ, at most {self.most_lost} round repeated"

    @property
    def held(self) -> bool:
        return self.kills > 0 and not self.differ and self.most_lost <= 1


class Crashes:
    """One method in the small world: an undisturbed run, and others that are killed and brought back."""

    def __init__(self, method: str, root: Path) -> None:
        self.method, self.root, self.found = method, root, Found()
        root.mkdir(parents=True)
        self.data, self.log, self.numbers = world.images(root / "images.npz"), root / "error.log", 0
        world.run(self.data, method, root / "warm")  # what is loaded once is loaded in every child
        begin = time.monotonic()
        places = root / "places.txt"
        assert world.end(self._start(root / "whole", places=places)) == 0, self.log.read_text()
        self.seconds = time.monotonic() - begin
        self.places = Counter(places.read_text().splitlines())
        self.whole = world.fingerprint(root / "whole")

    def at(self, place: str, number: int = 1) -> None:
        """Killed at the ``number``-th visit of a place, then brought back."""
        folder = self._new_folder()
        code = world.end(self._start(folder, kill_at=f"{place}#{number}"))
        if code != -signal.SIGKILL:
            self.found.differ.append(f"{self.method}: {place}#{number} was not reached (exit code {code})")
            return
        self._killed(folder)
        self._compare(folder, f"{place}#{number}")

    def at_random(self, chance: random.Random, kills: int) -> None:
        """Killed at random moments, also while coming back, until it gets to the end; then the next one."""
        while self.found.kills < kills:
            folder = self._new_folder()
            begin = time.monotonic()
            while self.found.kills < kills and world.killed_after(self._start(folder), chance.random() * self.seconds):
                self._killed(folder)
                begin = time.monotonic()
            self.seconds = min(self.seconds, time.monotonic() - begin + 0.2)  # moments after the end are none
            self._compare(folder, f"random kill {self.found.kills}")

    def _new_folder(self) -> Path:
        self.numbers += 1
        return self.root / f"killed{self.numbers}"

    def _killed(self, folder: Path) -> None:
        self.found.kills += 1
        self.found.most_lost = max(self.found.most_lost, world.rounds_lost(folder))
        for name in ("metrics.jsonl", "events.jsonl"):  # a kill may leave half a line
            if (folder / name).exists() and not (folder / "results.json").exists():
                with open(folder / name, "ab") as file:
                    file.write(b'{"kind": "round", "ta')

    def _compare(self, folder: Path, what: str) -> None:
        code = world.end(self._start(folder))
        if code or world.fingerprint(folder) != self.whole:
            why = self.log.read_text() if code else _difference(world.fingerprint(folder), self.whole)
            self.found.differ.append(f"{self.method}: {what}: {why}")
        elif left := [path.name for path in folder.rglob(".*")]:
            self.found.differ.append(f"{self.method}: {what}: left behind {left}")
        elif (state := json.loads((folder / "status.json").read_bytes())["state"]) != "done":
            self.found.differ.append(f"{self.method}: {what}: its status says {state}")

    def _start(self, folder: Path, kill_at: str | None = None, places: Path | None = None) -> int:
        def work() -> None:
            if kill_at:
                checkpoint.watcher = checkpoint.killer(kill_at)
            if places:
                names: list[str] = []
                checkpoint.watcher = names.append
            world.run(self.data, self.method, folder)
            if places:
                places.write_text("\n".join(names))

        return world.start(work, self.log)


def _difference(a: dict[str, str], b: dict[str, str]) -> str:
    return ", ".join(sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)))


def visits(count: int, full: bool) -> set[int]:
    """Which visits of a place that is reached ``count`` times end in a kill.

    >>> visits(9, False), visits(9, True)
    ({5}, {1, 5, 9})
    """
    middle = (count + 1) // 2
    return {1, middle, count} if full else {middle}


def terminated(method: str, root: Path, chance: random.Random, times: int) -> tuple[Found, float]:
    """SIGTERM to `rescene run` at random moments after its start; also the longest it took to end."""
    crashes, slowest = Crashes(method, root), 0.0
    folder, env = root / "terminated", {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [f"{key}={value}" for key, value in world.overrides(crashes.data, method).items()]
    words.append("federation.num_rounds=40")
    command = [sys.executable, "-m", "rescene", "run", "smoke", *words, "--out", str(folder), "-q"]
    for _ in range(times):
        before = newest_step(folder)
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and newest_step(folder) == before:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)
        begin = time.monotonic()
        process.terminate()
        code = process.wait()
        slowest = max(slowest, time.monotonic() - begin)
        crashes.found.kills += 1
        crashes.found.most_lost = max(crashes.found.most_lost, world.rounds_lost(folder))
        if code != 143:
            crashes.found.differ.append(f"{method}: exit code {code} after SIGTERM")
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    world.run(crashes.data, method, root / "long", **{"federation.num_rounds": 40})
    if found := _difference(world.fingerprint(folder), world.fingerprint(root / "long")):
        crashes.found.differ.append(f"{method}: after SIGTERM: {found}")
    return crashes.found, slowest


def newest_step(folder: Path) -> str:
    return max((path.name for path in folder.glob("checkpoints/step-*.json")), default="")


def main() -> None:
    asked = options(__doc__ or "")
    chance = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        for method in world.METHODS:
            crashes = Crashes(method, Path(spare) / f"named-{method}")
            for place, count in sorted(crashes.places.items()):
                for number in sorted(visits(count, asked.full)):
                    crashes.at(place, number)
            found = crashes.found
            tell(
                f"{method}: kill -9 at each of {len(crashes.places)} named places, same bits",
                found.figure, found.held, differ=found.differ, places=sorted(crashes.places), seed=asked.seed,
            )  # fmt: skip
            crashes = Crashes(method, Path(spare) / f"random-{method}")
            crashes.at_random(chance, 100 if asked.full else 10)
            found = crashes.found
            tell(f"{method}: kill -9 at random moments, same bits", found.figure, found.held, differ=found.differ)
        found, slowest = terminated("rescene", Path(spare) / "terminated", chance, 20 if asked.full else 3)
        figure = f"{found.figure}; slowest exit {slowest:.1f} s"
        tell(
            "SIGTERM: ends within 30 s with code 143, same bits",
            figure,
            found.held and slowest < 30,
            differ=found.differ,
        )


if __name__ == "__main__":
    main()
