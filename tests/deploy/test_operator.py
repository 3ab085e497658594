"""What the operator's page knows of the sites: the link's list, and what the run tells of its waiting."""

import json
import os
from urllib.request import urlopen

import pytest
from local_sites import LocalPost
from own_sites import NAMES, own_sites, plan_of, run_plan
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.cli.progress import operator_page
from rescene.config.site_sections import SitesSection
from rescene.core.errors import RunError
from rescene.core.run_state import working_in
from rescene.deploy import operator, processes
from rescene.deploy.federation_folder import FederationFolder
from rescene.deploy.federation_folder import init as make_folder
from rescene.deploy.operator import left_out_rows, site_answers, task_rows
from rescene.deploy.plan_file import Held


@pytest.fixture
def federation(tmp_path, monkeypatch):
    rows = [
        {"what": "server", "name": "link", "state": "up"},
        {"what": "site", "name": "north", "state": "online"},
        {"what": "site", "name": "south", "state": "offline"},
    ]
    monkeypatch.setattr(operator, "status_rows", lambda federation: rows)
    return FederationFolder(tmp_path, "clinic", "127.0.0.1", 9000, ["north", "south"])


def run_folder(federation, name, **waiting):
    folder = federation.server / "runs" / name
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"state": "running", "pid": os.getpid(), "num_tasks": 2}))
    if waiting:
        (folder / "waiting.json").write_text(json.dumps(waiting))
    return folder


def test_who_is_there_who_answered_and_whom_we_wait_for(federation):
    folder = run_folder(
        federation, "a", asked="10:00", answered=["site 0"], waiting_for=["site 1"], heard={"site 0": "9:59"}
    )
    operator.watch_sites(federation, folder)
    north, south = json.loads((folder / "sites.json").read_text())["sites"]
    assert north == {"client": 0, "name": "north", "state": "online", "last_answer": "9:59", "waiting_since": None}
    assert south == {"client": 1, "name": "south", "state": "offline", "last_answer": None, "waiting_since": "10:00"}


def test_a_link_that_is_busy_or_a_run_that_has_told_nothing_leaves_things_unknown(federation, monkeypatch):
    def busy(federation):
        raise RunError("E352", "flwr list failed")

    monkeypatch.setattr(operator, "status_rows", busy)
    folder = run_folder(federation, "a")
    operator.watch_sites(federation, folder)
    sites = json.loads((folder / "sites.json").read_text())["sites"]
    assert [site["state"] for site in sites] == ["unknown", "unknown"] and sites[0]["last_answer"] is None


def test_a_run_that_waits_for_its_first_sites_says_so_before_it_has_a_status(federation):
    folder = run_folder(federation, "a", asked="2026-11-15T09:00:00+00:00", waiting_for=["site 1"])
    (folder / "status.json").unlink()
    with working_in(folder):
        assert operator.progress(folder, federation.sites) == "starting; waiting for site south"
        assert operator.run_folders(federation) == [folder] and operator.newest_run(federation) == folder
        assert site_answers([folder], federation.sites)["south"].startswith("waited for since 2026-11-15 09:00 UTC")


def test_the_accuracy_of_a_run_under_way_says_after_which_task_it_was_measured(federation):
    folder = run_folder(federation, "a")
    status = {"state": "running", "pid": os.getpid(), "done": 4, "steps": 9, "aa": 61.25, "aa_tasks": 1, "num_tasks": 2}
    (folder / "status.json").write_text(json.dumps(status))
    assert operator.progress(folder) == "running: 4 of 9 steps, AA 61.2 after task 1/2"
    (folder / "results.json").write_text("{}")
    assert operator.progress(folder) == "done: 4 of 9 steps, AA 61.2"


@pytest.mark.parametrize("content", ["5", "[1]", '{"done": ', '{"done": "x", "waiting_for": 3, "heard": 4}'])
def test_a_file_that_holds_something_else_is_as_good_as_none(federation, content):
    """A disk may damage a file, or a person may edit it: the operator still sees the rest."""
    plan = SitesSection(tasks=({"classes": ["ant"], "rounds": 2},))
    folder = run_folder(federation, "a")
    for name in ("status.json", "waiting.json", "events.jsonl"):
        (folder / name).write_text(content)
    (federation.server / "nodes.json").write_text(content.replace("{", "[{"))
    operator.watch_sites(federation, folder)
    sites = json.loads((folder / "sites.json").read_text())["sites"]
    assert [(site["last_answer"], site["waiting_since"]) for site in sites] == [(None, None)] * 2
    assert operator.progress(folder) == "starting" and processes.registered(federation) == {}
    assert site_answers([folder], ["north", "south"]) == {} and left_out_rows([folder], ["north"]) == []
    assert Held.of(folder) == Held(begun=False) and task_rows(plan, folder)[0]["state"] == "not begun: ant"


def test_the_newest_run_is_the_one_that_is_served(federation, capsys):
    assert operator.newest_run(federation) is None
    old, new = run_folder(federation, "z-old"), run_folder(federation, "a-new")
    os.utime(old / "status.json", (1, 1))
    assert operator.newest_run(federation) == new
    with operator_page(federation, lambda: operator.newest_run(federation), 0):
        address = capsys.readouterr().out.split()[-1]
        page = urlopen(address, timeout=300).read().decode()
    assert "Sites of clinic" in page and "south" in page and 'http-equiv="refresh"' in page


def test_a_task_that_was_learned_without_a_site_is_named(federation):
    """A site that failed in one round and sent in another took part; a site whose numbers are in no sum did not."""
    folder, sites = run_folder(federation, "a"), ["graz", "lyon", "turin"]
    told = [
        (0, 0, 1, "site lyon did not answer client_round in time"),  # it sent in round 2
        (1, 0, 0, "site graz is not there for sum_up"),
        (1, 0, 1, "site lyon failed"),  # its numbers are in no sum
        (1, 0, 2, "site turin failed"),  # its masked numbers had come
    ]
    events = [
        {"level": "error", "code": "E348", "task": task, "round": r, "client": k, "message": words}
        for task, r, k, words in told
    ]
    sent = [(0, 0, [9, 0, 9], {}), (0, 1, [9, 9, 9], {}), (1, 0, [0, 9, 9], {"summed": [2]})]
    rounds = [
        {"kind": "round", "task": task, "round": r, "sites": {str(k): [up, 9] for k, up in enumerate(ups)}} | summed
        for task, r, ups, summed in sent
    ]
    for name, rows in (("events", events), ("metrics", rounds)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"task 2 was learned without site {name}" for name in ("graz", "lyon")]
    assert operator.missed(folder, sites) == words


def test_the_last_lines_of_a_run_say_which_task_was_learned_without_whom(tmp_path, monkeypatch):
    folders, away = own_sites(tmp_path), LocalPost([])
    make_folder(tmp_path / "clinic", ["graz", "lyon", "turin"], "127.0.0.1", 9000)
    plans = [plan_of((NAMES[:2], 1)), plan_of((NAMES[:2], 1), (NAMES[2:], 1))]

    def across(federation, resolved, place, *rest, **more):
        settings = ["method=fedavg", "federation.per_round=3"]
        run_plan(plans[0], place, folders, settings)
        away.sites = {node: site for node, site in LocalPost(folders).sites.items() if node != 1000}
        return run_plan(plans[1], place, folders, settings, away)

    monkeypatch.setattr(operator, "run", across)
    run = ["deploy", "run", str(tmp_path / "clinic"), "smoke", "--out", str(tmp_path / "run")]
    found = CliRunner().invoke(app, run)
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[-1] == "task 2 was learned without site graz"
