"""The Python face of the program: ``rescene.run`` and ``rescene.load``."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rescene.config import Recipe, Resolved, resolve
from rescene.config.compose import SHORTHANDS
from rescene.core.errors import (
    ConfigError,
    DataError,
    ResceneWarning,
    RunError,
    closest,
    command,
    kind_of,
    with_article,
)
from rescene.core.results import Results, read_metrics, results_of_row
from rescene.core.run_state import read_object, runs_root
from rescene.core.versions import RESULTS, refuse_newer
from rescene.data import Dataset
from rescene.data.objects import dataset_of
from rescene.data.objects import enter_object as enter_dataset
from rescene.data.sources.listing import Options
from rescene.engine import RunFolder, use_all_cores
from rescene.engine import run as run_engine
from rescene.engine.experiment import load_data
from rescene.engine.observers import Observer, open_callbacks
from rescene.lens.lens import enter_lens
from rescene.methods import Method
from rescene.methods.registry import register
from rescene.nets import OwnModel
from rescene.nets.own_networks import enter_object as enter_model
from rescene.notebook import NotebookLine, in_notebook, show_finished, show_lines
from rescene.trackers import Tracker, open_trackers

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from rescene.use import Prediction

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Result:
    """A finished run. ``values`` is the whole of results.json, ``record`` what it holds, typed; frames need pandas."""

    folder: Path
    values: dict[str, Any] = field(repr=False)

    @cached_property
    def record(self) -> Results:
        """results.json as a record: what an older version did not write has its default."""
        return results_of_row(self.values, [])

    @property
    def aa(self) -> float:
        """Average accuracy after the last task, in percent; NaN where nobody measured it."""
        return _number(self.record.aa)

    @property
    def aia(self) -> float:
        """Average incremental accuracy, in percent; NaN where nobody measured it."""
        return _number(self.record.aia)

    def predict(self, *images: str | Path, top: int = 3) -> list[Prediction]:
        """What the trained model sees in image files, or in all images of folders; unreadable ones are left out."""
        from rescene.use import find_images, open_model, predict

        return predict(open_model(self.folder), find_images([Path(image) for image in images]), top)[0]

    def __str__(self) -> str:
        accuracy = "accuracy not measured" if math.isnan(self.aa) else f"average accuracy {self.aa:.1f} %"
        return f"{self.record.method}: {accuracy} after {len(self.matrix)} tasks ({self.folder})"

    @property
    def matrix(self) -> list[list[float]]:
        """matrix[i][j]: accuracy on task j after task i; NaN for j > i."""
        return [[_number(value) for value in row] for row in self.record.accuracy_matrix]

    @property
    def objects(self) -> list[str]:
        """The parts of the run that were handed over as Python objects; empty for a run that a command can repeat."""
        return list(self.record.made_from_objects)

    @property
    def upload_bytes(self) -> float | None:
        """Mean bytes that a site sends for each round in which it is asked: all that it sent, at the ends of tasks too."""
        return self.record.cost.measured.uplink_bytes_per_turn(read_metrics(self.folder, [])[0])

    def rounds(self) -> pandas.DataFrame:
        """One row for each round: task, round, accuracy on all classes seen (percent), bytes up and down."""
        return self._table("rounds")

    def tasks(self) -> pandas.DataFrame:
        """One row for each task: its classes, sizes, and accuracy right after it and at the end (percent)."""
        rows = [
            {
                "task": task.index,
                "classes": ", ".join(task.classes),
                "domain": task.domain or None,
                "train_size": task.train_size,
                "test_size": task.test_size,
                "accuracy_after": self.matrix[i][i],
                "accuracy_at_end": self.matrix[-1][i],
            }
            for i, task in enumerate(self.record.tasks)
        ]
        return _pandas().DataFrame(rows)

    def accuracies(self) -> pandas.DataFrame:
        """The accuracy matrix in long form: after_task, task, accuracy (percent)."""
        rows = [
            {"after_task": i, "task": j, "accuracy": value}
            for i, row in enumerate(self.matrix)
            for j, value in enumerate(row[: i + 1])
        ]
        return _pandas().DataFrame(rows)

    def costs(self) -> pandas.DataFrame:
        """One row for each quantity: what was measured, and what the method says it must be."""
        return self._table("cost")

    def confusion(self) -> pandas.DataFrame:
        """One row for each true class, one column for each predicted class: counts after the last task."""
        return self._table("confusion").set_index("true_class")

    def participation(self) -> pandas.DataFrame:
        """One row for each site that took part in a round."""
        return self._table("participation")

    def _table(self, name: str) -> pandas.DataFrame:
        return _pandas().read_csv(self.folder / "csv" / f"{name}.csv")

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        facts = {
            "method": self.record.method,
            "average accuracy": _percent(self.aa),
            "forgetting": _percent(self.record.forgetting),
            **{f"task {i + 1}": _percent(value) for i, value in enumerate(self.matrix[-1])},
            "up per site and round": f"{(self.upload_bytes or 0) / 1e6:.2f} MB",
            **({"made from Python objects": ", ".join(self.objects)} if self.objects else {}),
            "privacy": self.record.privacy.statement,
            "folder": self.folder,
        }
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(key)}</th>'
            f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
            for key, value in facts.items()
        )
        return f"<table>{rows}</table>"


def run(
    recipe: str | Path | None = None,
    *,
    model: nn.Module | Callable[..., nn.Module] | OwnModel | str | None = None,
    data: Any = None,
    transform: Callable[[Any], Any] | None = None,
    method: Method | type[Method] | str | None = None,
    out: str | Path | None = None,
    log: str | Sequence[str | Tracker] = (),
    callbacks: Sequence[str | Observer] = (),
    progress: bool | Progress | Literal["auto"] = "auto",
    elsewhere: bool = False,
    **overrides: Any,
) -> Result:
    """Run (or continue) a recipe: ``rescene.run("demo", out="runs/mine", **{"data.path": "images/", "seed": 1})``.

    ``model``: an ``nn.Module`` (its weights are the ones to start from), a function that makes one, a :class:`rescene.Model`
    that says more about it, or a name. ``data``: a torch ``Dataset`` or a pair (train, test) of them, arrays ``(x, y)`` or
    ``(x_train, y_train, x_test, y_test)``, a Hugging Face data set, a pandas frame with columns path and label (and split,
    domain, site), or a name. ``transform``: a function that changes each picture once, before the run: uint8 tensor
    [3, H, W] in, a picture out. ``method``: a method, its class, or its name.

    A folder that holds an unfinished run of the same recipe and objects is continued; a finished one is returned as it is. With
    ``elsewhere`` it may go on with other code or on another machine than it began with; its results then say so.
    ``log``: trackers by name or as objects (see ``rescene.trackers``). ``callbacks``: observers of yours that watch the run,
    as objects or by the name of an entry point (see ``rescene.Observer``). ``progress``: "auto" shows one line that changes in a
    notebook and nothing elsewhere; True prints a line for each round; a function gets every event.
    """
    _check_arguments(overrides)
    if out is not None and not isinstance(out, (str, Path)):
        why = f"{kind_of(out)} is no path"
        raise ConfigError("E562", "out is no folder", where="rescene.run", why=why, fix='out="runs/mine"')
    if recipe is None:
        fix = 'rescene.run("demo"); rescene list recipes names the others'
        raise ConfigError("E562", "rescene.run needs a recipe", where="rescene.run", fix=fix)
    given = {**_model(model), **_method(method), **overrides}
    given |= _data(recipe, data, transform, given)
    resolved = resolve(recipe, given)
    with NotebookLine(_shown(progress)) as show:
        return execute(resolved, Path(out) if out else None, show, log=log, elsewhere=elsewhere, callbacks=callbacks)


def _check_arguments(overrides: Mapping[str, Any]) -> None:
    """E562 for a keyword that is nearly an argument of ``run``; other words without a dot are left to the recipe."""
    arguments = [name for name in signature(run).parameters if name != "overrides"]
    for word in overrides:
        near = closest(word, arguments)
        if near and "." not in word and word not in Recipe.model_fields and word not in SHORTHANDS:
            why = "keys of a recipe have a dot, as in **{'data.path': 'images/'}, or are seed and device"
            fix = f"did you mean {near}=?"
            raise ConfigError("E562", f"rescene.run has no argument {word!r}", where="rescene.run", why=why, fix=fix)


def continue_run(
    run: Result | str | Path,
    tasks: Sequence[Sequence[str]] | None = None,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    log: str | Sequence[str | Tracker] = (),
    callbacks: Sequence[str | Observer] = (),
    progress: bool | Progress | Literal["auto"] = "auto",
    elsewhere: bool = False,
) -> Result:
    """Add tasks to a finished run: ``rescene.continue_run("runs/mine", [["boots", "sandals"]], "images-of-may/")``.

    ``tasks``: names of the classes of each new task; without it all new classes of ``data`` are one task. ``data``: where the
    new images lie, if not among those of the run. The run stays as it is; ``out`` (RUN-continued) goes on from a copy of it.
    The other arguments are those of :func:`run`.
    """
    from rescene.engine.continuation import continued

    folder = run.folder if isinstance(run, Result) else Path(run)
    with NotebookLine(_shown(progress)) as show:
        resolved, target = continued(folder, tasks, None if data is None else str(data), Path(out) if out else None)
        return execute(resolved, target, show, log=log, elsewhere=elsewhere, callbacks=callbacks)


def _model(model: Any) -> dict[str, Any]:
    """What a recipe says of a network that was handed over."""
    if model is None or isinstance(model, str):
        return {} if model is None else {"model.name": model}
    name, found = enter_model(model)
    if found.frozen:
        return {"model.name": "linear", "model.lens": enter_lens(name, found), "train.augment": False}
    return {"model.name": name}


def _method(method: Any) -> dict[str, Any]:
    """The method's name, and its hyperparameters where it was handed over with them."""
    if method is None or isinstance(method, str):
        return {} if method is None else {"method": method}
    kind = method if isinstance(method, type) else type(method)
    if not issubclass(kind, Method):
        why = f"it is {with_article(kind.__name__)}"
        raise ConfigError("E103", "this is no method", where="method", why=why, fix="a rescene.Method, or a name")
    register(kind)
    given: dict[str, Any] = {"method": kind.name}
    if isinstance(method, Method):
        given |= {f"method.{key}": value for key, value in method.model_dump(exclude={"train"}).items()}
        if "train" in method.model_fields_set:
            given |= {f"train.{key}": value for key, value in method.train.model_dump().items()}
    return given


