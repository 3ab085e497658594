"""Bytes of a run's real uploads in each form of the wire, beside other lossless coders of the same uint8 levels.

python benchmarks/wire.py NAME RECIPE [key=value ...]     writes results/bench/wire-NAME.json
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from rescene.config import resolve
from rescene.engine import wire
from rescene.engine.loop import Run
from rescene.engine.run_folder import RunFolder

OUT = Path(__file__).parents[1] / "results" / "bench"
RAW_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]


def uploads_of(recipe: str, overrides: list[str]) -> list[Tensor]:
    """The pictures of every upload of a run."""
    found: list[Tensor] = []
    with tempfile.TemporaryDirectory() as spare, RunFolder(Path(spare) / "run") as folder:
        run = Run(resolve(recipe, overrides), folder)
        run.federation.observe = lambda uploads: found.extend(u["images"] for u in uploads.values() if len(u["images"]))
        run.complete()
    return found


def sheet(levels: Tensor, **options: Any) -> bytes:
    """All pictures under each other in one image file."""
    file = io.BytesIO()
    Image.fromarray(levels.permute(0, 2, 3, 1).reshape(-1, levels.shape[-1], 3).numpy()).save(file, **options)
    return file.getvalue()


def left(levels: Tensor) -> Tensor:
    apart = levels - levels[:, 1:2]
    apart[:, 1] = levels[:, 1]
    return torch.cat([apart[..., :1], apart[..., 1:] - apart[..., :-1]], dim=-1)


def data(levels: Tensor) -> bytes:
    return levels.contiguous().numpy().tobytes()


CODERS: dict[str, Callable[[Tensor], bytes]] = {
    "levels as they are": data,
    "zlib": lambda q: zlib.compress(data(q), 9),
    "left neighbour, zlib run lengths": lambda q: wire._deflated(data(left(q))),
    "median predictor, zlib run lengths (ours)": lambda q: wire._deflated(data(wire._residuals(q))),
    "median predictor, zlib": lambda q: zlib.compress(data(wire._residuals(q)), 9),
    "median predictor, lzma": lambda q: lzma.compress(data(wire._residuals(q)), lzma.FORMAT_RAW, filters=RAW_LZMA),
    "PNG sheet": lambda q: sheet(q, format="PNG", optimize=True),
    "WebP lossless sheet": lambda q: sheet(q, format="WEBP", lossless=True, quality=100, exact=True),
}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the processor's milliseconds, which other processes do not disturb."""
    begin = time.process_time()
    return work(), 1e3 * (time.process_time() - begin)


def rms(parts: list[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).double().square().mean().sqrt())


def per_channel(uploads: list[Tensor]) -> dict[str, float]:
    """What an offset and a scale per picture and channel would cost and lose."""
    size, errors = 0, []
    for x in uploads:
        planes = x.reshape(-1, 1, *x.shape[2:])
        affine, levels = wire._quantised(planes)
        offset, scale = affine.reshape(-1, 2, 1, 1, 1).unbind(1)
        errors.append(offset + scale * levels - planes)
        size += affine.nbytes + len(wire._deflated(data(wire._residuals(levels.reshape(x.shape)))))
    return {"bytes_per_picture": size / sum(len(x) for x in uploads), "rms_error": rms(errors)}


def measure(uploads: list[Tensor]) -> dict[str, Any]:
    num_images, num_uploads = sum(len(x) for x in uploads), len(uploads)
    forms = {}
    for form in wire.FORMS:
        messages, encode_ms = timed(lambda form=form: [wire.encode(x, form) for x in uploads])
        pairs = list(zip(messages, uploads, strict=True))
        back, decode_ms = timed(lambda form=form, pairs=pairs: [wire.decode(m, form, tuple(x.shape)) for m, x in pairs])
        forms[form] = {
            "bytes_per_picture": sum(len(m) for m in messages) / num_images,
            "rms_error": rms([a - b for a, b in zip(back, uploads, strict=True)]),
            "encode_ms": encode_ms / num_uploads,
            "decode_ms": decode_ms / num_uploads,
        }
    coders = {}
    levels = [wire._quantised(x)[1] for x in uploads]
    for name, coder in CODERS.items():
        size, milliseconds = timed(lambda coder=coder: sum(len(coder(q)) for q in levels))
        coders[name] = {"bytes_per_picture": size / num_images, "encode_ms": milliseconds / num_uploads}
    shape = {"picture": list(uploads[0].shape[1:]), "num_uploads": num_uploads, "num_pictures": num_images}
    coded = {"uint8_per_channel": per_channel(uploads), "lossless_coders_of_the_levels": coders}
    return {**shape, "forms": forms, **coded}


def main() -> None:
    name, recipe, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    found = measure(uploads_of(recipe, overrides))
    command = [o for o in overrides if not o.startswith("data.path=")]
    report = {"recipe": recipe, "overrides": command, **found}
    print(json.dumps(report, indent=1))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"wire-{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
