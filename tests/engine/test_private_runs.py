"""Whole runs behind a mechanism: what they state, that they resume to the same bytes, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError, RunError
from rescene.core.rng import Rng
from rescene.methods.surrogates import surrogates_of
from rescene.training import Condensation

SMALL = {"federation.num_clients": 2, "federation.per_round": 2, "federation.num_rounds": 2, "tasks.limit": 2,
         "method.ipc": 2, "method.num_steps": 2, "method.start": "noise", "train.server_epochs": 1,
         "model.width": 4, "federation.evaluate_every": 0}  # fmt: skip
RELEASE = {
    "privacy.mechanism": "release",
    "privacy.noise_multiplier": 0.2,
    "privacy.threshold": 1.0,
    "privacy.num_nets": 1,
}


def run(folder, **more):
    return rescene.run("smoke", out=folder, **{**SMALL, **more})


def model(folder):
    return load_file(folder / "model" / "final.safetensors")


@pytest.mark.slow
def test_a_private_run_states_its_guarantee_and_another_draw_differs(tmp_path):
    first, second = (run(tmp_path / name, **RELEASE) for name in "ab")
    stated = first.values["privacy"]
    # two releases at .2 are one at .2 / sqrt 2: the closed form, from another place (scipy's normal law)
    from scipy.stats import norm

    mu, epsilon = 2**0.5 / 0.2, stated["epsilon"]
    delta = norm.cdf(mu / 2 - epsilon / mu) - 2.718281828459045**epsilon * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert stated["private"] and stated["releases_per_record"] == 2 and "whole run" in stated["statement"]
    a, b = model(first.folder), model(second.folder)
    assert any(not torch.equal(a[key], b[key]) for key in a), "the noise does not come from the seed"


def test_an_interrupted_private_run_ends_with_the_same_bytes(tmp_path, monkeypatch):
    """Stopped after a round's releases but before its checkpoint, so that the round is done again from the ledger."""
    import shutil

    from rescene.engine.loop import Run

    perform = Run.perform

    def stop_after(self, step):
        perform(self, step)
        if step.task.index == 1 and step.round == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "perform", stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", **RELEASE)
    monkeypatch.setattr(Run, "perform", perform)
    shutil.copytree(tmp_path / "stopped" / "ledgers", tmp_path / "copy")
    resumed = run(tmp_path / "stopped", **RELEASE)
    monkeypatch.setenv("RESCENE_LEDGERS", str(tmp_path / "copy"))
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "copy").glob("*.jsonl")}
    whole = run(tmp_path / "whole", **RELEASE)
    assert drawn and all((tmp_path / "copy" / name).read_bytes() == data for name, data in drawn.items())
    assert (resumed.folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()
    a, b = model(resumed.folder), model(whole.folder)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_sites_decline_after_their_participations_and_the_run_goes_on(tmp_path):
    capped = run(tmp_path / "r", **RELEASE, **{"privacy.max_participations": 1})
    assert capped.values["events_summary"]["uploads_declined"] == 4  # two sites, second round of two tasks
    assert capped.values["privacy"]["releases_per_record"] == 1
    events = (tmp_path / "r" / "events.jsonl").read_text()
    assert events.count("W310") == 4 and "site declines" in events


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"privacy.mechanism": "paper-experiment", "privacy.noise_multiplier": 1.0}, "empirical"),
        ({**RELEASE, "privacy.noise": "seeded"}, "test mode"),
        ({}, "no formal guarantee"),
    ],
)
def test_what_is_not_private_says_so_and_prints_no_epsilon(tmp_path, change, says):
    stated = run(tmp_path / "r", **change).values["privacy"]
    assert not stated["private"] and stated.get("epsilon") is None
    assert says in stated["statement"] and "epsilon" not in stated["statement"]


@pytest.mark.slow
def test_the_test_mode_repeats(tmp_path):
    a, b = (run(tmp_path / name, **RELEASE, **{"privacy.noise": "seeded"}) for name in "ab")
    assert all(torch.equal(x, y) for x, y in zip(model(a.folder).values(), model(b.folder).values(), strict=True))


