"""Look at results: runs, show, report, table, plot, sites, and the leaderboard of all stored results."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.shared_options import (
    AsJson,
    Overrides,
    Plugin,
    RecipeOrRun,
    find_runs,
    name_plugins,
    plugin_words,
    recipe_of,
    verb_group,
)
from rescene.cli.terminal import accuracy_text, busy, interruptible, print_rows, writing
from rescene.core.errors import ConfigError, ResceneError, ResceneWarning, RunError, command
from rescene.core.json_files import Row, json_object, yaml_object
from rescene.core.run_state import runs_root

if TYPE_CHECKING:
    from rescene.config import Recipe
    from rescene.report.leaderboard import BoardRow, Expected, MethodFacts
    from rescene.report.load import RunRecord

_FORMATS = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv", ".html": "html", ".json": "json"}
leaderboard_app = verb_group("Compare all stored results on one page, and check a result before it is added.")


def runs(
    folder: Annotated[Path | None, typer.Argument(help="where to look (default: $RESCENE_RUNS or runs)")] = None,
    prune: Annotated[
        str | None, typer.Option("--prune", help="what to remove: checkpoints (of finished runs), interrupted, failed")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="with --prune: do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs under a folder with state, size and accuracy; --prune makes room."""
    from rescene.cli.run_folders import prune as remove
    from rescene.cli.run_folders import show_runs

    root = folder or runs_root()
    if prune is not None:
        remove(root, prune, yes)
    else:
        show_runs(root, as_json)


