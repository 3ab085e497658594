"""What a run will cost, on the terminal: `rescene cost`, and the figures of `rescene sweep --plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from rescene.cli.frame import busy
from rescene.cli.listing import print_rows
from rescene.config import Resolved
from rescene.config.schema import DataSection
from rescene.data import Dataset, has_stand_in, stand_in
from rescene.engine import Experiment, prepare_sizes, use_all_cores
from rescene.engine.experiment import load_data
from rescene.engine.forecast import Forecast, forecast
from rescene.engine.forecast.rates import Rates, mean_latency, measured_rates
from rescene.engine.nominal import nominal_cost
from rescene.errors import ConfigError, DataError

NO_FORECAST = "E114"
_load = lru_cache(maxsize=1)(load_data)  # the cells of a sweep mostly share their images
UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Priced:
    """A run's forecast with this device's speed; ``missing`` is the complaint about data that are not here."""

    experiment: Experiment
    forecast: Forecast
    rates: Rates
    missing: DataError | None

    def seconds(self) -> float:
        """The whole run on this device, which does the clients' work as well as the server's."""
        found = self.forecast.measured()
        clients = found["client_flops"] + self.forecast.evaluation_flops
        return clients / self.rates.client + found["server_flops"] / self.rates.server


def price(resolved: Resolved) -> Priced:
    """Forecast a run; a known data set that is not here is replaced by its published sizes."""
    use_all_cores()
    dataset, missing = load_or_stand_in(resolved.recipe.images)
    experiment = prepare_sizes(resolved.recipe, dataset)
    found = forecast(experiment)
    if found is None:
        raise ConfigError(
            NO_FORECAST,
            f"the cost of {experiment.method.name!r} is not known in advance",
            why="only the methods of this package have a forecast, without a privacy mechanism and without drift",
            fix="run it with tasks.limit=1 federation.num_rounds=1 and read the cost in results.json",
        )
    return Priced(experiment, found, measured_rates(experiment), missing)


def load_or_stand_in(data: DataSection) -> tuple[Dataset, DataError | None]:
    """The images, or the published sizes of a known data set and the complaint that it is not here."""
    try:
        return _load(data), None
    except DataError as error:
        if data.path is not None or not has_stand_in(data.name):
            raise
        return stand_in(data.name), error


def show_cost(
    resolved: Resolved, uplink_mbps: float, client_gflops: float | None, server_gflops: float | None, as_json: bool
) -> None:
    for name, value in (
        ("uplink-mbps", uplink_mbps),
        ("client-gflops", client_gflops),
        ("server-gflops", server_gflops),
    ):
        if value is not None and not value > 0:
            raise ConfigError("E115", f"--{name} {value:g} is not possible", fix="a number above 0")
    with busy("measuring this device"):
        priced = price(resolved)
    facts = _facts(priced, uplink_mbps, client_gflops, server_gflops)
    if as_json:
        print(json.dumps(facts))
        return
    print(f"{facts['method']} on {facts['data']}, {facts['setting']}")
    print_rows(_cost_table(priced, facts))
    print()
    print_rows(_time_table(facts))
    print(
        f"Measured on this device ({facts['device']}): {big(priced.rates.client)}FLOP/s as a client, "
        f"{big(priced.rates.server)}FLOP/s as the server. Times are estimates."
    )
    for key, why in priced.forecast.unsure.items():
        print(f"{key}: {why}.")
    if priced.missing:
        print(f"Sizes as published: {priced.missing.what}.")


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
        "forecast": found.measured()
        | {
            "client_flops_per_round_mean": sum(turns) / len(turns),
            "client_flops_per_round_max": max(turns),
            "evaluation_flops": found.evaluation_flops,
        },
        "nominal": nominal_cost(experiment),
        "unsure": found.unsure,
        "latency": asdict(latency)
        | {"total_s": latency.total_s, "uplink_mbps": uplink_mbps}
        | {"client_flops_per_s": assumed.client, "server_flops_per_s": assumed.server},
        "time": {"total_s": priced.seconds(), "client_flops_per_s": here.client, "server_flops_per_s": here.server},
        "data_missing": None if priced.missing is None else priced.missing.what,
    }


def _cost_table(priced: Priced, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The forecast beside the paper's convention."""
    found, nominal = facts["forecast"], facts["nominal"] or {}
    words = {key: why.partition(":")[0] + " " for key, why in priced.forecast.unsure.items()}
    rows = (
        ("client work of the run, all sites", "client_flops", "FLOP"),
        ("  one site in one round, mean", "client_flops_per_round_mean", "FLOP"),
        ("  one site in one round, most", "client_flops_per_round_max", "FLOP"),
        ("client state", "client_state_bytes", "B"),
        ("upload per site and round", "uplink_bytes_per_message", "B"),
        ("download per site and round", "downlink_bytes_per_message", "B"),
        ("upload in all", "uplink_bytes", "B"),
        ("download in all", "downlink_bytes", "B"),
        ("server work of the run", "server_flops", "FLOP"),
    )
    return [
        {
            "cost": name,
            "forecast": words.get(key, "") + big(found[key]) + unit,
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
    """One cell of a sweep in plain numbers."""
    found = priced.forecast.measured()
    keys = ("client_flops", "server_flops", "uplink_bytes", "downlink_bytes")
    return {key: found[key] for key in keys} | {"seconds": priced.seconds()}


def plan_words(columns: dict[str, float]) -> dict[str, str]:
    """The same for people."""
    return {
        "clients": big(columns["client_flops"]) + "FLOP",
        "server": big(columns["server_flops"]) + "FLOP",
        "up": big(columns["uplink_bytes"]) + "B",
        "down": big(columns["downlink_bytes"]) + "B",
        "about": duration(columns["seconds"]),
    }


def big(value: float) -> str:
    """Three or four digits and a prefix of thousands.

    >>> big(44734248), big(1.5e15), big(0)
    ('44.73 M', '1.50 P', '0 ')
    """
    for size, prefix in UNITS:
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
