"""The paper's own cost conventions (App. E): what a method needs to state its nominal cost in the paper's symbols.

Bytes: final head size in every round, float32, labels free, every class of a task on every site, nominal memories. FLOPs: one image
forward costs F, a backward pass 2F whatever learns; a round's participants are average sites. Only these figures can match the
printed digits; what a run really costs is in its ledger. results/cost/README.md compares both with the printed tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rescene.data import Task
from rescene.nets import FLOAT_BYTES, Arch, forward_flops, num_parameters
from rescene.training import Training

TRAINING_PASSES = 3  # of an image from which weights learn
LEGEND = {
    "R": "rounds per task",
    "K": "participants of a round",
    "N": "clients in all",
    "E": "local epochs",
    "E_srv": "server epochs per round",
    "E_PIM": "epochs of Re-Fed's personalised informative model",
    "D_loc": "local images of a client",
    "D_mem": "replay images it stores",
    "D_sur": "surrogate pictures of a party",
    "D_pool": "previous images that Re-Fed scores at a task boundary",
    "F": "forward and backward cost of one image",
    "F_enc": "the same for GLFC's encoder",
    "I": "gradient-inversion steps per prototype",
    "|C_t|": "classes of the task",
    "|C_{t-1}|": "classes of the previous task",
    "d": "feature dimension of the leverage scores",
    "R_syn": "synthesis rounds",
    "S_kd": "distillation steps per synthesis round",
    "B_syn": "synthesis batch",
    "S_gen": "steps of MFCL's generator",
    "S_con": "steps of FedCIL's consolidation",
    "P": "model parameters",
    "S": "condensation steps",
    "IPC": "surrogates per class and client",
    "|B u S|": "images in buffers and pool",
    "|S_r|": "surrogates of one round",
}
_SYMBOL = re.compile(r"\|[^|]+\||[A-Za-z]\w*")


@dataclass(frozen=True)
class NominalBytes:
    """One message up, one message down, and what a client keeps (the model included)."""

    up: float
    down: float
    state: float


@dataclass(frozen=True)
class NominalReplay:
    """A method's memory parameter, and the images that one client and everybody together replay (App. D.3, Table 8)."""

    budget: float
    images_per_client: float
    images_in_all: float


@dataclass(frozen=True)
class Setting:
    """An experiment in the paper's symbols."""

    arch: Arch
    tasks: Sequence[Task]
    counts: Sequence[Sequence[Sequence[int]]]  # [task][site][class of the task] -> images
    num_clients: int  # N
    per_round: int  # K
    num_rounds: int  # R
    train: Training  # E, E_srv, batch size

    @property
    def num_classes(self) -> int:
        """C, of all tasks."""
        return self.tasks[-1].num_seen

    @property
    def forward(self) -> int:
        """F, FLOPs of one image."""
        return forward_flops(self.arch, self.num_classes)

    @property
    def parameters(self) -> int:
        """P."""
        return num_parameters(self.arch, self.num_classes)

    @property
    def turns(self) -> int:
        """K R, answers of sites in one task."""
        return self.per_round * self.num_rounds

    @property
    def sizes(self) -> list[list[int]]:
        """Images of each site, by task."""
        return [[sum(site) for site in sites] for sites in self.counts]

    def local_images(self, task: int) -> float:
        """D_loc, images of the average site."""
        return sum(self.sizes[task]) / len(self.sizes[task])

    def local_batches(self, task: int) -> float:
        """Minibatches of the average site in an epoch; the paper's formulas leave no image out."""
        sizes = self.sizes[task]
        return sum(math.ceil(n / self.train.batch_size) for n in sizes) / len(sizes)

    def old_classes(self, task: int) -> int:
        """Classes of finished tasks; with domains, every class once per finished domain."""
        own = self.tasks[task]
        return own.num_seen - len(own.classes) if own.domain is None else task * len(own.classes)


def image_bytes(arch: Arch) -> int:
    """One picture in float32."""
    return arch.channels * arch.image_size**2 * FLOAT_BYTES


def compute_facts(compute: tuple[str, str] | None) -> dict[str, str]:
    """A method's two asymptotic formulas (``Method.compute``) and the meaning of their symbols; empty without any.

    >>> compute_facts(("O(K)", "O(P)"))["where"]
    'K participants of a round; P model parameters'
    """
    if compute is None:
        return {}
    inner = " ".join(formula.partition(" [")[0][2:-1] for formula in compute)
    symbols = [symbol for symbol in dict.fromkeys(_SYMBOL.findall(inner)) if symbol in LEGEND]
    return {
        "client compute per task": compute[0],
        "server compute per task": compute[1],
        "where": "; ".join(f"{symbol} {LEGEND[symbol]}" for symbol in symbols),
    }
