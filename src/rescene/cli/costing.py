"""What a run will cost before it runs, and what a federation of 10 to 1,000,000 sites costs its server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from rescene.cli.terminal import busy, print_rows
from rescene.config import Resolved
from rescene.config.schema import DataSection
from rescene.core.errors import ConfigError, DataError
from rescene.data import Dataset, has_stand_in, stand_in
from rescene.engine import Experiment, prepare_sizes, use_all_cores
from rescene.engine.cost_ledger import nominal_cost
from rescene.engine.experiment import load_data
from rescene.engine.forecast import Forecast, Rates, forecast, mean_latency, measured_rates
from rescene.engine.scaling import Means, Scale, sample, scale
from rescene.methods.registry import WITHOUT_FEDERATION
from rescene.nets import FLOAT_BYTES, model_bytes

NO_FORECAST = "E114"
MOST_SITES = 1_000_000
KEPT_CHECKPOINTS = 2
OTHER_FILES = 0.3e6  # bytes of tables and pictures in a run folder
_load = lru_cache(maxsize=1)(load_data)  # the cells of a sweep mostly share their images
_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Priced:
    """A run's forecast and this device's speed. ``missing``: the error about images that are not here."""

    experiment: Experiment
    forecast: Forecast
    rates: Rates
    missing: DataError | None

    def seconds(self) -> float:
        """Seconds of the whole run on this device, which does the work of the clients and of the server."""
        found = self.forecast.measured()
        clients = found["client_flops"] + self.forecast.evaluation_flops
        return clients / self.rates.client + found["server_flops"] / self.rates.server


def price(resolved: Resolved) -> Priced:
    """Forecast a run. Where a known data set is not here, its published sizes are used."""
    use_all_cores()
    dataset, missing = load_or_stand_in(resolved.recipe.images)
    experiment = prepare_sizes(resolved.recipe, dataset)
    found = forecast(experiment)
    if found is None:
        fix = "run it with tasks.limit=1 federation.num_rounds=1 and read the cost in results.json"
        raise _no_forecast(experiment.method.name, fix)
    return Priced(experiment, found, measured_rates(experiment, found), missing)


def _no_forecast(method: str, fix: str | None = None) -> ConfigError:
    why = "forecasts exist only without a privacy mechanism, tasks.drift and federation.delay"
    return ConfigError(NO_FORECAST, f"the cost of {method!r} is not known in advance", why=why, fix=fix)


def load_or_stand_in(data: DataSection) -> tuple[Dataset, DataError | None]:
    """The images; or the published sizes of a known data set, and the error that it is not here."""
    try:
        return _load(data), None
    except DataError as error:
        if data.path is not None or not has_stand_in(data.name):
            raise
        return stand_in(data.name), error


def show_cost(
    resolved: Resolved, uplink_mbps: float, client_gflops: float | None, server_gflops: float | None, as_json: bool
) -> None:
    """Print the forecast of a run beside the paper's convention, and how long it takes."""
    _check_positive({"uplink-mbps": uplink_mbps, "client-gflops": client_gflops, "server-gflops": server_gflops})
    with busy("measuring this device"):
        priced = price(resolved)
    facts = _facts(priced, uplink_mbps, client_gflops, server_gflops)
    if as_json:
        print(json.dumps(facts))
        return
    print(f"{facts['method']} on {facts['data']}, {facts['setting']}")
    print_rows(_cost_table(facts))
    print()
    print_rows(_time_table(facts))
    print(
        f"Measured on this device ({facts['device']}): {big(priced.rates.client)}FLOP/s as a client, "
        f"{big(priced.rates.server)}FLOP/s as the server. Times are estimates."
    )
    if priced.missing:
        print(f"Sizes as published: {priced.missing.what}.")


def _check_positive(speeds: Mapping[str, float | None]) -> None:
    """Refuse options for which a number that is not above 0 was given. ``speeds``: by the option's name."""
    for name, value in speeds.items():
        if value is not None and not value > 0:
            raise ConfigError("E115", f"--{name} {value:g} is not possible", fix="give a number above 0")


