"""FedDM (Xiong et al., CVPR 2023): condensed uploads, trained on once and discarded. Nothing protects old tasks.

server: broadcast theta and the noise seed of the round
client: condense each class into at most IPC surrogates (Eq. 1) and send them
server: train theta for E_srv epochs on this round's surrogates only, plain shuffled batches, plain cross-entropy
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rescene.core.method_style import INK
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.methods.base import Federation, ModelState, Uploads, weights_of
from rescene.methods.registry import register
from rescene.methods.surrogates import SurrogateMethod, gathered
from rescene.training import fit_pool


@register
class FedDM(SurrogateMethod):
    """Sites condense their images by distribution matching, and the server trains on the latest round's images."""

    name: ClassVar[str] = "feddm"
    title: ClassVar[str] = "FedDM"
    colour: ClassVar[str] = INK
    marker: ClassVar[str] = "<"
    open_ended: ClassVar[bool] = True
    paper: ClassVar[str] = "Xiong et al., CVPR 2023"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "published code",
            "tests/oracles/test_oracles.py::test_matching_loss_and_its_pixel_gradient",
            "1e-5, the features' term (distribution matching)",
        ),
        Verified(
            "paper figure",
            "results/cifar10/feddm-beta0.5-s0",
            "AA 17.60 against 17.72 (n = 1; server augmentation, n // 2 surrogates)",
        ),
        Verified(
            "hand computation",
            "tests/methods/test_rounds_by_hand.py::test_a_server_round_of_feddm_trains_on_the_uploads_alone",
            "a round, to rounding",
        ),
    )
    compute: ClassVar[tuple[str, str] | None] = (
        "O(R K S IPC |C_t| F) [ours: not in the paper's table]",
        "O(R E_srv |S_r| F) [ours: not in the paper's table]",
    )
    sends_pictures_only: ClassVar[bool] = True

    def server_round(
        self, state: ModelState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ModelState:
        pictures = gathered(uploads)
        if pictures is None:
            return state
        images, labels = pictures
        net = federation.net(state.model)
        generator = rng.at("sgd").generator(federation.device)
        loss = fit_pool(
            net,
            images,
            labels,
            federation.transform,
            self.server_training,
            generator,
            num_classes=federation.task.num_seen,
        )
        return replace(state, model=weights_of(net), notes={"server_loss": loss, "pool_size": len(labels)})
