"""The federation across sites: ``ask`` sends letters, waits, and reduces the answers in client order.

Everything around the answers (metering, quorum, what is finite, how pictures are decoded) is the in-process federation's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

import rescene
from rescene.data import Task
from rescene.deploy.letters import EVALUATE, HELLO, Letter, Patience, Post, Remembered, Reply, Request, Undelivered
from rescene.deploy.message import pack_message, unpack_message
from rescene.engine.evaluate import Evaluation, Tally, summed
from rescene.engine.federation import Answer, InProcess
from rescene.errors import RunError
from rescene.methods import Payload
from rescene.methods.base import Model
from rescene.record import check_tree, num_bytes, to_device
from rescene.rng import Rng

RESEND = "E341"  # the site no longer has parts that the letter only named
MOST_IMAGES = 1 << 40  # of one class at one site; sums stay far from overflowing


class GridFederation(InProcess):
    """Sites behind a post. A client's state here is the hash of what its site keeps."""

    def __init__(self, *args: Any, post: Post, run: str, recipe: str, patience: Patience, **options: Any) -> None:
        super().__init__(*args, **options)
        self._post, self._run, self._recipe, self._patience = post, run, recipe, patience
        self._nodes: dict[int, int] = {}  # client -> node
        self._refused: set[int] = set()
        self.waiting: Callable[[dict[str, Any]], None] = lambda facts: None  # told whenever somebody has answered
        self._told: dict[str, Any] = {}
        self._asked = ""  # when the letters of the exchange under way were sent
        self._heard: dict[int, str] = {}  # when each node last answered
        self.fingerprint = ""  # of the images that all sites split between them
        self._known: dict[tuple[int, str], frozenset[str]] = {}  # what a site keeps of the last message of a verb

    def _gather(self, clients: Sequence[int]) -> None:
        """Find out which node is which client. The first time we wait for all that are asked; later for nobody."""
        end = time.monotonic() + (0 if self._nodes else self._patience.gather_s)
        self._greet()
        while set(clients) - self._nodes.keys() and time.monotonic() < end:
            time.sleep(self._patience.poll_s)
            self._greet()

    def _greet(self) -> None:
        """Ask new nodes who they are; one with other images, or a number that is taken, is left out of this run."""
        strangers = [node for node in self._post.nodes() if node not in {*self._nodes.values(), *self._refused}]
        letters = {node: Letter(self._head(HELLO, None, ())) for node in strangers}
        for node, reply in sorted(self._exchange(letters).items()):
            problem = reply.problem or self._misfit(reply, node)
            if problem:
                self._refused.add(node)
                self.note("error", problem[0], f"site {reply.client} cannot take part: {problem[1]}")
                continue
            if reply.upload["torch"] != torch.__version__:
                self.note("warning", "W341", f"site {reply.client} has torch {reply.upload['torch']}: bits may differ")
            for code, words in reply.told:
                self.note("warning", code, f"site {reply.client}: {words}")

    def _misfit(self, reply: Reply, node: int) -> tuple[str, str] | None:
        if not isinstance(reply.upload, dict) or reply.upload.keys() != {"fingerprint", "torch"}:
            return "E340", "its answer is no greeting"
        if reply.client not in self.clients:
            return "E344", f"this run has sites {_numbers(self.clients)}; it left, or see `client` in its site.yaml"
        if reply.upload["fingerprint"] != self.fingerprint:
            return "E347", "it has other images than this run; see `data` in its site.yaml"
        if self._nodes.setdefault(reply.client, node) != node:
            return "E344", "another site has this number; see `client` in its site.yaml"
        return None

    def largest_state(self) -> int:
        return max((state.num_bytes for state in self.client_states.values() if state), default=0)

    def _sent(self, upload: Payload) -> Payload:
        return upload  # the site has coded its pictures

    def _received(self, message: Payload) -> Payload:
        return to_device(super()._received(message), self.device)  # type: ignore[no-any-return]

    def evaluate(self, model: Model, tasks: Sequence[Task]) -> Evaluation:
        """By the sites on their hold-outs. They tell counts per class, which are summed in client order."""
        payload: Payload = {"model": model}
        replies, tallies = self._replies(self.clients, EVALUATE, payload, self._rng), []
        for client in sorted(replies):
            reply = replies[client]
            try:
                if reply.problem:
                    raise RunError(*reply.problem)
                tallies.append(_checked_tally(reply, client, tasks[-1].num_seen))
                self.ledger.meter.add(reply.flops)
            except RunError as error:
                self.note("warning", error.code, f"site {client} is not in the evaluation: {error.what}", client=client)
        up, down = self.ledger.exchange(EVALUATE, payload, tallies, len(replies))
        self.traffic = [self.traffic[0] + up, self.traffic[1] + down]
        if len(tallies) < len(self.clients):
            self.note("info", "I341", f"evaluated by {len(tallies)} of {len(self.clients)} sites")
        return summed(tallies, tasks)

    def _replies(self, clients: Sequence[int], verb: str, payload: Payload, rng: Rng) -> dict[int, Reply]:
        """What those that are there answer; parts that a site no longer has are sent again."""
        self._gather(clients)
        there = [k for k in clients if k in self._nodes]
        replies = self._ask(there, verb, payload, rng, {k: self._known.get((k, verb), frozenset()) for k in there})
        again = [k for k, reply in replies.items() if reply.problem and reply.problem[0] == RESEND]
        if again:
            replies |= self._ask(again, verb, payload, rng, dict.fromkeys(again, frozenset()))
        return replies

    def _answers(self, clients: Sequence[int], verb: str, payload: Payload, rng: Rng) -> dict[int, Answer]:
        replies = self._replies(clients, verb, payload, rng)
        for absent in sorted(set(clients) - self._nodes.keys()):
            self.note("error", "E348", f"site {absent} is not there for {verb}", client=absent)
        answers = {}
        for client in sorted(replies):
            reply = replies[client]
            if reply.problem:
                code, words = reply.problem
                self.note("error", code, f"site {client} failed in {verb}: {words}", client=client)
                continue
            try:
                self._check(reply, client)
            except RunError as error:
                self.note("error", error.code, f"site {client} in {verb}: {error.what}; left out", client=client)
                continue
            for code, words in reply.told:
                self.note("warning", code, f"site {client} in {verb}: {words}", client=client)
            self.ledger.meter.add(reply.flops)
            answers[client] = (reply.upload, reply.state)
        return answers

    def _ask(
        self, clients: Sequence[int], verb: str, payload: Payload, rng: Rng, known: dict[int, frozenset[str]]
    ) -> dict[int, Reply]:
        bodies = {has: pack_message(payload, has) for has in set(known.values())}
        letters = {
            self._nodes[k]: Letter(self._head(verb, self.client_states.get(k), rng.path), bodies[known[k]].data)
            for k in clients
        }
        replies = self._exchange(letters, needed=self._quorum * len(letters))
        found = {k: replies[self._nodes[k]] for k in clients if self._nodes[k] in replies}
        for client in clients:
            if client not in found:
                self.note("error", "E349", f"site {client} did not answer {verb} in time", client=client)
            elif not found[client].problem:
                self._known[client, verb] = bodies[known[client]].large
        return found

    def _head(self, verb: str, state: Remembered | None, address: tuple[str | int, ...]) -> bytes:
        task, round = (0, -1) if verb == HELLO else (self.task.index, self.round)
        version, sha256 = rescene.__version__, state.sha256 if state else None
        return pack_message(Request(version, self._run, self._recipe, verb, task, round, address, sha256)).data

    def _exchange(self, letters: dict[int, Letter], needed: float = 0.0) -> dict[int, Reply]:
        """Replies by node. A letter that is lost, or long unanswered, is sent again; after the deadline it is given up.

        A site that restarts forgets the letter it had, and nobody is told. Sending again is harmless: sites keep their answer.
        For a site that went away we wait only as long as fewer than ``needed`` have answered.
        """
        patience, now = self._patience, time.monotonic()
        end, again_at = now + patience.deadline_s, now + patience.deadline_s / patience.attempts
        replies: dict[int, Reply] = {}
        tries, lost = dict.fromkeys(letters, 1), set[int]()
        waiting = self._post.push(letters) if letters else {}
        self._asked = datetime.now(UTC).isoformat(timespec="seconds")
        while (waiting or (lost and len(replies) < needed)) and time.monotonic() < end:
            self._tell(replies, lost | set(waiting.values()))
            lost |= self._take(replies, waiting)
            if time.monotonic() > again_at:
                lost |= set(waiting.values())
                again_at += patience.deadline_s / patience.attempts
            lost = {node for node in lost if node not in replies and tries[node] < patience.attempts}
            again = {node: letters[node] for node in sorted(lost & set(self._post.nodes() if lost else ()))}
            if again:
                waiting |= self._post.push(again)
                tries |= {node: tries[node] + 1 for node in again}
                lost -= again.keys()
            elif waiting or lost:
                time.sleep(patience.poll_s)
        self._tell(replies, set())
        return replies

    def _take(self, replies: dict[int, Reply], waiting: dict[str, int]) -> set[int]:
        """Move what has come from ``waiting`` to ``replies``, the first of each node; returns nodes whose letter was lost."""
        lost = set()
        for number, data in sorted(self._post.pull(list(waiting)).items()):
            node = waiting.pop(number, None)
            if node is None or node in replies:
                continue  # an answer we did not ask for, or one that came twice
            if isinstance(data, Undelivered):
                lost.add(node)
                self.note("warning", "W340", f"a letter to {self._name(node)} was lost: {data.why}")
                continue
            try:
                replies[node] = _reply(data)
                self._heard[node] = datetime.now(UTC).isoformat(timespec="seconds")
            except RunError as error:
                self.note("error", error.code, f"{self._name(node)}: {error.what}")
        for number in [number for number, node in waiting.items() if node in replies]:
            del waiting[number]
        return lost

    def _tell(self, replies: dict[int, Reply], waiting: set[int]) -> None:
        facts: dict[str, Any] = {"asked": self._asked}
        facts |= {"answered": sorted(map(self._name, replies)), "waiting_for": sorted(map(self._name, waiting))}
        facts["heard"] = {self._name(node): at for node, at in self._heard.items()}
        if facts != self._told:
            self._told = facts
            self.waiting(facts)

    def _require_quorum(self, answered: int, asked: int, verb: str) -> None:
        """As everywhere, with what an operator can do about it; the events before it name each site."""
        try:
            super()._require_quorum(answered, asked, verb)
        except RunError as error:
            fix = "rescene deploy status FOLDER shows who is away: start them (rescene deploy site FOLDER); the run goes on"
            raise RunError(error.code, error.what, where=error.where, why=error.why, fix=fix) from None

    def _name(self, node: int) -> str:
        return next((f"site {k}" for k, own in self._nodes.items() if own == node), f"node {node}")

    def _check(self, reply: Reply, client: int) -> None:
        """What a site says must fit: its number, a mapping, pictures of this size with labels seen so far."""
        upload = reply.upload
        if reply.client != client or not isinstance(upload, dict):
            raise RunError("E342", "the answer is not this site's, or holds no values")
        check_tree(upload, "upload")
        if "images" in upload:
            labels, images = upload.get("labels"), self._received(upload)["images"]
            side = self.arch.image_size
            if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.ndim != 1:
                raise RunError("E342", "its pictures came without a row of labels")
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.task.num_seen:
                raise RunError("E342", f"a label lies outside 0..{self.task.num_seen - 1}")
            if not isinstance(images, Tensor) or images.dtype != torch.float32:
                raise RunError("E342", "its pictures are not float32")
            if images.shape != (len(labels), 3, side, side):
                raise RunError("E342", f"its pictures are {list(images.shape)}")


