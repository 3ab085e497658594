"""The ledger: the same bytes again, budgets, floors, and a closed door when anything is wrong or was set back."""

import base64
import json
import os
import shutil
import stat
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rescene.core.errors import RunError
from rescene.core.rng import Rng
from rescene.methods.surrogates import surrogates_of
from rescene.privacy import ledger as module
from rescene.privacy.accounting import Composition, epsilon_of
from rescene.privacy.ledger import Charge, Declined, End, Floor, Ledger
from rescene.privacy.ledger_file import fingerprint
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Condensation

CHARGE = Charge("run", 0, 0, "release", 2.0, 1, 1.0)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "site" / "ledger.jsonl")


def fresh():
    return {"sums": Noise().normal(3, 4)}


def ask(ledger, charge=CHARGE, question="q", most=None, draw=fresh):
    return ledger.once(charge, question, 1e-5, most, draw)["sums"]


def test_the_same_place_gets_the_same_bytes_even_in_another_process(ledger):
    first = ask(ledger)
    assert torch.equal(first, ask(ledger)) and torch.equal(first, ask(Ledger(ledger.path)))
    assert not torch.equal(first, ask(ledger, replace(CHARGE, round=1)))
    assert ledger.participations("run", 0) == 2


def test_the_same_place_gets_its_numbers_in_the_same_order(ledger):
    """A server refuses an answer in another order, and numbers in another order looked like other numbers to a secure sum."""
    names = [f"{letter}{number}" for letter in "zayb" for number in range(3)]
    for _ in range(2):
        found = ledger.once(CHARGE, "q", 1e-5, None, lambda: {name: torch.zeros(2) for name in names})
        assert list(found) == names


def test_the_same_place_with_another_question_is_refused(ledger):
    ask(ledger)
    with pytest.raises(RunError) as caught:
        ask(ledger, question="another model")
    assert caught.value.code == "E412"
    ask(ledger)  # and nothing is lost


def test_a_spent_budget_declines_and_loses_nothing(ledger):
    first = [ask(ledger, replace(CHARGE, round=r), most=2) for r in range(2)]
    size = ledger.path.stat().st_size
    with pytest.raises(Declined, match="2 participations"):
        ask(ledger, replace(CHARGE, round=2), most=2)
    assert ledger.path.stat().st_size == size
    assert torch.equal(first[1], ask(ledger, replace(CHARGE, round=1), most=2)), "what was released can be sent again"
    ask(ledger, replace(CHARGE, task=1), most=2)  # another task has other records


def test_a_participation_counts_from_its_intent_on(ledger):
    def dies():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(ledger, draw=dies)
    assert ledger.participations("run", 0) == 1
    ask(ledger, most=1)  # nothing was sent: the same place may draw now
    with pytest.raises(Declined):
        ask(ledger, replace(CHARGE, round=1), most=1)


@pytest.mark.parametrize(
    ("floor", "allowed"),
    [("max_participations: 2", 2), ("min_sigma: 2.5", 0), ("epsilon_max: {}", 3), ("min_sigma: 2.0", 5)],
)
def test_the_sites_floor_is_above_the_servers_wish(ledger, floor, allowed):
    ledger.path.parent.mkdir()
    limit = epsilon_of(2.0, Composition(1, 3), 1e-5) + 1e-6
    (ledger.path.parent / "floor.yaml").write_text(floor.format(limit))
    done = 0
    for r in range(5):
        try:
            ask(ledger, replace(CHARGE, round=r), most=100)
            done += 1
        except Declined:
            pass
    assert done == allowed


def test_the_floor_on_epsilon_counts_other_runs_and_refuses_what_has_no_epsilon(ledger):
    ledger.path.parent.mkdir()
    (ledger.path.parent / "floor.yaml").write_text(f"epsilon_max: {epsilon_of(2.0, Composition(1, 1), 1e-5) + 1e-6}")
    with pytest.raises(Declined, match="promises no epsilon"):
        ask(ledger, replace(CHARGE, mechanism="paper-experiment"))
    ask(ledger)
    with pytest.raises(Declined, match="epsilon would be"):
        ask(ledger, replace(CHARGE, run="another run", task=3))


