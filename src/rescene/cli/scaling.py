"""`rescene scale`: what a federation of 10 to 1,000,000 sites costs its server, and what breaks first."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rescene.cli.costing import NO_FORECAST, big, duration, load_or_stand_in
from rescene.cli.listing import print_rows
from rescene.config import Resolved
from rescene.engine import use_all_cores
from rescene.engine.forecast.rates import measured_rates
from rescene.engine.scaling import Means, Scale, sample, scale
from rescene.errors import ConfigError

MOST = 1_000_000
ALONE = ("joint", "local")


def show_scale(
    resolved: Resolved, clients: str, per_round: str | None, mbps: float, gflops: float | None, gb: float, as_json: bool
) -> None:
    use_all_cores()
    recipe = resolved.recipe
    sizes = parse_clients(clients)
    rules = [per_round] if per_round else [str(recipe.federation.per_round), "10%"]
    turns = {rule: [(n, sites_per_round(rule, n)) for n in sizes] for rule in rules}
    for name, value in (("server-mbps", mbps), ("server-gflops", gflops), ("server-gb", gb)):
        if value is not None and not value > 0:
            raise ConfigError("E115", f"--{name} {value:g} is not possible", fix="a number above 0")
    if recipe.method["name"] in ALONE:
        raise ConfigError("E116", f"{recipe.method['name']} is no federation to scale", why="it is a reference line")
    dataset, missing = load_or_stand_in(recipe.images)
    drawn = sample(recipe, dataset, sizes[0], 1)
    speed = 1e9 * gflops if gflops else measured_rates(drawn).server
    means = Means(mbps=mbps, flops_per_s=speed, memory_bytes=1e9 * gb)
    found = {rule: [scale(recipe, dataset, n, k, means) for n, k in pairs] for rule, pairs in turns.items()}
    rows = [row for table in found.values() for row in table]
    if None in rows:
        raise ConfigError(
            NO_FORECAST,
            f"the cost of {recipe.method['name']!r} is not known in advance",
            why="only the methods of this package have a forecast, without a privacy mechanism",
        )
    if as_json:
        print(json.dumps([asdict(row) | {"limits": row.limits(means)} for row in rows if row]))
        return
    setting = f"{drawn.arch.name}, {len(drawn.tasks)} tasks of {recipe.federation.num_rounds} rounds"
    size = drawn.recipe.federation.min_size
    print(f"{drawn.method.title} on {dataset.name}, {setting}; a site holds {size} images of a task")
    for rule, table in found.items():
        _print(f"{rule} of the sites" if rule.endswith("%") else f"{rule} sites", [row for row in table if row], means)
    print(f"Server: {mbps:g} Mbit/s, {big(speed)}FLOP/s, {gb:g} GB, a round of at most {duration(means.round_s)}.")
    print("Bytes count tensors, pictures as float32.")
    if missing:
        print(f"Sizes as published: {missing.what}.")


def parse_clients(text: str) -> list[int]:
    """``10..100000``: powers of ten; or a list of numbers.

    >>> parse_clients("10..1000"), parse_clients("5,70")
    ([10, 100, 1000], [5, 70])
    """
    first, dots, last = text.partition("..")
    try:
        if dots:
            sizes, end = [int(first)], int(last)
            while sizes[-1] * 10 <= end:
                sizes.append(sizes[-1] * 10)
        else:
            sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(1 <= n <= MOST for n in sizes):
        raise ConfigError(
            "E116",
            f"--clients {text} makes no sense",
            why=f"a federation has 1 to {MOST:,} sites",
            fix="10..1000000 or 10,500",
        )
    return sizes


def sites_per_round(rule: str, num_clients: int) -> int:
    """A number, at most all; or a share.

    >>> sites_per_round("20", 10), sites_per_round("20", 100), sites_per_round("10%", 1000)
    (10, 20, 100)
    """
    try:
        wanted = float(rule[:-1]) / 100 * num_clients if rule.endswith("%") else int(rule)
    except ValueError:
        wanted = 0
    if not 0 < wanted < float("inf") or (rule.endswith("%") and wanted > num_clients):
        raise ConfigError(
            "E116", f"--per-round {rule} makes no sense", fix="a number such as 20, or a share such as 10%"
        )
    return min(num_clients, max(1, round(wanted)))


def _print(title: str, rows: list[Scale], means: Means) -> None:
    print(f"\n{title} in a round")
    print_rows([_traffic(row) for row in rows])
    print()
    print_rows([_server(row, means) for row in rows])
    broken: dict[str, Scale] = {}
    for row in rows:
        broken = dict.fromkeys(row.over(means), row) | broken
    for limit, first in broken.items():
        print(f"{limit} breaks at {first.num_clients:,} sites: {first.remedy(limit, means)}.")


def _traffic(row: Scale) -> dict[str, Any]:
    return {
        "sites": f"{row.num_clients:,}",
        "per round": f"{row.per_round:,}",
        "turns of a site": f"{row.turns:.3g}",
        "ever asked": f"{100 * row.ever_asked:.3g} %",
        "up in a round": f"{big(row.round_up_bytes)}B",
        "down": f"{big(row.round_down_bytes)}B",
        "up in all": f"{big(row.up_bytes)}B",
        "down in all": f"{big(row.down_bytes)}B",
        "on the line": duration(row.transfer_s),
        "Flower's link": duration(row.link_s),
        "idle": f"{row.link_idle:,.2f} cores",
    }


def _server(row: Scale, means: Means) -> dict[str, Any]:
    return {
        "sites": f"{row.num_clients:,}",
        "pool, images": f"{row.pool_images:,}",
        "memory": f"{big(row.memory_bytes)}B",
        "training in all": f"{big(row.server_flops)}FLOP",
        "longest round": duration(row.training_s),
        "herding": f"{big(row.herding_flops)}FLOP",
        "its memory": f"{big(row.herding_bytes)}B",
        "over its limit": ", ".join(f"{name} {fill:,.1f}x" for name, fill in row.over(means).items()) or "nothing",
    }
