"""The run folder: everything known about a run, in files that outlive it.

config.yaml origin.json command.txt env.json   what was asked, from where, and on what
status.json metrics.jsonl events.jsonl          how it goes
partition.json partition.safetensors            who holds what
results.json timing.json csv/ model/            what came out; no wall-clock value outside timing.json
surrogates.safetensors surrogates.json          a few uploads beside their nearest real images
checkpoints/                                    how to go on
finished/                                       results and model of the tasks before, while new ones of a plan are learned
objects.json                                    what is known of Python objects and plug-ins that it was made from

A folder of an older version is brought to today's format in place before a run goes on in it. Reading an older folder (reports,
tables, ``rescene.load``) needs no migration and changes nothing.
A run goes on with the same Python objects only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save

import rescene
from rescene.config import Recipe, Resolved
from rescene.config.compose import difference
from rescene.config.site_sections import grows
from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError, ResceneWarning, RunError, few, shortened
from rescene.core.files import replacing
from rescene.core.json_files import as_json, json_object
from rescene.core.own_code import RULES, functions_of, hashes_of, same_code, short_hash
from rescene.core.recipe_keys import flatten
from rescene.core.run_state import FINISHED, LOCK, Busy, is_done, working_in
from rescene.core.versions import FOLDER, refuse_newer, source_hash
from rescene.data.images import Dataset
from rescene.data.objects import OBJECT, is_own_dataset, maker_of, own_dataset
from rescene.data.sources.listing import Options
from rescene.engine.checkpoint import Checkpoints, could_not_save, reach, save_atomically, write_json
from rescene.engine.experiment import Experiment
from rescene.methods import method_class
from rescene.nets import is_own, own_model
from rescene.nets.own_networks import tensor_hash
from rescene.nets.timm_networks import TIMM

OBJECTS = "objects.json"
SHOWN = 3  # names of tensors in a message


def objects_of(recipe: Recipe) -> dict[str, Any]:
    """What is known of the network, data and method of a recipe that do not come with the package; empty for most runs."""
    found: dict[str, Any] = {}
    if is_own(recipe.model.name) and not recipe.model.name.startswith(TIMM):
        found["model"] = own_model(recipe.model.name).describe(recipe.data.image_size or 32)
    if recipe.data.name.startswith(OBJECT):
        found["data"] = _data(own_dataset(recipe.data.name, None, Options()))
    elif is_own_dataset(recipe.data.name):
        maker = [maker_of(recipe.data.name)]
        found["data"] = {"name": recipe.data.name, **hashes_of(maker, maker)}
    method = method_class(recipe.method["name"])
    if not method.__module__.startswith("rescene."):
        name = f"{method.__module__}.{method.__qualname__}"
        found["method"] = {"class": name, **hashes_of([method], functions_of(method))}
    return found


def _data(dataset: Dataset) -> dict[str, Any]:
    parts = {"training": dataset.train, "test": dataset.test}
    return {
        "name": dataset.name,
        "classes": short_hash(repr(dataset.classes).encode()),
        **{f"{name} pictures": [len(part), *part.pixels.shape[1:]] for name, part in parts.items()},
        **{f"{name} pixels": tensor_hash(part.pixels) for name, part in parts.items()},
        **{f"{name} labels": tensor_hash(part.labels) for name, part in parts.items()},
    }


def words_of(recipe: Recipe) -> list[str]:
    """One line for each part of a run that somebody handed over as a Python object."""
    parts = {"model": recipe.model.lens or recipe.model.name, "data": recipe.data.name}
    return [f"{key}: {name.removeprefix(OBJECT)}" for key, name in parts.items() if name.startswith(OBJECT)]


def refuse_others(folder: Path, recipe: Recipe) -> None:
    """E428, with what differs, unless the objects of this recipe are those that the run in this folder was made from."""
    before = json_object(folder / OBJECTS, []).get("objects")
    changed = [] if before is None else differences(before, as_json(objects_of(recipe)))
    if changed:
        raise RunError(
            "E428",
            "this run was made from other objects or other code",
            where=str(folder),
            why="\n".join(changed),
            fix="after a change use another folder (out=, --out), or remove this one; to go on, hand over the same as before",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, part by part.

    >>> differences({"data": {"name": "a", "test labels": "0"}}, {"data": {"name": "a", "test labels": "1"}})
    ['data: other test labels']
    """
    found = []
    for part in sorted(before.keys() | now.keys()):
        old, new = before.get(part), now.get(part)
        if old is None or new is None:
            found.append(f"{part}: " + ("none then, an object now" if old is None else "an object then, none now"))
            continue
        if not same_code(old, new):
            found.append(f"{part}: other code")
        for key in sorted((old.keys() | new.keys()) - set(RULES)):
            if key == "weights":
                found += [f"{part}: {words}" for words in _weights(old[key], new[key])]
            elif old.get(key) != new.get(key):
                shown = key in ("name", "class", "head") or key.endswith("pictures")
                found.append(f"{part}: {key} {old.get(key)} -> {new.get(key)}" if shown else f"{part}: other {key}")
    return found


