"""Attacks through the front door: a server that lies in its requests and reads every field of the replies.

The site is a real one (``rescene.deploy.site``) in a temporary folder, with pictures made up for the purpose. Nothing is sent over a
network: what is attacked is what the site would send.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image

import rescene
from rescene.audit.rows import Found
from rescene.config import Recipe, resolve
from rescene.config.site_sections import SitesSection
from rescene.core.documents import parse_yaml
from rescene.deploy.exchange import EVALUATE, Letter, Reply, Request
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.plan_file import with_plan
from rescene.deploy.site import Site
from rescene.deploy.site_config import hash_of
from rescene.engine.experiment import prepare
from rescene.privacy.accounting import gaussian_epsilon

SIDE = 16
TASKS = (("ant", "bee"), ("cat", "dog"))
TARGETS = parse_yaml((files("rescene.audit") / "targets.yaml").read_text("utf-8"), "targets.yaml")
PLAIN, SUMS, MEMORIES = TARGETS["plain"], TARGETS["sums"], TARGETS["memories"]
WEIGHTS = PLAIN + TARGETS["private"]
EPSILON = ["privacy.epsilon=8"]
STRANGER = "zoster"  # a class of the site that is none of the federation's, and nobody's business


@dataclass(frozen=True)
class Server:
    """What the server knows: the recipe, its network, and one site that it can write to."""

    site: Site
    recipe: str
    model: dict[str, Any]
    whole: dict[str, Any]  # the same with its whole head

    def ask(self, verb: str, **changes: Any) -> Reply:
        """The reply to one letter, with these fields of the request changed."""
        model = self.whole if verb == EVALUATE else self.model
        token = str(abs(hash((verb, *sorted(map(str, changes.items()))))))
        request = Request(rescene.__version__, "run", self.recipe, verb, 0, 0, ("client", 0, 0, verb, 0), None, token)
        request = replace(request, lens=hash_of(json.loads(self.recipe)["model"]["lens"]))
        letter = Letter(pack_message(replace(request, **changes)).data, pack_message({"model": model}).data)
        with contextlib.redirect_stderr(io.StringIO()):  # the site's own log
            found: Reply = unpack_message(self.site.answer(letter)).tree
        return found


@contextlib.contextmanager
def server(settings: list[str], counts: dict[str, int], floor: dict[str, Any] | None = None) -> Iterator[Server]:
    """A server with one site that holds so many pictures of each class."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for number, (name, count) in enumerate(counts.items()):
            (root / "images" / name).mkdir(parents=True)
            for i in range(count):
                noise = torch.randint(256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(1000 * number + i))
                Image.fromarray(noise.to(torch.uint8).numpy()).save(root / "images" / name / f"{i}.png")
        section = {
            "client": 0,
            "device": "cpu",
            "holds": "own",
            "data": {"path": str(root / "images")},
            "hold_out": 0.3,
        }
        (root / "site.yaml").write_text(
            yaml.safe_dump(section | ({"privacy": floor} if floor else {})), encoding="utf-8"
        )
        tasks = [{"classes": list(names), "rounds": 2} for names in TASKS]
        plan = SitesSection.model_validate({"image_size": SIDE, "rounds": 2, "tasks": tasks})
        resolved = with_plan(
            resolve("smoke", [*settings, "device=cpu", "federation.per_round=1"]), plan, 1, root / "run"
        )
        experiment = prepare(resolved.recipe)
        state = experiment.method.init(experiment.initial_net(), experiment.rng)
        head = {key: state.model[key][:1] for key in ("head.weight", "head.bias")} if SUMS[0] in settings else {}
        recipe = json.dumps(resolved.recipe.model_dump(mode="json"))
        yield Server(Site.open(root), recipe, dict(state.model) | head, dict(state.model))


def even(count: int) -> dict[str, int]:
    """The same number of images for every class of the test world."""
    return {name: count for names in TASKS for name in names}


