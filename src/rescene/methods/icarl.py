"""Federated iCaRL (Rebuffi et al., CVPR 2017, with FedAvg): herded exemplars, distillation, the nearest mean of exemplars.

each round of task t:
    server: broadcast theta
    client: E epochs of SGD on D_t and its exemplars: binary cross-entropy whose targets are, on old outputs, the sigmoids of
            theta_old and, on new outputs, the label (Algorithm 3); send theta_k, n_k
    server: theta <- sum_k (n_k / sum n) theta_k
end of task t, all clients:
    server: send theta
    client: theta_old <- theta; m <- K / (its classes so far); keep the first m of each set it has (Algorithm 5);
            herd m of each class of D_t (Algorithm 4); send for each class the sum of phi over its exemplars, and their number
    server: answer by the nearest mean of exemplars until the next task begins (Algorithm 1)
    behind a privacy mechanism no sums are sent, the head answers, and a client keeps each image with the same public chance
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import SKY
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.distillation import distillation_loss
from rescene.functional.exemplars import (
    class_sums,
    distilled_binary_loss,
    exemplars_per_set,
    first_of_each,
    nearest_mean_head,
)
from rescene.functional.herding import herding_order
from rescene.methods.averaging import AveragingMethod, refuse_twice, trained
from rescene.methods.base import Client, Federation, Model, Payload, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalReplay, Setting, image_bytes
from rescene.methods.registry import register
from rescene.methods.upload_schema import MOST, NOTHING, Dim, Form, Place, both, either, fields, labels, tensor
from rescene.nets import Arch, model_bytes
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.training import Batch, Loss, embed, frozen, repeatable, with_replay


@record
class ServerState:
    """The server's state: the model that answers and, between two tasks, the trained head that the means stand in for."""

    model: Model
    head: Model | None
    notes: dict[str, float]


@record
class Memory:
    """What a client remembers: exemplars of finished tasks, each set in the order of herding, and the last task's model."""

    pixels: Tensor  # uint8 [m, 3, H, W]
    labels: Tensor  # int64 [m]
    tasks: Tensor  # int64 [m], where each is from; a class of a task is a set
    old_model: Model | None
    chance: float = 1.0  # behind a mechanism: with which an earlier image is still here
    last_task: int = -1  # whose images are in it


