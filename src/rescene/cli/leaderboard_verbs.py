"""The leaderboard: write its page from stored runs, and check a run that somebody wants to add."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.look_verbs import loaded
from rescene.cli.shared_options import AsJson, Plugin, load_plugins
from rescene.cli.terminal import busy, interruptible, verb, writing
from rescene.core.errors import ConfigError

if TYPE_CHECKING:
    from rescene.report.leaderboard import BoardRow

leaderboard_app = typer.Typer(
    help="Compare all stored results on one page, and check a result before it is added.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@leaderboard_app.command("write")
@verb
def write(
    folders: Annotated[list[Path] | None, typer.Argument(help="folders that hold runs (default: results)")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for index.html and leaderboard.csv")] = Path(
        "docs/leaderboard"
    ),
    plugin: Plugin = None,
) -> None:
    """Write the page and its CSV from run folders: a row for each method and setting, mean and deviation over seeds."""
    load_plugins(plugin)
    with busy("reading runs"):
        from rescene.report.leaderboard import write_leaderboard

        rows = leaderboard_rows(folders or [Path("results")])
        with writing(out / "index.html"):
            paths = write_leaderboard(rows, out, Path())
    print(*paths, sep="\n")


def leaderboard_rows(folders: list[Path]) -> list[BoardRow]:
    """The rows of all runs in these folders, with their place in the paper and what their methods were verified against."""
    from rescene.core.verification import in_short
    from rescene.methods import method_class, method_names
    from rescene.paper.compare import places_in_paper
    from rescene.report.leaderboard import entries

    verified = {name: in_short(method_class(name).verifications()) for name in method_names()}
    names = {old: new for folder in folders for old, new in _data_names(folder).items()}
    return entries(loaded(folders), places_in_paper(folders), verified, names)


def _data_names(folder: Path) -> dict[str, str]:
    """``data-names.json`` of a folder of results: what data sets are called that some runs read from a file of another name."""
    from rescene.core.json_files import json_object

    file = folder / "data-names.json"
    return {str(old): str(new) for old, new in json_object(file, []).items()} if file.is_file() else {}


@leaderboard_app.command("check")
@verb
def check(
    folder: Annotated[Path, typer.Argument(help="folder of a finished run")],
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="rounds to run again; 0: compare files only")] = 1,
    minutes: Annotated[float, typer.Option("--minutes", help="no further round begins after so many minutes")] = 10.0,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Check a result before it is added: recipe, hashes, numbers, first rounds run again; exit code 5 if something differs."""
    load_plugins(plugin)

    def work() -> int:
        try:
            told = check_submission(folder, rounds, minutes)
        except ConfigError as error:
            if error.code not in ("E541", "E542", "E543", "E544", "E545"):
                raise
            refused = {"accepted": False, "code": error.code, "what": error.what, "why": (error.why or "").splitlines()}
            print(json.dumps(refused) if as_json else error, file=sys.stdout if as_json else sys.stderr)
            return 5
        print(json.dumps({"accepted": True, "checked": told}) if as_json else "\n".join([*told, "accepted"]))
        return 0

    interruptible(work)


def check_submission(folder: Path, rounds: int, minutes: float) -> list[str]:
    """What was checked, in sentences; ConfigError E541 to E545 with the difference if something does not agree."""
    from rescene.config import resolve
    from rescene.core.json_files import json_object, yaml_object
    from rescene.core.recipe_keys import flatten
    from rescene.report.leaderboard import POINTS, check_hashes, check_record, check_rounds

    run = check_record(folder)
    resolved = resolve(folder / "config.yaml")
    whole = (
        flatten(yaml_object(folder / "config.yaml", [])).keys() >= resolved.flat().keys()
    )  # keys came since: another hash
    digest = resolved.digest() if whole else None
    check_hashes(folder, digest)
    told = [
        f"recipe: config.yaml and results.json agree, {f'hash {digest}' if digest else 'hash of an older version not compared'}",
        f"numbers: AA {run.results.aa} and AIA {run.results.aia} follow from the accuracy matrix and metrics.jsonl",
    ]
    if not rounds:
        return [*told, "rounds: none held again (--rounds 0)"]
    with busy("holding the first rounds again"), tempfile.TemporaryDirectory() as place:
        from rescene.engine.loop import first_rounds

        again = Path(place) / "again"
        held = first_rounds(resolved, again, rounds, 60 * minutes)
        environment = json_object(again / "env.json", [])
        check_hashes(folder, digest, environment)
        moved = check_rounds(folder, held, environment)
    num = sum(row["kind"] == "round" for row in held)
    how = (
        f"sites alike, accuracies within {POINTS:g} points; here {'; '.join(moved)}"
        if moved
        else "every number the same"
    )
    return [*told, f"images: fingerprint {environment['data_fingerprint'][:16]}", f"rounds: {num} held again, {how}"]
