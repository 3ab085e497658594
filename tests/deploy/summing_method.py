"""A method for tests of secure sums: each site's noised count per class is added up, and the sum becomes the head's bias.

As a program it is one letter to one site: ``python summing_method.py FOLDER LETTER ANSWER``. Flower, too, starts a process for
every letter. ``answer_all`` is a site that stays.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from rescene.deploy.site import Site
from rescene.engine import checkpoint
from rescene.methods.base import Method, ModelState
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, either, fields, tensor

GRID = 2**18


@register
class SumOfCounts(Method):
    name: ClassVar[str] = "sum-of-counts"
    title: ClassVar[str] = "Sum of counts"
    paper: ClassVar[str] = "for tests"
    leaves_site: ClassVar[str] = "a noised count per class"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "release")
    sums_securely: ClassVar[bool] = True

    def broadcast(self, state, round, federation, rng):
        return {}

    def client_round(self, payload, shard, client_state, rng):
        return {}, client_state

    def server_round(self, state, uploads, round, federation, rng):
        total = federation.total(federation.clients, "sum_up", {"round": round})
        notes = {f"site_{k}": 1.0 for k in total.clients}
        if not total.clients:
            return replace(state, notes=notes)
        bias = (total.values["counts"].double() / GRID).to(state.model["head.bias"])
        low = total.values["low"].double().sum().to(bias)  # every bit counts
        model = state.model | {
            "head.bias": state.model["head.bias"].index_add(0, torch.tensor(federation.task.classes), bias)
        }
        return ModelState(model=model | {"head.weight": model["head.weight"] + low * 1e-9}, notes=notes)

    def sum_up(self, payload, shard, client_state, rng):
        counts = torch.tensor([int((shard.labels == c).sum()) for c in shard.task.classes])
        site = shard.site

        def draw():
            noise = site.noise.normal(len(counts)) * site.mechanism.deviation * GRID
            noised = counts * GRID + noise.round().long()
            return {"low": (noised % 1000).int(), "counts": noised}  # not in the order of their names

        found = site.answer(f"counts {shard.task.index}", draw)
        return ({} if found is None else found), {"told": 1}

    def expects(self, verb, payload, place):
        if verb != "sum_up":
            return NOTHING
        num = len(place.task.classes)
        return either(NOTHING, fields({"low": tensor(torch.int32, num), "counts": tensor(torch.int64, num)}))


def answer_all(folder, line):
    """A site that stays: (letter, where to die or None) comes over the line, the answer goes back."""
    site = Site.open(Path(folder))
    while True:
        try:
            letter, place = line.recv()
        except EOFError:
            return
        checkpoint.watcher = checkpoint.killer(place) if place else None
        line.send_bytes(site.answer(letter))


def main(folder, letter, answer):
    found = Site.open(Path(folder)).answer(pickle.loads(Path(letter).read_bytes()))  # noqa: S301 - of this test
    Path(answer).write_bytes(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
