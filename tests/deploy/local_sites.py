"""A post without sockets, sites in this process, and runs whose models are hashed after each step."""

import hashlib
import json
from dataclasses import replace

import yaml

from rescene.config import resolve
from rescene.deploy.exchange import Patience, Undelivered
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.server import PostTransport, run_across
from rescene.deploy.site import Site
from rescene.engine import RunFolder
from rescene.engine.loop import Run

PATIENT = Patience(gather_s=0, deadline_s=600, poll_s=0, attempts=2)
TINY = [
    "federation.num_clients=3",
    "federation.per_round=2",
    "federation.engine=one-by-one",
    "model.width=8",
    "device=cpu",
]


class LocalPost:
    """Sites in this process. Answers come back last first; ``lose`` and ``change`` say what happens on the way."""

    def __init__(self, folders, lose=lambda number: False, change=lambda node, data: data):
        self.sites = {1000 - k: Site.open(folder) for k, folder in enumerate(folders)}
        self.lose, self.change, self.sent, self.letters = lose, change, {}, []

    def nodes(self):
        return list(self.sites)

    def push(self, letters):
        ids = {}
        for node, letter in letters.items():
            number = len(self.letters)
            self.letters.append(letter)
            ids[str(number)] = node
            self.sent[str(number)] = (node, letter, self.lose(number))
        return ids

    def pull(self, ids):
        found = {}
        for number in sorted(ids, reverse=True):
            node, letter, lost = self.sent[number]
            if lost != "late":
                answer = self.change(node, self.sites[node].answer(letter))
                found[number] = Undelivered("the node went away") if lost else answer
        return found


def sites(root, count=3, **more):
    for k in range(count):
        folder = root / f"site-{k}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "site.yaml").write_text(yaml.safe_dump({"client": k, "device": "cpu"} | more))
    return [root / f"site-{k}" for k in range(count)]


class Hashed(Run):
    """A run that writes down the hash of its model after each step."""

    def commit(self, number):
        sha256 = hashlib.sha256()
        for name, value in self.parts.state.model.items():
            sha256.update(name.encode() + value.numpy().tobytes())
        with open(self.folder.path.with_suffix(".hashes"), "a") as file:
            file.write(f"{number} {sha256.hexdigest()}\n")
        super().commit(number)


def hashes(folder):
    return folder.with_suffix(".hashes").read_text()


def across(resolved, folder, post, patience=PATIENT):
    return run_across(resolved, RunFolder(folder), post, patience, run=Hashed)


def in_process(resolved, folder):
    with RunFolder(folder) as place:
        return Hashed(resolved, place, lambda event: None).complete()


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def without_starts(results):
    """Start images never leave a site, so only a simulation can compare surrogates with them."""
    keep = lambda part: {key: value for key, value in part.items() if "start" not in key and "unmoved" not in key}  # noqa: E731
    leakage = results["leakage"]
    if leakage:
        leakage = keep(leakage) | {"per_task": [keep(task) for task in leakage["per_task"]]}
    return results | {"leakage": leakage}


def federation(tmp_path, post, patience=PATIENT, overrides=()):
    """A federation at the beginning of its first round, and the events it writes."""
    resolved = resolve("smoke", [*TINY, "method=fedavg", *overrides])
    noted, recipe = [], json.dumps(resolved.recipe.model_dump(mode="json"))
    transport = PostTransport(post, "r", recipe, patience, tmp_path / "run" / "uploads")
    with RunFolder(tmp_path / "run") as folder:  # locked no longer than this: some tests let the process die here
        run = Run(resolved, folder, lambda event: None, transport)
    made, e = run.federation, run.context.experiment
    made.note = transport.note = lambda level, code, message, client=None: noted.append((code, message))
    transport.fingerprint = e.dataset.fingerprint()
    made.move(e.tasks[0], 0, [0, 1, 2])
    return made, {"model": e.method.init(e.initial_net(), e.rng).model}, noted


def changed(data, **parts):
    return pack_message(replace(unpack_message(data).tree, **parts)).data
