"""Real sites: a federation across them (deploy, scale), and the use of a finished model (export, predict, serve)."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rescene.cli.shared_options import (
    AsJson,
    Elsewhere,
    FinishedRun,
    Overrides,
    Plugin,
    Quiet,
    RecipeName,
    ServerGflops,
    plugin_words,
    verb_group,
)
from rescene.cli.start_verbs import print_verdict
from rescene.cli.terminal import console, interruptible, position, print_rows, teller, until_stopped
from rescene.core.errors import ConfigError, DataError, ResceneError, command
from rescene.core.results import read_results
from rescene.core.run_state import finished_in
from rescene.deploy.federation_folder import FederationFolder, classes_of, images_of
from rescene.deploy.federation_folder import init as make_folder

if TYPE_CHECKING:
    from rescene.config.site_sections import SitesSection
    from rescene.deploy.trial import Trial
    from rescene.report.galleries import Preview
    from rescene.use import Model, Prediction

deploy_app = verb_group("Run a federation across real sites, over Flower. Start with: rescene deploy rehearse")
FolderArgument = Annotated[Path, typer.Argument(help="folder of the federation")]
SiteFolder = Annotated[Path, typer.Argument(help="the site's own folder")]
EitherFolder = Annotated[Path, typer.Argument(help="folder of the federation, or of one site")]
Wait = Annotated[
    bool, typer.Option("--wait", help="stay in the foreground and stop everything at the end (for systemd)")
]
Serve = Annotated[bool, typer.Option("--serve", help="show the run live on a page of this machine")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="port of that page; 0: any free port")]
ModelPath = Annotated[Path, typer.Argument(help="finished run folder, or a .safetensors, .onnx or .pt2 file")]
Trust = Annotated[bool, typer.Option("--trust", help="open a .pt2 file, which can run code of the person who made it")]
ANSWER_FORMATS = ("table", "json", "csv")


@deploy_app.command()
def init(
    name: Annotated[Path, typer.Argument(help="new folder; its last part is the federation's name")],
    sites: Annotated[str, typer.Option("--sites", help="names of the sites, separated by commas")],
    host: Annotated[str, typer.Option("--host", help="address at which sites reach the server")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    data: Annotated[
        Path | None, typer.Option("--data", help="images of the sites on this machine: FOLDER/SITE/CLASS/")
    ] = None,
) -> None:
    """Make keys, certificates, and one folder for each site."""
    names = [site.strip() for site in sites.split(",")]
    images = images_of(data, names) if data else {}
    federation = make_folder(name, names, host, port, images)
    print(f"{federation.path}: folder of the server; server/ca.key and server/server.key stay here")
    for site in federation.sites:
        print(f"{federation.site(site)}: bring it to {site} in a safe way: node.key is the identity of the site")
    _print_next(name, federation, classes_of(images.values()))


def _print_next(name: Path, federation: FederationFolder, classes: Sequence[str]) -> None:
    """The way from a new folder to a run on the sites' own images; ``classes``: theirs, if the images are known."""
    places = [str(federation.site(site)) for site in federation.sites] if classes else ["FOLDER"]
    at_sites = [
        f"at each site: {command('deploy', 'check', place, '--recipe', 'own')}; {command('deploy', 'site', place)}"
        for place in places
    ]
    known = ",".join(classes) or "CLASS,CLASS"
    steps = [
        command("deploy", "add-classes", name, known, "--rounds", "1", "--image-size", "32"),
        command("deploy", "server", name),
        *at_sites,
        command("deploy", "run", name, "own"),
    ]
    if not classes:
        steps.insert(0, "at each site, in site.yaml: holds: own, and data: {path: IMAGES} with one folder per class")
    print("next, for images of your own:")
    for number, step in enumerate(steps, start=1):
        print(f"  {number}. {step}")
    print("without images of your own, on small pictures that come with the package: rescene deploy rehearse")