@pytest.mark.parametrize("text", ["epsilon_max: 0", "epsilon_maximum: 3", "epsilon_max: many", "- 1", "a: ["])
def test_a_floor_that_cannot_be_understood_allows_nothing(ledger, text):
    ledger.path.parent.mkdir()
    (ledger.path.parent / "floor.yaml").write_text(text)
    with pytest.raises(RunError) as caught:
        ask(ledger)
    assert caught.value.code == "E411" and not ledger.path.read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: [lines[0][:40] + b"\n", *lines[1:]],
        lambda lines: [lines[0].replace(b'"sigma": 2.0', b'"sigma": 9.0'), *lines[1:]],
        lambda lines: [*lines, b"\x00\xff\n"],
        lambda lines: [*lines, b"[]\n"],
    ],
)
def test_an_unreadable_ledger_fails_closed(ledger, spoil):
    ask(ledger)
    ledger.path.write_bytes(b"".join(spoil(ledger.path.read_bytes().splitlines(keepends=True))))
    drawn = []
    with pytest.raises(RunError) as caught:
        ask(ledger, replace(CHARGE, round=1), draw=lambda: drawn.append(1) or fresh())
    assert caught.value.code == "E411" and not drawn and "backup" in caught.value.fix


def test_a_line_cut_by_a_crash_was_never_sent_and_is_dropped(ledger):
    ask(ledger)
    whole = ledger.path.read_bytes()
    begin = whole.index(b"\n") + 1
    ledger.path.write_bytes(whole[: begin + 30])  # the release was being written
    ask(ledger)
    rows = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["intent", "release"]


def test_a_ledger_that_cannot_be_written_stops_the_upload(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError) as caught:
        ask(Ledger(tmp_path / "file" / "ledger.jsonl"))
    assert caught.value.code == "E411"


@pytest.mark.parametrize("kind", ["release", "per-example", "paper-experiment"])
def test_condensation_replays_the_ledger_bit_for_bit(tiny_world, ledger, kind):
    mechanism = Mechanism(kind, 0.5, 2.0, Composition(1, 1), kappa=1.0, threshold=0.0, typical_count=10.0)
    settings = Condensation(ipc=2, num_steps=2, start="noise")

    def made(ledger, **place):
        shard = replace(tiny_world["shards"][1], site=SitePrivacy(mechanism, Noise(), "run", ledger=ledger, **place))
        return surrogates_of(tiny_world["net"], [shard], [Rng(0)], settings, 7)[0]

    first, again = made(ledger), made(ledger)
    assert torch.equal(first.images, again.images) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.images, made(None).images), "without a ledger the noise is fresh"
    with pytest.warns(UserWarning, match="site declines"):
        refused = made(ledger, round=1, max_participations=1)
    assert len(refused.labels) == 0 and refused.num_declined == 1


class Marked:
    """A site's ledger with its mark, which has answered in four rounds; each question opens the files anew."""

    def __init__(self, folder, rounds=4, floor=Floor()):
        folder.mkdir(exist_ok=True)
        self.path, self.mark, self.floor = folder / "state" / "ledger.jsonl", folder / "mark", floor
        self.given = {round: self.ask(round) for round in range(rounds)}
        self.whole = [path.read_bytes() if path.exists() else b"" for path in (self.path, self.mark)]

    def open(self, least=None):
        return Ledger(self.path, self.floor, self.mark, least)

    def ask(self, round, least=None, most=None):
        return ask(self.open(least), replace(CHARGE, round=round), most=most)

    def refuses(self, code, least=None):
        """Nothing is drawn and no file is changed, whether the question is old or new."""
        before = [path.read_bytes() if path.exists() else b"" for path in (self.path, self.mark)]
        for round in (0, 3, 9):
            with pytest.raises(RunError) as caught:
                ask(self.open(least), replace(CHARGE, round=round), draw=lambda: pytest.fail("new noise was drawn"))
            assert caught.value.code == code, caught.value
        assert [path.read_bytes() if path.exists() else b"" for path in (self.path, self.mark)] == before
        return caught.value


@pytest.fixture
def marked(tmp_path):
    return Marked(tmp_path / "site")


def lines(data):
    return data.splitlines(keepends=True)


def keep(path, num_lines):
    path.write_bytes(b"".join(lines(path.read_bytes())[:num_lines]))


SET_BACK = {  # how, and the rounds whose release is still there
    "deleted": (lambda path: path.unlink(), []),
    "its folder deleted": (lambda path: shutil.rmtree(path.parent), []),
    "emptied": (lambda path: path.write_bytes(b""), []),
    "cut at a line": (lambda path: keep(path, 5), [0, 1]),
    "without its last release": (lambda path: keep(path, 7), [0, 1, 2]),
    "cut within a line": (lambda path: path.write_bytes(path.read_bytes()[:-20]), [0, 1, 2]),
}


