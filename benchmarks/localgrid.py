"""Flower's two apps in one process: a grid without sockets, and a federation's folders around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from rescene.config import Resolved
from rescene.deploy.federation_folder import init
from rescene.deploy.flower import client, server


class LocalGrid(Grid):
    """Calls the client app in the place of a node. It keeps a message only until it is answered, as the link does."""

    def __init__(self, sites: list[Path], watch: Callable[[list[Message]], None] = lambda messages: None) -> None:
        self.sites, self.watch = dict(enumerate(sites, start=10)), watch
        self.waiting, self.number = dict[str, Message](), 0
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    run = property(lambda self: None)
    create_message = send_and_receive = None

    def get_node_ids(self) -> Iterable[int]:
        return list(self.sites)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        made = list(messages)
        self.watch(made)
        for message in made:
            self.number += 1
            message.metadata.__dict__["_message_id"] = f"m{self.number}"
            self.waiting[message.metadata.message_id] = message
        return [message.metadata.message_id for message in made]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answered(self.waiting.pop(number)) for number in message_ids]

    def answered(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        return client(message, Context(1, node, {"folder": str(self.sites[node])}, RecordDict(), {}))


def site_folders(root: Path, count: int, data: Path) -> list[Path]:
    folders = [root / f"site-{k}" for k in range(count)]
    for k, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "site.yaml").write_text(yaml.safe_dump({"client": k, "device": "cpu", "data": {"path": str(data)}}))
    return folders


def serve(grid: Grid, resolved: Resolved, root: Path, out: Path, **more: Any) -> None:
    """The server app, with the words that `rescene deploy run` gives it."""
    recipe = root / "federation" / "server" / "recipes" / "recipe.yaml"
    if not recipe.parent.exists():
        init(root / "federation", ["somebody"])
        recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(resolved.recipe.model_dump(mode="json"), sort_keys=False))
    config = {"recipe": str(recipe), "out": str(out), "gather-s": 0.0, "deadline-s": 600.0, "poll-s": 0.0, **more}
    server(grid, Context(1, 0, {}, RecordDict(), config))