def replies() -> Found:
    """Everything beside the upload, from a site with 40 images of each class and from one with an image more."""
    pairs = {
        "release": (SUMS + EPSILON, "sum_up"),
        "dp-sgd": (WEIGHTS + EPSILON, "client_round"),
        "none": (PLAIN, "client_round"),
    }
    differ = {name: _differing(*pair) for name, pair in pairs.items()}
    found = sorted({*differ["release"], *differ["dp-sgd"]})
    control = ", ".join(differ["none"])
    return Found(
        len(found), 0, bool(differ["none"]), "fields differ", f"without a mechanism: {control}", ", ".join(found)
    )


def _differing(settings: list[str], verb: str) -> list[str]:
    seen = []
    for more in (0, 1):
        with server(settings, even(40) | {"ant": 40 + 2 * more}) as one:  # of two more at least one is not held out
            seen.append(_beside(one.ask(verb)))
    return sorted(key for key in seen[0] if seen[0][key] != seen[1][key])


def _beside(reply: Reply) -> dict[str, Any]:
    """A reply without its upload; of that the shapes and whatever is no tensor. The ledger's end is a hash of noise."""
    state = None if reply.state is None else reply.state.num_bytes
    plain = {"flops": reply.flops, "bytes of memory": state, "problem": reply.problem, "told": reply.told}
    upload = reply.upload or {}
    return plain | {f"upload.{key}": _shape(value) for key, value in upload.items()}


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    return {key: _shape(part) for key, part in value.items()} if isinstance(value, dict) else value


def remembered() -> Found:
    """Is the hash of what a site remembers the same at two sites with the same images? Then it names them."""
    same = {}
    for name, settings, verb in (
        ("release", SUMS + EPSILON, "sum_up"),
        ("none", PLAIN + MEMORIES[0]["settings"][:1], MEMORIES[0]["verb"]),
    ):
        hashes = []
        for _ in range(2):
            with server(settings, even(10)) as one:
                reply = one.ask(verb)
                hashes.append(reply.state.sha256 if reply.state else None)
        same[name] = hashes[0] == hashes[1] and hashes[0] is not None
    return Found(
        int(same["release"]), 0, same["none"], "hashes repeat", "a memory without a mechanism: the hash repeats"
    )


ASKED = 5  # times


def memories() -> Found:
    """The verbs that fill a site's memory, asked five times in a row: how often is an image in it at most?

    Each time the server says what the site remembers, and calls it another round. An image that is there five times would weigh five
    times what is accounted for. The control asks a memory that does not know which tasks it holds.
    """
    most, forgetful = 0, 0
    for target in MEMORIES:
        with server([*WEIGHTS, *EPSILON, *target["settings"]], even(12)) as one:
            most = max(most, _copies(one, target["verb"], forgets=False))
        with server([*WEIGHTS, *EPSILON, *target["settings"]], even(12)) as other:
            forgetful = max(forgetful, _copies(other, target["verb"], forgets=True))
    words = f"a memory that forgets its tasks holds an image {forgetful} times"
    return Found(most, 1, forgetful == ASKED, "times", words)


def _copies(one: Server, verb: str, forgets: bool) -> int:
    """How often the most frequent image is in the memory after five questions."""
    handle = None
    for k in range(ASKED):
        reply = one.ask(verb, token=f"m{k}", round=k % 2, state=handle)
        assert reply.state is not None, reply.problem
        handle = reply.state.sha256
        path = next(one.site.folder.glob(f"state/*/client-0/memory-{handle[:32]}.bin"))
        memory = unpack_message(path.read_bytes()).tree
        if forgets:
            path.write_bytes(pack_message(replace(memory, last_task=-1)).data)
    return int(memory.pixels.flatten(1).unique(dim=0, return_counts=True)[1].max())


LIES: tuple[dict[str, Any], ...] = (
    {},
    {"token": "again"},
    {"task": 1},
    {"task": -1},
    {"task": -2},
    {"task": 2},
    {"task": 10**6},
    {"round": -1},
    {"round": 1},
    {"round": -7},
    {"round": 10**6},
    {"run": "other"},
    {"run": "third"},
    {"run": "run", "address": ("client", 9, 9)},
    {"state": "0" * 64},
    {"version": "0.0.0"},
)