def test_an_unreadable_ledger_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RESCENE_LEDGERS", str(tmp_path))
    (tmp_path / "client-1.jsonl").write_text("spilled coffee\n")
    with pytest.raises(RunError) as caught:
        run(tmp_path / "r", **RELEASE)
    assert caught.value.code == "E411"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["privacy.mechanism=release"], "either noise_multiplier"),
        (["privacy.mechanism=release", "privacy.epsilon=8", "privacy.noise_multiplier=1"], "either noise_multiplier"),
        (["privacy.mechanism=release", "privacy.noise_multiplier=0"], "adds no noise"),
        (["privacy.mechanism=release", "privacy.epsilon=0"], "greater than 0"),
        (["privacy.mechanism=release", "privacy.epsilon=8", "method.start=real"], "method.start=noise"),
        (["privacy.mechanism=per-example", "privacy.epsilon=8", "method.num_steps=0"], "at least one step"),
        (["privacy.mechanism=release", "privacy.epsilon=8", "method.start=coloured"], "method.num_steps=0"),
        (["privacy.mechanism=paper-experiment"], "missing"),
        (["privacy.mechanism=paper-experiment", "privacy.epsilon=8"], "certifies none"),
        (["privacy.mechanism=paper-experiment", "privacy.noise_multiplier=1", "method.clip=null"], "clips each"),
        (["privacy.mechanism=paper-experiment", "privacy.noise_multiplier=1", "method.step=polyak"], "loss, which is"),
        (["privacy.mechanism=per-example", "privacy.epsilon=8", "method.step=polyak"], "method.step=fixed"),
        (
            ["privacy.mechanism=release", "privacy.epsilon=8", "method=fedaf", "method.start=noise"],
            "FedAF cannot use release: it also sends",
        ),
    ],
)
def test_recipes_that_promise_too_much_are_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        resolve("smoke", ["method.start=noise", *overrides])


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        ([], "fixed"),
        (["method=rescene-plus"], "polyak"),
        (["method=feddm"], "fixed"),
        (["method.literal=true"], "fixed"),
        (["method.literal=true", "method.step=polyak"], "polyak"),
        (["privacy.mechanism=paper-experiment", "privacy.noise_multiplier=1"], "fixed"),
        (["privacy.mechanism=release", "privacy.epsilon=8"], "fixed"),
        (["privacy.mechanism=release", "privacy.epsilon=8", "method.step=polyak"], "polyak"),
    ],
)
def test_steps_follow_the_loss_only_where_no_mechanism_hides_it(overrides, step):
    assert resolve("smoke", ["method.start=noise", *overrides]).recipe.method["step"] == step


DP = {
    "privacy.mechanism": "dp-sgd",
    "model.norm": "group",
    "privacy.sampling_rate": 0.5,
    "privacy.noise_multiplier": 1.0,
    "federation.num_clients": 2,
    "federation.num_rounds": 2,
    "model.width": 4,
}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"method": "fedavg", "model.norm": "batch"}, "model.norm=group"),
        ({"method": "fedewc"}, "FedEWC cannot use dp-sgd: the Fisher diagonal"),
        ({"method": "target"}, "synthetic images"),
        ({"method": "glfc"}, "a gradient from which the server reconstructs"),
        ({"method": "rescene"}, "it can use: none, release"),
        *(
            ({"method": "fedcbdr", "method.budget_scope": scope}, "method.budget_scope=client")
            for scope in ("global", "independent", "share")
        ),
        ({"method": "fedavg", "privacy.epsilon": 8}, "either noise_multiplier"),
    ],
)
def test_methods_that_cannot_be_private_are_refused_with_the_reason(overrides, says):
    with pytest.raises(ConfigError, match=says):
        resolve("smoke", DP | overrides)


@pytest.mark.parametrize(
    ("method", "tasks"),
    [
        ("fedavg", 1),
        pytest.param("fedlwf", 1, marks=pytest.mark.slow),
        pytest.param("fedcbdr", 2, marks=pytest.mark.slow),
        ("refed", 2),
        pytest.param("cfed", 1, marks=pytest.mark.slow),
        pytest.param("icarl", 2, marks=pytest.mark.slow),
    ],
)
def test_methods_that_send_weights_state_what_their_most_used_record_spends(tmp_path, method, tasks):
    pytest.importorskip("opacus", reason="rescene[privacy]")
    found = rescene.run("smoke", out=tmp_path / "r", method=method, **DP)
    stated = found.values["privacy"]
    assert stated["private"] and stated["releases_per_record"] == 2 * 2 * tasks  # steps x rounds x tasks
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    made_by_the_server = {"num_reviewers", "distillation_loss"}
    told = {key for row in rows for key in row.get("notes", {})}
    assert told <= made_by_the_server, "losses and sizes of memories stay at the sites"


