"""GLFC (Dong et al., CVPR 2022): clients replay exemplars and distil the best old model, chosen by a proxy server.

start of task t > 0:
    proxy:  send best_2, the best model of the finished task, to every client: its old model from now on
each round:
    server: broadcast theta
    client: E epochs on its images and exemplars with .5 L_GC + .5 L_RD (L_GC alone without an old model); send theta_k, n_k
            first contact with the task: for each class perturb the most typical image, encode it as a gradient, send that
    server: theta <- sum_k (n_k / sum n) theta_k
    proxy:  gradients received: reconstruct the images; they are the monitor set, and a new task starts a new best score;
            accuracy of theta on the monitor set >= best score: best_2 <- theta
end of task t:
    client: herd at most 20 exemplars of each class of the task

The proxy reconstructs private images by design: see docs/methods/glfc.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import GREEN
from rescene.core.record import Tree, record, to_device
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional import herd
from rescene.functional.distillation import compensation_loss, compensation_weights, mean_entropy, relation_loss
from rescene.methods.averaging import AveragingMethod
from rescene.methods.base import Client, Federation, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalReplay, Setting, image_bytes
from rescene.methods.registry import register
from rescene.methods.upload_schema import Dim, Form, Place, either, fields, like, notes, tensor, whole
from rescene.nets import Arch, model_bytes
from rescene.training import Batch, class_scores, embed, fit_shard, frozen, repeatable, with_replay
from rescene.training.reconstruction import (
    INVERSION_PASSES,
    Inversion,
    encoder_flops,
    encoder_gradients,
    encoder_weights,
    perturb,
    reconstruct,
)
from rescene.training.sgd import Loss


@record
class Monitor:
    """The proxy's images: reconstructed prototypes of one task, uint8 [m, 3, H, W], with their labels [m]."""

    pixels: Tensor
    labels: Tensor
    task: int


@record
class ServerState:
    """The server's state: the model, the monitor set rebuilt from gradients, and the best model so far."""

    model: Model
    encoder_seed: int
    monitor: Monitor | None
    best: Model | None  # best_2 of the paper's proxy; best_1 is what the clients hold as their old model
    best_score: float
    notes: dict[str, float]


@record
class ClientState:
    """What a client remembers: exemplars (uint8 pixels, labels, the task each is from) and the old model."""

    pixels: Tensor
    labels: Tensor
    tasks: Tensor
    known_task: int  # the last task whose beginning the client noticed; exemplars of earlier tasks are replayed
    last_entropy: float
    old_model: Model | None
    offered: Model | None  # what becomes the old model when the client notices a new task