def _data(recipe: str | Path, data: Any, transform: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe says of data that were handed over, or changed by a transform."""
    if transform is not None and not callable(transform):
        why = f"{kind_of(transform)} cannot be called"
        raise DataError("E243", "this is no transform", where="transform", why=why, fix="a function of a picture")
    named = {"data.name": data} if isinstance(data, str) else {}
    if transform is None and (data is None or named):
        return named
    section = resolve(recipe, {**given, **named}).recipe.images
    options = Options(
        section.image_size, section.test_fraction, section.seed, section.skip_unreadable, held_out=section.held_out
    )
    source = load_data(section) if data is None or named else data
    dataset = dataset_of(source, transform, _name_of(data, source), options)
    return {"data.name": enter_dataset(dataset), "data.path": None}


def _name_of(data: Any, source: Any) -> str:
    """What the data are called: their own name, or what kind of thing they are."""
    if isinstance(source, Dataset):
        return source.name
    kinds = {"ndarray": "arrays", "Tensor": "arrays", "tuple": "arrays", "list": "arrays", "dict": "arrays"}
    first = data[0] if isinstance(data, (tuple, list)) and data else data
    kind = type(first).__name__
    return str(getattr(data, "name", None) or kinds.get(kind, kind))


def _shown(progress: Any) -> Progress | None:
    if callable(progress):
        return progress  # type: ignore[no-any-return]
    if progress is True and not in_notebook():
        return show_lines
    return None if progress and in_notebook() else show_finished


def execute(
    resolved: Resolved,
    out: Path | None = None,
    progress: Progress = lambda event: None,
    log: str | Sequence[str | Tracker] = (),
    elsewhere: bool = False,
    callbacks: Sequence[str | Observer] = (),
) -> Result:
    """Run a resolved recipe in this process and return its result; a finished folder is only read."""
    use_all_cores()
    observers = open_callbacks([*open_trackers(log), *callbacks])
    folder = RunFolder(out or default_folder(resolved))
    folder.check(resolved)
    if folder.finished:
        folder.settle()
        progress(_finished_before(load(folder.path)))
    else:
        run_engine(resolved, folder, progress, elsewhere=elsewhere, callbacks=observers)
    return load(folder.path)


def _finished_before(result: Result) -> dict[str, Any]:
    """The event of a run that was asked for again: it is returned as it is, and nobody watches it."""
    record, num_tasks = result.record, max(1, len(result.record.tasks))
    told = f"this run had finished before, so nothing ran and no observer was called: {result.folder}"
    again = "to run it anew, name another folder (--out, out=) or remove this one"
    warning = ResceneWarning("W562", told, fix=again)
    return {
        "event": "event",
        "level": "warning",
        "code": warning.code,
        "message": f"{told}; {again}",
        "place": (num_tasks - 1, -1),
        "elapsed_s": 0.0,
        "method": record.style.get("title") or record.method,
        "num_tasks": num_tasks,
        "num_rounds": (record.config.get("federation") or {}).get("num_rounds", 0),
    }


def load(folder: str | Path) -> Result:
    """The result of a finished run folder, also one of an older version; a newer one is refused (E414)."""
    path = Path(folder)
    try:
        values = read_object(path / "results.json")
    except OSError:
        if not path.is_dir():
            why, fix = "there is no such folder", f"{command('runs')} lists the runs"
        else:
            why, fix = None, f"{command('resume', path)}, if it was interrupted"
        raise RunError("E408", "no finished run here", where=str(path), why=why, fix=fix) from None
    except ValueError as error:
        why = f"results.json is damaged: {error}"
        fix = f"remove the damaged {path / 'results.json'}, then {command('resume', path)}"
        raise RunError("E408", "no finished run here", where=str(path), why=why, fix=fix) from None
    refuse_newer(values.get("schema"), RESULTS, path / "results.json")
    return Result(path, values)


def default_folder(resolved: Resolved) -> Path:
    """runs/<recipe>/<method>-s<seed>-<hash>: the same experiment has the same folder, a different one never shares it."""
    recipe, name = resolved.recipe, f"{resolved.recipe.method['name']}-s{resolved.recipe.seed}-{resolved.digest()}"
    return runs_root() / resolved.name / "-without-".join([name, *map(str, recipe.federation.exclude or ())])


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _percent(value: Any) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1f} %"


def _pandas() -> Any:
    """pandas, when somebody asks for a frame and not before."""
    try:
        import pandas
    except ImportError:
        why = "it is not part of the plain installation"
        raise DataError("E223", "frames need pandas", why=why, fix="pip install pandas") from None
    return pandas
