"""The federation across sites: ``ask`` sends letters, waits, and reduces the answers in client order.

An answer is opened (``contract``), written to the journal, and only then used; a question whose answer is in the journal is
not asked again. An answer that is refused is as good as none, and the letter is sent again. Everything around the answers
(metering, quorum, how pictures are decoded) is the in-process federation's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import rescene
from rescene.data import Task
from rescene.deploy.contract import GREETING, Question, open_reply, tally_form
from rescene.deploy.holding import hash_of, other_lens
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
from rescene.deploy.message import Packed, pack_message
from rescene.engine.evaluate import Evaluation, summed
from rescene.engine.federation import Answer, InProcess
from rescene.errors import RunError
from rescene.methods import Payload
from rescene.methods.base import Model
from rescene.methods.forms import NOTHING, Form, either
from rescene.privacy.ledger import End
from rescene.privacy.totals import Total
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
        peers: Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.ledger.sites_tell = self.mechanism is None or not self.mechanism.formal
        self._post, self._run, self._recipe, self._patience = post, run, recipe, patience
        self.journal, self._seats, self._ends = journal, dict(seats or {}), ends or Ends(None)
        self._peers = peers  # the list of the sites' public keys
        self._nodes: dict[int, int] = {}  # client -> node
        self._refused: set[int] = set()
        self._away: set[int] = set()  # clients that cannot take part until mended and the run is started again
        self.waiting: Callable[[dict[str, Any]], None] = lambda facts: None  # told whenever somebody has answered
        self._told: dict[str, Any] = {}
        self._asked = ""  # when the letters of the exchange under way were sent
        self._heard: dict[int, str] = {}  # when each node last answered
        self.fingerprint = ""  # of the images that all sites split between them
        self.lens = hash_of((json.loads(recipe).get("model") or {}).get("lens"))  # of the lens that all look through
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
        if reply.upload["lens"] != self.lens:
            return "E221", other_lens(reply.upload["lens"], self.lens)
        if self._nodes.setdefault(reply.client, node) != node:
            return "E344", "another site has this number; see `client` in its site.yaml"
        return None

    def largest_state(self) -> int:
        return max((state.num_bytes for state in self.client_states.values() if state), default=0)

    def _sent(self, upload: Payload) -> Payload:
        return upload  # the site has coded its pictures

    def _received(self, message: Payload) -> Payload:
        return to_device(super()._received(message), self.device)  # type: ignore[no-any-return]

    def total(self, clients: Sequence[int], verb: str, payload: Payload) -> Total:
        """As in one process, but no part is ever here: the sites mask their numbers first (``summing``).

        What was answered and decided is in the journal, so a server that dies goes on with the same sum.
        """
        from rescene.deploy.keys import read_peers
        from rescene.deploy.summing import KEYS_FORM, Sum
        from rescene.privacy.secure_sum import raw, verifier

        if self.mechanism is None or self.mechanism.honest_sites is None:
            raise RunError(
                "E443", "sums across sites are secure only with privacy.honest_sites", fix="set it, or use ask"
            )
        if self._peers is None:
            raise RunError("E440", "the server has no list of the sites' public keys", fix="start it again")
        rng, verify, clients = self._begin(verb, payload), verifier(read_peers(self._peers)), sorted(clients)
        session = self.journal.token(self._run, self.task.index, self.round, verb, rng.path, "sum")
        away = {k for absent in self.absent(clients) for k in absent}

        def ask(step: str, payloads: Mapping[int, Payload], form: Form) -> dict[int, Payload]:
            found = self._answers(list(payloads), step, payloads, rng, form, session)
            return {k: upload for k, (upload, _) in found.items()}

        with self.ledger.meter.on("client"), self.phase():
            there = [k for k in clients if k not in away]
            first = self._answers(there, verb, dict.fromkeys(there, payload), rng, either(NOTHING, KEYS_FORM), session)
            self._require_quorum(len(first), len(clients), verb)
            keys = {k: raw(upload["keys"]) for k, (upload, _) in first.items() if upload}
            one = Sum(session, self._least, verify, ask, self._decider(session), self.note)
            values, opened = one.hold(keys, self._form_of(verb, payload)) if keys else ({}, [])
        if keys and not opened:
            self._note_too_few(verb)
        self._remember({k: answer for k, answer in first.items() if not answer[0] or k in opened})
        messages = {k: values if k in keys else {} for k in first}
        self._meter(clients, payload, messages, len(keys))
        return self._checked(Total(to_device(values, self.device), tuple(opened)), verb, payload)

    def _decider(self, session: str) -> Callable[[str, Sequence[int]], list[int]]:
        """Who goes on after a step is decided once, also by a server that dies and comes back."""

        def decide(step: str, clients: Sequence[int]) -> list[int]:
            token = self.journal.token(session, step, "decided")
            kept = self.journal.find(token)
            if kept is None:
                kept = json.dumps(list(clients)).encode()
                self.journal.accept(token, kept)
            return list(json.loads(kept))

        return decide

    def evaluate(self, model: Model, tasks: Sequence[Task]) -> Evaluation:
        """By the sites on their hold-outs. They tell counts per class, which are summed in client order."""
        payload: Payload = {"model": model}
        form, to_all = tally_form(self.task.num_seen), dict.fromkeys(self.clients, payload)
        replies, tallies = self._replies(self.clients, EVALUATE, to_all, self._rng, form), []
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

    def _replies(
        self,
        clients: Sequence[int],
        verb: str,
        payloads: Mapping[int, Payload],
        rng: Rng,
        form: Form,
        session: str = "",
    ) -> dict[int, Reply]:
        """What those that are there answer; parts that a site no longer has are sent again."""
        self._gather(clients)
        there = [k for k in clients if k in self._nodes]
        known = {k: self._known.get((k, verb), frozenset()) for k in there}
        replies = self._ask(there, verb, payloads, rng, form, known, session)
        again = [k for k, reply in replies.items() if reply.problem and reply.problem[0] == RESEND]
        if again:
            replies |= self._ask(again, verb, payloads, rng, form, dict.fromkeys(again, frozenset()), session)
        return replies

    def _answers(
        self,
        clients: Sequence[int],
        verb: str,
        payload: Payload | Mapping[int, Payload],
        rng: Rng,
        form: Form | None = None,
        session: str = "",
    ) -> dict[int, Answer]:
        """As in one process. In a secure sum (``session``) each client has a payload of its own."""
        payloads = payload if session else dict.fromkeys(clients, payload)
        replies = self._replies(clients, verb, payloads, rng, form or self._form_of(verb, payload), session)
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
        self,
        clients: Sequence[int],
        verb: str,
        payloads: Mapping[int, Payload],
        rng: Rng,
        form: Form,
        known: dict[int, frozenset[str]],
        session: str,
    ) -> dict[int, Reply]:
        bodies = self._bodies(clients, payloads, known)
        letters, asked = dict[int, Letter](), dict[int, Question]()
        found: dict[int, Reply] = {}
        for k in clients:
            state, body, num_tensors = self.client_states.get(k), bodies[k], sum(1 for _ in tensors(payloads[k]))
            place = (self._run, self.task.index, self.round, k, verb, rng.path, state and state.sha256, body.sha256)
            question = Question(self.journal.token(*place), k, form, self._decoder(), num_tensors)
            kept = self.journal.find(question.token)
            if kept is not None:
                with contextlib.suppress(RunError):  # of other code, which wants something else: asked again
                    found[k] = open_reply(kept, question)
                    continue
            asked[self._nodes[k]] = question
            head = self._head(verb, state, rng.path, question.token, self._ends.of(k), session)
            letters[self._nodes[k]] = Letter(head, body.data)
        needed = self._least if session else self._quorum * len(clients)
        replies, refused = self._exchange(letters, asked, needed=needed - len(found))
        for client in [k for k in clients if k not in found]:
            node = self._nodes[client]
            if node in replies:
                found[client] = replies[node]
                if not found[client].problem:
                    self._known[client, verb] = bodies[client].large
            elif node in refused:
                error = refused[node]
                self.note("error", error.code, f"site {client} in {verb}: {error.what}; left out", client=client)
            else:
                self.note("error", "E349", f"site {client} did not answer {verb} in time", client=client)
        for client, reply in found.items():
            if reply.ledger is not None:
                self._ends.note(client, reply.ledger)
        return found

    def _bodies(
        self, clients: Sequence[int], payloads: Mapping[int, Payload], known: dict[int, frozenset[str]]
    ) -> dict[int, Packed]:
        """Payloads as bytes; one that goes to many is packed once for all who have the same parts of it."""
        made: dict[tuple[int, frozenset[str]], Packed] = {}
        for k in clients:
            key = (id(payloads[k]), known[k])
            if key not in made:
                made[key] = pack_message(payloads[k], known[k])
        return {k: made[id(payloads[k]), known[k]] for k in clients}

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
        session: str = "",
    ) -> bytes:
        task, round = (0, -1) if verb == HELLO else (self.task.index, self.round)
        version, sha256 = rescene.__version__, state.sha256 if state else None
        request = Request(
            version, self._run, self._recipe, verb, task, round, address, sha256, token, ledger, self.lens, session
        )
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
