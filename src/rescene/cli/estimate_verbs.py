"""Verbs that say what a run costs and guarantees, before it runs, and whether the guarantee stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import AsJson, Overrides, Plugin, Quiet, RecipeName, load_plugins, verb

ServerGflops = Annotated[
    float | None, typer.Option("--server-gflops", help="the server's speed, GFLOP/s (default: this device's)")
]


@verb
def bench(
    out: Annotated[Path | None, typer.Option("--out", help="write the figures as JSON")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N")] = "auto",
    as_json: AsJson = False,
) -> None:
    """How fast this machine runs the steps everything consists of, also as a share of its matrix rate."""
    from rescene.cli.benching import run_bench

    run_bench(device, out, as_json)


@verb
def cost(
    recipe: RecipeName,
    overrides: Overrides = None,
    uplink_mbps: Annotated[float, typer.Option("--uplink-mbps", help="a site's upload speed, Mbit/s")] = 20.0,
    client_gflops: Annotated[
        float | None, typer.Option("--client-gflops", help="a site's speed, GFLOP/s (default: this device's)")
    ] = None,
    server_gflops: ServerGflops = None,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """What a run will cost, before it runs: FLOPs, bytes, state, seconds per round, time on this device."""
    load_plugins(plugin)
    from rescene.cli.costing import show_cost
    from rescene.config import resolve

    show_cost(resolve(recipe, overrides or []), uplink_mbps, client_gflops, server_gflops, as_json)


@verb
def scale(
    recipe: RecipeName,
    overrides: Overrides = None,
    clients: Annotated[str, typer.Option("--clients", help="sites: 10..1000000 or 10,500")] = "10..1000000",
    per_round: Annotated[
        str | None, typer.Option("--per-round", help="sites in a round: 20 or 10% (default: the recipe's, and 10%)")
    ] = None,
    server_mbps: Annotated[float, typer.Option("--server-mbps", help="the server's line, Mbit/s")] = 1000.0,
    server_gflops: ServerGflops = None,
    server_gb: Annotated[float, typer.Option("--server-gb", help="the server's memory, GB")] = 64.0,
    as_json: AsJson = False,
) -> None:
    """What 10 to 1,000,000 sites would cost the server: bytes, pool, training, herding, and what breaks first."""
    from rescene.cli.scaling import show_scale
    from rescene.config import resolve

    show_scale(resolve(recipe, overrides or []), clients, per_round, server_mbps, server_gflops, server_gb, as_json)


@verb
def privacy(
    recipe: RecipeName = "",
    overrides: Overrides = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="target: which noise multiplier keeps it?")] = None,
    sigma: Annotated[float | None, typer.Option("--sigma", help="noise multiplier: which epsilon results?")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="default: the recipe's privacy.delta")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="a site's folder, or a run's: what was released, its cost, the floor"),
    ] = None,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """What a record is guaranteed over the whole run: epsilon for a noise multiplier and back, and why."""
    load_plugins(plugin)
    if ledger is not None:
        from rescene.cli.ledgers import show_ledger

        show_ledger(ledger, as_json)
        return
    from rescene.cli.privacy import show_privacy
    from rescene.config import resolve
    from rescene.errors import ConfigError

    if not recipe:
        raise ConfigError(
            "E176", "a recipe or a ledger is missing", fix="rescene privacy RECIPE, or rescene privacy --ledger FOLDER"
        )
    show_privacy(resolve(recipe, overrides or []), epsilon, sigma, delta, as_json)


@verb
def audit(
    what: Annotated[str, typer.Argument(help="recipe, recipe file or run folder")] = "demo",
    overrides: Overrides = None,
    everything: Annotated[
        bool, typer.Option("--all", help="attack every claim that rescene makes; one table, a few minutes")
    ] = False,
    controls: Annotated[bool, typer.Option("--controls", help="break privacy in five ways: are they noticed?")] = False,
    canaries: Annotated[int, typer.Option("--canaries", min=20, help="of each kind; more can show more")] = 200,
    shadows: Annotated[int, typer.Option("--shadows", min=8, help="shadow condensations")] = 64,
    targets: Annotated[int, typer.Option("--targets", min=2, help="images whose membership is guessed")] = 64,
    participations: Annotated[
        int | None, typer.Option("--participations", min=1, help="to attack (default: all that are promised)")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file (default: audit.json in a run folder)")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Attack what sites upload; exit code 5 if a promise is contradicted or a control does not fire."""
    load_plugins(plugin)
    from rescene.audit import Scale
    from rescene.cli.auditing import run_audit, run_red_team

    if everything:
        if not run_red_team(out, quiet, as_json):
            raise typer.Exit(5)
        return

    scale = Scale(canaries, shadows, targets, participations)
    if not run_audit(what, list(overrides or []), controls, scale, out, quiet, as_json):
        raise typer.Exit(5)
