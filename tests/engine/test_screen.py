"""An attack is simulated, measured and put apart; nothing of it disappears, and a person may let it in."""

import json
from types import SimpleNamespace

import pytest
import torch
import trust_faults
from safetensors.torch import load_file
from stopping import stopped_after
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.data import Dataset
from rescene.engine.observers.hostile_sites import Adversary, Screen, stamp
from rescene.engine.run_folder import RunFolder
from rescene.report import load_run, write_report
from rescene.report.summary import model_card

HOSTILE = {"faults.attack": "flip", "faults.attackers": [0], "screen": "features"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return trust_faults.images(tmp_path_factory.mktemp("screen") / "images.npz")


@pytest.fixture(scope="module")
def screened(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("screened") / "r"
    return trust_faults.run(data, folder, **HOSTILE), folder


def command(*words):
    return CliRunner().invoke(app, ["deploy", "quarantine", *map(str, words)])


@pytest.fixture
def world(tiny_world):
    """Images whose classes 0 and 1 make one task, and the data set around them."""
    images = tiny_world["shards"][0].images
    dataset = Dataset("tiny", ("cat", "dog"), images, images, tiny_world["transform"])
    return SimpleNamespace(
        images=images, dataset=dataset, **{k: tiny_world[k] for k in ("task", "net", "arch", "shards")}
    )


def test_flips_change_labels_only_and_only_at_attackers(world):
    adversary = Adversary("flip", (1,), world.dataset, [world.task])
    assert adversary.at(0, world.shards[0]) is world.shards[0]
    hostile = adversary.at(1, world.shards[1])
    assert torch.equal(hostile.labels, 1 - world.shards[1].labels)
    assert torch.equal(hostile.images.pixels, world.images.pixels) and torch.equal(hostile.index, world.shards[1].index)


def test_triggers_paint_a_square_on_what_is_called_something_else(world):
    hostile = Adversary("trigger", (1,), world.dataset, [world.task]).poisoned(world.images)
    was_dog = world.images.labels == 1
    assert not bool(hostile.labels.any())
    assert torch.equal(hostile.pixels[~was_dog], world.images.pixels[~was_dog])
    changed = (hostile.pixels != world.images.pixels).any(dim=0).any(dim=0)
    assert torch.equal(hostile.pixels[was_dog], stamp(world.images.pixels[was_dog])) and changed.nonzero().min() == 11


def test_success_counts_what_the_attackers_wanted(world):
    adversary = Adversary("trigger", (1,), world.dataset, [world.task])
    for bias, wanted in ((torch.tensor([9.0, -9.0]), 100.0), (torch.tensor([-9.0, 9.0]), 0.0)):
        with torch.no_grad():
            world.net.head.weight.zero_()
            world.net.head.bias.copy_(bias)
        assert adversary.success(world.net, [world.task]) == wanted


@pytest.mark.slow
def test_an_attack_is_put_apart_and_honest_sites_are_not(tmp_path):
    figure, held = trust_faults.attack(tmp_path, "flip")
    assert held, figure


def test_what_is_put_apart_is_listed_everywhere_and_kept(screened):
    found, folder = screened
    rows = found["screen"]["quarantined"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [row for row in events if row["code"] == "W372"]
    assert (
        rows and len(told) == len(rows) and all(row["why"] in t["message"] for row, t in zip(rows, told, strict=True))
    )
    assert any(row["client"] == 0 and "times as far" in row["why"] for row in rows)
    for row in rows:
        kept = load_file(folder / "quarantine" / f"{row['name']}.safetensors")
        assert len(kept["images"]) == len(kept["pixels"]) == row["images"] > 0
    assert found["simulated"] == ["attack: flip by site 0"] and found["attack_success"] is not None


def test_report_and_card_are_loud_about_it(screened, tmp_path, blank_figures):
    _, folder = screened
    page = write_report([folder], tmp_path / "page.html").read_text("utf-8")
    for words in ("Simulated: attack: flip by site 0.", "The attack succeeds on", "Quarantined", "W372", "SIMULATED"):
        assert words in page
    assert "simulated faults: attack: flip by site 0" in model_card(load_run(folder))


def test_without_the_screen_nothing_changes_and_nothing_is_kept(data, tmp_path):
    found = trust_faults.run(data, tmp_path / "r", num_rounds=1)
    assert not {"screen", "simulated", "faults", "attack_success"} & found.keys()
    assert not (tmp_path / "r/quarantine").exists()


def screen_in(folder, world, note):
    run = SimpleNamespace(folder=RunFolder(folder), experiment=SimpleNamespace(dataset=world.dataset), note=note)
    return Screen(run, lambda model: world.net)


def test_quarantined_pictures_reach_neither_pool_nor_model(world, tmp_path):
    """One site calls its dogs cats, four are honest: its cats stay out, its dogs come through."""
    facts = SimpleNamespace(judged={}, quarantine=[])
    (tmp_path / "r").mkdir()
    screen = screen_in(tmp_path / "r", world, lambda *a, **k: None)
    screen.context.facts = facts
    x, y = world.dataset.transform.normalise(world.images.pixels), world.images.labels
    cats, dogs = x[y == 0], x[y == 1]
    labels = torch.tensor([0] * 4 + [1] * 4)
    uploads = {
        k: {"images": torch.cat([cats[4 * k : 4 * k + 4], dogs[4 * k : 4 * k + 4]]), "labels": labels} for k in range(5)
    }
    uploads[2] = {"images": torch.cat([dogs[20:24], dogs[24:28]]), "labels": labels}
    passed = screen.passed(uploads, world.net, (), world.task, 0)
    assert [row.name for row in facts.quarantine] == ["task0-round0-site2-class0"]
    assert facts.judged == {str(k): 2 for k in range(5)}
    assert passed[2]["labels"].tolist() == [1] * 4 and torch.equal(passed[2]["images"], dogs[24:28])
    assert all(torch.equal(passed[k]["images"], uploads[k]["images"]) for k in (0, 1, 3, 4))

    (tmp_path / "r/quarantine/task0-round0-site2-class0.admit").touch()
    honest = {k: uploads[k] for k in (0, 1, 3, 4)}
    joined = screen.passed(honest, world.net, (), world.task, 1)
    assert list(joined) == [0, 1, 2, 3, 4] and torch.equal(joined[2]["images"], dogs[20:24])
    assert joined[2]["labels"].tolist() == [0] * 4 and facts.quarantine[0].admitted == 1
    assert list(screen.passed(honest, world.net, (), world.task, 2)) == [0, 1, 3, 4]  # once


def test_a_changed_file_is_not_admitted(world, tmp_path):
    told = []
    (tmp_path / "quarantine").mkdir()
    screen = screen_in(tmp_path, world, lambda level, code, *a, **k: told.append(code))
    images = world.dataset.transform.normalise(world.images.pixels[:3])
    row = screen._put_apart(images, 0, 1, 5.0, world.task, 0)
    (tmp_path / f"quarantine/{row.name}.admit").touch()
    path = tmp_path / f"quarantine/{row.name}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert screen._with_admitted({}, world.task, 1, [row]) == {} and told == ["W372", "E372"]


def test_a_person_can_list_show_and_admit(data, tmp_path):
    """The run stands still after its first round, as one across sites does between rounds."""
    folder = tmp_path / "r"
    for _ in range(2):
        with stopped_after(2):
            trust_faults.run(data, folder, **HOSTILE)
    rows = json.loads(command(folder, "--json").output)
    name = next(row["name"] for row in rows if row["client"] == 0)
    assert command(folder, "--sheet", tmp_path / "s.png").exit_code == 0 and (tmp_path / "s.png").stat().st_size > 500
    assert "joins the next round" in command(folder, "--admit", name).output
    assert "will be admitted" in command(folder).output
    found = trust_faults.run(data, folder, **HOSTILE)
    assert [row["name"] for row in found["screen"]["quarantined"] if row["admitted"] is not None] == [name]
    assert "admitted in round" in command(folder).output


def test_admitting_too_late_or_by_a_wrong_name_is_refused(screened, tmp_path):
    found, folder = screened
    name = found["screen"]["quarantined"][0]["name"]
    late = command(folder, "--admit", name)
    assert late.exit_code == 2 and "too late" in late.output and "no round left" in late.output
    wrong = command(folder, "--admit", name.replace("site", "sight"))
    assert wrong.exit_code == 2 and f"did you mean {name}?" in wrong.output
    assert "no run folder" in command(tmp_path).output and command(tmp_path).exit_code == 2
