"""The Flower apps, and the post over Flower's grid. They only translate; what is said stands in ``exchange``.

Only this module and ``executor`` import Flower. There are three apps:

    client         a site. A node that somebody runs names its folder (``--node-config 'folder="/srv/site"'``), whose site.yaml
                   says which images it holds; the server can change none of that. A node that Flower simulates has a
                   ``partition-id``: it is the site with that number in the recipe's split, and opens the recipe's images.
    server         for `rescene deploy run`. The bundle that Flower sends to the nodes is a shim that imports ``client`` and
                   ``server`` from here: rescene itself is installed at each site.
    recipe_server  for `flwr run` of an app like examples/flower-app: one recipe, across any nodes

Keys of a run with ``recipe_server`` (``[tool.flwr.app.config]``, or `flwr run . --run-config`):

    recipe      name or file of a recipe
    set         changes to it, as on the command line: "method=fedavg tasks.limit=2"
    sites       how many there are; 0: as many as nodes are connected
    out         the run folder; empty: ~/rescene-flower/<id of the run>
    gather-s, deadline-s, poll-s    how long the server waits for nodes and answers, and how often it looks
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from rescene.core.errors import ConfigError
from rescene.deploy.exchange import Letter, Patience, Undelivered

if TYPE_CHECKING:
    from rescene.config import Resolved
    from rescene.deploy.site import Site

T = TypeVar("T")
RETRIES = 6  # Flower itself does not retry a plain HTTP 500, and a busy database gives one

client = ClientApp()
server = ServerApp()
recipe_server = ServerApp()


@client.train()
def answer(message: Message, context: Context) -> Message:
    """Flower starts a new process for every message; everything a site remembers lies in its folder. Its log hears how far a look is."""
    from rescene.lens import looks_to
    from rescene.lens.look_progress import LookLog

    with looks_to(LookLog().take):
        reply = site_of(context).answer(Letter(_bytes(message, "head"), _bytes(message, "body")))
    return Message(_content(Letter(reply)), reply_to=message)


def site_of(context: Context) -> Site:
    """The site behind a node: the folder that it names, or its part of the recipe's split where Flower simulates it."""
    from rescene.deploy.site import Site  # not before there is work, and never what only the server needs
    from rescene.deploy.site_config import SiteData, SiteSection

    node = context.node_config
    if "folder" in node:
        return Site.open(Path(str(node["folder"])))
    if "partition-id" not in node:
        raise ConfigError(
            "E530",
            "this node does not say which site it is",
            why="Flower simulates a node with partition-id; any other names the folder of its site",
            fix="flower-supernode --node-config 'folder=\"/path/of/the/site\"'",
        )
    number, recipe = int(node["partition-id"]), recipe_of(context).recipe
    data = SiteData.model_validate(recipe.data.model_dump())
    section = SiteSection(client=number, data=data, device=recipe.device, lens=recipe.model.lens)
    return Site(run_folder(context).with_suffix(".sites") / f"site-{number}", section)


@server.main()
def run_federation(grid: Grid, context: Context) -> None:
    """Run what `rescene deploy run` submitted, across the sites of the federation in whose folder the recipe lies."""
    from rescene.config import resolve
    from rescene.deploy.federation_folder import FederationFolder
    from rescene.deploy.processes import seats_of
    from rescene.deploy.server import Roster, run_across
    from rescene.engine import RunFolder, use_all_cores

    use_all_cores()
    config, patience = context.run_config, _patience(context)
    recipe = Path(str(config["recipe"]))
    federation = FederationFolder.open(recipe.parents[2])
    # the run folder keeps the command, and Flower's own holds a token
    sys.argv = ["rescene", "deploy", "run", str(recipe.parents[2]), str(recipe)]
    folder, planned, elsewhere = RunFolder(Path(str(config["out"]))), config.get("plan"), bool(config.get("elsewhere"))
    kept = federation.server
    roster = Roster(seats_of(federation), kept / "ledgers.json", kept / "peers.pub", federation.sites)
    post = FlowerPost(grid, ttl_s=patience.deadline_s)
    run_across(resolve(recipe), folder, post, patience, roster, Path(str(planned)) if planned else None, elsewhere)


@recipe_server.main()
def run_recipe(grid: Grid, context: Context) -> None:
    """Run the recipe across the nodes of this grid, and tell the outcome to Flower's log."""
    from rescene.deploy.server import run_across
    from rescene.engine import RunFolder, use_all_cores

    use_all_cores()
    out, patience = run_folder(context), _patience(context)
    post = FlowerPost(grid, ttl_s=patience.deadline_s)
    resolved = recipe_of(context, int(context.run_config["sites"]) or _connected(post, patience))
    sys.argv = ["flwr", "run", "."]  # the run folder keeps the command, and Flower's own holds a token
    results = run_across(resolved, RunFolder(out), post, patience)
    logging.getLogger("flwr").info("%s: AA %.1f, AIA %.1f; %s", results["method"], results["aa"], results["aia"], out)


def recipe_of(context: Context, num_sites: int | None = None) -> Resolved:
    """The recipe of this run, with its changes and as many sites as there are."""
    from rescene.config import resolve

    name, changes = str(context.run_config["recipe"]), shlex.split(str(context.run_config["set"]))
    resolved = resolve(name, changes)
    if num_sites is None:
        return resolved
    most = min(num_sites, resolved.recipe.federation.per_round)
    return resolve(name, [*changes, f"federation.num_clients={num_sites}", f"federation.per_round={most}"])


def run_folder(context: Context) -> Path:
    """Where the run of a recipe is kept. Server and simulated sites find the same place."""
    named = str(context.run_config["out"])
    return Path(named).expanduser() if named else Path.home() / "rescene-flower" / str(context.run_id)


def _connected(post: FlowerPost, patience: Patience) -> int:
    """How many nodes there are, once there is one."""
    end = time.monotonic() + patience.gather_s
    while not (nodes := post.nodes()) and time.monotonic() < end:
        time.sleep(patience.poll_s)
    return max(1, len(nodes))


def _patience(context: Context) -> Patience:
    gather_s, deadline_s, poll_s = (float(context.run_config[key]) for key in ("gather-s", "deadline-s", "poll-s"))
    return Patience(gather_s, deadline_s, poll_s)


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
