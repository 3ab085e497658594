"""The two Flower apps and the post over Flower's grid. They only translate; what is said stands in ``exchange``.

Only this module, ``flower_app`` and ``executor`` import Flower. The bundle that Flower sends to the nodes is a shim that
imports ``client`` and ``server`` from here: rescene itself is installed at each site.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from rescene.deploy.exchange import Letter, Patience, Undelivered

if TYPE_CHECKING:
    from rescene.deploy.site import Site

T = TypeVar("T")
RETRIES = 6  # Flower itself does not retry a plain HTTP 500, and a busy database gives one

client = ClientApp()
server = ServerApp()


@client.train()
def answer(message: Message, context: Context) -> Message:
    """Flower starts a new process for every message; everything a site remembers lies in its folder."""
    from rescene.deploy.site import Site  # not before there is work, and never what only the server needs

    return reply_from(Site.open(Path(str(context.node_config["folder"]))), message)


def reply_from(site: Site, message: Message) -> Message:
    """The site's answer to a letter that came in a message of Flower's. The site's log hears how far a look is."""
    from rescene.lens import looks_to
    from rescene.lens.look_progress import LookLog

    with looks_to(LookLog().take):
        reply = site.answer(Letter(_bytes(message, "head"), _bytes(message, "body")))
    return Message(_content(Letter(reply)), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's entry point at the server: run the federation over this grid."""
    from rescene.config import resolve
    from rescene.deploy.federation_folder import FederationFolder
    from rescene.deploy.processes import seats_of
    from rescene.deploy.server import Roster, run_across
    from rescene.engine import RunFolder, use_all_cores

    use_all_cores()
    config = context.run_config
    gather_s, deadline_s, poll_s = (float(config[key]) for key in ("gather-s", "deadline-s", "poll-s"))
    patience = Patience(gather_s, deadline_s, poll_s)
    post = FlowerPost(grid, ttl_s=patience.deadline_s)
    recipe = Path(str(config["recipe"]))
    # the run folder keeps the command, and Flower's own holds a token
    sys.argv = ["rescene", "deploy", "run", str(recipe.parents[2]), str(recipe)]
    plan = Path(str(config["plan"])) if config.get("plan") else None
    folder, elsewhere = RunFolder(Path(str(config["out"]))), bool(config.get("elsewhere"))
    federation = FederationFolder.open(recipe.parents[2])
    kept = federation.server
    roster = Roster(seats_of(federation), kept / "ledgers.json", kept / "peers.pub", federation.sites)
    run_across(resolve(recipe), folder, post, patience, roster, plan, elsewhere)


class FlowerPost:
    """Letters over Flower's grid, without its own waiting: that gives up silently."""

    def __init__(self, grid: Grid, ttl_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._grid, self._ttl_s, self._sleep = grid, ttl_s, sleep

    def nodes(self) -> Sequence[int]:
        """The ids of the connected nodes, in ascending order."""
        return self._patiently(lambda: sorted(self._grid.get_node_ids()))

    def push(self, letters: dict[int, Letter]) -> dict[str, int]:
        """A second try makes new messages: sites give the same answer twice, and the first one is never pulled."""

        def once() -> list[str]:
            made = [
                Message(_content(letter), dst_node_id=node, message_type=MessageType.TRAIN, ttl=self._ttl_s)
                for node, letter in letters.items()
            ]
            return list(self._grid.push_messages(made))

        return {number: node for number, node in zip(self._patiently(once), letters, strict=True) if number}

    def pull(self, ids: Sequence[str]) -> dict[str, bytes | Undelivered]:
        """The replies that have arrived to these messages, by the id of the message."""
        found = self._patiently(lambda: list(self._grid.pull_messages(ids)))
        return {message.metadata.reply_to_message_id: _reply(message) for message in found}

    def _patiently(self, call: Callable[[], T]) -> T:
        for wait in range(RETRIES):
            try:
                return call()
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise
                self._sleep(2.0**wait)
        return call()


def _content(letter: Letter) -> RecordDict:
    arrays = {
        name: Array(dtype="uint8", shape=(len(data),), stype="rescene.message", data=data)
        for name, data in letter._asdict().items()
    }
    return RecordDict({"letter": ArrayRecord(arrays)})


def _bytes(message: Message, name: str) -> bytes:
    # not by content.array_records: that is a cycle, and would hold every model and upload until Python looks for such
    return bytes(message.content["letter"][name].data)  # type: ignore[union-attr]


def _reply(message: Message) -> bytes | Undelivered:
    if message.has_error():
        return Undelivered(f"Flower's error {message.error.code}, {message.error.reason}")
    try:
        return _bytes(message, "head")
    except (KeyError, AttributeError, TypeError):
        return b""  # refused like any other message that is none
