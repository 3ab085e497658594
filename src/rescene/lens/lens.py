"""A lens: a frozen, public function that every site applies to its images before anything else sees them.

It has a name, a SHA-256 over everything it computes with, and a statement of what it was made from. What it gives is again a
picture of bytes, only with other channels: everything behind it, from partition to evaluation, is the same as for photographs.

    waves    fixed filters; no number in it was learned          19 channels of 4 x 4
    leaves   a network and patches, made from dead leaves only   2,816 numbers (4,272 above 32 pixels)
    FILE     a lens like `leaves` that somebody made (`rescene lens make`), or a network of the user's (`rescene lens take`)
    timm:NAME@CHECKPOINT, FILE.onnx   the latter without a file in between: taken on first use and kept in the cache folder
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.documents import parse_json
from rescene.core.errors import ConfigError, DataError, did_you_mean
from rescene.core.files import US_ALONE, replacing, unique_draft
from rescene.core.versions import source_hash
from rescene.data.catalog import cache_folder
from rescene.data.images import Dataset, Images, Transform
from rescene.functional.pictures import DIRECTIONS, wave_picture
from rescene.lens.backbone import (
    IDENTITY,
    Backbone,
    Content,
    backbone,
    measured,
    onnx_of_pt2,
    take_onnx,
    take_timm,
)
from rescene.lens.feature_cache import FeatureCache, key_of, picture_names
from rescene.lens.features import LeavesLens
from rescene.lens.look_progress import expect_looks, tell_looked
from rescene.nets.own_networks import OBJECT, OwnModel
from rescene.nets.timm_networks import TIMM
from rescene.nets.weights import read_weights

BUILT_IN = ("waves", "leaves")
LEAVES_FILE = Path(__file__).with_name("leaves.safetensors")
KEY = "rescene-lens"  # under which a lens file says what it is
CHUNK = {"cpu": 32, "cuda": 256}  # pictures at a time
MEASURED = 8  # pictures for a forecast
STEP = 16  # bytes to one deviation of a feature


@dataclass(frozen=True, eq=False)
class Lens:
    """``module``: uint8 [n, 3, s, s] -> standardised features, [n, d] or [n, c, h, h]; ``step`` bytes to one unit of them."""

    name: str
    sha256: str
    num_bytes: int  # of its weights
    made_from: str
    module: nn.Module
    step: int = STEP
    content: Content | None = None  # what its file holds, where it does not come with the package

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
    def look(self, pixels: Tensor, told: Callable[[int], None] = lambda num: None) -> Tensor:
        """:meth:`seen` as bytes, in chunks; ``told`` hears how many pictures each chunk had."""
        self.module.to(pixels.device)
        found = []
        for part in pixels.split(CHUNK[pixels.device.type]):
            found.append(self.seen(part).round().to(torch.uint8))
            told(len(part))
        return torch.cat(found)

    def transform(self, num_channels: int) -> Transform:
        """Bytes back to standardised features; it is stated, not measured."""
        return Transform((128 / 255,) * num_channels, (self.step / 255,) * num_channels, pad=0)


class Waves(nn.Module):
    """S(x) of :mod:`rescene.functional.pictures` in deviations from the mean of dead leaves: pictures that are nobody's."""

    MEAN = (0.5, 0.0, 0.0) + (0.121,) * DIRECTIONS + (0.146,) * DIRECTIONS
    DEVIATION = (0.11, 0.11, 0.11) + (0.043,) * DIRECTIONS + (0.048,) * DIRECTIONS

    def forward(self, pixels: Tensor) -> Tensor:
        mean, deviation = (torch.tensor(v, device=pixels.device).reshape(-1, 1, 1) for v in (self.MEAN, self.DEVIATION))
        return (wave_picture(pixels.float() / 255) - mean) / deviation


_OWN: dict[str, Lens] = {}  # networks that were handed over as objects, by name


def enter_lens(name: str, model: OwnModel) -> str:
    """A frozen network of the user's own as a lens that this process knows by this name."""
    if name not in _OWN:
        told: dict[str, Any] = {
            "size": model.size,
            "pixel_mean": list(model.mean or (0.0,) * 3),
            "pixel_std": list(model.std or (1.0,) * 3),
        }
        body = model.taken_apart(int(model.size or 0)).body
        _, tensors = measured(told, {}, body, name)
        module = Backbone(body, told, tensors["mean"], tensors["deviation"])
        num_bytes = sum(t.numel() * t.element_size() for t in body.state_dict().values())
        _OWN[name] = Lens(
            name, model.fingerprint(), num_bytes, "a network that was handed over as a Python object", module
        )
    return name


