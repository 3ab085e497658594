"""What every method that uploads surrogates shares: the broadcast of model and noise seed, and the client's condensation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rescene.data import Shard
from rescene.methods.base import Federation, Method, Payload, Uploads
from rescene.methods.forms import Form, Place, fields, notes, pictures
from rescene.record import Tree
from rescene.rng import Rng
from rescene.steps import Condensation, condense


def gathered(uploads: Uploads) -> tuple[Tensor, Tensor] | None:
    """All pictures of a round and their labels, in client order; None if nobody sent any."""
    senders = [upload for upload in uploads.values() if len(upload["labels"])]
    if not senders:
        return None
    return torch.cat([u["images"] for u in senders]), torch.cat([u["labels"] for u in senders])


class SurrogateMethod(Condensation, Method):
    """Not a method of its own: the client side of Eq. 1, one client at a time or all of them in one pass."""

    leaves_site: ClassVar[str] = (
        "a few condensed images per class with their labels; near-copies of real images by default"
    )

    mechanisms: ClassVar[tuple[str, ...]] = ("none", "release", "per-example", "paper-experiment")

    def broadcast(self, state: Any, round: int, federation: Federation, rng: Rng) -> Payload:
        """The model, and the seed of the perturbation noise that all clients of the round share."""
        return {"model": state.model, "noise_seed": rng.at("noise").integer()}

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        return fields(pictures(place, self.ipc) | {"notes": notes})

    def client_round(self, payload: Payload, shard: Shard, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        return self.client_round_batched(payload, [shard], [client_state], [rng])[0]

    def client_round_batched(
        self, payload: Payload, shards: Sequence[Shard], client_states: Sequence[Tree], rngs: Sequence[Rng]
    ) -> list[tuple[Payload, Tree]]:
        net = shards[0].net(payload["model"])
        made = condense(net, shards, rngs, self, payload["noise_seed"])
        return [(surrogates.as_upload(), state) for surrogates, state in zip(made, client_states, strict=True)]
