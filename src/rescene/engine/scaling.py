"""What a federation of 10 to 1,000,000 sites costs its server, which limit breaks first, and what to do about it.

A forecast (``engine.forecast``) of at most ``DRAWN`` sites per round out of at most ``LISTED``; where there are more, each of them
stands for several. Every site holds as many images as one of the recipe's. Sites are drawn at random, so that figures of large
federations are good to a few per cent.

    N sites    K per round    R rounds of a task    T tasks
"""

from __future__ import annotations

from dataclasses import dataclass

from rescene.config import Recipe
from rescene.data import Dataset
from rescene.engine.experiment import Experiment, prepare_sizes
from rescene.engine.forecast import Forecast, Moment, forecast
from rescene.functional.herding import GRAM_LIMIT_BYTES
from rescene.nets import FLOAT_BYTES

DRAWN = 20  # sites per round that are rehearsed one by one
LISTED = 40  # sites in all that are
DOUBLE_BYTES = 8
# Flower 1.41 with TLS and SQLite, from results/deploy/wire.json. Its link is one Python process: one core.
LINK_CPU_S_PER_MB = 0.02  # that passes through to or from a site
LINK_CPU_PER_IDLE_SITE = 0.004  # of a core: a site asks every three seconds and says every thirty that it is there


@dataclass(frozen=True)
class Means:
    """What the server has: its line, speed and memory, and how long a round may last."""

    mbps: float = 1000.0
    flops_per_s: float = 1e12
    memory_bytes: float = 64e9
    round_s: float = 3600.0


@dataclass(frozen=True)
class Scale:
    """One size of federation. Bytes count tensors, all sites of a round together; seconds and FLOPs are the server's."""

    num_clients: int
    per_round: int
    turns: float  # rounds that a site takes part in over the whole run, on average
    ever_asked: float  # share of the sites that take part at least once
    round_up_bytes: float
    round_down_bytes: float
    up_bytes: float  # of the run
    down_bytes: float
    transfer_s: float  # of a round, through the server's line
    pool_images: int  # most images that the server trains on
    memory_bytes: float  # the pool, a copy of it for training, and a round's uploads
    server_flops: float  # of the run
    training_s: float  # of the longest round
    herding_flops: float  # of the largest task; not part of the ledger's FLOPs
    herding_bytes: float
    link_s: float  # CPU of Flower's link for one round
    link_idle: float  # cores that idle sites keep busy

    def limits(self, means: Means) -> dict[str, float]:
        """How full each resource is: above 1 it does not fit."""
        return {
            "line": self.transfer_s / means.round_s,
            "link": self.link_s / means.round_s + self.link_idle,
            "memory": max(self.memory_bytes, self.herding_bytes) / means.memory_bytes,
            "training": self.training_s / means.round_s,
            "reach": 0.01 / self.ever_asked,
        }

    def over(self, means: Means) -> dict[str, float]:
        """The limits that break, the worst first, and how many times over they are."""
        worst = sorted(self.limits(means).items(), key=lambda item: -item[1])
        return {name: fill for name, fill in worst if fill > 1}

    def remedy(self, limit: str, means: Means) -> str:
        """What to do where this limit breaks."""
        sites = max(1, int(self.per_round / self.limits(means)[limit]))
        at_most = f"at most {sites} {'site' if sites == 1 else 'sites'} per round"
        if limit == "line":
            return f"{at_most}, or a faster line; federation.wire=uint8 shrinks uploads, not the model"
        if limit == "memory" and not self.pool_images:
            return f"{at_most}: the server holds a round's uploads at once"
        if limit == "memory":
            return f"{at_most}, or a cap on the pool: fewer rounds, a smaller method.ipc, method.accumulate=false"
        if limit == "training":
            return f"{at_most}, fewer train.server_epochs, or a faster server"
        if limit == "link" and self.link_idle > 1:
            return f"use several links of at most {1 / LINK_CPU_PER_IDLE_SITE:.0f} sites each: idle sites poll and use up a core"
        if limit == "link":
            return f"{at_most}, or several links"
        return "more rounds or more sites per round: nearly nobody is ever asked"


def scale(recipe: Recipe, dataset: Dataset, num_clients: int, per_round: int, means: Means) -> Scale | None:
    """The figures of one size; None for methods without a forecast."""
    experiment = sample(recipe, dataset, num_clients, per_round)
    found = forecast(experiment)
    return None if found is None else figures(experiment, found, num_clients, per_round, means)


