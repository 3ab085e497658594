"""PILoRA (Guo et al., ECCV 2024): a frozen transformer, a low-rank pair for each task, and a learned prototype for each class.

start of task t:
    server: A_t ~ U(-1/sqrt d, 1/sqrt d), B_t <- 0; m_c ~ 0.1 N(0, I) for new classes; send W + sum_{i<t} B_i A_i and A_1..A_{t-1}
each round of task t:
    server: broadcast A_t, B_t, all m_c, and the cosine factor of the learning rates
    client: E epochs of Adam on A_t, B_t and the m_c of this task: cross-entropy of softmax(-d_c), d_c = sqrt(||f - m_c||^2 / d)
            + lambda d_y + gamma sum_{i<t} |A_i A_t^T|_1 + sparsity |A_t|_1; send A_t, B_t, m_c, n_k, the mean f of each class
    server: A_t, B_t <- sum_k (n_k / sum n) of the sites'; m_c <- sum_k w_kc m_kc, w_kc larger the nearer m_kc is to the means of f
answer: the nearest m_c, with W + sum_{i<=t} B_i A_i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rescene.core.errors import ConfigError
from rescene.core.hyperparameters import hyper
from rescene.core.method_style import GREEN
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional import weighted_average
from rescene.functional.adapters import (
    change_of_output,
    changed_layer,
    nearest_prototype_head,
    overlap,
    prototype_distances,
    prototype_loss,
    prototype_weights,
)
from rescene.methods.averaging import AveragingMethod
from rescene.methods.base import Client, Federation, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import NominalBytes, Setting
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Dim, Form, Place, either, fields, labels, like, notes, tensor, whole
from rescene.nets import FLOAT_BYTES, Arch, attention_weights, body_cost, is_rehearsal, model_bytes
from rescene.training import AdamSteps, Batch, Loss, fit_shard
from rescene.training.sgd import cosine_rate

START = 0.1  # deviation of a new prototype (official code)
DECAY = 1e-5  # weight decay of Adam (official code)
PASSES = 2  # of an image: forward, and back through layers that do not learn
KINDS = 2  # queries and values

AdapterPair = dict[str, Tensor]  # "a" [blocks, 2, r, d], "b" [blocks, 2, d, r]


@record
class ServerState:
    """The server's state: the model that answers, what it is made of, and the pair that is learned now as the last one."""

    model: Model
    frozen: Model  # the weights, by name, that the pairs are added to
    pairs: list[AdapterPair]  # one for each task so far
    prototypes: Tensor  # [classes seen, d]
    notes: dict[str, float]


@record
class TaskStart:
    """What a site keeps of a task's start: the network that stays as it is, and A of earlier tasks."""

    model: Model
    earlier: list[Tensor]
    task: int


