"""Watching a run: judged by its listed status, explained with what Flower knows."""

import pytest

from rescene.deploy import control
from rescene.deploy.folder import Federation
from rescene.deploy.processes import Started
from rescene.errors import RunError


@pytest.mark.parametrize(
    ("details", "ended"),
    [
        ({"status": "finished:completed", "status-details": ""}, "finished:completed"),
        ({"status": "finished:failed", "status-details": "No module"}, "finished:failed (No module)"),
        ({"status": "finished:stopped"}, "finished:stopped"),
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

    monkeypatch.setattr(control, "runs", runs)
    monkeypatch.setattr(control, "running", lambda folder: [Started(n, 1, "", "") for n in ("link", "executor")])
    told = []
    federation = Federation(tmp_path, "clinic", "127.0.0.1", 9000, ["north"])
    assert control._watch(federation, 7, tmp_path, told.append, 0) == ended
    assert told == ["starting"] and not answers
