"""What every method shares whose sites train the model and whose server averages: a site's answer, the weights of the average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from rescene.core.errors import RunError
from rescene.core.hyperparameters import hyper
from rescene.core.record import Tree
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional import weighted_average
from rescene.functional.model_average import changed_likewise
from rescene.methods.base import Client, Federation, LateAnswer, Method, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalBytes, Setting
from rescene.methods.upload_schema import NOTHING, Form, Place, either, fields, like, notes, whole
from rescene.nets import Arch, model_bytes
from rescene.privacy.dp_sgd import fit_privately
from rescene.training import Loss, Penalty, Training, cross_entropy_from, fit_shard, penalised


def trained(
    net: nn.Module,
    shard: Client,
    settings: Training,
    generator: torch.Generator,
    loss: Loss | None = None,
    *,
    first_class: int = 0,
    penalty: Penalty | None = None,
    notes: Mapping[str, float] | None = None,
    counted: int | None = None,
) -> Payload:
    """Local training and what the site answers: its weights and how many images they come from; nothing without images.

    ``counted``: the images that weigh in the average, if these are not all that the site trains on.

    Behind a mechanism its loss stays at home; behind one with a guarantee it answers whether it has images or not, and their
    number stays at home too. ``penalty`` is a term that sees the weights of ``net`` alone; behind a mechanism its gradient is
    added after the noise.
    """
    num_images = len(shard) if counted is None else counted
    if num_images == 0 and not shard.hidden:
        return {"num_images": 0}
    if shard.site is not None:
        if not fit_privately(
            net, shard, settings, generator, shard.site, loss, first_class=first_class, penalty=penalty
        ):
            return {"num_images": 0, "notes": {"num_declined": 1}}
        return {"model": weights_of(net), "num_images": 1 if shard.hidden else num_images}
    if penalty is not None:
        loss = penalised(loss or cross_entropy_from(first_class), penalty)
    final = fit_shard(net, shard, settings, generator, loss, first_class=first_class)
    told = {"local_loss": final, **(notes or {})}
    return {"model": weights_of(net), "num_images": num_images, "notes": told}


def first_learned(task: Task, local_ce: str) -> int:
    """The first label that a site's cross-entropy looks at: the task's first class where ``local_ce`` is ``new``, else 0."""
    return min(task.classes) if local_ce == "new" else 0


def refuse_twice(last_task: int, task: Task) -> None:
    """Images that are in the memory already may not be trained on beside it: an image in twice weighs twice what is accounted."""
    if task.index <= last_task:
        raise RunError(
            "E375",
            f"task {task.index + 1} is over for this site: its images are in its memory",
            why="training on them again would use an image twice in one participation, which nobody accounted for",
            fix="ask for the tasks in their order",
        )


class AveragingMethod(Method):
    """Not a method of its own: theta <- sum_k (n_k / sum n) theta_k over the sites that sent one.

    An upload holds ``num_images`` and, where that is positive, ``model``.
    """

    leaves_site: ClassVar[str] = "model weights and the number of local images"
    leaves_in_short: ClassVar[str] = "weights"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F)", "O(R K P)")

    weighting: Literal["size", "new", "uniform"] = hyper(
        "size", "n_k", "[ours]", "weight of a client: the images that it trains on, those of this task alone, or equal"
    )

    def counted(self, shard: Client) -> int:
        """The images of a site that weigh in the average, of all that it trains on."""
        remembered = shard.first_remembered
        return len(shard) if self.weighting != "new" or remembered is None else remembered

    def shares(self, senders: Iterable[Payload]) -> list[int]:
        """The weight of each of these answers in the average."""
        return [1 if self.weighting == "uniform" else upload["num_images"] for upload in senders]

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        """Weights of the model that was sent, or no image to learn from; every other question is answered by nothing."""
        if verb != "client_round":
            return NOTHING
        absent = fields({"num_images": whole(0, 0)}, {"notes": notes})
        return either(absent, fields({"model": like(payload["model"]), "num_images": whole(1)}, {"notes": notes}))

    def late(self, answer: LateAnswer, payload: Payload) -> Payload:
        """The site's change of the weights it was sent, made to the weights of today (FedBuff, Nguyen et al., AISTATS 2022)."""
        upload, today = answer.upload, payload["model"]
        if "model" not in upload:
            return upload
        return upload | {"model": changed_likewise(today, answer.sent["model"], upload["model"], answer.weight)}

    def server_round(self, state: Any, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> Any:
        senders = [upload for upload in uploads.values() if upload["num_images"] > 0]
        if not senders:
            return state
        return replace(state, model=weighted_average([upload["model"] for upload in senders], self.shares(senders)))

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """What a client keeps beside the model."""
        return 0.0

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        model = model_bytes(arch, num_classes)
        return NominalBytes(model, model, model + self.nominal_memory_bytes(arch, num_classes))

    def nominal_replayed(self, setting: Setting, task: int) -> float:
        """D_mem, remembered images that the average site trains on beside its own."""
        return 0.0

    def nominal_passes(self, task: int) -> int:
        """Passes of one image in one epoch: forward and backward."""
        return TRAINING_PASSES

    def nominal_client_flops(self, setting: Setting) -> float:
        """R K E (D_loc + D_mem) passes of F each, over the tasks."""
        passes = sum(
            (setting.local_images(t) + self.nominal_replayed(setting, t)) * self.nominal_passes(t)
            for t in range(len(setting.tasks))
        )
        return setting.turns * setting.train.local_epochs * passes * setting.forward

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """A weighted average is 2P per model."""
        return 2.0 * setting.turns * setting.parameters


class PaintingMethod(AveragingMethod):
    """Not a method of its own: the server makes pictures, and asks the sites how large theirs are."""

    paints: ClassVar[bool] = True

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb == "picture_size":
            return fields({"image_size": whole(place.image_size, place.image_size)})
        return super().expects(verb, payload, place)

    def picture_size(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: tell the side of its pictures in pixels."""
        return {"image_size": shard.images.pixels.shape[-1]}, client_state

    def asked_size(self, federation: Federation) -> int:
        """The side of the sites' pictures in pixels: the server has none to look at."""
        sizes = federation.ask(federation.clients, "picture_size", {})
        return max(int(answer["image_size"]) for answer in sizes.values())