def sample(recipe: Recipe, dataset: Dataset, num_clients: int, per_round: int) -> Experiment:
    """The recipe with this many sites, lazily drawn, each as large as one of the recipe's own, and few enough per round."""
    own = recipe.federation
    recipe = recipe.model_copy(update={"tasks": recipe.tasks.in_one_order()})  # sites that nobody lists have no order
    one = {"num_clients": 1, "per_round": 1, "partition": "lazy-dirichlet", "exclude": None}
    size = own.min_size if own.partition == "lazy-dirichlet" else 0
    if size < 2:
        whole = prepare_sizes(recipe.model_copy(update={"federation": own.model_copy(update=one)}), dataset)
        size = max(2, max(len(task.train) for task in whole.tasks) // own.num_clients)
    few = one | {"num_clients": min(num_clients, LISTED), "per_round": min(per_round, DRAWN), "min_size": size}
    return prepare_sizes(recipe.model_copy(update={"federation": own.model_copy(update=few)}), dataset)


def figures(experiment: Experiment, found: Forecast, num_clients: int, per_round: int, means: Means) -> Scale:
    """From the forecast of the sites that were drawn to the federation that they stand for."""
    drawn, rounds = experiment.recipe.federation, found.rounds
    each, everybody = per_round / drawn.per_round, num_clients / drawn.num_clients
    beside = [moment for moment in found.moments if moment.round is None]  # where all sites are asked
    up, down = ([each * getattr(m, key) for m in rounds] for key in ("up_bytes", "down_bytes"))
    busiest = max(sum(both) for both in zip(up, down, strict=True))
    rest_up, rest_down = (everybody * sum(getattr(m, key) for m in beside) for key in ("up_bytes", "down_bytes"))
    image_bytes = experiment.arch.channels * experiment.arch.image_size**2 * FLOAT_BYTES
    budget, features = experiment.method.kept_per_class(), experiment.arch.skeleton(1).feature_size
    pool = max(trained_on(m, each, budget) for m in rounds)
    flops = {id(m): server_flops(m, each, budget) for m in rounds}
    candidates = [[round(each * n) for n in m.pool.values()] for m in rounds]
    herding = [herding_cost(tuple(counts), budget, features) for counts in candidates if budget]
    return Scale(
        num_clients=num_clients,
        per_round=per_round,
        turns=per_round * len(rounds) / num_clients,
        ever_asked=1 - (1 - per_round / num_clients) ** len(rounds),
        round_up_bytes=sum(up) / len(up),
        round_down_bytes=sum(down) / len(down),
        up_bytes=sum(up) + rest_up,
        down_bytes=sum(down) + rest_down,
        transfer_s=8 * busiest / (1e6 * means.mbps),
        pool_images=pool,
        memory_bytes=2 * pool * image_bytes + max(up),
        server_flops=sum(flops.values()) + sum(m.server_flops for m in beside),
        training_s=max(flops.values()) / means.flops_per_s,
        herding_flops=max((flops for flops, _ in herding), default=0.0),
        herding_bytes=max((size for _, size in herding), default=0.0),
        link_s=LINK_CPU_S_PER_MB * busiest / 1e6,
        link_idle=LINK_CPU_PER_IDLE_SITE * num_clients,
    )


def trained_on(moment: Moment, each: float, budget: int) -> int:
    """Images that the server trains on where ``each`` site stands for several: what it keeps of a class has a budget."""
    kept = sum(min(round(each * n), budget) if budget else n for n in moment.kept.values())
    return kept + round(each * (moment.trained_on - moment.kept.total()))


def server_flops(moment: Moment, each: float, budget: int) -> float:
    """The server's work of a round: in step with the images it trains on, or with the sites that it hears."""
    grown = trained_on(moment, each, budget) / moment.trained_on if moment.trained_on else each
    return moment.server_flops * grown


def herding_cost(candidates: tuple[int, ...], budget: int, feature_size: int) -> tuple[float, float]:
    """FLOPs for all classes of a task and bytes for one, as ``functional.herding`` works (Eq. 2), in float64.

    >>> herding_cost((10, 200), 20, 8)  # the first class is kept whole; the second: Gram matrix, then a column per pick
    (648000.0, 332800.0)
    """
    flops = size = 0.0
    for n in candidates:
        if n <= budget:
            continue
        is_stored = n * n * DOUBLE_BYTES <= GRAM_LIMIT_BYTES
        flops += 2.0 * n * n * feature_size + 2.0 * budget * n if is_stored else 2.0 * budget * n * (feature_size + 1)
        size = max(size, DOUBLE_BYTES * n * (feature_size + (n if is_stored else 0)))
    return flops, float(size)
