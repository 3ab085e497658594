"""Uploads: on disk before they are used, once, whatever order they come in and whatever comes beside them."""

import itertools
import stat
from dataclasses import replace

import pytest
import torch
from local_sites import LocalPost, changed, federation, sites

from rescene.core.errors import RunError
from rescene.deploy.answers import Journal, Question, open_reply
from rescene.deploy.exchange import Reply, Undelivered
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.server import Roster
from rescene.methods.upload_schema import NOTHING


def test_the_first_answer_counts_the_same_again_changes_nothing_and_another_is_refused(tmp_path):
    journal = Journal(tmp_path)
    journal.turn(0, 0)
    token = journal.token("run", 0, 0, 1)
    assert journal.find(token) is None
    journal.accept(token, b"an answer")
    size = (tmp_path / "uploads-0-1.bin").stat().st_size
    journal.accept(token, b"an answer")
    with pytest.raises(RunError, match="E365"):
        journal.accept(token, b"another")
    assert journal.find(token) == b"an answer" and (tmp_path / "uploads-0-1.bin").stat().st_size == size


def test_a_new_process_finds_what_was_accepted_and_makes_the_same_tokens(tmp_path):
    first = Journal(tmp_path)
    first.turn(0, 0)
    first.accept(first.token(1), b"\n{\0")
    second, other = Journal(tmp_path), Journal(tmp_path / "other run")
    second.turn(0, 0)
    assert second.find(first.token(1)) == b"\n{\0"
    assert other.token(1) != first.token(1) != first.token(2) and len(first.token(1)) == 32
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    with pytest.raises(RunError, match="E365"):
        second.accept(first.token(1), b"another")


def test_wherever_it_is_cut_or_damaged_only_whole_answers_are_found(tmp_path):
    journal = Journal(tmp_path)
    journal.turn(0, 0)
    answers = {journal.token(k): bytes([k]) * 40 for k in range(3)}
    for token, data in answers.items():
        journal.accept(token, data)
    path = tmp_path / "uploads-0-1.bin"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            journal.turn(0, 0)
            found = {token: journal.find(token) for token in answers}
            assert all(data in (None, answers[token]) for token, data in found.items())
            assert sum(data is not None for data in found.values()) >= 3 * place // len(whole) - 1
            for token, data in answers.items():
                journal.accept(token, data)  # asked again, it is whole again
            assert all(journal.find(token) == data for token, data in answers.items())


def test_two_steps_are_kept_because_the_checkpoint_of_the_first_may_not_be_written_yet(tmp_path):
    journal = Journal(tmp_path)
    for round in (-1, 0, 1, 2):
        journal.turn(0, round)
        journal.accept(journal.token(round), b"x")
    assert sorted(path.name for path in tmp_path.glob("uploads-*")) == ["uploads-0-2.bin", "uploads-0-3.bin"]
    journal.clear()
    assert not list(tmp_path.glob("uploads-*"))


class Killed(BaseException):
    pass


def test_a_server_that_dies_between_receipt_and_use_does_not_ask_again(tmp_path):
    folders = sites(tmp_path)
    asked, payload, _ = federation(tmp_path, LocalPost(folders))
    asked.observe = lambda uploads: (_ for _ in ()).throw(Killed)
    with pytest.raises(Killed):
        asked.ask([0, 1, 2], "client_round", payload)
    post = LocalPost(folders, change=lambda node, data: pytest.fail("asked again") if len(data) > 5000 else data)
    again, payload, noted = federation(tmp_path, post)
    found = again.ask([0, 1, 2], "client_round", payload)
    assert list(found) == [0, 1, 2] and not noted and not any(letter.body for letter in post.letters)
    assert again.ledger.measured()["uplink_bytes"] > 0


def test_a_server_that_dies_in_the_middle_asks_only_the_others(tmp_path):
    folders, count = sites(tmp_path), itertools.count()

    def die(node, data):
        if next(count) == 5:  # three greetings, two answers
            raise Killed
        return data

    post = OneByOne(folders, order=[0, 1, 2], change=die)
    asked, payload, _ = federation(tmp_path, post)
    with pytest.raises(Killed):
        asked.ask([0, 1, 2], "client_round", payload)
    post = LocalPost(folders)
    again, payload, _ = federation(tmp_path, post)
    assert list(again.ask([0, 1, 2], "client_round", payload)) == [0, 1, 2]
    assert len([letter for letter in post.letters if letter.body]) == 1


class OneByOne(LocalPost):
    """One answer at a time, in this order of sites."""

    def __init__(self, folders, order, **more):
        super().__init__(folders, **more)
        self.order = order

    def pull(self, ids):
        waiting = {1000 - self.sent[number][0]: number for number in ids}
        first = next(k for k in self.order if k in waiting)
        return super().pull([waiting[first]])


def test_the_order_of_arrival_does_not_matter(tmp_path):
    folders, found = sites(tmp_path), []
    for order in itertools.permutations(range(3)):
        asked, payload, noted = federation(tmp_path, OneByOne(folders, order))
        uploads = asked.ask([0, 1, 2], "client_round", payload)
        asked.transport.journal.clear()
        assert list(uploads) == [0, 1, 2] and not noted
        found.append(pack_message(uploads).data)
    assert len(set(found)) == 1