@deploy_app.command()
def check(
    folder: EitherFolder,
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option("--recipe", help="what to try at a site: shipped recipe or file")] = "demo",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="condensation steps, to try it quickly")] = None,
    trial: Annotated[
        bool, typer.Option("--trial/--no-trial", help="at a site: work through one round and send nothing")
    ] = True,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Check a server or a site, and try a round at the site: nothing is sent; exit code 5 if something needs fixing."""
    if (folder / "federation.yaml").is_file():
        from rescene.deploy.checks import check_server

        _print_checks(check_server(FederationFolder.open(folder)), {}, as_json)
    elif (folder / "site.yaml").is_file():
        chosen = [*(overrides or []), *([f"method.num_steps={steps}"] if steps else [])]
        _check_site(folder, recipe, chosen, trial, as_json)
    else:
        raise ConfigError(
            "E195",
            "this is the folder of neither a federation nor a site",
            where=str(folder),
            why="it holds no federation.yaml and no site.yaml",
            fix="rescene deploy init NAME --sites A,B,C",
        )


def _check_site(folder: Path, recipe: str, overrides: list[str], trial: bool, as_json: bool) -> None:
    from rescene.cli.progress import watch_looks
    from rescene.config import resolve
    from rescene.deploy.checks import check_site, row
    from rescene.report.galleries import write_check

    resolved = resolve(recipe, overrides)
    rows, found = check_site(folder, resolved.recipe), None
    if trial:
        from rescene.deploy.site import Site
        from rescene.deploy.trial import try_round

        try:
            with watch_looks(quiet=as_json):
                found = try_round(Site.open(folder), resolved)
            rows.append(row("trial round", f"{found.method}: {found.seconds:.1f} s, {found.num_bytes:,} bytes"))
        except ResceneError as error:
            problem = f"{error.code}: {error.what}" + (f"; {error.why}" if error.why else "")
            rows.append(row("trial round", "", problem, error.fix or "see the rows above"))
    name = folder.resolve().name
    try:
        page = str(write_check(rows, _preview(found) if found else None, name, folder / "check.html"))
    except OSError as error:
        page = ""
        rows.append(row("check.html", "", f"cannot be written: {error.strerror}", "make room, or chown the folder"))
    _print_checks(rows, {"page": page, "sent": "nothing"} | (_trial_facts(found) if found else {}), as_json)


def _trial_facts(trial: Trial) -> dict[str, str]:
    copies = f"{100 * trial.near_copies:.0f} % of {trial.num_images}" if trial.num_images else trial.without_images
    parts = ", ".join(f"{one.verb} {one.seconds:.1f} s, {one.num_bytes:,} bytes" for one in trial.answers)
    return {
        "method": f"{trial.method}, recipe {trial.recipe}",
        "leaves the site": trial.leaves_site,
        "upload on the wire": f"{trial.num_bytes:,} bytes in {trial.seconds:.1f} s"
        + (f" ({parts})" if len(trial.answers) > 1 else ""),
        "near-copies of own images": copies,
    }


def _preview(trial: Trial) -> Preview:
    from rescene.report.galleries import Preview

    shares = (trial.leaves_site, trial.drawn, trial.num_images, trial.near_copies)
    return Preview(_trial_facts(trial), *shares, trial.pairs, trial.surrogates.numpy(), trial.nearest.numpy())


def _print_checks(rows: list[dict[str, str]], facts: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checks": rows, **facts}))
    else:
        print_rows(rows)
        for key, value in facts.items():
            print(f"{key}: {value}")
    print_verdict(rows, as_json)


@deploy_app.command()
def server(folder: FolderArgument, wait: Wait = False) -> None:
    """Start the server, and register the keys of the sites."""
    from rescene.deploy.processes import changed_keys, start_server

    federation = FederationFolder.open(folder)

    def begin() -> list[Any]:
        started = start_server(federation)
        for name in changed_keys(federation):
            new = (
                f"{name}: node.pub is not the key that is registered, and is not let in. If {name} has made a new key:"
            )
            print(f"{new} {command('deploy', 'replace-key', folder, name)}", file=sys.stderr)
        return started

    _started(begin, federation.server, wait)
    print(f"server at https://127.0.0.1:{federation.port}; stop it with: {command('deploy', 'stop', folder)}")


@deploy_app.command("replace-key")
def replace_key(
    folder: FolderArgument, site: Annotated[str, typer.Argument(help="name of the site that has a new node.pub")]
) -> None:
    """Let a site in with a new key, after its node.pub was replaced; the old key is refused from then on."""
    from rescene.deploy.processes import replace_key as replace_registered

    federation = FederationFolder.open(folder)
    before, now = replace_registered(federation, site)
    print(f"the key of {site} was replaced: {before} is refused from now on, {now} is let in")
    print(f"compare: at {site}, ssh-keygen -lf node.pub must print the new one")
    print(f"with secure sums (privacy.honest_sites) bring {federation.server / 'peers.pub'} to every site")
    print("a run that is going leaves the site out until the run is started again")


@deploy_app.command()
def site(folder: SiteFolder, wait: Wait = False) -> None:
    """Start this site. It answers the server until it is stopped."""
    from rescene.deploy.processes import start_kept, start_site

    _started(lambda: start_kept(folder.resolve(), lambda: start_site(folder)), folder, wait)
    print(f"site started, log in {folder / 'logs'}; stop it with: {command('deploy', 'stop', folder)}")


def _started(begin: Callable[[], list[Any]], folder: Path, wait: bool) -> None:
    """Start what ``begin`` starts. With ``wait``, stay until it ends or is interrupted, then stop all of it."""
    from rescene.deploy.processes import running, stay
    from rescene.deploy.processes import stop as stop_all

    def work() -> None:
        before = running(folder.resolve())
        try:
            started = begin()
        except BaseException:
            stop_all(folder.resolve(), but=before)
            raise
        if wait:
            try:
                stay(started)
            finally:
                stop_all(folder.resolve())

    interruptible(work)


@deploy_app.command()
def run(
    folder: FolderArgument,
    recipe: Annotated[str, typer.Argument(help="shipped recipe or file")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="run folder (default: <federation>/server/runs/...)")
    ] = None,
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline", min=1, help="seconds to wait for the answers of a round, and at most for sites to come"
        ),
    ] = 3600.0,
    elsewhere: Elsewhere = False,
    serve: Serve = False,
    port: Port = 8765,
) -> None:
    """Run a recipe across the sites. The same command continues one that was interrupted."""
    from rescene.api import Result, default_folder
    from rescene.cli.progress import operator_page
    from rescene.cli.running import print_summary
    from rescene.config import resolve
    from rescene.deploy.exchange import Patience
    from rescene.deploy.operator import declined, leave_sums, missed, watch_sites, without_left
    from rescene.deploy.operator import run as run_across
    from rescene.report import write_report

    federation, given = FederationFolder.open(folder), resolve(recipe, overrides or [])
    if federation.plan.exists() and out is not None:
        raise ConfigError("E194", "a federation with a plan has one run folder, which grows", fix="leave out --out")
    federation = leave_sums(federation, given)
    resolved = without_left(federation, given)
    place = out or federation.server / "runs" / default_folder(resolved).name
    if federation.plan.exists():
        place = federation.plan_run
    patience = Patience(deadline_s=deadline)

    def work() -> None:
        page = (lambda: operator_page(federation, lambda: place, port)) if serve else nullcontext
        with page():
            results = run_across(federation, resolved, place, patience, elsewhere=elsewhere)
        watch_sites(federation, place)
        print_summary([Result(place, results)], write_report([place], place / "report.html"))
        for words in declined(place, federation.sites):
            print(f"left out: {words}", file=sys.stderr)
        for words in missed(place, federation.sites):
            print(words)
        if serve and console().is_terminal:
            with page():
                stay_open()

    interruptible(work)


@deploy_app.command("add-classes")
def add_classes(
    folder: FolderArgument,
    classes: Annotated[str, typer.Argument(help="names of the new classes, separated by commas")],
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="rounds of this task (default: the plan's)")
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option("--image-size", min=8, help="side of the pictures in pixels; first task only, default 32"),
    ] = None,
) -> None:
    """Open the next task, with classes that are new at the sites. The first task makes the plan."""
    from rescene.deploy.plan_file import add_classes as open_task

    federation = FederationFolder.open(folder)
    plan = open_task(federation.plan, federation.plan_run, _names_in(classes), rounds, image_size)
    print(f"{_task_words(plan)[-1]} ({federation.plan})")
    print(f"next: {command('deploy', 'run', folder, 'RECIPE')}")


@deploy_app.command("remove-classes")
def remove_classes(
    folder: FolderArgument, classes: Annotated[str, typer.Argument(help="comma-separated names, such as mistyped ones")]
) -> None:
    """Take classes out of the plan again, before their task has begun."""
    from rescene.deploy.plan_file import remove_classes as take_out

    federation = FederationFolder.open(folder)
    plan = take_out(federation.plan, federation.plan_run, _names_in(classes))
    if plan is None:
        print(f"the plan is empty again: {command('deploy', 'add-classes', folder, 'NAMES')}")
    else:
        print(*_task_words(plan), sep="\n")


def _names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _task_words(plan: SitesSection) -> list[str]:
    return [f"{position(number)}: {', '.join(t.classes)}; rounds: {t.rounds}" for number, t in enumerate(plan.tasks)]


@deploy_app.command("close-task")
def close_task(folder: FolderArgument) -> None:
    """End the current task early, after the round that is under way. A task has at least one round."""
    from rescene.deploy.plan_file import close_task as close

    federation = FederationFolder.open(folder)
    task, held = close(federation.plan, federation.plan_run)
    print(f"{position(task)} closes; rounds held: {held.rounds}, and a round that is under way counts")
    print(f"if no run is going, this ends the task: {command('deploy', 'run', folder, 'RECIPE')}")


@deploy_app.command()
def status(folder: FolderArgument, as_json: AsJson = False, serve: Serve = False, port: Port = 8765) -> None:
    """Show which sites are connected, which runs are going, and which sites they wait for."""
    from rescene.deploy.operator import status_rows

    federation = FederationFolder.open(folder)
    print_rows(status_rows(federation), as_json)
    if serve:
        from rescene.cli.progress import operator_page
        from rescene.deploy.operator import newest_run

        with operator_page(federation, lambda: newest_run(federation), port):
            stay_open()


def stay_open() -> None:
    """Keep the page until Ctrl-C."""
    print("Ctrl-C closes the page")
    until_stopped()


@deploy_app.command()
def stop(folder: EitherFolder) -> None:
    """Stop every process that was started from this folder."""
    from rescene.deploy.processes import stop as stop_all

    if (folder / "site.yaml").is_file():
        places = [folder.resolve()]
    else:
        federation = FederationFolder.open(folder)
        places = [*map(federation.site, federation.sites), federation.server]
    ended = [f"{name} ({place.name})" for place in places for name in stop_all(place)]
    print(f"stopped: {', '.join(ended)}" if ended else "nothing was running")


@deploy_app.command("recover-ledger")
def recover_ledger(folder: SiteFolder) -> None:
    """Charge everything that a site may have released, after its privacy ledger was lost or restored from a backup."""
    from rescene.deploy.site import Site
    from rescene.deploy.site_config import ledger_of

    ledger = ledger_of(Site.open(folder).section, folder)
    lost = ledger.recover()
    total = len(ledger.charges())
    print(f"{total} participations are charged; {len(lost)} of them were missing in {ledger.path}")
    print("the answers of the missing ones are lost: if the server asks for such a round again, this site declines")


@deploy_app.command()
def rehearse(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option("--recipe", help="shipped recipe or file")] = "smoke",
    sites: Annotated[
        int, typer.Option("--sites", min=1, max=16, help="number of sites; each is a process of its own")
    ] = 3,
    out: Annotated[Path, typer.Option("--out", help="folder for the runs and the report")] = Path("runs/rehearsal"),
    compare: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="then run the same recipe in one process and compare the models"),
    ] = True,
) -> None:
    """Run the server and the sites as processes on this machine, with TLS and node keys, and stop them all at the end."""
    from rescene.config import resolve

    given = list(overrides or [])
    resolved = resolve(recipe, ["federation.engine=one-by-one", f"federation.num_clients={sites}", *given])
    interruptible(lambda: _rehearse(resolved, out, compare))


def _rehearse(resolved: Any, out: Path, compare: bool) -> None:
    from rescene.api import execute, load
    from rescene.cli.running import print_summary
    from rescene.deploy.trial import rehearse as run_rehearsal
    from rescene.report import write_report

    places = [out / "across-sites", out / "in-one-process"][: 1 + compare]
    run_rehearsal(resolved, None, places[0])
    if compare:
        execute(resolved, places[1])
    print_summary([load(place) for place in places], write_report(places, out / "report.html"))
    if compare:
        one, two = (hashlib.sha256((p / "model" / "final.safetensors").read_bytes()).hexdigest()[:16] for p in places)
        print(
            f"final model across sites {one}, in one process {two}: {'the same bits' if one == two else 'they differ'}"
        )
        if one != two:
            raise typer.Exit(5)


@deploy_app.command()
def quarantine(
    folder: Annotated[Path, typer.Argument(help="run folder of a run with federation.screen=features")],
    admit: Annotated[
        list[str] | None, typer.Option("--admit", help="group to admit, by its name in the table; may be repeated")
    ] = None,
    sheet: Annotated[Path | None, typer.Option("--sheet", help="write the pictures to this image file")] = None,
    as_json: AsJson = False,
) -> None:
    """Show uploads that a run's screen put apart, and why; --admit lets some into the next round of their task."""
    from rescene.cli.run_folders import quarantined

    quarantined(folder, list(admit or []), sheet, as_json)


