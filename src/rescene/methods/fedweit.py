"""FedWeIT (Yoon et al., ICML 2021): a base that sites share, a mask, and sparse weights of each site and task that others may use.

weights of a layer at site c in task t:   theta = B * m + A + sum_i alpha_i K_i,   m = sigmoid(v)
start of task t:
    server: draw a sample K_1 .. K_n of the A of earlier tasks; send it to every site, which leaves out its own
    site:   A <- B / 3; v, alpha random; anchor_j <- B * m_j + A_j for each of its earlier tasks j, with the B it had last
each round of task t:
    server: broadcast B, and what has no base: biases, norms, the head
    site:   E epochs of Adam on B, v, A, alpha, A_j and the rest: cross-entropy over this task's classes
            + lambda_1 (|A|_1 + sum_j |A_j|_1) + lambda_m |m|_1 + lambda_2 / 2 sum_j ||B * m_j + A_j - anchor_j||^2 + decay;
            send the rows of B with the largest m, m, A without entries up to lambda_1, alpha, the rest and n_k
    server: B <- mean of each row over the sites that sent it; model: B * mean m + mean A + sum_i mean alpha_i K_i, mean of the rest
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from rescene.core.errors import ConfigError
from rescene.core.hyperparameters import hyper
from rescene.core.method_style import SKY
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional import weighted_average
from rescene.functional.decomposed import (
    composed,
    drift,
    from_bits,
    kept_outputs,
    masked,
    mean_of_kept,
    num_kept,
    pruned,
    scattered,
    to_bits,
)
from rescene.methods.averaging import AveragingMethod, first_learned
from rescene.methods.base import Client, Federation, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import NominalBytes, Setting
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Dim, Form, Place, both, either, fields, like, notes, tensor, whole
from rescene.nets import Arch, is_rehearsal, model_bytes
from rescene.training import AdamSteps, Batch, Loss, fit_shard

ADAPTIVE_START = 3  # A starts as B divided by this (official code)
MOST_TAG = 1 << 40  # random numbers by which sites recognise their own weights


@record
class FedWeitState:
    """The server's memory. Adaptive weights stand there as they were sent: tag, bits of what is not 0, values."""

    model: Model  # the shared model that answers
    base: Model  # B by the name of a layer's weight
    known: list[Payload]  # A of all sites in earlier tasks
    sample: list[Payload]  # those that sites received at the start of this task
    latest: dict[str, Payload]  # the newest A of this task, by client
    notes: dict[str, float]


@record
class TaskPart:
    """What a site has for one task, by the name of a layer's weight."""

    mask: Model  # v; m = sigmoid(v)
    adaptive: Model
    attention: Model  # of the task that is learned now; empty later
    anchor: Model  # of an earlier task: its weights when the task of today began


@record
class TaskMemory:
    """What a site keeps."""

    task: int  # that it has entered
    base: Model  # B after its last round
    current: TaskPart | None  # None until its first round in the task
    earlier: list[TaskPart]
    received: list[Payload]  # other sites' A, for this task
    tags: list[int]  # of its own A


NOBODY = TaskMemory(-1, {}, None, [], [], [])


