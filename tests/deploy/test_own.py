"""Sites with their own images: a plan that grows gives the bits of one known from the start; sites evaluate themselves."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
import yaml
from local_sites import PATIENT, LocalPost, events, sites
from own_sites import NAMES, SMALL, model_of, own_sites, plan_of, run_plan, write_images
from safetensors.torch import load_file
from typer.testing import CliRunner

from rescene import __version__
from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError, RunError
from rescene.data import Images
from rescene.data.derived_sets import adopt
from rescene.data.tasks import cut
from rescene.deploy.exchange import HELLO, Letter, Request
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.operator import left_out_rows, progress, site_answers, task_rows
from rescene.deploy.plan_file import Held, add_classes, close_task, read_plan, with_plan, write_plan
from rescene.deploy.server import Roster, run_across
from rescene.deploy.site import Site, SiteMemory
from rescene.deploy.site_config import SiteSection, experiment_of, local_images
from rescene.engine import RunFolder, run
from rescene.engine.evaluate import Tally, evaluate
from rescene.engine.experiment import look_of, prepare
from rescene.nets import Arch
from rescene.use import open_model

FIRST, SECOND = NAMES[:2], NAMES[2:]


@pytest.mark.parametrize("method", ["rescene", "fedavg", "fedewc"])
def test_a_plan_that_grows_gives_the_same_bits_as_one_known_in_full(tmp_path, method):
    folders, more = own_sites(tmp_path), [f"method={method}"]
    run_plan(plan_of((FIRST, 2)), tmp_path / "grown", folders, more)
    first = model_of(tmp_path / "grown")
    full = plan_of((FIRST, 2), (SECOND, 1))
    grown = run_plan(full, tmp_path / "grown", folders, more)
    other = tmp_path / "other"
    other.mkdir()
    known = run_plan(full, tmp_path / "known", own_sites(other), more)
    assert model_of(tmp_path / "grown") == model_of(tmp_path / "known") != first
    assert grown == known and len(grown["accuracy_matrix"]) == 2 and grown["evaluated"] == "at the sites"
    assert json.loads((tmp_path / "grown" / "partition.json").read_text())["classes"] == list(NAMES)


def test_the_finished_model_is_there_while_the_next_task_is_learned(tmp_path):
    """It is exported in the first round and after the new model was written, and the run ends with the bits of an undisturbed one."""
    folders, folder, more = own_sites(tmp_path), tmp_path / "run", ["method=fedavg", "federation.evaluate_every=0"]
    april = run_plan(plan_of((FIRST, 1)), folder, folders, more)
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    scores, exported = open_model(folder).scores(pixels), []

    def export(node, data):
        out = tmp_path / f"export-{len(exported)}"
        told = CliRunner().invoke(app, ["export", str(folder), "--out", str(out)])
        assert told.exit_code == 0, told.output
        assert "its model after task 1" in told.stderr and "ant, bee" in (out / "MODEL_CARD.md").read_text()
        exported.append((out, model_of(folder)))
        return data

    full = plan_of((FIRST, 1), (SECOND, 1))
    run_plan(full, folder, folders, more, LocalPost(folders, change=export))
    for out, _ in exported:
        model = open_model(out / "model.safetensors")
        assert model.classes == list(FIRST) and torch.allclose(model.scores(pixels), scores, atol=1e-4)
        assert model.about["aa"] == april["aa"]
    assert len({new for _, new in exported}) == 2, "the new model was written while one was exported"
    assert open_model(folder).classes == [*FIRST, *SECOND] and not (folder / "finished").exists()
    other = tmp_path / "other"
    other.mkdir()
    run_plan(full, tmp_path / "undisturbed", own_sites(other), more)
    assert model_of(folder) == model_of(tmp_path / "undisturbed")


def test_a_task_closed_after_two_of_three_rounds_is_one_planned_with_two(tmp_path):
    folders, path, folder = own_sites(tmp_path), tmp_path / "plan.yaml", tmp_path / "closed"
    write_plan(path, plan_of((FIRST, 3), rounds=3))

    def close(node, data):  # while the second round is under way
        if Held.of(folder).rounds == 1 and not read_plan(path).tasks[0].closed:
            assert close_task(path, folder)[0] == 0
        return data

    closed = run_plan(read_plan(path), folder, folders, post=LocalPost(folders, change=close), path=path)
    other = tmp_path / "other"
    other.mkdir()
    planned = run_plan(plan_of((FIRST, 2), rounds=3), tmp_path / "planned", own_sites(other))
    assert model_of(folder) == model_of(tmp_path / "planned")
    assert closed["tasks"][0]["rounds"] == 2 and closed["tasks"][0]["closed"] and not planned["tasks"][0]["closed"]
    assert any(event["code"] == "I340" and "after 2 rounds" in event["message"] for event in events(folder))
    grown = add_classes(path, folder, list(SECOND), 1, None)  # and the federation goes on
    results = run_plan(grown, folder, folders, path=path)
    assert [task["rounds"] for task in results["tasks"]] == [2, 1]


def test_what_sites_count_is_the_accuracy_on_all_hold_outs_together(tmp_path):
    folders, plan = own_sites(tmp_path), plan_of((FIRST, 1), (SECOND, 1))
    results = run_plan(plan, tmp_path / "run", folders, ["method=fedavg"])
    recipe = with_plan(resolve("smoke", ["device=cpu"]), plan, 3, tmp_path / "none").recipe
    parts = [Site.open(folder).section for folder in folders]
    held = [experiment_of(section, recipe) for section in parts]
    pixels, labels = (torch.cat([getattr(e.dataset.test, key) for e in held]) for key in ("pixels", "labels"))
    model = load_file(tmp_path / "run" / "model" / "final.safetensors")
    net = Arch("convnet", 16, resolve("smoke", []).recipe.model.norm, 8).restore(model)
    dataset = replace(held[0].dataset, test=Images(pixels, labels))
    found = evaluate(net, dataset, cut(dataset, [2, 2]))
    assert results["accuracy_matrix"][-1] == pytest.approx(found.per_task)
    assert results["within_task"] == pytest.approx(found.within_task)
    assert results["incremental_accuracy"][-1] == pytest.approx(found.overall) == pytest.approx(results["aa"])
    assert [task["test_size"] for task in results["tasks"]] == found.sizes
    assert results["confusion"] == [] and results["leakage"] is None and results["theory"] is None
    assert results["not_measured"]["leakage"] == "not measured: images are at the sites"
    assert results["cost"]["nominal"] is None and results["tasks"][0]["train_size"] is None


def test_the_servers_test_folder_is_used_where_there_is_one(tmp_path):
    test = write_images(tmp_path / "test", dict.fromkeys([*NAMES, "later"], 4), site=9)
    plan, folders = plan_of((FIRST, 1), test=str(test)), own_sites(tmp_path)
    results = run_plan(plan, tmp_path / "run", folders, ["method=fedavg"])
    assert results["evaluated"] == "on the server's test images" and results["tasks"][0]["test_size"] == 8
    assert sum(map(sum, results["confusion"])) == 8
    with pytest.raises(DataError, match="no test image"):
        run_plan(plan_of((FIRST, 1), (["new"], 1), test=str(test)), tmp_path / "run", folders, ["method=fedavg"])


def test_a_plan_may_only_grow(tmp_path):
    folders, old = own_sites(tmp_path), plan_of((FIRST, 2), (SECOND, 1))
    run_plan(old, tmp_path / "run", folders, ["method=fedavg"])
    others = [
        plan_of((FIRST, 2)),
        plan_of((SECOND, 2), (FIRST, 1)),
        plan_of((FIRST, 3), (SECOND, 1)),
        plan_of((FIRST, 2), (SECOND, 1), rounds=5),
        plan_of((FIRST, 2), (SECOND, 1), mean=(0.1, 0.5, 0.5)),
    ]
    for plan in others:
        with pytest.raises(RunError, match="E405"):
            run_plan(plan, tmp_path / "run", folders, ["method=fedavg"])
    with pytest.raises(RunError, match="E409"):  # by hand: a finished task cannot have had fewer rounds
        run_plan(old.closing(0, 1), tmp_path / "run", folders, ["method=fedavg"])
    head = json.dumps({"method": 1, "sites": old.model_dump(mode="json")})
    memory = SiteMemory(folders[0] / "state" / "r" / "client-0")
    memory.check_run(head)
    memory.check_run(
        json.dumps({"method": 1, "sites": plan_of((FIRST, 2), (SECOND, 1), (["x"], 1)).model_dump(mode="json")})
    )
    for plan, method in ((old, 1), (others[1], 1), (plan_of((FIRST, 2), (SECOND, 1), (["x"], 1)), 2)):
        with pytest.raises(RunError, match="E355"):
            memory.check_run(json.dumps({"method": method, "sites": plan.model_dump(mode="json")}))


def test_a_recipe_with_images_at_sites_does_not_run_on_one_machine(tmp_path):
    resolved = with_plan(resolve("smoke", []), plan_of((FIRST, 1)), 3, tmp_path / "run")
    with pytest.raises(ConfigError, match="rescene deploy run"):
        run(resolved, RunFolder(tmp_path / "run"))


def greeting(tmp_path, section, plan=None):
    """What the server hears when it greets a site with this site.yaml."""
    folder = tmp_path / "asked"
    folder.mkdir(exist_ok=True)
    (folder / "site.yaml").write_text(yaml.safe_dump({"client": 0, "device": "cpu"} | section))
    recipe = resolve("smoke", ["device=cpu"])
    recipe = (with_plan(recipe, plan, 1, tmp_path / "none") if plan else recipe).recipe.model_dump(mode="json")
    request = Request(__version__, "r", json.dumps(recipe), HELLO, 0, -1, (), None, "t")
    return unpack_message(Site.open(folder).answer(Letter(pack_message(request).data))).tree


def test_bad_images_are_told_with_the_site_and_the_fix_but_no_file(tmp_path):
    images, plan = write_images(tmp_path / "images", dict.fromkeys(FIRST, 6)), plan_of((FIRST, 1))

    def problem(plan=plan, **section):
        return greeting(tmp_path, {"holds": "own", "data": {"path": str(images)}} | section, plan).problem

    assert problem() is None
    code, words = problem(labels={"antt": "ant"})
    assert code == "E209" and "did you mean 'ant'" in words
    code, words = problem(labels={"ant": "x", "bee": None})
    assert code == "E210" and "labels" in words
    assert problem(data={"path": str(tmp_path / "nowhere")})[0] == "E211"
    assert problem(plan=None)[0] == "E356"
    assert greeting(tmp_path, {}, plan).problem[0] == "E356"
    (tmp_path / "empty").mkdir()
    assert problem(data={"path": str(tmp_path / "empty")})[0] == "E205"
    (images / "bee" / "patient-smith.png").write_bytes(b"no picture")
    code, words = problem()
    assert code == "E203" and "smith" not in words
    assert problem(data={"path": str(images), "skip_unreadable": True}) is None
    (images / "empty class").mkdir()
    code, words = problem()
    assert code == "E204" and "empty class" in words


def test_a_site_takes_no_image_from_outside_of_its_folder_unless_it_says_so(tmp_path):
    """What it sends is made of its images, and a link or a list may be somebody else's."""
    images, plan = write_images(tmp_path / "images", dict.fromkeys(FIRST, 6)), plan_of((FIRST, 1))
    private = write_images(tmp_path / "private", {"holiday": 6}) / "holiday"
    (images / FIRST[0] / "more").symlink_to(private)

    def problem(**data):
        return greeting(tmp_path, {"holds": "own", "data": {"path": str(images)} | data}, plan).problem

    code, words = problem()
    assert code == "E215" and "private" not in words
    assert problem(outside="warn") is None
    (images / FIRST[0] / "more").unlink()
    assert problem() is None
    pictures = sorted(private.iterdir())
    rows = [f"{path},{FIRST[i % len(FIRST)]}" for i, path in enumerate(pictures)]
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "list.csv").write_text("path,label\n" + "\n".join(rows))
    assert problem(path=str(tmp_path / "lists"))[0] == "E215"


