"""FedCIL (Qi, Zhao and Li, ICLR 2023): every site trains a GAN that also classifies; its generator paints old classes later.

The critic of the GAN (AC-GAN) is the model theta with its class head, and one more score r on the same features: real or painted.

each round of task t:
    server: broadcast theta, r and the generator G
    client: G_past <- its own generator when it last took part in an earlier task, none in its first
            E epochs, in each step:
              theta, r: w (L_real(x, y) + L_fake(G)) + (1 - w) (L_real(G_past) + L_fake(G))
                        + w_con (consistency of the classes on x and on pictures of its own and of the server's generator)
              G:        L_real(G)                                                        (functional/image_losses.py)
            send theta_k, r_k, G_k, n_k and the labels that it holds
    server: theta, r, G <- sum_k (n_k / sum n) of the sites'
            consolidation, S_con steps like a site's, where pictures of all G_k (and of all G_past,k) stand for real ones
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import SKY, UploadKind
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task, Transform
from rescene.functional import weighted_average
from rescene.functional.distillation import distillation_loss
from rescene.functional.image_losses import agreement_loss, balanced_picks
from rescene.methods.averaging import PaintingMethod
from rescene.methods.base import Client, Federation, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalBytes, NominalReplay, Setting
from rescene.methods.registry import register
from rescene.methods.upload_schema import Dim, Form, Place, either, fields, labels, like, notes, whole
from rescene.nets import FLOAT_BYTES, Arch, body_cost, laps, model_bytes, real_side
from rescene.training import Batch, Loss, fit_shard
from rescene.training.generator import (
    fresh_generator,
    generator_flops,
    generator_parameters,
    grow_inputs,
    restored_generator,
)
from rescene.training.generator_training import AdversarialSteps, AdversarialTraining, Gan, Painter, check_finite

PARTS = ("model", "realness", "generator")  # of a GAN
Consistency = Callable[[Tensor, Tensor], Tensor]  # class logits of real images, their labels -> loss
Sampled = Sequence[tuple[Painter, Sequence[int]]]  # painters, and the classes that each of them can paint


@record
class SiteGenerators:
    """What one site's generators can paint; the site keeps it, and the server the same from the site's uploads."""

    task: int  # in which the site last took part
    generator: Model  # as it was after that
    classes: list[int]  # that the site held in that task
    past_generator: Model | None  # of the last task before that one
    past_classes: list[int]  # of all tasks before


@record
class ServerState:
    """The server's state: the GAN in three parts, and the generators that sites sent."""

    model: Model  # theta: the critic's body and its class head, the model that answers
    realness: Model  # r
    generator: Model | None  # G
    image_size: int  # side of the sites' pictures in pixels
    sites: dict[str, SiteGenerators]
    notes: dict[str, float]


