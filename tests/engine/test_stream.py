"""Streams without announced tasks: what sites hold, what methods are told, when buffers close."""

import json
from dataclasses import replace

import pytest
import torch

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.engine import RunFolder, prepare
from rescene.engine.loop import run
from rescene.engine.withdrawal import forget
from rescene.methods import method_class, method_names
from rescene.methods.rescene import Collected, ReSCENE, ServerState
from rescene.methods.rescene_extensions import PATIENCE
from rescene.report import write_report
from rescene.training import Training

SETTING = {
    "federation.num_rounds": 4,
    "tasks.drift": 2,
    "tasks.limit": 3,
    "method.close_after": 1,
    "method.num_steps": 1,
    "model.width": 8,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return rescene.run("smoke", out=tmp_path_factory.mktemp("stream") / "run", **SETTING)


@pytest.fixture(scope="module")
def experiment():
    return prepare(resolve("smoke", SETTING).recipe)


def test_classes_drift_in_and_out_by_shares(experiment):
    first, second, last = experiment.tasks
    for client in range(4):
        before, own = (set(experiment.shards[t][client].tolist()) for t in (0, 1))
        parts = [set(experiment.held(second, client, r).tolist()) for r in range(4)]
        for r, share in ((0, 1 / 3), (1, 2 / 3)):  # two rounds of drift: a third, two thirds, all
            assert len(parts[r] & own) == -(-len(own) * (r + 1) // 3)
            assert len(parts[r] & before) == len(before) - -(-len(before) * (r + 1) // 3), share
        assert parts[0] & own < parts[1] & own and parts[1] & before < parts[0] & before  # nobody comes or goes twice
        assert parts[2] == parts[3] == own
        assert torch.equal(experiment.held(first, client, 0), experiment.shards[0][client])
    assert set(experiment.present(second).train.tolist()) == {*first.train.tolist(), *second.train.tolist()}


def test_without_drift_only_the_news_is_missing():
    at_once = prepare(resolve("smoke", SETTING | {"tasks.drift": 0}).recipe)
    assert all(
        torch.equal(at_once.held(task, k, 0), at_once.shards[task.index][k]) for task in at_once.tasks for k in range(4)
    )
    told, number = at_once.told(at_once.tasks[2], 1)
    assert (told.announced, told.index, number, told.num_seen) == (False, 0, 9, 6)


def test_a_method_is_told_of_one_task_without_end(tmp_path, monkeypatch):
    heard = []
    fedavg = method_class("fedavg")

    def spy(name):
        real = getattr(fedavg, name)

        def listen(self, *args):
            told = [a for a in args if hasattr(a, "task")]
            heard.append((name, told[-1].task.index, told[-1].task.announced, tuple(told[-1].task.classes)))
            heard.extend(("round", a) for a in args if isinstance(a, int))
            return real(self, *args)

        monkeypatch.setattr(fedavg, name, listen)

    for name in ("begin_task", "broadcast", "client_round", "server_round", "end_task"):
        spy(name)
    setting = {key: value for key, value in SETTING.items() if not key.startswith("method.")}
    rescene.run("smoke", out=tmp_path / "run", method="fedavg", **setting | {"federation.engine": "one-by-one"})
    places = {row[1:] for row in heard if row[0] != "round"}
    assert places == {(0, False, (0, 1, 2, 3, 4, 5))}
    assert [row[0] for row in heard].count("begin_task") == [row[0] for row in heard].count("end_task") == 1
    assert [row[1] for row in heard if row[0] == "round"][::2] == list(range(12))


def test_the_record_says_when_classes_came_and_buffers_closed(finished, blank_figures):
    blank_figures.add("stream")
    stream, classes = finished.values["stream"], finished.values["stream"]["classes"]
    assert (stream["drift"], stream["num_rounds"], stream["rounds_per_task"]) == (2, 12, 4)
    assert [(row["task"], row["arrives"], row["leaves"]) for row in classes[::2]] == [(0, 1, 6), (1, 5, 10), (2, 9, 12)]
    assert any(row["closed"] for row in classes)
    events = [json.loads(line) for line in (finished.folder / "events.jsonl").read_text().splitlines()]
    assert len([e for e in events if e["code"] == "I302"]) == sum(len(row["closed"]) for row in classes)
    assert len(finished.values["confusion"]) == 6 and finished.values["theory"] is None
    assert finished.values["cost"]["nominal"] is None
    assert len(finished.matrix) == 3  # measured at the true boundaries
    page = write_report([finished.folder], finished.folder / "r.html")
    assert "When classes came, and when buffers closed" in page.read_text()


@pytest.mark.slow
def test_a_stream_that_dies_ends_the_same(finished, tmp_path):
    rounds = 0

    def stop(event):
        nonlocal rounds
        rounds += event["event"] == "round"
        if rounds == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(resolve("smoke", SETTING), RunFolder(tmp_path / "run"), stop)
    assert rescene.run("smoke", out=tmp_path / "run", **SETTING).values == finished.values


def test_a_site_can_leave_a_stream(finished, tmp_path):
    out = RunFolder(tmp_path / "new")
    record = forget(RunFolder(finished.folder), resolve(finished.folder / "config.yaml"), 0, out)
    assert record["num_images_left"] and rescene.load(out.path).values["stream"] == finished.values["stream"]


@pytest.fixture
def server(tiny_world):
    class Server:
        task = replace(tiny_world["task"], announced=False)
        transform, device, num_rounds = tiny_world["transform"], torch.device("cpu"), 99
        net = staticmethod(tiny_world["arch"].restore)

    return Server()


def upload(labels, value=0.0):
    return {0: {"images": torch.full((len(labels), 3, 16, 16), value), "labels": torch.tensor(labels)}}


def test_a_class_is_closed_once_it_stayed_away_for_so_many_rounds(server, tiny_world):
    method = ReSCENE(close_after=2, budget=3, train=Training(server_epochs=1, batch_size=4))
    state = method.init(tiny_world["net"], Rng(0))
    sent = {1: [0, 0], 2: [0, 0, 1], 3: [1], 4: [1], 5: [1]}
    for number, labels in sent.items():
        state = method.server_round(state, upload(labels, number / 10), number - 1, server, Rng(0).at(number))
        assert state.closings == (() if number < 4 else ((0, 4),))  # last seen in round 2
    (buffer,) = state.buffers
    assert buffer.labels.tolist() == [0, 0, 0] and {int(x) for p in state.pool for x in p.labels} == {1}
    state = method.server_round(state, upload([0], 0.9), 5, server, Rng(0).at(6))  # it comes back
    for number in (7, 8):
        state = method.server_round(state, upload([1], number / 10), number - 1, server, Rng(0).at(number))
    assert state.closings == ((0, 4), (0, 8))
    kept = torch.cat([b.labels for b in state.buffers])
    assert kept.tolist() == [0, 0, 0]  # never more than B of a class, whatever comes back
    ended = method.end_task(state, server.task, server, Rng(0).at("end"))
    assert not ended.pool and ended.closings == state.closings
    assert {c: int((torch.cat([b.labels for b in ended.buffers]) == c).sum()) for c in (0, 1)} == {0: 3, 1: 3}


def test_the_recent_window_counts_the_rounds_in_which_a_class_came(server, tiny_world):
    """A class seen in rounds 10, 20, 30, 40: three quarters of four rounds are the last three."""
    rounds = torch.tensor([10, 20, 30, 40])
    windows = []

    class Looking(ReSCENE):
        def _keep(self, z, rounds, num_rounds, rngs):
            windows.append((rounds[0].tolist(), num_rounds))
            return super()._keep(z, rounds, num_rounds, rngs)

    pool = Collected(
        torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long), rounds, torch.zeros(4, dtype=torch.long)
    )
    state = ServerState(tiny_world["net"].state_dict(), (pool,), (), {})
    Looking(budget=2).end_task(state, server.task, server, Rng(0))
    assert windows == [([1, 2, 3, 4], [4])]


def test_announced_tasks_close_nothing_by_themselves(server, tiny_world):
    server.task = tiny_world["task"]
    method = ReSCENE(close_after=1, train=Training(server_epochs=1))
    state = method.init(tiny_world["net"], Rng(0))
    for number in range(PATIENCE + 3):
        state = method.server_round(state, upload([0] if number == 0 else [1]), number, server, Rng(0).at(number))
    assert state.closings == () and state.buffers == ()


def test_methods_that_must_be_told_are_refused():
    able = [name for name in method_names() if method_class(name).open_ended]
    assert {"rescene", "fedavg", "feddm", "fedaf", "raw-upload"} <= set(able)
    for name in ("fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed", "joint"):
        with pytest.raises(ConfigError, match="must be told when a task begins or ends"):
            resolve("smoke", {"method": name, "federation.num_rounds": 4, "tasks.drift": 2})


@pytest.mark.parametrize(
    "given, words",
    [
        ({"tasks.drift": 4}, "leave none"),
        ({"tasks.drift": -1}, "greater than or equal to 0"),
        ({"tasks.scenario": "domain"}, "only classes"),
        ({"privacy.mechanism": "release", "privacy.epsilon": 8, "method.start": "noise"}, "privacy.mechanism=none"),
        ({"method.close_after": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense(given, words):
    with pytest.raises(ConfigError, match=words):
        resolve("smoke", {"federation.num_rounds": 4, "tasks.drift": 2} | given)


def test_keys_that_say_nothing_do_not_rename_an_experiment():
    plain = resolve("smoke")
    assert plain.digest() == resolve("smoke", {"tasks.drift": None, "method.close_after": None}).digest()
    assert plain.digest() != resolve("smoke", {"tasks.drift": 1}).digest()
    assert plain.digest() != resolve("smoke", {"method.close_after": 3}).digest()
