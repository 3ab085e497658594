"""The sites of a federation on the page: who is there, whom we wait for, bytes of each, what was left out."""

import json
import os

import pytest
from report_fixtures import write_run

from rescene.report import load_run, write_report
from rescene.report.figures_accuracy import participation
from rescene.report.page_sections import sites_view

ROUNDS = [
    {"kind": "round", "task": 0, "round": 0, "participants": [0, 1], "accuracy": 40.0, "uplink_bytes": 3000,
     "downlink_bytes": 20, "sites": {"0": [1000, 10], "1": [2000, 10]}, "notes": {}},
    {"kind": "round", "task": 0, "round": 1, "participants": [0, 1], "accuracy": 50.0, "uplink_bytes": 1500,
     "downlink_bytes": 20, "sites": {"0": [1500, 10], "1": [0, 10]}, "notes": {}},
]  # fmt: skip
LATE = {"task": 0, "round": 1, "level": "error", "code": "E349", "message": "site 1 was <late>", "client": 1}


@pytest.fixture
def across(tmp_path):
    folder = write_run(tmp_path / "across", "rescene", 0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROUNDS))
    (folder / "events.jsonl").write_text(json.dumps(LATE) + "\n" + json.dumps(LATE | {"client": None}) + "\n")
    sites = [
        {"client": 0, "name": "north", "state": "online", "last_answer": "2026-11-15T09:00:00+00:00"},
        {"client": 1, "name": "<b>south", "state": "offline", "waiting_since": "2026-11-15T09:00:30+00:00"},
        {"client": 2, "name": "west", "state": "registered"},
    ]
    facts = {"federation": "clinic", "updated": "2026-11-15T09:01:01+00:00", "sites": sites}
    (folder / "sites.json").write_text(json.dumps(facts))
    return folder


def test_each_site_has_its_bytes_its_state_and_its_faults(across):
    view = sites_view([load_run(across)])
    north, south, west = view.sites
    assert (north.state, north.last_answer, north.answered, north.up) == (
        "online",
        "1 min 01 s ago",
        "2 of 2",
        "2.50 kB",
    )
    assert (south.answered, south.up, south.left_out) == ("1 of 2", "2.00 kB", "1 × E349")
    assert (west.up, west.answered, west.last_answer, west.left_out) == ("–", "–", "–", "")
    assert view.rounds[0] == ["T1, round 2", "50.0", "1 of 2", "1.50 kB", "north 1.50 kB, <b>south nothing"]
    assert view.left_out == [["T1, round 2", "<b>south", "E349", "site 1 was <late>"]]


def test_we_wait_only_while_the_run_goes_on(across):
    assert sites_view([load_run(across)]).sites[1].late == ""
    (across / "results.json").unlink()
    status = json.loads((across / "status.json").read_text())
    (across / "status.json").write_text(json.dumps(status | {"state": "running", "pid": os.getpid()}))
    assert sites_view([load_run(across)]).sites[1].late == "31.0 s ago"


def test_the_page_has_the_section_for_a_federation_and_only_then(across, tmp_path, blank_figures):
    page = write_report([across], tmp_path / "page" / "report.html").read_text()
    assert 'id="federation"' in page and "&lt;b&gt;south" in page and "<b>south" not in page
    (across / "sites.json").write_text("{damaged")
    assert sites_view([load_run(across)]) is None
    (across / "sites.json").write_text(json.dumps({"sites": ["odd", {"client": "x", "name": None}]}))
    assert sites_view([load_run(across)]).sites[0].state == "unknown"
    (across / "sites.json").unlink()
    page = write_report([across], tmp_path / "page" / "report.html").read_text()
    assert 'id="federation"' not in page


def test_who_took_part_names_the_method_and_says_where_it_asks_more_sites_than_were_drawn(across):
    assert "ReSCENE asked in that round." in participation(load_run(across)).caption
    assert "not drawn" not in participation(load_run(across)).caption
    everybody = [row | {"participants": [0]} for row in ROUNDS]
    (across / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in everybody))
    assert "ReSCENE also asks sites that were not drawn" in participation(load_run(across)).caption
