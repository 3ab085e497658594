"""The leaderboard: write its page from stored runs, and check runs that somebody wants to add."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.look_verbs import loaded
from rescene.cli.shared_options import AsJson, Plugin, load_plugins, verb_group
from rescene.cli.terminal import busy, interruptible, writing
from rescene.core.errors import ResceneError, ResceneWarning
from rescene.core.json_files import Row

if TYPE_CHECKING:
    from rescene.config import Recipe
    from rescene.report.leaderboard import BoardRow, MethodFacts
    from rescene.report.load import RunRecord
    from rescene.report.submission import Expected

leaderboard_app = verb_group("Compare all stored results on one page, and check a result before it is added.")


@leaderboard_app.command("write")
def write(
    folders: Annotated[list[Path] | None, typer.Argument(help="folders that hold runs (default: results)")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for index.html and leaderboard.csv")] = Path(
        "docs/leaderboard"
    ),
    plugin: Plugin = None,
) -> None:
    """Write the page and its CSV from run folders: a row for each method and setting, mean and deviation over seeds.

    A folder whose files do not agree is left out with a warning.
    """
    load_plugins(plugin)
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
    code = source_hash()
    runs = [run for run in loaded(folders) if _takes_part(run, code, facts)]
    names = {old: new for folder in folders for old, new in _data_names(folder).items()}
    rows = entries(runs, facts, places_in_paper(folders), names)
    for left, counted in (pair for row in rows for pair in row.repeats):
        _left_out(left, f"it has the recipe and the seed of {counted}, which counts")
    return rows


def _takes_part(run: RunRecord, code: str, facts: dict[Path, MethodFacts]) -> bool:
    """Whether a run has a row: it is finished, and its files agree. What its method says of it is added to ``facts``."""
    from rescene.report.leaderboard import shown
    from rescene.report.submission import compare_files

    if not shown(run):
        return False
    try:
        told, recipe = _recorded_recipe(run.folder)
        compare_files(run, _expected(run, told, recipe, code))
    except ResceneError as error:
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
    from rescene.core.json_files import yaml_object
    from rescene.report.submission import refuse_damaged, refuse_missing

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
    from dataclasses import asdict

    from rescene.config.compose import record_digest
    from rescene.core.json_files import json_object
    from rescene.core.recipe_keys import flatten
    from rescene.core.results import rounded
    from rescene.engine.results_writer import privacy_record
    from rescene.report.submission import Expected, refuse_damaged

    method, leakage = recipe.build_method(), json_object(run.folder / "results.json", []).get("leakage")
    try:
        privacy = privacy_record(recipe, method, len(run.tasks), leakage)
    except (KeyError, TypeError, ValueError):  # a sentence of it tells of near-copies
        refuse_damaged(run.folder, ["results.json: leakage could not be read"])
        raise
    return Expected(
        recipe=told,
        digest=record_digest(told),
        missing=tuple(sorted(flatten(recipe.model_dump(mode="json")).keys() - flatten(told).keys())),
        style=asdict(method.style()),
        privacy=rounded(privacy),
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
    from rescene.core.json_files import json_object

    file = folder / "data-names.json"
    return {str(old): str(new) for old, new in json_object(file, []).items()} if file.is_file() else {}


@leaderboard_app.command("check")
def check(
    folders: Annotated[list[Path], typer.Argument(help="folders of finished runs")],
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="rounds to run again; 0: compare files only")] = 1,
    minutes: Annotated[float, typer.Option("--minutes", help="no further round begins after so many minutes")] = 10.0,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Check results before they are added: recipe, hashes, numbers, first rounds run again; exit code 5 if something differs.

    With --json one object for each folder, a line each.
    """
    load_plugins(plugin)

    def work() -> int:
        codes = [_check_one(folder, rounds, minutes, as_json, name=len(folders) > 1) for folder in folders]
        return 5 if 5 in codes else max(codes)

    interruptible(work)


def _check_one(folder: Path, rounds: int, minutes: float, as_json: bool, name: bool) -> int:
    """Tell whether a folder is accepted; returns the exit status: 0, 5 if it is refused, else that of the error."""
    from rescene.report.submission import REFUSALS

    try:
        told = check_submission(folder, rounds, minutes)
    except ResceneError as error:
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
    from rescene.report.submission import check_images, check_rounds, compare_files, read_submission

    run = read_submission(folder)
    told = compare_files(run, _expected(run, *_recorded_recipe(folder), source_hash()))
    if not rounds:
        return [*told, "rounds: none held again (--rounds 0)"]
    with busy("holding the first rounds again"), tempfile.TemporaryDirectory() as place:
        from rescene.config import resolve
        from rescene.core.json_files import json_object
        from rescene.engine.loop import first_rounds

        again = Path(place) / "again"
        held = first_rounds(resolve(folder / "config.yaml"), again, rounds, 60 * minutes)
        environment = json_object(again / "env.json", [])
        check_images(folder, environment)
        moved = check_rounds(folder, held, environment)
    images = f"images: {environment['data']}, fingerprint {environment['data_fingerprint'][:16]}"
    return [*told, images, _rounds_told(sum(row["kind"] == "round" for row in held), moved)]


def _rounds_told(num: int, moved: Sequence[str]) -> str:
    from rescene.report.submission import POINTS

    alike = f"sites alike, accuracies within {POINTS:g} points; here {'; '.join(moved)}"
    return f"rounds: {num} held again, {alike if moved else 'every number the same'}"
