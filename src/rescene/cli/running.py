"""Running experiments: one, the demo, or a sweep, which is a grid of overrides times seeds with a run folder per cell."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from rescene.accel.cuda_graph import Streams, attempt
from rescene.api import Result, default_folder, execute, load
from rescene.cli.costing import NO_FORECAST, Priced, big, duration, load_or_stand_in, plan_columns, plan_words, price
from rescene.cli.progress import live_page, open_page, watch
from rescene.cli.terminal import accuracy_text, busy, print_rows, teller
from rescene.config import Resolved, resolve
from rescene.core.documents import parse_yaml
from rescene.core.errors import ConfigError, ResceneError, command, for_people
from rescene.core.json_files import Row
from rescene.core.method_style import style_of
from rescene.core.noised_accuracy import noise_line
from rescene.core.results import Leakage, read_events
from rescene.data import LazySplit
from rescene.engine import Experiment, pick_device, prepare_sizes
from rescene.engine.cost_ledger import nominal_cost
from rescene.engine.run_folder import refuse_others
from rescene.lens import seconds_to_look
from rescene.report import write_report
from rescene.report.formatting import count
from rescene.report.summary import write_card
from rescene.sweeps.cluster import on_cluster, read_settings
from rescene.sweeps.grid import SweepCell, constants, grid, varied
from rescene.sweeps.one_run import Order
from rescene.sweeps.search import SUMMARY, read_search, search_settings
from rescene.sweeps.workers import in_processes, slots, unexpected

Outcomes = Iterator[tuple[SweepCell, Result | Exception]]
MOST_TASKS = 10  # with more tasks the table at the end has no column for each of them


def run_one(
    resolved: Resolved,
    out: Path | None,
    quiet: bool,
    as_json: bool,
    told: bool = True,
    log: str = "",
    elsewhere: bool = False,
) -> None:
    """One run, with its report in its folder. ``told``: whether the result is printed."""
    folder = out or default_folder(resolved)
    page = folder / "report.html"
    with watch(quiet or as_json or not told) as show, live_page(show, [folder], page) as progress:
        result = execute(resolved, folder, progress, log, elsewhere)
    write_report([folder], page)
    write_card(folder)
    if as_json:
        print(json.dumps({"folder": str(result.folder), **result.values}))
        return
    if told:
        print_summary([result], page)


def run_demo(overrides: list[str], out: Path | None, quiet: bool, privacy: bool = False) -> None:
    """Three methods, or with ``privacy`` three recipes, side by side on the same sites, images and seed."""
    demos = parse_yaml((files("rescene.config") / "demos.yaml").read_text("utf-8"), "demos.yaml")
    demo = demos["privacy" if privacy else "methods"]
    cells: dict[str, list[str]] = demo["cells"]
    plans = [resolve(recipe, [*overrides, *own]) for recipe, *own in cells.values()]
    root = out or default_folder(plans[0]).parent
    if out is None and (overrides or privacy):
        root = root.with_name(f"demo-{plans[1].digest()}" if overrides else "demo-privacy")
    folders, page, results = [root / name for name in cells], root / "report.html", []
    with watch(quiet) as show, live_page(show, folders, page) as progress:
        for resolved, folder in zip(plans, folders, strict=True):
            results.append(execute(resolved, folder, progress))
            write_card(folder)
    print_summary(results, write_report(folders, page), list(cells) if privacy else [])
    if "note" in demo:
        print(demo["note"])
    print(f"Next, with your own images: {command(*demo['again'].split(), 'data.path=./images')}")


def plan_run(resolved: Resolved, out: Path | None, as_json: bool) -> None:
    """Print what a run would do: tasks, sites, sizes, bytes. It loads the data and trains nothing."""
    experiment = prepare_sizes(resolved.recipe)
    federation = resolved.recipe.federation
    cost = nominal_cost(experiment)
    facts: dict[str, Any] = {
        "folder": str(out or default_folder(resolved)),
        "method": experiment.method.title,
        "data": f"{experiment.dataset.name}, {len(experiment.dataset.train)} train and {len(experiment.dataset.test)} test images",
        "device": str(experiment.device),
        "sites": f"{federation.num_clients}, {federation.per_round} per round, {federation.num_rounds} rounds per task",
        "looking_s": looking_seconds(experiment),
        "cost": cost,
        "tasks": [
            {
                "task": task.index,
                "classes": ", ".join(experiment.dataset.classes[c] for c in task.classes),
                "train": len(task.train),
                "test": len(task.test),
                "images per site": f"at most {shards.size}, drawn on demand"
                if isinstance(shards, LazySplit)
                else f"{min(map(len, shards))} to {max(map(len, shards))}",
            }
            for task, shards in zip(experiment.tasks, experiment.shards, strict=True)
        ],
    }
    if as_json:
        print(json.dumps(facts))
        return
    for key in ("method", "data", "device", "sites", "folder"):
        print(f"{key:<8} {facts[key]}")
    if facts["looking_s"]:
        words = "about {} for all pictures through the lens {}; those that were looked at before take none"
        print(f"{'looking':<8} {words.format(duration(facts['looking_s']), resolved.recipe.model.lens)}")
    if cost:
        up, down = cost["uplink_bytes_per_message"] / 1e6, cost["downlink_bytes_per_message"] / 1e6
        print(f"{'bytes':<8} {up:.2f} MB up and {down:.2f} MB down per site and round (nominal)")
    print_rows([row | {"task": row["task"] + 1} for row in facts["tasks"]])
    print("dry run: nothing was trained")


def looking_seconds(experiment: Experiment) -> float:
    """Forecast of the seconds to look at all pictures of a run through its lens; 0 without a lens that takes time."""
    lens, dataset = experiment.recipe.model.lens, experiment.dataset
    if lens is None:
        return 0.0
    size = dataset.picture_size or dataset.image_size
    return round(seconds_to_look(lens, size, len(dataset.train) + len(dataset.test), experiment.device), 2)


def print_summary(
    results: list[Result], page: Path, names: Sequence[str] = (), settings: Sequence[dict[str, str]] = ()
) -> None:
    """Print the table at the end of a run, a demo or a sweep, and what left the sites.

    ``names``: of the rows, if they are not methods. ``settings``: what tells rows of one method apart.
    """
    rows: list[Row] = []
    statements: list[str] = []
    # a run that is older than the titles of methods has their names only
    titles = names or [str(result.record.style.get("title") or result.record.method) for result in results]
    for result, name, setting in zip(results, titles, settings or [{} for _ in results], strict=True):
        if noised := noise_line(read_events(result.folder, []), result.record):
            statements.append(f"{name}: {noised}")
        statements.append(f"{name}: {result.record.privacy.statement}")
        if unknown := result.record.not_measured.get("accuracy"):
            statements.append(f"{name}: accuracy {unknown}")
        rows.append({"recipe" if names else "method": name, **setting, **_scores(result)})
    print_rows(rows)
    print(*dict.fromkeys(statements), f"Report: {page}", sep="\n")


def _scores(result: Result) -> Row:
    """The cells of a run in that table."""
    record = result.record
    last = record.accuracy_matrix[-1]
    per_task = {f"T{j}": accuracy_text(v) for j, v in enumerate(last, start=1)} if len(last) <= MOST_TASKS else {}
    share = record.leakage.near_copies if record.leakage else None
    style = style_of(record.method, record.style)
    unknown = style.uploads == "images" and "leakage" in record.not_measured
    missing = style.without_images("not measured" if unknown else "no images sent")
    return {
        "AA": accuracy_text(record.aa),
        "AIA": accuracy_text(record.aia),
        **per_task,
        "forgetting": accuracy_text(record.forgetting),
        "up/site/round": f"{(result.upload_bytes or 0) / 1e6:.2f} MB",
        "near-copies": missing if share is None else f"{100 * share:.0f} %",
    }


@dataclass(frozen=True)
class SweepOptions:
    """How the runs of a sweep are run. ``jobs``: at the same time; None where nobody said."""

    jobs: int | None = None
    gpus: str = ""
    slurm: bool = False
    slurm_set: tuple[str, ...] = ()
    log: str = ""
    plugins: tuple[str, ...] = ()
    elsewhere: bool = False
    quiet: bool = False
    as_json: bool = False


def run_sweep(recipe: str, overrides: list[str], seeds: str, out: Path | None, how: SweepOptions) -> int:
    """Run every cell that is not done. A cell that fails is listed and the others go on. Returns how many failed."""
    cells = grid(recipe, overrides, seeds, out)
    page = cells[0].folder.parent / "report.html"
    results, failures = _sorted_out(cells, _outcomes(recipe, cells, how, page))
    if results:
        write_report([result.folder for result in results], page)
    if how.as_json:
        print_rows([*({"folder": str(r.folder), **_headline(r)} for r in results), *failures], as_json=True)
        return len(failures)
    if results:
        print_summary(results, page, settings=_settings(cells, results))
    if failures:
        print_rows(failures)
    return len(failures)


def run_search(
    recipe: str, overrides: list[str], seeds: str, out: Path | None, num_trials: int, metric: str, how: SweepOptions
) -> int:
    """Look for good settings on a validation part of the training images. Returns 0, or 1 if no trial gave a value."""
    root = out or default_folder(resolve(recipe, [])).parent.with_name(f"{Path(recipe).stem}-search")
    search = read_search(recipe, overrides, seeds, metric, root)
    hushed = replace(how, quiet=True)

    def run(cells: list[SweepCell]) -> Outcomes:
        return _outcomes(recipe, cells, hushed, None)

    at_once = len(_slots(how)) if how.gpus else how.jobs or 1
    found = search_settings(search, num_trials, max(1, at_once // len(search.seeds)), run, teller(how.quiet))
    if how.as_json:
        print(json.dumps(found))
        return found["best"] is None
    best_first = sorted(found["trials"], key=lambda row: -1.0 if row[metric] is None else row[metric], reverse=True)
    print_rows([row | {metric: accuracy_text(row[metric])} for row in best_first[:10]])
    print(f"Chosen on {found['chosen_on']}.")
    if found["test_command"]:
        print(f"Measure the best one on the test images, once: {found['test_command']}")
    print(f"All {len(found['trials'])} trials: {root / SUMMARY}")
    return found["best"] is None


def run_cells(
    cells: Sequence[SweepCell], quiet: bool, as_json: bool, page: Path | None = None, jobs: int = 1
) -> tuple[list[Result], list[Row]]:
    """Results of all cells that are done or could be run, and a row with the reason and the fix for each that failed.

    While cells run, ``page`` shows those that are there; without a page, each run has its own.
    """
    return _sorted_out(cells, _in_turn(cells, quiet, as_json, page) if jobs == 1 else _side_by_side(cells, quiet, jobs))


def _sorted_out(cells: Sequence[SweepCell], outcomes: Outcomes) -> tuple[list[Result], list[Row]]:
    """Results and failures, both in the order of the cells."""
    results: list[Result] = []
    failures: list[tuple[Path, Row]] = []
    for cell, outcome in outcomes:
        if isinstance(outcome, Result):
            results.append(outcome)
            continue
        known = outcome if isinstance(outcome, ResceneError) else unexpected(cell.folder, outcome)
        error = f"[{known.code}] {known.what}"
        failures.append((cell.folder, {"cell": " ".join(cell.overrides), "error": error, "fix": known.fix or ""}))
    place = {cell.folder: number for number, cell in enumerate(cells)}
    results.sort(key=lambda result: place[result.folder])
    return results, [row for _, row in sorted(failures, key=lambda pair: place[pair[0]])]


def _outcomes(recipe: str, cells: Sequence[SweepCell], how: SweepOptions, page: Path | None) -> Outcomes:
    """What each cell gave: on a cluster, in processes, in threads of one GPU, or one after the other.

    A finished cell that was made from another method, network or data set stops the sweep (E428) before anything runs.
    """
    for cell in cells:
        if cell.done:
            refuse_others(cell.folder, cell.resolved.recipe)
    orders = [Order(recipe, cell.overrides, str(cell.folder), how.log, how.plugins, how.elsewhere) for cell in cells]
    if how.slurm:
        names, tell = varied(cells), teller(how.quiet)
        jobs_there = on_cluster(
            cells, orders, read_settings(how.slurm_set), started=lambda i, job: tell(f"job {job}: {names[i]}")
        )
        return _watched(cells, jobs_there, how, page)
    jobs = how.jobs or 1
    if how.gpus or (jobs > 1 and (how.log or pick_device(cells[0].resolved.recipe.device).type != "cuda")):
        return _watched(cells, in_processes(cells, orders, _slots(how)), how, page)
    if jobs > 1:
        return _side_by_side(cells, how.quiet, jobs)
    return _in_turn(cells, how.quiet, how.as_json, page, how.log, how.elsewhere)


def _slots(how: SweepOptions) -> list[dict[str, str]]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return slots(how.jobs, how.gpus, cores, torch.cuda.device_count())


def _watched(
    cells: Sequence[SweepCell], outcomes: Iterator[tuple[int, Result | Exception]], how: SweepOptions, page: Path | None
) -> Outcomes:
    """The outcomes, with a line for each and a report that follows them."""
    names, tell = varied(cells), teller(how.quiet)
    whole = open_page([cell.folder for cell in cells], page) if page else nullcontext()
    with whole as live, closing(outcomes) as ended:  # type: ignore[type-var]
        for num, (number, outcome) in enumerate(ended, start=1):
            words = f"AA {accuracy_text(outcome.record.aa)}" if isinstance(outcome, Result) else "failed"
            tell(f"[{num}/{len(cells)}] {names[number]}: {words}")
            if live is not None and num < len(cells):
                live.perhaps()
            yield cells[number], outcome


def _in_turn(
    cells: Sequence[SweepCell], quiet: bool, as_json: bool, page: Path | None, log: str = "", elsewhere: bool = False
) -> Outcomes:
    names, tell = varied(cells), teller(quiet)
    whole = open_page([cell.folder for cell in cells], page) if page else nullcontext()
    with whole as common:
        for number, cell in enumerate(cells, start=1):
            tell(f"[{number}/{len(cells)}] {names[number - 1]} {'done before' if cell.done else ''}")
            if cell.done:
                yield cell, attempt(load, cell.folder)
                continue
            own = cell.folder / "report.html"
            one = nullcontext(common) if common else open_page([cell.folder], own)
            with watch(quiet or as_json) as show, one as live:
                outcome = _outcome(cell, live.after(show), log, elsewhere)
            if page is None and isinstance(outcome, Result):
                write_report([cell.folder], own)
            yield cell, outcome


def _outcome(
    cell: SweepCell,
    progress: Callable[[dict[str, Any]], None] = lambda event: None,
    log: str = "",
    elsewhere: bool = False,
) -> Result | Exception:
    """What a cell gave, or what stopped it."""
    found = attempt(partial(execute, cell.resolved, cell.folder, log=log, elsewhere=elsewhere), progress)
    if isinstance(found, Result):
        return found
    if os.environ.get("RESCENE_DEBUG"):
        traceback.print_exception(found)
    known = for_people(found)
    link: BaseException | None = found
    while link is not None:  # an error keeps what its frames held, and so memory that the next cell needs
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return known


def _side_by_side(cells: Sequence[SweepCell], quiet: bool, jobs: int) -> Outcomes:
    """Several at a time on one GPU, a thread and a stream for each."""
    device = pick_device(cells[0].resolved.recipe.device)
    if device.type != "cuda":
        raise ConfigError(
            "E119",
            f"--jobs {jobs} needs a GPU",
            why="on a CPU one run at a time already uses all cores",
            fix="leave --jobs out",
        )

    def result(cell: SweepCell) -> Result | Exception:
        return attempt(load, cell.folder) if cell.done else _outcome(cell)

    streams, tell = Streams(device, jobs), teller(quiet)
    try:
        outcomes = streams.outcomes(result, cells)
        for number, (cell, outcome) in enumerate(zip(cells, outcomes, strict=True), start=1):
            tell(f"[{number}/{len(cells)}] {' '.join(cell.overrides)}")
            yield cell, outcome
    except KeyboardInterrupt:
        print("interrupted; the same command continues every cell where it stands", file=sys.stderr)
        os._exit(130)  # threads cannot be interrupted, and a run can be stopped at any moment without loss


def plan_sweep(
    recipe: str, overrides: list[str], seeds: str, out: Path | None, search: int | None, metric: str, how: SweepOptions
) -> None:
    """Print what a sweep would run, or what the first trial of a search would, and what all of it costs."""
    if search is None:
        print_plan(grid(recipe, overrides, seeds, out), how.as_json, at_once=how.jobs or len(how.gpus.split(",")))
        return
    found = read_search(recipe, overrides, seeds, metric, out or Path("search"))
    first = found.cells({key: value[0] for key, value in found.space.items()})
    if not how.as_json:
        print(f"A search: {search} trials of {count(len(first), 'run')}. The first values of the ranges would cost:")
    print_plan(first, how.as_json)


def print_plan(cells: Sequence[SweepCell], as_json: bool, refused: Sequence[Row] = (), at_once: int = 1) -> None:
    """Print every cell with its state, cost and time, what all cells share, the sums over those not done, and problems.

    ``at_once``: how many runs go at the same time, for the time that is left in all.
    """
    rows: list[dict[str, Any]] = []
    totals: dict[str, dict[Path, dict[str, float]]] = {"to run": {}, "cannot run": {}}  # a folder is run once
    problems: dict[str, str] = {}
    unpriced: list[str] = []
    names = [" ".join(cell.overrides) for cell in cells] if as_json else varied(cells)
    for cell, name in zip(_one_by_one(cells), names, strict=True):
        row: dict[str, Any] = {"cell": name, "folder": str(cell.folder) if as_json else cell.folder.name}
        figures, problem, why = _figures(cell)
        unpriced += why
        if problem is not None and not cell.done:
            row["state"] = f"cannot run: {problem.code}"
            fix = cell.fix or problem.fix
            problems[f"[{problem.code}] {problem.what}"] = fix or ""
            if as_json:
                row |= {"problem": problem.what, "fix": fix}
        else:
            row["state"] = "done" if cell.done else "to run"
        rows.append(row | (figures if as_json or not figures else {} if cell.done else plan_words(figures)))
        if figures and not cell.done:
            totals["cannot run" if problem else "to run"][cell.folder] = figures
    if not as_json:
        rows += [
            {"cell": f"in all, {state}", "folder": "", "state": ""} | plan_words(_sum(list(found.values())))
            for state, found in totals.items()
            if found
        ]
    print_rows([*rows, *refused], as_json)
    if not as_json:
        _print_totals(cells, list(totals["to run"].values()), at_once)
        for what, fix in problems.items():
            print(f"{what}\n  fix: {fix}")
        for reason, num in Counter(unpriced).items():
            print(f"No cost in advance for {num} of {len(cells)} cells: {reason}.")


def _figures(cell: SweepCell) -> tuple[dict[str, float], ResceneError | None, list[str]]:
    """The cost of a cell as numbers, what keeps it from running, and why there is no cost."""
    priced = _priced(cell)
    if isinstance(priced, Priced):
        return plan_columns(priced), priced.missing, []
    if priced.code == NO_FORECAST:  # it may run all the same
        return {}, _missing(cell), [priced.why or ""]
    return {}, priced, []


def _print_totals(cells: Sequence[SweepCell], to_run: Sequence[dict[str, float]], at_once: int) -> None:
    """What all cells share, and what is left to do, in two lines."""
    folders = {cell.folder: cell for cell in cells}
    shared, places = " ".join(constants(cells)), {cell.folder.parent for cell in cells}
    if len(cells) > 1 and shared:
        print(f"In every cell: {shared}")
    if len(places) == 1:
        print(f"Folder: {places.pop()}")
    left = sum(not cell.done for cell in folders.values())
    words = f"{count(len(folders), 'run')}, {left} not done"
    if to_run:
        seconds, disk = (sum(own.get(key, 0.0) for own in to_run) for key in ("seconds", "disk_bytes"))
        beside = f" with {at_once} at a time" if at_once > 1 else ""
        words += f"; about {duration(seconds / at_once)}{beside} and {big(disk)}B of disk for the {len(to_run)} that have a forecast"
    print(f"{words}.")


def _priced(cell: SweepCell) -> Priced | ResceneError:
    """A cell's cost, or the error that says why it has none, such as a cell that is too large for this device."""
    found = attempt(price, cell.resolved)
    if isinstance(found, Priced):
        return found
    told = for_people(found)
    if not isinstance(told, ResceneError):
        raise found
    return told


