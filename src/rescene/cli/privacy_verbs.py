"""Guarantees: privacy, audit, forget."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.shared_options import (
    AsJson,
    Overrides,
    Plugin,
    Quiet,
    RecipeOrRun,
    recipe_of,
    run_config,
)
from rescene.cli.terminal import interruptible, print_rows, teller
from rescene.core.errors import ConfigError, DataError, RunError, command, did_you_mean
from rescene.core.json_files import Row, record_file
from rescene.core.results import Partition
from rescene.core.run_state import is_done, state_of

if TYPE_CHECKING:
    from rescene.audit import AuditScale
    from rescene.config import Recipe, Resolved
    from rescene.deploy.federation_folder import FederationFolder
    from rescene.privacy.ledger import Ledger
    from rescene.privacy.promise import Promise

WIDTH = 118  # of sentences
ATTACKS = {
    "photograph, replay": "knows all but this one photograph",
    "photograph, look": "looks for the photograph among the uploads",
    "giant, replay": "the same as the first, with a record made to break the clip",
}


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
    from rescene.privacy.promise import trade_off_rows

    if epsilon is not None and sigma is not None:
        raise ConfigError("E176", "--epsilon and --sigma cannot both be given", fix="give one; the other follows")
    recipe = resolved.recipe
    method, kind = method_class(recipe.method["name"]), recipe.privacy.mechanism
    if kind == "paper-experiment":
        if epsilon is not None or sigma is not None:
            raise ConfigError("E176", "the paper's experiment has no epsilon", fix="privacy.mechanism=release")
        empirical = recipe.promise(1)
        assert empirical is not None  # it has a mechanism
        _print_privacy({"method": method.title, "mechanism": kind, "statement": empirical.words()}, [], as_json)
        return
    if kind == "none" and not set(FORMAL) & set(method.mechanisms):
        statement = f"Not private, and no mechanism covers it: {method.unprotected or method.leaves_site}."
        _print_privacy({"method": method.title, "mechanism": kind, "statement": statement}, [], as_json)
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
        "trust": promise.trust.removeprefix("Trust: "),
        "composition": promise.whole.words(),
        "delta": promise.delta,
    }
    rows = trade_off_rows(promise.mechanism, promise.whole, promise.delta, epsilon, sigma)
    _print_privacy(facts, rows, as_json, asdict(promise.whole))


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


def _print_privacy(facts: Row, rows: list[Row], as_json: bool, composition: Row | None = None) -> None:
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
            print_rows([_release_row(row, ("asked for",) if silent else ()) for row in facts["releases"]])
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


def _release_row(row: Row, without: tuple[str, ...]) -> Row:
    numbers = {key: "no bound" if row[key] is None else f"{row[key]:.4g}" for key in ("epsilon", "total")}
    counted = {"task": row["task"] + 1, "round": None if row["round"] < 0 else row["round"] + 1}
    short = {"released": "not sent" if row["released"] is None else row["released"][:12]}
    size = {"bytes": "-" if row["bytes"] is None else f"{row['bytes']:,}"}
    found = row | counted | short | numbers | size | {"sigma": f"{row['sigma']:.4g}"}
    return {key: value for key, value in found.items() if key not in without}


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
    from rescene.audit import AuditScale
    from rescene.config import resolve
    from rescene.engine import use_all_cores
    from rescene.engine.checkpoint import write_json

    use_all_cores()
    tell = teller(quiet or as_json)
    run = None if everything else _audited_run(what, overrides or [])
    if everything:
        found, rows, good = _red_team(tell)
    else:
        recipe = resolve(run / "config.yaml" if run else what, overrides or []).recipe
        scale = AuditScale(canaries, shadows, targets, participations)
        found, rows, good = _controls(recipe, canaries) if controls else _attacks(recipe, run, scale, tell)
    out = out or (run / "audit.json" if run and not controls else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, found)
    if as_json:
        print(json.dumps(found))
    else:
        _print_audit(found, rows, out)
    if not good:
        raise typer.Exit(5)


def _audited_run(what: str, overrides: Sequence[str]) -> Path | None:
    """The run folder that is to be audited; None if ``what`` is a recipe."""
    folder = Path(what)
    if not folder.is_dir():
        return None
    run_config(folder)
    if overrides:
        raise ConfigError(
            "E198",
            "a finished run cannot be audited with other settings",
            where=", ".join(overrides),
            fix=f"{command('audit', folder / 'config.yaml')} ...",
        )
    return folder


def _attacks(
    recipe: Recipe, run: Path | None, scale: AuditScale, tell: Callable[[str], None]
) -> tuple[Row, list[Row], bool]:
    """What attacks on a recipe or a run found, a row for each attack, and whether no promise is broken."""
    from rescene.audit import audit as attack
    from rescene.audit import audit_words

    found = attack(recipe, run, scale, tell)
    found["words"] = audit_words(found)
    rows = [
        {
            "attack": row["attack"],
            "what it does": ATTACKS[row["attack"]],
            "right": f"{row['num_right']} of {row['num_guesses']}",
            "epsilon at least": f"{row['epsilon']:.2f}",
            "promised at most": "-" if found["promised"] is None else f"{found['promised']:.2f}",
        }
        for row in found["canaries"]
    ]
    return found, rows, found["verdict"] != "contradicted"


def _controls(recipe: Recipe, num_canaries: int) -> tuple[Row, list[Row], bool]:
    """The same of sites that are broken on purpose, and whether the attacks noticed all of them."""
    from rescene.audit import control_words, run_controls, stage_of
    from rescene.engine import prepare

    found = run_controls(stage_of(prepare(recipe)), num_canaries)
    rows = [
        {
            "broken on purpose": row["control"],
            "claimed epsilon": f"{row['claimed']:g}",
            "shown, broken": f">= {row['broken']:.2f}",
            "shown, sound twin": f">= {row['sound']:.2f}",
            "control": "fired" if row["fired"] else "DID NOT FIRE",
        }
        for row in found
    ]
    return {"schema": 1, "controls": found, "words": [control_words(found)]}, rows, all(r["fired"] for r in found)


def _red_team(tell: Callable[[str], None]) -> tuple[Row, list[Row], bool]:
    """The same of every claim, and whether all that were attacked held and all controls fired."""
    from rescene.audit import red_team, red_team_words

    found = red_team(tell)
    rows = [
        {
            "claim": row.claim,
            "attack": row.attack,
            "positive control": row.control,
            "found": row.found,
            "promised at most": row.promised,
            "verdict": row.verdict + (f": {row.note}" if row.note else ""),
        }
        for row in found
    ]
    facts = {"schema": 1, "rows": [asdict(row) for row in found], "words": [red_team_words(found)]}
    return facts, rows, all(row.good for row in found)


def _print_audit(found: Row, rows: list[Row], out: Path | None) -> None:
    if "method" in found:
        print(f"{found['method']} on {found['data']}, mechanism {found['mechanism']}, start {found['start']}\n")
    print_rows(rows)
    print()
    for sentence in found["words"]:
        print(textwrap.fill(sentence, WIDTH))
    if out:
        print(out)


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
    interruptible(lambda: _withdraw(folder, client, check, charge, out, quiet, as_json))


def _withdraw(folder: Path, word: str, check: bool, charge: bool, out: Path | None, quiet: bool, as_json: bool) -> None:
    """The run without a site, in a folder of its own; says what was done and what to do next."""
    from rescene.cli.progress import watch
    from rescene.config import resolve
    from rescene.deploy.operator import federation_of, leave, place_without
    from rescene.engine import RunFolder, use_all_cores
    from rescene.engine.withdrawal import check_can_forget, cost_in_words, forget, sums_again
    from rescene.report import write_report
    from rescene.report.summary import write_card

    resolved, federation, source = resolve(run_config(folder)), federation_of(folder), RunFolder(folder)
    client, name = _site(word, federation.sites if federation else _site_names(folder))
    check_can_forget(resolved, client, source, across=federation is not None)
    _check_still(folder)
    if check:
        _check_comparable(folder, federation is not None, sums_again(resolved), source.finished)
    if federation and out is not None:
        raise ConfigError(
            "E194", "the new run of a federation has a fixed place beside the old one", fix="leave out --out"
        )
    place = place_without(federation, folder, client) if federation else out or Path(f"{folder}-forgot-{client}")
    if place.resolve() == folder.resolve():
        raise ConfigError("E186", "a run is never overwritten", where="--out", fix="another --out")
    if charge and sums_again(resolved) and not as_json:
        print(cost_in_words(resolved, client))
    use_all_cores()
    with watch(quiet or as_json) as progress:
        record = forget(source, resolved, client, RunFolder(place), progress, name, charge)
    if federation and name:
        leave(federation, [name], place)
    never = _compare(resolved, client, folder, place, record, quiet or as_json) if check else None
    done = is_done(place)
    if done:
        write_card(place)
    write_report([place], place / "report.html")
    if as_json:
        print(json.dumps({"folder": str(place), "finished": done, "forgotten": record, "check": never}))
        return
    _print_withdrawal(record, folder, place, never, federation, done)


def _site_names(folder: Path) -> Sequence[str]:
    """Names of the sites of a simulated run, where the data have some."""
    return record_file(Partition, folder / "partition.json", []).sites


def _site(word: str, names: Sequence[str]) -> tuple[int, str | None]:
    """Number and, where sites have names, name of a site that is given by either.

    If a site has a number for a name, names alone count: one site's number may be another one's name.
    """
    if word.isdecimal() and not any(map(str.isdecimal, names)):
        number = int(word)
        return number, names[number] if number < len(names) else None
    if word in names:
        return names.index(word), word
    fix = did_you_mean(word, names) or (f"sites: {', '.join(names)}" if names else "give its number")
    raise ConfigError("E166", f"no site is called {word!r}", where="--client", fix=fix)


def _check_still(folder: Path) -> None:
    if state_of(folder) == "running":
        raise RunError(
            "E421",
            "the run is still going, and the site takes part in it",
            where=str(folder),
            fix="stop it (Ctrl-C; every finished round is saved), then the same command",
        )


def _check_comparable(folder: Path, across: bool, summed: bool, finished: bool) -> None:
    """Refuse ``--check`` where the run cannot be compared with one that never saw the site."""
    if across:
        why, fix = "sites are not asked again for a comparison", "leave out --check"
    elif summed:
        why, fix = "behind secure sums the new run is the one that never saw the site", "leave out --check"
    elif not finished:
        why, fix = "it compares finished runs", f"{command('resume', folder)} first, or leave out --check"
    else:
        return
    raise ConfigError("E164", "--check is not possible here", where=str(folder), why=why, fix=fix)


def _compare(resolved: Resolved, client: int, folder: Path, place: Path, record: Row, silent: bool) -> Row:
    """Run the recipe as if the site had never been there; what differs, as withdrawal.json in the new folder."""
    from rescene.api import execute, load
    from rescene.cli.progress import watch
    from rescene.engine import prepare
    from rescene.engine.checkpoint import write_json
    from rescene.engine.withdrawal import accuracy_on
    from rescene.nets import load_weights

    recipe = resolved.recipe.without(client)
    with watch(silent) as progress:
        never = execute(replace(resolved, recipe=recipe), Path(f"{folder}-never-{client}"), progress)
    before, after = load(folder), load(place)
    experiment = prepare(recipe)
    model = load_weights(never.folder / "model" / "final.safetensors")
    found = {
        "schema": 1,
        "client": client,
        "never": never.folder.name,
        "aa": {"before": before.aa, "after": after.aa, "never": never.aa},
        "per_task": {
            "before": record["per_task_before"],
            "after": record["per_task_after"],
            "never": never.record.accuracy_matrix[-1],
        },
        "own_images": {
            "before": record["own_images_before"],
            "after": record["own_images_after"],
            "never": accuracy_on(experiment, model, client, experiment.tasks),
        },
        "remains": record["remains"],
    }
    write_json(place / "withdrawal.json", found)
    return found


def _print_withdrawal(
    record: Row, folder: Path, place: Path, never: Row | None, federation: FederationFolder | None, done: bool
) -> None:
    from rescene.report.formatting import bytes_text

    site = record["name"] or record["client"]
    exact, again = record.get("exact", False), record.get("summed_again", False)
    if again:
        print(f"Sums without site {site} were taken anew, with fresh noise; the old ones are not in this run.")
    else:
        what = f"sums over {record['num_images']} images" if exact else f"{record['num_images']} images"
        print(f"Removed of site {site}: {what}, {bytes_text(record['bytes'])}", end="")
        print(f"; {record['num_images_left']} of other sites remain.")
    if record["removed"]:
        print_rows(row | {"task": row["task"] + 1 if row["task"] != "all" else "all"} for row in record["removed"])
    if record["classes_lost"]:
        print(f"Nobody else sent images of {', '.join(record['classes_lost'])}: the model has lost them.")
    if not exact:
        print(f"The model was trained from the run's first weights for {record['epochs']} epochs on what remains.")
    print_rows(_accuracies(record, never))
    print(
        "The model is that of the run that never met the site, with other noise. What remains:"
        if again
        else "The site's sums are subtracted and the model is solved anew: it is the model that never met the site (another run of "
        "it would draw other noise, where sites add any). What remains:"
        if exact
        else "Uploads are removed and the model is trained anew. This is no proof of unlearning; what may remain:"
    )
    for words in record["remains"]:
        print(f"  - {words}")
    print(f"  - {folder} still holds everything: remove it, its exports and its backups when you no longer need them")
    print(f"Run: {place}")
    if federation:
        print(f"The federation goes on there, without the site: {command('deploy', 'run', federation.path, 'RECIPE')}")
    elif not done:
        print(f"Go on with: {command('resume', place)}")
    print(f"Report: {place / 'report.html'}")


def _accuracies(record: Row, never: Row | None) -> list[Row]:
    """Before, after, and of the run that never saw the site."""
    told = [
        (words, record[f"{key}_before"], record[f"{key}_after"], never[other]["never"] if never else None)
        for words, key, other in (
            ("all classes so far", "accuracy", "aa"),
            ("the site's own images", "own_images", "own_images"),
        )
    ]
    tasks = zip(record["per_task_before"] or (), record["per_task_after"] or (), strict=True)
    told += [
        (f"task {task + 1}", before, after, never["per_task"]["never"][task] if never else None)
        for task, (before, after) in enumerate(tasks)
    ]
    return [
        {"accuracy on": words, "before": _percent(before), "after": _percent(after)}
        | ({"never saw the site": _percent(unseen)} if never else {})
        for words, before, after, unseen in told
    ]


def _percent(value: float | None) -> str:
    return "measured at the sites, in the next round" if value is None else f"{value:.1f}"
