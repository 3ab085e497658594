"""The Python face of the program: ``rescene.run`` and ``rescene.load``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rescene.config import Resolved, resolve
from rescene.engine import RunFolder, use_all_cores
from rescene.engine import run as run_engine
from rescene.errors import RunError, command
from rescene.run_state import read_object
from rescene.trackers import Tracker, open_trackers, tracked
from rescene.versions import RESULTS, refuse_newer

if TYPE_CHECKING:
    from rescene.use import Prediction


@dataclass(frozen=True)
class Result:
    """A finished run. ``values`` is the whole of results.json."""

    folder: Path
    values: dict[str, Any]

    @property
    def aa(self) -> float:
        """Average accuracy after the last task, in percent."""
        return float(self.values["aa"])

    @property
    def aia(self) -> float:
        """Average incremental accuracy, in percent."""
        return float(self.values["aia"])

    def predict(self, *images: str | Path, top: int = 3) -> list[Prediction]:
        """What the trained model sees in image files, or in all images of folders; unreadable ones are left out."""
        from rescene.use import find_images, open_model, predict

        return predict(open_model(self.folder), find_images([Path(image) for image in images]), top)[0]

    @property
    def matrix(self) -> list[list[float]]:
        """matrix[i][j]: accuracy on task j after task i; NaN for j > i."""
        return [[math.nan if v is None else float(v) for v in row] for row in self.values["accuracy_matrix"]]


def run(
    recipe: str | Path,
    *,
    out: str | Path | None = None,
    log: str | Sequence[str | Tracker] = (),
    elsewhere: bool = False,
    **overrides: Any,
) -> Result:
    """Run (or continue) a recipe: ``rescene.run("demo", out="runs/mine", **{"data.path": "images/", "seed": 1})``.

    A folder that holds an unfinished run of the same recipe is continued; a finished one is returned as it is. With
    ``elsewhere`` it may go on with other code or on another machine than it began with; its results then say so.
    ``log``: trackers by name or as objects (see ``rescene.trackers``).
    """
    return execute(resolve(recipe, overrides), Path(out) if out else None, log=log, elsewhere=elsewhere)


def execute(
    resolved: Resolved,
    out: Path | None = None,
    progress: Callable[[dict[str, Any]], None] = lambda event: None,
    log: str | Sequence[str | Tracker] = (),
    elsewhere: bool = False,
) -> Result:
    use_all_cores()
    trackers = open_trackers(log)
    folder = RunFolder(out or default_folder(resolved))
    folder.check(resolved)
    if folder.finished:
        folder.settle()
    else:
        with tracked(progress, trackers, folder.path, resolved.flat()) as tell:
            run_engine(resolved, folder, tell, elsewhere=elsewhere)
    return load(folder.path)


def load(folder: str | Path) -> Result:
    """The result of a finished run folder, also one of an older version; a newer one is refused (E414)."""
    path = Path(folder)
    try:
        values = read_object(path / "results.json")
    except OSError:
        fix = f"{command('resume', path)}, if it was interrupted"
        raise RunError("E408", "no finished run here", where=str(path), fix=fix) from None
    except ValueError as error:
        why, fix = f"results.json is damaged: {error}", f"remove it, then {command('resume', path)}"
        raise RunError("E408", "no finished run here", where=str(path), why=why, fix=fix) from None
    refuse_newer(values.get("schema"), RESULTS, path / "results.json")
    return Result(path, values)


def default_folder(resolved: Resolved) -> Path:
    """runs/<recipe>/<method>-s<seed>-<hash>: the same experiment has the same folder, a different one never shares it."""
    root = Path(os.environ.get("RESCENE_RUNS", "runs"))
    recipe, name = resolved.recipe, f"{resolved.recipe.method['name']}-s{resolved.recipe.seed}-{resolved.digest()}"
    return root / resolved.name / "-without-".join([name, *map(str, recipe.federation.exclude or ())])
