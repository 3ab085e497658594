"""Raw upload: the control of every claim about condensation. ReSCENE with zero condensation steps.

each round: client: send at most IPC real images per class, drawn afresh, unchanged
            server: exactly ReSCENE's: pool, balanced training, logit adjustment; herding at the end of the task

What ReSCENE scores below this line is the price of condensing; what it scores above it, condensing has earned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import GREY, UploadKind
from rescene.core.verification import Verified
from rescene.methods.registry import register
from rescene.methods.rescene import ReSCENE


@register
class RawUpload(ReSCENE):
    """Control: ReSCENE with zero condensation steps, so that sites send real images."""

    name: ClassVar[str] = "raw-upload"
    title: ClassVar[str] = "Raw upload"
    colour: ClassVar[str] = GREY
    marker: ClassVar[str] = "D"
    uploads: ClassVar[UploadKind] = "images"
    reference: ClassVar[str] = "control"
    paper: ClassVar[str] = "control, not a method to use: what sharing a few real images would give"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_references.py::test_raw_upload_is_rescene_without_condensation",
            "the same bits",
        ),
    )
    compute: ClassVar[tuple[str, str] | None] = None
    leaves_site: ClassVar[str] = "real training images with their labels, unchanged"
    leaves_in_short: ClassVar[str] = "real images"
    mechanisms: ClassVar[tuple[str, ...]] = ("none",)

    ipc: int = hyper(10, "IPC", "App. A", "real images sent per class and round, at most", ge=1)
    surrogates_per_class: Literal["half", "min"] = hyper(
        "min", "-", "[ours]", "of n images: min(IPC, n), or min(IPC, n//2): nobody sends a whole class"
    )
    budget: int = hyper(1000, "B", "Sec. 4.1", "images kept per class after a task", ge=1)

    if not TYPE_CHECKING:  # a class variable is no setting: without steps there is nothing to choose here
        num_steps: ClassVar[int] = 0
        guard: ClassVar[bool] = False
        start: ClassVar[str] = "real"
        min_images: ClassVar[int] = 1
        buffer: ClassVar[str] = "temporal"
        accumulate: ClassVar[bool] = True
        close_after: ClassVar[Any] = None
        literal: ClassVar[bool] = False
        step: ClassVar[str] = "fixed"
        image_lr: ClassVar[float] = 1.0
        image_momentum: ClassVar[float] = 0.0
        radius: ClassVar[float] = 0.0
        clip: ClassVar[Any] = None
        reduction: ClassVar[str] = "sum"
        match_logits: ClassVar[bool] = True
        real_batch: ClassVar[Any] = "ipc"
        neighbours: ClassVar[Any] = None
        match: ClassVar[Any] = None
        random_nets: ClassVar[int] = 0
        own_net: ClassVar[bool] = True
        precision: ClassVar[str] = "auto"
        norm_statistics: ClassVar[str] = "server"
