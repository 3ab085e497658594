"""A disk that is full, read-only or failing at any call, and one that changes what lies on it: nothing corrupt is ever loaded.

    python benchmarks/trust_disk.py [--full] [--seed 0]

Short: every kind of call on every kind of file fails once with each error; 200 places of a checkpoint are damaged.
Full: every single call fails, with each error.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import smallworld as world
from trust import options, tell

from rescene.core.errors import ResceneWarning, RunError
from rescene.core.record import pack
from rescene.engine.checkpoint import Checkpoints

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO)
CALLS = ("fsync", "replace", "truncate", "unlink", "mkdir")  # of the module os; open and write are wrapped below


class Disk:
    """Everything that writes in one folder passes here, is counted, and fails where it is told to."""

    def __init__(self, folder: Path, fail_at: int = -1, number: int = 0) -> None:
        self.folder, self.fail_at, self.number, self.calls = str(folder), fail_at, number, list[str]()

    def pass_by(self, call: str, path: Any) -> None:
        name = str(path)
        if name.startswith(self.folder):
            self.calls.append(f"{call} {Path(name).name.lstrip('.').removesuffix('.tmp').split('-')[0]}")
            if len(self.calls) - 1 == self.fail_at:
                raise OSError(self.number, os.strerror(self.number))

    @contextmanager
    def watched(self) -> Any:
        """In this process, until the end of the block."""
        real = {name: getattr(os, name) for name in CALLS}
        names: dict[int, str] = {}  # of open files, for those who know their number only

        def guarded(name: str) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                self.pass_by(name, names.get(args[0], self.folder) if name == "fsync" else args[0])
                return real[name](*args, **more)

            return call

        def opened(path: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            writes = any(letter in mode for letter in "wax+") and not isinstance(path, int)
            if writes:
                self.pass_by("open", path)
            file = real_open(path, mode, *args, **more)
            names[file.fileno()] = str(path)
            return _Watched(file, lambda: self.pass_by("write", path)) if writes else file

        real_open = builtins.open
        for name in CALLS:
            setattr(os, name, guarded(name))
        builtins.open = io.open = opened  # type: ignore[assignment]
        try:
            yield self
        finally:
            builtins.open = io.open = real_open
            for name, function in real.items():
                setattr(os, name, function)


class _Watched:
    """A file whose every write is seen before it happens."""

    def __init__(self, file: Any, see: Callable[[], None]) -> None:
        self._file, self._see = file, see

    def write(self, data: Any) -> Any:
        self._see()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.close()


def fail(root: Path, data: Path, whole: dict[str, str], at: int, number: int) -> str | None:
    """One run whose disk fails once, then a resumed one; what went wrong, or None."""
    folder, disk = root / "failing", Disk(root / "failing", at, number)
    shutil.rmtree(folder, ignore_errors=True)
    where = f"call {at}, {errno.errorcode[number]}"
    try:
        with disk.watched():
            world.run(data, "rescene", folder)
        said = None
    except RunError as error:
        said = error.code
    except Exception as error:
        return f"{disk.calls[-1]} ({where}): {type(error).__name__} instead of a message"
    if len(disk.calls) <= at:
        return f"{where}: was not reached"
    world.run(data, "rescene", folder)
    if world.fingerprint(folder) != whole:
        return f"{disk.calls[at]} ({where}, {said}): another end"
    return None


def choice(calls: list[str], full: bool, chance: random.Random) -> list[tuple[int, int]]:
    """Which calls fail with which error."""
    if full:
        return [(at, number) for at in range(len(calls)) for number in ERRORS]
    kinds = {kind: [at for at, call in enumerate(calls) if call == kind] for kind in sorted(set(calls))}
    return [(chance.choice(places), number) for places in kinds.values() for number in ERRORS]


def damage(folder: Path, chance: random.Random, times: int) -> tuple[int, int, list[str]]:
    """A bit flipped or a file cut at random places of the two kept checkpoints: how often that hit the newest, how often
    it was told, and what was missed. What only the older one needs is not read, so not told."""
    good = {saved.step: _bits(saved.tree) for saved in _all(folder)}
    files, own = sorted(path for path in folder.iterdir() if path.stat().st_size), _files(folder, max(good))
    hit, noticed, missed = 0, 0, list[str]()
    for number in range(times):
        path = chance.choice(files)
        data = path.read_bytes()
        bit, cut = chance.randrange(8 * len(data)), number % 2
        changed = bytearray(data[: bit // 8] if cut else data)
        if not cut:
            changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = Checkpoints(folder).load()
        path.write_bytes(data)
        said = any(isinstance(one.message, ResceneWarning) for one in told)
        newest = found is not None and found.step == max(good)
        if found is not None and _bits(found.tree) != good[found.step]:
            missed.append(f"{path.name}: loaded damaged")
        elif newest and path.name in own:
            missed.append(f"{path.name}, {'cut' if cut else 'flipped'} at bit {bit}: not noticed")
        elif not newest and not said:
            missed.append(f"{path.name}: nothing was said")
        hit, noticed = hit + (path.name in own), noticed + said
    return hit, noticed, missed


def _files(folder: Path, step: int) -> set[str]:
    """The files that the checkpoint of this step consists of."""
    path = folder / f"step-{step:06d}.json"
    return {path.name} | {f"chunk-{digest[:32]}.safetensors" for digest in json.loads(path.read_bytes())["chunks"]}


def _all(folder: Path) -> list[Any]:
    return [Checkpoints(folder)._read(path) for path in folder.glob("step-*.json")]


def _bits(tree: Any) -> str:
    skeleton, chunks = pack(tree)
    values = [(name, value.shape, value.numpy().tobytes()) for chunk in chunks for name, value in sorted(chunk.items())]
    return repr(skeleton) + repr(values)


def healed(root: Path, data: Path, whole: dict[str, str], chance: random.Random, times: int) -> list[str]:
    """Every file of both kept checkpoints damaged at once, in the middle of a run: it begins again, and is then safe again."""
    wrong = []
    for number in range(times):
        for at in count(chance.randrange(150, 250)):  # a run goes on if it cannot make a folder that is there already
            folder = root / f"healed{number}-{at}"
            try:
                with Disk(folder, at, errno.ENOSPC).watched():
                    world.run(data, "rescene", folder)
            except RunError:
                break
        for path in (folder / "checkpoints").iterdir():
            changed = bytearray(path.read_bytes())
            changed[len(changed) // 2] ^= 1
            path.write_bytes(changed)
        with warnings.catch_warnings(record=True):
            world.run(data, "rescene", folder)
            if world.fingerprint(folder) != whole:
                wrong.append("another end")
        with suppress(Exception):  # what it wrote over the damage must be whole
            if len(_all(folder / "checkpoints")) == 2:
                continue
        wrong.append("its own checkpoints are damaged")
    return wrong


def main() -> None:
    asked = options(__doc__ or "")
    chance = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        root = Path(spare)
        data, disk = world.images(root / "images.npz"), Disk(root / "whole")
        with disk.watched():
            world.run(data, "rescene", root / "whole")
        whole = world.fingerprint(root / "whole")
        chosen = choice(disk.calls, asked.full, chance)
        wrong = [found for at, number in chosen if (found := fail(root, data, whole, at, number))]
        kinds = len({disk.calls[at] for at, _ in chosen})
        figure = f"{len(chosen)} failures at {kinds} kinds of {len(disk.calls)} calls, {len(wrong)} wrong"
        tell("disk full, read-only, failing: told, same bits after", figure, not wrong, wrong=wrong, seed=asked.seed)
        times = 2000 if asked.full else 200
        hit, noticed, missed = damage(root / "whole" / "checkpoints", chance, times)
        figure = f"{times} places, {hit} of them in the newest, {noticed} told, {len(missed)} missed"
        tell("a bit flipped or a file cut: never loaded, and told", figure, not missed, missed=missed)
        times = 20 if asked.full else 3
        wrong = healed(root, data, whole, chance, times)
        tell(
            "all checkpoints damaged: begins again, same bits",
            f"{times} runs, {len(wrong)} wrong",
            not wrong,
            wrong=wrong,
        )


if __name__ == "__main__":
    main()