@register
class GLFC(Inversion, AveragingMethod):
    """FedAvg with exemplars at the sites and distillation from the best old model, which a proxy server picks."""

    name: ClassVar[str] = "glfc"
    paints: ClassVar[bool] = True
    title: ClassVar[str] = "GLFC"
    colour: ClassVar[str] = GREEN
    marker: ClassVar[str] = "P"
    paper: ClassVar[str] = "Dong et al., CVPR 2022"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified("published code", "tests/oracles/test_oracles.py::test_glfc_losses_and_their_gradients", "1e-6"),
        Verified(
            "published code",
            "tests/oracles/test_oracles.py::test_glfc_prototype_is_perturbed_encoded_and_found_again",
            "1e-4 of the gradient, 2e-4 of the picture",
        ),
    )
    leaves_site: ClassVar[str] = (
        "model weights and the number of local images; once per task, for one image per class, a gradient from which the "
        "server reconstructs that image on purpose"
    )
    leaves_in_short: ClassVar[str] = "weights, recoverable images"
    reconstructs: ClassVar[bool] = True
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E (D_loc + D_mem) F)", "O(R K P + I K |C_{t-1}| F_enc)")
    remembers: ClassVar[str] = "real images of every class it has held, and the best model of the previous task"

    num_exemplars: int = hyper(20, "-", "App. A", "images remembered per class and task, at most", ge=1)
    compensation_weight: float = hyper(0.5, "lambda_1", "App. A", "weight of gradient compensation", ge=0)
    distillation_weight: float = hyper(0.5, "lambda_2", "App. A", "weight of relation distillation", ge=0)
    reduction: Literal["mean", "sum"] = hyper(
        "mean", "-", "[public code]", "binary cross-entropy averaged or summed over outputs"
    )
    trigger: Literal["task", "entropy"] = hyper(
        "task", "-", "[ours]", "how a client notices a new task: it is told, or its mean entropy jumps"
    )
    entropy_threshold: float = hyper(
        1.2, "r_h", "[public code]", "rise of the mean entropy (nats) that is a jump", ge=0
    )
    prototype_classes: Literal["current", "previous"] = hyper(
        "current", "-", "[public code]", "classes whose prototypes are sent: of this task, or of the task before"
    )
    num_perturbations: int = hyper(50, "-", "App. A", "SGD steps on a prototype before it is encoded", ge=0)
    perturbation_lr_scale: float = hyper(0.1, "-", "App. A", "their learning rate, as a fraction of train.lr", gt=0)
    perturbation_decay: float = hyper(1e-5, "-", "App. A", "their weight decay", ge=0)
    perturbation_input: Literal["pixels", "normalised"] = hyper(
        "pixels", "-", "[public code]", "what the model sees meanwhile: values in 0..1, or normalised as in training"
    )

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        return ServerState(weights_of(net), rng.at("encoder").integer(), None, None, -1.0, {})

    def begin_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        if state.best is not None:
            federation.ask(federation.clients, "receive_old_model", {"old_model": state.best})
        grown: ServerState = super().begin_task(state, task, federation, rng)
        return grown

    def receive_old_model(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: take the best old model as teacher, now or when the site notices a new task (``trigger``)."""
        kept = _remembered(client_state, shard)
        if self.trigger == "task":
            return {}, replace(kept, old_model=payload["old_model"])
        return {}, replace(kept, offered=payload["old_model"])

    def broadcast(self, state: ServerState, round: int, federation: Federation, rng: Rng) -> Payload:
        return {"model": state.model, "encoder_seed": state.encoder_seed}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        kept, is_transition = self._notice(payload["model"], shard, _remembered(client_state, shard))
        learned = kept.tasks < kept.known_task
        local = with_replay(shard, kept.pixels[learned], kept.labels[learned])
        if self.counted(local) == 0:
            return {"num_images": 0}, kept
        net = shard.net(payload["model"])
        loss = self._loss(shard, kept.old_model, has_learned=bool(learned.any()))
        final = fit_shard(net, local, self.train, rng.at("sgd").generator(shard.device), loss)
        upload: Payload = {"model": weights_of(net), "num_images": self.counted(local), "notes": {"local_loss": final}}
        if is_transition:
            upload |= self._encoded_prototypes(net, payload["encoder_seed"], shard, kept)
        return upload, kept

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        plain = super().expects(verb, payload, place)
        if verb != "client_round":
            return plain
        num, side = Dim("prototypes", place.task.num_seen), place.image_size
        shapes = encoder_weights(0, place.task.num_seen, side, side)
        gradients = fields({name: tensor(torch.float32, num, *w.shape) for name, w in shapes.items()})
        prototypes = fields({"gradients": gradients, "height": whole(side, side), "width": whole(side, side)})
        first = {"model": like(payload["model"]), "num_images": whole(1), "notes": notes, "prototypes": prototypes}
        return either(plain, fields(first))

    def _notice(self, model: Model, shard: Client, kept: ClientState) -> tuple[ClientState, bool]:
        """What the client knows at the start of a round, and whether this round is its transition to a new task."""
        if self.trigger == "task":
            is_transition = kept.known_task != shard.task.index
        elif len(shard) == 0:
            is_transition = False
        else:
            scores = class_scores(shard.net(model), shard.images.pixels[shard.index], shard.transform.normalise)
            entropy = mean_entropy(scores)
            is_transition = entropy - kept.last_entropy > self.entropy_threshold
            kept = replace(kept, last_entropy=entropy)
        if not is_transition:
            return kept, False
        old_model = kept.old_model if kept.offered is None else kept.offered
        return replace(kept, known_task=shard.task.index, old_model=old_model, offered=None), True

    def _loss(self, shard: Client, old_model: Model | None, *, has_learned: bool) -> Loss:
        """.5 L_GC + .5 L_RD on the client's images followed by its exemplars; old samples are the exemplars."""
        num_current = len(shard)
        old_net = None if old_model is None else frozen(shard.net(old_model), self.train)

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            logits = net(batch.x)
            weights = torch.ones_like(logits[:, 0])
            if has_learned:
                weights = compensation_weights(logits, batch.y, batch.index >= num_current)
            compensation = compensation_loss(logits, batch.y, weights, self.reduction)
            if old_net is None:
                return compensation
            with torch.no_grad():
                old_logits = old_net(batch.x)
            relation = relation_loss(logits, batch.y, old_logits, self.reduction)
            return self.compensation_weight * compensation + self.distillation_weight * relation

        return loss

    def _encoded_prototypes(self, net: nn.Module, seed: int, shard: Client, kept: ClientState) -> Payload:
        """The gradients of the encoder on this client's perturbed prototypes; nothing if it has no image of the classes."""
        pixels, labels = _prototypes(net, self._candidates(shard, kept), shard)
        if len(labels) == 0:
            return {}
        height, width = pixels.shape[2:]
        images = perturb(
            net,
            pixels.float() / 255,
            labels,
            shard.transform if self.perturbation_input == "normalised" else None,
            num_steps=self.num_perturbations,
            lr=self.perturbation_lr_scale * self.train.lr,
            weight_decay=self.perturbation_decay,
        )
        encoder = to_device(encoder_weights(seed, shard.task.num_seen, height, width), shard.device)
        gradients = encoder_gradients(encoder, images, labels)
        return {"prototypes": {"gradients": gradients, "height": height, "width": width}}

    def _candidates(self, shard: Client, kept: ClientState) -> dict[int, Tensor]:
        """Label -> uint8 images among which the prototype of the class is chosen."""
        if self.prototype_classes == "current":
            return {label: shard.images.pixels[members] for label, members in shard.by_class().items()}
        previous = kept.tasks == shard.task.index - 1
        labels = kept.labels[previous]
        return {label: kept.pixels[previous][labels == label] for label in sorted(set(labels.tolist()))}

    def server_round(
        self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ServerState:
        if not any(upload["num_images"] > 0 for upload in uploads.values()):
            return state
        state = replace(super().server_round(state, uploads, round, federation, rng), notes={})
        prototypes = [upload["prototypes"] for upload in uploads.values() if "prototypes" in upload]
        if prototypes:
            state = self._receive_prototypes(state, prototypes, federation, rng.at("inversion"))
        return _compare_with_best(state, federation)

    def _receive_prototypes(
        self, state: ServerState, prototypes: list[Any], federation: Federation, rng: Rng
    ) -> ServerState:
        """The proxy reconstructs the images behind the gradients and adds them to the monitor set of the task."""
        height, width, task = prototypes[0]["height"], prototypes[0]["width"], federation.task
        names = prototypes[0]["gradients"]
        gradients = {name: torch.cat([p["gradients"][name] for p in prototypes]) for name in names}
        encoder = to_device(encoder_weights(state.encoder_seed, task.num_seen, height, width), federation.device)
        found = reconstruct(encoder, gradients, (height, width), self, rng.generator())
        if len(found.labels) == 0:
            return state
        pixels = (255 * found.images).round().to(torch.uint8).flatten(0, 1)
        labels = found.labels.repeat_interleave(found.images.shape[1])
        notes = {"num_prototypes": float(len(found.labels)), "inversion_loss": float(found.losses.mean())}
        if state.monitor is None or state.monitor.task != task.index:  # best_1 <- best_2, a new best score
            monitor, score = Monitor(pixels, labels, task.index), -1.0
        else:  # a client's late first contact: the set grows, so the best model is measured again
            both = torch.cat([state.monitor.pixels, pixels]), torch.cat([state.monitor.labels, labels])
            monitor = Monitor(*both, task.index)
            score = -1.0 if state.best is None else _accuracy(state.best, monitor, federation)
        return replace(state, monitor=monitor, best_score=score, notes=notes)

    def end_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        federation.ask(federation.clients, "keep_exemplars", {"model": state.model})
        return state

    def keep_exemplars(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Herd exemplars of the finished task's classes under the task-end model, on images that are not augmented.

        They take the place of those that an earlier question of the same kind put there.
        """
        kept, net = _remembered(client_state, shard), shard.net(payload["model"])
        others = kept.tasks != shard.task.index
        kept = replace(kept, pixels=kept.pixels[others], labels=kept.labels[others], tasks=kept.tasks[others])
        pixels, labels = [kept.pixels], [kept.labels]
        for label, members in shard.by_class().items():
            z = _unit_features(net, shard.images.pixels[members], shard)
            chosen = shard.images.pixels[members[herd(z, z.mean(dim=0), self.num_exemplars)]]
            pixels.append(chosen)
            labels.append(kept.labels.new_full((len(chosen),), label))
        all_labels = torch.cat(labels)
        added = kept.tasks.new_full((len(all_labels) - len(kept.tasks),), shard.task.index)
        return {}, replace(kept, pixels=torch.cat(pixels), labels=all_labels, tasks=torch.cat([kept.tasks, added]))

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """The old model, and so many exemplars of every class."""
        return model_bytes(arch, num_classes) + self.num_exemplars * num_classes * image_bytes(arch)

    def nominal_replayed(self, setting: Setting, task: int) -> float:
        return setting.old_classes(task) * self.num_exemplars

    def nominal_passes(self, task: int) -> int:
        """The old model looks at every image, too."""
        return TRAINING_PASSES + (task > 0)

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """From the second task on a search for one image per class and participant."""
        averaging = super().nominal_server_flops(setting, task)
        if task == 0:
            return averaging
        prototypes, side = setting.per_round * len(setting.tasks[task].classes), setting.arch.image_size
        evaluations = self.num_inversions * self.inversion_steps * prototypes
        return averaging + evaluations * INVERSION_PASSES * encoder_flops(setting.num_classes, side, side)

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        each = self.num_exemplars * setting.num_classes
        return NominalReplay(self.num_exemplars, each, each * setting.num_clients)


def _remembered(client_state: Tree, shard: Client) -> ClientState:
    """The client's state; an empty one for a client that joins."""
    if isinstance(client_state, ClientState):
        return client_state
    none = shard.images.labels[:0]
    return ClientState(shard.images.pixels[:0], none, none, -1, 0.0, None, None)


def _unit_features(net: nn.Module, pixels: Tensor, shard: Client) -> Tensor:
    return F.normalize(embed(net, shard.transform.normalise(pixels)), dim=1)


def _prototypes(net: nn.Module, candidates: Mapping[int, Tensor], shard: Client) -> tuple[Tensor, Tensor]:
    """Of each class the image closest to the mean feature: uint8 [p, 3, H, W] and labels [p], ascending."""
    chosen = [shard.images.pixels[:0]]
    for pixels in candidates.values():
        z = _unit_features(net, pixels, shard)
        chosen.append(pixels[(z - z.mean(dim=0)).norm(dim=1).argmin()].unsqueeze(0))
    return torch.cat(chosen), torch.tensor(list(candidates), dtype=torch.long, device=shard.device)


def _accuracy(model: Model, monitor: Monitor, federation: Federation) -> float:
    """Percent of the monitor set that the model labels as the gradients did."""
    scores = class_scores(federation.net(model), monitor.pixels, federation.transform.normalise)
    return 100.0 * float((scores.argmax(dim=1) == monitor.labels).double().mean())


def _compare_with_best(state: ServerState, federation: Federation) -> ServerState:
    """Best-model rule: the averaged model is the new best_2 if it does at least as well on the monitor set."""
    if state.monitor is None:
        return state
    score = _accuracy(state.model, state.monitor, federation)
    state = replace(state, notes=state.notes | {"monitor_accuracy": score})
    return replace(state, best=state.model, best_score=score) if score >= state.best_score else state
