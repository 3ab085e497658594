"""rescene forget on the command line: what it says, what it refuses."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.cli.privacy_verbs import _site
from rescene.core.errors import ConfigError
from rescene.core.run_state import working_in

SMALL = {
    "federation.num_rounds": 2,
    "method.num_steps": 1,
    "model.width": 8,
    "tasks.limit": 1,
    "federation.per_round": 3,
}
invoke = CliRunner().invoke
pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rescene.run("smoke", out=tmp_path_factory.mktemp("forget-command") / "run", **SMALL).folder


def test_what_it_did_and_what_remains_is_told(run):
    told = invoke(app, ["forget", str(run), "--client", "2", "--check"])
    assert told.exit_code == 0, told.output
    place, never = run.with_name("run-forgot-2"), run.with_name("run-never-2")
    record = rescene.load(place).values["forgotten"][0]
    assert f"Removed of site 2: {record['num_images']} images" in told.output and record["num_images"]
    for words in ("never saw the site", "no proof of unlearning", f"{run} still holds everything"):
        assert words in told.output
    assert rescene.load(never).values["config"]["federation"]["exclude"] == [2]
    assert "forgotten" not in rescene.load(never).values
    check = json.loads((place / "withdrawal.json").read_text())
    assert check["aa"]["never"] == rescene.load(never).aa and check["aa"]["after"] == rescene.load(place).aa
    assert "Withdrawn: site 2" in (place / "MODEL_CARD.md").read_text()
    page = (place / "report.html").read_text()
    assert "Sites that withdrew" in page and "Never saw the site" in page
    assert invoke(app, ["report", str(place), str(never), "--out", str(run.parent / "r.html")]).exit_code == 0
    both = (run.parent / "r.html").read_text()
    assert "forgot=[2]" in both and "Counted once" not in both  # the same recipe, but not the same run
    again = invoke(app, ["rerun", str(place)])
    assert again.exit_code == 2 and "E163" in again.output
    shown = invoke(app, ["forget", str(run), "--client", "2", "--json"])
    assert json.loads(shown.output)["forgotten"]["client"] == 2


def test_bad_requests_get_an_answer(run, tmp_path):
    def refused(*words):
        told = invoke(app, ["forget", *map(str, words)])
        assert told.exit_code in (2, 4)
        return told.output

    assert "E166" in refused(run, "--client", "north")
    assert "E161" in refused(run, "--client", "9")
    assert "E108" in refused(tmp_path, "--client", "1")
    assert "E186" in refused(run, "--client", "1", "--out", run)
    going = shutil.copytree(run, tmp_path / "going")
    with working_in(going):
        assert "E421" in refused(going, "--client", "1")
    status = json.loads((going / "status.json").read_text()) | {"state": "interrupted"}
    (going / "status.json").write_text(json.dumps(status))
    (going / "results.json").unlink()
    assert "E164" in refused(going, "--client", "1", "--check")
    weights = rescene.run(
        "smoke", out=tmp_path / "weights", method="fedavg", **{"tasks.limit": 1, "model.width": 8}
    ).folder
    told = refused(weights, "--client", "1")
    assert "E162" in told and "'federation.exclude=[1]'" in told
    assert not list(tmp_path.glob("*forgot*"))


def test_sites_that_the_data_name_are_called_by_name(tmp_path):
    """Three folders of images, one for each site."""
    for k, site in enumerate(("leeds", "lyon", "turin")):
        for name in ("ant", "bee"):
            (tmp_path / "images" / site / name).mkdir(parents=True)
            for i in range(6):
                pixels = np.random.default_rng([k, i, *name.encode()]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / site / name / f"{i}.png")
    own = {"data.path": str(tmp_path / "images"), "data.layout": "sites", "federation.partition": "sites"}
    run = rescene.run("smoke", out=tmp_path / "run", **SMALL, **own, **{"federation.num_clients": 3}).folder
    wrong = invoke(app, ["forget", str(run), "--client", "lion"])
    assert wrong.exit_code == 2 and "E166" in wrong.output and "did you mean lyon?" in wrong.output
    told = invoke(app, ["forget", str(run), "--client", "lyon"])
    assert told.exit_code == 0 and "Removed of site lyon: " in told.output, told.output
    (record,) = rescene.load(tmp_path / "run-forgot-1").values["forgotten"]
    assert (record["client"], record["name"]) == (1, "lyon")


@pytest.mark.parametrize(
    ("word", "names", "found"),
    [
        ("2", (), (2, None)),
        ("1", ("leeds", "lyon"), (1, "lyon")),
        ("lyon", ("leeds", "lyon"), (1, "lyon")),
        ("1", ("1", "2"), (0, "1")),  # the site that people call 1
    ],
)
def test_a_site_is_given_by_name_or_number(word, names, found):
    assert _site(word, names) == found


def test_a_number_is_no_site_where_names_are_numbers():
    with pytest.raises(ConfigError, match="E166"):
        _site("0", ("1", "2"))


def test_behind_a_secure_sum_the_cost_is_told_and_wants_consent(tmp_path):
    shapes, labels = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), np.uint8), np.arange(60) % 2
    np.savez(tmp_path / "images.npz", x_train=shapes, y_train=labels, x_test=shapes, y_test=labels)
    secret = {
        "method": "moments",
        "model.name": "linear",
        "model.lens": "waves",
        "train.augment": False,
        "tasks.limit": 1,
    }
    secret |= {
        "federation.num_rounds": 1,
        "privacy.mechanism": "release",
        "privacy.noise_multiplier": 2,
        "privacy.clip": 1,
    }
    secret |= {
        "method.num_features": 8,
        "privacy.honest_sites": 2,
        "federation.num_clients": 4,
        "federation.per_round": 4,
    }
    secret |= {"data.path": str(tmp_path / "images.npz"), "data.image_size": 16}
    run = rescene.run("smoke", out=tmp_path / "run", **secret).folder
    words = ["forget", str(run), "--client", "2"]
    told = invoke(app, words)
    assert told.exit_code != 0 and "E232" in told.output and "--charge" in told.output
    assert not (tmp_path / "run-forgot-2" / "ledgers").exists()
    assert "E164" in invoke(app, [*words, "--charge", "--check"]).output
    told = invoke(app, [*words, "--charge"])
    assert told.exit_code == 0, told.output
    assert told.output.index("Before: What a site sends") < told.output.index("After, old and new sums together: What")
    for part in ("if the image is added or removed", "if another takes its place", "taken anew", "stay released"):
        assert part in told.output
    place = run.with_name("run-forgot-2")
    assert "the old ones stay released, and epsilon counts both" in (place / "MODEL_CARD.md").read_text()
    assert "their images charged again" in (place / "report.html").read_text()
    values = rescene.load(place).values
    assert values["privacy"]["releases_per_record"] == 2 and values["config"]["federation"]["exclude"] == [2]
