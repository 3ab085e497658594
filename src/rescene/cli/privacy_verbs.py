"""Guarantees: privacy, audit, forget."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.shared_options import AsJson, Overrides, Plugin, Quiet, RecipeOrRun, load_plugins, recipe_of
from rescene.cli.terminal import interruptible, print_rows, verb
from rescene.core.errors import ConfigError, DataError, RunError
from rescene.core.json_files import Row

if TYPE_CHECKING:
    from rescene.config import Resolved
    from rescene.privacy.ledger import Ledger
    from rescene.privacy.promise import Promise

WIDTH = 118  # of sentences


@verb
def privacy(
    recipe: RecipeOrRun = "",
    overrides: Overrides = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="target epsilon: prints the noise multiplier that reaches it")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option("--sigma", help="noise multiplier: prints the epsilon that results from it")
    ] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="delta (default: privacy.delta of the recipe)")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="folder of a site or a run: show what was released, its cost and the floor"),
    ] = None,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Say what is guaranteed for an image over the whole run: epsilon for a noise multiplier, and back."""
    load_plugins(plugin)
    if ledger is not None:
        show_ledger(ledger, as_json)
        return
    from rescene.config import resolve

    if not recipe:
        raise ConfigError(
            "E176",
            "a recipe or a ledger is missing",
            fix="rescene privacy RECIPE or RUN, or rescene privacy --ledger FOLDER",
        )
    show_privacy(resolve(recipe_of(recipe), overrides or []), epsilon, sigma, delta, as_json)


def show_privacy(
    resolved: Resolved, epsilon: float | None, sigma: float | None, delta: float | None, as_json: bool
) -> None:
    """Print what a recipe guarantees, and rows of noise against epsilon in both directions or the one asked for."""
    from rescene.methods import method_class
    from rescene.privacy.accounting import NEIGHBOURS, check_target
    from rescene.privacy.mechanism import FORMAL
    from rescene.privacy.promise import trade_off_rows, trust

    if epsilon is not None and sigma is not None:
        raise ConfigError("E176", "--epsilon and --sigma cannot both be given", fix="give one; the other follows")
    recipe = resolved.recipe
    method, kind = method_class(recipe.method["name"]), recipe.privacy.mechanism
    if kind == "paper-experiment":
        if epsilon is not None or sigma is not None:
            raise ConfigError("E176", "the paper's experiment has no epsilon", fix="privacy.mechanism=release")
        empirical = recipe.promise(1)
        assert empirical is not None  # it has a mechanism
        _print({"method": method.title, "mechanism": kind, "statement": empirical.words()}, [], as_json)
        return
    if kind == "none" and not set(FORMAL) & set(method.mechanisms):
        statement = f"Not private, and no mechanism covers it: {method.unprotected or method.leaves_site}."
        _print({"method": method.title, "mechanism": kind, "statement": statement}, [], as_json)
        return
    if sigma is not None and not sigma > 0:
        raise ConfigError("E171", f"noise multiplier {sigma:g} is not possible", fix="a number above 0")
    num_records, num_tasks = _sizes(resolved)
    promise = _promise(resolved, delta, num_tasks)
    check_target(epsilon, promise.delta, num_records)
    facts = {
        "method": method.title,
        "mechanism": kind,
        "leaves the site": method.leaving(promise.mechanism if kind in FORMAL else None),
        "statement": promise.words() if kind in FORMAL else f"Not private. With {promise.mechanism.kind} it would be:",
        "neighbours": NEIGHBOURS,
        "trust": trust(promise.mechanism.honest_sites, promise.mechanism.late_alone).removeprefix("Trust: "),
        "composition": promise.whole.words(),
        "delta": promise.delta,
    }
    rows = trade_off_rows(promise.mechanism, promise.whole, promise.delta, epsilon, sigma)
    _print(facts, rows, as_json, asdict(promise.whole))


def _promise(resolved: Resolved, delta: float | None, num_tasks: int) -> Promise:
    """The recipe's promise, at another delta if one is given; without a mechanism, that of its method's first one."""
    from rescene.methods import method_class
    from rescene.privacy.accounting import check_target
    from rescene.privacy.mechanism import FORMAL

    check_target(delta=delta)
    recipe = resolved.recipe
    change: Row = {} if delta is None else {"delta": delta}
    if recipe.privacy.mechanism == "none":
        usable = method_class(recipe.method["name"]).mechanisms
        change |= {"mechanism": next(kind for kind in usable if kind in FORMAL), "noise_multiplier": 1.0}
    section = recipe.privacy.model_copy(update=change)
    found = recipe.model_copy(update={"privacy": section}).promise(num_tasks)
    assert found is not None  # it has a mechanism
    return found


def _sizes(resolved: Resolved) -> tuple[int | None, int]:
    """The numbers of training images and of tasks. Where the images are not here, only the number of tasks counts."""
    from rescene.engine.experiment import load_data, planned
    from rescene.methods import method_class

    recipe = resolved.recipe
    try:
        data = load_data(recipe.images)
    except DataError:
        if recipe.tasks.limit is None and method_class(recipe.method["name"]).reuses_records:
            raise
        return None, recipe.tasks.limit or 1
    return len(data.train), len(planned(recipe, data)[1])


