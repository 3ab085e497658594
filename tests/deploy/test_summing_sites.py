"""Secure sums across sites: the same bits as in one process, whoever dies on the way, and a server that cannot cheat."""

import json
import os
import pickle
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from rescene.core.errors import ConfigError, RunError

pytest.importorskip("cryptography", reason="pip install 'rescene[deploy]'")
pytest.importorskip("Crypto", reason="pip install 'rescene[deploy]'")

import summing_method
import torch
from local_sites import PATIENT, TINY, Hashed, LocalPost, changed, events, hashes, in_process, sites

from rescene.config import resolve
from rescene.core.results import read_metrics
from rescene.deploy import summing
from rescene.deploy.exchange import SUM_STEPS, Patience, Undelivered
from rescene.deploy.keys import make_node_key, read_peers, write_peers
from rescene.deploy.message_bytes import unpack_message
from rescene.deploy.server import PostTransport, Roster, run_across
from rescene.engine import RunFolder
from rescene.privacy.totals import added

NUM = 4
KEYS = "sum_up"  # the method's verb, which is the first letter of a sum
SUMS = [
    *TINY,
    f"federation.num_clients={NUM}",
    f"federation.per_round={NUM}",
    "method=sum-of-counts",
    "tasks.limit=1",
    "federation.num_rounds=2",
    "privacy.mechanism=release",
    "privacy.noise_multiplier=1",
    "privacy.noise=seeded",
    "privacy.honest_sites=2",
]


def summing_sites(root, num=NUM):
    folders = sites(root, num)
    for folder in folders:
        make_node_key(folder)
    public = {k: folder / "node.pub" for k, folder in enumerate(folders)}
    for folder in (root, *folders):
        write_peers(folder / "peers.pub", public)
    return folders


def across(folder, post, peers, patience=PATIENT, overrides=()):
    resolved = resolve("smoke", [*SUMS, *overrides])
    return run_across(resolved, RunFolder(folder), post, patience, Roster(peers=peers), run=Hashed)


def steps(*quick):
    """All steps; only the quick ones in every run of the tests."""
    marked = [step if step in quick else pytest.param(step, marks=pytest.mark.slow) for step in (KEYS, *SUM_STEPS)]
    return pytest.mark.parametrize("step", marked)


def request_of(letter):
    return unpack_message(letter.head).tree


