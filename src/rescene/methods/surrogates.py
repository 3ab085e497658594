"""What every method that uploads surrogates shares: the broadcast of model and noise seed, and the client's condensation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rescene.data import Shard
from rescene.methods.base import Federation, Method, Payload, Uploads
from rescene.methods.forms import Form, Place, fields, notes, pictures, sums
from rescene.privacy.mechanism import Mechanism
from rescene.record import Tree
from rescene.rng import Rng
from rescene.steps import Condensation, condense
from rescene.steps.release import centre_of, condense_released, released, sums_received, sums_size, sums_upload


def gathered(uploads: Uploads) -> tuple[Tensor, Tensor] | None:
    """All pictures of a round and their labels, in client order; None if nobody sent any."""
    senders = [upload for upload in uploads.values() if len(upload["labels"])]
    if not senders:
        return None
    return torch.cat([u["images"] for u in senders]), torch.cat([u["labels"] for u in senders])


class SurrogateMethod(Condensation, Method):
    """Not a method of its own: the client side of Eq. 1, one client at a time or all of them in one pass.

    Where sites send noised sums (``privacy.send=sums``) the server condenses in their place, before anything else is done.
    """

    leaves_site: ClassVar[str] = (
        "a few condensed images per class with their labels; near-copies of real images by default "
        "(noised sums instead: privacy.mechanism=release privacy.send=sums)"
    )

    mechanisms: ClassVar[tuple[str, ...]] = ("none", "release", "per-example", "paper-experiment")

    @classmethod
    def leaving(cls, mechanism: Mechanism | None) -> str:
        if _sends_sums(mechanism):
            return "one noised sum of embeddings or picture moments per class, count included; no image"
        if mechanism is not None and mechanism.kind == "release":
            return "a few images per class with their labels, computed from one noised sum per class"
        return cls.leaves_site

    def broadcast(self, state: Any, round: int, federation: Federation, rng: Rng) -> Payload:
        """The model, and the seed of the perturbation noise that all clients of the round share."""
        seed = rng.at("noise").integer()
        payload = {"model": state.model, "noise_seed": seed}
        if self.start == "coloured" and _sends_sums(federation.mechanism):
            del payload["model"]  # moments of pictures are the same under every model
        return payload | self._centre(state, federation, seed)

    def _centre(self, state: Any, federation: Federation, seed: int) -> Payload:
        """What the server knows of the classes from earlier releases, in the terms of this round's; at first nothing."""
        kept = [part for part in (*getattr(state, "pool", ()), *getattr(state, "buffers", ())) if len(part.labels)]
        mechanism = federation.mechanism if kept and self.start in ("noise", "coloured") else None
        if mechanism is None or not mechanism.centred:
            return {}
        images, labels = (torch.cat([getattr(part, name) for part in kept]) for name in ("images", "labels"))
        net = None if self.start == "coloured" else federation.net(state.model)
        return {"centre": centre_of(net, images, labels, federation.task.classes, self, seed, mechanism)}

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if place.mechanism is not None and place.mechanism.sends_sums:
            head = payload["model"]["head.weight"].shape if "model" in payload else None
            return sums(
                place, place.mechanism, sums_size(self, place.mechanism, head, place.channels), payload.get("centre")
            )
        return fields(pictures(place, self.ipc) | {"notes": notes})

    def client_round(self, payload: Payload, shard: Shard, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        return self.client_round_batched(payload, [shard], [client_state], [rng])[0]

    def client_round_batched(
        self, payload: Payload, shards: Sequence[Shard], client_states: Sequence[Tree], rngs: Sequence[Rng]
    ) -> list[tuple[Payload, Tree]]:
        site, seed = shards[0].site, payload["noise_seed"]
        if site is not None and site.mechanism.sends_sums:
            net = shards[0].net(payload["model"]) if "model" in payload else None
            found = zip(shards, released(net, shards, self, seed, payload.get("centre")), strict=True)
            uploads = [sums_upload(own, shard.task.classes, site.mechanism) for shard, own in found]
        else:
            made = condense(shards[0].net(payload["model"]), shards, rngs, self, seed)
            uploads = [surrogates.as_upload() for surrogates in made]
        return list(zip(uploads, client_states, strict=True))

    def opened(self, uploads: Uploads, payload: Payload, federation: Federation, rng: Rng) -> Uploads:
        """Surrogates from sums: what the site would have made of them, by the same function from the same stream."""
        mechanism = federation.mechanism
        if mechanism is None or not mechanism.sends_sums or not uploads:
            return uploads
        net = federation.net(payload["model"]) if "model" in payload else None
        shards, rngs = [federation.vacant()] * len(uploads), [rng.at(client) for client in uploads]
        found = [sums_received(upload, federation.task.classes) for upload in uploads.values()]
        made = condense_released(net, shards, rngs, self, payload["noise_seed"], mechanism, found)
        return {client: own.as_upload() for client, own in zip(uploads, made, strict=True)}


def _sends_sums(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and mechanism.sends_sums