def answered(tmp_path, forge, rounds=1):
    """Codes noted, and who counted, when site 0's answer to the last round is what ``forge`` makes of (own, others)."""
    post, heard = LocalPost(sites(tmp_path)), {}
    asked, payload, noted = federation(tmp_path, post)

    def change(node, data):
        if isinstance(unpack_message(data).tree.upload, dict) and "model" in unpack_message(data).tree.upload:
            heard.setdefault((asked.round, node), data)
            return forge(heard) if node == 1000 and asked.round == rounds - 1 else data
        return data

    post.change = change
    for round in range(rounds):
        asked.move(asked.task, round, [0, 1, 2])
        uploads = asked.ask([0, 1, 2], "client_round", payload)
    return [code for code, _ in noted], list(uploads)


def test_a_stale_answer_is_refused(tmp_path):
    assert answered(tmp_path, lambda heard: heard[0, 1000], rounds=2) == (["E364"], [1, 2])


def test_another_sites_answer_is_refused(tmp_path):
    def spoof(heard):
        return heard.get((0, 998), b"")  # the last one is asked first

    assert answered(tmp_path, spoof) == (["E364"], [1, 2])


def test_a_stolen_upload_under_ones_own_number_is_refused_without_the_token(tmp_path):
    assert answered(tmp_path, lambda heard: changed(heard[0, 998], client=0)) == (["E364"], [1, 2])


def test_an_answer_to_another_run_is_refused(tmp_path):
    foreign = Journal(tmp_path / "another")
    assert answered(tmp_path, lambda heard: changed(heard[0, 1000], token=foreign.token(0))) == (["E364"], [1, 2])


def test_the_very_answer_counts_however_often_it_was_refused_before(tmp_path):
    """An answer in a site's name that is refused costs it nothing: its letter is sent again."""
    tries = itertools.count()
    found = answered(tmp_path, lambda heard: b"noise" if next(tries) < 1 else heard[0, 1000])
    assert found == ([], [0, 1, 2])


def test_two_answers_at_once_the_first_stands_and_the_other_is_told(tmp_path):
    post = LocalPost([])
    asked, _, noted = federation(tmp_path, post)
    first = pack_message(Reply(0, {}, None, 1, token="t")).data
    replies, refused, question = {}, {}, Question("t", 0, NOTHING)
    for second, codes in ((first, []), (changed(first, flops=7), ["E365"])):
        post.pull = lambda ids, second=second: {"1": first, "2": second}
        assert asked.transport._take(replies, refused, {"1": 7, "2": 7}, {7: question}) <= {7}
        assert replies[7].flops == 1 and [code for code, _ in noted] == codes


def test_what_the_engine_below_repeats_of_a_site_is_made_printable(tmp_path):
    post = LocalPost([])
    asked, _, noted = federation(tmp_path, post)
    post.pull = lambda ids: {"1": Undelivered("boom\n\x1b[2J" + "x" * 9000)}
    assert asked.transport._take({}, {}, {"1": 7}, {7: Question("t", 0, NOTHING)}) == {7}
    ((code, words),) = noted
    assert code == "W340" and words.isprintable() and len(words) < 1100


def test_a_key_answers_for_its_own_site_only(tmp_path):
    folders = sites(tmp_path)
    asked, payload, noted = federation(tmp_path, LocalPost(folders), overrides=["federation.quorum=0"])
    # two sites have exchanged their numbers, not their keys
    asked.transport._roster = Roster({1000: 0, 999: 2, 998: 1})
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0]
    assert [code for code, _ in noted] == ["E344", "E344", "E348", "E348"]
    told = "site 2 cannot take part: it calls itself site 1, whose key is another; see `client` in its site.yaml"
    assert ("E344", told) in noted, "the site is named by its key"
    stranger, payload, noted = federation(tmp_path / "more", LocalPost(folders), overrides=["federation.quorum=0"])
    stranger.transport._roster = Roster({5: 0})  # the key of site 0 is another node's
    assert list(stranger.ask([0, 1, 2], "client_round", payload)) == [1, 2]
    assert [code for code, _ in noted] == ["E344", "E348"]


def test_a_disk_that_fails_is_our_fault_and_stops_the_run(tmp_path):
    asked, payload, _ = federation(tmp_path, LocalPost(sites(tmp_path)))
    (tmp_path / "run" / "uploads" / "uploads-0-1.bin").mkdir()  # cannot be written to
    with pytest.raises(RunError, match="E410"):
        asked.ask([0, 1, 2], "client_round", payload)


@pytest.mark.parametrize("told", ["x" * 2000, "two\nlines", "\x1b[31m", "\ud800"])
def test_nothing_that_would_spoil_a_log_is_taken(told):
    question = Question("t", 0, NOTHING)
    good = Reply(0, None, None, 0, ("E321", "why"), token="t")
    assert open_reply(pack_message(good).data, question) == good
    with pytest.raises(RunError, match="E342"):
        open_reply(pack_message(replace(good, problem=("E321", told))).data, question)


def test_memory_is_taken_only_for_what_was_asked(monkeypatch):
    """A message that says truly what it holds, but holds something else than asked for, makes no tensor."""
    data = pack_message(Reply(0, {"model": {"w": torch.zeros(1000)}}, None, 0, token="t")).data
    monkeypatch.setattr("rescene.deploy.message_bytes._tensors", lambda *parts: pytest.fail("memory was taken"))
    with pytest.raises(RunError, match="does not have the parts"):
        open_reply(data, Question("t", 0, NOTHING))
