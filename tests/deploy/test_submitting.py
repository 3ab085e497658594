"""Watching a run: judged by its listed status, explained with what Flower knows."""

import json

import pytest

from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError, ResceneError, RunError
from rescene.deploy import operator
from rescene.deploy.federation_folder import FederationFolder
from rescene.deploy.processes import Started


@pytest.mark.parametrize(
    ("details", "ended"),
    [
        ({"status": "finished:completed", "status-details": ""}, ("finished:completed", "")),
        ({"status": "finished:failed", "status-details": "No module"}, ("finished:failed", "No module")),
        ({"status": "finished:stopped"}, ("finished:stopped", "")),
    ],
)
def test_a_run_that_ended_says_how_and_why(tmp_path, monkeypatch, details, ended):
    answers = [RunError("E352", "busy"), [], [{"run-id": "8", "status": "x"}, {"run-id": "7", "status": "running"}]]
    answers.append([{"run-id": "7", **details}])

    def runs(federation):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(operator, "runs", runs)
    monkeypatch.setattr(operator, "running", lambda folder: [Started(n, 1, "", "") for n in ("link", "executor")])
    told = []
    federation = FederationFolder(tmp_path, "clinic", "127.0.0.1", 9000, ["north"])
    assert operator._watch(federation, 7, tmp_path, told.append, 0) == ended
    assert told == ["starting"] and not answers


def test_a_run_that_goes_on_with_new_classes_does_not_begin_with_the_end_of_the_last_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(operator, "running", lambda folder: [Started(n, 1, "", "") for n in ("link", "executor")])
    monkeypatch.setattr(operator, "is_done", lambda out: True)
    monkeypatch.setattr(operator, "progress", lambda out, sites: "done: 3 of 3 steps, AA 81.1")
    monkeypatch.setattr(operator, "runs", lambda federation: [{"run-id": "7", "status": "finished:completed"}])
    told = []
    operator._watch(FederationFolder(tmp_path, "clinic", "127.0.0.1", 9000, ["north"]), 7, tmp_path, told.append, 0)
    assert told == ["starting"]


REFUSALS = [
    RunError("E416", "other code", where="runs/x", why="threads: 1 -> 2\ntorch: 2.9 -> 3.0", fix="add --elsewhere"),
    RunError("E405", "another recipe"),
    RunError("E377", "no site has sent its sums of task 1", fix="change the floors"),
    ConfigError("E167", "no drift here", fix="leave it out"),
    DataError("E201", "no images"),
]
PASSING = [
    "error[E422] another process is at work in this run folder",
    str(RunError("E320", "only 1 of 3 sites answered")),
    str(RunError("E410", "disk full")),
    "out of memory",
    "",
]


def submitted(tmp_path, monkeypatch, why, runs=None):
    """How often a run was submitted whose server app ends with these words, and the error it was given up with."""
    submissions = []

    def flwr(federation, *words):
        submissions.append(words)
        return {"run-id": "7"}

    details = f"ServerApp failed with exception: {why}" if why else ""
    listed = [{"run-id": "7", "status": "finished:failed", "status-details": details}]
    monkeypatch.setattr(operator, "require_flower", lambda: None)
    monkeypatch.setattr(operator, "flwr", flwr)
    monkeypatch.setattr(operator, "runs", runs or (lambda federation: listed))
    monkeypatch.setattr(operator, "running", lambda folder: [Started(n, 1, "", "") for n in ("link", "executor")])
    federation = FederationFolder(tmp_path, "clinic", "127.0.0.1", 9000, ["a", "b", "c"])
    federation.server.mkdir(parents=True)
    with pytest.raises(ResceneError) as caught:
        operator.run(federation, resolve("smoke", ["federation.num_clients=3"]), tmp_path / "run", look_s=0)
    return len(submissions), caught.value


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.code)
def test_what_a_server_app_refuses_for_good_is_submitted_once_and_told_in_its_own_words(tmp_path, monkeypatch, refusal):
    count, error = submitted(tmp_path, monkeypatch, str(refusal))
    assert (count, type(error), str(error)) == (1, type(refusal), str(refusal))


@pytest.mark.parametrize("why", PASSING)
def test_what_may_pass_is_submitted_again(tmp_path, monkeypatch, capsys, why):
    count, error = submitted(tmp_path, monkeypatch, why)
    assert capsys.readouterr().out.count("the server waits 3600 seconds at most") == 1
    assert count == operator.SUBMISSIONS and error.code == "E351" and why in str(error)


def test_only_submissions_that_finish_no_step_count_and_a_link_that_was_away_is_waited_for(tmp_path, monkeypatch):
    steps, away, out = [1, 2, 2, 2, 3, 3, 3, 3], [True] * 3, tmp_path / "run"
    out.mkdir()
    given = list(steps)

    def listed(federation):
        if away:
            away.pop()
            raise RunError("E352", "no link")
        return [{"run-id": "7", "status": "finished:failed"}]

    def watch(federation, *rest):
        (out / "status.json").write_text(json.dumps({"done": given.pop(0)}))
        return "finished:failed", ""

    monkeypatch.setattr(operator, "_watch", watch)
    count, error = submitted(tmp_path, monkeypatch, "", listed)
    assert (count, error.code, given, away) == (len(steps), "E351", [], [])
