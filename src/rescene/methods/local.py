"""Local training: the lower reference. A site learns alone from its own images; nothing is averaged, nothing is shared.

begin of the first task:
    server: draw the site to report, by the seed, uniformly among all N
each round:
    site: E epochs of SGD on its own images, starting from its own model of the round before

One run follows one site, because a run reports one model. The site is drawn uniformly, so the expectation of every reported
accuracy over that draw is the mean over all sites; ``site`` = 0 .. N-1 in N runs gives that mean exactly. The other sites
would do the same work unseen and are not simulated. The site trains in every round: nobody chooses participants for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from rescene.core.errors import ConfigError
from rescene.core.hyperparameters import hyper
from rescene.core.method_style import GREY, UploadKind
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.methods.base import Client, Federation, Method, Model, Payload, Uploads, weights_of
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Form, Place, either, fields, like, notes
from rescene.training import fit_shard


@record
class LocalState:
    """The state of the one site that trains alone."""

    model: Model  # the site's own
    site: int  # -1 before the first task
    notes: dict[str, float]


@register
class Local(Method):
    """Reference line: one site trains alone and sends nothing."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    colour: ClassVar[str] = GREY
    marker: ClassVar[str] = "v"
    uploads: ClassVar[UploadKind] = "nothing"
    reference: ClassVar[str] = "lower bound"
    own_orders: ClassVar[bool] = True
    paper: ClassVar[str] = "reference line: one site alone"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_references.py::test_a_lone_site_trains_like_a_fedavg_client",
            "the same bits",
        ),
    )
    leaves_site: ClassVar[str] = "nothing, were it not for the measurement, which fetches the weights of the one site"
    leaves_in_short: ClassVar[str] = "nothing"
    remembers: ClassVar[str] = "its own model (held for it by the simulation)"

    site: int | None = hyper(None, "k", "[ours]", "the site to report; null draws one by the seed", ge=0)

    def init(self, net: nn.Module, rng: Rng) -> LocalState:
        return LocalState(model=weights_of(net), site=-1, notes={})

    def begin_task(self, state: LocalState, task: Task, federation: Federation, rng: Rng) -> LocalState:
        state = super().begin_task(state, task, federation, rng)
        return replace(state, site=self._choose(federation, rng)) if state.site < 0 else state

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb == "train_alone":
            return either(NOTHING, fields({"model": like(payload["model"]), "notes": notes}))
        return NOTHING

    def broadcast(self, state: LocalState, round: int, federation: Federation, rng: Rng) -> Payload:
        return {}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """The participants of the round are asked for nothing."""
        return {}, client_state

    def server_round(
        self, state: LocalState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> LocalState:
        answers = federation.ask([state.site], "train_alone", {"model": state.model})
        trained = [answer for answer in answers.values() if "model" in answer]
        return replace(state, model=trained[0]["model"], notes=trained[0]["notes"]) if trained else state

    def train_alone(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: train on its own images; the weights stay at the site."""
        if len(shard) == 0:
            return {}, client_state
        net = shard.net(payload["model"])
        final = fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device))
        return {"model": weights_of(net), "notes": {"local_loss": final}}, client_state

    def _choose(self, federation: Federation, rng: Rng) -> int:
        sites = federation.clients
        if self.site is None:
            drawn = torch.randint(len(sites), (1,), generator=rng.at("site").generator())
            return sites[int(drawn)]
        if self.site not in sites:
            why = f"sites are {sites[0]} to {sites[-1]}" + ("" if isinstance(sites, range) else ", and some left")
            raise ConfigError("E104", f"method.site = {self.site} is not possible", why=why)
        return self.site
