"""Ten sites as processes, three of which are killed (SIGKILL) in a phase of a secure sum and never come back.

One dies when the letter reaches it, one while it writes what it has to remember, one right after its answer. The sum of the
sites that are in it is the plain sum of their numbers, to the bit.
"""

import multiprocessing
import os
import signal

import pytest

pytest.importorskip("cryptography", reason="pip install 'rescene[deploy]'")
pytest.importorskip("Crypto", reason="pip install 'rescene[deploy]'")

import summing_method
from local_sites import events
from test_summing_sites import KEYS, SUMS, across, plain_parts, request_of, steps, summing_sites

from rescene.deploy import summing
from rescene.deploy.exchange import SUM_STEPS, Undelivered
from rescene.privacy.totals import added

NUM, LEAST = 10, 7
TEN = [f"federation.num_clients={NUM}", f"federation.per_round={NUM}", f"privacy.honest_sites={LEAST}",
       "federation.num_rounds=1"]  # fmt: skip
DOOMED = ON_ARRIVAL, AT_WORK, AFTERWARDS = 1, 4, 8  # who dies when
WRITING = dict.fromkeys((KEYS, *SUM_STEPS), "party renamed") | {
    "sum-mask": "numbers renamed",
    "sum-reveal": "told told",
}
PARTIES = multiprocessing.get_context("forkserver")  # imports torch once, not once for each site
PARTIES.set_forkserver_preload([summing_method.__name__])


class Doomed:
    """A post to sites that are processes. In the phase ``step`` three of them are killed."""

    def __init__(self, folders, step):
        self.step, self.sent, self.processes, self.lines = step, {}, {}, {}
        for client, folder in enumerate(folders):
            ours, theirs = PARTIES.Pipe()
            self.processes[client] = PARTIES.Process(target=summing_method.answer_all, args=(folder, theirs))
            self.processes[client].start()
            self.lines[client] = ours
            theirs.close()

    def nodes(self):
        return [client for client, process in self.processes.items() if process.is_alive()]

    def push(self, letters):
        ids = {str(len(self.sent) + i): client for i, client in enumerate(letters)}
        for number, client in ids.items():
            letter = letters[client]
            doomed = request_of(letter).verb == self.step
            self.sent[number] = client, doomed
            if client in self.nodes():
                self.lines[client].send((letter, WRITING[self.step] if doomed and client == AT_WORK else None))
                if doomed and client == ON_ARRIVAL:
                    self._kill(client)
        return ids

    def pull(self, ids):
        return {number: self._pulled(*self.sent[number]) for number in ids}

    def _pulled(self, client, doomed):
        try:
            answer = self.lines[client].recv_bytes()
        except (EOFError, OSError):
            return Undelivered("the process died")
        if doomed and client == AFTERWARDS:
            self._kill(client)
        return answer

    def _kill(self, client):
        os.kill(self.processes[client].pid, signal.SIGKILL)
        self.processes[client].join()

    def end(self):
        for client, process in self.processes.items():
            self.lines[client].close()  # a site whose line ends, ends
            process.join()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What each site adds to the sum, as the simulator draws it."""
    found = plain_parts([*SUMS, *TEN], tmp_path_factory.mktemp("parts"))
    assert len(found) == NUM
    return found


@pytest.mark.slow
@steps()
def test_three_of_ten_sites_are_killed_in_a_phase_and_the_sum_is_exact(tmp_path, parts, step, monkeypatch):
    # whose numbers had not come
    missing = {"sum-mask": DOOMED[:2], "sum-agree": (), "sum-reveal": ()}.get(step, DOOMED)
    opened, hold = [], summing.Sum.hold
    monkeypatch.setattr(summing.Sum, "hold", lambda *args: opened.append(hold(*args)) or opened[-1])
    post = Doomed(summing_sites(tmp_path, NUM), step)
    try:
        across(tmp_path / "run", post, tmp_path / "peers.pub", overrides=TEN)
    finally:
        post.end()
    dead = [client for client, process in post.processes.items() if process.exitcode == -signal.SIGKILL]
    assert tuple(dead) == DOOMED
    ((values, clients),) = opened
    assert clients == [k for k in range(NUM) if k not in missing]
    plain = added(parts[k] for k in clients)
    assert values.keys() == plain.keys() and all(values[name].equal(plain[name]) for name in plain)
    assert not any(event["code"] in ("E441", "E445") for event in events(tmp_path / "run"))  # nobody lied