@lru_cache(maxsize=4)
def open_lens(name: str) -> Lens:
    """A lens by name, from a lens file, or made of a network of the user's."""
    if name == "waves":
        constants = repr((Waves.MEAN, Waves.DEVIATION)).encode()
        return Lens(
            "waves", hashlib.sha256(constants).hexdigest(), 0, "fixed filters; nothing in it was learned", Waves(), 32
        )
    if name in _OWN:
        return _OWN[name]
    if name == "leaves":
        return replace(read_lens(LEAVES_FILE, "leaves"), content=None)
    path = Path(name).expanduser()
    if name.startswith(TIMM) or path.suffix == ".onnx":
        return _taken_before(name)
    if fault := no_such_lens(name):
        raise ConfigError("E117", fault, where="model.lens", fix=did_you_mean(name, BUILT_IN, "'{}'") or None)
    return read_lens(path, path.stem)


def no_such_lens(name: str) -> str | None:
    """What is wrong with the name of a lens, as far as the name tells."""
    if name in BUILT_IN or name in _OWN or name.endswith((".safetensors", ".onnx")):
        return None
    if name.startswith(OBJECT):
        return f"{name.removeprefix(OBJECT)} was handed over as a Python object, and this process does not have it"
    if name.startswith(TIMM):
        _, at, file = name.partition("@")
        return (
            None if at and file else f"{name} names no checkpoint, and nothing is downloaded; {name.rstrip('@')}@FILE"
        )
    if name.endswith(".pt2"):
        return f"a .pt2 file can run code; `rescene lens take {name} --trust --out FILE.safetensors` makes a lens of it"
    choice = f"{', '.join(BUILT_IN)}, a .safetensors or .onnx file, or timm:NAME@CHECKPOINT"
    return f"there is no lens {name!r}; {choice}"


def absolute(name: str) -> str:
    """The same lens for a process that works in another folder.

    >>> absolute("leaves"), absolute("timm:resnet18@/my/weights.pth")
    ('leaves', 'timm:resnet18@/my/weights.pth')
    """
    if name in BUILT_IN:
        return name
    before, at, file = name.partition("@") if name.startswith(TIMM) else ("", "", name)
    return f"{before}{at}{Path(file).expanduser().absolute()}"


