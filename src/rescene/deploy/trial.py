"""Trying before it counts: one round at a site that goes nowhere, and a whole federation on one machine.

In a trial round the site answers a server in its own process, and sees what would leave before it does. Letters, work and
answers are those of a real round; only the post ends here. Memory and ledger lie in a folder that is removed, so nothing
is spent. What a lens saw of the images stays in the site's folder, for its runs.

A rehearsal has real processes, TLS and node keys; nothing is left behind but its folder.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rescene.config import Resolved
from rescene.core.errors import DECLINED, DataError, RunError
from rescene.deploy.exchange import HELLO, Letter, Patience, Undelivered
from rescene.deploy.federation_folder import init, require_flower
from rescene.deploy.message_bytes import unpack_message
from rescene.deploy.operator import run, watch_sites
from rescene.deploy.processes import free_port, start_server, start_site, stop
from rescene.deploy.server import PostTransport
from rescene.deploy.site import Site
from rescene.deploy.site_config import experiment_of, lens_of, own_images
from rescene.engine import RunFolder
from rescene.engine.loop import Run
from rescene.lens import BUILT_IN, absolute
from rescene.privacy import NEAR_COPY_DB, nearest_real, psnr

SHOWN = 10
HERE = 0  # the one node of this post


@dataclass(frozen=True)
class Answered:
    """One answer of the site: which verb, how long it took, how many bytes it is on the wire."""

    verb: str
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Trial:
    """What one round of this recipe would take from this site. Pictures are uint8 [n, 3, H, W], side by side."""

    recipe: str
    method: str
    leaves_site: str
    answers: list[Answered]
    without_images: str  # what stands in place of near-copies where no images are sent
    drawn: bool  # the images are what the server would make of the upload, which holds none
    num_images: int  # uploaded, or drawn; 0: there are none
    near_copies: float  # share of them
    pairs: list[dict[str, Any]]
    surrogates: Tensor
    nearest: Tensor

    @property
    def seconds(self) -> float:
        """Seconds of work at the site."""
        return sum(one.seconds for one in self.answers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all answers."""
        return sum(one.num_bytes for one in self.answers)


class NoPost:
    """Letters are answered on the spot, by this site; there is nobody else."""

    def __init__(self, site: Site) -> None:
        self.site, self.log = site, list[Answered]()
        self._answers: dict[str, bytes] = {}

    def nodes(self) -> Sequence[int]:
        """The one site of the trial."""
        return [HERE]

    def push(self, letters: dict[int, Letter]) -> dict[str, int]:
        """Hand the message to the site at once, and keep its answer."""
        sent = {}
        for node, letter in letters.items():
            begin = time.perf_counter()
            answer = self.site.answer(letter)
            verb = unpack_message(letter.head).tree.verb
            if verb != HELLO:
                self.log.append(Answered(verb, time.perf_counter() - begin, len(answer)))
            number = str(len(self._answers))
            self._answers[number], sent[number] = answer, node
        return sent

    def pull(self, ids: Sequence[str]) -> dict[str, bytes | Undelivered]:
        """The answers to these messages."""
        return {number: self._answers[number] for number in ids}


def try_round(site: Site, resolved: Resolved) -> Trial:
    """The first round in which this site has images, as the recipe says; nothing is sent and nothing remembered."""
    with tempfile.TemporaryDirectory(prefix="rescene-") as spare:
        notes: list[str] = []
        post = NoPost(replace(site, folder=Path(spare) / "site", real_folder=site.folder))
        with RunFolder(Path(spare) / "run") as folder:
            run, transport = _run(_at_site(site, resolved), post, folder, notes)
            try:
                found = _round(run, transport, post, resolved.name)
            except RunError as error:
                raise RunError(error.code, error.what, why="\n".join(notes) or error.why) from error
            if declined := [note for note in notes if note.startswith(DECLINED)]:
                fix = "a floor (privacy: in site.yaml) that allows the recipe, or a recipe with more noise"
                raise RunError("E376", "a run would go on without this site", why="\n".join(declined), fix=fix)
            return found


def _at_site(site: Site, resolved: Resolved) -> Resolved:
    """The recipe with this site's images and device, and room for its number."""
    recipe, client = resolved.recipe, site.section.client
    federation = recipe.federation.model_copy(
        update={"num_clients": max(recipe.federation.num_clients, client + 1), "engine": "one-by-one"}
    )
    model = recipe.model.model_copy(update={"lens": lens_of(site.section, recipe.model.lens)})
    if model.lens is None and recipe.model.lens is not None:
        fix = "lens: FILE in site.yaml, the file that the operator gives out"
        raise DataError("E222", "the run looks through a lens file, and this site has none", fix=fix)
    own = {"data": site.section.data, "device": site.section.device, "federation": federation, "model": model}
    if site.section.holds == "own":
        plan = own_images(site.section)[1]
        task = plan.tasks[0].model_copy(update={"rounds": recipe.federation.num_rounds})
        own["sites"] = plan.model_copy(update={"tasks": (task,)})
    return replace(resolved, recipe=recipe.model_copy(update=own))