def test_classes_outside_the_plan_are_left_out_and_told_unless_the_site_has_a_floor(tmp_path):
    images = write_images(tmp_path / "images", dict.fromkeys(["ant", "wasp"], 6))
    own = {"holds": "own", "data": {"path": str(images)}}
    reply = greeting(tmp_path, own, plan_of((FIRST, 1)))
    assert reply.problem is None and reply.told[0][0] == "W342" and "wasp" in reply.told[0][1]
    assert greeting(tmp_path, own | {"labels": {"wasp": "bee"}}, plan_of((FIRST, 1))).told == ()
    assert greeting(tmp_path, own | {"privacy": {}}, plan_of((FIRST, 1))).told == ()


@pytest.mark.parametrize(
    "text", ["holds: own", "holds: some", "labels: {a: b}", "hold_out: 1", "privacy: {epsilon_max: 0}"]
)
def test_a_bad_site_file_is_explained(tmp_path, text):
    (tmp_path / "site.yaml").write_text(f"client: 0\n{text}")
    with pytest.raises(ConfigError, match="E120"):
        Site.open(tmp_path)


def test_the_hold_out_stays_put_when_images_are_added(tmp_path):
    images = write_images(tmp_path / "images", {"0": 30, "1": 30})
    section = SiteSection.model_validate(
        {"client": 0, "holds": "own", "data": {"path": str(images)}, "labels": {0: "ant", 1: "bee"}}
    )

    def sides():
        found = adopt(local_images(section, 16), FIRST, section.labels, look_of(plan_of((FIRST, 1))), 0.3)
        assert found.classes == FIRST and found.transform.mean == (0.5, 0.5, 0.5)
        return [{row.numpy().tobytes() for row in part.pixels} for part in (found.train, found.test)]

    before = sides()
    assert 8 < len(before[1]) < 30 and sum(map(len, before)) == 60
    write_images(images, {"0": 40, "1": 30})
    (images / "0" / "0.png").rename(images / "0" / "zzz.png")
    after = sides()
    assert before[0] <= after[0] and before[1] <= after[1]
    assert sum(map(len, after)) == 70


