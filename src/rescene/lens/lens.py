"""A lens: a frozen, public function that every site applies to its images before anything else sees them.

It has a name, a SHA-256 over everything it computes with, and a statement of what it was made from. What it gives is again a
picture of bytes, only with other channels: everything behind it, from partition to evaluation, is the same as for photographs.

    waves    fixed filters; no number in it was learned          19 channels of 4 x 4
    leaves   a network and patches, made from dead leaves only   2,816 numbers (4,160 above 32 pixels)
    FILE     a lens like `leaves` that somebody made: `rescene lens make`
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene.data.images import Dataset, Images, Transform
from rescene.documents import parse_json
from rescene.errors import ConfigError, did_you_mean
from rescene.functional.waves import DIRECTIONS, wave_picture
from rescene.lens.features import LeavesLens
from rescene.nets.weights import read_weights

BUILT_IN = ("waves", "leaves")
LEAVES_FILE = Path(__file__).with_name("leaves.safetensors")
KEY = "rescene-lens"  # under which a lens file says what it is
CHUNK = {"cpu": 16, "cuda": 256}  # pictures at a time


@dataclass(frozen=True, eq=False)
class Lens:
    """``module``: uint8 [n, 3, s, s] -> standardised features, [n, d] or [n, c, h, h]; ``step`` bytes to one unit of them."""

    name: str
    sha256: str
    num_bytes: int  # of its weights
    made_from: str
    module: nn.Module
    step: int

    def about(self) -> dict[str, Any]:
        """What every run, report and model card says of it."""
        return {"name": self.name, "sha256": self.sha256, "bytes": self.num_bytes, "made_from": self.made_from}

    def words(self) -> str:
        """The same in one line."""
        if not self.num_bytes:
            return self.name
        return f"{self.name} ({self.num_bytes / 1e6:.1f} MB, SHA-256 {self.sha256[:16]}), made from {self.made_from}"

    def seen(self, pixels: Tensor) -> Tensor:
        """float [n, c, h, h] from 0 to 255: the features in steps around 128."""
        z: Tensor = self.module(pixels)
        z = z[:, :, None, None] if z.ndim == 2 else z
        return (128 + self.step * z).clamp(0, 255)

    @torch.no_grad()
    def look(self, pixels: Tensor) -> Tensor:
        """:meth:`seen` as bytes, in chunks."""
        self.module.to(pixels.device)
        return torch.cat([self.seen(part).round().to(torch.uint8) for part in pixels.split(CHUNK[pixels.device.type])])

    def transform(self, num_channels: int) -> Transform:
        """Bytes back to standardised features; it is stated, not measured."""
        return Transform((128 / 255,) * num_channels, (self.step / 255,) * num_channels, pad=0)


class Waves(nn.Module):
    """S(x) of :mod:`rescene.functional.waves` in deviations from the mean of dead leaves: pictures that are nobody's."""

    MEAN = (0.5, 0.0, 0.0) + (0.121,) * DIRECTIONS + (0.146,) * DIRECTIONS
    DEVIATION = (0.11, 0.11, 0.11) + (0.043,) * DIRECTIONS + (0.048,) * DIRECTIONS

    def forward(self, pixels: Tensor) -> Tensor:
        mean, deviation = (torch.tensor(v, device=pixels.device).reshape(-1, 1, 1) for v in (self.MEAN, self.DEVIATION))
        return (wave_picture(pixels.float() / 255) - mean) / deviation


@lru_cache(maxsize=4)
def open_lens(name: str) -> Lens:
    """A lens by name, or from a file."""
    if name == "waves":
        constants = repr((Waves.MEAN, Waves.DEVIATION)).encode()
        return Lens(
            "waves", hashlib.sha256(constants).hexdigest(), 0, "fixed filters; nothing in it was learned", Waves(), 32
        )
    path = LEAVES_FILE if name == "leaves" else Path(name).expanduser()
    if name != "leaves" and path.suffix != ".safetensors":
        guess = did_you_mean(name, BUILT_IN)
        fix = f"did you mean '{guess}'?" if guess else f"{' or '.join(BUILT_IN)}, or a .safetensors file of a lens"
        raise ConfigError("E117", f"unknown lens {name!r}", where="model.lens", fix=fix)
    return read_lens(path, "leaves" if name == "leaves" else path.stem)


def read_lens(path: Path, name: str) -> Lens:
    """A lens of the architecture of ``leaves`` from a safetensors file; nothing in it can run code."""
    try:
        text, tensors = read_weights(path, KEY)
        told = parse_json(text or "{}", str(path))
        with torch.device("meta"):  # what the file says of its sizes takes no memory before its tensors agree with it
            module = LeavesLens(told["widths"], told["num_patches"], told["kept"])
        module.load_state_dict(tensors, assign=True)
        module.float()
    except ConfigError as error:
        raise _no_lens(path, error.why or error.what) from None
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _no_lens(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    return Lens(name, fingerprint(told, tensors), num_bytes, str(told["made_from"]), module, 16)


def _no_lens(path: Path, why: str) -> ConfigError:
    fix = "a file that `rescene lens make` wrote"
    return ConfigError("E118", "this file is not a lens", where=str(path), why=why, fix=fix)


def write_lens(module: LeavesLens, made_from: str, path: Path) -> None:
    """The lens as one safetensors file: weights and patches in float16."""
    from safetensors.torch import save_file

    told = {
        "widths": list(module.widths),
        "num_patches": len(module.offsets),
        "kept": {name: list(counts) for name, counts in module.kept.items()},
        "made_from": made_from,
    }
    tensors = {key: _stored(key, value) for key, value in module.state_dict().items()}
    save_file(tensors, path, {KEY: json.dumps(told, sort_keys=True)})


def _stored(key: str, value: Tensor) -> Tensor:
    half = value.is_floating_point() and (key.startswith("net.") or key == "filters")
    return (value.half() if half else value).cpu().contiguous()


def fingerprint(told: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the architecture and every tensor, whatever else the file says."""
    digest = hashlib.sha256(
        json.dumps({k: told[k] for k in ("widths", "num_patches", "kept")}, sort_keys=True).encode()
    )
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype} {list(tensors[key].shape)}".encode())
        digest.update(tensors[key].contiguous().numpy().tobytes())
    return digest.hexdigest()


def through(name: str | None, dataset: Dataset, device: torch.device | None = None) -> Dataset:
    """The data set as seen through a lens, if there is one."""
    if name is None:
        return dataset
    lens = open_lens(name)
    device = device if device is not None and lens.num_bytes else torch.device("cpu")  # waves: the same bits everywhere
    train, test = (
        Images(_looked(lens, split.pixels, device), split.labels, split.domains)
        for split in (dataset.train, dataset.test)
    )
    transform = lens.transform(train.pixels.shape[1])
    notes = (*dataset.notes, f"{dataset.image_size} pixels seen through {lens.words()}")
    return replace(dataset, train=train, test=test, transform=transform, notes=notes, picture_size=dataset.image_size)


def _looked(lens: Lens, pixels: Tensor, device: torch.device) -> Tensor:
    """Looked at on ``device``, kept where the pixels were; a set without pictures keeps its form."""
    if not len(pixels):
        return lens.look(torch.zeros(1, *pixels.shape[1:], dtype=torch.uint8))[:0]
    return torch.cat([lens.look(part.to(device)).to(pixels.device) for part in pixels.split(4096)])