def _numbers(clients: Sequence[int]) -> str:
    """
    >>> _numbers(range(3)), _numbers([0, 2])
    ('0 to 2', '0, 2')
    """
    return f"0 to {len(clients) - 1}" if isinstance(clients, range) else ", ".join(map(str, clients))


def _checked_tally(reply: Reply, client: int, num_classes: int) -> Tally:
    found = reply.upload.get("tally") if isinstance(reply.upload, dict) else None
    if reply.client != client or not isinstance(found, Tally):
        raise RunError("E342", "the answer is not this site's, or holds no counts")
    for part in (found.num, found.right, found.right_within):
        fits = isinstance(part, Tensor) and part.dtype == torch.int64 and part.shape == (num_classes,)
        if not fits or bool(((part < 0) | (part > found.num) | (part > MOST_IMAGES)).any()):
            raise RunError("E342", "its counts make no sense")
    return found


def _reply(data: bytes) -> Reply:
    reply = unpack_message(data).tree
    if not isinstance(reply, Reply) or not isinstance(reply.client, int) or not isinstance(reply.flops, int):
        raise RunError("E340", "the message is refused: it is no reply")
    told = reply.told
    pairs = isinstance(told, tuple) and all(isinstance(t, tuple) and [*map(type, t)] == [str, str] for t in told)
    if not pairs or num_bytes(told) > 10_000:
        raise RunError("E340", "the message is refused: what it tells is no list of codes and words")
    state = reply.state
    if state is not None and not (isinstance(state, Remembered) and num_bytes(state) < 1000):
        raise RunError("E340", "the message is refused: its memory is not named by a hash")
    return reply