def test_false_counts_of_a_site_are_left_out(tmp_path):
    folders, wrong = own_sites(tmp_path), torch.tensor([5, 5])

    def lie(node, data):
        reply = unpack_message(data).tree
        if node == 1000 and isinstance(reply.upload, dict) and "tally" in reply.upload:
            return pack_message(replace(reply, upload={"tally": Tally(wrong, wrong + 1, wrong)})).data
        return data

    results = run_plan(
        plan_of((FIRST, 1)), tmp_path / "run", folders, ["method=fedavg"], LocalPost(folders, change=lie)
    )
    codes = [event["code"] for event in events(tmp_path / "run")]
    assert "E342" in codes and "I341" in codes and results["aa"] is not None


def test_without_any_hold_out_accuracy_is_unknown_and_not_zero(tmp_path):
    folders = own_sites(tmp_path, hold_out=0)
    results = run_plan(plan_of((FIRST, 1)), tmp_path / "run", folders, ["method=fedavg"])
    assert results["aa"] is None and results["accuracy_matrix"] == [[None]]
    again = run_plan(plan_of((FIRST, 1), (SECOND, 1)), tmp_path / "run", folders, ["method=fedavg"])
    assert again["accuracy_matrix"] == [[None, None], [None, None]]


def test_a_mistake_in_the_recipe_is_no_fault_of_the_plan(tmp_path):
    resolved = resolve("own", ["model.lens=waves", "privacy.mechanism=none"])
    with pytest.raises(ConfigError, match="E104") as told:
        with_plan(resolved, plan_of((FIRST, 1)), 3, tmp_path / "none")
    assert "recipe" in told.value.what and "in the recipe" in told.value.fix and told.value.why


