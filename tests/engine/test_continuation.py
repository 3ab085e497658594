"""A finished run goes on with new tasks: with the same bits as if they had been planned, and bad input changes nothing."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from stopping import stopped_after
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.core.errors import ConfigError, DataError, RunError
from shipped_methods import SHIPPED

A, B, C = ["T-shirt", "Trouser"], ["Pullover", "Dress"], ["Coat", "Bag"]
FAST = ("fedavg", "rescene", "afl")
SMALL = {"model.width": 8, "data.image_size": 16}


def pictures(root, *classes, count=8, light=0):
    """<class>/0.png ...; each class has colours of its own, and pictures that depend on its name alone."""
    for name in classes:
        draws = np.random.default_rng(list(name.encode()))
        base = draws.integers(20 + light, 120 + light, 3)
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = base + draws.integers(0, 100, (16, 16, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i}.png")
    return root


def run(folder, plan=None, **more):
    tasks = {"tasks.limit": None} | ({} if plan is None else {"tasks.plan": plan})
    return rescene.run("smoke", out=folder, **(SMALL | tasks | more))


def differing(one, other):
    """Files of two runs that must be the same but are not, and keys of results.json that differ."""
    names = ("model/final.safetensors", "model/model.json", "metrics.jsonl", "partition.json", "partition.safetensors")
    found = [name for name in names if (one.folder / name).read_bytes() != (other.folder / name).read_bytes()]
    keys = one.values.keys() | other.values.keys()
    return found + sorted(key for key in keys if one.values.get(key) != other.values.get(key))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two tasks on the embedded images."""
    return run(tmp_path_factory.mktemp("finished") / "r", [A, B], method="fedavg").folder


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run on a folder of images, and that folder; their normalisation is measured."""
    root = tmp_path_factory.mktemp("own")
    images = pictures(root / "april", "ant", "bee", "cat", "dog")
    return run(root / "r", method="fedavg", **{"data.path": str(images), "tasks.per_task": 2}).folder, images


@pytest.mark.parametrize(
    "method", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SHIPPED]
)
def test_the_bits_are_those_of_a_run_that_was_planned_so(method, tmp_path):
    network = {"model.name": "vit-mini", "model.width": 8} if method in ("pilora", "fedcprompt") else {}
    before = run(tmp_path / "r", [A, B], method=method, **network)
    after = rescene.continue_run(before, [C])
    planned = run(tmp_path / "planned", [A, B, C], method=method, **network)
    assert differing(planned, after) == ["continued"]
    assert after.values["continued"] == [{"after_task": 1, "num_tasks": 3}]
    assert rescene.load(before.folder).values == before.values  # the run itself stays as it was
    assert before.matrix[1][:2] == after.matrix[1][:2] and len(after.matrix) == 3


def test_sums_under_a_guarantee_go_on_and_cost_no_image_more(tmp_path):
    plan = [["ant", "bee"], ["cat", "dog"], ["bat", "emu"]]
    images = pictures(tmp_path / "images", *(name for task in plan for name in task))
    before = private_run(tmp_path / "r", images, plan[:2])
    after = rescene.continue_run(before, plan[2:])
    assert differing(private_run(tmp_path / "p", images, plan), after) == ["continued"]
    assert before.values["privacy"]["statement"] == after.values["privacy"]["statement"]
    charges = [(tmp_path / name / "ledgers" / "client-0.jsonl").read_bytes() for name in ("r", "r-continued")]
    assert charges[1].startswith(charges[0]) and len(charges[1]) > len(charges[0])


def private_run(folder, images, plan):
    """Noised sums of what a lens shows, once per task and site."""
    noise = {"privacy.epsilon": 8.0, "privacy.delta": 1e-3, "privacy.noise": "seeded", "tasks.limit": None}
    data = {"data.name": "auto", "data.path": str(images), "data.image_size": 16, "model.lens": "waves"}
    federation = {"federation.num_clients": 3, "federation.per_round": 3, "federation.num_rounds": 1}
    setting = noise | data | federation | {"method": "moments", "method.num_features": 32, "tasks.plan": plan}
    return rescene.run("lens-cifar10-dp", out=folder, **setting)


def test_next_months_images_lie_in_another_folder(own, tmp_path):
    folder, april = own
    may = pictures(tmp_path / "may", "bat", "emu", light=60)
    after = rescene.continue_run(folder, data=may, out=tmp_path / "r")
    assert [task["classes"] for task in after.values["tasks"]] == [["ant", "bee"], ["cat", "dog"], ["bat", "emu"]]
    config = after.values["config"]
    assert (config["data"]["path"], config["data"]["more"]) == (str(april), [str(may)])
    plan = [["ant", "bee"], ["cat", "dog"], ["bat", "emu"]]
    planned = run(tmp_path / "p", plan, method="fedavg", **{"data.path": str(april), "data.more": [str(may)]})
    assert differing(planned, after) == ["continued"]
    june = rescene.continue_run(after, data=pictures(tmp_path / "june", "fox"), out=tmp_path / "june-run")
    assert june.values["tasks"][3]["classes"] == ["fox"] and len(june.values["continued"]) == 2


@pytest.mark.parametrize("moved", [False, True])
def test_the_folder_itself_may_have_grown_or_be_a_copy_that_has(own, moved, tmp_path):
    folder, april = own
    grown = pictures(shutil.copytree(april, tmp_path / "all"), "bat", light=100)
    if not moved:  # the run of a folder that then grew: its path is the same
        here = pictures(tmp_path / "here", "ant", "bee", "cat", "dog")
        folder = run(tmp_path / "r", method="fedavg", **{"data.path": str(here), "tasks.per_task": 2}).folder
        shutil.copytree(grown / "bat", here / "bat")
        grown = here
    mean = json.loads((folder / "model/model.json").read_text())["mean"]
    after = rescene.continue_run(folder, [["bat"]], data=str(grown), out=tmp_path / "out")
    assert json.loads((after.folder / "model/model.json").read_text())["mean"] == mean  # not measured anew
    assert after.values["config"]["data"]["mean"] == mean and after.values["config"]["data"]["more"] is None
    result = CliRunner().invoke(app, ["rerun", str(after.folder), "--json"])
    assert result.exit_code == 0 and json.loads(result.output)["identical"]


def test_a_new_domain(tmp_path):
    for i, domain in enumerate(("day", "night")):
        pictures(tmp_path / "april" / domain, "ant", "bee", light=40 * i)
    setting = {"method": "fedavg", "tasks.scenario": "domain", "data.path": str(tmp_path / "april")}
    before = rescene.run("smoke", out=tmp_path / "r", **(SMALL | setting))
    pictures(tmp_path / "may" / "dawn", "ant", "bee", light=90)
    after = rescene.continue_run(before, data=tmp_path / "may")
    assert [task["domain"] for task in after.values["tasks"]] == ["day", "night", "dawn"]
    setting |= {"data.more": [str(tmp_path / "may")], "tasks.plan": [["day"], ["night"], ["dawn"]], "tasks.limit": None}
    assert differing(rescene.run("smoke", out=tmp_path / "p", **(SMALL | setting)), after) == ["continued"]
    pictures(tmp_path / "june" / "dusk", "ant", "bee", "cat")
    with pytest.raises(DataError) as caught:
        rescene.continue_run(before, data=tmp_path / "june", out=tmp_path / "x")
    assert caught.value.code == "E253"


def test_a_new_site_joins(tmp_path):
    for site in ("north", "south"):
        pictures(tmp_path / "april" / site, "ant", "bee")
    setting = {"method": "fedavg", "federation.partition": "sites", "data.path": str(tmp_path / "april")}
    before = run(tmp_path / "r", [["ant"], ["bee"]], **setting)
    for site in ("east", "south"):
        pictures(tmp_path / "may" / site, "cat")
    after = rescene.continue_run(before, data=tmp_path / "may")
    assert [site["name"] for site in after.values["sites"]] == ["north", "south", "east"]
    assert after.values["config"]["federation"]["num_clients"] == 3
    assert before.matrix == [row[:2] for row in after.matrix[:2]]
    asked = [json.loads(line) for line in (after.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(2 not in row["participants"] for row in asked if row["kind"] == "round" and row["task"] < 2)


def test_an_interrupted_continuation_is_resumed(finished, tmp_path):
    with stopped_after(2):
        rescene.continue_run(finished, [C], out=tmp_path / "c")
    resumed = rescene.continue_run(finished, [C], out=tmp_path / "c")  # the same command goes on
    assert differing(rescene.continue_run(finished, [C], out=tmp_path / "d"), resumed) == []


def test_the_command_the_report_and_the_events_say_it(finished, tmp_path):
    words = ["continue", str(finished), f"tasks+=[[{', '.join(C)}]]", "--out", str(tmp_path / "c"), "--quiet"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "1 new after T2" in (tmp_path / "c/report.html").read_text()
    assert '"I402"' in (tmp_path / "c/events.jsonl").read_text()
    assert json.loads((tmp_path / "c/origin.json").read_text())["continued_from"] == str(finished)
    assert CliRunner().invoke(app, words).exit_code == 0  # finished: only shown


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "E505"),
        (["tasks+=[]"], "E505"),
        (["tasks+=[[Coat], []]"], "E505"),
        (["tasks+=[[yes]]"], "E511"),
        (["tasks+=[[Coat, Dress]]"], "E506"),
        (["tasks+=[[Coat], [Coat]]"], "E506"),
        (["tasks+=[[Caot]]"], "E207"),
        (["tasks+=[[Coat]]", "seed=3"], "E509"),
        (["tasks+=[[Coat]]", "data.path=nowhere"], "E201"),
    ],
)
def test_bad_words_are_refused_and_nothing_is_written(words, code, finished, tmp_path):
    result = CliRunner().invoke(app, ["continue", str(finished), *words, "--out", str(tmp_path / "c")])
    assert result.exit_code in (2, 3) and f"error[{code}]" in result.output
    assert not list(tmp_path.iterdir())


def refused(kind, code, *args, **more):
    with pytest.raises(kind) as caught:
        rescene.continue_run(*args, **more)
    assert caught.value.code == code and caught.value.fix
    return caught.value


def test_runs_that_cannot_be_continued_say_why(finished, tmp_path):
    refused(RunError, "E450", tmp_path, [C])
    refused(ConfigError, "E510", finished, [C], out=finished)
    with stopped_after(3):
        run(tmp_path / "stopped", [A, B], method="fedavg")
    assert "wait" in str(refused(RunError, "E450", tmp_path / "stopped", [C]).fix)  # its process, this one, is alive
    status = json.loads((tmp_path / "stopped/status.json").read_text()) | {"state": "interrupted"}
    (tmp_path / "stopped/status.json").write_text(json.dumps(status))
    assert "rescene resume" in str(refused(RunError, "E450", tmp_path / "stopped", [C]).fix)
    pruned = shutil.copytree(finished, tmp_path / "pruned")
    shutil.rmtree(pruned / "checkpoints")
    refused(RunError, "E451", pruned, [C])
    lost = shutil.copytree(finished, tmp_path / "lost")
    (lost / "partition.json").unlink()
    refused(RunError, "E452", lost, [C])
    drift = run(tmp_path / "drift", [A, B], method="fedavg", **{"tasks.drift": 1})
    assert "tasks.drift" in str(refused(ConfigError, "E508", drift, [C]).why)
    x, y = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8), np.arange(40) % 4
    handed = rescene.run("smoke", data=(x, y), out=tmp_path / "o", **{"model.width": 8, "method": "fedavg"})
    assert "Python objects" in str(refused(ConfigError, "E508", handed, [["2"]]).why)
    other = refused(RunError, "E405", finished, [C], out=pruned)
    assert "tasks.plan" in str(other.why)


def test_an_epsilon_for_the_whole_run_leaves_nothing_where_images_are_used_again(tmp_path):
    private = {"privacy.mechanism": "dp-sgd", "privacy.epsilon": 8.0, "privacy.delta": 1e-3, "model.norm": "group"}
    images = {"data.path": str(pictures(tmp_path / "images", "ant", "bee", "cat")), "federation.num_rounds": 1}
    before = run(tmp_path / "r", [["ant"], ["bee"]], method="refed", **private, **images)
    assert "epsilon = 8" in str(refused(ConfigError, "E507", before, [["cat"]]).why)
    assert not (tmp_path / "r-continued").exists()


def test_images_of_earlier_tasks_must_be_the_same(own, tmp_path):
    folder, april = own
    may = pictures(tmp_path / "may", "bat")
    twice = pictures(tmp_path / "twice", "ant", "bat")
    assert "'ant'" in refused(DataError, "E250", folder, data=twice, out=tmp_path / "c").what
    copy = shutil.copytree(april, tmp_path / "copy")
    shutil.copytree(may / "bat", copy / "bat")
    (copy / "ant" / "0.png").unlink()
    refused(DataError, "E252", folder, data=copy, out=tmp_path / "c")
    refused(ConfigError, "E505", folder, data=april, out=tmp_path / "c")
    lost = shutil.copytree(folder, tmp_path / "lost")
    config = (lost / "config.yaml").read_text()
    (lost / "config.yaml").write_text(config.replace(str(april), str(tmp_path / "nowhere")))
    for data in (None, may):
        refused(DataError, "E252", lost, [["bat"]], data=data, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_sites_that_would_get_other_numbers_are_refused(tmp_path):
    for site in ("north", "south"):
        pictures(tmp_path / "april" / site, "ant", "bee")
    setting = {"method": "fedavg", "federation.partition": "sites", "data.path": str(tmp_path / "april")}
    before = run(tmp_path / "r", [["ant"], ["bee"]], **setting)
    pictures(tmp_path / "april" / "east", "cat")
    refused(DataError, "E254", before, [["cat"]])
