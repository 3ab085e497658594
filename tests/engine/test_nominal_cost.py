"""The paper's cost tables, regenerated: byte columns to the printed digit, FLOPs within 3 %."""

from statistics import fmean

import pytest

from rescene.config import resolve
from rescene.engine.cost_ledger import nominal_cost
from rescene.methods import method_class
from rescene.nets import Arch
from rescene.paper.costs import METHODS, client_flops, paper_experiment, server_flops

SETS = {"cifar10": (32, 2, 10), "cifar100": (32, 10, 100), "tinyimagenet": (64, 20, 200)}
TABLE = {  # data set -> method -> (state, uplink, downlink) in MB as printed
    "cifar10": {
        "fedavg": (44.73, 44.73, 44.73), "fedewc": (134.13, 44.73, 44.73), "fedlwf": (89.47, 44.73, 44.73),
        "target": (359.31, 44.73, 359.31), "glfc": (91.93, 44.73, 44.73), "fedcbdr": (63.17, 44.73, 44.73),
        "refed": (57.02, 44.73, 44.73), "rescene": (44.73, 0.25, 44.73),
    },
    "cifar100": {
        "fedavg": (44.92, 44.92, 44.92), "fedewc": (134.68, 44.92, 44.92), "fedlwf": (89.84, 44.92, 44.92),
        "target": (359.49, 44.92, 359.49), "glfc": (114.41, 44.92, 44.92), "fedcbdr": (229.24, 44.92, 44.92),
        "refed": (57.21, 44.92, 44.92), "rescene": (44.92, 1.23, 44.92),
    },
    "tinyimagenet": {
        "fedavg": (45.12, 45.12, 45.12), "fedewc": (135.30, 45.12, 45.12), "fedlwf": (90.25, 45.12, 45.12),
        "target": (1303.42, 45.12, 1303.42), "glfc": (286.86, 45.12, 45.12), "fedcbdr": (1519.68, 45.12, 45.12),
        "refed": (143.43, 45.12, 45.12), "rescene": (45.12, 9.83, 45.12),
    },
}  # fmt: skip


@pytest.mark.parametrize(("data", "method"), [(d, m) for d, rows in TABLE.items() for m in rows])
def test_byte_columns_to_the_printed_digit(data, method):
    size, per_task, classes = SETS[data]
    settings = resolve(data, [f"method={method}"]).recipe.build_method()
    cost = settings.nominal_bytes(Arch("resnet18", size), per_task, classes)
    found = [value / 1e6 for value in (cost.state, cost.up, cost.down)]
    assert [f"{value:.2f}" for value in found] == [f"{value:.2f}" for value in TABLE[data][method]]


PFLOP = {  # client work of the run as printed: client-resource table, and the table of more clients
    "cifar10": (32.68, 34.31, 41.32, 72.20, 48.43, 72.71, 71.70, 3.59),
    "cifar100": (33.24, 34.90, 43.20, 84.30, 203.18, 933.15, 146.46, 27.49),
    "tinyimagenet": (67.21, 70.58, 87.38, 158.60, 410.42, 1884.40, 295.96, 56.20),
    "more clients": (46.33, 48.65, 58.69, 132.25, 108.45, 326.31, 139.87, 21.93),
}
MORE_CLIENTS = ["federation.num_clients=100", "federation.per_round=70"]
SERVER_PFLOP = {"target": 38.2, "rescene": 26.6}  # total-compute table; below .01 for all others


def client_pflop(data, method, overrides=(), splits=3):
    return [client_flops(paper_experiment(data, method, seed, overrides)) / 1e15 for seed in range(splits)]


@pytest.mark.parametrize(
    ("data", "method", "printed"), [(d, m, p) for d, row in PFLOP.items() for m, p in zip(METHODS, row, strict=True)]
)
def test_client_flops_within_three_percent(data, method, printed):
    overrides = MORE_CLIENTS if data == "more clients" else []
    name = "cifar10" if overrides else data
    by_chance = (name, method) == ("cifar10", "rescene")  # three splits are too few
    found = client_pflop(name, method, overrides, splits=20 if by_chance else 3)
    assert fmean(found) == pytest.approx(printed, rel=0.03)
    if by_chance:  # results/cost/README.md
        assert min(found) < printed < max(found)


@pytest.mark.parametrize(
    ("model", "printed"), [("resnet50", (2180.66, 342.34, 64.26)), ("vit-small", (2320.76, 364.34, 68.40))]
)
def test_larger_models(model, printed):
    found = [fmean(client_pflop("cifar100", m, [f"model.name={model}"])) for m in ("fedcbdr", "refed", "rescene")]
    assert found == pytest.approx(list(printed), rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_server_flops_of_the_second_task(method):
    found = server_flops(paper_experiment("cifar10", method), 1) / 1e15
    if method in SERVER_PFLOP:
        assert found == pytest.approx(SERVER_PFLOP[method], rel=0.03)
    else:
        assert 0 < found < 0.01


def test_methods_outside_the_papers_table_have_no_nominal_cost():
    assert method_class("joint")().nominal_bytes(Arch("resnet18", 32), 2, 10) is None
    assert nominal_cost(paper_experiment("cifar10", "local")) is None
    assert nominal_cost(paper_experiment("cifar10", "refed"))["client_flops"] > 0
