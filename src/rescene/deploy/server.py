"""The server's side of a run across sites: the engine's own loop, over a transport whose clients are behind a post.

A call becomes letters, and the answers come back in client order. An answer is opened (``answers``), written to the
journal, and only then used; a question whose answer is in the journal is not asked again. An answer that is refused is as
good as none, and the letter is sent again. Metering and quorum are the federation's (``engine.federation``).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rescene
from rescene.config import Resolved
from rescene.core.errors import RunError
from rescene.core.record import Tree, tensors
from rescene.deploy.answers import GREETING, Ends, Journal, Question, open_reply, tally_form
from rescene.deploy.exchange import (
    EVALUATE,
    HELLO,
    Letter,
    Patience,
    Post,
    Reply,
    Request,
    Undelivered,
    declines,
    in_a_line,
)
from rescene.deploy.message_bytes import Packed, pack_message
from rescene.deploy.plan_file import accuracy_warning, is_closed
from rescene.deploy.site_config import OWN, hash_of, other_lens
from rescene.engine import RunFolder
from rescene.engine import wire as on_wire
from rescene.engine.checkpoint import write_json
from rescene.engine.evaluate import Tally
from rescene.engine.loop import Run
from rescene.engine.run_parts import check_transport
from rescene.engine.transport import Answer, Call, FederationSettings, note_too_few
from rescene.methods import Payload
from rescene.methods.upload_schema import NOTHING, Form, either

DISK = "E410"  # ours, not a fault of the answer
RESEND = "E341"  # the site no longer has parts that the letter only named


@dataclass(frozen=True)
class Roster:
    """What the server knows of the sites before they say anything; without the folder of a federation it is nothing."""

    # node -> client, as far as keys tell; others say it themselves
    seats: Mapping[int, int] = field(default_factory=dict)
    ledgers: Path | None = None  # how far the sites' privacy ledgers go is kept there, for all runs of the federation
    peers: Path | None = None  # the list of the sites' public keys, for secure sums
    names: Sequence[str] = ()  # of the sites, in the order of their numbers, for events


def run_across(
    resolved: Resolved,
    folder: RunFolder,
    post: Post,
    patience: Patience = Patience(),
    roster: Roster = Roster(),
    plan: Path | None = None,
    elsewhere: bool = False,
    run: type[Run] = Run,
) -> dict[str, Any]:
    """Run, or continue, the experiment of this folder across the sites behind ``post``.

    ``plan`` is the federation's plan.yaml, in which an operator may close a task while it runs. Without a place of the
    roster's, the ends of the privacy ledgers are kept in the run folder.
    """
    folder.check(resolved)
    recipe, uploads = resolved.recipe, folder.path / "uploads"
    name = f"{recipe.method['name']}-s{recipe.seed}-{resolved.digest()}"
    roster = replace(roster, ledgers=roster.ledgers or uploads / "ledgers.json")
    transport = PostTransport(post, name, json.dumps(recipe.model_dump(mode="json")), patience, uploads, roster)
    transport.waiting = lambda facts: write_json(folder.path / "waiting.json", facts, sync="none")
    check_transport(resolved, transport)
    with folder:
        going = run(resolved, folder, transport=transport, elsewhere=elsewhere)
        going.context.names = tuple(roster.names)
        dataset = going.context.experiment.dataset
        transport.fingerprint = OWN if recipe.sites else dataset.pictures or dataset.fingerprint()
        if warning := accuracy_warning(recipe):
            going.context.note_later("warning", warning.code, warning.told)
        if plan is not None:
            going.closed = lambda task: is_closed(plan, task.index)
        results = going.complete()
        transport.journal.clear()
        return results


class PostTransport:
    """Sites behind a post. A client's state here is the hash of what its site keeps. ``uploads``: the journal's folder."""

    here = False
    advice = "rescene deploy status FOLDER shows who is away: start them (rescene deploy site FOLDER); the run goes on"

    def __init__(
        self, post: Post, run: str, recipe: str, patience: Patience, uploads: Path, roster: Roster = Roster()
    ) -> None:
        self._post, self._run, self._patience, self._uploads, self._roster = post, run, patience, uploads, roster
        self._nodes: dict[int, int] = {}  # client -> node
        self._refused: set[int] = set()
        self._away: set[int] = set()  # clients that cannot take part until mended and the run is started again
        self.waiting: Callable[[dict[str, Any]], None] = lambda facts: None  # told whenever somebody has answered
        self._told: dict[str, Any] = {}
        self._asked = self._until = ""  # when the exchange under way, or the wait for sites, began, and when it ends
        self._heard: dict[int, str] = {}  # when each node last answered
        self.fingerprint = ""  # of the images that all sites split between them
        self.lens = hash_of((json.loads(recipe).get("model") or {}).get("lens"))  # of the lens that all look through
        self._request = partial(Request, rescene.__version__, run, recipe, lens=self.lens)
        self._known: dict[tuple[int, str], frozenset[str]] = {}  # what a site keeps of the last message of a verb
        self._turned: tuple[int, int] | None = None  # the place whose journal is open

    def connect(self, settings: FederationSettings) -> None:
        self.settings, self.note, self.clients = settings, settings.note, settings.clients
        self.journal, self._ends = Journal(self._uploads), Ends(self._roster.ledgers)

    def carry(self, clients: Sequence[int], call: Call) -> dict[int, Answer]:
        """In a sum the sites answer with keys, and mask their numbers in ``open_sum``."""
        payloads = dict.fromkeys(clients, call.payload)
        if call.least is None:
            return self._answers(call, payloads, call.form())
        self._check_can_sum()
        from rescene.deploy.summing import KEYS_FORM

        return self._answers(call, payloads, either(NOTHING, KEYS_FORM), self._session(call))

    def open_sum(self, call: Call, parts: Mapping[int, Payload]) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """No part is ever here: the sites mask their numbers first (``summing``).

        What was answered and decided is in the journal, so a server that dies goes on with the same sum.
        """
        from rescene.deploy.keys import read_peers
        from rescene.deploy.summing import Sum
        from rescene.privacy.secure_sum import raw, verifier

        if not parts or self._roster.peers is None:
            return {}, ()
        session, least = self._session(call), call.least or 0

        def ask(step: str, payloads: Mapping[int, Payload], form: Form) -> dict[int, Payload]:
            found = self._answers(replace(call, verb=step), payloads, form, session)
            return {k: upload for k, (upload, _) in found.items()}

        verify = verifier(read_peers(self._roster.peers))
        one = Sum(session, least, verify, ask, self._decider(session), self.note)
        values, opened = one.hold({k: raw(upload["keys"]) for k, upload in parts.items()}, call.form())
        if not opened:
            note_too_few(self.note, call)
        return values, tuple(opened)

    def evaluate(self, clients: Sequence[int], call: Call) -> dict[int, Tally | None]:
        asked, form = replace(call, verb=EVALUATE), tally_form(call.task.num_seen)
        replies = self._replies(asked, dict.fromkeys(clients, call.payload), form)
        good = self._good(replies, "warning", "is not in the evaluation", "the evaluation")
        return {k: good[k].upload["tally"] if k in good else None for k in sorted(replies)}

    def state_bytes(self, state: Tree) -> int:
        return int(state.num_bytes)

    def _check_can_sum(self) -> None:
        mechanism = self.settings.mechanism
        if mechanism is None or mechanism.honest_sites is None:
            raise RunError(
                "E443", "sums across sites are secure only with privacy.honest_sites", fix="set it, or use ask"
            )
        if self._roster.peers is None:
            raise RunError("E440", "the server has no list of the sites' public keys", fix="start it again")

    def _session(self, call: Call) -> str:
        """The name of a secure sum, the same whenever it is asked for again."""
        return self.journal.token(self._run, call.task.index, call.round, call.verb, call.rng.path, "sum")

    def _gather(self, clients: Sequence[int]) -> None:
        """Find out which node is which client. The first time we wait for all that are asked and can come; later for nobody.

        We tell for whom we wait, and until when: ``gather_s`` and never longer than ``deadline_s``.
        """
        seconds = 0.0 if self._nodes else min(self._patience.gather_s, self._patience.deadline_s)
        asked, until, end = _now(), _now(seconds), time.monotonic() + seconds
        self._greet()
        while (absent := set(clients) - self._nodes.keys() - self._away) and time.monotonic() < end:
            self._asked, self._until = asked, until
            self._tell(self._nodes.values(), (), absent)
            time.sleep(self._patience.poll_s)
            self._greet()
        self._tell((), ())

    def _greet(self) -> None:
        """Ask new nodes who they are; one with other images, or a number that is taken, is left out of this run."""
        strangers = [node for node in self._post.nodes() if node not in {*self._nodes.values(), *self._refused}]
        asked = {node: Question(self.journal.token(self._run, HELLO, node), None, GREETING) for node in strangers}
        letters = {node: Letter(self.greeting(question.token)) for node, question in asked.items()}
        replies, refused = self._exchange(letters, asked)
        for node, error in sorted(refused.items()):
            self._refused.add(node)
            self.note("error", error.code, f"{self._name(node)} cannot take part: {error.what}")
        for node, reply in sorted(replies.items()):
            problem = reply.problem or self._misfit(reply, node)
            if problem:
                self._refused.add(node)
                self._away.add(self._roster.seats.get(node, reply.client))
                who = self._name(node) if self._roster.seats else f"site {reply.client}"  # its key knows better
                self.note("error", problem[0], f"{who} cannot take part: {problem[1]}")
                continue
            if reply.upload["torch"] != torch.__version__:
                self.note("warning", "W341", f"site {reply.client} has torch {reply.upload['torch']}: bits may differ")
            for code, words in reply.told:
                self.note("warning", code, f"site {reply.client}: {words}")

    def greeting(self, token: str) -> bytes:
        """The head of a letter that asks a site who it is."""
        return pack_message(self._request(HELLO, 0, -1, (), None, token)).data

    def _misfit(self, reply: Reply, node: int) -> tuple[str, str] | None:
        seat = self._roster.seats.get(node)
        if seat != reply.client and (seat is not None or reply.client in self._roster.seats.values()):
            return "E344", f"it calls itself site {reply.client}, whose key is another; see `client` in its site.yaml"
        if reply.client not in self.clients:
            return "E344", f"this run has sites {_numbers(self.clients)}; it left, or see `client` in its site.yaml"
        if reply.upload["fingerprint"] != self.fingerprint:
            return "E347", "it has other images than this run; see `data` in its site.yaml"
        if reply.upload["lens"] != self.lens:
            return "E221", other_lens(reply.upload["lens"], self.lens)
        if self._nodes.setdefault(reply.client, node) != node:
            return "E344", "another site has this number; see `client` in its site.yaml"
        return None

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

    def _replies(self, call: Call, payloads: Mapping[int, Payload], form: Form, session: str = "") -> dict[int, Reply]:
        """What those that are there answer; parts that a site no longer has are sent again."""
        self._gather(list(payloads))
        replies = self._ask(call, {k: payloads[k] for k in payloads if k in self._nodes}, form, session)
        again = [k for k, reply in replies.items() if reply.problem and reply.problem[0] == RESEND]
        for k in again:
            self._known.pop((k, call.verb), None)
        return replies | (self._ask(call, {k: payloads[k] for k in again}, form, session) if again else {})

    def _answers(self, call: Call, payloads: Mapping[int, Payload], form: Form, session: str = "") -> dict[int, Answer]:
        """Of a secure sum (``session``) this is one step, in which each client may have a payload of its own."""
        replies, verb = self._replies(call, payloads, form, session), call.verb
        for absent in sorted(set(payloads) - self._nodes.keys()):
            self.note("error", "E348", f"site {absent} is not there for {verb}", client=absent)
        good = self._good(replies, "error", f"failed in {verb}", verb)
        return {k: (reply.upload, reply.state) for k, reply in good.items()}

    def _good(self, replies: Mapping[int, Reply], level: str, failed: str, place: str) -> dict[int, Reply]:
        """Without those that name a problem, in client order. What sites tell is noted, and their work is metered."""
        good = {}
        for client, reply in sorted(replies.items()):
            if reply.problem:
                code, words = reply.problem
                self.note(level, code, f"site {client} {failed}: {words}", client=client)
                continue
            for code, words in reply.told:
                self.note("warning", code, f"site {client} in {place}: {words}", client=client)
            self.settings.ledger.meter.add(reply.flops)
            good[client] = reply
        return good

    def _ask(self, call: Call, payloads: Mapping[int, Payload], form: Form, session: str) -> dict[int, Reply]:
        bodies, verb, here = self._bodies(call.verb, payloads), call.verb, (call.task.index, call.round)
        letters, asked, found = dict[int, Letter](), dict[int, Question](), dict[int, Reply]()
        self._turn(here)
        for k, payload in payloads.items():
            state, body, num_tensors = call.states.get(k), bodies[k], sum(1 for _ in tensors(payload))
            memory = state.sha256 if state else None
            place = (self._run, *here, k, verb, call.rng.path, memory, body.sha256)
            question = Question(self.journal.token(*place), k, form, self._decoder(), num_tensors)
            kept = self.journal.find(question.token)
            if kept is not None:
                with contextlib.suppress(RunError):  # of other code, which wants something else: asked again
                    found[k] = open_reply(kept, question)
                    continue
            asked[self._nodes[k]] = question
            head = self._request(
                verb, *here, call.rng.path, memory, question.token, ledger=self._ends.of(k), session=session
            )
            letters[self._nodes[k]] = Letter(pack_message(head).data, body.data)
        needed = call.least if call.least is not None else self.settings.quorum * len(payloads)
        replies, refused = self._exchange(letters, asked, needed=needed - len(found))
        for client in [k for k in payloads if k not in found]:
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

    def _turn(self, place: tuple[int, int]) -> None:
        """Open the journal of this place, unless it is open."""
        if place != self._turned:
            self._turned = place
            self.journal.turn(*place)

    def _bodies(self, verb: str, payloads: Mapping[int, Payload]) -> dict[int, Packed]:
        """Payloads as bytes; one that goes to many is packed once for all who have the same parts of it."""
        made: dict[tuple[int, frozenset[str]], Packed] = {}
        bodies = {}
        for k, payload in payloads.items():
            known = self._known.get((k, verb), frozenset())
            if (id(payload), known) not in made:
                made[id(payload), known] = pack_message(payload, known)
            bodies[k] = made[id(payload), known]
        return bodies

    def _decoder(self) -> Callable[[Payload], Payload] | None:
        """Coded pictures are values only once they are decoded."""
        form, arch, device = self.settings.wire, self.settings.arch, self.settings.device
        picture = (arch.channels, arch.image_size, arch.image_size)
        return None if form == "float32" else lambda message: on_wire.received(message, form, picture, device)

    def _exchange(
        self, letters: dict[int, Letter], asked: dict[int, Question], needed: float = 0.0
    ) -> tuple[dict[int, Reply], dict[int, RunError]]:
        """Replies by node, and why there is none. A letter that is lost, long unanswered, or whose answer is refused, is
        sent again; after the deadline it is given up.

        A site that restarts forgets the letter it had, and nobody is told. Sending again is harmless: sites keep their answer.
        For a site that went away we wait only as long as fewer than ``needed`` have answered.
        """
        if not letters:
            return {}, {}
        patience, now = self._patience, time.monotonic()
        end, again_at = now + patience.deadline_s, now + patience.deadline_s / patience.attempts
        replies: dict[int, Reply] = {}
        refused: dict[int, RunError] = {}
        tries, lost = dict.fromkeys(letters, 1), set[int]()
        waiting = self._post.push(letters)
        self._asked, self._until = _now(), _now(patience.deadline_s)
        while (waiting or (lost and len(replies) < needed)) and time.monotonic() < end:
            late = lost | set(waiting.values())
            self._tell(replies, late, missing={node for node in late if node in lost or tries[node] > 1})
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
                if asked[node].client is not None and not reply.problem and not declines(reply):
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
            self._heard[node] = _now()
        for number in [number for number, node in waiting.items() if node in replies]:
            del waiting[number]
        return lost

    def _tell(
        self,
        answered: Iterable[int],
        waiting: Iterable[int],
        absent: Iterable[int] = (),
        missing: Iterable[int] = (),
    ) -> None:
        """Nodes that have answered, nodes we wait for, clients whose node is not there yet, and nodes that had to be asked again."""
        away = [f"site {client}" for client in absent]
        facts: dict[str, Any] = {"asked": self._asked, "until": self._until}
        facts |= {
            "answered": sorted(map(self._name, answered)),
            "waiting_for": sorted([*map(self._name, waiting), *away]),
        }
        facts["missing"] = sorted([*map(self._name, missing), *away])
        facts["heard"] = {self._name(node): at for node, at in self._heard.items()}
        if facts != self._told:
            self._told = facts
            self.waiting(facts)

    def _name(self, node: int) -> str:
        """The site that a node is, by its answer or its key; a node that is neither known by is called by its number."""
        client = next((k for k, own in self._nodes.items() if own == node), self._roster.seats.get(node))
        return f"node {node}" if client is None else f"site {client}"


def _numbers(clients: Sequence[int]) -> str:
    """
    >>> _numbers(range(3)), _numbers([0, 2])
    ('0 to 2', '0, 2')
    """
    return f"0 to {len(clients) - 1}" if isinstance(clients, range) else ", ".join(map(str, clients))


def _now(later_s: float = 0.0) -> str:
    """The time now, or so many seconds (at most 30 years) later."""
    return (datetime.now(UTC) + timedelta(seconds=min(later_s, 1e9))).isoformat(timespec="seconds")
