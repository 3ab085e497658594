"""``rescene audit``: a recipe, a run, the controls; what it writes, what it says, what it refuses."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import rescene
from rescene.audit import audit_words
from rescene.cli.app import app
from rescene.report import load_run, write_report
from rescene.report.groups import group_runs
from rescene.report.page_sections import audits

SMALL = ["--canaries", "20", "--shadows", "8", "--targets", "8"]
RELEASE = {"method.start": "noise", "privacy.mechanism": "release", "privacy.epsilon": 8}


def invoke(*args):
    return CliRunner().invoke(app, ["audit", *map(str, args)])


@pytest.fixture(scope="module")
def private_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "private"
    rescene.run("smoke", out=folder, **RELEASE, **{"tasks.limit": 1, "device": "cpu"})
    return folder


def test_a_run_is_attacked_with_its_network_and_its_books(private_run, blank_figures):
    result = invoke(private_run, *SMALL, "--quiet")
    assert result.exit_code == 0, result.output
    found = json.loads((private_run / "audit.json").read_text())
    assert found["subject"] == "run" and found["verdict"] == "not contradicted"
    assert found["ledger"]["participations"] == found["participations"] <= 2
    assert (
        found["ledger"]["epsilon"] == pytest.approx(found["promised"], abs=1e-6)
        and found["lower_bound"] <= found["promised"]
    )
    assert [row["attack"] for row in found["canaries"]] == ["photograph, replay", "photograph, look", "giant, replay"]
    assert "cannot prove one" in " ".join(result.output.split()) and str(private_run / "audit.json") in result.output
    page = write_report([private_run], private_run / "report.html").read_text()
    assert "Attacked: ReSCENE" in page and "not contradicted" in page and "giant, replay" in page


def test_a_damaged_audit_is_noted_and_a_missing_one_is_none(private_run):
    (private_run / "audit.json").write_text("{")
    damaged = load_run(private_run)
    assert (
        all(one.startswith("audit.json could not be read") for one in damaged.problems)
        and len(damaged.problems) == 1
        and not audits(group_runs([damaged]))
    )
    (private_run / "audit.json").unlink()
    assert load_run(private_run).problems == () and not audits(group_runs([load_run(private_run)]))


def test_a_recipe_without_a_promise_is_told_what_leaks(tmp_path):
    result = invoke("smoke", "seed=1", *SMALL, "--json", "--out", tmp_path / "deep" / "a.json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found == json.loads((tmp_path / "deep" / "a.json").read_text())
    assert found["verdict"] == "no promise" and found["promised"] is None and found["stored"] is None
    replay = found["canaries"][0]
    assert (replay["num_right"], replay["num_guesses"]) == (20, 20) and replay["epsilon"] == found["most_to_show"] > 0


def test_the_test_mode_is_seen_through():
    """Noise from the run's seed, which the server knows: the replay is right about every canary."""
    settings = [f"{key}={value}" for key, value in RELEASE.items()]
    found = json.loads(invoke("smoke", *settings, "privacy.noise=seeded", *SMALL, "--json").stdout)
    assert found["test_mode"] and found["verdict"] == "no promise"
    assert [row["num_right"] for row in found["canaries"] if "replay" in row["attack"]] == [20, 20]


def test_a_mechanism_that_forgets_its_noise_is_contradicted_with_exit_code_5(monkeypatch):
    monkeypatch.setattr("rescene.privacy.mechanism.Mechanism.noised", lambda self, units, noise: units * self.step)
    settings = [f"{key}={value}" for key, value in (RELEASE | {"privacy.epsilon": 0.3}).items()]
    result = invoke("smoke", *settings, *SMALL, "--participations", "1")
    assert result.exit_code == 5 and "CONTRADICTED" in result.output, result.output


@pytest.mark.parametrize(("fired", "code"), [(True, 0), (False, 5)])
def test_controls_decide_the_exit_code(monkeypatch, fired, code):
    row = {"control": "noise switched off", "claimed": 1.0, "broken": 3.0, "sound": 0.0, "fired": fired}
    monkeypatch.setattr("rescene.audit.run_controls", lambda stage, num: [row])
    result = invoke("smoke", "--controls")
    assert result.exit_code == code and ("fired" if fired else "DID NOT FIRE") in result.output


def test_bad_input_is_refused_with_a_reason(tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("tasks: {per_task: 2}")
    for args, code in (
        (["smoke", "method=fedavg"], "E197"),
        (["smoke", "method=fedaf"], "E197"),
        ([tmp_path / "unfinished"], "E181"),
        ([tmp_path / "unfinished", "seed=1"], "E198"),
        ([tmp_path], "E108"),
        (["nosuch"], "E101"),
        (["smoke", "privacy.mechanism=release"], "E104"),
    ):
        result = invoke(*args)
        assert result.exit_code == 2 and code in result.output and "Traceback" not in result.output, (
            args,
            result.output,
        )
    assert invoke("smoke", "--canaries", "3").exit_code == 2


def test_a_network_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("model: {name: convnet}\ntasks: {per_task: 2}")
    save_file({"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)}, tmp_path / "model" / "final.safetensors")
    result = invoke(tmp_path)
    assert result.exit_code == 2 and "E13" in result.output


def test_words_follow_the_numbers():
    found = {
        "lower_bound": 0.0, "confidence": 0.95, "verdict": "no promise", "promised": None, "delta": 1e-5, "participations": 1,
        "most_to_show": 3.0, "num_canaries": 100, "membership": {"num_pictures": 0}, "stored": None, "ledger": None,
    }  # fmt: skip
    assert "no evidence of privacy" in audit_words(found)[0] and "nothing to attack" in audit_words(found)[2]
    promised = found | {"promised": 2.0, "verdict": "not contradicted"}
    assert "one participation" in audit_words(promised)[0] and "larger audit" not in audit_words(promised)[1]
    assert "larger audit" in audit_words(promised | {"promised": math.inf})[1]
    assert audit_words(promised | {"verdict": "contradicted"})[0].startswith("CONTRADICTED")