def _weights(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    kinds = {
        "tensors that are gone": [key for key in old if key not in new],
        "new tensors": [key for key in new if key not in old],
        "other first values": [key for key in old if key in new and old[key] != new[key]],
    }
    return [f"{words}: {few(keys, SHOWN)}" for words, keys in kinds.items() if keys]


def folder_format(folder: Path) -> int:
    """The format of a run folder; E414 if it is newer than this version knows."""
    path = folder / "origin.json"
    found = _read(path)
    told = found.get("schema", 1) if isinstance(found, dict) else 1
    refuse_newer(told, FOLDER, path)
    return int(told)


def migrate(folder: Path) -> bool:
    """Bring a folder to format FOLDER, step by step; whether there was something to do. A kill in between does no harm:
    the number in origin.json is written last, and a step leaves alone what is already as it should be."""
    start = folder_format(folder)
    for number in range(start, FOLDER):
        STEPS[number](folder)
        origin = _read(folder / "origin.json") or {"recipe": None, "origins": {}}
        write_json(folder / "origin.json", origin | {"schema": number + 1})
    return start < FOLDER


def _to_2(folder: Path) -> None:
    partition, pairs = _read(folder / "partition.json"), _read(folder / "surrogates.json")
    if isinstance(partition, dict):
        write_json(folder / "partition.json", {"schema": 1} | partition)
    if isinstance(pairs, list):
        write_json(folder / "surrogates.json", {"schema": 1, "pairs": pairs})


STEPS: dict[int, Callable[[Path], None]] = {1: _to_2}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # missing or damaged: nothing to bring along
        return None


APPENDED = ("metrics.jsonl", "events.jsonl")
NOT_COMPARED = {"device"}  # may change between the parts of a run without changing the experiment
BEFORE = {".config.yaml.tmp", LOCK}  # what a run that was killed before its first file leaves
OTHERS = {".sites.json.tmp"}  # the operator's page writes sites.json while the run goes on
ASIDE = (
    "model",
    "results.json",
    "timing.json",
    "metrics.jsonl",
    "env.json",
    "partition.json",
    "origin.json",
    "command.txt",
)
MADE_ON = ("code", "torch", "threads", "cpu_capability", "device")  # with all of these equal, so are the bits


class RunFolder:
    """Paths and writers of one run. Appending files are cut back on resume to what the checkpoint knew.

    ``with folder:`` around everything that writes. One process at a time may: a folder that is there is locked at once, a
    new one when it is made, and the end of the block releases it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._lock: contextlib.ExitStack | None = None

    def __enter__(self) -> RunFolder:
        if self.begun:
            self._take_lock()
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        """Be the one process that writes here, and bring the files of an older version to today's format."""
        lock = contextlib.ExitStack()
        try:
            lock.enter_context(working_in(self.path))
        except Busy as who:
            raise RunError(
                "E422",
                "another process is at work in this run folder",
                where=str(self.path),
                why=str(who),
                fix="wait until it ends, or stop it (Ctrl-C; every finished round is saved), then the same command",
            ) from None
        except OSError as error:
            raise RunError(
                "E423",
                f"cannot write in the run folder: {error.strerror or error}",
                where=str(self.path),
                why="a run that goes on writes there; nothing was changed",
                fix="make the folder writable, make room, or copy the folder and resume the copy",
            ) from None
        self._lock = lock
        if (self.path / "origin.json").is_file():  # else killed before it was written; it is written again
            migrate(self.path)

    @property
    def begun(self) -> bool:
        return (self.path / "config.yaml").is_file()

    @property
    def finished(self) -> bool:
        """Whether the run in this folder is complete."""
        return is_done(self.path)

    def check(self, resolved: Resolved) -> None:
        """Refuse a folder that holds something else than this very experiment.

        A plan may have grown since (new tasks at the end, a task closed early) and nothing else: what ran stays true.
        """
        config = self.path / "config.yaml"
        try:
            begun = config.is_file()
        except OSError as error:
            raise _no_folder(self.path, error) from None
        if begun:
            folder_format(self.path)
            refuse_others(self.path, resolved.recipe)
            before = flatten(_completed(read_yaml(config)))
            rows = difference(before, resolved.flat())
            changed = [row for row in rows if row[0] not in NOT_COMPARED and not _is_growth(*row)]
            if changed:
                changed.sort(
                    key=lambda row: row[0] != "method.name"
                )  # another method changes many keys, so it stands first
                told = "\n".join(f"{key}: {old!r} -> {new!r}" for key, old, new in changed)
                raise RunError(
                    "E405",
                    "this folder holds a run with a different recipe",
                    where=str(self.path),
                    why=told,
                    fix="to go on with it, give the settings that it began with (on the left)"
                    + ("" if resolved.recipe.sites else "; else another --out"),
                )
        elif self.path.is_dir() and any(path.name not in BEFORE for path in self.path.iterdir()):
            raise RunError(
                "E406", "the folder is not empty and not a run", where=str(self.path), fix="use another --out"
            )

    def create(self, resolved: Resolved) -> None:
        """Make the folder unless it exists; called only once the data is loaded and the recipe is known to make sense."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_folder(self.path, error) from None
        if self._lock is None:
            self._take_lock()
            self.check(resolved)  # another process may have made it since
        config, origin, command = (self.path / name for name in ("config.yaml", "origin.json", "command.txt"))
        if not config.is_file() or resolved.recipe.sites is not None:  # a plan may have grown
            text = yaml.safe_dump(resolved.recipe.model_dump(mode="json"), sort_keys=False)
            save_atomically(config, text.encode())  # first of all: a folder with anything else in it is not a run
        if not origin.is_file():
            style = asdict(resolved.recipe.build_method().style())
            write_json(origin, {"schema": FOLDER, "recipe": resolved.name, "origins": resolved.origins, "style": style})
        objects = self.path / OBJECTS
        if not objects.is_file() and (found := objects_of(resolved.recipe)):
            write_json(objects, {"schema": 1, "objects": found})
        if not command.is_file():
            save_atomically(command, f"{_command()}\n".encode())

    def sweep(self) -> None:
        """Remove what killed writes have left; a folder that cannot be changed is no reason to stop here."""
        for path in sorted(self.path.rglob(".*.tmp")):
            if path.name not in OTHERS:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    reach("removed", path)

    def settle(self) -> None:
        """A run that was killed after its results were written is as good as any other: leave it as if it had not been."""
        with contextlib.suppress(RunError), self:  # it may be read-only, or another process just be done with it
            self.sweep()
            status = json_object(self.path / "status.json", [])
            if status.get("state") != "done":
                self.status(**status | {"state": "done"})

    def set_aside(self) -> None:
        """Move the results of a finished run into ``finished``, with its model: it learns new tasks, and people use them meanwhile."""
        if not self.finished:
            return
        aside = self.path / FINISHED
        try:
            with replacing(aside) as draft:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                for path in map(self.path.joinpath, ASIDE):
                    if path.is_dir():
                        shutil.copytree(path, draft / path.name)
                    elif path.is_file():
                        shutil.copyfile(path, draft / path.name)
                shutil.rmtree(aside, ignore_errors=True)
            (self.path / "results.json").unlink()  # last: until now they are the newest
        except OSError as error:
            raise could_not_save(aside, error) from error

    def describe(self, experiment: Experiment) -> None:
        """Who holds what, and on what machine."""
        write_json(self.path / "partition.json", {"schema": 1} | experiment.counts())
        index = {
            f"task{t}.client{k}": part.cpu().contiguous()
            for t, parts in enumerate(() if experiment.is_lazy else experiment.shards)
            for k, part in enumerate(parts)
        }
        save_atomically(self.path / "partition.safetensors", save(index))
        write_json(self.path / "env.json", environment(experiment))

    def directory(self, name: str) -> Path:
        """A folder inside this one, made if need be."""
        path = self.path / name
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise could_not_save(path, error) from error
        return path

    def environment(self) -> dict[str, Any]:
        """Where the run began; empty if that cannot be read."""
        return json_object(self.path / "env.json", [])

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add one line of JSON to a file of the folder."""
        try:
            reach("appending", self.path / name)
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            reach("appended", self.path / name)
        except OSError as error:
            raise could_not_save(self.path / name, error) from error

    def lengths(self) -> dict[str, int]:
        """Sizes of the appending files, part of every checkpoint."""
        return {name: (self.path / name).stat().st_size if (self.path / name).exists() else 0 for name in APPENDED}

    def sync(self) -> None:
        """Bring the appending files to the disk: a checkpoint that knows their lengths must not outlive them."""
        for path in (self.path / name for name in APPENDED):
            try:
                if path.exists():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
            except OSError as error:
                raise could_not_save(path, error) from error

    def cut(self, lengths: dict[str, int]) -> None:
        """Drop lines written after the checkpoint: their rounds will be run again."""
        for name, length in lengths.items():
            path = self.path / name
            size = path.stat().st_size if path.exists() else 0
            try:
                if size > length:
                    os.truncate(path, length)
            except OSError as error:
                raise could_not_save(path, error) from error
            if size < length:
                lost = f"{name} is shorter than it was: {length - size} bytes about finished rounds are lost"
                warnings.warn(ResceneWarning("W402", lost), stacklevel=2)
            reach("cut", path)

    def status(self, **fields: Any) -> None:
        """Write ``status.json``, for people who watch the run."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = {"schema": 1, "updated": now, "pid": os.getpid(), **fields}
        write_json(self.path / "status.json", row, sync="none")  # for people who look; a resumed run does not read it


def _no_folder(path: Path, error: OSError) -> RunError:
    fix = "a shorter --out" if error.errno == errno.ENAMETOOLONG else "another --out"
    what = f"cannot make the run folder: {error.strerror or error}"
    return RunError("E407", what, where=shortened(str(path)), fix=fix)


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """A key that a later version has added stood at its default before; a recipe that is none any more stays as it is."""
    try:
        return Recipe.model_validate(config).model_dump(mode="json")
    except (ValidationError, ConfigError):
        return config


def _is_growth(key: str, before: Any, after: Any) -> bool:
    return key == "sites.tasks" and None not in (before, after) and grows(before, after)


def made_on(device: torch.device) -> dict[str, Any]:
    """What the bits of a run depend on besides the recipe."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    capability = torch.backends.cpu.get_cpu_capability()
    values = (source_hash(), torch.__version__, torch.get_num_threads(), capability, name)
    return dict(zip(MADE_ON, values, strict=True))


def environment(experiment: Experiment) -> dict[str, Any]:
    """What a number depends on besides the recipe."""
    return {
        "schema": 1,
        "rescene": rescene.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **made_on(experiment.device),
        "data": experiment.dataset.name,
        "data_notes": list(experiment.dataset.notes),
        "data_fingerprint": experiment.dataset.fingerprint() if experiment.has_images else "images are at the sites",
        "normalisation": {
            "mean": _short(experiment.dataset.transform.mean),
            "std": _short(experiment.dataset.transform.std),
        },
    }


def _short(values: tuple[float, ...]) -> tuple[float, ...]:
    """One number in the place of thousands that are all the same, as a lens has them."""
    return values[:1] if len(values) > 3 and len(set(values)) == 1 else values


def _command() -> str:
    """How this run was started, as a person would type it."""
    program = Path(sys.argv[0]).name
    return shlex.join(["rescene" if program == "__main__.py" else program, *sys.argv[1:]])


def _commit() -> str | None:
    """The commit of the source tree, if the package runs from one."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
