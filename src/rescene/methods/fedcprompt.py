"""Fed-CPrompt (Bagwe et al., FL workshop of ICML 2023): a frozen transformer, and prompts that each task adds and learns.

start of the run:
    server: send the network, which never changes, to every site
start of task t:
    server: m new prompts P, keys K and attention vectors A for each of the first L blocks; those of earlier tasks stay as they are
each round of task t:
    server: broadcast all prompts and the head
    client: q <- features without prompts; w_m = cos(q * softmax(A_m), K_m); p = sum_m w_m P_m; z <- features with p
            E epochs of Adam on the prompts of task t and the head's rows of its classes: cross-entropy over these classes
            + C2L, which pulls z to the features with the received prompts and pushes it from those with earlier prompts alone
            send these prompts and rows, and n_k
    server: prompts and rows <- sum_k (n_k / sum n) of the sites'
late answer of a site that is still in task i < t (asynchronous prompt learning):
    server: its change goes to the prompts and rows of task i; those of other tasks do not notice
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.errors import ConfigError
from rescene.core.hyperparameters import hyper
from rescene.core.method_style import BROWN
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional import weighted_average
from rescene.functional.adapters import contrastive_continual_loss, orthogonal_rows
from rescene.functional.model_average import changed_likewise
from rescene.methods.averaging import AveragingMethod
from rescene.methods.base import Client, Federation, LateAnswer, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import NominalBytes, Setting
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Form, Place, either, fields, like, notes, whole
from rescene.nets import (
    FLOAT_BYTES,
    Arch,
    PromptPool,
    attention_weights,
    body_cost,
    grow_head,
    model_bytes,
    pool_of,
    pool_state,
    prompted_features,
)
from rescene.training import AdamSteps, Batch, Loss, fit_shard

HEAD = ("head.weight", "head.bias")
PASSES = 4  # of an image: for the query, for z_g, and for z forward and back through layers that do not learn
PASSES_LATER = 5  # from the second task on: for z_o, too


@record
class ServerState:
    """The server's state: the model with the prompts of all tasks, the classes of each task, the sites that have the network."""

    model: Model
    classes: list[tuple[int, ...]]  # of each task so far
    holders: list[int]
    notes: dict[str, float]


