"""What every method that uploads surrogates shares: the broadcast of model and noise seed, and the client's condensation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import UploadKind
from rescene.core.record import Tree
from rescene.core.rng import Rng
from rescene.data import Shard
from rescene.methods.base import Client, Federation, Method, Payload, Uploads
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalBytes, Setting, image_bytes
from rescene.methods.upload_schema import Form, Place, fields, notes, pictures, sums
from rescene.nets import Arch, model_bytes
from rescene.privacy.mechanism import Mechanism
from rescene.privacy.private_condensation import condense_privately
from rescene.privacy.release import centre_of, condense_released, released, sums_received, sums_size, sums_upload
from rescene.training import Condensation, Surrogates, Training, condense

CONDENSATION_PASSES = 8  # nominal, per surrogate and step: two matching terms, each 3F synthetic and F real


Plainly = Callable[[nn.Module, Sequence[Shard], Sequence[Rng], int], list[Surrogates]]


def gathered(uploads: Uploads) -> tuple[Tensor, Tensor] | None:
    """All pictures of a round and their labels, in client order; None if nobody sent any."""
    senders = [upload for upload in uploads.values() if len(upload["labels"])]
    if not senders:
        return None
    return torch.cat([u["images"] for u in senders]), torch.cat([u["labels"] for u in senders])


def surrogates_of(
    net: nn.Module,
    clients: Sequence[Client],
    rngs: Sequence[Rng],
    settings: Condensation,
    noise_seed: int,
    plainly: Plainly | None = None,
) -> list[Surrogates]:
    """The surrogates of each client's images: behind its mechanism where it has one, else by ``plainly`` (by default Eq. 1)."""
    sites = [client.site for client in clients if client.site is not None]
    if sites:
        made = condense_privately(net, clients, rngs, settings, noise_seed, sites)
    elif plainly is not None:
        made = plainly(net, clients, rngs, noise_seed)
    else:
        made = condense(net, clients, rngs, settings, noise_seed)
    for client, own in zip(clients, made, strict=True):
        if client.notice is not None and len(own.labels):
            client.notice(own.images, own.start)
    return made


class SurrogateMethod(Condensation, Method):
    """Not a method of its own: the client side of Eq. 1, one client at a time or all of them in one pass.

    Where sites send noised sums (``privacy.send=sums``) the server condenses in their place, before anything else is done.
    """

    uploads: ClassVar[UploadKind] = "images"
    leaves_site: ClassVar[str] = (
        "a few condensed images per class with their labels; near-copies of real images by default "
        "(noised sums instead: privacy.mechanism=release privacy.send=sums)"
    )
    leaves_in_short: ClassVar[str] = "condensed images"

    mechanisms: ClassVar[tuple[str, ...]] = ("none", "release", "per-example", "paper-experiment")

    server_augment: bool = hyper(
        False, "-", "[ours]", "crops and mirror images of what was sent, on the server; train.augment must be on too"
    )

    @property
    def server_training(self) -> Training:
        """How the server trains on surrogates: as they are, unless ``server_augment`` says otherwise."""
        return self.train if self.server_augment else self.train.model_copy(update={"augment": False})

    @classmethod
    def leaving(cls, mechanism: Mechanism | None) -> str:
        if _sends_sums(mechanism):
            return "one noised sum of embeddings or picture moments per class, count included; no image"
        if mechanism is not None and mechanism.kind == "release":
            return "a few images per class with their labels, computed from one noised sum per class"
        return cls.leaves_site

    def leakage_note(self) -> str:
        if self.start != "coloured":
            return ""
        return "They are drawn with a seed that the server knows, so it can solve for the images of small classes."

    @classmethod
    def leaving_in_short(cls, mechanism: Mechanism | None) -> str:
        if _sends_sums(mechanism):
            return "noised sums"
        if mechanism is not None and mechanism.kind == "release":
            return "images from noised sums"
        return super().leaving_in_short(mechanism)

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

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        return self.client_round_batched(payload, [shard], [client_state], [rng])[0]

    def client_round_batched(
        self, payload: Payload, shards: Sequence[Client], client_states: Sequence[Tree], rngs: Sequence[Rng]
    ) -> list[tuple[Payload, Tree]]:
        """``client_round`` for several sites in one pass; the uploads are the same."""
        site, seed = shards[0].site, payload["noise_seed"]
        if site is not None and site.mechanism.sends_sums:
            net = shards[0].net(payload["model"]) if "model" in payload else None
            sites = [shard.site for shard in shards if shard.site is not None]
            found = zip(shards, released(net, shards, self, seed, sites, payload.get("centre")), strict=True)
            uploads = [sums_upload(own, shard.task.classes, site.mechanism) for shard, own in found]
        else:
            made = surrogates_of(shards[0].net(payload["model"]), shards, rngs, self, seed, self.condensed)
            uploads = [surrogates.as_upload() for surrogates in made]
        return list(zip(uploads, client_states, strict=True))

    def condensed(
        self, net: nn.Module, shards: Sequence[Shard], rngs: Sequence[Rng], noise_seed: int
    ) -> list[Surrogates]:
        """Surrogates of every class of every client (Eq. 1), where no mechanism stands between."""
        return condense(net, shards, rngs, self, noise_seed)

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

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """C_t IPC images up, the model down; a client keeps the model alone."""
        model = model_bytes(arch, num_classes)
        return NominalBytes(up=classes_per_task * self.ipc * image_bytes(arch), down=model, state=model)

    def nominal_client_flops(self, setting: Setting) -> float:
        """S steps for min(IPC, n) surrogates of each class: here the paper's figures follow the split, as its pool sizes do."""
        surrogates = setting.turns * sum(
            sum(min(self.ipc, n) for site in sites for n in site) / len(sites) for sites in setting.counts
        )
        return float(CONDENSATION_PASSES * surrogates * self.num_steps * setting.forward)

    def nominal_pool(self, setting: Setting, task: int) -> float:
        """Images that the server trains on in one epoch, summed over the rounds of the task: those of each round."""
        return setting.turns * len(setting.tasks[task].classes) * self.ipc

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """E_srv epochs of 3F an image."""
        images = self.nominal_pool(setting, task)
        return float(images * setting.train.server_epochs * TRAINING_PASSES * setting.forward)


def _sends_sums(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and mechanism.sends_sums