def _print(facts: Row, rows: list[Row], as_json: bool, composition: Row | None = None) -> None:
    from rescene.privacy.promise import OUTSIDE

    if as_json:
        print(json.dumps(facts | {"rows": rows, "counts": composition}))
        return
    for key, value in facts.items():
        print(textwrap.fill(f"{key}: {value}", WIDTH, subsequent_indent="  "))
    if rows:
        print()
        print_rows([{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])
        print(OUTSIDE)


def show_ledger(folder: Path, as_json: bool) -> None:
    """Print a table per site: what left it, who asked, what it cost, and the total for the most-used image."""
    from rescene.privacy.ledger import ledger_facts

    told = {name: ledger_facts(ledger) for name, ledger in _ledgers(folder).items()}
    if as_json:
        print(json.dumps(told))
        return
    for name, facts in told.items():
        print(f"{name}. Floor: {facts['floor']}")
        if facts["releases"]:
            print(f"epsilon and total are at delta {facts['delta']:g}; the total is that of {facts['total of']}\n")
            silent = not any(row["asked for"] for row in facts["releases"])  # a simulation's server asks nobody
            print_rows([_shown(row, ("asked for",) if silent else ()) for row in facts["releases"]])
        else:
            print("nothing was released")
        print()


def _ledgers(folder: Path) -> dict[str, Ledger]:
    """The ledger of a site's folder, or those of a run folder; by name."""
    from rescene.deploy.site import Site
    from rescene.deploy.site_config import ledger_of
    from rescene.privacy.ledger import Ledger

    if (folder / "site.yaml").is_file():
        site = Site.open(folder)
        return {f"site {site.section.client}": ledger_of(site.section, folder)}
    place = folder / "ledgers" if (folder / "ledgers").is_dir() else folder
    paths = sorted(place.glob("client-*.jsonl"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise RunError(
            "E425",
            "no privacy ledger is here",
            where=str(folder),
            fix="the folder of a site (with site.yaml), of a run that had a privacy mechanism, or the one that "
            "$RESCENE_LEDGERS named when it ran",
        )
    return {path.stem.replace("-", " "): Ledger(path) for path in paths}


def _shown(row: Row, without: tuple[str, ...]) -> Row:
    numbers = {key: "no bound" if row[key] is None else f"{row[key]:.4g}" for key in ("epsilon", "total")}
    counted = {"task": row["task"] + 1, "round": None if row["round"] < 0 else row["round"] + 1}
    short = {"released": "not sent" if row["released"] is None else row["released"][:12]}
    size = {"bytes": "-" if row["bytes"] is None else f"{row['bytes']:,}"}
    found = row | counted | short | numbers | size | {"sigma": f"{row['sigma']:.4g}"}
    return {key: value for key, value in found.items() if key not in without}


@verb
def audit(
    what: Annotated[str, typer.Argument(help="recipe, recipe file or run folder")] = "demo",
    overrides: Overrides = None,
    everything: Annotated[
        bool, typer.Option("--all", help="attack every claim that rescene makes; one table, a few minutes")
    ] = False,
    controls: Annotated[
        bool, typer.Option("--controls", help="break privacy in five ways, and say whether the attacks notice")
    ] = False,
    canaries: Annotated[
        int, typer.Option("--canaries", min=20, help="canaries of each kind; more of them can show a larger epsilon")
    ] = 200,
    shadows: Annotated[int, typer.Option("--shadows", min=8, help="number of shadow condensations")] = 64,
    targets: Annotated[int, typer.Option("--targets", min=2, help="images whose membership is guessed")] = 64,
    participations: Annotated[
        int | None,
        typer.Option(
            "--participations", min=1, help="number of participations to attack (default: all that the recipe allows)"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file (default: audit.json in a run folder)")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Attack what sites upload; exit code 5 if an attack breaks a promise or misses a leak made on purpose."""
    load_plugins(plugin)
    from rescene.audit import AuditScale
    from rescene.cli.audit_report import run_audit, run_red_team

    if everything:
        good = run_red_team(out, quiet, as_json)
    else:
        scale = AuditScale(canaries, shadows, targets, participations)
        good = run_audit(what, list(overrides or []), controls, scale, out, quiet, as_json)
    if not good:
        raise typer.Exit(5)


@verb
def forget(
    folder: Annotated[Path, typer.Argument(help="run folder; also one of a federation's server")],
    client: Annotated[str, typer.Option("--client", help="the site that leaves: its number, or its name")],
    check: Annotated[
        bool, typer.Option("--check", help="also run the recipe as if the site had never been there, and compare")
    ] = False,
    charge: Annotated[
        bool,
        typer.Option("--charge", help="with secure sums: take new sums, which charges the other sites' images again"),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="new run folder (default: RUN-forgot-<site>)")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Remove a site that withdraws: its uploads go, the model is trained again on the rest, the site is not asked again."""
    load_plugins(plugin)
    from rescene.cli.forgetting import forget as withdraw

    interruptible(lambda: withdraw(folder, client, check, charge, out, quiet, as_json))
