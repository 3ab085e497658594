"""rescene forget: a site withdraws from a run; what was removed, what it cost, and what the run would be without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rescene.api import execute, load
from rescene.cli.progress import watch
from rescene.cli.terminal import print_rows
from rescene.config import Resolved, resolve
from rescene.core.errors import ConfigError, RunError, command, did_you_mean
from rescene.core.json_files import Row
from rescene.core.run_state import is_done, state_of
from rescene.deploy.control import federation_of, leave, place_without
from rescene.deploy.federation_folder import FederationFolder
from rescene.engine import RunFolder, prepare, use_all_cores
from rescene.engine.checkpoint import write_json
from rescene.engine.withdrawal import accuracy_on, check_can_forget, cost_in_words, sums_again
from rescene.engine.withdrawal import forget as withdraw
from rescene.nets import load_weights
from rescene.report import write_report
from rescene.report.formatting import bytes_text
from rescene.report.summary import write_card


def forget(folder: Path, word: str, check: bool, charge: bool, out: Path | None, quiet: bool, as_json: bool) -> None:
    """The run without a site, in a folder of its own; says what was done and what to do next."""
    config, federation = folder / "config.yaml", federation_of(folder)
    if not config.is_file():
        raise ConfigError(
            "E108", "not a run folder", where=str(folder), why="it has no config.yaml", fix="rescene runs"
        )
    resolved, source = resolve(config), RunFolder(folder)
    client, name = _site(word, federation)
    check_can_forget(resolved, client, source, across=federation is not None)
    _check_still(folder)
    if check and (federation or sums_again(resolved) or not source.finished):
        why, fix = "it compares finished runs", f"{command('resume', folder)} first, or leave out --check"
        if federation:
            why, fix = "sites are not asked again for a comparison", "leave out --check"
        elif sums_again(resolved):
            why, fix = "behind secure sums the new run is the one that never saw the site", "leave out --check"
        raise ConfigError("E164", "--check is not possible here", where=str(folder), why=why, fix=fix)
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
        record = withdraw(source, resolved, client, RunFolder(place), progress, name, charge)
    if federation and name:
        leave(federation, name, place)
    never = _compare(resolved, client, folder, place, record, quiet or as_json) if check else None
    done = is_done(place)
    if done:
        write_card(place)
    write_report([place], place / "report.html")
    if as_json:
        print(json.dumps({"folder": str(place), "finished": done, "forgotten": record, "check": never}))
        return
    _tell(record, folder, place, never, federation, done)


def _site(word: str, federation: FederationFolder | None) -> tuple[int, str | None]:
    """Number and, in a federation, name of a site that is given by either."""
    names = federation.sites if federation else []
    if word.isdecimal():
        number = int(word)
        return number, names[number] if number < len(names) else None
    if word in names:
        return names.index(word), word
    close = did_you_mean(word, names)
    fix = f"did you mean {close}?" if close else f"sites: {', '.join(names)}" if names else "give its number"
    raise ConfigError("E166", f"no site is called {word!r}", where="--client", fix=fix)


def _check_still(folder: Path) -> None:
    if state_of(folder) == "running":
        raise RunError(
            "E421",
            "the run is still going, and the site takes part in it",
            where=str(folder),
            fix="stop it (Ctrl-C; every finished round is saved), then the same command",
        )


def _compare(resolved: Resolved, client: int, folder: Path, place: Path, record: Row, silent: bool) -> Row:
    """Run the recipe as if the site had never been there; what differs, as withdrawal.json in the new folder."""
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


def _tell(
    record: Row, folder: Path, place: Path, never: Row | None, federation: FederationFolder | None, done: bool
) -> None:
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
        else "The site's sums are subtracted and the model is solved anew: it is the model that never met the site. What remains:"
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
    keys = {"all classes so far": "accuracy", "the site's own images": "own_images"}
    rows = []
    for words, key in keys.items():
        row = {
            "accuracy on": words,
            "before": _percent(record[f"{key}_before"]),
            "after": _percent(record[f"{key}_after"]),
        }
        if never:
            row["never saw the site"] = _percent(never["aa" if key == "accuracy" else key]["never"])
        rows.append(row)
    for task, cells in enumerate(zip(record["per_task_before"] or (), record["per_task_after"] or (), strict=True)):
        row = {"accuracy on": f"task {task + 1}", "before": _percent(cells[0]), "after": _percent(cells[1])}
        if never:
            row["never saw the site"] = _percent(never["per_task"]["never"][task])
        rows.append(row)
    return rows


def _percent(value: float | None) -> str:
    return "measured at the sites, in the next round" if value is None else f"{value:.1f}"