@register
class PILoRA(AveragingMethod):
    """A frozen transformer to which every task adds a low-rank change, and the nearest learned prototype as the answer."""

    name: ClassVar[str] = "pilora"
    title: ClassVar[str] = "PILoRA"
    colour: ClassVar[str] = GREEN
    marker: ClassVar[str] = ">"
    paper: ClassVar[str] = "Guo et al., ECCV 2024"
    leaves_site: ClassVar[str] = (
        "the low-rank weights of the task, a prototype of each of its classes, the mean feature of each class that the site "
        "holds, and the number of local images"
    )
    leaves_in_short: ClassVar[str] = "low-rank weights, mean features"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F)", "O(R K |C_t|)")
    remembers: ClassVar[str] = "the network that stays as it is, and the low-rank weights of earlier tasks"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified("published code", "tests/oracles/test_oracles.py::test_pilora_loss_and_its_gradients", "1e-5, losses"),
        Verified("published code", "tests/oracles/test_oracles.py::test_pilora_server", "1e-5, averages of a round"),
        Verified("hand computation", "tests/methods/test_pilora.py::test_one_step_equals_the_formula", "1e-5, a step"),
    )

    rank: int = hyper(4, "r", "official code", "rows of A", ge=1)
    num_blocks: int = hyper(1, "-", "official code", "blocks of the network, from the first on, that get a pair", ge=1)
    lora_lr: float = hyper(
        1e-5, "-", "official code", "learning rate of A and B; cosine-annealed over the rounds", gt=0
    )
    prototype_lr: float = hyper(0.002, "-", "official code", "learning rate of prototypes, annealed likewise", gt=0)
    compact_weight: float = hyper(0.001, "lambda", "official code", "weight of the distance to the own prototype", ge=0)
    overlap_weight: float = hyper(0.5, "gamma", "official code", "weight of |A_i A^T| with earlier tasks", ge=0)
    sparsity_weight: float = hyper(0.01, "-", "official code", "weight of |A|; the paper has no such term", ge=0)
    temperature: float = hyper(0.2, "tau", "official code", "of the softmax that weighs the sites' prototypes", gt=0)
    trains_with: Literal["all", "new"] = hyper(
        "all", "-", "[ours]", "pairs that local training sees: of all tasks, or only the new one (official code)"
    )

    def check_network(self, arch: Arch) -> None:
        """Refuse a network without attention layers (E580) or with too few alike (E581)."""
        state = arch.skeleton(1).state_dict()
        found = attention_weights(state)[: self.num_blocks]
        if not found:
            raise ConfigError(
                "E580",
                f"{self.title} needs attention layers, and {arch.name} has none",
                where="model.name",
                why="it changes only layers that give queries, keys and values in one (qkv)",
                fix="model.name=vit-mini (small, for a CPU), model.name=vit-small, or model.name=timm:NAME of a vision transformer",
            )
        if len(found) < self.num_blocks or len({state[name].shape for name in found}) > 1:
            raise ConfigError(
                "E581",
                f"{self.title} cannot change {self.num_blocks} blocks of {arch.name}",
                where="method.num_blocks",
                why=f"it has {len(found)} attention layers, and those that get a pair must be of one width",
                fix="method.num_blocks=1",
            )

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        model = weights_of(net)
        frozen = {name: model[name] for name in attention_weights(model)[: self.num_blocks]}
        none = model["head.weight"][:0]
        return ServerState(model=model, frozen=frozen, pairs=[], prototypes=none, notes={})

    def begin_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        """A new pair that changes nothing yet, prototypes of new classes; every site gets what stays as it is."""
        size, num_new = state.prototypes.shape[1], task.num_seen - len(state.prototypes)
        drawn = torch.randn(num_new, size, generator=rng.at("prototypes").generator()).to(state.prototypes)
        prototypes = torch.cat([state.prototypes, START * drawn])
        pairs = [*state.pairs, self._fresh_pair(state, rng.at("pair"))]
        state = _assembled(replace(state, pairs=pairs, prototypes=prototypes))
        model = state.model | state.frozen if self.trains_with == "new" else state.model
        start = {"model": model, "earlier": [pair["a"] for pair in pairs[:-1]]}
        federation.ask(federation.clients, "receive_network", start)
        return state

    def _fresh_pair(self, state: ServerState, rng: Rng) -> AdapterPair:
        width = next((value.shape[1] for value in state.frozen.values()), state.prototypes.shape[1])
        a = torch.empty(self.num_blocks, KINDS, self.rank, width)
        a.uniform_(-(width**-0.5), width**-0.5, generator=rng.generator())
        return {"a": a.to(state.prototypes), "b": state.prototypes.new_zeros(a.mT.shape)}

    def receive_network(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: keep the network of the task's start and A of earlier tasks."""
        return {}, TaskStart(payload["model"], payload["earlier"], shard.task.index)

    def broadcast(self, state: ServerState, round: int, federation: Federation, rng: Rng) -> Payload:
        rate = cosine_rate(1.0, max(0, round - 1), federation.num_rounds)  # the official code is one round late
        return {"pair": state.pairs[-1], "prototypes": state.prototypes, "rate": rate}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        if len(shard) == 0 or client_state is None or client_state.task != shard.task.index:  # joined late
            return {"num_images": 0}, client_state
        net, classes = shard.net(client_state.model).requires_grad_(False), list(shard.task.classes)
        pair = {key: value.clone().requires_grad_() for key, value in payload["pair"].items()}
        own = payload["prototypes"][classes].clone().requires_grad_()
        add_pair(net, list(attention_weights(client_state.model)), pair)
        sums, counts = torch.zeros_like(payload["prototypes"]), torch.zeros_like(payload["prototypes"][:, 0])
        loss = self._loss(payload["prototypes"], classes, own, pair["a"], client_state.earlier, (sums, counts))
        rates = (payload["rate"] * self.lora_lr, payload["rate"] * self.prototype_lr)
        steps = AdamSteps([(list(pair.values()), rates[0]), ([own], rates[1])], DECAY)
        final = fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device), loss, optimiser=steps)
        held = counts.nonzero().squeeze(1)
        upload = {
            "pair": {key: value.detach() for key, value in pair.items()},
            "prototypes": own.detach(),
            "labels": held,
            "means": sums[held] / counts[held].unsqueeze(1),
            "num_images": len(shard),
            "notes": {"local_loss": final},
        }
        return upload, client_state

    def _loss(
        self,
        prototypes: Tensor,
        classes: Sequence[int],
        own: Tensor,
        a: Tensor,
        earlier: Sequence[Tensor],
        seen: tuple[Tensor, Tensor],
    ) -> Loss:
        """The loss of a step; sums and numbers of features by class are added to ``seen``."""
        place, (sums, counts) = torch.tensor(classes, device=prototypes.device), seen

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            features = net.features(batch.x)  # type: ignore[operator]
            sums.index_add_(0, batch.y, features.detach())
            counts.index_add_(0, batch.y, torch.ones_like(batch.y, dtype=counts.dtype))
            distances = prototype_distances(features, prototypes.index_copy(0, place, own))
            value = prototype_loss(distances, batch.y, self.compact_weight)
            return value + self.sparsity_weight * a.abs().sum() + self.overlap_weight * overlap(a, earlier)

        return loss

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb != "client_round":
            return NOTHING
        classes, size = place.task.classes, payload["prototypes"].shape[1]
        num = Dim("classes", len(classes))
        parts = {
            "pair": like(payload["pair"]),
            "prototypes": tensor(torch.float32, len(classes), size),
            "labels": labels(classes, 1, num),
            "means": tensor(torch.float32, num, size),
            "num_images": whole(1),
        }
        return either(fields({"num_images": whole(0, 0)}), fields(parts, {"notes": notes}))

    def server_round(self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> Any:
        senders = [upload for upload in uploads.values() if upload["num_images"] > 0]
        if not senders:
            return state
        shares = self.shares(senders)
        pair = weighted_average([upload["pair"] for upload in senders], shares)
        prototypes = state.prototypes.clone()
        for place, label in enumerate(federation.task.classes):
            learned = torch.stack([upload["prototypes"][place] for upload in senders])
            means = torch.cat([upload["means"][upload["labels"] == label] for upload in senders])
            prototypes[label] = prototype_weights(learned, means, self.temperature) @ learned
        return _assembled(replace(state, pairs=[*state.pairs[:-1], pair], prototypes=prototypes))

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """Up: the pair, prototypes and means; down: the pair and all prototypes; kept: the network."""
        size = body_cost(arch).feature_size
        pair = self.num_blocks * KINDS * 2 * self.rank * size
        up, down = pair + 2 * classes_per_task * size, pair + num_classes * size
        return NominalBytes(FLOAT_BYTES * up, FLOAT_BYTES * down, model_bytes(arch, num_classes))

    def nominal_passes(self, task: int) -> int:
        return PASSES

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """Averages of the pair and of the prototypes: two operations for each value of each site."""
        size = body_cost(setting.arch).feature_size
        values = (self.num_blocks * KINDS * 2 * self.rank + len(setting.tasks[task].classes)) * size
        return 2.0 * setting.turns * values


def add_pair(net: nn.Module, names: Sequence[str], pair: AdapterPair) -> None:
    """From now on the first attention layers of ``net``, named by their weights, answer with the pair's change added.

    The small network of a rehearsal has none: there the only layer stands for them, so that work is counted.
    """
    a, b = pair["a"], pair["b"]

    def changing(block: int) -> Any:
        return lambda layer, inputs, output: output + change_of_output(inputs[0], a[block], b[block])

    for block, name in enumerate(names[: len(a)]):
        net.get_submodule(name.removesuffix(".weight")).register_forward_hook(changing(block))
    if is_rehearsal() and not names:
        layer = next(module for module in net.body.modules() if isinstance(module, nn.Linear))  # type: ignore[union-attr]
        layer.register_forward_hook(lambda layer, inputs, output: output + a.sum() + b.sum())


def _assembled(state: ServerState) -> ServerState:
    """The state whose model has the pairs of all tasks in its weights, and the prototypes as its head."""
    changed = {
        name: changed_layer(weight, [(pair["a"][block], pair["b"][block]) for pair in state.pairs])
        for block, (name, weight) in enumerate(state.frozen.items())
    }
    head = dict(zip(("head.weight", "head.bias"), nearest_prototype_head(state.prototypes), strict=True))
    return replace(state, model=state.model | changed | head)