class Watched(LocalPost):
    """Keeps every reply with its verb and round; ``lost(verb, client, round)`` says which letters a dead site never gets."""

    def __init__(self, folders, lost=lambda verb, client, round: False, stop=lambda verb, round: False):
        super().__init__(folders)
        self.away, self.stop, self.replies = lost, stop, []

    def push(self, letters):
        requests = [request_of(letter) for letter in letters.values()]
        if any(self.stop(request.verb, request.round) for request in requests):
            raise KeyboardInterrupt
        return super().push(letters)

    def pull(self, ids):
        found = {}
        for number in ids:
            node, letter, _ = self.sent[number]
            request, client = request_of(letter), self.sites[node].section.client
            if self.away(request.verb, client, request.round):
                found[number] = Undelivered("the node went away")
                continue
            found[number] = self.sites[node].answer(letter)
            self.replies.append((request.verb, request.round, client, unpack_message(found[number]).tree))
        return found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated") / "run"
    results = in_process(resolve("smoke", SUMS), folder)
    return results, hashes(folder)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What each site adds to the sum of the first round, as the simulator draws it."""
    return plain_parts(SUMS, tmp_path_factory.mktemp("parts"))


def plain_parts(settings, folder):
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rescene.engine.transport.added", lambda given: added(found.extend(given) or found))
        in_process(resolve("smoke", [*settings, "federation.num_rounds=1"]), folder / "run")
    return found


def test_the_same_bits_as_in_one_process_and_no_part_at_the_server(tmp_path, simulated, monkeypatch):
    before, begin = {}, summing.Parties.begin

    def kept(self, session, least, num_sites, values):
        before.setdefault(self._client, values)
        return begin(self, session, least, num_sites, values)

    monkeypatch.setattr(summing.Parties, "begin", kept)
    post = Watched(summing_sites(tmp_path))
    results = across(tmp_path / "run", post, tmp_path / "peers.pub")
    assert hashes(tmp_path / "run") == simulated[1]
    assert results["cost"]["measured"]["uplink_bytes"] == simulated[0]["cost"]["measured"]["uplink_bytes"]
    said = [(verb, client, reply.upload) for verb, round, client, reply in post.replies if round == 0]
    assert [upload.keys() for verb, _, upload in said if verb == KEYS] == [{"keys"}] * NUM
    masked = {client: upload["values"] for verb, client, upload in said if verb == "sum-mask"}
    assert sorted(masked) == list(range(NUM)) == sorted(before)
    for client, part in masked.items():
        assert not (part["counts"] == before[client]["counts"]).any()
    assert not torch.equal(added(masked.values())["counts"], added(before.values())["counts"])  # not even together


def test_the_same_bits_through_flowers_apps(tmp_path, simulated):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")
    from test_flower import LocalGrid

    from rescene.deploy.flower import FlowerPost

    across(tmp_path / "run", FlowerPost(LocalGrid(summing_sites(tmp_path)), ttl_s=60), tmp_path / "peers.pub")
    assert hashes(tmp_path / "run") == simulated[1]


@steps("sum-mask")
def test_a_site_that_goes_away_at_any_step_is_missed_by_nobody(tmp_path, simulated, step):
    order = [KEYS, *SUM_STEPS]
    gone = lambda verb, client, round: client == 1 and round == 0 and verb in order[order.index(step) :]  # noqa: E731
    across(tmp_path / "run", Watched(summing_sites(tmp_path), gone), tmp_path / "peers.pub")
    in_it = step in SUM_STEPS[3:]  # its masked numbers had come
    assert (hashes(tmp_path / "run").splitlines()[1] == simulated[1].splitlines()[1]) == in_it
    assert not any("E445" in str(event) for event in events(tmp_path / "run"))
    first, second = read_metrics(tmp_path / "run", [])[0]
    assert first.counted == ((0, 1, 2, 3) if in_it else (0, 2, 3)) and second.counted == (0, 1, 2, 3)


@steps("sum-agree")
def test_a_server_that_dies_at_any_step_goes_on_with_the_same_sum(tmp_path, simulated, step):
    folders = summing_sites(tmp_path)
    first = Watched(folders, stop=lambda verb, round: verb == step and round == 1)
    with pytest.raises(KeyboardInterrupt):
        across(tmp_path / "run", first, tmp_path / "peers.pub")
    across(tmp_path / "run", Watched(folders), tmp_path / "peers.pub")
    assert hashes(tmp_path / "run").splitlines()[-1] == simulated[1].splitlines()[-1]
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "state" / "ledger.jsonl").read_text().splitlines()]
        assert [row["kind"] for row in rows].count("intent") == 2  # one for each round


@pytest.mark.slow
def test_sites_that_come_back_are_waited_for_once_numbers_are_masked(tmp_path, simulated):
    folders, few = summing_sites(tmp_path), Patience(gather_s=0, deadline_s=0.2, poll_s=0, attempts=1)
    gone = lambda verb, client, round: client < 2 and verb == "sum-agree"  # noqa: E731
    with pytest.raises(RunError, match="E445"):
        across(tmp_path / "run", Watched(folders, gone), tmp_path / "peers.pub", few)
    across(tmp_path / "run", Watched(folders), tmp_path / "peers.pub")
    assert hashes(tmp_path / "run").splitlines()[-1] == simulated[1].splitlines()[-1]


@pytest.mark.slow
def test_the_same_numbers_are_never_in_two_sums(tmp_path):
    """A server that forgets its journal begins another sum. The ledgers would give the same numbers again, the sites do not."""
    folders = summing_sites(tmp_path)
    across(tmp_path / "run", Watched(folders), tmp_path / "peers.pub")
    post = Watched(folders)
    with pytest.raises(RunError, match="E320"):
        across(tmp_path / "again", post, tmp_path / "peers.pub", overrides=["federation.retries=0"])
    assert {reply.problem[0] for verb, _, _, reply in post.replies if verb == KEYS} == {"E444"}


@pytest.mark.slow
def test_sums_without_a_site_that_left_are_taken_anew_and_charged(tmp_path):
    """The command that E230 names. The same recipe without privacy.earlier_sums would ask for the old numbers: E444."""
    folders, without = summing_sites(tmp_path), ["federation.exclude=[1]", "privacy.earlier_sums=1"]
    across(tmp_path / "run", Watched(folders), tmp_path / "peers.pub")
    across(tmp_path / "again", Watched(folders), tmp_path / "peers.pub", overrides=without)
    in_process(resolve("smoke", [*SUMS, *without]), tmp_path / "simulated")
    assert hashes(tmp_path / "again").splitlines()[-1] == hashes(tmp_path / "simulated").splitlines()[-1]
    for client, folder in enumerate(folders):
        rows = [json.loads(line) for line in (folder / "state" / "ledger.jsonl").read_text().splitlines()]
        assert [row["kind"] for row in rows].count("intent") == (2 if client == 1 else 4)


def test_what_was_released_for_a_sum_is_never_sent_bare(tmp_path, monkeypatch):
    """A server that simply asks would get numbers with half of the noise."""

    def asking(self, clients, call, carry=PostTransport.carry):
        return carry(self, clients, replace(call, least=None))

    monkeypatch.setattr(PostTransport, "carry", asking)
    post = Watched(summing_sites(tmp_path))
    with pytest.raises(RunError, match="E320"):
        across(tmp_path / "run", post, tmp_path / "peers.pub", overrides=["federation.retries=0"])
    answers = [reply for verb, _, _, reply in post.replies if verb == KEYS]
    assert answers and all(reply.problem[0] == "E443" and reply.upload is None for reply in answers)


@pytest.mark.slow
def test_secrets_are_closed_to_others_and_gone_after_the_sum(tmp_path):
    folders, seen = summing_sites(tmp_path), []

    def look(verb, client, round):
        seen.extend(stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("party-*"))
        return False

    across(tmp_path / "run", Watched(folders, look), tmp_path / "peers.pub")
    assert seen and set(seen) == {0o600}
    assert not list(tmp_path.rglob("party-*")) and not list(tmp_path.rglob("values-*"))
    assert len(list(tmp_path.rglob("told-*"))) == NUM


@pytest.mark.slow
def test_a_site_with_another_list_of_keys_takes_no_part(tmp_path):
    """Keys that the server made up are not those the site knows; it names whom it does not believe."""
    folders = summing_sites(tmp_path)
    (tmp_path / "forged").mkdir()
    make_node_key(tmp_path / "forged")
    public = {k: folder / "node.pub" for k, folder in enumerate(folders)}
    write_peers(folders[3] / "peers.pub", public | {0: tmp_path / "forged" / "node.pub"})
    post = Watched(folders)
    across(tmp_path / "run", post, tmp_path / "peers.pub")
    problems = {(client, reply.problem[0]) for verb, _, client, reply in post.replies if reply.problem}
    assert problems == {(3, "E441")}


class Lying(Watched):
    """Site 1 changes one part of its answer to one step."""

    def __init__(self, folders, step, name, lie):
        super().__init__(folders)
        self.step, self.name, self.lie = step, name, lie

    def pull(self, ids):
        found = super().pull(ids)
        for number in ids:
            node, letter, _ = self.sent[number]
            if self.sites[node].section.client == 1 and request_of(letter).verb == self.step:
                upload = unpack_message(found[number]).tree.upload
                if upload:
                    found[number] = changed(found[number], upload=upload | {self.name: self.lie(upload[self.name])})
        return found


@pytest.mark.parametrize(
    "step, name, lie, clients",
    [
        (KEYS, "keys", lambda keys: keys ^ 1, [0, 2, 3]),
        ("sum-deal", "dealt", lambda shares: shares ^ 1, [0, 2, 3]),
        pytest.param("sum-mask", "signature", lambda signature: signature ^ 1, [0, 2, 3], marks=pytest.mark.slow),
        ("sum-agree", "signature", lambda signature: signature ^ 1, [0, 1, 2, 3]),  # its masked numbers have come
        ("sum-reveal", "seed", lambda seed: seed ^ 1, [0, 1, 2, 3]),
    ],
    ids=["a key", "shares that it deals", "the group", "the list", "a share that it reveals"],
)
def test_a_site_that_lies_in_a_step_is_named_and_the_sum_is_exact(
    tmp_path, parts, step, name, lie, clients, monkeypatch
):
    opened, hold = [], summing.Sum.hold
    monkeypatch.setattr(summing.Sum, "hold", lambda *args: opened.append(hold(*args)) or opened[-1])
    post = Lying(summing_sites(tmp_path), step, name, lie)
    across(tmp_path / "run", post, tmp_path / "peers.pub", overrides=["federation.num_rounds=1"])
    named = [event["message"] for event in events(tmp_path / "run") if event["code"] == "E441"]
    words = "is believed no more, but its numbers are in the sum" if 1 in clients else "is left out of the sum"
    assert len(named) == 1 and named[0].startswith(f"site 1 {words}: ")
    ((values, found),) = opened
    plain = added(parts[k] for k in clients)
    assert found == clients and all(values[key].equal(plain[key]) for key in plain)


def test_without_a_list_of_keys_nothing_is_summed(tmp_path):
    folders = summing_sites(tmp_path)
    for folder in folders[:3]:
        (folder / "peers.pub").unlink()
    across(tmp_path / "run", Watched(folders), tmp_path / "peers.pub")
    codes = [event["code"] for event in events(tmp_path / "run")]
    assert "E440" in codes and "W435" in codes
    with pytest.raises(RunError, match="E440"):
        across(tmp_path / "other", Watched(folders), tmp_path / "nowhere.pub")


def test_a_list_of_keys_that_names_a_site_twice_is_refused(tmp_path):
    summing_sites(tmp_path, 2)
    path = tmp_path / "peers.pub"
    assert sorted(read_peers(path)) == [0, 1]
    path.write_text(path.read_text().replace(" 1\n", " 0\n"))
    with pytest.raises(RunError, match="E440"):
        read_peers(path)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["privacy.honest_sites=1"], "greater than or equal to 2"),
        (["privacy.honest_sites=5"], "a sum needs 5 sites"),
        (["federation.exclude=[0]", "federation.quorum=1"], "only 3 are there"),
        (["privacy.mechanism=none", "privacy.noise_multiplier=null"], "no noised sums"),
        (["method=rescene", "method.start=noise"], "cannot be added up"),
    ],
)
def test_a_recipe_whose_sums_cannot_be_secure_is_refused(wrong, words):
    with pytest.raises(ConfigError) as refusal:
        resolve("smoke", [*SUMS, *wrong])
    assert words in str(refusal.value)


class Killed(Watched):
    """Each letter is a process of its own. ``crashes[verb, client]`` is where it is killed (SIGKILL) the first time."""

    def __init__(self, folders, crashes):
        super().__init__(folders)
        self.folders, self.crashes, self.statuses = folders, dict(crashes), []

    def pull(self, ids):
        return {number: self._process(number) for number in ids}

    def _process(self, number):
        node, letter, _ = self.sent[number]
        request, client = request_of(letter), self.sites[node].section.client
        folder = self.folders[client]
        (folder / "letter").write_bytes(pickle.dumps(letter))
        (folder / "answer").unlink(missing_ok=True)
        place = self.crashes.pop((request.verb, client), "") if request.round >= 0 else ""
        env = os.environ | {"RESCENE_CRASH_AT": place, "PYTHONPATH": os.pathsep.join(sys.path)}
        program = [sys.executable, summing_method.__file__, str(folder), str(folder / "letter"), str(folder / "answer")]
        done = subprocess.run(program, env=env, stderr=subprocess.DEVNULL)
        if place:
            self.statuses.append(done.returncode)
        return (folder / "answer").read_bytes() if (folder / "answer").exists() else Undelivered("the process died")


@pytest.mark.slow
def test_sites_that_are_killed_at_every_step_answer_the_same_again(tmp_path, simulated):
    crashes = {
        (KEYS, 0): "values renamed",
        (KEYS, 1): "party renamed",
        ("sum-deal", 1): "party synced",
        ("sum-deal", 2): "party renamed",
        ("sum-receive", 2): "party renamed",
        ("sum-mask", 3): "numbers renamed",
        ("sum-mask", 0): "party renamed",
        ("sum-agree", 1): "party renamed",
        ("sum-reveal", 2): "told renamed",
        ("sum-reveal", 3): "told told",
    }
    post = Killed(summing_sites(tmp_path), crashes)
    across(tmp_path / "run", post, tmp_path / "peers.pub", overrides=["federation.num_rounds=1"])
    assert post.statuses == [-9] * len(crashes) and not post.crashes
    assert hashes(tmp_path / "run").splitlines()[1] == simulated[1].splitlines()[1]
    assert not list(tmp_path.rglob("party-*"))