def test_an_interrupted_dp_sgd_run_ends_with_the_bytes_it_would_have_had(tmp_path, monkeypatch):
    """The ledger of the resumed run makes another run, from the beginning, the same one: work counted included."""
    pytest.importorskip("opacus", reason="rescene[privacy]")
    from rescene.engine.loop import Run

    perform = Run.perform

    def stop_after(self, step):
        perform(self, step)
        if step.task.index == 1 and step.round == 1:
            raise KeyboardInterrupt

    monkeypatch.setenv("RESCENE_LEDGERS", str(tmp_path / "ledgers"))
    monkeypatch.setattr(Run, "perform", stop_after)
    with pytest.raises(KeyboardInterrupt):
        rescene.run("smoke", out=tmp_path / "stopped", method="fedavg", **DP)
    monkeypatch.setattr(Run, "perform", perform)
    resumed, whole = (rescene.run("smoke", out=tmp_path / name, method="fedavg", **DP) for name in ("stopped", "whole"))
    assert (resumed.folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()
    assert all(torch.equal(v, model(whole.folder)[k]) for k, v in model(resumed.folder).items())


def test_a_delta_that_promises_nothing_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "r", **RELEASE, **{"privacy.delta": 0.01})
    assert caught.value.code == "E173" and not (tmp_path / "r").exists()


def test_the_guard_keeps_unchanged_images_of_small_classes_at_home(tiny_world):
    """Client 1 has 13 and 3 images; with IPC 10 the three are all there are, the thirteen are not."""
    shard, net = tiny_world["shards"][1], tiny_world["net"]
    settings = Condensation(num_steps=0, surrogates_per_class="min")
    (made,) = surrogates_of(net, [shard], [Rng(0)], settings, 0)
    assert made.num_withheld == 3 and made.labels.tolist() == [0] * 10
    assert made.as_upload()["notes"]["num_withheld"] == 3 and len(made.start) == 10
    (moved,) = surrogates_of(
        net, [shard], [Rng(0)], Condensation(num_steps=3, real_batch=6, surrogates_per_class="half"), 0
    )
    assert moved.num_withheld == 0 and "num_withheld" not in moved.as_upload()["notes"]


def test_a_site_from_which_nothing_leaves_sends_whole_numbers_as_labels(tiny_world):
    """A deployed server refuses an answer whose row of labels is none."""
    settings = Condensation(num_steps=0, ipc=20, surrogates_per_class="min")
    (made,) = surrogates_of(tiny_world["net"], [tiny_world["shards"][1]], [Rng(0)], settings, 0)
    assert made.num_withheld == 16 and len(made.labels) == 0 and made.labels.dtype == torch.int64


@pytest.mark.slow
def test_the_guard_is_counted_and_leakage_knows_the_start_images(tmp_path):
    start = {"method.start": "real", "method.ipc": 600, "method.num_steps": 0}
    held = run(tmp_path / "held", **start, **{"method.surrogates_per_class": "half"}).values
    assert held["events_summary"]["images_withheld"] > 0 and "I310" in (tmp_path / "held" / "events.jsonl").read_text()
    free = run(tmp_path / "free", **start, **{"method.guard": False}).values
    leak = free["leakage"]
    assert leak["unmoved"] == leak["exact_copies"] == leak["num_images"] and leak["start_rms_mean"] == 0
    rows = json.loads((tmp_path / "free" / "results.json").read_text())["leakage"]["per_task"]
    assert all(row["unmoved"] == row["num_images"] for row in rows)
    noise = run(tmp_path / "noise", **{"method.num_steps": 1}).values["leakage"]
    assert noise["unmoved"] == noise["exact_copies"] == 0 and noise["start_rms_mean"] > 0


def test_a_notice_sees_what_the_upload_does_not_carry(tiny_world):
    seen = []
    shard = replace(tiny_world["shards"][1], notice=lambda images, start: seen.append((images, start)))
    (made,) = surrogates_of(tiny_world["net"], [shard], [Rng(0)], Condensation(ipc=2, num_steps=1), 0)
    assert torch.equal(seen[0][0], made.images) and torch.equal(seen[0][1], made.start)
    assert "start" not in made.as_upload()
