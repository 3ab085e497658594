"""What a run will cost, against the ledger of the run itself, for every method: FLOPs to the last unit, bytes to a thousandth."""

import pytest

import rescene
from rescene.config import resolve
from rescene.core.record import tensors
from rescene.data import stand_in
from rescene.engine import cost_ledger as ledger_module
from rescene.engine import federation as federation_module
from rescene.engine import forecast as forecast_module
from rescene.engine import prepare
from rescene.engine import transport as transport_module
from rescene.engine.forecast import Exchange, Moment, Rates, forecast, mean_latency, measured_rates, round_latency
from rescene.methods import method_class
from rescene.nets import Arch
from rescene.paper.costs import client_resource_rows, paper_experiment, total_compute_rows
from shipped_methods import SHIPPED

# few and unequal images: sites without any, with a single one, batches of one at the end of an epoch
SMALL = {"federation.num_clients": 5, "federation.per_round": 3, "federation.num_rounds": 2, "federation.beta": 0.3,
         "federation.min_size": 0, "model.width": 2, "train.batch_size": 8, "train.local_epochs": 2,
         "train.server_epochs": 2, "tasks.limit": None}  # fmt: skip
# of methods that cannot use a ConvNet
NETWORKS = {name: {"model.name": "vit-mini"} for name in ("pilora", "fedcprompt")}
LONG = ("moments", "afl", "fedcgs")  # they solve for a head over all pixels, most of a minute each
BYTES = 1e-3
VARIANTS = [
    ("rescene", {"method.buffer": "keep-all", "method.real_batch": "ipc"}),
    ("rescene", {"method.buffer": "none", "method.literal": True}),
    ("rescene", {"method.accumulate": False, "method.surrogates_per_class": "fixed", "method.budget": 3}),
    ("fedaf", {"method.soft_labels": "condensed"}),
    ("fedaf", {"method.cdc_weight": 0, "method.lgkm_weight": 0}),
    ("fedewc", {"method.anchor": "last_round"}),
    ("fedewc", {"method.fisher": "batch_mean"}),
    ("target", {"method.images_per_client": 21, "method.synthetic_batch": 10, "method.warmup_rounds": 0}),
    ("target", {"train.smallest_batch": 4}),
    ("target", {"method.adversarial_weight": 0, "method.kd_weight": 0}),
    ("glfc", {"method.prototype_classes": "previous"}),
    ("refed", {"method.storage": 12}),
    ("refed", {"method.storage": 12, "method.importance": "last-layer"}),
    ("refed", {"method.storage": 12, "method.importance": "random"}),
    ("local", {"method.site": 1}),
]


