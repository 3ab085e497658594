"""The two apps for `flwr run`: one recipe, and nodes that Flower simulates or that people run. Nothing changes between the two.

A node that Flower simulates has a ``partition-id``. It is the site with that number in the recipe's split, and opens the
recipe's images. A node that somebody runs names the folder of its site (``--node-config 'folder="/srv/site"'``), whose
site.yaml says which images it holds; the server can change none of that.

Keys of a run (``[tool.flwr.app.config]``, or `flwr run . --run-config`):

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
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from rescene.core.errors import ConfigError
from rescene.deploy.exchange import Patience
from rescene.deploy.flower import FlowerPost, reply_from

if TYPE_CHECKING:
    from rescene.config import Resolved
    from rescene.deploy.site import Site

client = ClientApp()
server = ServerApp()


@client.train()
def answer(message: Message, context: Context) -> Message:
    """The answer of the site that this node is."""
    return reply_from(site_of(context), message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the recipe across the nodes of this grid, and tell the outcome to Flower's log."""
    from rescene.deploy.server import run_across
    from rescene.engine import RunFolder, use_all_cores

    use_all_cores()
    config, out = context.run_config, run_folder(context)
    gather_s, deadline_s, poll_s = (float(config[key]) for key in ("gather-s", "deadline-s", "poll-s"))
    patience = Patience(gather_s, deadline_s, poll_s)
    post = FlowerPost(grid, ttl_s=patience.deadline_s)
    resolved = recipe_of(context, int(config["sites"]) or _connected(post, patience))
    sys.argv = ["flwr", "run", "."]  # the run folder keeps the command, and Flower's own holds a token
    results = run_across(resolved, RunFolder(out), post, patience)
    logging.getLogger("flwr").info("%s: AA %.1f, AIA %.1f; %s", results["method"], results["aa"], results["aia"], out)


def site_of(context: Context) -> Site:
    """The site behind a node: the folder that it names, or its part of the recipe's split where Flower simulates it."""
    from rescene.deploy.site import Site  # not before there is work
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
    """Where the run is kept. Server and simulated sites find the same place."""
    named = str(context.run_config["out"])
    return Path(named).expanduser() if named else Path.home() / "rescene-flower" / str(context.run_id)


def _connected(post: FlowerPost, patience: Patience) -> int:
    """How many nodes there are, once there is one."""
    end = time.monotonic() + patience.gather_s
    while not (nodes := post.nodes()) and time.monotonic() < end:
        time.sleep(patience.poll_s)
    return max(1, len(nodes))
