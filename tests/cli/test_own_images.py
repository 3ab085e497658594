"""The worked example, as its own text says: pictures made on the spot, looked at, run, in tasks of every kind."""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.config import resolve

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_images.py"
QUICK = ["federation.num_rounds=1", "train.server_epochs=1", "method.num_steps=1", "method.ipc=2", "model.width=8"]
invoke = CliRunner().invoke


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "images"
    assert runpy.run_path(str(EXAMPLE))["make"](folder) == 420
    return folder


def inspected(folder, *options):
    result = invoke(app, ["data", "inspect", str(folder), "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_command_that_inspect_proposes_runs_to_a_report(shapes, tmp_path):
    found = inspected(shapes)
    assert found["warnings"] == [] and [t["brings"] for t in found["tasks"]][0] == "circle, cross"
    program, *words = shlex.split(found["command"])
    assert program == "rescene"
    assert words[:2] == ["run", "own"] and "model.lens=waves" in words  # 56 images of a class
    result = invoke(app, [*words, "--out", str(tmp_path / "r"), "-q"])
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "r" / "results.json").read_text())
    assert (
        values["privacy"]["epsilon"] == pytest.approx(8, rel=1e-3) and "(8.00, 1e-05)-differentially" in result.output
    )
    exact = shlex.split(found["simulation"])[1:]
    simulated = resolve(exact[1], exact[2:]).recipe
    assert simulated.privacy.mechanism == "none" and simulated.model.lens == "leaves"
    assert [task["classes"] for task in values["tasks"]] == [
        ["circle", "cross"],
        ["ring", "square"],
        ["star", "triangle"],
    ]
    assert values["leakage"] is None and values["cost"]["measured"]["uplink_bytes"] > 0  # sums left the sites, no image
    assert (tmp_path / "r" / "report.html").is_file() and (tmp_path / "r" / "MODEL_CARD.md").is_file()


@pytest.mark.parametrize(
    ("plan", "tasks"),
    [
        ("tasks.sizes=[3,2,1]", ["circle, cross, ring", "square, star", "triangle"]),
        ("tasks.plan=[[star,circle],[cross]]", ["star, circle", "cross"]),
    ],
)
def test_unequal_tasks_and_plans_by_name(shapes, plan, tasks):
    result = invoke(app, ["run", "demo", f"data.path={shapes}", plan, "--dry-run", "--json"])
    assert [row["classes"] for row in json.loads(result.output)["tasks"]] == tasks