@register
class ICaRL(AveragingMethod):
    """FedAvg with herded exemplars at every site, distillation, and the nearest mean of exemplars as classifier."""

    name: ClassVar[str] = "icarl"
    title: ClassVar[str] = "iCaRL"
    colour: ClassVar[str] = SKY
    marker: ClassVar[str] = "P"
    paper: ClassVar[str] = "Rebuffi et al., CVPR 2017"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified("published code", "tests/oracles/test_oracles.py::test_icarl_herding", "the same exemplars"),
        Verified("hand computation", "tests/methods/test_icarl.py::test_the_loss_is_algorithm_3_written_out", "1e-5"),
        Verified("hand computation", "tests/methods/test_icarl.py::test_one_step_equals_the_formula", "1e-4, a step"),
    )
    leaves_site: ClassVar[str] = (
        "model weights and the number of images trained on; after each task, for each class it remembers, the sum of its "
        "exemplars' features and their number"
    )
    leaves_in_short: ClassVar[str] = "weights, feature sums"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E (D_loc + D_mem) F + N (D_loc + D_mem) F)", "O(R K P)")
    remembers: ClassVar[str] = "up to `memory` (2000) real images of finished tasks, and the model of the previous task"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd")
    reuses_records: ClassVar[bool] = True

    memory: int = hyper(
        2000, "K", "[iCaRL Sec. 4.1]", "images a site can remember, in equal parts for each class it has held", ge=0
    )
    objective: Literal["binary", "softmax"] = hyper(
        "binary", "-", "[iCaRL Alg. 3]", "sigmoid outputs, or cross-entropy and distillation with softmaxes"
    )
    reduction: Literal["sum", "mean"] = hyper(
        "sum", "-", "[iCaRL Alg. 3]", "binary objective: losses of the outputs are added up or averaged"
    )
    kd_weight: float = hyper(1.0, "lambda", "[iCaRL Alg. 3]", "weight of the distillation; 0: none", ge=0)
    kd_temperature: float = hyper(2.0, "T", "[public code]", "softmax objective: temperature of the distillation", gt=0)
    classifier: Literal["nearest-mean", "head"] = hyper(
        "nearest-mean", "-", "[iCaRL Alg. 1]", "what answers after a task: the means of exemplars, or the trained head"
    )

    @classmethod
    def leaving(cls, mechanism: Mechanism | None) -> str:
        return cls.leaves_site if mechanism is None else AveragingMethod.leaves_site

    @classmethod
    def leaving_in_short(cls, mechanism: Mechanism | None) -> str:
        return super().leaving_in_short(None) if mechanism is None else AveragingMethod.leaves_in_short

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        return ServerState(model=weights_of(net), head=None, notes={})

    def begin_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        """Training goes on with the trained head."""
        if state.head is not None:
            state = replace(state, model=state.model | state.head, head=None)
        grown: ServerState = super().begin_task(state, task, federation, rng)
        return grown

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        memory = _memory(client_state, shard)
        if shard.hidden:
            refuse_twice(memory.last_task, shard.task)
        mixed = with_replay(shard, memory.pixels, memory.labels)
        loss = self._loss(shard, memory.old_model)
        generator, notes = rng.at("sgd").generator(shard.device), {"replay_size": len(memory.labels)}
        net, counted = shard.net(payload["model"]), self.counted(mixed)
        return trained(net, mixed, self.train, generator, loss, notes=notes, counted=counted), client_state

    def _loss(self, shard: Client, old_model: Model | None) -> Loss:
        old_net = None if old_model is None else frozen(shard.net(old_model), self.train)
        num_current, by_class = len(shard), shard.task.domain is None

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            logits, answers = net(batch.x), None
            if old_net is not None:
                with torch.no_grad():
                    answers = old_net(batch.x)
            if self.objective == "softmax":
                value = F.cross_entropy(logits, batch.y)
                kd = 0.0 if answers is None else distillation_loss(logits, answers, self.kd_temperature)
                return value + self.kd_weight * kd
            # Domains share all outputs: there the old network speaks for the exemplars, the label for current images.
            hears = (batch.index >= num_current) | by_class
            return distilled_binary_loss(logits, batch.y, answers, hears, self.kd_weight, self.reduction)

        return loss

    def end_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        asked = federation.ask(federation.clients, "keep_exemplars", {"model": state.model})
        answers = [answer for answer in asked.values() if answer]
        if not answers:
            return state
        trained_head = {key: state.model[key] for key in ("head.weight", "head.bias")}
        weight = trained_head["head.weight"]
        sums, counts = torch.zeros_like(weight), torch.zeros_like(weight[:, 0], dtype=torch.int64)
        for answer in answers:
            sums = sums.index_add(0, answer["labels"], answer["sums"])
            counts = counts.index_add(0, answer["labels"], answer["counts"])
        if not bool(counts.any()):
            return state
        means = dict(zip(trained_head, nearest_mean_head(sums, counts), strict=True))
        return replace(state, model=state.model | means, head=trained_head)

    def keep_exemplars(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """The memory after the task, each image once however often this is asked; the answer is what the means need."""
        memory = replace(_memory(client_state, shard), old_model=payload["model"])
        site = shard.hidden
        if shard.task.index > memory.last_task:
            memory = (
                self._herded(memory, payload["model"], shard) if site is None else self._thinned(memory, shard, site)
            )
        if site is not None or self.classifier == "head":
            return {}, memory
        held = memory.labels.unique()
        features = embed(shard.net(payload["model"]), memory.pixels, shard.transform.normalise)
        sums, counts = class_sums(features, memory.labels, held)
        return {"labels": held, "sums": sums, "counts": counts}, memory

    def _herded(self, memory: Memory, model: Model, shard: Client) -> Memory:
        """Older sets reduced to their first m, and the first m of each class of the task."""
        sets = memory.tasks * shard.task.num_seen + memory.labels
        own = shard.by_class()
        m = exemplars_per_set(self.memory, len(sets.unique()) + len(own))
        kept = first_of_each(sets, m)
        net = shard.net(model)
        chosen = [shard.index[:0]]
        for members in own.values():
            features = embed(net, shard.images.pixels[members], shard.transform.normalise)
            chosen.append(members[herding_order(F.normalize(features, dim=1))[:m]])
        return _with_images(memory, kept, torch.cat(chosen), shard)

    def _thinned(self, memory: Memory, shard: Client, site: SitePrivacy) -> Memory:
        """Room by public numbers, and a coin for each image: herding would depend on the others and need a budget."""
        task = shard.task
        sets = task.num_seen if task.domain is None else (task.index + 1) * len(task.classes)
        chance = min(memory.chance, self.memory / sets / site.mechanism.typical_count)
        kept = site.noise.chosen(len(memory.labels), chance / memory.chance if memory.chance else 0.0)
        chosen = shard.index[site.noise.chosen(len(shard), chance).to(shard.device)]
        return replace(_with_images(memory, kept.to(shard.device), chosen, shard), chance=chance)

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb != "keep_exemplars":
            return super().expects(verb, payload, place)
        num, size = Dim("classes", place.task.num_seen), payload["model"]["head.weight"].shape[1]
        parts = {
            "labels": labels(range(place.task.num_seen), 1, num),
            "sums": tensor(torch.float32, num, size),
            "counts": tensor(torch.int64, num, low=1, high=MOST),
        }
        return either(NOTHING, both(fields(parts), _possible_sums, "holds sums that no such features have"))

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """The old model, and the whole memory."""
        return model_bytes(arch, num_classes) + self.memory * image_bytes(arch)

    def nominal_replayed(self, setting: Setting, task: int) -> float:
        return sum(self._remembered(setting, task)) / setting.num_clients

    def nominal_passes(self, task: int) -> int:
        """The old model looks at every image, too."""
        return TRAINING_PASSES + (task > 0)

    def nominal_client_flops(self, setting: Setting) -> float:
        """And at the end of each task one pass of every local image, to herd, and of every exemplar, for its mean."""
        passes = sum(sum(sizes) for sizes in setting.sizes)
        if self.classifier == "nearest-mean":
            passes += sum(sum(self._remembered(setting, t + 1)) for t in range(len(setting.tasks)))
        return super().nominal_client_flops(setting) + passes * setting.forward

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        everybody = sum(self._remembered(setting, len(setting.tasks)))
        return NominalReplay(self.memory, everybody / setting.num_clients, everybody)

    def _remembered(self, setting: Setting, num_tasks: int) -> list[int]:
        """Exemplars of each site once so many tasks are over."""
        found = []
        for site in range(setting.num_clients):
            sizes = [n for task in setting.counts[:num_tasks] for n in task[site] if n]
            m = exemplars_per_set(self.memory, len(sizes))
            found.append(sum(min(n, m) for n in sizes))
        return found


def _with_images(memory: Memory, kept: Tensor, chosen: Tensor, shard: Client) -> Memory:
    """The kept part of the memory and the chosen images of the shard, sets of older tasks first."""
    new = memory.tasks.new_full((len(chosen),), shard.task.index)
    return replace(
        memory,
        pixels=torch.cat([memory.pixels[kept], shard.images.pixels[chosen]]),
        labels=torch.cat([memory.labels[kept], shard.images.labels[chosen]]),
        tasks=torch.cat([memory.tasks[kept], new]),
        last_task=shard.task.index,
    )


def _possible_sums(answer: Payload) -> bool:
    """A sum of n vectors of unit length has length n at most."""
    lengths: Tensor = answer["sums"].norm(dim=1)
    return bool((lengths <= 1.001 * answer["counts"]).all())


def _memory(client_state: Tree, shard: Client) -> Memory:
    """The client's memory; an empty one if it has none yet (first task, or a client that joined late)."""
    if client_state is not None:
        assert isinstance(client_state, Memory)
        return client_state
    none = shard.images.labels[:0]
    return Memory(shard.images.pixels[:0], none, none, None)
