"""Moments: sites send sums of features, the server solves for the head. No image leaves a site, and nothing is forgotten.

each round of task t (one is enough; more let late sites in, under a secure sum as ``privacy.late`` says):
    client: for its images that it has not told of yet, features z in whole steps:
            n_c and s_c = sum z for each class, S = sum z z' over all classes; then it is done with them
    server: add up what all sites have ever sent, and solve (linear discriminant analysis):
            W = (S - sum_c n_c m_c m_c') / n,  score_c(z) = m_c' (W + r I)^-1 z - m_c' (W + r I)^-1 m_c / 2

Features are those of the network's frozen body: the identity behind a lens (``model.lens``, ``model.name=linear``). Sums do not
depend on who holds which image or when it came, so the model is the same for every split and every order of tasks.
Behind a mechanism the sums are noised before they leave the site. Neighbours: AFL (He et al. 2025), ACIL (Zhuang et al. 2022)
and FedCGS (Guan et al. 2025) on pretrained networks.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.errors import ResceneWarning, RunError
from rescene.core.hyperparameters import hyper
from rescene.core.method_style import VERMILLION, UploadKind
from rescene.core.record import Tree, num_bytes, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.discriminant import cross_validated_ridge, discriminant_head
from rescene.methods.base import Client, Federation, Kept, LateAnswer, Method, Model, Payload, Uploads, weights_of
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Form, Place, both, either, fields, tensor
from rescene.privacy.feature_sums import (
    LARGEST,
    RADIUS,
    STEPS,
    Grid,
    deviations,
    exact_sums,
    noise_eigenvalue,
    noised_feature_sums,
    norm,
    on_diagonal,
    unpacked,
)
from rescene.privacy.mechanism import Mechanism, digest
from rescene.training import embed

FLOOR = 0.1  # eigenvalues of W below this part of the largest of the noise are raised to it
CERTAIN = 7.0  # deviations of noise that sums of images never exceed: a normal number does once in 10^12 times
EVERYBODY = -1  # in the place of a site's number where a sum over sites came in one piece


@record
class Sums:
    """What one site, or everybody together, has sent so far. ``second`` is the upper triangle of S, row by row."""

    client: int
    counts: Tensor  # [C]
    sums: Tensor  # [C, d]
    second: Tensor  # [d (d + 1) / 2]
    noises: float  # how many times the whole noise of a release is in ``second``; 0 without a mechanism
    class_noises: Tensor  # [C], the same for the rows of counts and sums: a release has those of its task's classes


@record
class MomentsState:
    """The server's state: the model and the sums that every site has sent so far."""

    model: Model
    parts: tuple[Sums, ...]  # by site, ascending
    notes: dict[str, float]
    answered: tuple[int, ...] = ()  # sites whose noised answer of this task is in: they are not asked again


