"""CFeD (Ma et al., IJCAI 2022): some sites learn the new task, others review old ones on unlabelled surrogate pictures.

start of task t > 0:
    server: send the global model, its head grown, to every client, once; it is the teacher
each round:
    server: divide the participants: a share alpha learns, the rest reviews (in the first task all learn)
    learner:  E epochs of SGD on its images, cross-entropy; send theta_k
    reviewer: E epochs of SGD on surrogate pictures, KD(student, teacher) over all outputs; send theta_k
    server: theta' <- the mean of all theta_k
            each surrogate picture has one teacher in turn, of all theta_k and the theta of the last round;
            E epochs of SGD on surrogate pictures from theta', KD(student, that teacher) over all outputs; theta <- the result

Surrogate pictures are drawn, not collected: dead leaves from a seed that everybody knows (``lens/leaves.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import BROWN
from rescene.core.record import Tree, record
from rescene.core.rng import Rng, seeded_generator
from rescene.core.verification import Verified
from rescene.data import Task, Transform
from rescene.functional.distillation import distillation_loss
from rescene.lens.leaves import draw_leaves
from rescene.methods.averaging import PaintingMethod, first_learned, trained
from rescene.methods.base import Client, Federation, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, Setting
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Form, Place
from rescene.nets import Arch, model_bytes
from rescene.training import Batch, class_scores, fit, repeatable


@record
class ServerState:
    """The server's state: the model, and the side of the sites' pictures in pixels (0 where nobody needs it)."""

    model: Model
    image_size: int
    notes: dict[str, float]


@register
class CFeD(PaintingMethod):
    """FedAvg in which some sites review old tasks on public pictures, and the server distils the sites' models on them."""

    name: ClassVar[str] = "cfed"
    title: ClassVar[str] = "CFeD"
    colour: ClassVar[str] = BROWN
    marker: ClassVar[str] = ">"
    paper: ClassVar[str] = "Ma et al., IJCAI 2022"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_cfed.py::test_one_review_step_equals_the_formula",
            "1e-4, a step of a site that reviews",
        ),
    )
    leaves_site: ClassVar[str] = "model weights and the number of pictures they learned from"
    leaves_in_short: ClassVar[str] = "weights"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E (D_loc + D_sur) F)", "O(R K P + R E D_sur F)")
    remembers: ClassVar[str] = "the global model of the previous task, as a teacher"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd", "paper-experiment")

    num_surrogates: int = hyper(300, "|X_s|", "[CFeD Sec. 5.1]", "surrogate pictures of a site and of the server", ge=2)
    surrogate_seed: int = hyper(0, "-", "[ours]", "public seed of the surrogate pictures", ge=0)
    learners: float = hyper(
        0.6,
        "alpha",
        "[public code]",
        "share of a round's participants that learn the new task, at least one",
        gt=0,
        le=1,
    )
    kd_temperature: float = hyper(2.0, "T", "[CFeD Sec. 5.1]", "temperature of both softmaxes of a distillation", gt=0)
    kd_weight: float = hyper(1.0, "-", "[ours]", "weight of a distillation, which is a loss of its own", gt=0)
    server_distillation: bool = hyper(True, "-", "[CFeD Sec. 4.3]", "distil the sites' models on the server each round")
    statistics: Literal["running", "batch"] = hyper(
        "running", "-", "[ours]", "what BatchNorm uses for surrogate pictures: what images left there, or their own"
    )
    local_ce: Literal["all", "new"] = hyper(
        "all", "-", "[public code]", "cross-entropy over all seen classes, or this task's only"
    )
    weighting: Literal["size", "uniform"] = hyper(
        "uniform", "n_k", "[public code]", "weight of a client: equal, or the pictures it learned from"
    )

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        return ServerState(model=weights_of(net), image_size=0, notes={})

    def begin_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        if self.server_distillation and not state.image_size:
            state = replace(state, image_size=self.asked_size(federation))
        grown: ServerState = super().begin_task(state, task, federation, rng)
        if task.index > 0:  # its new outputs are untrained: reviewers hold them back as they hold old ones up
            federation.ask(federation.clients, "keep_teacher", {"teacher": grown.model})
        return grown

    def keep_teacher(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: store the global model of the finished task as the teacher of the next one."""
        return {}, {"teacher": payload["teacher"]}

    def broadcast(self, state: ServerState, round: int, federation: Federation, rng: Rng) -> Payload:
        return {}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Nothing yet: the server says below who learns and who reviews."""
        return {}, client_state

    def server_round(
        self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ServerState:
        learners, reviewers = self._divided(federation, rng.at("roles"))
        answers = dict(federation.ask(learners, "learn", {"model": state.model}))
        if reviewers:
            answers |= federation.ask(reviewers, "review", {"model": state.model}, late=True)
        answers = {client: answers[client] for client in sorted(answers)}
        averaged: ServerState = super().server_round(state, answers, round, federation, rng)
        told = _mean_notes(answers) | {"num_reviewers": float(len(reviewers))}
        models = [answer["model"] for answer in answers.values() if "model" in answer]
        if not self.server_distillation or not models:
            return replace(averaged, notes=told)
        model, told["distillation_loss"] = self._distilled(
            averaged, [*models, state.model], federation, rng.at("distil")
        )
        return replace(averaged, model=model, notes=told)

    def _divided(self, federation: Federation, rng: Rng) -> tuple[list[int], list[int]]:
        """Who learns and who reviews, each in ascending order."""
        everybody = sorted(federation.participants)
        if federation.task.index == 0:
            return everybody, []
        drawn = torch.randperm(len(everybody), generator=rng.generator()).tolist()
        chosen = set(drawn[: self._num_learners(len(everybody))])
        learn = [client for i, client in enumerate(everybody) if i in chosen]
        return learn, [client for client in everybody if client not in learn]

    def _num_learners(self, num_participants: int) -> int:
        return max(1, round(self.learners * num_participants))

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb == "client_round":
            return NOTHING
        return super().expects("client_round" if verb in ("learn", "review") else verb, payload, place)

    def learn(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: train on its images of the task, as in FedAvg."""
        first = first_learned(shard.task, self.local_ce)
        generator = rng.at("sgd").generator(shard.device)
        return trained(shard.net(payload["model"]), shard, self.train, generator, first_class=first), client_state

    def review(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: distil the teacher on surrogate pictures; no image of its own is looked at."""
        if client_state is None:  # joined late: nothing to review
            return {"num_images": 0}, client_state
        pictures = self._surrogates(shard.images.pixels.shape[-1], shard.transform, shard.device)
        answers = class_scores(shard.net(client_state["teacher"]), pictures)
        net = shard.net(payload["model"])
        final = self._distil(net, pictures, answers, rng.at("sgd").generator(shard.device))
        answer = {"model": weights_of(net), "num_images": 1 if shard.hidden else len(pictures)}
        return answer | ({} if shard.site is not None else {"notes": {"review_loss": final}}), client_state

    def _distilled(
        self, state: ServerState, teachers: Sequence[Model], federation: Federation, rng: Rng
    ) -> tuple[Model, float]:
        """The averaged model after it has heard one teacher on each surrogate picture, and its last loss."""
        pictures = self._surrogates(state.image_size, federation.transform, federation.device)
        net = federation.net(state.model)
        answers = pictures.new_zeros(len(pictures), len(state.model["head.weight"]))
        for turn, teacher in enumerate(teachers[: len(pictures)]):
            answers[turn :: len(teachers)] = class_scores(federation.net(teacher), pictures[turn :: len(teachers)])
        loss = self._distil(net, pictures, answers, rng.generator(federation.device))
        return weights_of(net), loss

    def _surrogates(self, image_size: int, transform: Transform, device: torch.device) -> Tensor:
        """The public pictures as the network sees them: [n, 3, s, s]; grey where the data have no colour."""
        x = transform.normalise(drawn_pictures(self.num_surrogates, image_size, self.surrogate_seed).to(device))
        return transform.possible(x)

    def _distil(self, net: nn.Module, pictures: Tensor, answers: Tensor, generator: torch.Generator) -> float:
        """E epochs of SGD on KD(net, answers), in place; returns the last mean loss."""

        def plan() -> Tensor:
            return torch.randperm(len(pictures), generator=generator, device=generator.device).to(pictures.device)

        def fetch(index: Tensor) -> Batch:
            return Batch(pictures[index], torch.zeros_like(index), index)

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            net.train(self.statistics == "batch" and len(batch.x) > 1)
            return self.kd_weight * distillation_loss(net(batch.x), answers[batch.index], self.kd_temperature)

        return fit(net, plan, fetch, loss, self.train, epochs=self.train.local_epochs)

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """The teacher; surrogate pictures are drawn from their seed."""
        return model_bytes(arch, num_classes)

    def nominal_client_flops(self, setting: Setting) -> float:
        """R E D_loc training passes of a learner; for a reviewer R times the teacher's answers and E training passes."""
        epochs, learning, reviewing = setting.train.local_epochs, 0.0, 0.0
        for t in range(len(setting.tasks)):
            num = self._num_learners(setting.per_round) if t else setting.per_round
            learning += num * setting.local_images(t) * epochs * TRAINING_PASSES
            reviewing += (setting.per_round - num) * self.num_surrogates * (1 + epochs * TRAINING_PASSES)
        return setting.num_rounds * (learning + reviewing) * setting.forward

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """And each round one answer to every surrogate picture and E epochs on them."""
        passes = setting.num_rounds * self.num_surrogates * (1 + setting.train.local_epochs * TRAINING_PASSES)
        return super().nominal_server_flops(setting, task) + self.server_distillation * passes * setting.forward


@lru_cache(maxsize=2)
def drawn_pictures(num: int, image_size: int, seed: int) -> Tensor:
    """Surrogate pictures uint8 [num, 3, s, s], the same for everybody who knows the seed.

    >>> drawn_pictures(2, 8, 0).shape
    torch.Size([2, 3, 8, 8])
    """
    return draw_leaves(num, seeded_generator(seed), image_size)


def _mean_notes(answers: Mapping[int, Payload]) -> dict[str, float]:
    """The mean of each number that sites tell about their training."""
    told: dict[str, list[float]] = {}
    for answer in answers.values():
        for key, value in answer.get("notes", {}).items():
            told.setdefault(key, []).append(float(value))
    return {key: sum(values) / len(values) for key, values in told.items()}
