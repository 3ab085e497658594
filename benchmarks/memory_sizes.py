"""How many surrogates and kept images the paper's splits allow, counted on our splits: no data and no run is needed.

    python benchmarks/memory_sizes.py             (writes the two tables of results/cost/README.md, ten seconds)

The first table has the surrogates that arrive in a run and those that stay in the buffers, beside Table 4b. The second has the images
of earlier tasks that a client of GLFC, FedCBDR or Re-Fed keeps while it learns the last task, as a share of all that it ever held.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cells import fill

from rescene.core.method_style import style_of
from rescene.engine.cost_ledger import setting_of
from rescene.engine.experiment import Experiment
from rescene.methods.refed import ReFed
from rescene.paper import printed
from rescene.paper.costs import DATA, paper_experiment

PAGE = Path(__file__).parents[1] / "results" / "cost" / "README.md"
SEEDS = range(10)
IPC, BUFFER = 10, 1000
RULES: dict[str, Callable[[int], int]] = {
    "min(IPC, n)": lambda n: min(IPC, n),
    "n // 2 at most": lambda n: min(IPC, n // 2),
    "IPC, whatever n is": lambda n: IPC if n else 0,
}
KEPT = {"glfc": (20, 50), "fedcbdr": (50, 150)}  # images of a class on a client: Table 1 and Table 8


def surrogates(world: Experiment, rule: Callable[[int], int]) -> tuple[int, int, float]:
    """(all that arrive, all that the buffers hold at the end, percent of what arrives that is of classes with IPC images or fewer)."""
    setting, arrived, held, small = setting_of(world), 0, 0, 0
    for task, sites in zip(world.tasks, setting.counts, strict=True):
        turns = Counter(site for r in range(setting.num_rounds) for site in world.participants(task, r))
        for c in range(len(task.classes)):
            sent = [(images[c], turns[site] * rule(images[c])) for site, images in enumerate(sites)]
            arrived += (of_class := sum(number for _, number in sent))
            held += min(BUFFER, of_class)
            small += sum(number for n, number in sent if n <= IPC)
    return arrived, held, 100 * small / arrived


def kept_share(world: Experiment, budget: int) -> float:
    """Percent of the images of earlier tasks that all clients together keep, so many of each class at most."""
    old = [n for sites in setting_of(world).counts[:-1] for site in sites for n in site]
    return 100 * sum(min(budget, n) for n in old) / sum(old)


def refed_share(world: Experiment) -> float:
    """The same for Re-Fed, whose storage also holds the new images."""
    setting, last = setting_of(world), len(world.tasks) - 1
    assert isinstance(world.method, ReFed)
    old = sum(sum(sizes) for sizes in setting.sizes[:-1])
    return 100 * world.method.nominal_replayed(setting, last) * setting.num_clients / old


def told(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):,.0f} ± {statistics.stdev(values):,.0f}"


def surrogate_rows() -> Iterator[str]:
    heads = ("data, beta 0.5", "rule", "arrive", "paper", "in the buffers", "paper", "of classes that fit into IPC")
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    paper = {(n.data, n.setting): f"{n.mean:,.0f}" for n in printed("full-accumulation") if n.metric == "samples"}
    for data in DATA:
        worlds = [paper_experiment(data, "rescene", seed) for seed in SEEDS]
        for name, rule in RULES.items():
            arrived, held, small = zip(*(surrogates(world, rule) for world in worlds), strict=True)
            row = (
                data,
                name,
                told(arrived),
                paper[data, "keep-all"],
                told(held),
                paper[data, "temporal"],
                told(small) + " %",
            )
            yield f"| {' | '.join(row)} |"


def kept_rows() -> Iterator[str]:
    budgets = [(method, budget) for method, several in KEPT.items() for budget in several]
    heads = [f"{style_of(method).label}, {budget} of a class" for method, budget in budgets]
    yield f"| data | clients | beta | {' | '.join(heads)} | Re-Fed |\n|---|---|---|{'---|' * (len(heads) + 1)}"
    for data, clients in (("cifar10", 20), ("cifar10", 100), ("cifar100", 20), ("tinyimagenet", 20)):
        for beta in (0.1, 0.5, 1.0) if clients == 20 else (0.5,):
            changed = [f"federation.beta={beta}", f"federation.num_clients={clients}"]
            worlds = [paper_experiment(data, "refed", seed, changed) for seed in SEEDS]
            shares = [told([kept_share(world, budget) for world in worlds]) for _, budget in budgets]
            cached = told([refed_share(world) for world in worlds])
            yield f"| {data} | {clients} | {beta} | {' | '.join(shares)} | {cached} |"


if __name__ == "__main__":
    for mark, rows in (("surrogates", surrogate_rows), ("kept images", kept_rows)):
        fill(PAGE, mark, "\n".join(rows()))