@pytest.mark.parametrize("how", SET_BACK)
def test_a_ledger_that_was_set_back_releases_nothing_until_all_is_charged_again(marked, how):
    set_back, kept = SET_BACK[how]
    set_back(marked.path)
    assert "recover-ledger" in marked.refuses("E366").fix
    with pytest.raises(RunError, match="E366"):
        marked.open().charges()
    marked.open().recover()
    assert [charge.round for charge in marked.open().charges()] == [0, 1, 2, 3], "each once, none forgotten"
    for round, given in marked.given.items():
        if round in kept:
            assert torch.equal(marked.ask(round), given)
        else:
            with pytest.raises(Declined, match="releases nothing twice"):
                marked.ask(round)
    with pytest.raises(Declined, match="4 participations"):
        marked.ask(4, most=4)
    marked.ask(4, most=5)  # and so the site goes on
    assert marked.open().recover() == [], "nothing is charged twice"


@pytest.mark.parametrize("first", range(1, 6))
def test_a_line_taken_out_of_the_middle_or_moved_breaks_the_chain(marked, first):
    rows = lines(marked.path.read_bytes())
    without = [*rows[:first], *rows[first + 1 :]]
    moved = [*rows[: first - 1], rows[first], rows[first - 1], *rows[first + 1 :]]
    for changed in (without, moved):
        marked.path.write_bytes(b"".join(changed))
        assert "does not follow" in marked.refuses("E411").why


def test_a_backup_that_was_put_back_is_seen_and_recovering_keeps_the_budget(tmp_path):
    limit = Floor(epsilon_max=epsilon_of(2.0, Composition(1, 4), 1e-5) + 1e-6)
    site = Marked(tmp_path / "site", rounds=2, floor=limit)
    backup = site.path.read_bytes()
    for round in (2, 3):
        site.ask(round)
    with pytest.raises(Declined, match="epsilon would be"):
        site.ask(4)
    site.path.write_bytes(backup)
    site.refuses("E366")
    assert [charge.round for charge in site.open().recover()] == [2, 3]
    with pytest.raises(Declined, match="epsilon would be"):
        site.ask(4)
    site.path.write_bytes(backup)  # once more, after that
    site.refuses("E366")
    assert [charge.round for charge in site.open().recover()] == [2, 3] and len(site.open().charges()) == 4


def test_a_damaged_ledger_is_kept_aside_and_charged_from_its_mark(marked):
    data = bytearray(marked.path.read_bytes())
    data[300] ^= 1
    marked.path.write_bytes(data)
    assert "recover-ledger" in marked.refuses("E411").fix
    assert len(marked.open().recover()) == 4 and len(marked.open().charges()) == 4
    (aside,) = marked.path.parent.glob("ledger.jsonl.damaged-*")
    assert aside.read_bytes() == data


@pytest.mark.parametrize("spoil", [lambda mark: mark.unlink(), lambda mark: mark.write_bytes(mark.read_bytes()[:-30])])
def test_without_its_mark_a_ledger_is_not_believed_until_somebody_says_so(marked, spoil):
    spoil(marked.mark)
    marked.refuses("E368")
    assert marked.open().recover() == [] and marked.mark.read_bytes() == marked.whole[1]
    assert torch.equal(marked.ask(3), marked.given[3])
    marked.mark.unlink()
    marked.path.write_bytes(b"")
    with pytest.raises(RunError, match="E369"):
        marked.open().recover()


def test_a_mark_that_is_behind_follows_the_ledger(marked):
    old = marked.mark.read_bytes()
    marked.ask(4)
    new = marked.mark.read_bytes()
    marked.mark.write_bytes(old)  # as after a crash between the two writes, or a mark from a backup
    assert torch.equal(marked.ask(0), marked.given[0]) and marked.mark.read_bytes() == new


def test_what_the_server_remembers_must_be_in_the_ledger(marked):
    books = marked.open()
    ask(books, replace(CHARGE, round=3))
    known = books.handed
    assert known == End(8, json.loads(lines(marked.path.read_bytes())[-1])["sha256"])
    assert torch.equal(marked.ask(3, known), marked.given[3])
    ask(again := marked.open(known), CHARGE)
    assert again.handed.entries == 2, "an old answer names the end of its own time, so its bytes are the same"
    marked.refuses("E367", End(9, "0" * 64))
    marked.refuses("E367", End(8, "0" * 64))
    assert torch.equal(marked.ask(3, End()), marked.given[3]), "a server that knows nothing changes nothing"
    for path in (marked.path, marked.mark):
        path.unlink()  # the site looks like a new one, but for the server
    marked.refuses("E367", known)


