"""From a name such as ``main`` or ``main-lite`` to the experiments behind that table of the paper."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, cached_property, lru_cache
from typing import Any

from rescene.config import Resolved, resolve
from rescene.core.errors import ConfigError, ResceneError, with_guess
from rescene.data import available
from rescene.data.catalog import prepare_command
from rescene.data.loading import has_split
from rescene.methods import method_class
from rescene.methods.surrogates import SurrogateMethod
from rescene.paper.numbers import cell_name, packaged, printed
from rescene.paper.store import identity

SEEDS = (0, 1, 2)  # Sec. 4.1
FAST = "train.server_epochs=10"  # a tenth of the server's work; the paper prints it for one cell only (Table 5)
FAST_LABEL = "E_srv=10"
LITE = "-lite"
LITE_BASE = "demo"
LITE_OVERRIDES = ("tasks.limit=3", "federation.num_rounds=2", "train.local_epochs=2", "train.server_epochs=5")
LITE_METHODS = (  # the two that would take most of the time
    *("methods.target.synthesis_rounds=4", "methods.target.warmup_rounds=1", "methods.target.generator_width=16"),
    "methods.glfc.num_inversions=4",
)
_BETWEEN = re.compile(", |[:/]")  # the parts of a cell's name


@dataclass(frozen=True)
class Obstacle:
    """Why a cell cannot run here, and what helps."""

    reason: str
    fix: str


@dataclass(frozen=True)
class PaperCell:
    """One experiment: a shipped recipe and the overrides that turn it into this cell of the paper."""

    data: str
    beta: str
    method: str
    setting: str
    base: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The cell's name, made of data, beta, method and setting."""
        return cell_name(self.data, self.beta, self.method, self.setting)

    def resolve(self, *more: str) -> Resolved:
        """The cell's recipe with further overrides."""
        return _resolved(self.base, (*self.overrides, *more))

    @property
    def experiment(self) -> str:
        """What the runs of this cell are found by."""
        return _experiment(self.base, self.overrides)

    @property
    def fast(self) -> PaperCell | None:
        """The same with E_srv=10, where the server trains and the paper's cell says 100."""
        if (
            not issubclass(method_class(self.method), SurrogateMethod)
            or self.resolve().recipe.train.server_epochs != 100
        ):
            return None
        return replace(self, overrides=(*self.overrides, FAST))

    def read_as(self, reading: str) -> PaperCell:
        """The cell under another reading of the paper (readings.yaml)."""
        other = readings(self.method)[reading]
        again = {override.partition("=")[0] for override in other}
        rest = (override for override in self.overrides if override.partition("=")[0] not in again)
        return replace(self, overrides=(*rest, *other))

    def forms(self, with_readings: bool = True) -> Iterator[tuple[bool, str, PaperCell]]:
        """Whether with E_srv=10, reading ("" for the one taken), cell: everything that may stand beside the cell where it was run."""
        names = ("", *readings(self.method)) if with_readings else ("",)
        for fast, form in ((False, self), (True, self.fast)):
            if form is None:
                continue
            found: dict[str, tuple[bool, str, PaperCell]] = {}
            for name in names:
                read = form.read_as(name) if name else form
                found.setdefault(read.experiment, (fast, name, read))  # a reading may say what the row says already
            yield from found.values()

    @property
    def unavailable(self) -> Obstacle | None:
        """A cell that this version cannot set up on any machine."""
        try:
            self.resolve()
        except ResceneError as error:
            return Obstacle(f"not available yet: {error.what}", "a later version")
        return None

    @property
    def obstacle(self) -> Obstacle | None:
        """What keeps this cell from running on this machine, as far as can be told without loading anything."""
        if self.unavailable:
            return self.unavailable
        data = self.resolve().recipe.data
        row = next((row for row in available() if row["name"] == data.name), None)
        if row is None or data.path is not None or has_split(data.name, data.held_out):
            return None
        what = "was prepared with another test split" if row["found"] else "is not on this machine"
        fix = f"{prepare_command(data.name, data.held_out)}; SOURCE is {row['source']}"
        return Obstacle(f"data set {data.name!r} {what}", fix)


@dataclass(frozen=True)
class PaperRecipe:
    """A table of the paper as experiments. ``table`` names its numbers; a lite recipe has none to compare with."""

    name: str
    table: str
    title: str
    place: str
    seeds: tuple[int, ...]
    cells: tuple[PaperCell, ...]
    spec: Mapping[str, Any]

    @property
    def lite(self) -> bool:
        """Whether this is the small variant of a table."""
        return self.name.endswith(LITE)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the table prints, and those noted beside it."""
        return (*dict.fromkeys(number.metric for number in printed(self.table)), *self.spec.get("also", ()))

    def reference(self, cell: PaperCell) -> PaperCell | None:
        """The cell that this one's ratios and changes are relative to."""
        changed = self.spec.get("reference")
        if changed is None:
            return None
        return _cell(self.spec, self.lite, **{**_identity(cell), **changed})

    def chosen(self, patterns: Iterable[str]) -> tuple[PaperCell, ...]:
        """Cells whose name matches one of the patterns (``cifar10/*/rescene``) or has it as a part; no pattern: all."""
        patterns = list(patterns)
        picked = [cell for cell in self.cells if not patterns or any(matches(cell.name, p) for p in patterns)]
        idle = [p for p in patterns if not any(matches(cell.name, p) for cell in self.cells)]
        if idle:
            raise ConfigError(
                "E151",
                f"no cell of {self.name} matches {', '.join(idle)}",
                why=f"a cell is called like {self.cells[0].name}",
                fix=f"rescene paper run {self.name} --plan lists them",
            )
        return tuple(picked)