@register
class FedWeIT(AveragingMethod):
    """A shared base with masks and sparse weights of each site and task, which other sites weigh and add to their own."""

    name: ClassVar[str] = "fedweit"
    title: ClassVar[str] = "FedWeIT"
    colour: ClassVar[str] = SKY
    marker: ClassVar[str] = "<"
    paper: ClassVar[str] = "Yoon et al., ICML 2021"
    own_orders: ClassVar[bool] = True
    leaves_site: ClassVar[str] = (
        "base weights that its mask keeps, the mask, sparse weights of its own (sent on to other sites), attention, biases, norms "
        "and head, and the number of local images"
    )
    leaves_in_short: ClassVar[str] = "weights, mask"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F)", "O(R K P)")
    remembers: ClassVar[str] = "the base, its own mask and weights of every task, and what it received of other sites"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified("published code", "tests/oracles/test_oracles.py::test_fedweit_loss_and_its_gradients", "1e-5"),
        Verified(
            "published code",
            "tests/oracles/test_oracles.py::test_fedweit_server_takes_the_mean_over_the_sites_that_sent_a_row",
            "1e-6, the base of a round",
        ),
        Verified("hand computation", "tests/methods/test_fedweit.py::test_one_step_equals_the_formula", "1e-5, a step"),
        Verified("hand computation", "tests/methods/test_fedweit.py::test_a_round_of_the_server_by_hand", "1e-6"),
    )

    adam_lr: float = hyper(1e-3 / 3, "-", "official code", "learning rate of Adam, which replaces the shared SGD", gt=0)
    sparsity_weight: float = hyper(
        1e-3, "lambda_1", "official code", "weight of |A|; entries of A up to it count as 0 when A is sent", ge=0
    )
    mask_weight: float = hyper(0.0, "lambda_m", "official code", "weight of |m|; the paper has lambda_1", ge=0)
    drift_weight: float = hyper(100.0, "lambda_2", "official code", "weight of the drift of earlier tasks", ge=0)
    decay: float = hyper(1e-4, "-", "official code", "weight of half the squares of A and v, in task 1 also of B", ge=0)
    dropped_outputs: float = hyper(
        0.3, "-", "official code", "share of a layer's outputs, those with the least mask, not sent", ge=0, lt=1
    )
    num_received: int = hyper(5, "-", "official code", "adaptive weights that sites receive in a task, at most", ge=0)
    old_adaptive: Literal["trained", "fixed"] = hyper(
        "trained", "A_j", "Eq. 2", "A of earlier tasks is trained, or fixed (official code)"
    )
    local_ce: Literal["new", "all"] = hyper(
        "new", "-", "[ours]", "cross-entropy over this task's classes only, or over all seen classes"
    )

    def check_network(self, arch: Arch) -> None:
        """Refuse a network without a layer to take apart (E584)."""
        if not layer_weights(arch.skeleton(1)):
            raise ConfigError(
                "E584",
                f"{self.title} needs layers below the head, and {arch.name} has none",
                where="model.name",
                why="it takes the weights of linear layers and convolutions apart, and shares the head as it is",
                fix="model.name=convnet, model.name=mlp or another network",
            )

    def init(self, net: nn.Module, rng: Rng) -> FedWeitState:
        model = weights_of(net)
        base = {name: model[name] for name in layer_weights(net)}
        return FedWeitState(model=model, base=base, known=[], sample=[], latest={}, notes={})

    def begin_task(self, state: FedWeitState, task: Task, federation: Federation, rng: Rng) -> FedWeitState:
        state = super().begin_task(state, task, federation, rng)
        drawn = torch.randperm(len(state.known), generator=rng.at("sample").generator())[: self.num_received]
        sample = [state.known[place] for place in drawn.sort().values.tolist()]
        if sample:
            federation.ask(federation.clients, "receive_adaptives", {"adaptives": sample})
        return replace(state, sample=sample)

    def receive_adaptives(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: enter the task with adaptive weights of other sites."""
        return {}, _entered(client_state or NOBODY, shard.task, payload["adaptives"], rng)

    def broadcast(self, state: FedWeitState, round: int, federation: Federation, rng: Rng) -> Payload:
        others = {name: value for name, value in state.model.items() if name not in state.base}
        return {"base": state.base, "others": others, "num_received": len(state.sample)}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        if len(shard) == 0:
            return {"num_images": 0}, client_state
        memory = client_state or NOBODY
        if memory.task != shard.task.index:
            memory = _entered(memory, shard.task, [], rng)
        part = _leaves(memory.current or self._fresh_part(payload, memory, rng), "mask", "adaptive", "attention")
        earlier = [_leaves(one, "adaptive") if self.old_adaptive == "trained" else one for one in memory.earlier]
        base = {name: value.clone().requires_grad_() for name, value in payload["base"].items()}
        net = shard.net(payload["base"] | payload["others"])
        loss = self._loss(base, part, earlier, _received(memory, payload), shard.task)
        rest = [value for name, value in net.named_parameters() if name not in base]
        steps = AdamSteps([([*base.values(), *_learned([part, *earlier]), *rest], self.adam_lr)])
        final = fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device), loss, optimiser=steps)
        part, *earlier = (_detached(one) for one in (part, *earlier))
        base = {name: value.detach() for name, value in base.items()}
        others = {name: value for name, value in weights_of(net).items() if name not in base}
        upload = self._upload(base, part) | {"others": others, "tag": memory.tags[-1], "num_images": len(shard)}
        upload["notes"] = {"local_loss": final, "adaptive_share": _share(upload["values"], base)}
        return upload, replace(memory, base=base, current=part, earlier=earlier)

    def _fresh_part(self, payload: Payload, memory: TaskMemory, rng: Rng) -> TaskPart:
        """The start of a task. What the site cannot use gets no attention: its own A, or all if it received nothing."""
        base, num = payload["base"], payload["num_received"]
        usable = torch.tensor([float(_usable(memory, place)) for place in range(num)])

        def drawn(kind: str, size: int, like: Tensor) -> Tensor:
            normal = torch.randn(size, generator=rng.at(kind).generator()).to(like)
            return normal / math.sqrt(max(size, 1))

        return TaskPart(
            mask={name: drawn(f"mask {name}", len(value), value) for name, value in base.items()},
            adaptive={name: value / ADAPTIVE_START for name, value in base.items()},
            attention={name: drawn(f"attention {name}", num, value) * usable.to(value) for name, value in base.items()},
            anchor={},
        )

    def _loss(
        self, base: Model, part: TaskPart, earlier: Sequence[TaskPart], received: Sequence[Model], task: Task
    ) -> Loss:
        first = first_learned(task, self.local_ce)

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            theta = {
                name: composed(
                    value,
                    part.mask[name].sigmoid(),
                    part.adaptive[name],
                    part.attention[name],
                    [other[name] for other in received],
                )
                for name, value in base.items()
            }
            logits = functional_call(net, theta, (batch.x,))
            return F.cross_entropy(logits[:, first:], batch.y - first) + self._penalty(base, part, earlier)

        return loss

    def _penalty(self, base: Model, part: TaskPart, earlier: Sequence[TaskPart]) -> Tensor:
        """All of the loss that sees weights alone (Eq. 2), summed over layers."""
        total = next(iter(base.values())).new_zeros(())
        for name, value in base.items():
            mask, adaptive = part.mask[name], part.adaptive[name]
            decayed = [mask, adaptive] if earlier else [mask, adaptive, value]
            total = total + self.sparsity_weight * adaptive.abs().sum() + self.mask_weight * mask.sigmoid().sum()
            total = total + self.decay / 2 * sum(one.square().sum() for one in decayed)
            for old in earlier:
                moved = drift(value, old.mask[name].sigmoid(), old.adaptive[name], old.anchor[name])
                total = total + self.drift_weight * moved + self.sparsity_weight * old.adaptive[name].abs().sum()
        return total

    def _upload(self, base: Model, part: TaskPart) -> Payload:
        """What is sent of the layers that are taken apart: rows of the base, the mask, sparse weights, attention."""
        mask = {name: value.sigmoid() for name, value in part.mask.items()}
        kept = {name: kept_outputs(value, self.dropped_outputs) for name, value in mask.items()}
        sparse = {name: pruned(value, self.sparsity_weight) for name, value in part.adaptive.items()}
        # a rehearsal cannot know how many are 0: it counts all of them
        values = sparse if is_rehearsal() else {name: value[value != 0] for name, value in sparse.items()}
        return {
            "kept": {name: to_bits(which) for name, which in kept.items()},
            "rows": {name: value[kept[name]] for name, value in base.items()},
            "mask": mask,
            "present": {name: to_bits(value != 0) for name, value in sparse.items()},
            "values": values,
            "attention": part.attention,
        }

    def sent_size(self, kind: Literal["features", "inputs", "outputs"], size: int) -> int:
        return num_kept(size, self.dropped_outputs) if kind == "outputs" else size

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb != "client_round":
            return NOTHING
        base, byte = payload["base"], torch.uint8
        parts = {
            "kept": _each(base, lambda name, b: tensor(byte, -(-len(b) // 8), high=255)),
            "rows": _each(base, lambda name, b: tensor(b.dtype, self.sent_size("outputs", len(b)), *b.shape[1:])),
            "mask": _each(base, lambda name, b: tensor(b.dtype, len(b), low=0, high=1)),
            "present": _each(base, lambda name, b: tensor(byte, -(-b.numel() // 8), high=255)),
            "values": _each(base, lambda name, b: tensor(b.dtype, Dim(name, b.numel()))),
            "attention": _each(base, lambda name, b: tensor(b.dtype, payload["num_received"])),
            "others": like(payload["others"]),
            "tag": whole(0, MOST_TAG),
            "num_images": whole(1),
        }

        def holds(upload: Payload) -> bool:
            return "rows" not in upload or all(
                int(from_bits(upload["kept"][name], (len(b),)).sum()) == len(upload["rows"][name])
                and int(from_bits(upload["present"][name], b.shape).sum()) == len(upload["values"][name])
                for name, b in base.items()
            )

        form = either(fields({"num_images": whole(0, 0)}), fields(parts, {"notes": notes}))
        return both(form, holds, "has bits that do not fit its values")

    def server_round(self, state: FedWeitState, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> Any:
        senders = {client: upload for client, upload in uploads.items() if upload["num_images"] > 0}
        if not senders:
            return state
        sent = list(senders.values())
        shares = self.shares(sent)
        means = {
            key: weighted_average([upload[key] for upload in sent], shares) for key in ("mask", "attention", "others")
        }
        adaptive = weighted_average([dense(upload, state.base) for upload in sent], shares)
        received = [dense(one, state.base) for one in state.sample]
        base, layers = dict[str, Tensor](), dict[str, Tensor]()
        for name, before in state.base.items():
            kept = [from_bits(upload["kept"][name], (len(before),)) for upload in sent]
            base[name] = mean_of_kept(before, kept, [upload["rows"][name] for upload in sent], shares)
            others = [other[name] for other in received]
            layers[name] = composed(base[name], means["mask"][name], adaptive[name], means["attention"][name], others)
        latest = {str(k): {key: one[key] for key in ("tag", "present", "values")} for k, one in senders.items()}
        model = state.model | layers | means["others"]
        return replace(state, model=model, base=base, latest=state.latest | latest)

    def end_task(self, state: FedWeitState, task: Task, federation: Federation, rng: Rng) -> FedWeitState:
        """The adaptive weights of the task become known to the sites of later tasks."""
        return replace(state, known=[*state.known, *state.latest.values()], latest={}, sample=[])

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """Up: rows of the base and all of A; down: a model; kept: base, A of each task, anchors of the earlier ones."""
        model, num_tasks = model_bytes(arch, num_classes), -(-num_classes // classes_per_task)
        return NominalBytes((2 - self.dropped_outputs) * model, model, model * 2 * num_tasks)

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """Means of B and A, and the sum of all parts of the shared model."""
        known = min(self.num_received, task * setting.num_clients)
        return 2.0 * setting.turns * setting.parameters * 2 + 2.0 * setting.num_rounds * setting.parameters * (
            2 + known
        )


def layer_weights(net: nn.Module) -> list[str]:
    """Names of the weights of linear layers and convolutions below the head."""
    layers = [name for name, module in net.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return [f"{name}.weight" for name in layers if name != "head"]


def dense(sent: Payload, base: Model) -> Model:
    """Adaptive weights as they were sent, with their zeros."""
    return {
        name: scattered(from_bits(sent["present"][name], value.shape), sent["values"][name])
        for name, value in base.items()
    }


def _entered(memory: TaskMemory, task: Task, received: list[Payload], rng: Rng) -> TaskMemory:
    """The memory at the start of a task: the last one is closed, and what earlier tasks weigh now is what they shall keep."""
    closed = [] if memory.current is None else [replace(memory.current, attention={})]
    earlier = [
        replace(part, anchor={n: masked(b, part.mask[n].sigmoid()) + part.adaptive[n] for n, b in memory.base.items()})
        for part in [*memory.earlier, *closed]
    ]
    tag = int(torch.randint(MOST_TAG, (1,), generator=rng.at("tag").generator()))
    return TaskMemory(task.index, memory.base, None, earlier, received, [*memory.tags, tag])


def _usable(memory: TaskMemory, place: int) -> bool:
    return bool(memory.received) and memory.received[place]["tag"] not in memory.tags


def _received(memory: TaskMemory, payload: Payload) -> list[Model]:
    """Other sites' adaptive weights; zeros for those that the site cannot use."""
    base = payload["base"]
    nothing = {name: torch.zeros_like(value) for name, value in base.items()}
    return [
        dense(memory.received[place], base) if _usable(memory, place) else nothing
        for place in range(payload["num_received"])
    ]


def _leaves(part: TaskPart, *learned: str) -> TaskPart:
    """The part with copies that learn."""
    copies = {key: {n: v.clone().requires_grad_() for n, v in getattr(part, key).items()} for key in learned}
    return replace(part, **copies)


def _detached(part: TaskPart) -> TaskPart:
    return replace(part, **{key: {n: v.detach() for n, v in getattr(part, key).items()} for key in vars(part)})


def _learned(parts: Sequence[TaskPart]) -> list[Tensor]:
    """What learns of these parts."""
    every = [value for part in parts for model in vars(part).values() for value in model.values()]
    return [value for value in every if value.requires_grad]


def _share(values: Model, base: Model) -> float:
    """The share of adaptive weights that are not 0."""
    return sum(v.numel() for v in values.values()) / sum(v.numel() for v in base.values())


def _each(base: Model, form: Any) -> Form:
    """A form for each layer."""
    return fields({name: form(name, value) for name, value in base.items()})