def only_tensors(tree):
    """Bytes without plain numbers, whose length as text nobody can foresee."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(tree))


def ledger_and_forecast(monkeypatch, folder, images, method, more=None):
    for module in (ledger_module, federation_module, transport_module):  # where payloads and states are counted
        monkeypatch.setattr(module, "num_bytes", only_tensors)
    # how many images the guard withholds depends on the images, so nobody can foresee it
    guard = {"method.guard": False} if "guard" in method_class(method).model_fields else {}
    settings = {**SMALL, "data.path": str(images), "method": method, **guard, **(more or {})}
    result = rescene.run("smoke", out=folder, **settings)
    assert result.values["events_summary"]["client_failures"] == 0
    return result.values["cost"]["measured"], forecast(prepare(resolve("smoke", settings).recipe))


def assert_foreseen(found, measured, loose=()):
    """FLOPs to the last unit, bytes to a thousandth; ``loose`` names the figures of a network as small as these that are not."""
    for key, value in found.measured().items():
        rel = 0.5 if key in loose else 1e-12 if key.endswith("flops") else BYTES
        assert value == pytest.approx(measured[key], rel=rel), key


LOOSE = {  # in a network of a few hundred weights what a rehearsal counts by its shape alone weighs more
    "fedewc": {"client_state_bytes", "downlink_bytes"},  # BatchNorm's statistics, which the Fisher does not have
    "fedssi": {"client_state_bytes"},  # nor synaptic importance
    "scaffold": {  # nor a control variate
        "uplink_bytes",
        "uplink_bytes_per_message",
        "downlink_bytes",
        "downlink_bytes_per_message",
        "client_state_bytes",
    },
    "glfc": {
        "uplink_bytes",
        "uplink_bytes_per_message",
        "server_flops",
        "client_flops",
    },  # the encoder follows the picture
    "target": {"server_flops"},  # so does the generator
    "fedweit": {  # nobody can foresee how many adaptive weights are 0, so all are counted
        "uplink_bytes",
        "uplink_bytes_per_message",
        "downlink_bytes",
        "client_state_bytes",
    },
}


@pytest.mark.parametrize("method", [pytest.param(m, marks=pytest.mark.slow) if m in LONG else m for m in SHIPPED])
def test_every_method_costs_what_was_forecast(monkeypatch, tmp_path, image_folder, method):
    network = {"model.name": "linear", "model.width": None} if method_class(method).additive else NETWORKS.get(method)
    measured, found = ledger_and_forecast(monkeypatch, tmp_path / "r", image_folder, method, network)
    assert_foreseen(found, measured, LOOSE.get(method, ()))
    assert measured["client_flops"] + measured["server_flops"] + measured["uplink_bytes"] > 0


@pytest.mark.parametrize(
    "more",
    [
        {"method.match": ["features", "logits", "pixels"], "method.random_nets": 1},
        {"method.match": ["pixels"]},
        {"model.name": "linear", "model.width": None},  # a body without weights
    ],
    ids=["match", "pixels", "linear"],
)
def test_rescene_with_other_statistics_or_a_linear_network(monkeypatch, tmp_path, image_folder, more):
    measured, found = ledger_and_forecast(monkeypatch, tmp_path / "r", image_folder, "rescene", more)
    assert_foreseen(found, measured)
    assert measured["server_flops"] > 0


@pytest.mark.parametrize("method", ["target", "mfcl"])
def test_methods_that_paint_pictures_for_a_linear_network(monkeypatch, tmp_path, image_folder, method):
    more = {"model.name": "linear", "model.width": None, "train.lr": 0.001}
    measured, found = ledger_and_forecast(monkeypatch, tmp_path / "r", image_folder, method, more)
    assert_foreseen(found, measured, {"server_flops", *LOOSE.get(method, ())})  # the generator follows the picture


@pytest.mark.slow
@pytest.mark.parametrize(("method", "more"), VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_options_that_change_the_cost(monkeypatch, tmp_path, image_folder, method, more):
    measured, found = ledger_and_forecast(monkeypatch, tmp_path / "r", image_folder, method, more)
    assert_foreseen(found, measured, LOOSE.get(method, ()))


@pytest.mark.parametrize("method", ["rescene", "glfc", "refed", "fedcbdr"])
def test_domains(monkeypatch, tmp_path, image_folder, method):
    (tmp_path / "sites").mkdir()
    (image_folder / "train").rename(tmp_path / "sites" / "day")
    (image_folder / "test").rename(tmp_path / "sites" / "night")
    more = {"tasks.scenario": "domain", "tasks.per_task": None}
    measured, found = ledger_and_forecast(monkeypatch, tmp_path / "r", tmp_path / "sites", method, more)
    assert_foreseen(found, measured, LOOSE.get(method, ()))


def test_what_training_decides_is_near(monkeypatch, tmp_path, image_folder):
    for scope in ("global", "share"):  # chance decides which site keeps an exemplar, or how many it draws twice
        more = {"method.budget_scope": scope}
        measured, found = ledger_and_forecast(monkeypatch, tmp_path / scope, image_folder, "fedcbdr", more)
        assert found.measured()["client_flops"] == pytest.approx(measured["client_flops"], rel=0.05)
    more = {"method.form": "svd", "model.width": 8}  # as many columns as the features have rank
    measured, found = ledger_and_forecast(monkeypatch, tmp_path / "svd", image_folder, "fedcbdr", more)
    assert found.measured()["client_flops"] == measured["client_flops"]
    assert found.measured()["downlink_bytes"] == pytest.approx(measured["downlink_bytes"], rel=0.05)


def test_sizes_need_no_pictures():
    recipe = resolve("demo").recipe
    real, sizes = prepare(recipe), prepare(recipe, stand_in("fashion-mini"))
    assert [t["counts"] for t in real.counts()["tasks"]] == [t["counts"] for t in sizes.counts()["tasks"]]
    assert forecast(real).measured() == forecast(sizes).measured()
    assert sizes.dataset.train.pixels.untyped_storage().nbytes() == 1
    with pytest.raises(rescene.core.errors.DataError, match="not known without"):
        stand_in("office31")


def test_a_round_lasts_as_long_as_its_slowest_site_and_the_server():
    exchange = Exchange({0: 4_000, 1: 10_000}, {0: 5_000_000, 1: 0}, 7)
    moment = Moment(0, 0, [exchange, Exchange({0: 1_000}, {0: 0}, 0)], server_flops=600)
    found = round_latency(moment, Rates(client=1_000, server=200), uplink_mbps=4)
    # site 0 works 4 s and sends 40 Mbit in 10 s, site 1 works 10 s; then one second more; then 3 s on the server
    assert (found.client_s, found.upload_s, found.server_s, found.total_s) == (5.0, 10.0, 3.0, 18.0)
    empty = Moment(0, 1, [Exchange({}, {}, 0)])
    assert mean_latency([moment, empty], Rates(1_000, 200), 4).total_s == 9.0


@pytest.mark.parametrize("method", ["rescene", "fedavg"])
def test_the_speed_of_this_device_is_measured(method):
    experiment = prepare(resolve("smoke", {"method": method, "model.width": 2, "device": "cpu"}).recipe)
    rates = measured_rates(experiment)
    assert rates.client == rates.server > 0  # on a CPU


def test_on_a_slow_cpu_a_large_network_works_once(monkeypatch):
    calls = []

    def timed(work, arch, device, num_images):
        calls.append((arch.name, num_images))
        return 10, 2.0

    monkeypatch.setattr(forecast_module, "_timed", timed)
    assert forecast_module._rate(None, Arch("resnet18", 32), "cpu", most=100) == 5.0
    assert calls == [("convnet", 2), ("resnet18", 2)]  # what the first call loads, a small network loads as well


def test_only_calls_long_enough_to_be_timed_count(monkeypatch):
    monkeypatch.setattr(forecast_module, "_timed", lambda work, arch, device, num_images: (10, num_images / 64))
    assert forecast_module._rate(None, Arch("resnet18", 32), "cpu", most=1000) == pytest.approx(10 / (18 / 64))


@pytest.mark.slow
def test_tables_keep_both_conventions_apart():
    (row,) = client_resource_rows(["cifar10"], ["rescene"], seeds=[0])
    assert row["nominal"]["uplink_bytes_per_message"] == 245_760
    assert row["forecast"]["uplink_bytes_per_message"] < 245_760  # half of a small class, absent classes
    assert (
        row["forecast"]["client_flops"] > 2 * row["nominal"]["client_flops"]
    )  # 256 real images where the paper fits 10
    ipc = paper_experiment("cifar10", "rescene", overrides=["method.real_batch=ipc", "method.literal=true"])
    # 3F a surrogate and step: half of the paper's two passes over synthetic and real, less the weights' gradient
    assert forecast(ipc).measured()["client_flops"] == pytest.approx(row["nominal"]["client_flops"] * 3 / 8, rel=0.05)
    (total,) = total_compute_rows(methods=["rescene"], seeds=[0])
    assert total["nominal"]["client_share"] == pytest.approx(0.026, abs=0.002)
