"""Across sites: the same bits as in one process, whatever gets lost, comes twice, or comes late."""

from datetime import datetime

import pytest
import torch
from local_sites import TINY, LocalPost, across, changed, events, federation, hashes, in_process, sites, without_starts

from rescene.config import resolve
from rescene.core.errors import ConfigError, RunError
from rescene.deploy.exchange import Letter, Patience, Reply
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.site import Site, SiteMemory, client_verb
from rescene.engine.checkpoint import could_not_save, save_atomically

IMPATIENT = Patience(gather_s=0, deadline_s=0.2, poll_s=0, attempts=2)


OTHERS = ["fedewc", "refed", "fedlwf", "target", "glfc", "fedcbdr", "feddm", "fedaf", "icarl", "cfed", "mfcl", "scaffold",
          "fot", "fedssi", "pilora", "fedweit", "fedcil", "fedcprompt"]  # fmt: skip


@pytest.mark.parametrize(
    "method", ["rescene", "fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_the_same_bits_as_in_one_process(tmp_path, method):
    network = ["model.name=vit-mini", "model.width=8"] if method in ("pilora", "fedcprompt") else []
    resolved = resolve("smoke", [*TINY, f"method={method}", *network])
    here, there = tmp_path / "here", tmp_path / "there"
    expected, found = in_process(resolved, here), across(resolved, there, LocalPost(sites(tmp_path)))
    assert hashes(there) == hashes(here) and len(set(hashes(here).split())) > 8
    assert without_starts(found) == without_starts(expected)  # accuracy, bytes, operations, states, leakage


def test_a_mechanism_stands_at_the_site(tmp_path):
    """Noise from the seed, so that both have the same; the ledger lies with the site."""
    pytest.importorskip("opacus", reason="rescene[privacy]")
    dp = ["method=fedcbdr", "model.norm=group", "privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1"]
    resolved = resolve("smoke", [*TINY, *dp, "privacy.noise=seeded", "model.width=4"])
    expected, found = (
        in_process(resolved, tmp_path / "here"),
        across(resolved, tmp_path / "there", LocalPost(sites(tmp_path))),
    )
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here")
    told, known = found.pop("cost")["measured"], expected.pop("cost")["measured"]
    assert found == expected
    hidden = {"client_flops": None, "client_state_bytes": None}
    assert told == known | hidden, "a site behind a mechanism does not tell its work"
    assert (tmp_path / "site-1" / "state" / "ledger.jsonl").stat().st_size > 0


def test_coded_pictures_are_decoded_once_and_alike(tmp_path):
    resolved = resolve("smoke", [*TINY, "federation.wire=uint8"])
    here, there = (
        in_process(resolved, tmp_path / "here"),
        across(resolved, tmp_path / "there", LocalPost(sites(tmp_path))),
    )
    assert without_starts(here) == without_starts(there)
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A recipe with which sites remember something, and the hashes of its run in one process."""
    resolved, folder = resolve("smoke", [*TINY, "method=fedewc"]), tmp_path_factory.mktemp("undisturbed") / "here"
    in_process(resolved, folder)
    return resolved, hashes(folder)


def test_a_lost_letter_is_sent_again_and_changes_nothing(undisturbed, tmp_path):
    resolved, expected = undisturbed
    post = LocalPost(sites(tmp_path), lose=lambda number: number % 3 == 0)
    across(resolved, tmp_path / "there", post)
    assert hashes(tmp_path / "there") == expected
    assert "W340" in {event["code"] for event in events(tmp_path / "there")}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", [7, pytest.param(12, marks=pytest.mark.slow)])
def test_a_server_that_dies_goes_on_from_its_checkpoint_with_the_same_bits(undisturbed, tmp_path, at):
    (resolved, expected), answers = undisturbed, []

    def die(node, data):
        answers.append(node)
        if len(answers) == at:
            raise Killed
        return data

    folders = sites(tmp_path)
    with pytest.raises(Killed):  # a site has answered, and remembers a round that the server does not know of
        across(resolved, tmp_path / "there", LocalPost(folders, change=die))
    across(resolved, tmp_path / "there", LocalPost(folders))
    last = dict(line.split() for line in hashes(tmp_path / "there").splitlines())  # repeated steps: the later line
    assert last == dict(line.split() for line in expected.splitlines())


def test_the_round_goes_on_without_a_late_site_and_says_who(tmp_path):
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post)
    asked.ask([0], "client_round", payload)
    post.lose, asked.transport._patience = (
        (lambda number: "late" if number not in (5, 6) else False),  # 4 is site 0's, and so is what follows 5 and 6
        IMPATIENT,
    )
    uploads = asked.ask([0, 1, 2], "client_round", payload)
    assert list(uploads) == [1, 2]
    assert noted == [("E349", "site 0 did not answer client_round in time")]


def test_a_silent_site_gets_its_letter_again(tmp_path):
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post)
    asked.ask([0], "client_round", payload)
    post.lose, asked.transport._patience = (
        (lambda number: "late" if number == 4 else False),
        Patience(0, 60, 0, attempts=600),
    )
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 1, 2]
    assert not noted and len(post.letters) > 7


def test_a_letter_that_comes_twice_gets_the_same_answer_without_work(tmp_path, monkeypatch):
    post = LocalPost(sites(tmp_path, count=1))
    asked, payload, _ = federation(tmp_path, post)
    asked.move(asked.task, 0, [0])
    asked.ask([0], "client_round", payload)
    (site,) = post.sites.values()
    first = site.answer(post.letters[-1])
    monkeypatch.setattr("rescene.deploy.site_config.prepare", lambda recipe: pytest.fail("it worked again"))
    assert site.answer(post.letters[-1]) == first and unpack_message(first).tree.problem is None


def test_below_the_quorum_the_run_stops_and_can_be_resumed(tmp_path):
    asked, payload, noted = federation(tmp_path, LocalPost(sites(tmp_path, count=1)))
    with pytest.raises(RunError, match="only 1 of 3 sites answered"):
        asked.ask([0, 1, 2], "client_round", payload)
    assert [code for code, _ in noted] == ["E348", "E348"]


def test_all_sites_lost_is_told_for_each_and_the_run_goes_on_once_they_are_back(tmp_path):
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post, IMPATIENT)
    asked.ask([0, 1, 2], "client_round", payload)
    post.lose = lambda number: "late"
    with pytest.raises(RunError, match="only 0 of 3") as stopped:
        asked.ask([0, 1, 2], "client_round", payload)
    assert "rescene deploy status" in stopped.value.fix
    assert [message for code, message in noted if code == "E349"] == [
        f"site {k} did not answer client_round in time" for k in range(3)
    ]
    post.lose = lambda number: False
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 1, 2]


def test_a_full_disk_at_a_site_is_told_and_nothing_is_lost(tmp_path, monkeypatch):
    """The site answers with the code, the others count; with room again the same letter gives the same answer."""
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post)
    expected = asked.ask([0, 1, 2], "client_round", payload)

    def full(path, *parts, **more):
        if "site-1" in str(path):
            raise could_not_save(path, OSError(28, "No space left on device"))
        write(path, *parts, **more)

    write = save_atomically
    monkeypatch.setattr("rescene.deploy.site.save_atomically", full)
    asked.move(asked.task, 1, [0, 1, 2])
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 2]
    (code, message), *more = noted
    assert (code, more) == ("E410", []) and "site 1" in message and "No space left" in message
    monkeypatch.undo()
    asked.move(asked.task, 0, [0, 1, 2])
    again = asked.ask([0, 1, 2], "client_round", payload)
    assert all(torch.equal(again[k]["model"]["head.weight"], expected[k]["model"]["head.weight"]) for k in range(3))


def test_who_answered_when_and_since_when_we_wait_is_told(tmp_path):
    post, heard = LocalPost(sites(tmp_path)), []
    asked, payload, _ = federation(tmp_path, post)
    asked.transport.waiting = heard.append
    asked.ask([0, 1, 2], "client_round", payload)
    assert heard[0]["waiting_for"] and heard[-1]["waiting_for"] == [] and heard[-1]["asked"].endswith("+00:00")
    assert set(heard[-1]["heard"]) == {"site 0", "site 1", "site 2"}
    assert not any(facts["missing"] for facts in heard)
    heard.clear()
    begin = len(post.letters)
    post.lose = lambda number: number == begin + 1
    asked.ask([0, 1, 2], "client_round", payload)
    assert {tuple(facts["missing"]) for facts in heard} == {(), ("site 1",)} and heard[-1]["missing"] == []


def test_a_site_that_is_away_at_the_start_is_waited_for_aloud_and_not_past_the_deadline(tmp_path, monkeypatch):
    post, told = LocalPost(sites(tmp_path)), []
    del post.sites[999]
    asked, payload, noted = federation(tmp_path, post, Patience(gather_s=600, deadline_s=60, poll_s=1, attempts=1))
    asked.transport.waiting = told.append
    clock = [0.0]
    monkeypatch.setattr("rescene.deploy.server.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("rescene.deploy.server.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 2]
    assert clock[0] == 60 and noted == [("E348", "site 1 is not there for client_round")]
    (gathered,) = [facts for facts in told if facts["waiting_for"] == ["site 1"]]  # written once, not at every look
    assert gathered["answered"] == ["site 0", "site 2"] and told[-1]["waiting_for"] == []
    assert gathered["missing"] == ["site 1"] and told[-1]["missing"] == []
    lasts = datetime.fromisoformat(gathered["until"]) - datetime.fromisoformat(gathered["asked"])
    assert 59 <= lasts.total_seconds() <= 61


@pytest.mark.parametrize(
    ("forge", "code"),
    [
        (lambda data: b"garbage", "E340"),
        (lambda data: data[:-8], "E340"),
        (lambda data: pack_message({"a": 1}).data, "E340"),
        (lambda data: pack_message(Reply(0, {}, None, 0)).data, "E364"),
        (lambda data: changed(data, client=7), "E342"),
        (lambda data: changed(data, upload=[1]), "E342"),
        (lambda data: changed(data, upload=picture(label=0)), "E342"),
        (lambda data: changed(data, flops=-1), "E342"),
    ],
)
def test_a_bad_upload_is_left_out_with_a_reason_and_the_others_count(tmp_path, forge, code):
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post)
    asked.ask([0, 1, 2], "client_round", payload)
    post.change = lambda node, data: forge(data) if node == 1000 else data
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [1, 2]
    assert noted[0][0] == code and "site 0" in noted[0][1]


def picture(label):
    return {"images": torch.zeros(1, 3, 28, 28), "labels": torch.tensor([label])}


def test_two_sites_with_one_number_and_a_site_with_other_images_are_told(tmp_path):
    folders = sites(tmp_path)
    (folders[2] / "site.yaml").write_text("client: 0")
    (folders[1] / "site.yaml").write_text("client: 1\ndata: {image_size: 16}")
    asked, payload, noted = federation(tmp_path, LocalPost(folders), overrides=["federation.quorum=0"])
    assert len(asked.ask([0, 1, 2], "client_round", payload)) == 1
    assert sorted(code for code, _ in noted) == ["E344", "E347", "E348", "E348"]
    assert any("other images" in message for _, message in noted)


def test_a_site_with_an_empty_data_folder_is_left_out_by_name(tmp_path):
    folders, empty = sites(tmp_path), tmp_path / "images"
    empty.mkdir()
    (folders[1] / "site.yaml").write_text(f"client: 1\ndata: {{path: {empty}}}")
    asked, payload, noted = federation(tmp_path, LocalPost(folders))
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 2]
    assert noted[0][0] == "E205" and noted[0][1].startswith("site 1 cannot take part: ")


def test_a_site_of_another_version_is_left_out_by_name(tmp_path):
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post)
    old = {"upload": None, "problem": ("E343", "this site has rescene 0.0.1")}
    post.change = lambda node, data: changed(data, **old) if node == 999 else data
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 2]
    assert noted[0] == ("E343", "site 1 cannot take part: this site has rescene 0.0.1") and noted[1][0] == "E348"


def test_nobody_waits_for_a_site_that_cannot_take_part(tmp_path, monkeypatch):
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post, Patience(gather_s=600, deadline_s=600, poll_s=0, attempts=1))
    post.change = lambda node, data: changed(data, upload=None, problem=("E356", "no images")) if node == 999 else data

    def waits(seconds):
        raise AssertionError("it waits")

    monkeypatch.setattr("rescene.deploy.server.time.sleep", waits)
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 2]
    assert noted[0] == ("E356", "site 1 cannot take part: no images")


def test_what_does_not_change_travels_once(tmp_path):
    post = LocalPost(sites(tmp_path))
    asked, payload, noted = federation(tmp_path, post, overrides=["model.width=32"])  # above message.LARGE
    payload |= {"teacher": {"w": torch.rand(100_000)}}
    for _ in range(3):
        asked.ask([0, 1, 2], "client_round", payload)
    bodies = [len(letter.body) for letter in post.letters if letter.body]
    assert min(bodies[:3]) > 400_000 and max(bodies[3:]) < 10_000
    for path in (tmp_path / "site-1").rglob("client_round/*"):
        path.unlink()
    assert list(asked.ask([0, 1, 2], "client_round", payload)) == [0, 1, 2]  # sent again to the one that lost it
    assert len(post.letters[-1].body) > 400_000 and not noted


def test_a_site_refuses_what_is_no_verb_and_other_versions(tmp_path):
    (folder,) = sites(tmp_path, count=1)
    asked, _, _ = federation(tmp_path, LocalPost([folder]))
    for name in ("server_round", "_private", "__class__", "train", "no_such"):
        with pytest.raises(RunError, match="E346"):
            client_verb(asked.method, name)
    head = asked.transport._request("client_round", 0, 0, (), None, "a" * 32)
    old = type(head)(**(vars(head) | {"version": "0.0.1"}))
    reply = unpack_message(Site.open(folder).answer(Letter(pack_message(old).data))).tree
    assert reply.problem[0] == "E343" and "0.0.1" in reply.problem[1]
    assert "pip install rescene==0.0.1" in reply.problem[1]
    away = type(head)(**(vars(head) | {"run": "../../etc"}))
    assert unpack_message(Site.open(folder).answer(Letter(pack_message(away).data))).tree.problem[0] == "E340"


def test_memory_is_found_by_its_hash_or_its_loss_is_told(tmp_path):
    memory = SiteMemory(tmp_path)
    token = memory.write({"fisher": torch.ones(3)})
    assert memory.read(token.sha256)["fisher"].tolist() == [1, 1, 1] and memory.read(None) is None
    for path in tmp_path.glob("memory-*"):
        path.write_bytes(b"half")
    with pytest.raises(RunError, match="lost or damaged"):
        memory.read(token.sha256)
    for number in range(20):
        last = memory.write({"n": number})
    assert len(list(tmp_path.glob("memory-*"))) == 12 and memory.read(last.sha256) == {"n": 19}


@pytest.mark.parametrize("text", [None, "client: -1", "client: 0\nwhat: 1", "[", "client: 0\ndata: {path: 3}"])
def test_a_bad_site_file_is_explained(tmp_path, text):
    if text:
        (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ConfigError, match="E105" if text == "[" else "E120"):
        Site.open(tmp_path)