def test_tasks_open_and_close_in_order(tmp_path):
    path, folder = tmp_path / "plan.yaml", tmp_path / "run"
    with pytest.raises(ConfigError, match="no class is named"):
        add_classes(path, folder, [], 2, 16)
    for names in (["ant", "ant"], ["a/b"], [""]):
        with pytest.raises(ConfigError, match="E191"):
            add_classes(path, folder, names, 2, 16)
    with pytest.raises(ConfigError, match="it has no plan"):
        close_task(path, folder)
    assert not path.exists()
    plan = add_classes(path, folder, list(FIRST), 2, 16)
    assert plan == read_plan(path) and plan.rounds == 2 and plan.image_size == 16
    with pytest.raises(ConfigError, match="it has not run yet"):
        close_task(path, folder)
    with pytest.raises(ConfigError, match="already"):
        add_classes(path, folder, ["bee"], None, None)
    with pytest.raises(ConfigError, match="16 pixels"):
        add_classes(path, folder, ["cat"], None, 32)
    folders = own_sites(tmp_path)

    class Killed(BaseException):
        pass

    def die(node, data):
        if Held.of(folder).rounds == 1:
            raise Killed
        return data

    with pytest.raises(Killed):
        run_plan(plan, folder, folders, ["method=fedavg"], LocalPost(folders, change=die))
    assert Held.of(folder) == Held(0, 1, True)
    with pytest.raises(ConfigError, match="task 1 has not ended"):
        add_classes(path, folder, ["cat"], None, None)
    assert task_rows(plan, folder)[0]["state"] == "1 of 2 rounds held: ant, bee"
    assert close_task(path, folder) == (0, Held(0, 1, True))
    with pytest.raises(ConfigError, match="closed already"):
        close_task(path, folder)
    results = run_plan(read_plan(path), folder, folders, ["method=fedavg"], path=path)
    assert results["tasks"][0]["rounds"] == 1 and Held.of(folder) == Held(None, 0, True)
    with pytest.raises(ConfigError, match="all its tasks have ended"):
        close_task(path, folder)
    assert task_rows(add_classes(path, folder, ["cat"], 1, None), folder) == [
        {"what": "task", "name": "1", "state": "ended: ant, bee"},
        {"what": "task", "name": "2", "state": "not begun: cat"},
    ]