def requests() -> Found:
    """Every field of a request with a lie in it. How often does the site release the same images with fresh noise?

    To Python -2 and -1 are the first and the second of two tasks. A recipe with hardly any noise counts with its own epsilon.
    """
    with server(SUMS + EPSILON, even(12)) as one:
        sigma, weak = _sigma(one), replace(one, recipe=_with_epsilon(one.recipe, 1e4))
        seen: dict[int, list[torch.Tensor | None]] = {0: [], 1: []}
        for lie in LIES:
            task = lie.get("task", 0)
            seen[task % 2 if task in (-2, -1, 0, 1) else 0].append(_upload(one.ask("sum_up", **lie)))
        weakened = [_upload(weak.ask("sum_up", token=run, run=run)) for run in ("run", "fourth")]
    with server(SUMS + EPSILON, even(12)) as other:
        control = _distinct([*seen[0][:1], _upload(other.ask("sum_up"))])
    num = max(1, *map(_distinct, seen.values()))
    fresh = _distinct([*seen[0], *weakened]) > _distinct(seen[0])
    promised = gaussian_epsilon(sigma, 1, 1e-5)
    found = max(gaussian_epsilon(sigma, num, 1e-5), 1e4 if fresh else 0.0)
    notes = [f"{num} different releases of the same images"] * (num > 1) + [
        "a recipe with epsilon 10,000 is served"
    ] * fresh
    words = "a second site with the same images gives a second release"
    return Found(found, promised, control == 2, "epsilon", words, "; ".join(notes))


def _with_epsilon(recipe: str, epsilon: float) -> str:
    given = json.loads(recipe)
    given["privacy"] |= {"epsilon": epsilon}
    return json.dumps(given)


def _sigma(one: Server) -> float:
    promise = Recipe.model_validate(json.loads(one.recipe)).promise(len(TASKS))
    assert promise is not None
    return promise.mechanism.sigma


def _upload(reply: Reply) -> torch.Tensor | None:
    upload = reply.upload if isinstance(reply.upload, dict) else {}
    found = upload.get("second")
    return found if isinstance(found, torch.Tensor) else None


def _distinct(seen: list[torch.Tensor | None]) -> int:
    found: list[torch.Tensor] = []
    for one in seen:
        if one is not None and not any(torch.equal(one, other) for other in found):
            found.append(one)
    return len(found)


VERBS = (
    "init",
    "server_round",
    "expects",
    "forget",
    "_solved",
    "__init__",
    "model_dump",
    "no_such_verb",
    "",
    "../sum_up",
    "\x1b[2J",
)


def verbs() -> Found:
    """Names of things that are no client verb: does the site call any of them?"""
    with server(SUMS + EPSILON, even(6)) as one:
        called = [name for name in VERBS if one.ask(name, token="t" + name.encode().hex()).problem is None]
        control = one.ask("sum_up").problem is None
    return Found(len(called), 0, control, "of 11 are called", "sum_up is answered", ", ".join(called))


def evaluation() -> Found:
    """Under a mechanism exact counts of the hold-out, for any weights, would be an oracle that nobody accounts for."""
    exact = {}
    for name, settings in (("release", SUMS + EPSILON), ("none", PLAIN)):
        with server(settings, even(12)) as one:
            exact[name] = [one.ask(EVALUATE, token=f"e{k}", round=k).problem is None for k in (0, 1)]
    return Found(
        sum(exact["release"]), 0, all(exact["none"]), "of 2 are answered", "without a mechanism both are answered"
    )


def errors() -> Found:
    """A site without any class of the federation: does its refusal name what it has, or tell one image from none?"""
    words = {}
    for name, settings in (("release", SUMS + EPSILON), ("none", PLAIN)):
        verb = "sum_up" if name == "release" else "client_round"
        said = []
        for count in (1, 3):
            with server(settings, {STRANGER: count}) as one:
                said += [repr((r.problem, r.told)) for r in (one.ask("hello"), one.ask(verb))]
        words[name] = sum(STRANGER in text for text in said)
    return Found(words["release"], 0, words["none"] > 0, "of 4 name it", f"without a mechanism {words['none']} of 4 do")