@register
class FedCPrompt(AveragingMethod):
    """A frozen transformer whose prompts learn, for each task its own, with a contrastive loss against drift and forgetting."""

    name: ClassVar[str] = "fedcprompt"
    title: ClassVar[str] = "Fed-CPrompt"
    colour: ClassVar[str] = BROWN
    marker: ClassVar[str] = "s"
    paper: ClassVar[str] = "Bagwe et al., FL workshop of ICML 2023"
    leaves_site: ClassVar[str] = (
        "the prompts of the task, the head's weights of its classes, and the number of local images"
    )
    leaves_in_short: ClassVar[str] = "prompts, head"
    late_verbs: ClassVar[tuple[str, ...]] = ("client_round",)
    remembers: ClassVar[str] = "the network that stays as it is"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified("published code", "tests/oracles/test_oracles.py::test_fedcprompt_step", "1e-5, features and losses"),
        Verified("published code", "tests/oracles/test_oracles.py::test_fedcprompt_average", "1e-6, a round's average"),
        Verified("hand computation", "tests/methods/test_fedcprompt.py::test_one_step_equals_the_formula", "1e-5"),
    )

    prompts_per_task: int = hyper(10, "m", "official code", "prompts that a task adds to each block", ge=1)
    prompt_length: int = hyper(
        8, "-", "official code", "tokens of a prompt: one half for keys, one for values", ge=2, multiple_of=2
    )
    num_blocks: int = hyper(5, "L", "official code", "blocks of the network, from the first on, that see prompts", ge=1)
    prompt_lr: float = hyper(
        1e-4, "eta", "official code", "learning rate of prompts and head; falls along a cosine within a round", gt=0
    )
    pull: float = hyper(1000.0, "-", "official code", "weight of ||z - z_g||^2 in C2L", ge=0)
    push: float = hyper(10.0, "-", "official code", "weight of ||z - z_o||^2 in C2L", ge=0)
    margin: float = hyper(1.0, "alpha", "official code", "margin of C2L", ge=0)

    def check_network(self, arch: Arch) -> None:
        """Refuse a network without attention layers that take prompts (E586) or with too few alike (E587)."""
        state = arch.skeleton(1).state_dict()
        found = attention_weights(state)[: self.num_blocks]
        why = _refusal(arch, state) if found else "it has no layers that give queries, keys and values in one (qkv)"
        if why:
            raise ConfigError(
                "E586",
                f"{self.title} needs attention layers, and {arch.name} has none that take prompts",
                where="model.name",
                why=why,
                fix="model.name=vit-mini (small, for a CPU), model.name=vit-small, or model.name=timm:NAME of a vision transformer",
            )
        if len(found) < self.num_blocks or len({state[name].shape for name in found}) > 1:
            raise ConfigError(
                "E587",
                f"{self.title} cannot give prompts to {self.num_blocks} blocks of {arch.name}",
                where="method.num_blocks",
                why=f"it has {len(found)} attention layers, and those that see prompts must be of one width",
                fix=f"method.num_blocks={len(found) if len({state[name].shape for name in found}) == 1 else 1}",
            )

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        model = weights_of(net)
        pool, wanted = pool_of(model), (self.num_blocks, self.prompt_length)
        if pool is not None and (pool.values.shape[0], pool.values.shape[2]) != wanted:
            raise ConfigError(
                "E587",
                "the prompts of model.init have another form",
                where="model.init",
                why=f"they are for {pool.values.shape[0]} blocks and have {pool.values.shape[2]} tokens",
                fix=f"method.num_blocks={pool.values.shape[0]} method.prompt_length={pool.values.shape[2]}",
            )
        return ServerState(model=model, classes=[], holders=[], notes={})

    def begin_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        """New prompts and rows of the head; sites that do not have the network yet get it."""
        model = grow_head(state.model, task.num_seen, rng.at("head").generator())
        fresh = self._fresh_prompts(model, rng.at("prompts"))
        model |= pool_state(fresh if (pool := pool_of(model)) is None else joined(pool, fresh))
        missing = [client for client in federation.clients if client not in state.holders]
        frozen = {name: value for name, value in model.items() if name.startswith("body.")}
        network = {"network": frozen}
        reached = federation.ask(missing, "receive_network", network, late=bool(state.holders)) if missing else {}
        classes = [*state.classes, tuple(task.classes)]
        return replace(state, model=model, classes=classes, holders=sorted([*state.holders, *reached]))

    def _fresh_prompts(self, model: Model, rng: Rng) -> PromptPool:
        """Rows of length 1, orthogonal to each other, in every block."""
        size, names = model["head.weight"].shape[1], attention_weights(model)
        width = model[names[0]].shape[1] if names else size  # none: the small network of a forecast
        sizes = (size, size, self.prompt_length * width)

        def rows(part: str, length: int) -> Tensor:
            drawn = [
                orthogonal_rows(self.prompts_per_task, length, rng.at(part, block).generator())
                for block in range(self.num_blocks)
            ]
            return torch.stack(drawn).to(model["head.weight"])

        keys, attention, values = map(rows, PromptPool._fields, sizes)
        return PromptPool(keys, attention, values.unflatten(2, (self.prompt_length, width)))

    def receive_network(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: keep the network that never changes."""
        return {}, payload["network"]

    def broadcast(self, state: ServerState, round: int, federation: Federation, rng: Rng) -> Payload:
        """All prompts and the head; ``task`` counts from 0."""
        model = {name: value for name, value in state.model.items() if not name.startswith("body.")}
        return {"model": model, "task": len(state.classes) - 1}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        if len(shard) == 0 or client_state is None:  # it missed the network
            return {"num_images": 0}, client_state
        net = shard.net(client_state | payload["model"]).requires_grad_(False)
        own = self._part(payload["model"], 0, shard.task.classes)
        learned = {name: value.clone().requires_grad_() for name, value in own.items()}
        steps = AdamSteps([(list(learned.values()), self.prompt_lr)])

        def anneal(epoch: int) -> None:
            steps.lr = annealed(self.prompt_lr, epoch, self.train.local_epochs)

        loss = self._loss(payload["model"], learned, shard.task.classes)
        generator = rng.at("sgd").generator(shard.device)
        final = fit_shard(net, shard, self.train, generator, loss, after_epoch=anneal, optimiser=steps)
        sent = {name: value.detach() for name, value in learned.items()}
        upload = {"model": sent, "task": payload["task"], "num_images": len(shard), "notes": {"local_loss": final}}
        return upload, client_state

    def _loss(self, received: Model, learned: Mapping[str, Tensor], classes: Sequence[int]) -> Loss:
        """Cross-entropy over the task's classes + C2L."""
        pool = _pool(received)
        earlier = PromptPool(*(part[:, : -self.prompts_per_task] for part in pool))
        place = torch.full_like(received["head.bias"], -1, dtype=torch.int64)
        place[list(classes)] = torch.arange(len(classes), device=place.device)

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            body: Any = net.body
            with torch.no_grad():
                query = body(batch.x)
                z_received = prompted_features(body, batch.x, query, pool)
                old = prompted_features(body, batch.x, query, earlier) if earlier.keys.shape[1] else None
            z = prompted_features(body, batch.x, query, joined(earlier, _pool(learned)))
            supervised = F.cross_entropy(F.linear(z, *(learned[name] for name in HEAD)), place[batch.y])
            return supervised + contrastive_continual_loss(z, z_received, old, self.pull, self.push, self.margin)

        return loss

    def _part(self, model: Model, ago: int, classes: Sequence[int]) -> Model:
        """What the task learns that began ``ago`` tasks before the last one: its prompts, and the head's rows of its classes."""
        return {name: value[_rows(name, self._prompts_of(model, ago), classes)] for name, value in model.items()}

    def _prompts_of(self, model: Model, ago: int) -> slice:
        end = model["prompts.keys"].shape[1] - ago * self.prompts_per_task
        return slice(end - self.prompts_per_task, end)

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb != "client_round":
            return NOTHING
        task = payload["task"]
        part = like(self._part(payload["model"], 0, place.task.classes))
        sent = {"model": part, "task": whole(task, task), "num_images": whole(1)}
        return either(fields({"num_images": whole(0, 0)}), fields(sent, {"notes": notes}))

    def late(self, answer: LateAnswer, payload: Payload) -> Payload:
        """The site's change of its task's prompts and rows, made to what these are today."""
        if "model" not in answer.upload:
            return answer.upload
        today = self._part(payload["model"], payload["task"] - answer.sent["task"], answer.classes)
        before = self._part(answer.sent["model"], 0, answer.classes)
        return answer.upload | {"model": changed_likewise(today, before, answer.upload["model"], answer.weight)}

    def server_round(self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> Any:
        """Average the prompts and rows of each task over the sites that sent some; all are of the last task unless late."""
        model, last = dict(state.model), len(state.classes) - 1
        for task in sorted({upload["task"] for upload in uploads.values() if upload["num_images"] > 0}):
            senders = [upload for upload in uploads.values() if upload.get("task") == task]
            average = weighted_average([upload["model"] for upload in senders], self.shares(senders))
            prompts = self._prompts_of(model, last - task)
            for name, value in average.items():
                model[name] = model[name].clone()
                model[name][_rows(name, prompts, state.classes[task])] = value
        return replace(state, model=model)

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """Up: prompts of a task and rows of its classes; down: prompts of all tasks and the head; kept: the network with both."""
        size, num_tasks = body_cost(arch).feature_size, -(-num_classes // classes_per_task)
        prompts = self.num_blocks * self.prompts_per_task * (2 + self.prompt_length) * size
        up, down = prompts + classes_per_task * (size + 1), num_tasks * prompts + num_classes * (size + 1)
        kept = model_bytes(arch, num_classes) + FLOAT_BYTES * num_tasks * prompts
        return NominalBytes(FLOAT_BYTES * up, FLOAT_BYTES * down, kept)

    def nominal_passes(self, task: int) -> int:
        return PASSES_LATER if task else PASSES

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """The average: two operations for each value of each site."""
        size = body_cost(setting.arch).feature_size
        prompts = self.num_blocks * self.prompts_per_task * (2 + self.prompt_length) * size
        return 2.0 * setting.turns * (prompts + len(setting.tasks[task].classes) * (size + 1))


def annealed(lr: float, epoch: int, epochs: int) -> float:
    """The learning rate of an epoch, counted from 0: lr cos(0.99 pi/2 epoch / (epochs - 1)), as in the official code.

    >>> [round(annealed(1.0, epoch, 3), 3) for epoch in range(3)], annealed(1.0, 0, 1)
    ([1.0, 0.713, 0.016], 1.0)
    """
    return lr * math.cos(0.99 * math.pi / 2 * epoch / max(epochs - 1, 1))


def joined(first: PromptPool, second: PromptPool) -> PromptPool:
    """The prompts of both, those of ``first`` before."""
    return PromptPool(*(torch.cat(parts, dim=1) for parts in zip(first, second, strict=True)))


def _pool(state: Mapping[str, Tensor]) -> PromptPool:
    pool = pool_of(state)
    assert pool is not None
    return pool


def _rows(name: str, prompts: slice, classes: Sequence[int]) -> Any:
    """Where in the tensor of this name the prompts, or the head's rows of the classes, stand."""
    return list(classes) if name in HEAD else (slice(None), prompts)


def _refusal(arch: Arch, state: Mapping[str, Tensor]) -> str:
    """Why prompts cannot stand in front of the tokens of this network; empty if they can. It is tried on one empty image."""
    net = arch.restore({name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}).eval()
    width, size = state[attention_weights(state)[0]].shape[1], net.feature_size
    pool = PromptPool(torch.zeros(1, 1, size), torch.zeros(1, 1, size), torch.zeros(1, 1, 2, width))
    image = torch.zeros(1, arch.channels, arch.image_size, arch.image_size)
    try:
        with torch.no_grad():
            prompted_features(net.body, image, torch.zeros(1, size), pool)
    except Exception as error:  # of a network of the user's own
        return f"prompts cannot stand in front of its tokens: {str(error).partition(chr(10))[0]}"
    return ""