@register
class FedCIL(AdversarialTraining, PaintingMethod):
    """A GAN with a class head at every site: its generator replays old classes, and consolidates the average on the server."""

    name: ClassVar[str] = "fedcil"
    title: ClassVar[str] = "FedCIL"
    colour: ClassVar[str] = SKY
    marker: ClassVar[str] = "X"
    paper: ClassVar[str] = "Qi, Zhao and Li, ICLR 2023"
    leaves_site: ClassVar[str] = (
        "weights of the model and of a generator that paints pictures like the site's, the labels it holds, "
        "and the number of local images"
    )
    leaves_in_short: ClassVar[str] = "weights, image generator"
    uploads: ClassVar[UploadKind] = "generator"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F)", "O(R S_con (K + B_syn) F)")
    remembers: ClassVar[str] = "its generators of this task and of the task before"
    unprotected: ClassVar[str] = "each local step also learns from painted images, and no mechanism covers a generator"
    own_orders: ClassVar[bool] = True
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified("published code", "tests/oracles/test_oracles.py::test_fedcil_step_of_a_site", "1e-5, gradients"),
        Verified("published code", "tests/oracles/test_oracles.py::test_fedcil_consistency", "1e-5, the three terms"),
        Verified("published code", "tests/oracles/test_oracles.py::test_fedcil_consolidation", "1e-6, two steps"),
        Verified("hand computation", "tests/methods/test_fedcil.py::test_one_step_equals_the_formula", "1e-4, a step"),
    )

    new_weight: float = hyper(0.5, "w", "official code", "weight of real images beside replayed ones", ge=0, le=1)
    consolidation_steps: int = hyper(
        100, "S_con", "official code", "steps of the server on painted images after each average; 0: none", ge=0
    )
    consistency_weight: float = hyper(
        1.0, "w_con", "[ours]", "weight of consistency at the sites; the official code multiplies it by 0", ge=0
    )
    consistency: Literal["pictures", "teacher"] = hyper(
        "pictures",
        "-",
        "official code",
        "what should agree on the server's pictures: the site's answers to other pictures, or those of the global model",
    )

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        model = weights_of(net)
        row = torch.empty(1, model["head.weight"].shape[1])
        nn.init.kaiming_uniform_(row, a=5**0.5, generator=rng.at("realness").generator())  # as torch would draw it
        realness = {"weight": row.to(model["head.weight"]), "bias": model["head.weight"].new_zeros(1)}
        return ServerState(model=model, realness=realness, generator=None, image_size=0, sites={}, notes={})

    def begin_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        """Grow the head and the generator's input to all classes seen so far."""
        num_inputs, source = self.latent_size + task.num_seen, rng.at("generator").generator(federation.device)
        if state.generator is None:
            side = self.asked_size(federation)
            generator = weights_of(fresh_generator(num_inputs, self.generator_width, real_side(side), source))
            state = replace(state, generator=generator, image_size=side)
        else:
            state = replace(state, generator=grow_inputs(state.generator, num_inputs, source))
        grown: ServerState = super().begin_task(state, task, federation, rng)
        return grown

    def broadcast(self, state: ServerState, round: int, federation: Federation, rng: Rng) -> Payload:
        """The GAN. In a task's first round nothing need agree with its generator, which has not met the new classes."""
        gan = {"model": state.model, "realness": state.realness, "generator": state.generator}
        return gan | {"is_consistent": round > 0}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        if len(shard) == 0:
            return {"num_images": 0}, client_state
        held, (past, past_classes) = list(shard.by_class()), _before(client_state, shard.task.index)
        known, source = sorted({*held, *past_classes}), rng.at("latents").generator(shard.device)
        side = shard.images.pixels.shape[-1]
        gan = self._gan(payload, shard.net(payload["model"]), shard.transform, side, source)
        replayed = [] if past is None else [(self._painter(past, shard.transform, side, source), past_classes)]
        loss = self._loss(gan, known, replayed, self._consistency(gan, payload, shard, source))
        steps, generator = AdversarialSteps(gan, known, self), rng.at("sgd").generator(shard.device)
        final = fit_shard(gan.net, shard, self.train, generator, loss, optimiser=steps)
        upload = _weights_of(gan) | {
            "labels": torch.tensor(held, device=shard.device),
            "num_images": len(shard),
            "notes": {"local_loss": final},
        }
        return upload, _after(client_state, shard.task.index, upload["generator"], held)

    def _painter(self, weights: Model, transform: Transform, side: int, source: torch.Generator) -> Painter:
        """The generator with these weights, which stays as it is."""
        size = (weights["first.weight"].shape[1], self.generator_width, real_side(side))
        generator = restored_generator(weights, *size)
        return Painter(generator, self.latent_size, transform, side, bool(self.train.augment), source)

    def _gan(self, parts: Payload, net: nn.Module, transform: Transform, side: int, source: torch.Generator) -> Gan:
        """The GAN with (a copy of) these weights, ready to learn."""
        painter = self._painter(parts["generator"], transform, side, source)
        painter.generator.train().requires_grad_(True)
        realness = nn.utils.skip_init(nn.Linear, parts["realness"]["weight"].shape[1], 1, device=source.device)
        realness.load_state_dict(parts["realness"])
        return Gan(net, realness, painter)

    def _loss(self, gan: Gan, known: Sequence[int], replayed: Sampled, consistency: Consistency | None) -> Loss:
        """The critic's loss at a site; ``replayed`` is empty in its first task."""

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            value, logits = gan.critic_loss(batch.x, batch.y, known, self.synthetic_batch)
            for painter, classes in replayed:
                labels = painter.draw_labels(classes, self.synthetic_batch)
                old, _ = gan.critic_loss(painter.paint(labels), labels, known, self.synthetic_batch)
                value = self.new_weight * value + (1 - self.new_weight) * old
            return value if consistency is None else value + self.consistency_weight * consistency(logits, batch.y)

        return loss

    def _consistency(self, gan: Gan, payload: Payload, shard: Client, source: torch.Generator) -> Consistency | None:
        """What a site's class outputs lose where they do not agree on pictures of the server's generator."""
        if self.consistency_weight == 0 or not payload["is_consistent"]:
            return None
        server = self._painter(payload["generator"], shard.transform, gan.painter.side, source)
        classes = range(shard.task.num_seen)

        if self.consistency == "pictures":
            return lambda logits, y: agreement(gan, server, logits, y, classes, self.synthetic_batch)
        teacher = shard.net(payload["model"]).eval().requires_grad_(False)

        def taught(logits: Tensor, y: Tensor) -> Tensor:
            x = server.paint(server.draw_labels(classes, self.synthetic_batch))
            return distillation_loss(gan.judge(x)[1], teacher(x), temperature=1.0)

        return taught

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb != "client_round":
            return super().expects(verb, payload, place)
        classes = range(place.task.num_seen)
        parts = {key: like(payload[key]) for key in PARTS}
        parts |= {"labels": labels(classes, 1, Dim("classes", len(classes))), "num_images": whole(1)}
        return either(fields({"num_images": whole(0, 0)}), fields(parts, {"notes": notes}))

    def server_round(
        self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ServerState:
        senders = {client: upload for client, upload in uploads.items() if upload["num_images"] > 0}
        if not senders:
            return state
        shares = self.shares(senders.values())
        parts: dict[str, Any] = {
            key: weighted_average([upload[key] for upload in senders.values()], shares) for key in PARTS
        }
        task, sites = federation.task.index, dict(state.sites)
        for client, upload in senders.items():
            sites[str(client)] = _after(sites.get(str(client)), task, upload["generator"], upload["labels"].tolist())
        state = replace(state, sites=sites, **parts)
        if self.consolidation_steps == 0:
            return state
        return self._consolidated(state, [sites[str(client)] for client in senders], federation, rng)

    def _consolidated(
        self, state: ServerState, sites: Sequence[SiteGenerators], federation: Federation, rng: Rng
    ) -> ServerState:
        """The state whose GAN has learned from pictures that the sites' generators paint."""
        source, transform, side = rng.at("latents").generator(federation.device), federation.transform, state.image_size
        parts = {"realness": state.realness, "generator": state.generator}
        gan = self._gan(parts, federation.net(state.model).train(), transform, side, source)
        now = [(self._painter(site.generator, transform, side, source), site.classes) for site in sites]
        past = [
            (self._painter(site.past_generator, transform, side, source), site.past_classes)
            for site in sites
            if site.past_generator is not None
        ]
        seen = range(federation.task.num_seen)
        steps, last = AdversarialSteps(gan, seen, self), torch.zeros(())
        for _ in laps(self.consolidation_steps):
            loss, _ = gan.critic_loss(*self._pooled(now, source), seen, self.synthetic_batch)
            if past:
                old, _ = gan.critic_loss(*self._pooled(past, source), seen, self.synthetic_batch)
                loss = self.new_weight * loss + (1 - self.new_weight) * old
            steps.step(loss)
            last = loss.detach()
        check_finite(float(last))
        return replace(state, notes={"consolidation_loss": float(last)}, **_weights_of(gan))

    def _pooled(self, sampled: Sampled, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """(pictures, labels): a batch of every painter, of which a batch is drawn in which each class is as likely."""
        y = torch.cat([painter.draw_labels(classes, self.synthetic_batch) for painter, classes in sampled])
        x = torch.cat([p.paint(part) for (p, _), part in zip(sampled, y.split(self.synthetic_batch), strict=True)])
        picks = balanced_picks(y, self.synthetic_batch, source)
        return x[picks], y[picks]

    def _generator_size(self, arch: Arch, num_classes: int) -> tuple[int, int, int]:
        return self.latent_size + num_classes, self.generator_width, arch.image_size

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """Both ways: the model, its second output and the generator. A site keeps two generators."""
        generator = FLOAT_BYTES * generator_parameters(*self._generator_size(arch, num_classes))
        model = model_bytes(arch, num_classes) + FLOAT_BYTES * (body_cost(arch).feature_size + 1)
        return NominalBytes(model + generator, model + generator, model + 3 * generator)

    def nominal_client_flops(self, setting: Setting) -> float:
        """Beside each real batch painted ones: for the critic and the generator, for replay, for consistency."""
        painting = generator_flops(*self._generator_size(setting.arch, setting.num_classes))
        shown, passes = TRAINING_PASSES * setting.forward + painting, TRAINING_PASSES * painting - painting
        agree = 0.0 if self.consistency_weight == 0 else 1 - 1 / setting.num_rounds
        more = 3 if self.consistency == "pictures" else 1
        total = 0.0
        for task in range(len(setting.tasks)):
            kinds = 2 + 2 * (task > 0) + more * agree  # for critic and generator; replayed and beside them; to agree on
            total += setting.local_batches(task) * self.synthetic_batch * (kinds * shown + passes)
        return super().nominal_client_flops(setting) + setting.turns * setting.train.local_epochs * total

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """Each step: a batch of every site's generator is painted, one is learned from beside a painted one, and from
        the second task on the same again; then the generator's step."""
        painting = generator_flops(*self._generator_size(setting.arch, setting.num_classes))
        pools = 1 + (task > 0)
        passes = TRAINING_PASSES * setting.forward
        each = pools * (setting.per_round * painting + 2 * passes + painting) + passes + TRAINING_PASSES * painting
        steps = setting.num_rounds * self.consolidation_steps * self.synthetic_batch
        return super().nominal_server_flops(setting, task) + float(steps * each)

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        return NominalReplay(0, 0, 0)  # painted anew in every step


def agreement(gan: Gan, server: Painter, logits: Tensor, y: Tensor, classes: Sequence[int], num: int) -> Tensor:
    """How much the class outputs differ between pictures with the same labels: real ones, own painted ones, the server's.

    ``logits`` are those of real images with labels y; at most ``num`` of them count. Of ``classes``, ``num`` pictures are painted
    by each of the two generators.
    """
    real = agreement_loss(logits[:num], gan.judge(server.paint(y[:num]))[1])
    drawn = server.draw_labels(classes, num)
    theirs, own = (gan.judge(painter.paint(drawn))[1] for painter in (server, gan.painter))
    return real + agreement_loss(own, theirs) + F.cross_entropy(theirs, drawn)


def _before(site: SiteGenerators | None, task: int) -> tuple[Model | None, list[int]]:
    """A site's generator when it last took part in a task before this one, and the classes it had met by then."""
    if site is None:
        return None, []
    if site.task < task:
        return site.generator, sorted({*site.past_classes, *site.classes})
    return site.past_generator, site.past_classes


def _after(site: SiteGenerators | None, task: int, generator: Model, classes: list[int]) -> SiteGenerators:
    """What a site's generators can paint once it has taken part in this task."""
    return SiteGenerators(task, generator, classes, *_before(site, task))


def _weights_of(gan: Gan) -> Payload:
    """The three parts of a GAN as plain tensors."""
    return {
        "model": weights_of(gan.net),
        "realness": weights_of(gan.realness),
        "generator": weights_of(gan.painter.generator),
    }
