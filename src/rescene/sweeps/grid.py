"""The cells of a sweep: every combination of comma-separated values, times seeds, with a run folder for each."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rescene.api import default_folder
from rescene.config import Resolved, resolve
from rescene.core.errors import ConfigError, MethodCannot, ResceneWarning
from rescene.core.run_state import is_done
from rescene.methods import method_class, method_names
from rescene.nets import Arch, is_own

METHOD = ("method", "method.name")
ALL = tuple(f"{key}=all" for key in METHOD)
SIDE = 32  # pixels of pictures for which a network is looked at
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})", re.IGNORECASE)


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    resolved: Resolved
    folder: Path
    fix: str | None = None  # replaces the fix of an error that keeps it from running

    @property
    def done(self) -> bool:
        """Whether its results are there."""
        return is_done(self.folder)


def grid(recipe: str, overrides: list[str], seeds: str, out: Path | None) -> list[SweepCell]:
    """Every combination of comma-separated values.

    ``method=all``: every method that is known, plug-ins too, and can do the recipe; W580 names the others.
    """
    axes = [axis(text) for text in overrides]
    for text in overrides:
        if RANGE.fullmatch(text.partition("=")[2]):
            fix = f"add --search 20, or list values: {text.partition('=')[0]}=a,b,c"
            raise ConfigError("E106", f"{text!r} is a range, and a grid needs values", fix=fix)
    axes.append([f"seed={seed}" for seed in read_seeds(seeds)])
    combinations = list(itertools.product(*axes))
    if any(text in ALL for text in overrides):
        return _of_able_methods(recipe, combinations, out)
    return [cell(recipe, combination, out) for combination in combinations]


def _of_able_methods(recipe: str, combinations: Sequence[tuple[str, ...]], out: Path | None) -> list[SweepCell]:
    """The cells whose method can do the recipe; one warning names the other methods and says why."""
    able: list[SweepCell] = []
    unable: dict[str, list[str]] = {}  # by the reason
    for combination in combinations:
        try:
            able.append(_with_a_network(cell(recipe, combination, out)))
        except MethodCannot as error:
            name = next(text.partition("=")[2] for text in combination if text.partition("=")[0] in METHOD)
            names = unable.setdefault(_reason(error, method_class(name).title), [])
            names += [name] if name not in names else []
    told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in unable.items())
    fix = "sweep them apart with settings that they can do"
    if not able:
        raise ConfigError("E512", "method=all leaves no method: none can do this recipe", why=told, fix=fix)
    if unable:
        warnings.warn(ResceneWarning("W580", f"method=all leaves out {told}", fix=fix), stacklevel=3)
    return able


def _with_a_network(one: SweepCell) -> SweepCell:
    """The cell, if its method can use the network (MethodCannot); of networks of the user's own nothing is known here."""
    recipe = one.resolved.recipe
    try:
        if not is_own(recipe.model.name):
            recipe.build_method().check_network(Arch(recipe.model.name, SIDE, width=recipe.model.width))
    except ConfigError as error:
        raise MethodCannot(error.code, error.what) from None
    return one


def _reason(error: MethodCannot, title: str) -> str:
    """Why a method is refused, in words that do not name it, so that methods share them.

    >>> _reason(MethodCannot("E573", "GLFC cannot learn late", where="federation.delay=1"), "GLFC")
    'cannot learn late (federation.delay=1)'
    >>> _reason(MethodCannot("E104", "the recipe contradicts itself", why="tasks.drift: GLFC must be told; or fedavg"), "GLFC")
    'tasks.drift: must be told'
    """
    text = re.split("[;(]", error.why or "")[0].strip() if error.code == "E104" else error.what
    return text.replace(f"{title} ", "", 1) + (f" ({error.where})" if error.where else "")


def cell(recipe: str, overrides: Sequence[str], out: Path | None) -> SweepCell:
    """The run with these overrides; below ``out`` it has the folder name that it would have anywhere."""
    resolved = resolve(recipe, overrides)
    folder = default_folder(resolved)
    return SweepCell(tuple(overrides), resolved, out / folder.name if out else folder)


def read_seeds(text: str) -> tuple[int, ...]:
    """Seeds as given to ``--seeds``, each once: a seed given twice is the same run.

    >>> read_seeds("2, 0,2")
    (2, 0)
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError("E106", f"cannot read the seeds {text!r}", fix="--seeds 0,1,2") from None


def axis(text: str) -> list[str]:
    """The values of one override, each as an override.

    >>> axis("federation.beta=0.1,0.5"), axis("tasks.plan=[[a,b],[c]]")
    (['federation.beta=0.1', 'federation.beta=0.5'], ['tasks.plan=[[a,b],[c]]'])
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(
            "E106", f"cannot read the override {text!r}", why="overrides look like key=value or key=a,b,c"
        )
    if key == "seed":  # --seeds would overrule it, and all its values be one run
        raise ConfigError("E106", f"a sweep takes its seeds from --seeds, not from {text!r}", fix=f"--seeds {value}")
    if key in METHOD and value == "all":
        return [f"{key}={name}" for name in method_names()]
    return [f"{key}={part}" for part in dict.fromkeys(_split(value))]


def _split(value: str) -> list[str]:
    """Commas separate values except inside brackets: [a,b],[c] are two."""
    parts, depth = [""], 0
    for character in value:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def constants(cells: Sequence[SweepCell]) -> tuple[str, ...]:
    """The overrides that all cells share. They are said once, for all.

    >>> from types import SimpleNamespace as cell
    >>> constants([cell(overrides=("method=fedavg", "seed=0")), cell(overrides=("method=rescene", "seed=0"))])
    ('seed=0',)
    """
    return tuple(text for text in cells[0].overrides if all(text in cell.overrides for cell in cells))


def varied(cells: Sequence[SweepCell]) -> list[str]:
    """For each cell the overrides that tell it apart; all of them where there is one cell."""
    shared = constants(cells) if len(cells) > 1 else ()
    return [" ".join(text for text in cell.overrides if text not in shared) for cell in cells]
