"""DP-SGD at a site (Abadi et al., CCS 2016): local training of which only noised sums of clipped gradients reach the weights.

at each of E / q steps (E epochs in expectation):
    each record of the site enters with probability q               Poisson sampling, from the site's own entropy
    g <- sum of clip_C(grad of the record's loss) + N(0, sigma^2 C^2 I)
    SGD with g / (q x typical count x classes of the task)          the true number of records is private

Weight decay, momentum and a method's penalty on weights act after the noise: they see no record. The loss of a record is the
method's loss on a batch that holds this record alone, so no loss can mix records, whatever it averages over. Norms of single
records' gradients come from Opacus. What is released is the trained network, once per participation, through the site's ledger.

The paper's experiment (App. F.2) takes shuffled minibatches of b records and divides by b: it certifies nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.errors import ConfigError
from rescene.data import Batch, Shard
from rescene.functional.minibatches import minibatches
from rescene.nets import count_passes
from rescene.privacy.mechanism import SitePrivacy, digest, in_steps, refuse_batch_statistics
from rescene.training.sgd import Loss, Penalty, Training, cross_entropy_from, shown

HELD = 2**26  # numbers at most in gradients of single records: convolutions hold those of one layer


def fit_privately(
    net: nn.Module,
    shard: Shard,
    settings: Training,
    generator: torch.Generator,
    site: SitePrivacy,
    loss: Loss | None = None,
    *,
    first_class: int = 0,
    penalty: Penalty | None = None,
) -> bool:
    """As :func:`rescene.training.fit_shard`, behind the site's mechanism; False if the site declines.

    Takes place whatever the site holds: a site without images trains on noise. ``generator`` draws crops only.
    ``penalty`` must depend on the weights and on nothing that was computed from images of this site, unless it was released.
    """
    refuse_batch_statistics(net.train())

    looked: list[Tensor] = []

    def draw() -> dict[str, Tensor]:
        base = loss or cross_entropy_from(first_class)
        looked.append(_descend(net, shard, settings, generator, site, base, penalty))
        return {**net.state_dict(), "num_sampled": looked[0]}

    found = site.answer(digest(net.state_dict().items(), site.mechanism, settings), draw)
    net.eval()
    if found is None:
        return False
    sampled = int(found.pop("num_sampled"))
    if not looked:  # replayed: the work was done once, and it counts once
        count_passes(net, 3 * sampled)
    net.load_state_dict(found)
    return True


def _descend(
    net: nn.Module,
    shard: Shard,
    settings: Training,
    generator: torch.Generator,
    site: SitePrivacy,
    loss: Loss,
    penalty: Penalty | None,
) -> Tensor:
    """Train ``net`` in place; returns how many records were sampled in all, which stays at the site."""
    mechanism, noise = site.mechanism, site.noise
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(parameters, settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    sampled, watched = 0, per_record(net)
    for chosen, expected in _batches(shard, settings, generator, site):
        sampled += len(chosen)
        total = clipped_sum(watched, shard, chosen, settings, generator, loss, mechanism.clip).cpu()
        if mechanism.formal:
            total = mechanism.noised(in_steps(total, mechanism.step), noise) / expected
        else:
            total = (total + mechanism.deviation * noise.normal(len(total))) / expected
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.reshape(p.shape).to(p)
        if penalty is not None:
            penalty().backward()  # adds its gradient to the noised one
        optimiser.step()
    watched.to_standard_module()  # type: ignore[operator]
    return torch.tensor(sampled)


def _batches(
    shard: Shard, settings: Training, generator: torch.Generator, site: SitePrivacy
) -> Iterator[tuple[Tensor, float]]:
    """The records of each step, and the number that their sum is divided by."""
    mechanism, index = site.mechanism, shard.index
    if mechanism.kind == "paper-experiment":
        for _ in range(settings.local_epochs):
            order = torch.randperm(len(index), generator=generator, device=generator.device).to(index.device)
            parts = minibatches(index[order], settings.batch_size, settings.smallest_batch)
            yield from ((part, len(part)) for part in parts)
        return
    rate = mechanism.composition.rate
    for _ in range(mechanism.composition.steps):
        chosen = index[site.noise.chosen(len(index), rate).to(index.device)]
        yield chosen, rate * mechanism.typical_count * len(shard.task.classes)


def clipped_sum(
    watched: nn.Module,
    shard: Shard,
    chosen: Tensor,
    settings: Training,
    generator: torch.Generator,
    loss: Loss,
    clip: float,
) -> Tensor:
    """Sum over the chosen records of their gradients, all parameters as one vector, each clipped: float64 [parameters].

    ``watched`` is the network from :func:`per_record`.
    """
    parameters = [p for p in watched.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    total = _nothing(parameters)
    for part in chosen.split(max(1, HELD // size)) if len(chosen) else ():
        x = shown(shard, part, settings.augment, generator)
        total += _sum_of_clipped(watched, parameters, Batch(x, shard.images.labels[part], part), loss, clip)
    return total


def _sum_of_clipped(watched: Any, parameters: list[nn.Parameter], batch: Batch, loss: Loss, clip: float) -> Tensor:
    """Two passes back: the first gives the norm of each record's gradient, the second the sum of the clipped ones.

    So the gradients of single records need not be held (ghost clipping, Li et al., ICLR 2022). A record whose gradient is not
    finite is left out. Norms and sum are float32, which may exceed the bound in the sixth digit: the noise leaves room for it.
    """
    losses = record_losses(loss, watched(batch.x), batch)
    _backward(losses.sum(), retain_graph=True)
    norms = watched.get_norm_sample().detach()
    watched.zero_grad(set_to_none=True)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        rest = Batch(batch.x[finite], batch.y[finite], batch.index[finite])
        return _sum_of_clipped(watched, parameters, rest, loss, clip) if len(rest.y) else _nothing(parameters)
    watched.disable_hooks()
    _backward((losses * (clip / norms.clamp(min=clip))).sum())
    watched.enable_hooks()
    found = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
    watched.zero_grad(set_to_none=True)
    return found.double()


def _backward(loss: Tensor, retain_graph: bool = False) -> None:
    with warnings.catch_warnings():  # pixels need no gradient here, and torch would say so
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        loss.backward(retain_graph=retain_graph)


def _nothing(parameters: list[nn.Parameter]) -> Tensor:
    return torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device=parameters[0].device)


def record_losses(loss: Loss, logits: Tensor, batch: Batch) -> Tensor:
    """The loss of each record as if it were a batch of its own: logits [n, C] -> [n]."""

    def one(logits: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        return loss(_Answered(logits[None]), Batch(x[None], y[None], index[None]))

    found: Tensor = torch.func.vmap(one)(logits, batch.x, batch.y, batch.index)
    return found


class _Answered(nn.Module):
    """A network that has been asked already."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits


def per_record(net: nn.Module) -> nn.Module:
    """The network with the norm of each record's gradient after a backward pass."""
    try:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
    except ImportError as error:
        raise ConfigError(
            "E174",
            "dp-sgd needs Opacus for gradients of single records",
            why=str(error),
            fix="pip install 'rescene[privacy]'",
        ) from None
    watched: nn.Module = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    return watched
