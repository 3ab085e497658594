"""Anchored: FedAvg whose sites are held near the model that ended the last task. A regulariser with a state of its own.

    begin of a task: the server keeps theta* <- theta
    server: broadcast theta and theta*
    client: E epochs of SGD on CE + (lambda / 2) ||theta - theta*||^2; send theta_k and n_k
    server: average

Try it:  rescene run demo --plugin examples/anchored.py method=anchored method.strength=0.1
"""

from dataclasses import replace
from typing import ClassVar

from rescene.core.hyperparameters import hyper
from rescene.core.record import record
from rescene.methods import register
from rescene.methods.averaging import AveragingMethod
from rescene.methods.base import Model, weights_of
from rescene.training import Batch, cross_entropy, fit_shard


@record
class Anchored:
    """What the server remembers. ``model`` and ``notes`` are what the engine looks for; the rest is the method's own."""

    model: Model
    notes: dict[str, float]
    anchor: Model  # theta*, empty in the first task


@register
class AnchoredMethod(AveragingMethod):
    name: ClassVar[str] = "anchored"
    title: ClassVar[str] = "Anchored"
    paper: ClassVar[str] = "an example; FedEWC with all weights equally important"

    strength: float = hyper(0.01, "lambda", "[example]", "pull towards the model of the last task", ge=0)

    def init(self, net, rng):
        return Anchored(model=weights_of(net), notes={}, anchor={})

    def begin_task(self, state, task, federation, rng):
        grown = super().begin_task(state, task, federation, rng)
        # of the model before the head grew: its new rows have nothing to stay near
        return replace(grown, anchor=state.model if task.index > 0 else {})

    def broadcast(self, state, round, federation, rng):
        return {"model": state.model, "anchor": state.anchor}

    def client_round(self, payload, shard, client_state, rng):
        if len(shard) == 0:
            return {"num_images": 0}, client_state
        net, anchor = shard.net(payload["model"]), payload["anchor"]

        def distance(net):
            """||theta - theta*||^2 over what both have: old rows of a grown head are its first ones."""
            pairs = [(p, anchor[name]) for name, p in net.named_parameters() if name in anchor]
            return sum((p[: len(old)] - old.to(p.device)).square().sum() for p, old in pairs)

        def loss(net, batch: Batch):
            return cross_entropy(net, batch) + self.strength / 2 * distance(net)

        final = fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device), loss)
        return {"model": weights_of(net), "num_images": len(shard), "notes": {"local_loss": final}}, client_state