def matches(name: str, pattern: str) -> bool:
    """Whether a name fits the pattern, or has it as a part; a part ends at ``/``, ``:`` or a comma.

    >>> matches("cifar10/0.5/rescene/B=500", "cifar10/*/rescene/*"), matches("cifar100/0.5/rescene", "cifar10")
    (True, False)
    >>> matches("main:cifar10/0.5/glfc, no augmentation", "no augmentation")
    True
    """
    parts, wanted = (f"/{_BETWEEN.sub('/', words)}/" for words in (name, pattern))
    return fnmatch(name, pattern) or wanted in parts


def recipe_names(lite: bool = True) -> list[str]:
    """All recipes, in the paper's order; the lite forms after them."""
    names = list(packaged("recipes.yaml"))
    return names + [name + LITE for name in names] if lite else names


def check_name(name: str, besides: Iterable[str] = ()) -> None:
    """Refuses what is no table of the paper; ``besides``: what else the caller would have understood."""
    if name not in recipe_names():
        raise ConfigError(
            "E150",
            with_guess(f"the paper has no table {name!r}", name, [*recipe_names(), *besides]),
            why=f"known: {', '.join(recipe_names(lite=False))}, each also with {LITE}"
            + "".join(f"; {b}" for b in besides),
            fix="rescene paper list",
        )


@lru_cache
def paper_recipe(name: str) -> PaperRecipe:
    """``main``, ``paper/main`` or ``main-lite``."""
    name = name.removeprefix("paper/")
    check_name(name)
    table, lite = name.removesuffix(LITE), name.endswith(LITE)
    spec = packaged("recipes.yaml")[table]
    wanted = [(n.data, n.beta, n.method, n.setting) for n in printed(table)]
    for block in spec.get("extra", ()):
        wanted += [(*place, "") for place in itertools.product(block["data"], block["beta"], block["method"])]
    made = [_cell(spec, lite, *place) for place in dict.fromkeys(wanted)]
    cells = tuple(dict.fromkeys(cell for cell in made if cell))
    return PaperRecipe(name, table, spec["title"], spec["place"], SEEDS[:1] if lite else SEEDS, cells, spec)


def readings(method: str) -> dict[str, list[str]]:
    """Other ways to read the paper, as overrides of the method's rows, by their labels."""
    found: dict[str, list[str]] = packaged("readings.yaml").get(method, {})
    return found


def our_cells() -> Iterator[PaperCell]:
    """Methods of ours in the setting of the paper's main table (ours.yaml), data set by data set and beta by beta."""
    for data, beta in dict.fromkeys((cell.data, cell.beta) for cell in paper_recipe("main").cells):
        for method, settings in packaged("ours.yaml").items():
            for setting, row in settings.items():
                base, beta_key = row["recipe"].format(data=data), f"federation.beta={beta}"
                for read in ((), ("data.name=auto",)):  # by the data set's name, or from a folder of images
                    yield PaperCell(data, beta, method, setting, base, (beta_key, *row["overrides"], *read))


@cache
def _resolved(base: str, overrides: tuple[str, ...]) -> Resolved:
    return resolve(base, overrides)


@cache
def _experiment(base: str, overrides: tuple[str, ...]) -> str:
    return identity(_resolved(base, overrides).recipe)


def _identity(cell: PaperCell) -> dict[str, str]:
    return {"data": cell.data, "beta": cell.beta, "method": cell.method, "setting": cell.setting}


def _cell(spec: Mapping[str, Any], lite: bool, data: str, beta: str, method: str, setting: str) -> PaperCell | None:
    """The experiment behind a cell; None where the lite form leaves it out."""
    settings, base, shared = spec.get("settings", {}), data, ()
    if lite:
        small = spec.get("lite", {})
        settings = settings | small.get("settings", {})
        base = small.get("base", LITE_BASE)
        data = "fashion-mini" if base == LITE_BASE else base
        sizes = LITE_OVERRIDES if base == LITE_BASE else ()
        shared = (*LITE_METHODS, *sizes, *small.get("overrides", ()))
    own = settings.get(setting, [])
    if own is None:
        return None
    if isinstance(own, Mapping):  # differs by method
        own = own.get(method, own.get("default", []))
    taken = packaged("readings.yaml")["taken"]
    rows = (taken["*"].get(method, ()), taken.get(data, {}).get(method, ()))
    read = {word.partition("=")[0]: word for row in rows for word in row}.values()  # what the data set says holds
    overrides = (f"federation.beta={beta}", f"method={method}", *read, *shared, *own)
    return PaperCell(data, beta, method, setting, base, overrides)