def scale(
    recipe: RecipeName,
    overrides: Overrides = None,
    clients: Annotated[str, typer.Option("--clients", help="numbers of sites: 10..1000000 or 10,500")] = "10..1000000",
    per_round: Annotated[
        str | None, typer.Option("--per-round", help="sites in a round: 20 or 10% (default: the recipe's, and 10%)")
    ] = None,
    server_mbps: Annotated[float, typer.Option("--server-mbps", help="speed of the server's line in Mbit/s")] = 1000.0,
    server_gflops: ServerGflops = None,
    server_gb: Annotated[float, typer.Option("--server-gb", help="memory of the server in GB")] = 64.0,
    as_json: AsJson = False,
) -> None:
    """Say what 10 to 1,000,000 sites would cost the server, and which limit is reached first."""
    from rescene.cli.costing import show_scale
    from rescene.config import resolve

    show_scale(resolve(recipe, overrides or []), clients, per_round, server_mbps, server_gflops, server_gb, as_json)


def export(
    folder: FinishedRun,
    to: Annotated[
        str, typer.Option("--to", help="safetensors, onnx, pt2; separate several with commas")
    ] = "safetensors",
    out: Annotated[Path | None, typer.Option("--out", help="folder for the files (default: RUN/export)")] = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as a file with its classes and normalisation, check it, and write its model card."""
    from rescene.cli.progress import watch_looks
    from rescene.report.summary import write_card
    from rescene.use import export as export_model

    _say_which(folder)
    target = out or folder / "export"
    with watch_looks(quiet=as_json):
        rows = export_model(folder, [kind.strip() for kind in to.split(",")], target)
    card = write_card(finished_in(folder), target)
    if as_json:
        print(json.dumps({"files": rows, "card": str(card)}))
        return
    print_rows(rows)
    print(f"Model card: {card}")
    needed = [*(["--trust"] if rows[0]["file"].endswith(".pt2") else []), *plugin_words(plugin)]
    print(f"Try it: {command('predict', rows[0]['file'], 'IMAGES', *needed)}")


def _say_which(model: Path) -> None:
    """Say which model of a run folder is used, where the run has begun a new task."""
    place = finished_in(model)
    if place != model:
        last = position(len(read_results(place / "results.json", []).tasks) - 1)
        print(f"note: the run has begun a new task; this is its model after {last}, which is finished", file=sys.stderr)


def predict(
    model: ModelPath,
    images: Annotated[list[Path], typer.Argument(help="image files, or folders that hold some")],
    top: Annotated[int, typer.Option("--top", min=1, help="how many classes per image")] = 3,
    kind: Annotated[str, typer.Option("--format", help="table, json or csv")] = "table",
    gallery: Annotated[Path | None, typer.Option("--gallery", help="also write an HTML page with the images")] = None,
    trust: Trust = False,
    plugin: Plugin = None,
) -> None:
    """Name what is in images: the likeliest classes and the model's confidence."""
    from rescene.cli.progress import watch_looks
    from rescene.use import find_images, mending, open_model
    from rescene.use import predict as answer

    if kind not in ANSWER_FORMATS:
        raise ConfigError(
            "E140", f"no such format: {kind}", where="--format", fix=f"one of: {', '.join(ANSWER_FORMATS)}"
        )
    _say_which(model)
    opened, files = open_model(model, trust), find_images(images)
    with watch_looks(quiet=kind == "json"):
        answers, unreadable = answer(opened, files, top)
    for path, why in unreadable.items():
        print(f"warning[W203] left out, cannot be read as an image: {path} ({why})", file=sys.stderr)
    if not answers:
        raise DataError("E203", "none of the images could be read", fix=mending(unreadable))
    _print_answers(answers, kind)
    if gallery:
        print(f"Gallery: {_write_gallery(opened, answers, gallery)}", file=sys.stderr)


def _print_answers(answers: list[Prediction], kind: str) -> None:
    if kind == "json":
        tops = [[{"class": name, "confidence": value} for name, value in a.top] for a in answers]
        print(json.dumps([{"file": str(a.file), "top": top} for a, top in zip(answers, tops, strict=True)]))
        return
    rows = [{"file": str(a.file)} | _numbered(a, kind) for a in answers]
    if kind == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print_rows(rows)


def _numbered(answer: Prediction, kind: str) -> dict[str, str]:
    """Columns class, confidence, class_2, confidence_2 and so on; in a table, both in one cell."""
    row: dict[str, str] = {}
    for i, (name, value) in enumerate(answer.top, start=1):
        suffix = "" if i == 1 else f"_{i}"
        if kind == "csv":
            row |= {f"class{suffix}": name, f"confidence{suffix}": f"{value:.4f}"}
        else:
            row["class" if i == 1 else f"{i}."] = f"{name} {100 * value:.0f} %"
    return row


def _write_gallery(model: Model, answers: list[Prediction], out: Path) -> Path:
    from rescene.report.galleries import GalleryAnswer, write_gallery

    shown = [GalleryAnswer("/".join(a.file.parts[-2:]), a.top, a.pixels.numpy()) for a in answers]
    return write_gallery(shown, model.path.name, model.classes, out)


def serve(
    model: ModelPath,
    host: Annotated[
        str, typer.Option("--host", help="address to listen on; 0.0.0.0: all, so that others can ask")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free")] = 8000,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="a name that the service may be called by; may be repeated")
    ] = None,
    max_mb: Annotated[float, typer.Option("--max-mb", min=0.001, help="largest file of a picture, in MB")] = 20.0,
    max_pixels: Annotated[int, typer.Option("--max-pixels", min=1, max=2**27, help="most pixels of a picture")] = 2**26,
    container: Annotated[
        Path | None,
        typer.Option("--container", help="write a folder that builds the service as a container; serve nothing"),
    ] = None,
    trust: Trust = False,
    plugin: Plugin = None,
    quiet: Quiet = False,
) -> None:
    """Answer pictures over HTTP: a page to drop a picture on, and JSON for programs."""
    from rescene.engine import use_all_cores
    from rescene.use import Service, open_model, serving, write_container

    _say_which(model)
    if container is not None:
        print(*write_container(model, container, trust), sep="\n")
        print("The first lines of the Containerfile say how to build and run it.")
        return
    use_all_cores()
    service = Service(open_model(model, trust), int(max_mb * 2**20), max_pixels, frozenset(allow_host or ()))
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(
            "note: whoever can reach this machine can send pictures; there is no password and no encryption",
            file=sys.stderr,
        )
    with serving(service, host, port, teller(quiet)) as address:
        print(f"{address}  ({len(service.model.classes)} classes; Ctrl-C stops it)", flush=True)
        until_stopped()
    print("stopped", file=sys.stderr)