def _sum(columns: Collection[dict[str, float]]) -> dict[str, float]:
    return {key: sum(own[key] for own in columns) for key in next(iter(columns))}


def _missing(cell: SweepCell) -> ResceneError | None:
    """The error about a cell's images, if they are not here."""
    try:
        return load_or_stand_in(cell.resolved.recipe.images)[1]
    except ResceneError as error:
        return error


def _one_by_one(cells: Sequence[SweepCell]) -> Iterator[SweepCell]:
    """The cells, one after the other, with a line that says which one is being priced."""
    with busy("measuring this device") as status:
        for number, cell in enumerate(cells, start=1):
            yield cell
            status.update(f"pricing cell {number} of {len(cells)} ...")


def _settings(cells: Sequence[SweepCell], results: Sequence[Result]) -> list[dict[str, str]]:
    """For each result, the overrides that the sweep varies, by the last part of their key, without the method."""
    chosen = {cell.folder: dict(text.split("=", 1) for text in cell.overrides) for cell in cells}
    varied = {key for key in chosen[cells[0].folder] if len({own[key] for own in chosen.values()}) > 1}
    varied -= {"method", "method.name"}
    return [
        {key.rpartition(".")[2]: value for key, value in chosen[result.folder].items() if key in varied}
        for result in results
    ]


def _headline(result: Result) -> dict[str, Any]:
    keys = ("method", "seed", "aa", "aia", "old", "recent", "forgetting")
    leakage = result.record.leakage or Leakage()
    return {key: getattr(result.record, key) for key in keys} | {"near_copies": leakage.near_copies}