def test_domains_are_proposed_as_tasks(tmp_path):
    folder = tmp_path / "lights"
    done = subprocess.run([sys.executable, str(EXAMPLE), str(folder), "--domains"], capture_output=True, text=True)
    assert done.returncode == 0 and "rescene data inspect" in done.stdout
    found = inspected(folder, "--layout", "domains")
    assert [t["brings"] for t in found["tasks"]] == ["day", "night"] and "tasks.scenario=domain" in found["command"]
    words = shlex.split(found["command"])[1:]
    assert invoke(app, [*words, "--dry-run"]).exit_code == 0
    again = subprocess.run([sys.executable, str(EXAMPLE), str(folder)], capture_output=True, text=True)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_inspect_warns_and_still_answers(shapes, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(shapes, folder)
    (folder / "star" / "broken.png").write_text("no picture")
    shutil.copy(folder / "ring" / "000.png", folder / "ring" / "copy.png")
    shutil.copy(folder / "ring" / "000.png", folder / "ring" / "copy2.png")
    for path in sorted((folder / "cross").iterdir())[5:]:
        path.unlink()
    found = inspected(folder)
    text = " ".join(found["warnings"])
    assert (
        "broken.png" in text
        and "tiny classes: cross (4)" in text
        and ("repeat another" in text or "also training" in text)
    )
    assert "data.skip_unreadable=true" in found["command"]
    told = invoke(app, ["data", "inspect", str(folder)]).output
    assert "broken.png" in told and "run it: rescene run own" in told and "noise: a typical class has" in told


def test_a_run_in_which_nothing_leaves_the_sites_says_so(shapes, tmp_path, blank_figures):
    """No site has more than 64 images of a class, and without a step every surrogate is still its real image."""
    quick = ["tasks.limit=1", "federation.num_rounds=1", "train.server_epochs=1", "method.num_steps=0", "method.ipc=64",
             "model.width=8"]  # fmt: skip
    result = invoke(app, ["run", "demo", f"data.path={shapes}", *quick, "--out", str(tmp_path / "r"), "-q"])
    assert result.exit_code == 0, result.output
    assert "W311" in (tmp_path / "r" / "events.jsonl").read_text()


def test_a_run_tells_what_it_does_not_read_and_which_test_images_it_trains_on(shapes, tmp_path):
    """In its events and on its page, as inspect does."""
    folder = tmp_path / "images"
    for i, path in enumerate(sorted((shapes / "ring").iterdir())[:20]):
        for split in ("train", "test"):
            (folder / split / "ring").mkdir(parents=True, exist_ok=True)
            if split == "train" or i < 3:
                shutil.copy(path, folder / split / "ring")
    shutil.copytree(shapes / "star", folder / "train" / "star")
    (folder / "test" / "star").mkdir()
    shutil.move(folder / "train" / "star" / "000.png", folder / "test" / "star" / "000.png")
    (folder / "train" / "ring" / "IMG_1.HEIC").write_bytes(b"from a phone")
    leak, left = "3 of 4 test images are also training images", ".heic pictures: 1 (train/ring/IMG_1.HEIC)"
    told = " ".join(inspected(folder)["warnings"])
    assert left in told and "3 images of the test split are also training images" in told
    words = [
        "run",
        "demo",
        f"data.path={folder}",
        "tasks.count=1",
        "federation.num_clients=2",
        "federation.per_round=2",
    ]
    result = invoke(app, [*words, *QUICK, "--out", str(tmp_path / "r")])
    assert result.exit_code == 0, result.output
    events = list(map(json.loads, (tmp_path / "r" / "events.jsonl").read_text().splitlines()))
    found = {event["code"]: event["message"] for event in events if event["level"] == "warning"}
    assert left in found["W214"] and leak in found["W217"]
    assert leak in (tmp_path / "r" / "report.html").read_text() and "W217" in result.output


def test_a_run_by_domain_has_said_what_the_first_folders_are(shapes, tmp_path):
    for light in ("day", "night"):
        for shape in ("ring", "star"):
            shutil.copytree(shapes / shape, tmp_path / "lights" / light / shape)
    words = ["run", "demo", f"data.path={tmp_path / 'lights'}", "--dry-run", "--json"]
    assert "error[E214]" in invoke(app, words).output
    by_domain = json.loads(invoke(app, [*words, "tasks.scenario=domain"]).output)
    assert [row["classes"] for row in by_domain["tasks"]] == ["ring, star"] * 2
    by_class = json.loads(invoke(app, [*words, "data.layout=classes", "tasks.count=2"]).output)
    assert [row["classes"] for row in by_class["tasks"]] == ["day", "night"]


def test_a_class_folder_that_is_not_utf8_stops_every_command_with_a_code(shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "images")
    os.rename(tmp_path / "images" / "star", os.path.join(os.fsencode(tmp_path / "images"), b"\xe9toile"))
    for words in (["data", "inspect", str(tmp_path / "images")], ["run", "demo", f"data.path={tmp_path / 'images'}"]):
        result = invoke(app, words)
        assert result.exit_code == 3 and "error[E217]" in result.output


@pytest.mark.parametrize(
    ("count", "lens", "said"), [(30, "waves", "too few"), (60, "waves", "few"), (150, "leaves", "enough")]
)
def test_inspect_says_what_noise_leaves_of_so_many_images(count, lens, said):
    from rescene.data import Dataset, Images, Transform
    from rescene.data.checks import noise_words, propose_settings

    images = Images(torch.zeros(2 * count, 3, 8, 8, dtype=torch.uint8), torch.arange(2 * count) % 2)
    dataset = Dataset("two", ("a", "b"), images, images, Transform((0.5,) * 3, (0.25,) * 3, 1))
    assert said in noise_words(dataset) and f"{count} images" in noise_words(dataset)
    assert resolve("own", propose_settings(dataset)).recipe.model.lens == lens


def test_the_recipe_for_own_images_promises_epsilon_8_for_the_whole_run():
    recipe = resolve("own").recipe
    promise = recipe.promise(5)
    assert (
        promise.formal and promise.epsilon() == pytest.approx(8, rel=1e-3) and promise.composition.participations == 1
    )
    assert resolve("own", ["privacy.mechanism=none"]).recipe.promise(5) is None
