"""The largest states so far, and the work so far in the row of each task. Bytes and work are counted by the ledger itself."""

from __future__ import annotations

from rescene.engine.federation import RunFederation
from rescene.engine.observers import Observer, RunView
from rescene.nets import state_bytes


class CostWatch(Observer):
    """The last of the engine's own observers, because others may work too."""

    def __init__(self, federation: RunFederation) -> None:
        self.federation, self.ledger = federation, federation.ledger

    def end_round(self, run: RunView) -> None:
        self.ledger.states(run.state, self.federation.largest_state(), state_bytes(run.state.model))

    def end_task(self, run: RunView) -> None:
        run.row.update(self.ledger.work())
