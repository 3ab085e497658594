"""FedCBDR (Qi et al., NeurIPS 2025): clients keep exemplars chosen by leverage scores and train with task-aware temperatures.

each round of task t:
    server: broadcast theta
    client: E epochs of SGD on D_t + exemplars, with temperatures and weights for old and new (Eq. 7); send theta_k, n_k
    server: theta <- sum_k (n_k / sum n) theta_k
end of task t, all clients:
    server: send theta and the seed of Q
    client: X_k = phi(D_t); send P_k X_k Q, or its second moments, on which P_k has no effect
    server: thin SVD of all of them together -> U'_k back to client k, or the inverse second moments to everybody
    client: leverage of each image with P_k undone; draw images of each class without replacement, p ~ leverage; keep them
    budget_scope=share: nothing is sent; every client draws as many of all D_t, independently, by the leverage of X_k alone
    behind a privacy mechanism nothing of this is sent: a client keeps each image with the same public chance
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import VERMILLION
from rescene.core.record import Tree, record
from rescene.core.rng import Rng, seeded_generator
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.balance import grouped_cross_entropy, image_temperature_cross_entropy, task_aware_logits
from rescene.functional.exemplars import (
    Cut,
    class_cut,
    draw_keys,
    form_leverage,
    gram_inverse,
    importance_weights,
    independent_draws,
    left_vectors,
    random_orthogonal,
    row_leverage,
)
from rescene.methods.averaging import AveragingMethod, refuse_twice, trained
from rescene.methods.base import Client, Federation, ModelState, Payload, Uploads
from rescene.methods.nominal_cost import NominalReplay, Setting, image_bytes
from rescene.methods.registry import register
from rescene.methods.upload_schema import MOST, NOTHING, Dim, Form, Place, both, either, fields, labels, tensor
from rescene.nets import Arch, body_cost
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.training import Batch, embed, repeatable, with_replay


@record
class Memory:
    """What a client remembers: its exemplars of finished tasks. ``desk`` holds the selection in progress, else nothing."""

    pixels: Tensor  # uint8 [m, 3, H, W]
    labels: Tensor  # int64 [m]
    weights: Tensor  # float32 [m], factors of the loss; all 1 unless `reweight`
    desk: dict[str, Tree]
    last_task: int = -1  # whose images are in it


@register
class FedCBDR(AveragingMethod):
    """FedAvg with exemplars at every site, drawn by leverage scores, and temperatures for old and new classes."""

    name: ClassVar[str] = "fedcbdr"
    title: ClassVar[str] = "FedCBDR"
    colour: ClassVar[str] = VERMILLION
    marker: ClassVar[str] = "X"
    paper: ClassVar[str] = "Qi et al., NeurIPS 2025"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_fedcbdr.py::"
            "test_the_masked_federated_pipeline_gives_the_leverage_of_the_concatenated_features",
            "the leverage of all features together",
        ),
        Verified(
            "hand computation",
            "tests/methods/test_fedcbdr.py::test_one_step_of_a_later_task_by_hand",
            "a step, to rounding",
        ),
    )
    leaves_site: ClassVar[str] = (
        "model weights and the number of images trained on; after each task the rotated second moments of the local "
        "features (form=svd: all features, rotated), and with a budget for all clients each image's label, score and key"
    )
    leaves_in_short: ClassVar[str] = "weights, feature moments"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E (D_loc + D_mem) F + N D_loc F)", "O(R K P + N D_loc d^2)")
    remembers: ClassVar[str] = "real images of finished tasks: up to `budget` (150) of each class"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd", "paper-experiment")
    reuses_records: ClassVar[bool] = True

    budget: int = hyper(150, "-", "App. A", "exemplars kept per class of a finished task, see budget_scope", ge=1)
    budget_scope: Literal["client", "global", "independent", "share"] = hyper(
        "client",
        "-",
        "[App. D.3]",
        "the budget holds on every client; or for all clients together; or for all, as independent draws over the task's images; "
        "or for all, and every client draws an equal share of it",
    )
    old_temperature: float = hyper(0.8, "tau_old", "App. A", "divides the outputs of earlier classes", gt=0)
    new_temperature: float = hyper(1.2, "tau_new", "App. A", "divides the outputs of this task's classes", gt=0)
    temperatures: Literal["classes", "both"] = hyper(
        "classes", "-", "[ours]", "of classes, as in Eq. 7; both: of the image as well, and one mean over the batch"
    )
    old_weight: float = hyper(1.2, "w_old", "App. A", "weight of the exemplars' mean loss", ge=0)
    new_weight: float = hyper(0.8, "w_new", "App. A", "weight of the current images' mean loss", ge=0)
    form: Literal["gram", "svd"] = hyper("gram", "-", "[ours]", "second moments, or features and singular vectors")
    reweight: bool = hyper(False, "-", "[ours]", "weigh each exemplar's loss by sqrt(1 / (n_c p))")

    @model_validator(mode="after")
    def _weights_need_a_draw_of_each_class(self) -> FedCBDR:
        if self.reweight and self.budget_scope == "share":
            raise ValueError("reweight: a share is not drawn class by class; reweight=false, or another budget_scope")
        return self

    @classmethod
    def leaving(cls, mechanism: Mechanism | None) -> str:
        return AveragingMethod.leaves_site if mechanism is not None and mechanism.formal else cls.leaves_site

    @classmethod
    def leaving_in_short(cls, mechanism: Mechanism | None) -> str:
        alone = mechanism is not None and mechanism.formal
        return AveragingMethod.leaves_in_short if alone else super().leaving_in_short(mechanism)

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        memory = _memory(client_state, shard)
        if shard.hidden:
            refuse_twice(memory.last_task, shard.task)
        mixed = with_replay(shard, memory.pixels, memory.labels)
        net = shard.net(payload["model"])
        num_current, task = len(shard), shard.task
        weights = torch.cat([memory.weights.new_ones(num_current), memory.weights])

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            logits = net(batch.x)
            if task.index == 0:
                return F.cross_entropy(logits, batch.y)
            if task.domain is None:  # domains share all outputs: nothing to tell old from new by
                logits = task_aware_logits(logits, min(task.classes), self.old_temperature, self.new_temperature)
            old = batch.index >= num_current  # exemplars, which are all images of old classes (or domains)
            if self.temperatures == "both" and task.domain is None:
                tau, w = (self.old_temperature, self.new_temperature), (self.old_weight, self.new_weight)
                return image_temperature_cross_entropy(logits, batch.y, old, tau, w, weights[batch.index])
            # Eq. 7
            return grouped_cross_entropy(logits, batch.y, old, self.old_weight, self.new_weight, weights[batch.index])

        generator, notes = rng.at("sgd").generator(shard.device), {"replay_size": len(memory.labels)}
        return trained(net, mixed, self.train, generator, loss, notes=notes, counted=self.counted(mixed)), client_state

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        size, images = payload["model"]["head.weight"].shape[1] if "model" in payload else 0, Dim("images", MOST)
        if verb == "share_features" and self.form == "gram":
            moments = both(tensor(torch.float64, size, size), _is_gram, "is no matrix of second moments")
            return either(NOTHING, fields({"moments": moments}))
        if verb == "share_features":
            return either(NOTHING, fields({"features": tensor(torch.float64, images, size)}))
        if verb == "score_images" and self.budget_scope != "client":
            row = tensor(torch.float64, images)
            return fields({"keys": row, "scores": row, "labels": labels(place.task.classes, MOST, images)})
        return super().expects(verb, payload, place)

    def end_task(self, state: ModelState, task: Task, federation: Federation, rng: Rng) -> ModelState:
        """Selection of exemplars on all clients; the model does not change. The server passes Q's seed on, nothing more."""
        if self.budget_scope == "share":
            share = math.ceil(self.budget * len(task.classes) / len(federation.clients))
            federation.ask(federation.clients, "draw_share", {"model": state.model, "share": share})
            return state
        seed = rng.at("rotation").integer()
        asked = federation.ask(federation.clients, "share_features", {"model": state.model, "rotation_seed": seed})
        shared = {client: upload for client, upload in asked.items() if upload}
        if not shared:
            return state
        scored = self._scored(shared, federation)
        if self.budget_scope == "client":
            return state
        keys, scores, labels = (
            torch.cat([upload[name] for upload in scored.values()]) for name in ("keys", "scores", "labels")
        )
        cut = class_cut(keys, scores, labels, self.budget, task.num_seen)
        if self.budget_scope == "global":
            federation.ask(list(scored), "keep_images", {"cut": cut._asdict()})
            return state
        drawn = independent_draws(scores, self.budget * len(task.classes), rng.at("draws").generator())
        parts = torch.split(drawn, [len(upload["scores"]) for upload in scored.values()])
        for client, part in zip(scored, parts, strict=True):
            federation.ask([client], "keep_images", {"cut": cut._asdict(), "drawn": part})
        return state

    def _scored(self, shared: Uploads, federation: Federation) -> Uploads:
        """The clients' answers to ``score_images``, asked with what the shared features amount to."""
        if self.form == "gram":
            moments = torch.stack([upload["moments"] for upload in shared.values()]).sum(dim=0)
            return federation.ask(list(shared), "score_images", {"inverse": gram_inverse(moments)})
        rows = [upload["features"] for upload in shared.values()]
        blocks = torch.split(left_vectors(torch.cat(rows)), [len(block) for block in rows])  # U'_k, client by client
        scored: dict[int, Payload] = {}
        for client, block in zip(shared, blocks, strict=True):
            scored |= federation.ask([client], "score_images", {"left": block})
        return scored

    def share_features(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """X_k Q stays on the desk; what is sent has P_k in front, or is a sum over images."""
        if hidden := shard.hidden:
            return {}, self._kept_blindly(_memory(client_state, shard), shard, hidden)
        x = embed(shard.net(payload["model"]), shard.pictures(shard.index)).double()
        if shard.site is not None:  # App. F.2: "we additionally protect the pseudo-feature representations"
            x = shard.site.noised_rows(x)
        rotated = x @ random_orthogonal(x.shape[1], seeded_generator(payload["rotation_seed"])).to(x.device)
        private_seed = rng.at("private").integer()
        memory = replace(_memory(client_state, shard), desk={"features": rotated, "private_seed": private_seed})
        if self.form == "gram":
            return {"moments": rotated.T @ rotated}, memory  # (P X Q)^T (P X Q) whatever P is
        return {"features": _private_rotation(len(x), private_seed).to(x.device) @ rotated}, memory

    def draw_share(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """A share of the budget, drawn independently by the leverage of the client's own features. Nothing leaves the site."""
        memory = _memory(client_state, shard)
        if hidden := shard.hidden:
            return {}, self._kept_blindly(memory, shard, hidden)
        scores = row_leverage(left_vectors(embed(shard.net(payload["model"]), shard.pictures(shard.index)).double()))
        chosen = independent_draws(scores, payload["share"], rng.at("draws").generator())
        return {}, _with_images(memory, shard, chosen, memory.weights.new_ones(len(shard)))

    def score_images(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Leverage of every local image, and the random key by which it is drawn."""
        features, private_seed = client_state.desk["features"], client_state.desk["private_seed"]
        if self.form == "gram":
            scores = form_leverage(features, payload["inverse"])
        else:
            private = _private_rotation(len(features), private_seed).to(features.device)
            scores = row_leverage(private.T @ payload["left"])  # U_k = P_k^T U'_k: rows are images again
        keys = draw_keys(scores, Rng(private_seed).at("draw").generator())
        memory = replace(client_state, desk={"keys": keys, "scores": scores})
        if self.budget_scope == "client":
            cut = class_cut(keys, scores, shard.labels, self.budget, shard.task.num_seen)
            return {}, self._kept(memory, shard, cut)
        return {"keys": keys, "scores": scores, "labels": shard.labels}, memory

    def keep_images(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """A budget for all clients: the server has found where to cut each class, or has drawn the images itself."""
        return {}, self._kept(client_state, shard, Cut(**payload["cut"]), payload.get("drawn"))

    def _kept_blindly(self, memory: Memory, shard: Client, site: SitePrivacy) -> Memory:
        """Each image on its own with the same public chance: that costs no privacy, and no image makes room for another."""
        chosen = site.noise.chosen(len(shard), min(1.0, self.budget / site.mechanism.typical_count)).to(shard.device)
        return _with_images(memory, shard, chosen, memory.weights.new_ones(len(shard)))

    def _kept(self, memory: Memory, shard: Client, cut: Cut, drawn: Tensor | None = None) -> Memory:
        """The memory with the drawn images, or those above the cut, added, and an empty desk."""
        keys, scores, labels = memory.desk["keys"], memory.desk["scores"], shard.labels
        chosen = keys >= cut.threshold[labels] if drawn is None else drawn
        weights = memory.weights.new_ones(len(labels))
        if self.reweight:
            weights = importance_weights(scores, labels, self.budget, cut).to(weights)
        return _with_images(memory, shard, chosen, weights)

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """So many exemplars of every class."""
        return self.budget * num_classes * image_bytes(arch)

    def nominal_replayed(self, setting: Setting, task: int) -> float:
        return setting.old_classes(task) * self.budget

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """The second moments of all features, 2 n d^2."""
        moments = 2.0 * len(setting.tasks[task].train) * body_cost(setting.arch).feature_size ** 2
        return super().nominal_server_flops(setting, task) + moments

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        each = self.budget * setting.num_classes
        return NominalReplay(self.budget, each, each * setting.num_clients)


def _with_images(memory: Memory, shard: Client, chosen: Tensor, weights: Tensor) -> Memory:
    """The memory with these of the shard's images added, once however often it is asked, and an empty desk."""
    if shard.task.index <= memory.last_task:
        return replace(memory, desk={})
    return Memory(
        pixels=torch.cat([memory.pixels, shard.images.pixels[shard.index[chosen]]]),
        labels=torch.cat([memory.labels, shard.labels[chosen]]),
        weights=torch.cat([memory.weights, weights[chosen]]),
        desk={},
        last_task=shard.task.index,
    )


def _is_gram(moments: Tensor) -> bool:
    return torch.allclose(moments, moments.T, atol=1e-6 * float(moments.abs().max())) and bool(
        (moments.diagonal() >= 0).all()
    )


def _private_rotation(size: int, private_seed: int) -> Tensor:
    """P_k, drawn again from the client's own seed rather than stored."""
    return random_orthogonal(size, Rng(private_seed).at("rotation").generator())


def _memory(client_state: Tree, shard: Client) -> Memory:
    """The client's memory; an empty one if it has none yet (first task, or a client that joined late)."""
    if client_state is not None:
        assert isinstance(client_state, Memory)
        return client_state
    pixels = shard.images.pixels[:0]
    return Memory(pixels, shard.images.labels[:0], torch.zeros(0, device=pixels.device), desk={})
