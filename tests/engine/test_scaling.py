"""Federations far larger than the machine: drawn lazily, and priced in advance."""

import json
from dataclasses import replace

import pytest
from test_forecast import only_tensors

import rescene
from rescene.config import resolve
from rescene.data import LazySplit, stand_in
from rescene.engine import cost_ledger as ledger_module
from rescene.engine import federation as federation_module
from rescene.engine import prepare
from rescene.engine import transport as transport_module
from rescene.engine.forecast import forecast
from rescene.engine.scaling import Means, Scale, herding_cost, sample, scale

THOUSAND = {"federation.num_clients": 1000, "federation.per_round": 20, "federation.partition": "lazy-dirichlet",
            "federation.min_size": 12, "model.width": 2, "train.batch_size": 8}  # fmt: skip


@pytest.fixture
def draws(monkeypatch):
    """Clients whose images were drawn, in order."""
    drawn, draw = [], LazySplit._draw

    def counted(self, client):
        drawn.append(client)
        return draw(self, client)

    monkeypatch.setattr(LazySplit, "_draw", counted)
    return drawn


@pytest.mark.parametrize("method", ["rescene", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_thousand_sites_of_whom_only_those_who_take_part_are_drawn(monkeypatch, tmp_path, draws, method):
    for module in (ledger_module, federation_module, transport_module):
        monkeypatch.setattr(module, "num_bytes", only_tensors)
    guard = {"method.guard": False, "method.surrogates_per_class": "half"} if method == "rescene" else {}
    result = rescene.run("smoke", out=tmp_path / "r", **THOUSAND, **guard, method=method)
    assert len(draws) == 2 * 2 * 20  # two tasks of two rounds; building all shards would be 2000
    rounds = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert set(draws) == {k for row in rounds if row["kind"] == "round" for k in row["participants"]}
    folder, measured = json.loads((tmp_path / "r" / "partition.json").read_text()), result.values["cost"]["measured"]
    assert folder["num_clients"] == 1000 and all(task["counts"] == [] for task in folder["tasks"])

    recipe = resolve("smoke", {**THOUSAND, **guard, "method": method}).recipe
    row = scale(recipe, prepare(recipe).dataset, 1000, 20, Means())
    # forty sites stand for the thousand, and theirs are other draws
    assert row.up_bytes == pytest.approx(measured["uplink_bytes"], rel=0.1) and measured["uplink_bytes"] > 0
    assert row.down_bytes == measured["downlink_bytes"]
    assert row.server_flops == pytest.approx(measured["server_flops"], rel=0.1)
    pools = [row["notes"].get("pool_size", 0) for row in rounds if row["kind"] == "round"]
    assert row.pool_images == pytest.approx(max(pools), rel=0.1)
    assert row.turns == 0.08 and row.ever_asked == pytest.approx(1 - 0.98**4)


def test_states_are_kept_of_those_who_remember(tmp_path):
    result = rescene.run("smoke", out=tmp_path / "r", **{**THOUSAND, "tasks.limit": 1}, method="fedewc")
    newest = sorted((result.folder / "checkpoints").glob("step-*.json"))[-1]
    kept = json.loads(newest.read_text())["skeleton"]
    text = json.dumps(kept)
    assert text.count("fisher") <= 40 and "fisher" in text  # 20 sites in each of two rounds, not 1000


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_sites(tmp_path):
    whole = rescene.run("smoke", out=tmp_path / "whole", **THOUSAND)
    again = rescene.run("smoke", out=tmp_path / "again", **THOUSAND)
    files = [(result.folder / "model" / "final.safetensors").read_bytes() for result in (whole, again)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_many_sites_per_round_stand_behind_few():
    recipe, dataset = resolve("cifar10", ["federation.num_rounds=4"]).recipe, stand_in("cifar10")
    small, large = (scale(recipe, dataset, 10_000, k, Means()) for k in (100, 1000))
    assert large.round_up_bytes == pytest.approx(10 * small.round_up_bytes)
    assert large.down_bytes == pytest.approx(10 * small.down_bytes)
    # of the pool only the current task grows tenfold: the buffers of earlier ones are full, 1000 for each of 8 classes
    # tasks differ a little, and another one may be the fullest
    assert large.pool_images - 8000 == pytest.approx(10 * (small.pool_images - 8000), rel=0.05)
    everybody = forecast(sample(recipe, dataset, 10_000, 100)).measured()
    # each of the twenty that are drawn stands for five
    assert small.up_bytes == pytest.approx(5 * everybody["uplink_bytes"])


def test_methods_that_ask_everybody_pay_for_everybody():
    recipe, dataset = resolve("cifar10", ["method=fedlwf", "federation.num_rounds=1"]).recipe, stand_in("cifar10")
    rows = [scale(recipe, dataset, n, 10, Means()) for n in (10_000, 100_000)]
    model = rows[0].round_down_bytes / 10
    # the teacher goes to all sites before each task but the first
    assert rows[1].down_bytes - rows[0].down_bytes == pytest.approx(4 * 90_000 * model, rel=1e-3)


def test_a_site_is_as_large_as_one_of_the_recipes():
    recipe, dataset = resolve("cifar10").recipe, stand_in("cifar10")
    for num_clients in (10, 1_000_000):
        experiment = sample(recipe, dataset, num_clients, 10)
        assert sum(experiment.shards[0].counts(3).values()) == 500  # 10,000 images of a task, 20 sites


def test_herding_by_hand():
    assert herding_cost((100, 1000), 1000, 512) == (0.0, 0.0)  # everything is kept
    flops, size = herding_cost((20_000,), 1000, 512)  # 3.2 GB of Gram matrix are not stored
    assert (flops, size) == (2.0 * 1000 * 20_000 * 513, 8 * 20_000 * 512)


def limits_of(**fields):
    plain = dict.fromkeys(Scale.__dataclass_fields__, 0.0) | {"num_clients": 1000, "per_round": 100, "ever_asked": 1.0}
    return Scale(**(plain | fields))


def test_limits_and_their_remedies():
    means = Means(mbps=1000, flops_per_s=1e12, memory_bytes=64e9, round_s=3600)
    assert limits_of().over(means) == {}
    row = limits_of(memory_bytes=640e9, training_s=7200.0, transfer_s=1800.0)
    assert "uploads at once" in row.remedy("memory", means) and "pool" in replace(row, pool_images=9).remedy(
        "memory", means
    )
    assert row.over(means) == {"memory": 10.0, "training": 2.0}
    assert row.remedy("memory", means).startswith("at most 10 sites") and "50 sites" in row.remedy("training", means)
    assert list(limits_of(ever_asked=0.001).over(means)) == ["reach"]
    waiting, busy = limits_of(link_idle=2.0), limits_of(link_s=7200.0)
    assert list(waiting.over(means)) == list(busy.over(means)) == ["link"]
    assert "several links of" in waiting.remedy("link", means) and "at most 50 sites" in busy.remedy("link", means)


def test_a_mechanism_has_no_forecast():
    recipe = resolve("demo", ["method.start=noise", "privacy.mechanism=release", "privacy.epsilon=8"]).recipe
    assert scale(recipe, stand_in("fashion-mini"), 100, 10, Means()) is None