@register
class Moments(Method):
    """Sites send sums of frozen features once a task, and the server solves for the classifier in closed form."""

    name: ClassVar[str] = "moments"
    title: ClassVar[str] = "Moments"
    colour: ClassVar[str] = VERMILLION
    marker: ClassVar[str] = "D"
    uploads: ClassVar[UploadKind] = "sums"
    paper: ClassVar[str] = "[ours] closed-form discriminant on a frozen lens; neighbours: AFL, ACIL, FedCGS"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_method_moments.py::test_the_head_is_the_discriminant_of_the_pooled_images",
            "the head of all images together, to rounding",
        ),
    )
    leaves_site: ClassVar[str] = (
        "for each class a count and a sum of features, and one second moment of all; exact, so only in a simulation"
    )
    leaves_in_short: ClassVar[str] = "feature sums"
    remembers: ClassVar[str] = "which of its images it has told of"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "release")
    open_ended: ClassVar[bool] = True
    own_orders: ClassVar[bool] = True
    late_verbs: ClassVar[tuple[str, ...]] = ("sum_up",)
    additive: ClassVar[bool] = True
    sums_securely: ClassVar[bool] = True

    num_features: int | None = hyper(
        None,
        "d",
        "[ours]",
        "the first so many features of the lens; null: all. Fewer need less noise and fewer bytes",
        ge=1,
    )
    ridge: float | None = hyper(
        None, "r", "[ours]", "in units of the mean variance; null: by generalised cross-validation on the sums", ge=0
    )

    @classmethod
    def leaving(cls, mechanism: Mechanism | None) -> str:
        if mechanism is None:
            return cls.leaves_site
        masked = (
            "; masked, so that the server reads only the sum over sites" if mechanism.honest_sites is not None else ""
        )
        return f"for each class a noised count and a noised sum of features, and one noised second moment{masked}; no image"

    @classmethod
    def leaving_in_short(cls, mechanism: Mechanism | None) -> str:
        return super().leaving_in_short(None) if mechanism is None else "noised sums"

    def init(self, net: nn.Module, rng: Rng) -> MomentsState:
        return MomentsState(model=weights_of(net), parts=(), notes={})

    def begin_task(self, state: MomentsState, task: Task, federation: Federation, rng: Rng) -> MomentsState:
        grown: MomentsState = super().begin_task(state, task, federation, rng)
        return replace(grown, answered=())

    def broadcast(self, state: MomentsState, round: int, federation: Federation, rng: Rng) -> Payload:
        return {}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """The participants of the round are asked for nothing: everybody is, below."""
        return {}, client_state

    def server_round(
        self, state: MomentsState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> MomentsState:
        head = {key: state.model[key][:1] for key in ("head.weight", "head.bias")}  # the site needs the body alone
        question, mechanism = {"model": state.model | head}, federation.mechanism
        waiting = [client for client in federation.clients if client not in state.answered]
        honest = None if mechanism is None else mechanism.honest_sites
        late = bool(state.answered)
        alone = late and mechanism is not None and mechanism.late_alone
        if honest is not None and not alone:
            total = federation.total(waiting, "sum_up", question, late=late)
            answers, heard = {EVERYBODY: total.values}, total.clients
            noises = len(heard) / honest
        else:
            asked = question | {"alone": True} if alone else question
            answers = dict(federation.ask(waiting, "sum_up", asked, late=alone))
            heard, noises = tuple(k for k, answer in answers.items() if "sums" in answer), float(mechanism is not None)
        sent = {client: answer for client, answer in answers.items() if "sums" in answer}
        if not sent:
            _check_learned(state, mechanism, round, federation)
            return state
        classes = federation.task.classes
        new = [
            received(client, answer, tuple(answer.get("classes", classes)), mechanism, noises)
            for client, answer in sent.items()
        ]
        if mechanism is not None:
            place = f"round {round} of task {federation.task.index}"
            new = possible_parts(new, mechanism, classes, place, others=bool(state.parts))
        parts = merged(state.parts, new, federation.task.num_seen)
        answered = (*state.answered, *heard) if mechanism is not None else ()
        return self._solved(replace(state, parts=parts, answered=answered), mechanism)

    def sum_up(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Sums over the images of the task that the site has not told of before.

        It remembers them by their positions, which hold for one task: classes that are added later may move them.
        Behind a mechanism it answers once in a task, with or without images: silence would say that it has none. ``alone``
        asks a site that missed a secure sum for a release with the whole noise.
        """
        answered = client_state is not None and client_state["task"] == shard.task.index
        told = client_state["told"] if client_state else shard.index[:0]
        fresh = shard.index[~torch.isin(shard.index, told)] if answered else shard.index
        state = {"told": torch.cat([told, fresh]), "task": shard.task.index}
        site = shard.site
        if answered if site is not None else not len(fresh):
            return {}, client_state
        net = shard.net(payload["model"])
        z = in_steps(embed(net, shard.images.pixels[fresh], shard.transform.normalise))[:, : self.num_features]
        labels = positions(shard.images.labels[fresh], shard.task.classes)
        if site is None:
            return exact_sums(z, labels, len(shard.task.classes)), state
        site = site.alone() if payload.get("alone") else site
        body = [(name, value) for name, value in weights_of(net).items() if not name.startswith("head.")]
        question = digest(body, "moments", z.shape[1], site.mechanism.honest_sites, site.mechanism)
        found = site.answer(question, lambda: noised_feature_sums(z, labels, len(shard.task.classes), site))
        return ({} if found is None else found), state

    def late(self, answer: LateAnswer, payload: Payload) -> Payload:
        """Sums do not depend on the round: as they are, with the classes that their rows stand for."""
        return answer.upload | {"classes": list(answer.classes)} if answer.upload else answer.upload

    def sent_size(self, kind: Literal["features", "inputs", "outputs"], size: int) -> int:
        return min(size, self.num_features or size) if kind == "features" else size

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb != "sum_up":
            return NOTHING
        d, num = self.sent_size("features", payload["model"]["head.weight"].shape[1]), len(place.task.classes)
        sums = {
            "counts": tensor(torch.int64, num, low=0 if place.mechanism is None else -(2.0**62), high=2.0**62),
            "sums": tensor(torch.int64, num, d, low=-(2.0**62), high=2.0**62),
            "second": tensor(torch.int32, d * (d + 1) // 2),
        }
        exact = both(fields(sums), possible_sums, "holds sums that no images have")
        return either(NOTHING, exact if place.mechanism is None else fields(sums))

    def kept(self, state: MomentsState) -> dict[int, Kept]:
        return {
            part.client: Kept(images_in(part), num_bytes((part.counts, part.sums, part.second))) for part in state.parts
        }

    def forget(
        self, state: MomentsState, client: int, model: Model, num_rounds: int, federation: Federation, rng: Rng
    ) -> MomentsState:
        """Subtraction: the site's part is left out, and the head is solved from the others'."""
        parts = tuple(part for part in state.parts if part.client != client)
        return self._solved(replace(state, parts=parts), federation.mechanism)

    def _solved(self, state: MomentsState, mechanism: Mechanism | None) -> MomentsState:
        """The head from everything that is there."""
        counts, sums, upper = (
            sum(getattr(part, name).double() for part in state.parts) for name in ("counts", "sums", "second")
        )
        d = sums.shape[1]
        sums, second = sums / STEPS, unpacked(upper, d) / STEPS**2
        ridge, floor, noise = self.ridge, 0.0, None
        if mechanism is not None:
            noises = sum(part.noises for part in state.parts)
            floor = FLOOR * noise_eigenvalue(mechanism, d, noises) / max(float(counts.clamp_min(0).sum()), 1.0)
            noise = (
                torch.stack([part.class_noises for part in state.parts]).sum(dim=0)
                * (deviations(mechanism, d)[1] / STEPS) ** 2
            )
            ridge = ridge or 0.0
        elif ridge is None:
            ridge = cross_validated_ridge(counts, sums, second)
        weight, bias = self._head(counts, sums, second, ridge, floor, noise)
        kept = state.model["head.weight"]
        head = {"head.weight": F.pad(weight, (0, kept.shape[1] - d)), "head.bias": bias}
        notes = {"ridge": ridge, "floor": floor, "num_images": float(counts.sum())}
        return replace(state, model=state.model | {key: value.to(kept) for key, value in head.items()}, notes=notes)

    def _head(
        self, counts: Tensor, sums: Tensor, second: Tensor, ridge: float, floor: float, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Weights and biases from the sums: all that the neighbours ``afl`` and ``fedcgs`` do differently."""
        return discriminant_head(counts, sums, second, ridge, floor, noise)


def images_in(part: Sums) -> Counter[tuple[int, int, str]]:
    """How many images of each class a part is made of; behind a mechanism as its noised counts tell."""
    counts = part.counts.double().round().long().tolist()
    return Counter({(-1, label, "sums"): count for label, count in enumerate(counts) if count > 0})


def in_steps(z: Tensor) -> Tensor:
    """Features as whole steps, int8 values as float32 [n, d]; what is not a number becomes 0."""
    return (z.float().nan_to_num() * STEPS).round().clamp(-LARGEST, LARGEST)


def positions(labels: Tensor, classes: tuple[int, ...]) -> Tensor:
    """Labels as positions among the task's classes."""
    place = {label: i for i, label in enumerate(classes)}
    return torch.tensor([place[label] for label in labels.tolist()], dtype=torch.int64, device=labels.device)


def received(
    client: int, answer: Payload, classes: tuple[int, ...], mechanism: Mechanism | None, noises: float
) -> Sums:
    """An answer in steps, with a row for every class up to the last of the task."""
    counts, sums, second = answer["counts"], answer["sums"], answer["second"]
    if mechanism is not None:
        grid = Grid.of(mechanism, sums.shape[1], len(classes))
        counts, sums, second = counts.double() / grid.counts, (sums / grid.sums).float(), (second / grid.second).float()
    index, size = torch.tensor(classes, device=counts.device), max(classes) + 1
    spread_counts = counts.new_zeros(size).index_copy(0, index, counts)
    spread_sums = sums.new_zeros(size, sums.shape[1]).index_copy(0, index, sums)
    spread_noises = torch.zeros(size, dtype=torch.float64, device=counts.device).index_fill(0, index, noises)
    return Sums(client, spread_counts, spread_sums, second, noises, spread_noises)


def merged(old: tuple[Sums, ...], new: list[Sums], num_classes: int) -> tuple[Sums, ...]:
    """What each site has sent in all, ascending by site, with ``num_classes`` rows."""
    parts = {part.client: part for part in old}
    for part in new:
        mine = parts.get(part.client)
        parts[part.client] = part if mine is None else added(mine, part)
    return tuple(widened(part, num_classes) for _, part in sorted(parts.items()))


def added(a: Sums, b: Sums) -> Sums:
    """The sum of two sums; the one with fewer classes is filled up with zeros."""
    size = max(len(a.counts), len(b.counts))
    a, b = widened(a, size), widened(b, size)
    return Sums(
        a.client,
        a.counts + b.counts,
        a.sums + b.sums,
        a.second + b.second,
        a.noises + b.noises,
        a.class_noises + b.class_noises,
    )


def widened(part: Sums, size: int) -> Sums:
    """With a row for each of so many classes."""
    counts, sums, noises = (padded(rows, size) for rows in (part.counts, part.sums, part.class_noises))
    return replace(part, counts=counts, sums=sums, class_noises=noises)


def padded(rows: Tensor, size: int) -> Tensor:
    """The rows, filled up with zero rows to ``size``."""
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


def _check_learned(state: MomentsState, mechanism: Mechanism | None, round: int, federation: Federation) -> None:
    """Stop before a task ends of which no site has sent anything: its classes would be guessed (E377)."""
    if mechanism is not None and not state.answered and round + 1 >= federation.num_rounds:
        raise RunError(
            "E377",
            f"no site has sent its sums of task {federation.task.index + 1}",
            why="every site declined, or was not there; events.jsonl and `rescene deploy status` say why",
            fix="change the floors (privacy: in site.yaml) or the noise, then the same command: the run goes on with this round",
        )


def possible_sums(answer: dict[str, Any]) -> bool:
    """Whether images can have these sums: no feature exceeds 127 steps, and a square is not negative."""
    counts, sums, second = answer["counts"], answer["sums"], answer["second"]
    n, d = int(counts.sum()), sums.shape[1]
    squares = second[on_diagonal(d, second.device)]
    return (
        bool((sums.abs() <= LARGEST * counts[:, None]).all())
        and bool((second.abs() <= LARGEST**2 * n).all())
        and bool((squares >= 0).all())
    )


def possible_parts(parts: list[Sums], m: Mechanism, classes: tuple[int, ...], place: str, others: bool) -> list[Sums]:
    """Those that images can have sent. The rest are left out with a warning; if then nothing is there at all, the run stops.

    In a secure sum nobody can say which site sent wrong numbers, so the whole sum is left out.
    """
    kept = []
    for part in parts:
        why = impossible(part, m, classes)
        if not why:
            kept.append(part)
            continue
        whose = "the secure sum over sites" if part.client == EVERYBODY else f"what site {part.client} sent"
        warnings.warn(ResceneWarning("W446", f"{whose} in {place} is left out: no images have it; {why}"), stacklevel=3)
    if parts and not kept and not others:
        raise RunError(
            "E446",
            f"no sum is left to learn from: images cannot have the sums that came in {place}",
            where="method moments",
            why="a site sent wrong numbers; in a secure sum nobody can see which one",
            fix="leave sites out (federation.exclude) until it fits; the warnings (W446) say which bound was broken",
        )
    return kept


def impossible(part: Sums, m: Mechanism, classes: tuple[int, ...]) -> str:
    """The bound that noised sums of one task break though every set of images keeps it; "" if they keep all.

    An image has norm R at most. So no count n_c is negative, and tr S <= R^2 n. Along any direction u the images have
    u'S u >= (u's)^2 / n, where s is the sum over all classes; u is taken along the noised s, which knows nothing of the noise
    on S. Each bound has room for CERTAIN deviations of the noise. Honest sums break one with a probability below 10^-10 for ten
    classes. Only released numbers are read, so nothing is charged.
    """
    index, root = torch.tensor(classes, device=part.counts.device), math.sqrt(part.noises)
    counts, sums, second = part.counts[index].double(), part.sums[index].double(), part.second.double()
    d, num = sums.shape[1], len(classes)
    radius = RADIUS * norm(d)
    of_count, of_sum, of_square = (root * deviation for deviation in deviations(m, d))
    most, n = CERTAIN * math.sqrt(num) * of_count, float(counts.sum())
    if float(counts.min()) < -CERTAIN * of_count or n < -most:
        return f"a count is {min(float(counts.min()), n):.0f}, with noise of deviation {of_count:.0f}"
    trace = float(second[on_diagonal(d, second.device)].sum()) / radius**2
    spread = math.hypot(math.sqrt(d) * of_square / radius**2, math.sqrt(num) * of_count)
    if trace > n + CERTAIN * spread:
        return (
            f"the squares of {n:.0f} images add up to {trace:.0f} of the largest, with noise of deviation {spread:.0f}"
        )
    s = sums.sum(dim=0)
    length = float(s.norm())
    least = max(length - math.sqrt(num) * of_sum * (math.sqrt(d) + CERTAIN), 0.0) ** 2 / max(n + most, 1e-12)
    along = float(s @ unpacked(second, d) @ s) / max(length, 1e-12) ** 2
    if along < least - CERTAIN * of_square:
        found, wanted = along / radius**2, least / radius**2
        return f"along their mean the squares are {found:.0f}, at least {wanted:.0f} with noise of {of_square / radius**2:.0f}"
    return ""