def show(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the whole recipe and where each value comes from."""
    from rescene.config import resolve

    resolved = resolve(recipe_of(recipe), overrides or [])
    found = {k: {"value": v, "origin": resolved.origins.get(k, "default")} for k, v in resolved.flat().items()}
    if as_json:
        print(json.dumps(found))
    else:
        print_rows({"key": key, **row} for key, row in found.items())


def report(
    folders: Annotated[list[Path], typer.Argument(help="run folders, or a folder that holds some")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file (default: report.html beside the runs)")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="show the paper's AA and AIA beside runs that are in its tables")
    ] = False,
) -> None:
    """Make one self-contained HTML page from run folders."""
    from rescene.report.load import load_runs
    from rescene.report.page import write_page

    found = [run for folder in folders for run in find_runs(folder)]
    if not found:
        raise ConfigError("E108", "no run folder there", where=", ".join(map(str, folders)), fix="rescene runs")
    out = out or folders[0] / "report.html"
    with busy(f"drawing the page of {len(found)} runs"):
        printed = None
        if paper:
            from rescene.paper.compare import printed_beside

            printed = printed_beside(found)
        runs, unreadable = load_runs(found)
        with writing(out):
            page = write_page(runs, unreadable, out, printed)
    tell_unreadable(unreadable)
    print(page)
    if open_page:
        typer.launch(str(page))


def table(
    folders: Annotated[list[Path], typer.Argument(help="run folders, or folders that hold some")],
    by: Annotated[
        str, typer.Option("--by", help="settings that name the rows, e.g. beta,lr (default: those that differ)")
    ] = "",
    metric: Annotated[
        str,
        typer.Option("--metric", help="aa, aia, old, recent, forgetting, tasks, task1, sites, worst_site, upload, ..."),
    ] = "aa,aia",
    across: Annotated[str, typer.Option("--across", help="a setting that gets a column for each value")] = "",
    kind: Annotated[str, typer.Option("--format", help="text, markdown (md), latex (tex), csv, html or json")] = "",
    rename: Annotated[
        list[str] | None, typer.Option("--rename", help="METHOD=TITLE: call a method so in the table; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="file; its ending chooses the format")] = None,
    plugin: Plugin = None,
) -> None:
    """Compare runs in a table: mean and deviation over seeds, leakage beside accuracy."""
    from rescene.report.tables import compare, render

    kind = format_for(kind, out)
    runs = retitled(loaded(folders), [*_plugin_titles(plugin), *(rename or ())])
    put(render(compare(runs, by, metric, across), kind), out)


def retitled(runs: list[RunRecord], texts: list[str]) -> list[RunRecord]:
    """The runs with other titles of their methods. ``texts``: METHOD=TITLE, with a method's name or its old title."""
    titles = {name: title for name, _, title in (text.partition("=") for text in texts)}
    known = {name for run in runs for name in (run.method, run.style.title)}
    for name, title in titles.items():
        if not title or name not in known:
            why = "it looks like METHOD=TITLE" if not title else f"these runs have {', '.join(sorted(known))}"
            raise ConfigError(
                "E106", f"cannot rename {name!r}", where="--rename", why=why, fix="--rename my_idea='My idea'"
            )
    told = [titles.get(run.method) or titles.get(run.style.title) or run.style.title for run in runs]
    return [replace(run, style=replace(run.style, title=title)) for run, title in zip(runs, told, strict=True)]


def _plugin_titles(plugin: list[Path] | None) -> list[str]:
    """The titles that methods of plug-ins have today, for runs that recorded an older one."""
    if not plugin:
        return []
    from rescene.methods import method_class, method_names

    files = {str(path.resolve()) for path in plugin}
    own = [
        one
        for one in map(method_class, method_names())
        if getattr(sys.modules.get(one.__module__), "__file__", "") in files
    ]
    return [f"{one.name}={one.title}" for one in own]


def format_for(kind: str, out: Path | None) -> str:
    """The format that was asked for, else the one that the file's ending means."""
    ending = out.suffix if out else ".txt"
    kind = _FORMATS.get(f".{kind}", kind) if kind else _FORMATS.get(ending, "")  # md is markdown, tex is latex
    if not kind:
        why = f"known endings are {', '.join(_FORMATS)}"
        raise ConfigError("E140", f"no table format ends in '{ending}'", where="--out", why=why, fix="--format csv")
    return kind


def put(text: str, out: Path | None) -> None:
    """Print a text, or write it to a file and print the name of the file."""
    if out is None:
        print(text, end="")
        return
    with writing(out):
        out.write_text(text, "utf-8", newline="")
    print(out)


def plot(
    folders: Annotated[
        list[Path], typer.Argument(help="run folders, or folders that hold some; the kind may come first")
    ],
    kind: Annotated[
        str, typer.Option("--kind", help="old-recent, curves, matrix, rounds, cost, privacy, frontier or surrogates")
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", help="file.png, .pdf or .svg (default: <kind>.png)")] = None,
) -> None:
    """Draw a figure for a paper or a talk, and write the CSV behind it."""
    from rescene.report.groups import differing_settings, group_runs
    from rescene.report.page import KINDS, figure

    if not kind:  # rescene plot frontier RUNS
        kind, *folders = str(folders[0]), *folders[1:]
        if kind not in KINDS and Path(kind).is_dir():
            raise ConfigError(
                "E145",
                "which figure?",
                why=f"known are {', '.join(KINDS)}",
                fix=command("plot", kind, "--kind", "curves"),
            )
        if not folders:
            raise ConfigError(
                "E108", "of which runs?", where="after the kind of figure", fix=command("plot", kind, "runs/...")
            )
    groups = group_runs(loaded(folders))
    out = out or Path(f"{kind}.png")
    with writing(out):
        paths = figure(groups, kind, out)
    print(*paths, sep="\n")
    apart = differing_settings(groups)
    if apart:
        print(f"note: these runs do not share one setting: {', '.join(apart[:6])}", file=sys.stderr)


def loaded(folders: list[Path]) -> list[RunRecord]:
    """Every run in these folders, once. Runs that cannot be read are named on standard error and left out."""
    from rescene.report.load import load_runs

    found: dict[Path, None] = {}
    for folder in folders:
        runs = find_runs(folder)
        if not runs:
            why = "it holds no run" if folder.is_dir() else "there is no such folder"
            raise ConfigError("E108", "no run folder there", where=str(folder), why=why, fix="rescene runs")
        found |= dict.fromkeys(runs)
    read, unreadable = load_runs(found)
    tell_unreadable(unreadable)
    return read


def tell_unreadable(unreadable: Mapping[Path, ResceneError]) -> None:
    """Say on standard error which runs were left out, and why."""
    for folder, error in unreadable.items():
        why = f": {error.why}" if error.why else ""
        print(f"left out: {folder}: [{error.code}] {error.what}{why}", file=sys.stderr)


def sites(
    folder: Annotated[Path, typer.Argument(help="finished run folder with federation.partition=sites")],
    tune: Annotated[
        bool, typer.Option("--tune", help="also let each site tune the head on its own training images, and compare")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="with --tune: gradient steps of a site")] = 100,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Show accuracy at each site; --tune compares the shared head with a head tuned at the site."""
    rows = tuned_rows(folder, steps) if tune else site_rows(folder)
    print_rows(rows, as_json)
    if not as_json and not tune:
        print(f"with a head of its own for each site: {command('sites', folder, '--tune', *plugin_words(plugin))}")


def site_rows(folder: Path) -> list[Row]:
    """One row per natural site of a finished run, from results.json."""
    from rescene.api import load

    found = load(folder).record.sites
    if not found:
        raise RunError(
            "E448",
            "this run has no sites of its own",
            where=str(folder),
            why="its images were split over simulated sites, or its test images belong to none",
            fix="federation.partition=sites, with a folder or a column of sites",
        )
    return [
        {"site": row.name, "train": row.train_size, "test": row.test_size, "accuracy": accuracy_text(row.accuracy)}
        for row in found
    ]


def tuned_rows(folder: Path, steps: int) -> list[Row]:
    """One row per site with the shared and the tuned head; kept in the run folder, and shown on its page."""
    from rescene.config import resolve
    from rescene.engine import prepare, use_all_cores
    from rescene.engine.checkpoint import write_json
    from rescene.engine.evaluate import Tuning, tuned_records
    from rescene.nets import load_weights
    from rescene.report import write_report

    site_rows(folder)
    use_all_cores()
    with busy("tuning a head for each site"):
        experiment = prepare(resolve(folder / "config.yaml").recipe)
        net = experiment.arch.restore(load_weights(folder / "model" / "final.safetensors")).to(experiment.device)
        tuning = Tuning(steps=steps)
        rows = tuned_records(net, experiment, tuning)
        write_json(folder / "site_heads.json", {"schema": 1, "tuning": vars(tuning), "sites": rows})
        write_report([folder], folder / "report.html")
    return [
        {key: accuracy_text(value) if isinstance(value, float) else value for key, value in row.items()} for row in rows
    ]


@leaderboard_app.command("write")
def leaderboard_write(
    folders: Annotated[list[Path] | None, typer.Argument(help="folders that hold runs (default: results)")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for index.html and leaderboard.csv")] = Path(
        "docs/leaderboard"
    ),
    plugin: Plugin = None,
) -> None:
    """Write the page and its CSV from run folders: a row for each method and setting, mean and deviation over seeds.

    A folder whose files do not agree is left out with a warning.
    """
    with busy("reading runs"):
        from rescene.report.leaderboard import write_leaderboard

        rows = leaderboard_rows(folders or [Path("results")])
        with writing(out / "index.html"):
            paths = write_leaderboard(rows, out, Path())
    print(*paths, sep="\n")


def leaderboard_rows(folders: list[Path]) -> list[BoardRow]:
    """The rows of all runs in these folders whose files agree, with their place in the paper. W546 tells what is left out."""
    from rescene.core.versions import source_hash
    from rescene.paper.compare import places_in_paper
    from rescene.report.leaderboard import entries

    facts: dict[Path, MethodFacts] = {}
    code, found = source_hash(), loaded(folders)
    runs = [run for run in found if _takes_part(run, code, facts)]
    names = {old: new for folder in folders for old, new in _data_names(folder).items()}
    rows = entries(runs, facts, places_in_paper(folders, found), names)
    for left, counted in (pair for row in rows for pair in row.repeats):
        _left_out(left, f"it has the recipe and the seed of {counted}, which counts")
    return rows


def _takes_part(run: RunRecord, code: str, facts: dict[Path, MethodFacts]) -> bool:
    """Whether a run has a row: it is finished, and its files agree. What its method says of it is added to ``facts``."""
    from rescene.report.leaderboard import compare_files, shown

    if not shown(run):
        return False
    try:
        told, recipe = _recorded_recipe(run.folder)
        compare_files(run, _expected(run, told, recipe, code))
    except ResceneError as error:
        name_plugins(error, {"folder": run.folder, "plugin": None})
        _left_out(run.folder, f"[{error.code}] {error.what}: {'; '.join((error.why or '').splitlines())}")
        return False
    facts[run.folder] = _method_facts(recipe, len(run.tasks))
    return True


def _left_out(folder: Path, why: str) -> None:
    warnings.warn(ResceneWarning("W546", f"{folder} is left out of the leaderboard: {why}"), stacklevel=3)


def _recorded_recipe(folder: Path) -> tuple[Row, Recipe]:
    """config.yaml as it stands, and the recipe that it means; E545 if it is missing or damaged."""
    from pydantic import ValidationError

    from rescene.config import Recipe, resolve
    from rescene.report.leaderboard import refuse_damaged, refuse_missing

    problems: list[str] = []
    refuse_missing(folder, ["config.yaml"])
    told = yaml_object(folder / "config.yaml", problems)
    refuse_damaged(folder, problems)
    try:
        return told, Recipe.model_validate(told)
    except ValidationError:
        return told, resolve(folder / "config.yaml").recipe  # says which key is wrong


def _expected(run: RunRecord, told: Row, recipe: Recipe, code: str) -> Expected:
    """What config.yaml, the registered method and this program give, for a comparison with results.json."""
    from rescene.config.compose import record_digest
    from rescene.core.json_files import as_json
    from rescene.core.recipe_keys import flatten
    from rescene.core.results import DIGITS
    from rescene.engine.results_writer import privacy_of
    from rescene.report.leaderboard import Expected, refuse_damaged

    method = recipe.build_method()
    try:
        privacy = privacy_of(recipe, method, len(run.tasks), run.results.leakage)
    except ValueError:  # a sentence of it tells of near-copies
        refuse_damaged(run.folder, ["results.json: leakage could not be read"])
        raise
    return Expected(
        recipe=told,
        digest=record_digest(told),
        missing=tuple(sorted(flatten(recipe.model_dump(mode="json")).keys() - flatten(told).keys())),
        style=asdict(method.style()),
        privacy=as_json(privacy, DIGITS),
        code=code,
    )


def _method_facts(recipe: Recipe, num_tasks: int) -> MethodFacts:
    from rescene.methods import method_class
    from rescene.report.leaderboard import MethodFacts

    promise, method = recipe.promise(num_tasks), method_class(recipe.method["name"])
    leaves = method.leaving_in_short(promise.mechanism if promise else None)
    return MethodFacts(method.style(), leaves, method.verifications())


def _data_names(folder: Path) -> dict[str, str]:
    """``data-names.json`` of a folder of results: what data sets are called that some runs read from a file of another name."""

    file = folder / "data-names.json"
    return {str(old): str(new) for old, new in json_object(file, []).items()} if file.is_file() else {}


@leaderboard_app.command("check")
def leaderboard_check(
    folders: Annotated[list[Path], typer.Argument(help="folders of finished runs")],
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="rounds to run again; 0: compare files only")] = 1,
    minutes: Annotated[float, typer.Option("--minutes", help="no further round begins after so many minutes")] = 10.0,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Check results before they are added: recipe, hashes, numbers, first rounds run again; exit code 5 if something differs.

    With --json one object for each folder, a line each.
    """

    def work() -> int:
        codes = [_check_one(folder, rounds, minutes, as_json, len(folders) > 1, plugin) for folder in folders]
        return 5 if 5 in codes else max(codes)

    interruptible(work)


def _check_one(folder: Path, rounds: int, minutes: float, as_json: bool, name: bool, plugin: list[Path] | None) -> int:
    """Tell whether a folder is accepted; returns the exit status: 0, 5 if it is refused, else that of the error."""
    from rescene.report.leaderboard import REFUSALS

    try:
        told = check_submission(folder, rounds, minutes)
    except ResceneError as error:
        name_plugins(error, {"folder": folder, "plugin": plugin})
        row = {"folder": str(folder), "accepted": False, "code": error.code, "what": error.what}
        _tell(row | {"why": (error.why or "").splitlines()}, str(error), as_json, refused=True)
        return 5 if error.code in REFUSALS else error.exit_code
    words = [*([f"{folder}:"] if name else []), *told, "accepted"]
    _tell({"folder": str(folder), "accepted": True, "checked": told}, "\n".join(words), as_json)
    return 0


def _tell(row: Row, words: str, as_json: bool, refused: bool = False) -> None:
    print(json.dumps(row) if as_json else words, file=sys.stderr if refused and not as_json else sys.stdout)


def check_submission(folder: Path, rounds: int, minutes: float) -> list[str]:
    """What was checked, in sentences; ConfigError E541 to E547 with the difference if something does not agree."""
    from rescene.core.versions import source_hash
    from rescene.report.leaderboard import check_images, check_rounds, compare_files, read_submission

    run = read_submission(folder)
    told = compare_files(run, _expected(run, *_recorded_recipe(folder), source_hash()))
    if not rounds:
        return [*told, "rounds: none held again (--rounds 0)"]
    with busy("holding the first rounds again"), tempfile.TemporaryDirectory() as place:
        from rescene.config import resolve
        from rescene.engine.loop import first_rounds

        again = Path(place) / "again"
        held = first_rounds(resolve(folder / "config.yaml"), again, rounds, 60 * minutes)
        environment = json_object(again / "env.json", [])
        check_images(folder, environment)
        moved = check_rounds(folder, held, environment)
    images = f"images: {environment['data']}, fingerprint {environment['data_fingerprint'][:16]}"
    return [*told, images, _rounds_told(sum(row["kind"] == "round" for row in held), moved)]


def _rounds_told(num: int, moved: Sequence[str]) -> str:
    from rescene.report.leaderboard import POINTS

    alike = f"sites alike, accuracies within {POINTS:g} points; here {'; '.join(moved)}"
    return f"rounds: {num} held again, {alike if moved else 'every number the same'}"
