"""FedAF (Wang et al., CVPR 2024): condensed uploads that know of the other sites; no averaging of models. Forgets like FedDM.

each round, first exchange:
    server: broadcast theta and the noise seed of the round; everybody makes the same theta~ = gamma theta + (1-gamma) noise
    client: V_kc, mean logits of its real images of class c under theta~; send them
    server: V_c <- mean over the owners of class c
second exchange:
    server: broadcast V
    client: condense each class under theta~ with ||mean phi(S_c) - mean phi(D_c)||^2 + lambda_cdc SWD(mean f(S_c), V_c);
            R_kc, mean softmax(f / tau) of its real images under theta; send surrogates and R_k
    server: R_c <- mean over the owners; train theta for E_srv epochs on this round's surrogates only with
            CE + lambda_lgkm 1/2 sum_c [KL(R_c || T_c) + KL(T_c || R_c)], T_c over the surrogates of class c in the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import YELLOW
from rescene.core.record import Tree
from rescene.core.rng import Rng, seeded_generator
from rescene.core.verification import Verified
from rescene.data.images import Shard
from rescene.functional import group_means, perturbed
from rescene.functional.matching import knowledge_matching, mixed, owners_average, sliced_distance
from rescene.methods.base import Client, Federation, Model, ModelState, Payload, Uploads, weights_of
from rescene.methods.registry import register
from rescene.methods.surrogates import SurrogateMethod, gathered, surrogates_of
from rescene.methods.upload_schema import LARGEST, Dim, Form, Place, both, fields, labels, notes, pictures, tensor
from rescene.training import Batch, Surrogates, class_scores, cross_entropy, fit_pool
from rescene.training.condensation import Move, Term, condense
from rescene.training.sgd import Loss


@register
class FedAF(SurrogateMethod):
    """Aggregation-free learning: sites condense with shared class logits, and the server trains on this round's images."""

    name: ClassVar[str] = "fedaf"
    title: ClassVar[str] = "FedAF"
    colour: ClassVar[str] = YELLOW
    marker: ClassVar[str] = ">"
    open_ended: ClassVar[bool] = True
    paper: ClassVar[str] = "Wang et al., CVPR 2024"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "paper figure",
            "results/cifar10/fedaf-beta0.5-s0",
            "AA 17.66 against 17.70 (n = 1; server augmentation, n // 2 surrogates)",
        ),
        Verified(
            "hand computation",
            "tests/methods/test_fedaf_mathematics.py::test_knowledge_matching_is_half_of_both_divergences",
            "to rounding",
        ),
    )
    compute: ClassVar[tuple[str, str] | None] = (
        "O(R K (S IPC |C_t| + D_loc) F) [ours: not in the paper's table]",
        "O(R E_srv |S_r| F) [ours: not in the paper's table]",
    )
    leaves_site: ClassVar[str] = (
        "a few condensed images per class with their labels, near-copies of real images by default; for each class the "
        "number of local images, their mean logits and their mean soft label"
    )
    leaves_in_short: ClassVar[str] = "condensed images, mean logits"
    remembers: ClassVar[str] = "nothing between rounds; the received model between the two exchanges of a round"

    mechanisms: ClassVar[tuple[str, ...]] = ("none",)  # counts, mean logits and soft labels leave the site too

    cdc_weight: float = hyper(1e-4, "lambda_cdc", "App. A", "weight of the distance to the mean logits of all", ge=0)
    lgkm_weight: float = hyper(0.01, "lambda_lgkm", "App. A", "weight of knowledge matching on the server", ge=0)
    temperature: float = hyper(2.0, "tau", "App. A", "temperature of the soft labels", gt=0)
    mixing: float = hyper(0.9, "gamma", "App. A", "share of theta in the model to condense under", ge=0, le=1)
    perturbation: Literal["mix", "ball"] = hyper(
        "mix", "-", "[ours]", "condense under mixed weights, or within radius rho as FedDM does"
    )
    draw: Literal["round", "step"] = hyper("round", "-", "[ours]", "noise drawn once per round or for every step")
    match_logits: bool = hyper(False, "-", "[ours]", "match mean local logits too; FedAF leaves logits to SWD")
    soft_labels: Literal["real", "condensed"] = hyper(
        "real", "R_kc", "[ours]", "images that the soft labels are the mean of"
    )
    weighting: Literal["size", "uniform"] = hyper(
        "size", "n_kc", "[ours]", "weight of an owner in V_c and R_c: its images of the class, or equal"
    )

    def broadcast(self, state: ModelState, round: int, federation: Federation, rng: Rng) -> Payload:
        """The first exchange, and what the second one begins with. With lambda_cdc = 0 nobody needs V: one exchange."""
        opening = super().broadcast(state, round, federation, rng)
        answers = federation.ask(federation.participants, "class_logits", opening) if self.cdc_weight else {}
        if not answers:
            return opening
        labels, rows = _over_owners([answer["class_logits"] for answer in answers.values()])
        return {"noise_seed": opening["noise_seed"], "labels": labels, "class_logits": rows}

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb == "class_logits":
            return fields({"class_logits": _class_rows(place)})
        if self.lgkm_weight == 0:
            return super().expects(verb, payload, place)
        sums = lambda soft: bool(((soft["rows"].sum(dim=1) - 1).abs() < 1e-3).all())  # noqa: E731
        soft = both(_class_rows(place, low=0.0, high=1.0), sums, "is not made of probabilities")
        return fields(pictures(place, self.ipc) | {"notes": notes, "soft_labels": soft})

    def class_logits(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """First exchange: V_kc under theta~. The model is kept for the second one, so that it travels once."""
        net = shard.net(self._moved(payload["model"], shard, payload["noise_seed"]))
        return {"class_logits": self._class_means(_scores(net, shard), shard.labels)}, dict(payload)

    def client_round_batched(
        self, payload: Payload, shards: Sequence[Client], client_states: Sequence[Tree], rngs: Sequence[Rng]
    ) -> list[tuple[Payload, Tree]]:
        """Second exchange. A client forgets the model afterwards."""
        model, seed = _received(payload, client_states), payload["noise_seed"]
        once = self.draw == "round"  # then every step uses the very model of the first exchange
        net = shards[0].net(self._moved(model, shards[0], seed) if once else model)
        move: Move = (lambda theta, noise: theta) if once else self._perturbed
        term = self._term(payload)

        def plainly(net: nn.Module, shards: Sequence[Shard], rngs: Sequence[Rng], noise_seed: int) -> list[Surrogates]:
            return condense(net, shards, rngs, self, noise_seed, move=move, term=term)

        made = surrogates_of(net, shards, rngs, self, seed, plainly)
        plain = shards[0].net(model)
        return [(self._upload(plain, shard, own), None) for shard, own in zip(shards, made, strict=True)]

    def server_round(
        self, state: ModelState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ModelState:
        pictures = gathered(uploads)
        if pictures is None:
            return state
        images, labels = pictures
        net, loss = federation.net(state.model), self._server_loss(list(uploads.values()))
        generator, num_classes = rng.at("sgd").generator(federation.device), federation.task.num_seen
        settings, transform = self.server_training, federation.transform
        final = fit_pool(net, images, labels, transform, settings, generator, num_classes=num_classes, loss=loss)
        return replace(state, model=weights_of(net), notes={"server_loss": final, "pool_size": len(labels)})

    def _perturbed(self, theta: Sequence[Tensor], noise: torch.Generator) -> list[Tensor]:
        return mixed(theta, self.mixing, noise) if self.perturbation == "mix" else perturbed(theta, self.radius, noise)

    def _moved(self, model: Model, shard: Client, noise_seed: int) -> Model:
        """theta~ as a model: the first draw of the round's seed. Running statistics are not parameters and stay."""
        names, theta = zip(*shard.net(model).named_parameters(), strict=True)
        noise = seeded_generator(noise_seed, shard.device)
        return model | dict(zip(names, self._perturbed(theta, noise), strict=True))

    def _class_means(self, values: Tensor, labels: Tensor) -> Payload:
        """Mean row of each class the client owns, and its weight in the average over owners."""
        owned, group, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        weights = counts if self.weighting == "size" else torch.ones_like(counts)
        return {"labels": owned, "weights": weights, "rows": group_means(values, group, len(owned))}

    def _term(self, payload: Payload) -> Term | None:
        """lambda_cdc SWD(mean f(S_c), V_c) of each group; None if V was not asked for."""
        if "class_logits" not in payload:
            return None
        v, _ = _table(payload["labels"], payload["class_logits"])
        return lambda means, labels: self.cdc_weight * sliced_distance(means, v[labels])

    def _upload(self, net: nn.Module, shard: Client, own: Surrogates) -> Payload:
        """The surrogates, and R_kc under theta unless the server has no use for it."""
        if self.lgkm_weight == 0:
            return own.as_upload()
        real = self.soft_labels == "real"
        scores, labels = (_scores(net, shard), shard.labels) if real else (class_scores(net, own.images), own.labels)
        soft = self._class_means(F.softmax(scores / self.temperature, dim=1), labels)
        return own.as_upload() | {"soft_labels": soft}

    def _server_loss(self, uploads: Sequence[Payload]) -> Loss:
        """CE + lambda_lgkm sum_c 1/2 [KL(R_c || T_c) + KL(T_c || R_c)] over the classes of the batch."""
        if self.lgkm_weight == 0:
            return cross_entropy
        r, known = _table(*_over_owners([upload["soft_labels"] for upload in uploads]))

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            logits = net(batch.x)
            t = group_means(F.softmax(logits / self.temperature, dim=1), batch.y, len(r))
            present = known & (torch.bincount(batch.y, minlength=len(r)) > 0)
            matching = (knowledge_matching(r, t) * present).sum()
            return F.cross_entropy(logits, batch.y) + self.lgkm_weight * matching

        return loss


def _scores(net: nn.Module, shard: Client) -> Tensor:
    """Logits of all the client's images, in the order of ``shard.labels``."""
    return class_scores(net, shard.images.pixels[shard.index], shard.transform.normalise)


def _class_rows(place: Place, low: float = -LARGEST, high: float = LARGEST) -> Form:
    """Each class of the task at most once, with its weight and its row over all classes seen so far."""
    owned = Dim("owned", len(place.task.classes))
    return fields(
        {
            "labels": labels(place.task.classes, 1, owned),
            "weights": tensor(torch.int64, owned, low=1),
            "rows": tensor(torch.float32, owned, place.task.num_seen, low=low, high=high),
        }
    )


def _received(payload: Payload, client_states: Sequence[Tree]) -> Model:
    """The round's model: in the payload if it is the only exchange, else kept by everybody since the first."""
    kept = client_states if "model" not in payload else [payload]
    if any(state is None or state["noise_seed"] != payload["noise_seed"] for state in kept):
        raise LookupError("this site missed the first exchange of the round")
    model: Model = kept[0]["model"]
    return model


def _over_owners(parts: Sequence[Payload]) -> tuple[Tensor, Tensor]:
    """The clients' class means averaged: labels that anybody owns [m], rows [m, C]."""
    labels, rows, weights = (torch.cat([part[key] for part in parts]) for key in ("labels", "rows", "weights"))
    return owners_average(labels, rows, weights)


def _table(labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [m, C] at their labels in a table [C, C], zero elsewhere, and which labels have one [C]."""
    size = rows.shape[1]
    known = torch.zeros(size, dtype=torch.bool, device=rows.device).index_fill(0, labels, True)
    return rows.new_zeros(size, size).index_copy(0, labels, rows), known
