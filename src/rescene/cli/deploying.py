"""The verbs of a federation across sites: rescene deploy ..."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rescene.cli.deploy_check import check
from rescene.cli.frame import AsJson, Elsewhere, Overrides, interruptible, verb
from rescene.errors import ConfigError, command

deploy_app = typer.Typer(
    help="A federation across real sites, over Flower. Start with: rescene deploy rehearse",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Argument(help="folder of the federation")]
Wait = Annotated[bool, typer.Option("--wait", help="stay in the foreground, and stop everything at the end (systemd)")]
Serve = Annotated[bool, typer.Option("--serve", help="show the run on a page of this machine, live")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="of that page; 0: any that is free")]
Deadline = Annotated[float, typer.Option("--deadline", min=1, help="seconds to wait for the answers of a round")]


@deploy_app.command()
@verb
def init(
    name: Annotated[Path, typer.Argument(help="new folder; its last part is the federation's name")],
    sites: Annotated[str, typer.Option("--sites", help="comma-separated names")],
    host: Annotated[str, typer.Option("--host", help="address at which sites reach the server")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
) -> None:
    """Keys, certificates, and one folder to carry to each site."""
    from rescene.deploy.folder import init as write_folder

    federation = write_folder(name, [site.strip() for site in sites.split(",")], host, port)
    print(f"{federation.path}: the server's; server/ca.key and server/server.key stay here")
    for site in federation.sites:
        print(f"{federation.site(site)}: carry to {site}, on a safe way: node.key is its identity")
    start, run = command("deploy", "server", name), command("deploy", "run", name, "demo")
    print(f"next: {start}; at each site: rescene deploy site FOLDER; then: {run}")


deploy_app.command()(check)


@deploy_app.command()
@verb
def server(folder: Folder, wait: Wait = False) -> None:
    """Start the server: link and executor; registers the sites' keys."""
    from rescene.deploy.control import start_server
    from rescene.deploy.folder import Federation

    federation = Federation.open(folder)
    _started(lambda: start_server(federation), federation.server, wait)
    print(f"server at https://127.0.0.1:{federation.port}; stop it with: {command('deploy', 'stop', folder)}")


@deploy_app.command()
@verb
def site(folder: Annotated[Path, typer.Argument(help="the site's own folder")], wait: Wait = False) -> None:
    """Start this site: it answers the server until it is stopped."""
    from rescene.deploy.control import start_site
    from rescene.deploy.keeping import start_kept

    _started(lambda: start_kept(folder.resolve(), lambda: start_site(folder)), folder, wait)
    print(f"site started, log in {folder / 'logs'}; stop it with: {command('deploy', 'stop', folder)}")


@deploy_app.command()
@verb
def run(
    folder: Folder,
    recipe: Annotated[str, typer.Argument(help="shipped recipe or file")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="run folder (default: <federation>/server/runs/...)")
    ] = None,
    deadline: Deadline = 3600.0,
    elsewhere: Elsewhere = False,
    serve: Serve = False,
    port: Port = 8765,
) -> None:
    """Run a recipe across the sites; the same command continues one that was interrupted."""
    from rescene.api import default_folder
    from rescene.cli.operating import operator_page, stay_open
    from rescene.cli.terminal import console
    from rescene.config import resolve
    from rescene.deploy.control import run as run_across
    from rescene.deploy.folder import Federation
    from rescene.deploy.letters import Patience
    from rescene.deploy.operator import watch_sites
    from rescene.deploy.withdrawal import without_left

    federation = Federation.open(folder)
    resolved = without_left(federation, resolve(recipe, overrides or []))
    place = out or federation.server / "runs" / default_folder(resolved).name
    if federation.plan.exists():
        if out is not None:
            raise ConfigError("E194", "a federation with a plan has one run folder, which grows", fix="leave out --out")
        place = federation.plan_run
    patience = Patience(deadline_s=deadline)

    def work() -> None:
        page = (lambda: operator_page(federation, lambda: place, port)) if serve else nullcontext
        with page():
            results = run_across(federation, resolved, place, patience, elsewhere=elsewhere)
        watch_sites(federation, place)
        _finish(results, place)
        if serve and console().is_terminal:
            with page():
                stay_open()

    interruptible(work, "the same command")