def _facts(
    priced: Priced, uplink_mbps: float, client_gflops: float | None, server_gflops: float | None
) -> dict[str, Any]:
    experiment, found, here = priced.experiment, priced.forecast, priced.rates
    federation = experiment.recipe.federation
    assumed = Rates(
        here.client if client_gflops is None else 1e9 * client_gflops,
        here.server if server_gflops is None else 1e9 * server_gflops,
    )
    turns = [sum(e.flops.get(k, 0) for e in m.exchanges) for m in found.rounds for k in m.exchanges[0].flops]
    latency = mean_latency(found.rounds, assumed, uplink_mbps)
    return {
        "method": experiment.method.title,
        "data": experiment.dataset.name,
        "setting": f"{experiment.arch.name}, {federation.num_clients} sites, {federation.per_round} per round, "
        f"{len(experiment.tasks)} tasks of {federation.num_rounds} rounds",
        "device": str(experiment.device),
        "lens": experiment.recipe.model.lens is not None,
        "forecast": found.measured()
        | {
            "client_flops_per_round_mean": sum(turns) / len(turns),
            "client_flops_per_round_max": max(turns),
            "evaluation_flops": found.evaluation_flops,
        },
        "nominal": nominal_cost(experiment),
        "latency": asdict(latency)
        | {"total_s": latency.total_s, "uplink_mbps": uplink_mbps}
        | {"client_flops_per_s": assumed.client, "server_flops_per_s": assumed.server},
        "time": {"total_s": priced.seconds(), "client_flops_per_s": here.client, "server_flops_per_s": here.server},
        "data_missing": None if priced.missing is None else priced.missing.what,
    }


def _cost_table(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The forecast beside the paper's convention."""
    found, nominal = facts["forecast"], facts["nominal"] or {}
    unseen = ", without the lens" if facts["lens"] else ""
    unsolved = "" if found["server_flops"] else ", without averages, sums and solver"
    rows = (
        (f"client work of the run, all sites{unseen}", "client_flops", "FLOP"),
        ("  one site in one round, mean", "client_flops_per_round_mean", "FLOP"),
        ("  one site in one round, most", "client_flops_per_round_max", "FLOP"),
        ("client state", "client_state_bytes", "B"),
        ("upload per site and round", "uplink_bytes_per_message", "B"),
        ("download per site and round", "downlink_bytes_per_message", "B"),
        ("upload in all", "uplink_bytes", "B"),
        ("download in all", "downlink_bytes", "B"),
        (f"server work of the run{unsolved}", "server_flops", "FLOP"),
    )
    return [
        {
            "cost": name,
            "forecast": big(found[key]) + unit,
            "paper's convention": big(nominal[key]) + unit if key in nominal else None,
        }
        for name, key, unit in rows
    ]


def _time_table(facts: dict[str, Any]) -> list[dict[str, Any]]:
    latency = facts["latency"]
    return [
        {"time": "one round, mean", "about": duration(latency["total_s"]), "assuming": None},
        {"time": "  slowest site", "about": duration(latency["client_s"]), "assuming": f"at {big(latency['client_flops_per_s'])}FLOP/s"},
        {"time": "  its upload", "about": duration(latency["upload_s"]), "assuming": f"at {latency['uplink_mbps']:g} Mbit/s"},
        {"time": "  server", "about": duration(latency["server_s"]), "assuming": f"at {big(latency['server_flops_per_s'])}FLOP/s"},
        {"time": "the run, simulated on this device", "about": duration(facts["time"]["total_s"]), "assuming": None},
    ]  # fmt: skip


def plan_columns(priced: Priced) -> dict[str, float]:
    """The cost of one cell of a sweep, as numbers."""
    found = priced.forecast.measured()
    keys = ("client_flops", "server_flops", "uplink_bytes", "downlink_bytes")
    return {key: found[key] for key in keys} | {"seconds": priced.seconds(), "disk_bytes": disk_bytes(priced)}


def disk_bytes(priced: Priced) -> float:
    """About what the run folder will hold: the model, the last two checkpoints, and its tables. Roughly: it may be three times too much."""
    experiment, found = priced.experiment, priced.forecast
    last = found.rounds[-1]
    pictures = sum((last.pool + last.kept).values())
    picture = FLOAT_BYTES * experiment.dataset.num_channels * experiment.dataset.image_size**2
    model = model_bytes(experiment.arch, experiment.tasks[-1].num_seen)
    memories = max(0, found.client_state_bytes - model) * len(experiment.clients)
    return KEPT_CHECKPOINTS * (model + pictures * picture + memories) + model + OTHER_FILES


def plan_words(columns: dict[str, float]) -> dict[str, str]:
    """The same as text."""
    return {
        "clients": big(columns["client_flops"]) + "FLOP",
        "server": big(columns["server_flops"]) + "FLOP",
        "up": big(columns["uplink_bytes"]) + "B",
        "down": big(columns["downlink_bytes"]) + "B",
        "about": duration(columns["seconds"]),
        "disk": big(columns.get("disk_bytes", 0.0)) + "B",
    }


def big(value: float) -> str:
    """Three or four digits and a prefix of thousands.

    >>> big(44734248), big(1.5e15), big(0)
    ('44.73 M', '1.50 P', '0 ')
    """
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:.2f} {prefix}"
    return f"{value:.0f} "


