"""Sites that are lost or slow, simulated (``federation.faults``), and sites that answer rounds later (``federation.delay``).

What is drawn depends on seed and place alone. With a delay, a site that is asked in round r sends its answer in round r + d, where
d is drawn from 0 to ``delay`` for each site and round. Until then it is busy and not asked again. Rounds are counted through the
run, so an answer may arrive in a later task. One that is more than ``staleness`` rounds late is dropped, and the site then stands
as if it had not been asked: it remembers nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rescene.config.site_sections import FaultsSection
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.engine.transport import Answer, Call
from rescene.methods import Method, Payload
from rescene.methods.base import LateAnswer

Counts = dict[str, float]  # asked, lost, late, held_again (rounds); time, in ordinary sites' answers


@dataclass(frozen=True)
class Faults:
    """Faults that a recipe asks for: sites that are lost, late, or fail."""

    section: FaultsSection
    rng: Rng

    def absent(
        self, clients: Sequence[int], place: tuple[int, int], attempt: int, counts: Counts, note: Callable[..., None]
    ) -> tuple[list[int], list[int]]:
        """Of the asked sites, those that are lost before they begin, and those whose answer comes after the deadline.

        A site that is lost stays so for the whole attempt at a round. Between rounds everybody is there.
        """
        if place[1] < 0 or not self.section.words:
            return [], []
        lost = [k for k in clients if self._lost(k, place, attempt)]
        times = {k: self.section.slowdown if k in self.section.slow else 1.0 for k in clients if k not in lost}
        deadline = self.section.deadline
        late = [k for k, time in times.items() if deadline is not None and time > deadline]
        for client in lost:
            note("error", "E370", f"site {client} was lost (simulated)", client=client)
        for client in late:
            note("error", "E371", f"site {client} answered after the deadline (simulated); left out", client=client)
        longest = deadline if late and deadline is not None else max(times.values(), default=0.0)
        found = {"asked": len(clients), "lost": len(lost), "late": len(late), "time": longest}
        counts.update({key: counts.get(key, 0) + value for key, value in found.items()})
        return lost, late

    def _lost(self, client: int, place: tuple[int, int], attempt: int) -> bool:
        return self.rng.at("dropout", *place, attempt, client).integer() < self.section.dropout * 2**63


CountsByName = dict[str, int]  # sent, on_time, late, rounds_late (of all late ones together), dropped


@record
class UnderWay:
    """An answer on its way to the server."""

    upload: Payload
    state: Tree  # what the site remembers once the answer is there
    sent: Payload  # the question
    verb: str
    classes: tuple[int, ...]  # of the task of the question
    asked: int  # round of the run, counted from 0
    due: int  # round in which it arrives


@dataclass
class LateAnswers:
    """Which answers are on time, which are under way and which are too old. ``under_way`` is part of a checkpoint."""

    method: Method
    delay: int
    staleness: int | None
    exponent: float
    rounds_per_task: int
    rng: Rng
    note: Callable[..., None]
    counts: Callable[[], CountsByName]
    under_way: dict[int, UnderWay] = field(default_factory=dict)

    def concerns(self, call: Call) -> bool:
        """Whether answers to this call may be late: a verb for which the method can take them, inside a round."""
        return self.delay > 0 and call.round >= 0 and call.verb in self.method.late_verbs

    def free(self, clients: Sequence[int]) -> list[int]:
        """The clients that have no answer under way."""
        return [client for client in clients if client not in self.under_way]

    def on_time(self, call: Call, answers: Mapping[int, Answer]) -> dict[int, Answer]:
        """The answers that are there in the round of their question; the others are under way from now on."""
        now, found = self._round(call), {}
        for client, (upload, state) in answers.items():
            place = self.rng.at("delay", call.task.index, call.round, client)
            late = place.integer() % (self.delay + 1)
            if late:
                question = (call.payload, call.verb, call.task.classes)
                self.under_way[client] = UnderWay(upload, state, *question, asked=now, due=now + late)
            else:
                found[client] = (upload, state)
        self._count("sent", len(answers))
        self._count("on_time", len(found))
        return found

    def arrived(self, call: Call) -> dict[int, Answer]:
        """Earlier answers to this verb that arrive now, as the method understands them; those that are too old are dropped."""
        now, found = self._round(call), {}
        for client, answer in sorted(self.under_way.items()):
            if answer.verb != call.verb or answer.due > now:
                continue
            del self.under_way[client]
            rounds = now - answer.asked
            told = f"the answer of site {client} is {rounds} {'round' if rounds == 1 else 'rounds'} late (simulated)"
            if self.staleness is not None and rounds > self.staleness:
                self._count("dropped", 1)
                self.note("warning", "W571", f"{told} and dropped", client=client)
                continue
            self._count("late", 1)
            self._count("rounds_late", rounds)
            self.note("warning", "W570", told, client=client)
            weight = float((1 + rounds) ** -self.exponent)
            late = LateAnswer(answer.upload, answer.sent, tuple(answer.classes), rounds, weight)
            found[client] = (self.method.late(late, call.payload), answer.state)
        return found

    def under_way_tree(self) -> dict[str, UnderWay]:
        """The answers under way as a checkpoint keeps them, by the number of the site."""
        return {str(client): answer for client, answer in sorted(self.under_way.items())}

    def _round(self, call: Call) -> int:
        return call.task.index * self.rounds_per_task + call.round

    def _count(self, what: str, more: int) -> None:
        counts = self.counts()
        counts[what] = counts.get(what, 0) + more
