"""Three sites that send noised sums to a federation that keeps what they sent."""

from dataclasses import replace

import torch

from rescene.core.rng import Rng
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.federation import RunFederation
from rescene.engine.transport import FederationSettings
from rescene.methods import method_class
from rescene.nets.cost import FlopMeter
from rescene.privacy import ledger as books
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise

SUMS = Mechanism(
    "release", 0.1, 2.0, Composition(1, 1), kappa=1.0, num_nets=2, mean_grid=4, covariance_grid=2, sends_sums=True
)
STARTS = {"noise": {"start": "noise", "num_steps": 3}, "coloured": {"start": "coloured", "num_steps": 0}}


class Watching(RunFederation):
    """Keeps what the sites sent."""

    def _received(self, message):
        self.sent = [*getattr(self, "sent", []), message]
        return super()._received(message)


def federation(world, method, mechanism, engine="batched", noise=lambda client: Rng(client).generator(), book=None):
    def shard_of(task, client):
        ledger = book and books.Ledger(book / f"{client}.jsonl")
        site = SitePrivacy(mechanism, Noise(noise(client)), "run", 0, made.round, 1, ledger)
        return replace(world["shards"][client], site=site)

    settings = FederationSettings(
        method, world["arch"], shard_of, CostLedger(FlopMeter(world["arch"])), print, num_clients=3, num_rounds=1,
        transform=world["transform"], device=torch.device("cpu"), rng=Rng(0), form=engine, mechanism=mechanism,
    )  # fmt: skip
    made = Watching(settings)
    made.move(world["task"], 0)
    return made


def asked(world, start, mechanism=SUMS, name="rescene", **options):
    """One round with all three sites: the federation, the payload and the uploads as the method sees them."""
    method = method_class(name)(ipc=3, **STARTS[start])
    sites = federation(world, method, mechanism, **options)
    state = method.init(world["arch"].build(2, torch.Generator().manual_seed(1)), Rng(0))
    payload = method.broadcast(state, 0, sites, Rng(3))
    return sites, payload, sites.ask(sites.participants, "client_round", payload)
