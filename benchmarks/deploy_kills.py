"""Link, sites and server app killed (-9) or asked to end (SIGTERM) at random moments of runs across sites; the model keeps its bits.

    python benchmarks/deploy_kills.py [--times 10] [--seed 0] [--minutes 60]     appends to results/trust/deploy-kills.jsonl

Two sites on loopback with TLS. Each part is killed ``times`` times and asked to end a third as often, in one order drawn from
the seed. A line is one whole run with what happened to it; what the file already holds is not done again. Needs Flower
(pip install "rescene[deploy]"), and about a minute for each kill: Flower notices a death by missing heartbeats.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smallworld import METHODS, images, overrides

from rescene.api import execute
from rescene.config import Resolved, resolve
from rescene.core.errors import RunError
from rescene.deploy.exchange import Patience
from rescene.deploy.federation_folder import FederationFolder, init
from rescene.deploy.operator import run
from rescene.deploy.processes import (
    Started,
    _descendants,
    _facts,
    alive,
    free_port,
    running,
    start_kept,
    start_server,
    start_site,
    stop,
)

OUT = Path(__file__).parents[1] / "results" / "trust" / "deploy-kills.jsonl"
PARTS = ("link", "site", "server app")
WITHIN_S = 10.0  # after a finished step; about as long as a step takes
GIVE_UP_S = 600.0
FEDERATION = {
    "num_clients": 2,
    "per_round": 2,
    "num_rounds": 4,
    "partition": "iid",
    "quorum": 1,
    "engine": "one-by-one",
}


@dataclass(frozen=True)
class Kill:
    """What happened to one part of a running federation."""

    part: str
    signal: str
    step: int  # finished before it
    exit_s: float  # until it was gone
    back_s: float  # until a step that was begun after it is finished


def planned(times: int, seed: int, parts: Sequence[str] = PARTS) -> list[tuple[str, signal.Signals]]:
    """Which part gets which signal, in order.

    >>> len(planned(10, seed=0)), planned(1, seed=0) == planned(1, seed=0)
    (39, True)
    """
    kills = [(part, number) for part in parts for number in [signal.SIGKILL] * times + [signal.SIGTERM] * (times // 3)]
    random.Random(seed).shuffle(kills)
    return kills


class Disturbed:
    """One run across sites, and what is done to it while it goes on."""

    def __init__(self, federation: FederationFolder, resolved: Resolved, out: Path, chance: random.Random) -> None:
        self.federation, self.out, self.chance, self.kills = federation, out, chance, list[Kill]()
        self.commands = 0  # more than one if `rescene deploy run` gave up and the operator gave it again

        def go() -> None:
            while not (out / "results.json").exists():
                self.commands += 1
                try:
                    run(federation, resolved, out, Patience(300, 240), say, look_s=10)
                except RunError as error:
                    say(str(error))

        self.thread = threading.Thread(target=go, daemon=True)
        self.thread.start()
        self.progress(beyond=0)

    @property
    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.out / "status.json").read_text()))
        except (OSError, ValueError):
            return {"done": 0, "steps": -1}

    @property
    def done(self) -> int:
        return int(self.status["done"])

    def progress(self, beyond: int) -> None:
        """Until one more step is finished, or all are."""
        until = time.monotonic() + GIVE_UP_S
        while self.thread.is_alive() and self.done <= beyond:
            if time.monotonic() > until:
                raise TimeoutError(f"no step was finished after step {beyond}")
            time.sleep(0.2)

    def kill(self, part: str, number: signal.Signals) -> bool:
        """At a random moment; False if there was nothing to kill."""
        time.sleep(self.chance.random() * WITHIN_S)
        place = self.federation.server
        if part == "site":
            place = self.federation.site(self.chance.choice(self.federation.sites))
        up = {one.name: one for one in running(place)}
        victims = [up["node" if part == "site" else "link"]] if part != "server app" else below(up["executor"])
        if not victims or self.done == self.status["steps"]:
            return False  # the run has just ended, or its app has not begun
        before, begin = self.done, time.monotonic()
        for one in victims:
            os.kill(one.pid, number)
        while any(map(alive, victims)) and time.monotonic() - begin < 60:
            time.sleep(0.05)
        gone = time.monotonic() - begin
        say(f"{number.name} to the {part}, gone after {gone:.1f} s")
        if part == "site":
            start_kept(place, lambda: start_site(place), say)
        elif part == "link":
            start_server(self.federation)
        self.progress(before + 1)  # the step under way may have been finished by what was not killed
        self.kills.append(Kill(part, number.name, before, round(gone, 2), round(time.monotonic() - begin, 1)))
        return True


def below(executor: Started) -> list[Started]:
    """The server app: all that the executor has started."""
    return [Started("app", pid, _facts(pid).get("began", ""), "") for pid in _descendants(executor.pid)]


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "final.safetensors").read_bytes()).hexdigest()


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="kills of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no kill after this time")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    until, todo = time.monotonic() + 60 * asked.minutes, planned(asked.times, asked.seed, asked.parts)
    for earlier in lines(asked.out):
        for kill in earlier["kills"]:
            with contextlib.suppress(ValueError):  # of a longer plan
                todo.remove((kill["part"], signal.Signals[kill["signal"]]))
    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        root = Path(spare)
        data = images(root / "images.npz")
        federation = init(root / "fed", ["north", "south"], port=free_port())
        places = [federation.server, *map(federation.site, federation.sites)]
        for site in places[1:]:
            path = site / "site.yaml"
            path.write_text(path.read_text().replace("{name: auto}", f"{{path: {data}}}"))
        try:
            start_server(federation)
            for site in places[1:]:
                start_site(site)
            while todo and time.monotonic() < until:
                number = len(lines(asked.out))
                method, seed = METHODS[number % len(METHODS)], asked.seed + number
                values = overrides(data, method) | {f"federation.{key}": value for key, value in FEDERATION.items()}
                values |= {"device": "cpu", "seed": seed}
                resolved = resolve("smoke", [f"{key}={json.dumps(value)}" for key, value in values.items()])
                execute(resolved, root / f"in-one-process-{number}")
                disturbed = Disturbed(federation, resolved, root / f"across-{number}", random.Random(seed))
                while todo and disturbed.thread.is_alive() and time.monotonic() < until:
                    if disturbed.kill(*todo[0]):
                        todo.pop(0)
                disturbed.thread.join()
                hashes = [sha256(root / f"{name}-{number}") for name in ("across", "in-one-process")]
                row = {"run": number, "method": method, "seed": seed, "same_bits": hashes[0] == hashes[1]}
                row |= {"code": json.loads((disturbed.out / "env.json").read_text())["code"]}
                row |= {"commands": disturbed.commands, "sha256": hashes, "kills": list(map(asdict, disturbed.kills))}
                with open(asked.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
        finally:
            for place in places:
                stop(place)
    for line in table(lines(asked.out)):
        print(line)
    return sum(not row["same_bits"] for row in lines(asked.out))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each part and signal, and one for the bits."""
    kills = [kill for row in rows for kill in row["kills"]]
    found = []
    for part, number in sorted({(kill["part"], kill["signal"]) for kill in kills}):
        own = [kill for kill in kills if (kill["part"], kill["signal"]) == (part, number)]
        gone, back = (max(kill[key] for kill in own) for key in ("exit_s", "back_s"))
        found.append(
            f"{part}, {number}: {len(own)} times, gone within {gone:.1f} s, a step finished within {back:.0f} s"
        )
    return [*found, f"{len(rows)} runs, {sum(row['same_bits'] for row in rows)} with the bits of an undisturbed one"]


if __name__ == "__main__":
    sys.exit(main())