def duration(seconds: float) -> str:
    """A length of time in two digits or so.

    >>> duration(0.012), duration(75), duration(7200), duration(300000), duration(6e8)
    ('0.012 s', '1.2 min', '2.0 h', '3.5 days', '19.0 years')
    """
    for size, unit in ((365 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s"


def show_scale(
    resolved: Resolved, clients: str, per_round: str | None, mbps: float, gflops: float | None, gb: float, as_json: bool
) -> None:
    """Print what federations of several sizes cost their server, and which limit each reaches first."""
    use_all_cores()
    recipe = resolved.recipe
    sizes = parse_clients(clients)
    rules = [per_round] if per_round else [str(recipe.federation.per_round), "10%"]
    turns = {rule: [(n, sites_per_round(rule, n)) for n in sizes] for rule in rules}
    _check_positive({"server-mbps": mbps, "server-gflops": gflops, "server-gb": gb})
    if recipe.method["name"] in WITHOUT_FEDERATION:
        raise ConfigError(
            "E116", f"{recipe.method['name']} cannot be scaled", why="it is a reference line, without a federation"
        )
    dataset, missing = load_or_stand_in(recipe.images)
    drawn = sample(recipe, dataset, sizes[0], 1)
    speed = 1e9 * gflops if gflops else measured_rates(drawn).server
    means = Means(mbps=mbps, flops_per_s=speed, memory_bytes=1e9 * gb)
    found = {rule: [scale(recipe, dataset, n, k, means) for n, k in pairs] for rule, pairs in turns.items()}
    rows = [row for table in found.values() for row in table]
    if None in rows:
        raise _no_forecast(recipe.method["name"])
    if as_json:
        print(json.dumps([asdict(row) | {"limits": row.limits(means)} for row in rows if row]))
        return
    setting = f"{drawn.arch.name}, {len(drawn.tasks)} tasks of {recipe.federation.num_rounds} rounds"
    size = drawn.recipe.federation.min_size
    print(f"{drawn.method.title} on {dataset.name}, {setting}; a site holds {size} images of a task")
    for rule, table in found.items():
        _print_scale(
            f"{rule} of the sites" if rule.endswith("%") else f"{rule} sites", [row for row in table if row], means
        )
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
    if not sizes or not all(1 <= n <= MOST_SITES for n in sizes):
        raise ConfigError(
            "E116",
            f"--clients {text} is not possible",
            why=f"a federation has 1 to {MOST_SITES:,} sites",
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
            "E116", f"--per-round {rule} is not possible", fix="a number such as 20, or a share such as 10%"
        )
    return min(num_clients, max(1, round(wanted)))


def _print_scale(title: str, rows: list[Scale], means: Means) -> None:
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
