"""The worked example, as its own text says: pictures made on the spot, looked at, run, in tasks of every kind."""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from rescene.cli import running
from rescene.cli.app import app
from rescene.config import resolve
from rescene.data import load
from rescene.data.inspection import COLUMNS, GAP, LABEL, SIDE

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


def test_recipe_own_without_images_of_ones_own_says_so_first(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "run_one", lambda *given, **more: print("runs"))
    line = "no data.path: built-in images (fashion-mini). Your own: rescene run own data.path=FOLDER\n"
    for words, told in ([], line), ([f"data.path={shapes}"], ""), (["data.name=fashion-mini"], ""), (["-q"], ""):
        result = invoke(app, ["run", "own", *words])
        assert (result.stderr, result.stdout) == (told, "runs\n"), words
    assert invoke(app, ["run", "smoke"]).stderr == ""  # its images are meant to be those


def test_the_commands_that_inspect_proposes_run_to_a_report(shapes, tmp_path):
    found = inspected(shapes)
    assert found["warnings"] == [] and [t["brings"] for t in found["tasks"]][0] == "circle, cross"
    assert found["files"]["found"] == {".png": 420} and "recipe own" in found["reason"]
    program, *exact = shlex.split(found["command"])
    assert program == "rescene" and exact[:2] == ["run", "own"]
    simulated = resolve(exact[1], exact[2:]).recipe
    assert simulated.privacy.mechanism == "none" and simulated.model.lens == "leaves"
    assert simulated.method["num_features"] is None
    words = shlex.split(found["guarantee"])[1:]
    assert "model.lens=waves" in words  # 56 images of a class
    result = invoke(app, [*words, "--out", str(tmp_path / "r"), "-q"])
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "r" / "results.json").read_text())
    assert (
        values["privacy"]["epsilon"] == pytest.approx(8, rel=1e-3) and "(8.00, 1e-05)-differentially" in result.output
    )
    assert [task["classes"] for task in values["tasks"]] == [
        ["circle", "cross"],
        ["ring", "square"],
        ["star", "triangle"],
    ]
    assert values["leakage"] is None and values["cost"]["measured"]["uplink_bytes"] > 0  # sums left the sites, no image
    assert (tmp_path / "r" / "report.html").is_file() and (tmp_path / "r" / "MODEL_CARD.md").is_file()


def test_inspect_writes_a_contact_sheet_with_a_row_of_pictures_for_each_class(shapes, tmp_path):
    result = invoke(app, ["data", "inspect", str(shapes), "--out", str(tmp_path / "look")])
    assert result.exit_code == 0 and "contact-sheet.png" in result.output and "files: 420 .png" in result.output
    sheet = Image.open(tmp_path / "look" / "contact-sheet.png").convert("RGB")
    rows = np.asarray(sheet)[:, LABEL:]
    assert len(rows) == GAP + 6 * (SIDE + GAP)
    for row in range(6):
        pictures = rows[GAP + row * (SIDE + GAP) :][:SIDE, : SIDE * COLUMNS]
        assert pictures.std() > 5  # not blank
    page = (tmp_path / "look" / "contact-sheet.html").read_text()
    assert (
        "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "") and "rescene run own" in page
    )


def test_one_class_alone_gets_a_reason_and_no_command(shapes, tmp_path):
    shutil.copytree(shapes / "ring", tmp_path / "images" / "ring")
    found = inspected(tmp_path / "images")
    assert found["command"] == found["guarantee"] == "" and "one class only (ring)" in found["reason"]


@pytest.mark.parametrize("limit", [(), ("tasks.per_task=1", "tasks.limit=1")])
def test_a_run_with_one_class_says_that_its_accuracy_says_nothing(shapes, tmp_path, limit):
    """Also where the tasks leave the other classes out. A run whose first task alone has one class warns of nothing."""
    for name in ("ring", "star") if limit else ("ring",):
        shutil.copytree(shapes / name, tmp_path / "images" / name)
    small = ["data.path=" + str(tmp_path / "images"), "federation.num_clients=2", "federation.per_round=2", *QUICK]
    result = invoke(app, ["run", "demo", *small, *(limit or ["tasks.count=1"]), "--out", str(tmp_path / "r")])
    words = "one class only (ring): every answer is right, so its accuracy says nothing"
    assert result.exit_code == 0 and "W548" in result.output
    assert words in (tmp_path / "r" / "report.html").read_text()
    if limit:
        small += ["tasks.per_task=1", "--out", str(tmp_path / "two")]
        assert "W548" not in invoke(app, ["run", "demo", *small]).output


@pytest.fixture(scope="module")
def three_sites(shapes, tmp_path_factory):
    """Leeds has no circle, so that it misses half of the first task."""
    folder = tmp_path_factory.mktemp("sites") / "images"
    for k, site in enumerate(("Bath", "Hull", "Leeds")):
        for shape in ("circle", "cross", "ring", "square")[site == "Leeds" :]:
            for path in sorted((shapes / shape).iterdir())[20 * k : 20 * k + 20]:
                (folder / site / shape).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / site / shape)
    return folder


