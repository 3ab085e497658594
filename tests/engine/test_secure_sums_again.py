"""A site leaves a run behind secure sums: sums over the others are taken anew, with fresh noise, and everything is charged."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import rescene
from rescene.api import execute
from rescene.config import resolve
from rescene.config.site_sections import SitesSection
from rescene.core.errors import DataError
from rescene.engine import RunFolder
from rescene.engine.loop import Run
from rescene.engine.transport import ledger_in
from rescene.engine.withdrawal import check_can_forget, forget
from rescene.methods.moments import EVERYBODY
from rescene.privacy.accounting import Composition, epsilon_of, replaced_epsilon
from rescene.privacy.feature_sums import deviations
from rescene.privacy.ledger_file import largest_total
from small_images import some_of_fashion_mini

NUM, HONEST, GONE, SIGMA = 5, 3, 1, 0.8
SETTING = {"model.name": "linear", "model.lens": "waves", "train.augment": False, "method": "moments", "tasks.limit": 2,
           "federation.num_clients": NUM, "federation.per_round": 2, "federation.num_rounds": 1, "data.image_size": 16,
           "method.num_features": 12, "privacy.mechanism": "release", "privacy.noise_multiplier": SIGMA, "privacy.clip": 1,
           "privacy.honest_sites": HONEST}  # fmt: skip
SEEDED = {"privacy.noise": "seeded"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return some_of_fashion_mini(tmp_path_factory.mktemp("images"), 40, 10)


@pytest.fixture(scope="module")
def noised(images, tmp_path_factory):
    """A finished run with noise of the operating system."""
    return run(images, tmp_path_factory.mktemp("noised") / "run").folder


def run(images, folder, **more):
    return rescene.run("smoke", out=folder, **{**SETTING, "data.path": images, **more})


def withdraw(folder, out, client=GONE, charge=True):
    return forget(RunFolder(folder), resolve(folder / "config.yaml"), client, RunFolder(out), charge=charge)


def state_of(folder):
    return RunFolder(folder).checkpoints.load().tree["state"]


def part_of(folder):
    (part,) = state_of(folder).parts
    assert part.client == EVERYBODY
    return part


def charges(folder, client):
    return ledger_in(folder / "ledgers", client).charges()


def same_model(one, other):
    found, wanted = (load_file(folder / "model" / "final.safetensors") for folder in (one, other))
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    "method", ["moments", *(pytest.param(name, marks=pytest.mark.slow) for name in ("afl", "fedcgs"))]
)
def test_the_new_sums_are_those_of_the_run_that_never_met_the_site(images, tmp_path, method):
    """Bit for bit with seeded noise; and beside the noise the sums are those of the plain run without the site."""
    more = SEEDED | {"method": method}
    whole = run(images, tmp_path / "run", **more)
    before = part_of(whole.folder)
    without = more | {"federation.exclude": [GONE]}
    wanted = run(images, tmp_path / "wanted", **without, **{"privacy.earlier_sums": 1})
    never = run(images, tmp_path / "never", **without)
    record = withdraw(whole.folder, tmp_path / "new")
    new, right, other = (part_of(folder) for folder in (tmp_path / "new", wanted.folder, never.folder))
    for name in ("counts", "sums", "second"):
        assert torch.equal(getattr(new, name), getattr(right, name)), name
        assert not torch.equal(getattr(new, name), getattr(other, name)), f"{name} must have fresh noise"
    assert same_model(tmp_path / "new", wanted.folder)
    assert rescene.load(tmp_path / "new").values["accuracy_matrix"] == wanted.values["accuracy_matrix"]
    mechanism = resolve(tmp_path / "new" / "config.yaml").recipe.promise(2).mechanism
    of_count = deviations(mechanism, 12)[0] * math.sqrt(2 * (NUM - 1) / HONEST)  # of the difference of two sums
    assert float((new.counts - other.counts).abs().max()) < 6 * of_count
    assert (before.noises, new.noises) == (pytest.approx(2 * NUM / HONEST), pytest.approx(2 * (NUM - 1) / HONEST))
    assert record["summed_again"] and record["exact"] and record["num_images"] is None
    assert "stay released" in record["remains"][0] and record["epsilon_after"] is None, "test mode promises nothing"


def test_nothing_is_charged_without_consent_and_the_cost_is_told(noised, tmp_path):
    with pytest.raises(DataError, match="E232") as error:
        withdraw(noised, tmp_path / "new", charge=False)
    mechanism = resolve(noised / "config.yaml").recipe.promise(2).mechanism
    factor = mechanism.replaced / mechanism.sensitivity
    for releases in (1, 2):
        whole = Composition(1, releases)
        told = epsilon_of(SIGMA, whole, 1e-5), replaced_epsilon(SIGMA, whole, 1e-5, factor)
        assert all(f"({epsilon:.2f}, 1e-05)" in error.value.why for epsilon in told)
    assert "--charge" in error.value.fix
    assert not (tmp_path / "new" / "ledgers").exists()


def test_both_releases_are_in_the_ledgers_and_in_what_is_promised(noised, tmp_path):
    before = rescene.load(noised).values["privacy"]
    record, new = withdraw(noised, tmp_path / "new"), tmp_path / "new"
    after = rescene.load(new).values["privacy"]
    both = epsilon_of(SIGMA, Composition(1, 2), 1e-5)
    assert before["epsilon"] < after["epsilon"] == pytest.approx(both) == record["epsilon_after"]
    assert record["epsilon_before"] == pytest.approx(before["epsilon"])
    assert record["epsilon_replaced_after"] == pytest.approx(after["epsilon_replaced"])
    assert before["epsilon_replaced"] < after["epsilon_replaced"]
    assert after["releases_per_record"] == 2 and "epsilon counts them too" in after["statement"]
    for client in set(range(NUM)) - {GONE}:
        ledger = ledger_in(new / "ledgers", client)
        found = ledger.charges()
        assert [charge.task for charge in found] == [0, 1, 0, 1] and len({charge.run for charge in found}) == 2
        assert largest_total(found, ledger.lists(found), 1e-5) == pytest.approx(both)
        assert len(charges(noised, client)) == 2, "the old folder is not touched"
    assert not (new / "ledgers" / f"client-{GONE}.jsonl").exists()
    assert withdraw(noised, new, charge=False) == record, "what is done needs no consent"


def test_each_withdrawal_is_one_more_release(noised, tmp_path):
    withdraw(noised, tmp_path / "one")
    record = withdraw(tmp_path / "one", tmp_path / "two", client=3)
    assert record["epsilon_after"] == pytest.approx(epsilon_of(SIGMA, Composition(1, 3), 1e-5))
    assert len(charges(tmp_path / "two", 0)) == 6
    recipe = resolve(tmp_path / "two" / "config.yaml").recipe
    assert (recipe.federation.exclude, recipe.privacy.earlier_sums) == ([1, 3], 2)
    with pytest.raises(DataError, match="E233.*2 sites would be left, and a secure sum needs 3"):
        withdraw(tmp_path / "two", tmp_path / "three", client=0)


def test_a_sites_own_limit_is_asked_first(images, tmp_path):
    folder = run(images, tmp_path / "run").folder
    once, twice = (epsilon_of(SIGMA, Composition(1, n), 1e-5) for n in (1, 2))
    floor = folder / "ledgers" / "floor.yaml"
    floor.write_text(f"epsilon_max: {(once + twice) / 2}\n")
    with pytest.raises(DataError, match="E234.*site 0 does not allow"):
        withdraw(folder, tmp_path / "new")
    assert not (tmp_path / "new" / "ledgers").exists(), "nothing was drawn"
    floor.write_text(f"epsilon_max: {twice + 0.01}\n")
    assert withdraw(folder, tmp_path / "new")["client"] == GONE


def test_killed_in_the_middle_it_goes_on_with_the_same_numbers(noised, tmp_path, monkeypatch):
    seen = []

    def die(self, step):
        seen.append(self.parts.state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            withdraw(noised, tmp_path / "new")
    withdraw(noised, tmp_path / "new")
    assert torch.equal(part_of(tmp_path / "new").second, seen[-1].parts[0].second)
    assert len(charges(tmp_path / "new", 0)) == 4
    rounds = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "round" for row in rounds) == 2


def test_an_interrupted_run_stands_where_it_stood_and_is_resumed(images, tmp_path):
    def stop(event):
        if event["event"] == "task":
            raise KeyboardInterrupt

    resolved = resolve("smoke", {**SETTING, **SEEDED, "data.path": images})
    with pytest.raises(KeyboardInterrupt):
        execute(resolved, tmp_path / "run", stop)
    step = RunFolder(tmp_path / "run").checkpoints.load().step
    record = withdraw(tmp_path / "run", tmp_path / "new")
    assert record["step"] == step == RunFolder(tmp_path / "new").checkpoints.load().step
    assert json.loads((tmp_path / "new" / "status.json").read_text())["state"] == "interrupted"
    execute(resolve(tmp_path / "new" / "config.yaml"), tmp_path / "new")
    more = SEEDED | {"federation.exclude": [GONE], "privacy.earlier_sums": 1}
    assert same_model(tmp_path / "new", run(images, tmp_path / "wanted", **more).folder)


def test_with_ledgers_that_outlive_runs_the_sites_draw_anew(images, tmp_path, monkeypatch):
    """The same numbers in a second sum without the site would give its part away: old sum minus new sum."""
    monkeypatch.setenv("RESCENE_LEDGERS", str(tmp_path / "books"))
    folder = run(images, tmp_path / "run").folder
    withdraw(folder, tmp_path / "new")
    assert len(charges(tmp_path, 0)) == 4
    releases = ledger_in(tmp_path, 0).book().releases
    assert len({kept.sha256 for kept in releases.values()}) == 4


def test_across_sites_it_is_refused_with_the_command(tmp_path):
    resolved = resolve("smoke", SETTING)
    plan = SitesSection.model_validate({"image_size": 16, "tasks": [{"classes": ["a", "b"], "rounds": 1}]})
    resolved = replace(resolved, recipe=resolved.recipe.model_copy(update={"sites": plan}))
    with pytest.raises(DataError, match="E230") as error:
        check_can_forget(resolved, GONE, RunFolder(tmp_path / "run"))
    assert "deploy run FEDERATION" in error.value.fix
    assert "federation.exclude=[1]" in error.value.fix and "privacy.earlier_sums=1" in error.value.fix