def _run(resolved: Resolved, post: NoPost, folder: RunFolder, notes: list[str]) -> tuple[Run, PostTransport]:
    """The server's side of a run, with this site and nobody else behind its post."""

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "event" and event["level"] != "info":
            notes.append(f"{event['code']} {event['message']}")

    recipe = json.dumps(resolved.recipe.model_dump(mode="json"))
    transport = PostTransport(post, "trial", recipe, Patience(gather_s=0, poll_s=0), folder.path / "uploads")
    return Run(resolved, folder, hear, transport), transport


def _round(run: Run, transport: PostTransport, post: NoPost, recipe: str) -> Trial:
    """begin_task, broadcast and ask of the loop, with one site. The server learns nothing, except from a method whose sites
    send nothing until the server asks for sums in its own part of the round."""
    e, federation, client = run.context.experiment, run.federation, post.site.section.client
    head = transport.greeting("trial")
    hello = unpack_message(post.site.answer(Letter(head))).tree
    if hello.problem:
        raise RunError(*hello.problem)
    transport.fingerprint = hello.upload["fingerprint"]  # one machine, so the same images
    here = experiment_of(post.site.section, post.site.recipe_of(unpack_message(head).tree), post.site.features)
    task = next((task for task in here.tasks if len(here.shards[task.index][client])), None)
    if task is None:
        raise DataError("E218", f"site {client} has no image in any task of {recipe}", fix="other images, or --recipe")
    federation.clients, rng = [client], e.rng.at("server", task.index)
    state = e.method.init(e.initial_net(), e.rng.at("init"))
    federation.move(e.tasks[task.index], None)
    state = e.method.begin_task(state, e.tasks[task.index], federation, rng.at("begin"))
    federation.move(e.tasks[task.index], 0, [client])
    payload = e.method.broadcast(state, 0, federation, rng.at(0).at("broadcast"))
    upload = federation.ask([client], "client_round", payload)[client]
    if not upload and (federation.mechanism is None or federation.mechanism.honest_sites is None):
        e.method.server_round(state, {client: upload}, 0, federation, rng.at(0).at("round"))
    real = here.dataset.train.pixels[here.shards[task.index][client]]
    drawn = federation.mechanism is not None and federation.mechanism.sends_sums
    beside = _beside(upload, real, here.dataset.transform, here.dataset.classes)
    leaving, none = e.method.leaving(federation.mechanism), e.method.style().without_images("no images are sent")
    return Trial(recipe, e.method.title, leaving, post.log, none, drawn, **beside)


def _beside(upload: dict[str, Any], real: Tensor, transform: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Ten of the uploaded pictures, from all classes in turn, with the site's own images nearest to them."""
    images, labels = upload.get("images"), upload.get("labels")
    if images is None or labels is None or not len(images):
        none = torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
        return {"num_images": 0, "near_copies": 0.0, "pairs": [], "surrogates": none, "nearest": none}
    rms, where = nearest_real(images, real, transform)
    decibel = psnr(images, transform.normalise(real[where]), transform)
    own = [(labels == label).nonzero().squeeze(1).tolist() for label in labels.unique().tolist()]
    turns = [members[turn] for turn in range(max(map(len, own))) for members in own if turn < len(members)]
    chosen = turns[:SHOWN]
    return {
        "num_images": len(images),
        "near_copies": float((decibel > NEAR_COPY_DB).float().mean()),
        "pairs": [{"class": classes[int(labels[i])], "rms": float(rms[i]), "psnr": float(decibel[i])} for i in chosen],
        "surrogates": transform.to_pixels(images[chosen]).cpu(),
        "nearest": real[where[chosen]].cpu(),
    }


def rehearse(
    resolved: Resolved,
    folder: Path | None,
    out: Path,
    tell: Callable[[str], None] = print,
    patience: Patience = Patience(gather_s=300, deadline_s=600),
) -> dict[str, Any]:
    """Set up one site per client of the recipe, run it, stop everything; returns the run's results."""
    require_flower()
    with tempfile.TemporaryDirectory(prefix="rescene-") as spare:
        names = [f"site-{k}" for k in range(resolved.recipe.federation.num_clients)]
        federation = init(folder or Path(spare) / "rehearsal", names, port=free_port())
        lens = resolved.recipe.model.lens
        if lens is not None and lens not in BUILT_IN:  # as an operator would give it out
            for name in names:
                with open(federation.site(name) / "site.yaml", "a") as file:
                    file.write(yaml.safe_dump({"lens": absolute(lens)}))
        tell(f"keys and certificates for the server and {', '.join(names)}")
        try:
            start_server(federation)
            tell(f"server at https://{federation.host}:{federation.port}")
            for name in names:
                start_site(federation.site(name))
            tell(f"{len(names)} sites started")
            results = run(federation, resolved, out, patience, tell)
            watch_sites(federation, out)
            return results
        finally:
            for place in (*map(federation.site, names), federation.server):
                stop(place)
            tell("all processes stopped")