def test_status_tells_who_has_answered_who_is_late_and_what_was_left_out(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "running"}')
    facts = {"asked": "2026-11-15T09:00:00+00:00", "answered": ["site 0"], "waiting_for": ["site 1", "node 7"]}
    (tmp_path / "waiting.json").write_text(json.dumps(facts))
    now = datetime(2026, 11, 15, 9, 12, tzinfo=UTC)
    found = site_answers([tmp_path], ["north", "south"], now)
    assert found == {"north": "answered", "south": "waited for since 2026-11-15 09:00 UTC (12 min)"}
    (tmp_path / "status.json").write_text('{"state": "running", "done": 4, "steps": 6}')
    (tmp_path / "waiting.json").write_text(json.dumps(facts | {"until": "2026-11-15T09:19:30+00:00"}))
    until = ", until 2026-11-15 09:20 UTC at the latest"
    assert site_answers([tmp_path], ["north", "south"], now)["south"].endswith(f"(12 min){until}")
    line = "running: 4 of 6 steps; waiting for site south, node 7"
    assert progress(tmp_path, ["north", "south"]) == line, "an ordinary round"
    late = facts | {"until": "2026-11-15T09:19:30+00:00", "missing": ["site 1"]}
    (tmp_path / "waiting.json").write_text(json.dumps(late))
    assert progress(tmp_path, ["north", "south"]) == line + until
    row = {"task": 1, "round": 0, "level": "error", "code": "E342", "message": "site 1: bad labels", "client": 1}
    (tmp_path / "events.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"client": None}) + "\n")
    (left,) = left_out_rows([tmp_path], ["north", "south"])
    assert left["name"] == "south" and left["state"] == "task 2, round 1: E342 site 1: bad labels"


def test_sites_are_called_by_name_where_the_server_knows_it(tmp_path):
    """In events and in the line that follows a run; before a site has answered, its key tells who it is."""
    folders, folder = own_sites(tmp_path), tmp_path / "run"
    waited = []

    def look(node, data):
        waited.append(progress(folder, names))
        return data if node != 999 else b"damaged"

    names, post = ["graz", "lyon", "turin"], LocalPost(folders, change=look)
    resolved = with_plan(resolve("smoke", [*SMALL, "method=fedavg"]), plan_of((FIRST, 1)), 3, folder)
    run_across(resolved, RunFolder(folder), post, PATIENT, Roster({1000: 0, 999: 1, 998: 2}, names=names))
    told = [event["message"] for event in events(folder)]
    assert any("site lyon cannot take part" in words for words in told)
    assert not any("node " in words or "site 1" in words for words in [*told, *waited])
    assert any("site graz" in words for words in waited)


def test_sites_of_two_kinds_do_not_mix(tmp_path):
    folders = [*own_sites(tmp_path)[:2], sites(tmp_path / "others")[2]]
    run_plan(plan_of((FIRST, 1)), tmp_path / "run", folders, ["method=fedavg"])
    assert any(e["code"] == "E356" and "holds: own" in e["message"] for e in events(tmp_path / "run"))
    assert not prepare(with_plan(resolve("smoke", []), plan_of((FIRST, 1)), 3, tmp_path).recipe).has_images
