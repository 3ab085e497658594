"""Any order of delivering, losing, doubling, forging and crashing ends like the undisturbed exchange (hypothesis)."""

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rescene.core.rng import Rng
from rescene.deploy.answers import Journal
from rescene.deploy.exchange import HELLO, Patience, Reply, Undelivered
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.server import PostTransport
from rescene.engine import checkpoint
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.federation import RunFederation
from rescene.engine.transport import FederationSettings
from rescene.methods import method_class
from rescene.methods.base import weights_of
from rescene.nets.cost import FlopMeter
from rescene.testing.conformance import make_world

CLIENTS, ROUNDS = [0, 1, 2], 2
WORLD, METHOD = make_world(), method_class("fedavg")()
MODEL = weights_of(WORLD.arch.build(2, Rng(0).generator()))


class Killed(BaseException):
    pass


def upload_of(client, round):
    """What this site answers in this round, whenever it is asked."""
    return {"model": {name: value + client + 10 * round for name, value in MODEL.items()}, "num_images": client + 1}


class Network:
    """Answers lie around until somebody draws what becomes of them; it outlives every server."""

    def __init__(self, draw):
        self.draw, self.letters, self.answers, self.troubles = draw, {}, {}, 12
        self.safe = set()  # tokens whose answer is on disk: never to be asked again

    def nodes(self):
        return CLIENTS

    def push(self, letters):
        ids = {}
        for node, letter in letters.items():
            request = unpack_message(letter.head).tree
            assert request.token not in self.safe, "asked again though its answer is in the journal"
            upload = (
                {"fingerprint": "f", "torch": torch.__version__, "lens": ""}
                if request.verb == HELLO
                else upload_of(node, request.round)
            )
            number = f"{len(self.letters):04d}"
            self.letters[number] = request
            self.answers[number] = pack_message(Reply(node, upload, None, 1, token=request.token)).data
            ids[number] = node
        return ids

    def pull(self, ids):
        if any(self.letters[number].verb == HELLO for number in ids) or not self.troubles:
            return {number: self.answers[number] for number in ids}
        self.troubles -= 1
        what = self.draw(st.sampled_from(["deliver", "lose", "forge", "mix up", "crash", "nothing"]))
        some = self.draw(st.lists(st.sampled_from(sorted(ids)), min_size=1, max_size=4, unique=True))
        if what == "crash":
            raise Killed
        if what == "nothing":
            return {}
        if what == "lose":
            return {number: Undelivered("lost") for number in some}
        if what == "forge":
            return {number: self.answers[number][:-8] for number in some}
        if what == "mix up":  # another's answer, or one from before
            return {number: self.answers[self.draw(st.sampled_from(sorted(self.answers)))] for number in some}
        return {number: self.answers[number] for number in some}


def server(folder, network):
    settings = FederationSettings(
        METHOD, WORLD.arch, None, CostLedger(FlopMeter(WORLD.arch)), lambda *note, client=None: None,
        num_clients=3, num_rounds=ROUNDS, transform=WORLD.dataset.transform, device=torch.device("cpu"), rng=Rng(0),
    )  # fmt: skip
    transport = PostTransport(network, "r", "{}", Patience(0, 1e9, 0, attempts=1000), folder)
    transport.fingerprint = "f"
    return RunFederation(settings, transport)


def killer(visit):
    """Kills the server at this visit of a place around a write of the journal."""

    def watch(place):
        nonlocal visit
        visit -= 1
        if not visit:
            raise Killed

    return watch


def tear(draw, folder):
    """The machine may have lost the end of what was written."""
    for path in folder.glob("uploads-*.bin"):
        if draw(st.booleans()):
            with open(path, "r+b") as file:
                file.truncate(draw(st.integers(0, path.stat().st_size)))


def in_journal(folder, round, tokens):
    journal = Journal(folder)
    journal.turn(0, round)
    return {token for token in tokens if journal.find(token) is not None}


def exchange_in_any_order(data):
    with tempfile.TemporaryDirectory() as spare:
        folder, network, found = Path(spare), Network(data.draw), {}
        kills = data.draw(st.lists(st.integers(1, 9), max_size=4))
        while len(found) < ROUNDS:
            federation, round = server(folder, network), len(found)
            checkpoint.watcher = killer(kills.pop()) if kills else None
            try:
                federation.move(WORLD.tasks[0], round, CLIENTS)
                found[round] = federation.ask(CLIENTS, "client_round", {"model": MODEL})
            except Killed:
                tear(data.draw, folder)
            finally:
                checkpoint.watcher = None
            network.safe = in_journal(folder, len(found), {request.token for request in network.letters.values()})
        for round, uploads in found.items():
            expected = {client: upload_of(client, round) for client in CLIENTS}
            assert pack_message(dict(uploads)).data == pack_message(expected).data


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_order_of_events_is_the_undisturbed_exchange(data):
    exchange_in_any_order(data)
