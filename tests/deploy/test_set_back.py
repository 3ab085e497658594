"""A site whose privacy ledger was set back refuses, whatever was lost, and what it writes is for its own eyes."""

import json
import os
import shutil
import stat

import pytest
from local_sites import LocalPost, events
from own_sites import NAMES, own_sites, plan_of, run_plan
from test_floors import RELEASE, ledger
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.core.errors import RunError
from rescene.deploy.answers import Ends, Question, open_reply
from rescene.deploy.exchange import Reply
from rescene.deploy.message_bytes import pack_message
from rescene.deploy.site import Site, tighten
from rescene.deploy.site_config import ledger_of
from rescene.privacy.ledger import End

ASKED = [*RELEASE, "federation.per_round=3", "federation.quorum=0"]
TWO, THREE = plan_of((NAMES[:2], 2)), plan_of((NAMES[:2], 2), (NAMES[2:], 1))


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Two rounds were held. Returns the folder, with a backup of site 0's state after the first."""
    root = tmp_path_factory.mktemp("held")
    folders = own_sites(root)

    def back_up(node, data):
        if node == 1000 and len(ledger(folders[0])) == 2 and not (root / "backup").exists():
            shutil.copytree(folders[0] / "state", root / "backup")
        return data

    run_plan(TWO, root / "run", folders, ASKED, LocalPost(folders, change=back_up))
    assert len(ledger(folders[0])) == 4
    return root


def put_back(root):
    shutil.rmtree(root / "site-0" / "state")
    shutil.copytree(root / "backup", root / "site-0" / "state")


def forget_all(root):
    shutil.rmtree(root / "site-0" / "state")
    (root / "site-0" / "ledger-mark.json").unlink()


SET_BACK = {
    "state deleted": (lambda root: shutil.rmtree(root / "site-0" / "state"), "E366"),
    "ledger emptied": (lambda root: (root / "site-0" / "state" / "ledger.jsonl").write_bytes(b""), "E366"),
    "state from a backup": (put_back, "E366"),
    "state and mark deleted": (forget_all, "E367"),
}


def go_on(held, tmp_path, change):
    """The next task, for which all sites are asked, after ``change`` to a copy of the folder; the copy."""
    shutil.copytree(held, tmp_path / "held")
    root = tmp_path / "held"
    for k in range(3):  # its images lie in the copy, too
        path = root / f"site-{k}" / "site.yaml"
        path.write_text(path.read_text().replace(str(held), str(root)))
    change(root)
    run_plan(THREE, root / "run", [root / f"site-{k}" for k in range(3)], ASKED)
    return root


@pytest.mark.parametrize("how", SET_BACK)
def test_a_site_that_was_set_back_refuses_and_the_others_go_on(held, tmp_path, how):
    change, code = SET_BACK[how]
    seen = []

    def set_back(root):
        change(root)
        seen.append(ledger(root / "site-0"))

    root = go_on(held, tmp_path, set_back)
    told = [event for event in events(root / "run") if event["code"] == code]
    assert {event["client"] for event in told} == {0} and "nothing is sent" in told[0]["message"]
    assert [ledger(root / "site-0")] == seen and len(ledger(root / "site-1")) == 6


def test_a_recovered_site_takes_part_again_with_all_charges(held, tmp_path):
    def recover(root):
        put_back(root)
        done = CliRunner().invoke(app, ["deploy", "recover-ledger", str(root / "site-0")])
        assert done.exit_code == 0 and "2 participations are charged; 1 of them" in done.output

    root = go_on(held, tmp_path, recover)
    books = ledger_of(Site.open(root / "site-0").section, root / "site-0")
    assert [(charge.task, charge.round) for charge in books.charges()] == [(0, 0), (0, 1), (1, 0)]
    assert not [event for event in events(root / "run") if event["code"] in ("E366", "E367")]
    known = json.loads((root / "run" / "uploads" / "ledgers.json").read_text())
    assert known["0"]["entries"] == 8 and known["1"]["entries"] == 7  # the floor and the recovery are entries, too


def test_whole_sites_go_on_and_the_server_remembers_them_over_its_runs(held, tmp_path):
    root = go_on(held, tmp_path, lambda root: None)
    assert [len(ledger(root / f"site-{k}")) for k in range(3)] == [6, 6, 6]
    known = json.loads((root / "run" / "uploads" / "ledgers.json").read_text())
    last = ledger(root / "site-2")[-1]
    assert known["2"] == {"entries": 7, "head": last["sha256"]}
    ends = Ends(root / "run" / "uploads" / "ledgers.json")
    ends.note(2, End(6, "0" * 64))
    assert ends.of(2) == End(7, last["sha256"]), "what is known never goes back"


def test_a_memory_of_the_server_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "ledgers.json").write_text("[]")
    with pytest.raises(RunError, match="E354"):
        Ends(tmp_path / "ledgers.json")


def test_a_check_tells_that_a_ledger_was_set_back_and_writes_nothing(held, tmp_path):
    shutil.copytree(held / "site-0", tmp_path / "site")
    (tmp_path / "site" / "state" / "ledger.jsonl").unlink()
    done = CliRunner().invoke(app, ["deploy", "check", str(tmp_path / "site"), "--no-trial", "--json"])
    (row,) = [row for row in json.loads(done.output)["checks"] if row["check"] == "privacy ledger"]
    assert "E366" in row["problem"] and "recover-ledger" in row["fix"]
    assert not (tmp_path / "site" / "state" / "ledger.jsonl").exists()


@pytest.mark.parametrize("end", [End(0, "0" * 64), End(-1, "0" * 64), End(1.0, "0" * 64), End(1, "x"), "1", 7])
def test_a_server_takes_no_odd_end_of_a_ledger(end):
    good = Reply(0, None, None, 0, token="t", ledger=End(3, "0" * 64))
    assert open_reply(pack_message(good).data, Question("t", 0, lambda *parts: None)) == good
    with pytest.raises(RunError, match="E342"):
        odd = Reply(0, None, None, 0, token="t", ledger=end)
        open_reply(pack_message(odd).data, Question("t", 0, lambda *parts: None))


def open_to_others(folder):
    paths = [folder / "state", *(folder / "state").rglob("*"), folder / "ledger-mark.json"]
    assert len(paths) > 6
    return {path.name: oct(path.stat().st_mode) for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077}


def test_what_a_site_writes_can_be_read_by_nobody_else(tmp_path):
    folders, before = own_sites(tmp_path), os.umask(0o022)
    try:
        run_plan(plan_of((NAMES, 1)), tmp_path / "run", folders, ASKED)
        assert os.umask(0o022) == 0o022, "the umask is as it was"
    finally:
        os.umask(before)
    assert open_to_others(folders[0]) == {}
    for path in (folders[0] / "state", *(folders[0] / "state").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # as an older version left it
    tighten(folders[0])
    assert open_to_others(folders[0]) == {}
    assert {stat.S_IMODE((folders[0] / name).stat().st_mode) for name in ("logs", "flwr")} == {0o700}
