"""Simulated faults: who is lost and late, rounds held again, and the same bits after an interruption."""

import json
from types import SimpleNamespace

import pytest
import smallworld
import trust_faults
import yaml
from stopping import stopped_after
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.config import resolve
from rescene.config.site_sections import FaultsSection
from rescene.core.errors import ConfigError, RunError
from rescene.core.rng import Rng
from rescene.engine.faults import Faults


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return trust_faults.images(tmp_path_factory.mktemp("faults") / "images.npz")


def events(folder, code):
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["code"] == code]


def rounds(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "round"]


def test_as_many_sites_are_lost_as_was_asked_for_and_the_address_decides_who():
    faults = Faults(FaultsSection(dropout=0.3), Rng(0))

    def lost(round, attempt=0):
        return faults.absent(range(1000), (0, round), attempt, {}, lambda *a, **k: None)[0]

    assert 250 < len(lost(0)) < 350 and lost(0) == lost(0)
    assert lost(0) != lost(1) and lost(0) != lost(0, attempt=1)
    assert lost(-1) == []  # between rounds everybody is there


def test_a_late_site_costs_the_deadline_and_a_slow_one_its_own_time():
    def time(**more):
        counts = {}
        late = Faults(FaultsSection(slow=(2,), **more), Rng(0)).absent([1, 2], (0, 0), 0, counts, lambda *a, **k: None)[
            1
        ]
        return late, counts["time"]

    assert time() == ([], 10.0) and time(deadline=2.0) == ([2], 2.0) and time(deadline=10.0) == ([], 10.0)


def test_lost_sites_are_told_and_counted_and_send_nothing(data, tmp_path):
    found = trust_faults.run(data, tmp_path / "r", **{"faults.dropout": 0.3, "quorum": 0.1})
    lost = events(tmp_path / "r", "E370")
    assert found["faults"]["lost"] == len(lost) > 5 and found["faults"]["asked"] == 60
    assert found["events_summary"]["client_failures"] == len(lost)
    silent = {
        (r["task"], r["round"], int(k)) for r in rounds(tmp_path / "r") for k, (up, _) in r["sites"].items() if not up
    }
    assert {(e["task"], e["round"], e["client"]) for e in lost} <= silent
    assert found["simulated"] == ["30 % of the sites lost per round"] and events(tmp_path / "r", "W371")


def test_a_straggler_past_the_deadline_is_left_out(data, tmp_path):
    figure, held = trust_faults.straggler(data, tmp_path)
    assert held, figure


@pytest.mark.parametrize("method", ["rescene", "fedavg"])
def test_half_of_the_sites_lost_the_run_completes(data, tmp_path, method):
    figure, held = trust_faults.losses(data, tmp_path, [method], [0])
    assert held, figure
    again = events(tmp_path / f"lost-{method}-0", "W370")
    assert again and "held again with other sites" in again[0]["message"]


def test_no_quorum_after_all_retries_stops_the_run_with_a_code(data, tmp_path):
    with pytest.raises(RunError, match="E320"):
        trust_faults.run(data, tmp_path / "r", **{"faults.dropout": 0.9, "quorum": 0.9, "retries": 2})
    assert len(events(tmp_path / "r", "W370")) == 2
    assert json.loads((tmp_path / "r/status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_a_round_held_again_meets_other_sites(data, tmp_path):
    few = {"faults.dropout": 0.5, "quorum": 0.8, "retries": 30, "per_round": 5}
    found = trust_faults.run(data, tmp_path / "r", **few)
    plain = trust_faults.run(data, tmp_path / "s", per_round=5)
    assert found["faults"]["held_again"] > 3 and "faults" not in plain
    first, second = ([row["participants"] for row in rounds(tmp_path / name)] for name in "rs")
    assert first != second and all(len(set(row)) == 5 for row in first)


@pytest.mark.parametrize("steps", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_interrupted_under_faults_and_attack_it_ends_with_the_same_bits(data, tmp_path, steps):
    hard = {"faults.dropout": 0.4, "quorum": 0.6, "retries": 30, "screen": "features"}
    hard |= {"faults.attack": "flip", "faults.attackers": [0], "faults.slow": [1], "faults.deadline": 3.0}
    trust_faults.run(data, tmp_path / "whole", **hard)
    with stopped_after(steps):
        trust_faults.run(data, tmp_path / "cut", **hard)
    trust_faults.run(data, tmp_path / "cut", **hard)
    assert smallworld.fingerprint(tmp_path / "cut") == smallworld.fingerprint(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"federation.faults.attack": "flip"}, "go together"),
        ({"federation.faults.attackers": [0]}, "go together"),
        ({"federation.faults.slow": [99]}, "there is no site 99"),
        ({"federation.faults.dropout": 1.0}, "less than 1"),
        ({"federation.screen": "features", "method": "fedavg"}, "more than pictures, or none"),
    ],
)
def test_faults_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError) as caught:
        resolve("smoke", settings)
    assert words in str(caught.value)


def test_real_sites_are_spared_simulated_faults(tmp_path):
    from rescene.engine.loop import run
    from rescene.engine.run_folder import RunFolder

    with pytest.raises(ConfigError, match="E177"):
        run(
            resolve("smoke", {"federation.faults.dropout": 0.1}),
            RunFolder(tmp_path / "r"),
            transport=SimpleNamespace(here=False),
        )


def test_the_command_line_says_what_is_simulated(tmp_path, blank_figures):
    command = [
        "run",
        "smoke",
        "tasks.limit=1",
        "federation.num_rounds=1",
        "model.width=8",
        "federation.faults.dropout=0.4",
    ]
    done = CliRunner().invoke(app, [*command, "federation.quorum=0", "--out", str(tmp_path / "r")])
    assert done.exit_code == 0 and "SIMULATED 40 % of the sites lost per round" in done.output
    assert rescene.load(tmp_path / "r").values["simulated"]


def test_a_folder_from_before_these_keys_goes_on(data, tmp_path):
    trust_faults.run(data, tmp_path / "r", num_rounds=1)
    path = tmp_path / "r/config.yaml"
    config = yaml.safe_load(path.read_text())
    for key in ("faults", "retries", "screen"):
        del config["federation"][key]
    path.write_text(yaml.safe_dump(config))
    trust_faults.run(data, tmp_path / "r", num_rounds=1)
    with pytest.raises(RunError, match="E405"):
        trust_faults.run(data, tmp_path / "r", num_rounds=1, retries=1)
