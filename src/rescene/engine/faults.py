"""Sites that are lost or late, simulated (``federation.faults``); what is drawn depends on seed and place alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rescene.config.fault_section import FaultsSection
from rescene.core.rng import Rng

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