def test_after_a_recovery_the_server_still_finds_what_it_remembers(marked):
    known = [End(number, json.loads(line)["sha256"]) for number, line in enumerate(lines(marked.whole[0]), start=1)]
    marked.path.write_bytes(b"".join(lines(marked.whole[0])[:4]))
    marked.refuses("E366", known[-1])
    marked.open().recover()
    for least in (known[1], known[3], known[5], known[7]):
        assert torch.equal(marked.ask(0, least), marked.given[0])
    for least in (End(2, "0" * 64), End(8, "0" * 64), End(10, "0" * 64)):
        marked.refuses("E367", least)
    books = marked.open(known[7])
    ask(books, replace(CHARGE, round=5))
    assert books.handed.entries == 11  # eight that were, the recovery, and two


def old_form(data, files):
    """The ledger as versions before the chain wrote it: releases as text in the lines."""
    found = []
    for row in map(json.loads, lines(data)):
        body = {key: value for key, value in row.items() if key not in ("before", "sha256", "file", "num_bytes")}
        if "charge" in body:
            body["charge"] = {k: v for k, v in body["charge"].items() if k not in ("delta", "images", "why")}
        if row["kind"] == "release":
            body["data"] = base64.b64encode((files / "releases" / row["file"]).read_bytes()).decode()
        found.append(json.dumps(body | {"sha256": fingerprint(body)}).encode() + b"\n")
    shutil.rmtree(files)
    return b"".join(found)


def test_a_ledger_from_before_the_chain_is_taken_over_once_and_says_so(marked):
    old = old_form(marked.whole[0], marked.open().files)
    marked.path.write_bytes(old)
    marked.refuses("E366")  # of another one than the mark's
    marked.mark.unlink()
    assert len(marked.open().charges()) == 4 and not marked.mark.exists(), "reading changes nothing"
    assert torch.equal(marked.ask(2), marked.given[2])
    marked.ask(4)
    kinds = [json.loads(line)["kind"] for line in lines(marked.path.read_bytes())]
    assert kinds == ["intent", "release"] * 4 + ["chained"] + ["intent", "release"] and marked.mark.exists()
    rows = lines(marked.path.read_bytes())
    for at in range(8):  # the old lines are bound by the new ones
        marked.path.write_bytes(b"".join(rows[:at] + rows[at + 1 :]))
        marked.refuses("E411")
    marked.path.write_bytes(old)
    marked.refuses("E366")  # taken over once only


class Killed(BaseException):
    pass


@pytest.mark.parametrize("taken_over", [False, True], ids=["new", "old form"])
def test_wherever_the_machine_dies_no_charge_is_lost_and_the_site_goes_on(tmp_path, monkeypatch, taken_over):
    """Before and after each fsync and rename between the question and its answer."""
    left = None  # how many of these places may still be passed

    def pass_by():
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                raise Killed

    def watched(real):
        def call(*args):
            pass_by()
            real(*args)
            pass_by()

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(module.os, name, watched(getattr(os, name)))
    died = 0
    for at in range(100):
        left = None
        site = Marked(tmp_path / f"{at}", rounds=1 if taken_over else 0)
        if taken_over:
            site.path.write_bytes(old_form(site.path.read_bytes(), site.open().files))
            site.mark.unlink()
        left = at
        try:
            site.ask(1)
        except Killed:
            died += 1
        handed, left = left >= 0, None
        if handed:
            break
        rows = lines(site.path.read_bytes()) if site.path.exists() else []
        written = [json.loads(row)["file"] for row in rows if b'"key": "run/0/1"' in row]
        found = site.ask(1)  # goes on by itself
        assert torch.equal(site.ask(1), found)
        assert not written or torch.equal(load_file(site.open().files / "releases" / written[0])["sums"], found), (
            "never drawn twice"
        )
        assert [charge.round for charge in site.open().charges()] == ([0, 1] if taken_over else [1])
        assert site.open().recover() == []
    assert handed and died > 12


def test_nobody_else_can_read_a_ledger_and_its_mark(tmp_path):
    before = os.umask(0o022)
    site = Marked(tmp_path / "site", rounds=1)
    os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (site.path.parent, site.path, site.mark)]
    assert modes == [0o700, 0o600, 0o600]
