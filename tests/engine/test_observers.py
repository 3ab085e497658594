"""Observers of a user: they see every event in order, keep their state, change nothing, and their errors have their name."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import rescene
from rescene.core.errors import ConfigError, RunError
from rescene.core.plugins import load_plugin
from rescene.engine import observers
from rescene.training import embed
from small_images import some_of_fashion_mini

SMALL = {"method": "fedavg", "federation.num_clients": 3, "federation.per_round": 2, "federation.num_rounds": 2,
         "federation.partition": "iid", "tasks.limit": 2, "data.image_size": 16, "model.width": 4, "train.local_epochs": 1,
         "device": "cpu"}  # fmt: skip
HOOKS = ("begin_run", "begin_task", "uploads_received", "end_round", "end_task", "end_run")


class Diary(rescene.Observer):
    """Writes down each event with its place, and can be told where to stop."""

    def __init__(self, stop=None):
        self.pages, self.restored, self.stop = [], None, stop

    def state(self):
        return {"pages": self.pages}

    def restore(self, state):
        self.restored = list(state["pages"])
        self.pages = state["pages"]

    def close(self):
        self.pages.append("close")

    def wrote(self, hook, run):
        self.pages.append(f"{hook} {run.task.index} {run.round}")
        if self.stop == self.pages[-1]:
            raise KeyboardInterrupt


for hook in HOOKS:
    setattr(Diary, hook, lambda self, run, *more, hook=hook: self.wrote(hook, run))


@pytest.fixture(scope="module", autouse=True)
def images(tmp_path_factory):
    SMALL["data.path"] = some_of_fashion_mini(tmp_path_factory.mktemp("images"), 12, 6)


def run(folder, *callbacks):
    return rescene.run("smoke", out=folder, callbacks=callbacks, **SMALL)


def weights(result):
    return load_file(result.folder / "model" / "final.safetensors")


def same_end(one, other):
    assert one.values == other.values
    assert all(torch.equal(value, weights(other)[key]) for key, value in weights(one).items())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain") / "r")


def expected():
    pages = ["begin_run 0 None"]
    for task in range(2):
        pages.append(f"begin_task {task} None")
        for r in range(2):
            pages += [f"uploads_received {task} {r}", f"end_round {task} {r}"]
        pages.append(f"end_task {task} None")
    return [*pages, "end_run 1 None", "close"]


def test_every_event_is_seen_in_order_and_nothing_changes(plain, tmp_path):
    diary = Diary()
    same_end(run(tmp_path / "r", diary), plain)
    assert diary.pages == expected()


def test_a_resumed_run_gives_an_observer_its_state_back(plain, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", Diary(stop="end_round 1 0"))
    diary = Diary()
    same_end(run(tmp_path / "r", diary), plain)
    whole, begun = expected(), expected().index("begin_task 1 None") + 1
    assert diary.restored == whole[:begun]  # what came after the last checkpoint was told again
    assert diary.pages == [*whole[:begun], "begin_run 1 None", *whole[begun:]]


def test_the_state_of_an_observer_that_is_not_there_for_a_while_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", Diary(stop="end_round 0 1"))

    class Impatient(rescene.Observer):
        def end_task(self, run):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", Impatient())
    diary = Diary()
    run(tmp_path / "r", diary)
    assert diary.restored[:2] == ["begin_run 0 None", "begin_task 0 None"]


@pytest.mark.parametrize("hook", ["begin_task", "filter_uploads", "end_round", "state"])
def test_an_error_names_the_observer_and_the_run_can_go_on_without_it(plain, tmp_path, hook):
    def fail(self, *args):
        raise ValueError("no such column")

    careless = type("Careless", (rescene.Observer,), {hook: fail})
    with pytest.raises(RunError, match=rf"E327.*Careless failed in {hook}: ValueError: no such column"):
        run(tmp_path / "r", careless())
    assert json.loads((tmp_path / "r" / "status.json").read_text())["state"] == "failed"
    if hook == "filter_uploads":
        return  # the results say that it took part
    same_end(run(tmp_path / "r"), plain)


def test_a_state_that_cannot_be_saved_is_refused(tmp_path):
    class Odd(rescene.Observer):
        def state(self):
            return {"path": Path("here")}

    with pytest.raises(RunError, match="E327.*Odd failed in state: TypeError: its state.path"):
        run(tmp_path / "r", Odd())


def test_an_observer_that_writes_into_what_it_sees_changes_nothing(plain, tmp_path):
    class Vandal(rescene.Observer):
        def uploads_received(self, run, uploads):
            for upload in uploads.values():
                for weight in upload["model"].values():
                    weight.zero_()
                upload.clear()

        def end_round(self, run):
            torch.manual_seed(run.round)
            for state in (run.state, run.before):
                for weight in state.model.values():
                    weight.zero_()
            run.row["accuracy"] = 100.0
            embed(run.net(run.state.model), torch.zeros(4, 3, 16, 16))  # work that is not the run's

        def end_run(self, run, results):
            results["aa"] = 100.0

    same_end(run(tmp_path / "r", Vandal()), plain)


def test_a_filter_changes_results_and_the_results_say_so(plain, tmp_path):
    class OnlyOne(rescene.Observer):
        name = "only one"

        def filter_uploads(self, run, uploads):
            return dict(list(uploads.items())[:1])

    found = run(tmp_path / "r", OnlyOne())
    assert found.values["filtered_by"] == ["only one"] and "filtered_by" not in plain.values
    assert any(not torch.equal(value, weights(plain)[key]) for key, value in weights(found).items())
    assert (tmp_path / "r" / "events.jsonl").read_text().count("W303") == 1


def test_a_plugin_file_adds_one(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(observers, "_REGISTERED", [])
    load_plugin(Path(__file__).parents[2] / "examples" / "weight_norms.py")
    found = run(tmp_path / "r")
    same_end(found, plain)
    norms = json.loads((tmp_path / "r" / "norms.json").read_text())
    last = sum(float(w.square().sum()) for w in weights(found).values() if w.is_floating_point()) ** 0.5
    assert len(norms) == 4 and norms[-1] == pytest.approx(last)
    assert "I303" in (tmp_path / "r" / "events.jsonl").read_text()


def test_one_of_an_installed_package_is_known_by_name(monkeypatch):
    entry = SimpleNamespace(name="diary", load=lambda: Diary)
    monkeypatch.setattr(observers, "installed", lambda group: [entry] if group == "rescene.observers" else [])
    (made,) = observers.open_callbacks(["diary"])
    assert isinstance(made.inner, Diary) and made.name == "Diary"
    with pytest.raises(ConfigError, match="(?s)E504.*did you mean diary"):
        observers.open_callbacks(["dairy"])


def test_what_is_no_observer_or_has_a_name_twice_is_refused():
    with pytest.raises(ConfigError, match="E504.*type is no observer"):
        observers.open_callbacks([Diary])
    with pytest.raises(ConfigError, match="E504.*two observers are called Diary"):
        observers.open_callbacks([Diary(), Diary()])