def read_lens(path: Path, name: str) -> Lens:
    """A lens from a safetensors file; nothing in it can run code."""
    try:
        text, tensors = read_weights(path, KEY)
        return lens_of((parse_json(text or "{}", str(path)), tensors), name, str(path))
    except ConfigError as error:
        raise _no_lens(path, error.why or error.what) from None
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _no_lens(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def lens_of(content: Content, name: str, where: str) -> Lens:
    """The lens that a file describes: of the architecture of `leaves`, or a network of the user's."""
    told, tensors = content
    if not isinstance(told, dict):
        raise ValueError("it does not say what kind of lens it is")
    found = fingerprint(told, tensors)
    if told.get("sha256", found) != found:
        raise ValueError(f"it was changed: SHA-256 {found[:16]}, it says {str(told['sha256'])[:16]}")
    if told.get("kind") in IDENTITY:
        module: nn.Module = backbone(told, tensors, where)
    else:
        with torch.device("meta"):  # what the file says of its sizes takes no memory before its tensors agree with it
            module = LeavesLens(told["widths"], told["num_patches"], told["kept"])
        module.load_state_dict(tensors, assign=True)
        module.float()
    num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    return Lens(name, found, num_bytes, str(told["made_from"]), module, content=content)


def take(
    source: str,
    made_from: str | None = None,
    trust: bool = False,
    pixel_mean: Sequence[float] = (0.0, 0.0, 0.0),
    pixel_std: Sequence[float] = (1.0, 1.0, 1.0),
) -> Content:
    """What the lens file of a user's network holds: ``timm:NAME@CHECKPOINT``, FILE.onnx or, trusted, FILE.pt2."""
    if fault := no_such_lens(source) if not source.endswith(".pt2") else None:
        raise DataError("E224", fault, where=source)
    if source.startswith(TIMM):
        name, _, file = source.removeprefix(TIMM).partition("@")
        return _signed(take_timm(name, Path(file).expanduser(), made_from))
    path = Path(source).expanduser()
    if not path.is_file() or path.suffix not in (".onnx", ".pt2"):
        fix = "timm:NAME@CHECKPOINT, FILE.onnx or FILE.pt2"
        why = "it is no network" if path.exists() else "there is no such file"
        raise DataError("E224", "no lens can be made of this", where=source, why=why, fix=fix)
    if path.suffix == ".pt2" and not trust:
        raise DataError(
            "E227",
            "this .pt2 file is not opened: it could run code of whoever made it",
            where=source,
            why="torch keeps parts of such a file as pickles, and opening a pickle runs what its maker put there",
            fix="an .onnx file of the same network; if you trust who made this one: --trust",
        )
    data = onnx_of_pt2(path) if path.suffix == ".pt2" else path.read_bytes()
    return _signed(take_onnx(data, source, made_from, pixel_mean, pixel_std))


def _signed(content: Content) -> Content:
    told, tensors = content
    return told | {"sha256": fingerprint(told, tensors)}, tensors


def _taken_before(source: str) -> Lens:
    """A user's network as a lens, measured on procedural pictures once and kept in the cache folder under its file's hash."""
    if fault := no_such_lens(source):
        raise DataError("E224", fault, where="model.lens")
    name, _, file = source.removeprefix(TIMM).partition("@") if source.startswith(TIMM) else ("", "", source)
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError("E224", "the file of this lens is not there", where=str(path))
    parts = [name, hashlib.sha256(path.read_bytes()).hexdigest(), torch.__version__, source_hash("lens")]
    kept = lens_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.safetensors"
    if kept.is_file():
        try:
            return read_lens(kept, name or path.stem)
        except ConfigError:
            pass  # damaged: it is made again below
    content = take(source)
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(kept, unique_draft(kept)) as draft:
        draft.touch(US_ALONE)
        write_content(content, draft)
    return read_lens(kept, name or path.stem)


def lens_folder() -> Path:
    """Where lenses lie that were taken on first use."""
    return cache_folder() / "lenses"


def _no_lens(path: Path, why: str) -> ConfigError:
    fix = "a file that `rescene lens make` or `rescene lens take` wrote"
    return ConfigError("E118", "this file is not a lens", where=str(path), why=why, fix=fix)


def write_lens(module: LeavesLens, made_from: str, path: Path) -> None:
    """The lens as one safetensors file: weights and patches in float16."""
    told = {
        "widths": list(module.widths),
        "num_patches": len(module.offsets),
        "kept": {name: list(counts) for name, counts in module.kept.items()},
        "made_from": made_from,
    }
    tensors = {key: _stored(key, value) for key, value in module.state_dict().items()}
    write_content((told, tensors), path)


def write_content(content: Content, path: Path) -> None:
    """Write a lens (its description and its tensors) to a safetensors file."""
    from safetensors.torch import save_file

    save_file(content[1], path, {KEY: json.dumps(content[0], sort_keys=True)})


def _stored(key: str, value: Tensor) -> Tensor:
    half = value.is_floating_point() and (key.startswith("net.") or key == "filters")
    return (value.half() if half else value).cpu().contiguous()


def fingerprint(told: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the architecture and every tensor, whatever else the file says."""
    keys = IDENTITY.get(str(told.get("kind")), ("widths", "num_patches", "kept"))
    digest = hashlib.sha256(json.dumps({k: told[k] for k in keys}, sort_keys=True).encode())
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype} {list(tensors[key].shape)}".encode())
        digest.update(tensors[key].contiguous().numpy().tobytes())
    return digest.hexdigest()


def through(
    name: str | None, dataset: Dataset, device: torch.device | None = None, kept: FeatureCache | None = None
) -> Dataset:
    """The data set as seen through a lens, if there is one. What is in ``kept`` is not looked at again."""
    if name is None:
        return dataset
    lens = open_lens(name)
    if not lens.num_bytes:  # quick to look through, and the same bits everywhere
        device = kept = None
    device = device or torch.device("cpu")
    splits = {"train": dataset.train, "test": dataset.test}
    if kept is None:
        expect_looks(len(dataset.train) + len(dataset.test))
        seen = {split: _looked(lens, images.pixels, device) for split, images in splits.items()}
    else:
        seen = _recalled(lens, splits, device, kept)
    seen = {split: pixels.to(splits[split].pixels.device) for split, pixels in seen.items()}
    return replace(_as_seen(lens, dataset, seen), pictures=dataset.fingerprint())


def _recalled(lens: Lens, splits: dict[str, Images], device: torch.device, kept: FeatureCache) -> dict[str, Tensor]:
    """What the lens gives for both splits: features that are in ``kept``, and a look at the other pictures."""
    chunk = CHUNK[device.type]
    names = {split: picture_names(images, chunk) for split, images in splits.items()}
    key = key_of(lens.sha256, splits["train"].pixels.shape[1:], device)
    known = kept.read(key, {name for own in names.values() for name in own})
    places = {split: _places_to_look_at([name not in known for name in own], chunk) for split, own in names.items()}
    expect_looks(sum(map(len, places.values())))
    features = dict(known)
    for split, own in places.items():
        if own:
            pixels = splits[split].pixels
            rows = _looked(lens, pixels if own == list(range(len(pixels))) else pixels[own], device).cpu()
            features = {names[split][i]: row for i, row in zip(own, rows, strict=True)} | features
    kept.write(key, features, features.keys() - known.keys())
    return {
        split: torch.stack([features[name] for name in own]) if own else _looked(lens, splits[split].pixels, device)
        for split, own in names.items()
    }


def _places_to_look_at(is_new: Sequence[bool], chunk: int) -> list[int]:
    """Places of pictures to look at for those that are new, so that each is in a chunk as large as in a look at all of them.

    Full chunks are filled up with other pictures; the smaller chunk at the end is looked at whole.

    >>> _places_to_look_at([i in (1, 4, 5) for i in range(11)], chunk=4)
    [1, 4, 5, 0]
    >>> _places_to_look_at([i == 10 for i in range(11)], chunk=4)
    [8, 9, 10]
    """
    full = len(is_new) - len(is_new) % chunk
    inside = [i for i in range(full) if is_new[i]]
    fill = range(-len(inside) % chunk)
    last = range(full, len(is_new)) if any(is_new[full:]) else ()
    return [*inside, *fill, *last]


def sized(name: str | None, dataset: Dataset) -> Dataset:
    """The data set with the sizes it has through a lens, and nothing to see: one look at a black picture, for forecasts."""
    if name is None:
        return dataset
    lens, parts = open_lens(name), {"train": dataset.train, "test": dataset.test}
    one = lens.look(torch.zeros(1, *dataset.train.pixels.shape[1:], dtype=torch.uint8))
    black = torch.zeros(1, dtype=torch.uint8)
    return _as_seen(lens, dataset, {split: black.expand(len(part), *one.shape[1:]) for split, part in parts.items()})


def seconds_to_look(name: str, size: int, num: int, device: torch.device) -> float:
    """About how long a look at ``num`` pictures with this side takes on this device, from a look at a few random ones.

    0 for a lens without learned numbers, which is quick.
    """
    lens = open_lens(name)
    if not lens.num_bytes:
        return 0.0
    few = torch.randint(
        0, 256, (MEASURED, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    lens.look(few[:2].to(device)).cpu()  # the first look is slower
    begin = time.perf_counter()
    lens.look(few.to(device)).cpu()
    return (time.perf_counter() - begin) / MEASURED * num


def _as_seen(lens: Lens, dataset: Dataset, seen: dict[str, Tensor]) -> Dataset:
    train, test = (
        Images(seen[split], images.labels, images.domains, images.sites)
        for split, images in (("train", dataset.train), ("test", dataset.test))
    )
    transform = lens.transform(train.pixels.shape[1])
    notes = (*dataset.notes, f"{dataset.image_size} pixels seen through {lens.words()}")
    return replace(dataset, train=train, test=test, transform=transform, notes=notes, picture_size=dataset.image_size)


def _looked(lens: Lens, pixels: Tensor, device: torch.device) -> Tensor:
    """Looked at on ``device``, kept where the pixels were; a set without pictures keeps its form."""
    if not len(pixels):
        return lens.look(torch.zeros(1, *pixels.shape[1:], dtype=torch.uint8))[:0]
    return torch.cat([lens.look(part.to(device), tell_looked).to(pixels.device) for part in pixels.split(4096)])
