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
    assert back["counts"] == {"steps": 1, "participations": 2, "rate": 1.0}
    assert {row["direction"] for row in json.loads(invoke("--json").output)["rows"]} == {"given sigma", "given epsilon"}


def test_it_says_what_adds_up_and_what_is_not_private():
    text = " ".join(invoke(*RELEASE, "privacy.epsilon=4").output.split())
    assert "2 participations of a site" in text and "one record of one site added or removed" in text
    assert "Not private" in invoke().output
    assert "no mechanism covers" in " ".join(invoke("method=fedavg").output.split())
    empirical = invoke("privacy.mechanism=paper-experiment", "privacy.noise_multiplier=5").output
    assert "certifies nothing" in " ".join(empirical.split()) and "epsilon" not in empirical


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
