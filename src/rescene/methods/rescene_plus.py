"""ReSCENE+: the paper's algorithm with three settings that we changed. They raise accuracy and are not the paper's.

step=polyak                  a step on pixels that would overshoot is shortened; a fixed step is not
server_augment=true          the server crops and mirrors surrogates; the paper's figures look like a server that does not
surrogates_per_class=half    min(IPC, n // 2) surrogates of n images: nobody sends a whole class

Its figures never stand in the paper's row. ``results/defaults.csv`` says which data chose each setting.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import BLUE
from rescene.core.verification import Verified
from rescene.methods.registry import register
from rescene.methods.rescene import ReSCENE


@register
class ReSCENEPlus(ReSCENE):
    name: ClassVar[str] = "rescene-plus"
    title: ClassVar[str] = "ReSCENE+"
    colour: ClassVar[str] = BLUE
    marker: ClassVar[str] = "*"
    paper: ClassVar[str] = "ours: Kang, Tu, Lee's ReSCENE with other settings"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/functional/test_balance_and_matching.py::"
            "test_polyaks_bound_takes_a_quadratic_loss_half_way_and_a_small_gradient_as_it_is",
            "its steps on pixels",
        ),
    )

    step: Literal["fixed", "polyak"] = hyper(
        "polyak",
        "-",
        "[ours]",
        "fixed: image_lr as it is (the default under a mechanism); polyak: for each class at most its loss over its squared gradient",
    )
    server_augment: bool = hyper(
        True, "-", "[ours]", "crops and mirror images of surrogates on the server; train.augment must be on too"
    )
    surrogates_per_class: Literal["half", "min", "fixed"] = hyper(
        "half", "-", "[ours]", "of n images: min(IPC, n//2), min(IPC, n), or always IPC (drawn with replacement)"
    )
