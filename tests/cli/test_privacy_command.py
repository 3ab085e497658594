"""``rescene privacy``: both directions, in words and as JSON, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from rescene.cli.app import app

RELEASE = ["method.start=noise", "privacy.mechanism=release", "privacy.max_participations=2"]


def invoke(*args):
    return CliRunner().invoke(app, ["privacy", "demo", *args])


def test_both_directions_agree():
    sigma = json.loads(invoke(*RELEASE, "privacy.epsilon=4", "--epsilon", "8", "--json").output)["rows"]
    assert len(sigma) == 1 and sigma[0]["epsilon, whole run"] == pytest.approx(8, abs=1e-3)
    back = json.loads(invoke(*RELEASE, "privacy.epsilon=4", "--sigma", str(sigma[0]["sigma"]), "--json").output)
    assert back["rows"][0]["epsilon, whole run"] == sigma[0]["epsilon, whole run"]
    assert back["counts"] == {"steps": 1, "participations": 2, "rate": 1.0, "tasks": 1}
    assert {row["direction"] for row in json.loads(invoke("--json").output)["rows"]} == {"given sigma", "given epsilon"}


def test_it_says_what_adds_up_and_what_is_not_private():
    text = " ".join(invoke(*RELEASE, "privacy.epsilon=4").output.split())
    assert "2 participations of a site" in text and "one record of one site added or removed" in text
    assert "Not private" in invoke().output
    assert "no mechanism covers it: the Fisher" in " ".join(invoke("method=fedewc").output.split())
    empirical = invoke("privacy.mechanism=paper-experiment", "privacy.noise_multiplier=5").output
    assert "certifies nothing" in " ".join(empirical.split()) and "epsilon" not in empirical


def test_a_run_tells_what_it_guaranteed(tmp_path):
    told = json.loads(invoke(*RELEASE, "privacy.epsilon=4", "--json").output)["statement"]
    recipe = CliRunner().invoke(app, ["show", "demo", *RELEASE, "privacy.epsilon=4", "--json"]).output
    (tmp_path / "config.yaml").write_text(json.dumps({key: row["value"] for key, row in json.loads(recipe).items()}))
    found = CliRunner().invoke(app, ["privacy", str(tmp_path), "--json"])
    assert found.exit_code == 0 and json.loads(found.output)["statement"] == told


def test_methods_that_send_weights_and_what_replay_costs_them():
    """50 steps of a tenth, three rounds; the records of Re-Fed stay for all five tasks."""
    dp = ["privacy.mechanism=dp-sgd", "model.norm=group", "privacy.sampling_rate=0.1", "privacy.noise_multiplier=2"]
    once, kept = (
        json.loads(invoke(*dp, f"method={name}", "--sigma", "2", "--json").output) for name in ("fedavg", "refed")
    )
    assert once["counts"] == {"steps": 50, "participations": 3, "rate": 0.1, "tasks": 1}
    assert kept["counts"] == once["counts"] | {"tasks": 5} and "memory to the end" in kept["composition"]
    assert kept["rows"][0]["epsilon, whole run"] > once["rows"][0]["epsilon, whole run"]
    assert "With dp-sgd it would be" in invoke("method=fedavg").output


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--epsilon", "0"], "E172"),
        (["--epsilon", "nan"], "E172"),
        (["--sigma", "0"], "E171"),
        (["--delta", "1"], "E173"),
        (["--delta", "0.01"], "E173"),
        (["--epsilon", "1", "--sigma", "1"], "E176"),
        (["privacy.mechanism=paper-experiment", "privacy.noise_multiplier=5", "--epsilon", "1"], "E176"),
        (["privacy.mechanism=release"], "E104"),
    ],
)
def test_bad_input_is_refused_with_a_reason(args, code):
    result = invoke(*args)
    assert result.exit_code == 2 and code in result.output and "Traceback" not in result.output