@deploy_app.command("add-classes")
@verb
def add_classes(
    folder: Folder,
    classes: Annotated[str, typer.Argument(help="comma-separated names of the new classes")],
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="of this task (default: the plan's)")] = None,
    image_size: Annotated[int | None, typer.Option("--image-size", min=8, help="first task only; default 32")] = None,
) -> None:
    """Open the next task: classes that have arrived at the sites. The first one makes the plan."""
    from rescene.deploy.folder import Federation
    from rescene.deploy.plan import add_classes as open_task

    federation = Federation.open(folder)
    names = [name.strip() for name in classes.split(",") if name.strip()]
    plan = open_task(federation.plan, federation.plan_run, names, rounds, image_size)
    task = plan.tasks[-1]
    print(f"task {len(plan.tasks) - 1}: {', '.join(task.classes)}; rounds: {task.rounds} ({federation.plan})")
    print(f"next: {command('deploy', 'run', folder, 'RECIPE')}")


@deploy_app.command("close-task")
@verb
def close_task(folder: Folder) -> None:
    """End the current task early: after the round under way, but not before its first."""
    from rescene.deploy.folder import Federation
    from rescene.deploy.plan import close_task as close

    federation = Federation.open(folder)
    task, held = close(federation.plan, federation.plan_run)
    print(f"task {task} closes; rounds held: {held.rounds}, and the one under way counts")
    print(f"if no run is going: {command('deploy', 'run', folder, 'RECIPE')} brings it to its end")


@deploy_app.command()
@verb
def status(folder: Folder, as_json: AsJson = False, serve: Serve = False, port: Port = 8765) -> None:
    """Which sites are there, which runs go on, and whom they wait for."""
    from rescene.cli.listing import print_rows
    from rescene.deploy.control import status_rows
    from rescene.deploy.folder import Federation

    federation = Federation.open(folder)
    print_rows(status_rows(federation), as_json)
    if serve:
        from rescene.cli.operating import operator_page, stay_open
        from rescene.deploy.operator import newest_run

        with operator_page(federation, lambda: newest_run(federation), port):
            stay_open()


@deploy_app.command()
@verb
def stop(folder: Annotated[Path, typer.Argument(help="folder of the federation, or of one site")]) -> None:
    """End every process that was started from this folder, by its id."""
    from rescene.deploy.processes import stop as stop_all

    places = [folder.resolve()] if (folder / "site.yaml").is_file() else _places(folder)
    ended = [f"{name} ({place.name})" for place in places for name in stop_all(place)]
    print(f"stopped: {', '.join(ended)}" if ended else "nothing was running")


@deploy_app.command("recover-ledger")
@verb
def recover_ledger(folder: Annotated[Path, typer.Argument(help="the site's own folder")]) -> None:
    """At a site whose privacy ledger was lost or put back: charge all that its mark counts, so that nothing is spent twice."""
    from rescene.deploy.holding import ledger_of
    from rescene.deploy.site import Site

    ledger = ledger_of(Site.open(folder).section, folder)
    lost = ledger.recover()
    total = len(ledger.charges())
    print(f"{total} participations are charged; {len(lost)} of them were missing in {ledger.path}")
    print("what was released in the missing ones is lost: asked for the same round again, this site declines")


@deploy_app.command()
@verb
def rehearse(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option("--recipe", help="shipped recipe or file")] = "smoke",
    sites: Annotated[int, typer.Option("--sites", min=1, max=16, help="how many, each a process of its own")] = 3,
    out: Annotated[Path, typer.Option("--out", help="folder for the runs and the report")] = Path("runs/rehearsal"),
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="then also in one process")] = True,
) -> None:
    """Server and sites as real processes on this machine, TLS and node keys on; ends them all."""
    from rescene.config import resolve

    given = list(overrides or [])
    resolved = resolve(recipe, ["federation.engine=one-by-one", f"federation.num_clients={sites}", *given])
    interruptible(lambda: _rehearse(resolved, out, compare), "the same command")


def _rehearse(resolved: Any, out: Path, compare: bool) -> None:
    import hashlib

    from rescene.api import execute, load
    from rescene.cli.running import print_summary
    from rescene.deploy.rehearsal import rehearse as run_rehearsal
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


def _finish(results: dict[str, Any], place: Path) -> None:
    from rescene.api import Result
    from rescene.cli.running import print_summary
    from rescene.report import write_report

    print_summary([Result(place, results)], write_report([place], place / "report.html"))


def _places(folder: Path) -> list[Path]:
    from rescene.deploy.folder import Federation

    federation = Federation.open(folder)
    return [*map(federation.site, federation.sites), federation.server]


def _started(begin: Callable[[], list[Any]], folder: Path, wait: bool) -> None:
    """What ``begin`` starts; with ``wait`` until it ends or we are told to, and then none of it is left."""
    from rescene.deploy.control import stay
    from rescene.deploy.processes import running
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

    interruptible(work, "the same command")