def test_a_network_of_ones_own_is_tuned_too(three_sites, tmp_path, monkeypatch):
    file, out = tmp_path / "tuned_net.py", tmp_path / "run"
    file.write_text(
        "import rescene\nfrom torch import nn\n\n\n@rescene.register_model('tuned-net')\ndef net(image_size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    )
    given = ["run", "demo", f"data.path={three_sites}", "federation.partition=sites", "model.name=tuned-net"]
    few = ["data.layout=sites", "federation.num_rounds=1", "method=fedavg", "tasks.count=1"]
    made = invoke(app, [*given, *few, "--plugin", str(file), "--out", str(out), "-q"])
    assert made.exit_code == 0, made.output
    hint = invoke(app, ["sites", str(out), "--plugin", str(file)]).output.splitlines()[-1]
    words = shlex.split(hint.partition("rescene ")[2])
    monkeypatch.setattr("rescene.nets.own_networks._OWN", {})  # as in a process of its own
    monkeypatch.delitem(sys.modules, "tuned_net")
    tuned = invoke(app, [*words, "--steps", "1", "--json"])
    assert tuned.exit_code == 0 and len(json.loads(tuned.output)) == 3, tuned.output


def test_sites_as_they_are_from_inspect_to_table_and_tuned_heads(three_sites, tmp_path):
    found = inspected(three_sites, "--layout", "sites")
    assert [row["name"] for row in found["sites"]] == ["Bath", "Hull", "Leeds"]
    words = shlex.split(found["guarantee"])[1:]
    assert "federation.partition=sites" in words and "data.layout=sites" in words
    out = tmp_path / "r"
    exact = ["privacy.mechanism=none", "tasks.count=null", "tasks.per_task=1"]
    result = invoke(app, [*words, *exact, "--out", str(out), "-q"])
    assert result.exit_code == 0, result.output
    values = json.loads((out / "results.json").read_text())
    rows = {row["name"]: row for row in values["sites"]}
    assert list(rows) == ["Bath", "Hull", "Leeds"] and values["worst_site"] == min(r["accuracy"] for r in rows.values())
    assert (rows["Leeds"]["train_size"], rows["Leeds"]["test_size"]) == (48, 12)
    right = sum(row["accuracy"] * row["test_size"] for row in rows.values()) / sum(
        r["test_size"] for r in rows.values()
    )
    assert right == pytest.approx(values["aa"])  # every test image belongs to one site
    partition = json.loads((out / "partition.json").read_text())
    assert partition["sites"] == ["Bath", "Hull", "Leeds"] and partition["tasks"][0]["counts"] == [[16], [16], [0]]
    table = invoke(app, ["table", str(out), "--metric", "worst_site,sites", "--format", "md"]).output
    assert "Worst site" in table and "Leeds" in table and table.startswith("|")
    tuned = invoke(app, ["sites", str(out), "--tune", "--json"])
    assert tuned.exit_code == 0, tuned.output
    heads = json.loads(tuned.output.splitlines()[-1])
    assert [row["site"] for row in heads] == ["Bath", "Hull", "Leeds"]
    assert [float(row["shared head"]) for row in heads] == pytest.approx(
        [r["accuracy"] for r in rows.values()], abs=0.06
    )
    page = (out / "report.html").read_text()
    assert "Accuracy at each site" in page and "own head" in page and "Leeds" in (out / "MODEL_CARD.md").read_text()


def test_a_run_without_sites_of_its_own_says_so(three_sites, tmp_path):
    quick = [*QUICK, "tasks.count=1", "federation.num_clients=2", "federation.per_round=2", "data.layout=sites"]
    out = tmp_path / "r"
    assert invoke(app, ["run", "demo", f"data.path={three_sites}", *quick, "--out", str(out), "-q"]).exit_code == 0
    assert "W218" in (out / "events.jsonl").read_text()
    refused = invoke(app, ["sites", str(out)])
    assert refused.exit_code == 4 and "error[E448]" in refused.output
    none = invoke(app, ["table", str(out), "--metric", "sites"])
    assert "error[E143]" in none.output and "federation.partition=sites" in none.output


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


def test_a_set_prepared_with_its_last_pictures_as_the_test_is_looked_at_as_it_is(shapes, tmp_path):
    words = ["data", "prepare", "mine", "--from", str(shapes), "--out", str(tmp_path), "--held-out", "last"]
    file = invoke(app, words).stdout.strip()
    assert Path(file).name == "mine-last.safetensors"
    found = inspected(file)
    assert "test images the last of each class (fraction=0.2 last)" in found["lines"][0] and not found["apart"]
    assert invoke(app, [*shlex.split(found["command"])[1:], "--dry-run"]).exit_code == 0
    checked = invoke(app, ["data", "verify", "auto", "--path", file])
    assert checked.exit_code == 0, checked.output


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
        and "tiny class: cross (4)" in text
        and ("another training image" in text or "a training image" in text)
    )
    assert "data.skip_unreadable=true" in found["command"]
    told = invoke(app, ["data", "inspect", str(folder), "--out", str(tmp_path / "look")]).output
    assert "broken.png" in told and "run it: rescene run own" in told and "a typical class has" in told


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
    assert (
        f"{leak}, which flatters the accuracy; remove them" in (tmp_path / "r" / "report.html").read_text()
        and "W217" in result.output
    )


