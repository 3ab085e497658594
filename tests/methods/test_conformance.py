"""Every built-in method passes the conformance suite that third parties can run on theirs."""

from typing import ClassVar

import pytest
import torch

from rescene.methods import Method, method_class
from rescene.testing.conformance import (
    CHECKS,
    draws_only_from_its_streams,
    learns_in_own_orders,
    leaves_its_arguments_alone,
)
from rescene.training import Training
from shipped_methods import SHIPPED

SURROGATES = {"ipc": 2, "num_steps": 2}
SMALL = {
    "rescene": {**SURROGATES, "budget": 3},
    "rescene-plus": {**SURROGATES, "budget": 3},
    "feddm": SURROGATES,
    "fedaf": SURROGATES,
    "raw-upload": {"ipc": 2, "budget": 3},
    "target": {
        "synthesis_rounds": 3,
        "synthesis_batch": 8,
        "warmup_rounds": 1,
        "student_steps": 2,
        "generator_steps": 2,
        "latent_size": 8,
        "generator_width": 8,
    },
    "glfc": {"num_inversions": 2, "inversion_steps": 2, "num_iterates": 2, "num_perturbations": 2, "num_exemplars": 3},
    "fedcbdr": {"budget": 4},
    "refed": {"storage": 16, "pim_epochs": 2},
    "icarl": {"memory": 12},
    "mfcl": {"generator_steps": 2, "generator_batch": 8, "latent_size": 8, "generator_width": 4, "synthetic_batch": 8},
    "fedcil": {"consolidation_steps": 2, "latent_size": 8, "generator_width": 4, "synthetic_batch": 8},
    "cfed": {"num_surrogates": 8, "learners": 0.5},
    "fedweit": {"adam_lr": 0.01, "num_received": 2},
    "fedcprompt": {"prompts_per_task": 3, "prompt_length": 4, "num_blocks": 2, "prompt_lr": 0.01},
    "pilora": {"rank": 2, "num_blocks": 2, "lora_lr": 0.01, "prototype_lr": 0.1},
}
TRAIN = Training(local_epochs=1, server_epochs=1, batch_size=8, lr=0.05)


def build(name):
    return method_class(name)(**SMALL.get(name, {}), train=TRAIN)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SHIPPED)
def test_method_conforms(name, check):
    check(build(name))


@pytest.mark.parametrize("name", ["fedlwf", "fedweit"])
def test_it_learns_in_own_orders_with_the_loss_over_all_classes(name):
    learns_in_own_orders(method_class(name)(local_ce="all", train=TRAIN))


def test_the_suite_catches_a_method_that_takes_the_classes_of_a_step_for_new():
    class Forward(method_class("fedavg")):
        one_order_only: ClassVar[dict[str, str]] = {}

    learns_in_own_orders(Forward(train=TRAIN))
    with pytest.raises(AssertionError, match="classes that other sites meet"):
        learns_in_own_orders(Forward(local_ce="new", train=TRAIN))


class Careless(Method):
    """Does three forbidden things: uses the global stream, changes the payload, changes the state."""

    name: ClassVar[str] = "careless"
    title: ClassVar[str] = "Careless"
    paper: ClassVar[str] = "-"
    leaves_site: ClassVar[str] = "noise"

    def client_round(self, payload, shard, client_state, rng):
        payload["model"]["head.bias"] += 1.0
        return {"noise": torch.randn(3)}, client_state

    def server_round(self, state, uploads, round, federation, rng):
        return state


@pytest.mark.parametrize("check", [leaves_its_arguments_alone, draws_only_from_its_streams])
def test_the_suite_catches_a_careless_method(check):
    with pytest.raises(AssertionError):
        check(Careless(train=TRAIN))
