"""Herded memory: FedAvg whose sites keep a few images of every class they have held. Replay without uploads of images.

    server: broadcast theta
    client: E epochs of SGD on its images and its memory; send theta_k and n_k
    server: average
    end of a task, all clients: of each class keep the images whose mean feature is nearest to the class's (herding)

Try it:  rescene run demo --plugin examples/herded_memory.py method=herded-memory
"""

from typing import ClassVar

import torch
from torch import Tensor

from rescene.core.hyperparameters import hyper
from rescene.core.record import record
from rescene.functional import herd
from rescene.methods import register
from rescene.methods.averaging import AveragingMethod
from rescene.methods.base import weights_of
from rescene.training import embed, fit_shard, with_replay


@record
class Memory:
    """What a site remembers between rounds. A record of tensors: it can be saved, sent and compared."""

    pixels: Tensor  # uint8 [m, 3, H, W]
    labels: Tensor  # int64 [m]


@register
class HerdedMemory(AveragingMethod):
    name: ClassVar[str] = "herded-memory"
    title: ClassVar[str] = "Herded memory"
    paper: ClassVar[str] = "an example; the selection is iCaRL's (Rebuffi et al., CVPR 2017)"
    remembers: ClassVar[str] = "a few real images of every class it has held"

    per_class: int = hyper(20, "m", "[example]", "images a site keeps of each class and task", ge=0)

    def client_round(self, payload, shard, client_state, rng):
        memory = remembered(client_state, shard)
        mixed = with_replay(shard, memory.pixels, memory.labels)
        if len(mixed) == 0:
            return {"num_images": 0}, client_state
        net = shard.net(payload["model"])
        loss = fit_shard(net, mixed, self.train, rng.at("sgd").generator(shard.device))
        notes = {"local_loss": loss, "replay_size": len(memory.labels)}
        return {"model": weights_of(net), "num_images": len(mixed), "notes": notes}, client_state

    def end_task(self, state, task, federation, rng):
        federation.ask(federation.clients, "keep_images", {"model": state.model})
        return state

    def keep_images(self, payload, shard, client_state, rng):
        """A client verb of our own, called by name through ``ask``. Nothing is sent back."""
        memory, net = remembered(client_state, shard), shard.net(payload["model"])
        kept = [shard.index[:0]]
        for positions in shard.by_class().values():
            features = torch.nn.functional.normalize(embed(net, shard.pictures(positions)), dim=1)
            kept.append(positions[herd(features, features.mean(dim=0), self.per_class)])
        chosen = torch.cat(kept)
        pixels = torch.cat([memory.pixels, shard.images.pixels[chosen]])
        return {}, Memory(pixels, torch.cat([memory.labels, shard.images.labels[chosen]]))


def remembered(client_state, shard):
    """The site's memory; an empty one in its first task."""
    return client_state or Memory(shard.images.pixels[:0], shard.images.labels[:0])
