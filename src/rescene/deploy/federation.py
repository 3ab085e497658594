"""The federation across sites: ``ask`` sends letters, waits, and reduces the answers in client order.

An answer is opened (``contract``), written to the journal, and only then used; a question whose answer is in the journal is
not asked again. An answer that is refused is as good as none, and the letter is sent again. Everything around the answers
(metering, quorum, how pictures are decoded) is the in-process federation's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

import rescene
from rescene.data import Task
from rescene.deploy.contract import GREETING, Question, open_reply, tally_form
from rescene.deploy.journal import Ends, Journal
from rescene.deploy.letters import (
    EVALUATE,
    HELLO,
    Letter,
    Patience,
    Post,
    Remembered,
    Reply,
    Request,
    Undelivered,
    in_a_line,
)
from rescene.deploy.message import pack_message
from rescene.engine.evaluate import Evaluation, summed
from rescene.engine.federation import Answer, InProcess
from rescene.errors import RunError
from rescene.methods import Payload
from rescene.methods.base import Model
from rescene.methods.forms import Form, Place
from rescene.privacy.ledger import End
from rescene.record import tensors, to_device
from rescene.rng import Rng

DISK = "E410"  # ours, not a fault of the answer
RESEND = "E341"  # the site no longer has parts that the letter only named


class GridFederation(InProcess):
    """Sites behind a post. A client's state here is the hash of what its site keeps.

    ``seats`` says which node is which client, as far as their keys tell; the others say it themselves.
    """

    def __init__(
        self,
        *args: Any,
        post: Post,
        run: str,
        recipe: str,
        patience: Patience,
        journal: Journal,
        seats: Mapping[int, int] | None = None,
        ends: Ends | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.ledger.sites_tell = self.mechanism is None or not self.mechanism.formal
        self._post, self._run, self._recipe, self._patience = post, run, recipe, patience
        self.journal, self._seats, self._ends = journal, dict(seats or {}), ends or Ends(None)
        self._nodes: dict[int, int] = {}  # client -> node
        self._refused: set[int] = set()
        self._away: set[int] = set()  # clients that cannot take part until mended and the run is started again
        self.waiting: Callable[[dict[str, Any]], None] = lambda facts: None  # told whenever somebody has answered
        self._told: dict[str, Any] = {}
        self._asked = ""  # when the letters of the exchange under way were sent
        self._heard: dict[int, str] = {}  # when each node last answered
        self.fingerprint = ""  # of the images that all sites split between them
        self._known: dict[tuple[int, str], frozenset[str]] = {}  # what a site keeps of the last message of a verb

    def move(self, task: Task, round: int | None, participants: Sequence[int] | None = None) -> None:
        super().move(task, round, participants)
        self.journal.turn(task.index, self.round)

    def _gather(self, clients: Sequence[int]) -> None:
        """Find out which node is which client. The first time we wait for all that are asked and can come; later for nobody."""
        end = time.monotonic() + (0 if self._nodes else self._patience.gather_s)
        self._greet()
        while set(clients) - self._nodes.keys() - self._away and time.monotonic() < end:
            time.sleep(self._patience.poll_s)
            self._greet()

    def _greet(self) -> None:
        """Ask new nodes who they are; one with other images, or a number that is taken, is left out of this run."""
        strangers = [node for node in self._post.nodes() if node not in {*self._nodes.values(), *self._refused}]
        asked = {node: Question(self.journal.token(self._run, HELLO, node), None, GREETING) for node in strangers}
        letters = {node: Letter(self._head(HELLO, None, (), question.token)) for node, question in asked.items()}
        replies, refused = self._exchange(letters, asked)
        for node, error in sorted(refused.items()):
            self._refused.add(node)
            self.note("error", error.code, f"{self._name(node)} cannot take part: {error.what}")
        for node, reply in sorted(replies.items()):
            problem = reply.problem or self._misfit(reply, node)
            if problem:
                self._refused.add(node)
                self._away.add(self._seats.get(node, reply.client))
                self.note("error", problem[0], f"site {reply.client} cannot take part: {problem[1]}")
                continue
            if reply.upload["torch"] != torch.__version__:
                self.note("warning", "W341", f"site {reply.client} has torch {reply.upload['torch']}: bits may differ")
            for code, words in reply.told:
                self.note("warning", code, f"site {reply.client}: {words}")

    def _misfit(self, reply: Reply, node: int) -> tuple[str, str] | None:
        seat = self._seats.get(node)
        if seat != reply.client and (seat is not None or reply.client in self._seats.values()):
            return "E344", "its key is another site's; see `client` in its site.yaml"
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
                tallies.append(reply.upload["tally"])
                self.ledger.meter.add(reply.flops)
                for code, words in reply.told:
                    self.note("warning", code, f"site {client} in the evaluation: {words}", client=client)
            except RunError as error:
                self.note("warning", error.code, f"site {client} is not in the evaluation: {error.what}", client=client)
        up, down = self.ledger.exchange(payload, tallies, len(replies), turns=None)
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
            for code, words in reply.told:
                self.note("warning", code, f"site {client} in {verb}: {words}", client=client)
            self.ledger.meter.add(reply.flops)
            answers[client] = (reply.upload, reply.state)
        return answers

    def _ask(
        self, clients: Sequence[int], verb: str, payload: Payload, rng: Rng, known: dict[int, frozenset[str]]
    ) -> dict[int, Reply]:
        bodies = {has: pack_message(payload, has) for has in set(known.values())}
        form, letters, asked = self._form_of(verb, payload), dict[int, Letter](), dict[int, Question]()
        found: dict[int, Reply] = {}
        num_tensors = sum(1 for _ in tensors(payload))
        for k in clients:
            state, body = self.client_states.get(k), bodies[known[k]]
            place = (self._run, self.task.index, self.round, k, verb, rng.path, state and state.sha256, body.sha256)
            question = Question(self.journal.token(*place), k, form, self._decoder(), num_tensors)
            kept = self.journal.find(question.token)
            if kept is not None:
                with contextlib.suppress(RunError):  # of other code, which wants something else: asked again
                    found[k] = open_reply(kept, question)
                    continue
            asked[self._nodes[k]] = question
            head = self._head(verb, state, rng.path, question.token, self._ends.of(k))
            letters[self._nodes[k]] = Letter(head, body.data)
        replies, refused = self._exchange(letters, asked, needed=self._quorum * len(clients) - len(found))
        for client in [k for k in clients if k not in found]:
            node = self._nodes[client]
            if node in replies:
                found[client] = replies[node]
                if not found[client].problem:
                    self._known[client, verb] = bodies[known[client]].large
            elif node in refused:
                error = refused[node]
                self.note("error", error.code, f"site {client} in {verb}: {error.what}; left out", client=client)
            else:
                self.note("error", "E349", f"site {client} did not answer {verb} in time", client=client)
        for client, reply in found.items():
            if reply.ledger is not None:
                self._ends.note(client, reply.ledger)
        return found

    def _form_of(self, verb: str, payload: Payload) -> Form:
        if verb == EVALUATE:
            return tally_form(self.task.num_seen)
        place = Place(self.task, self.arch.image_size, self._wire != "float32", self.mechanism, self.arch.channels)
        return self.method.expects(verb, payload, place)

    def _decoder(self) -> Callable[[Payload], Payload] | None:
        """Coded pictures are values only once they are decoded."""
        return None if self._wire == "float32" else super()._received

    def _head(
        self,
        verb: str,
        state: Remembered | None,
        address: tuple[str | int, ...],
        token: str,
        ledger: End | None = None,
    ) -> bytes:
        task, round = (0, -1) if verb == HELLO else (self.task.index, self.round)
        version, sha256 = rescene.__version__, state.sha256 if state else None
        request = Request(version, self._run, self._recipe, verb, task, round, address, sha256, token, ledger)
        return pack_message(request).data

    def _exchange(
        self, letters: dict[int, Letter], asked: dict[int, Question], needed: float = 0.0
    ) -> tuple[dict[int, Reply], dict[int, RunError]]:
        """Replies by node, and why there is none. A letter that is lost, long unanswered, or whose answer is refused, is
        sent again; after the deadline it is given up.

        A site that restarts forgets the letter it had, and nobody is told. Sending again is harmless: sites keep their answer.
        For a site that went away we wait only as long as fewer than ``needed`` have answered.
        """
        patience, now = self._patience, time.monotonic()
        end, again_at = now + patience.deadline_s, now + patience.deadline_s / patience.attempts
        replies: dict[int, Reply] = {}
        refused: dict[int, RunError] = {}
        tries, lost = dict.fromkeys(letters, 1), set[int]()
        waiting = self._post.push(letters) if letters else {}
        self._asked = datetime.now(UTC).isoformat(timespec="seconds")
        while (waiting or (lost and len(replies) < needed)) and time.monotonic() < end:
            self._tell(replies, lost | set(waiting.values()))
            lost |= self._take(replies, refused, waiting, asked)
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
        return replies, {node: error for node, error in refused.items() if node not in replies}

    def _take(
        self,
        replies: dict[int, Reply],
        refused: dict[int, RunError],
        waiting: dict[str, int],
        asked: dict[int, Question],
    ) -> set[int]:
        """Move what has come from ``waiting`` to ``replies``, the first of each node; returns nodes whose letter was lost."""
        lost = set()
        for number, data in sorted(self._post.pull(list(waiting)).items()):
            node = waiting.pop(number, None)
            if node is None:
                continue  # an answer we did not ask for
            if isinstance(data, Undelivered):
                lost.add(node)
                self.note("warning", "W340", f"a letter to {self._name(node)} was lost: {in_a_line(data.why)}")
                continue
            try:
                reply = open_reply(data, asked[node])
                if asked[node].client is not None and not reply.problem:
                    self.journal.accept(asked[node].token, data)
            except RunError as error:
                if error.code == DISK:
                    raise
                if node in replies:
                    self.note("warning", error.code, f"{self._name(node)}: {error.what}")
                refused[node] = error
                lost.add(node)
                continue
            replies.setdefault(node, reply)
            self._heard[node] = datetime.now(UTC).isoformat(timespec="seconds")
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


def _numbers(clients: Sequence[int]) -> str:
    """
    >>> _numbers(range(3)), _numbers([0, 2])
    ('0 to 2', '0, 2')
    """
    return f"0 to {len(clients) - 1}" if isinstance(clients, range) else ", ".join(map(str, clients))