def test_a_run_tells_that_test_images_are_nearly_training_images(shapes, tmp_path):
    """With a code and advice, on the first screen of the page and in the card; at the size that inspect names for the run."""
    folder = tmp_path / "images"
    for name in ("ring", "star"):
        for i, path in enumerate(sorted((shapes / name).iterdir())[:20]):
            for split in ("train", "test"):
                (folder / split / name).mkdir(parents=True, exist_ok=True)
                if split == "train" or i < 3:
                    picture = Image.open(path).convert("RGB").resize((80, 80))
                    brighter = picture.point(lambda value: min(255, value + 2)) if split == "test" else picture
                    brighter.save(folder / split / name / path.name)
    told, found = "6 of 6 test images are nearly the same as a training image", inspected(folder)
    assert any(
        told in words and "W561" in words and "of one object, day or camera" in words for words in found["warnings"]
    )
    assert found["image_size"] == 64 and found["run_image_size"] == 32
    assert any("the recommended run reads them at 32x32 pixels: " in line for line in found["lines"])
    words = shlex.split(found["command"])[1:]
    assert resolve("own", words[2:]).recipe.images.image_size == 32
    quick = [*words, "model.lens=waves", "--out", str(tmp_path / "r"), "-q"]
    result = invoke(app, quick)
    assert result.exit_code == 0, result.output
    assert told in (tmp_path / "r" / "report.html").read_text().split("<nav")[0]
    assert told in (tmp_path / "r" / "MODEL_CARD.md").read_text().split("## Accuracy")[1].split("##")[0]


def test_pictures_in_a_row_are_noticed_and_the_last_of_them_can_be_held_out(tmp_path):
    """Eight objects a class with five views each, one after the other; then the same views in any order."""
    draw = np.random.default_rng(0)
    order, seen = draw.permutation(40), {}
    for c, name in enumerate(("cup", "pen")):
        for i in range(8 * 5):
            if i % 5 == 0:
                thing = draw.integers(40, 200, (8, 8, 3))
            view = np.clip(thing + draw.integers(-30, 31, (8, 8, 3)), 0, 255).astype(np.uint8).repeat(4, 0).repeat(4, 1)
            for folder, place in (("rows", i), ("mixed", order[i])):
                (tmp_path / folder / name).mkdir(parents=True, exist_ok=True)
                Image.fromarray(view).save(tmp_path / folder / name / f"{place:02}.png")
            seen[view.tobytes()] = (c, i // 5)
    told = "images that follow each other are more alike than others of their class"
    assert any(told in words and "W563" in words for words in inspected(tmp_path / "rows")["warnings"])
    assert inspected(tmp_path / "rows")["apart"].endswith(" data.held_out=last")
    mixed = inspected(tmp_path / "mixed")
    assert not any("W563" in words for words in mixed["warnings"]) and not mixed["apart"]
    quick = f"run own data.path={tmp_path / 'rows'} model.lens=waves -q"
    for held_out in ("drawn", "last"):
        out = tmp_path / held_out
        result = invoke(app, [*quick.split(), f"data.held_out={held_out}", "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert (told[1:] in (out / "report.html").read_text().split("<nav")[0]) == (held_out == "drawn")
    last = load(path=tmp_path / "rows", held_out="last")
    train, test = (
        {seen[view.permute(1, 2, 0).numpy().tobytes()] for view in images.pixels} for images in (last.train, last.test)
    )
    assert len(test) == 4 and len(train & test) == 2  # a fifth of forty cuts through one object of a class
    shutil.copytree(tmp_path / "rows" / "cup", tmp_path / "new" / "saucer")
    for path in sorted((tmp_path / "new" / "saucer").iterdir())[20:]:  # so the next task warns too, with other figures
        path.unlink()
    words = [
        "continue",
        str(tmp_path / "drawn"),
        f"data.path={tmp_path / 'new'}",
        "--out",
        str(tmp_path / "next"),
        "-q",
    ]
    result = invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "next" / "report.html").read_text().split("<nav")[0].count(told[1:]) == 1


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
    from rescene.data.inspection import noise_words, propose_settings

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
