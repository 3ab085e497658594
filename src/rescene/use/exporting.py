"""A run's model in files that others can use, each compared with the original before it counts.

A model's service can also go into a container: a folder with the model and a Containerfile that installs what serves it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError, RunError, did_you_mean
from rescene.core.files import replacing
from rescene.core.json_files import Row
from rescene.core.run_state import finished_in
from rescene.engine.experiment import load_data
from rescene.lens import Lens, expect_looks, tell_looked
from rescene.lens.backbone import Program
from rescene.use.formats import CAN_RUN_CODE, WRITERS, picture_size, require_onnx
from rescene.use.model import Whole, of_run, open_model, origin_of

NUM_RANDOM, NUM_TEST = 16, 64  # pictures to compare on
AT_ONCE = 16
TOLERANCE = 1e-4  # of the largest score; formats differ in the order of additions, and in nothing else


def export(folder: Path, kinds: Sequence[str], out: Path) -> list[Row]:
    """Write ``out``/model.<kind> for every kind; a row of facts for each. A file that disagrees is removed (E420).

    Of a plan's run that has begun a new task it is the model that was finished before. The run folder is only read.
    """
    _check_kinds(kinds)
    place = finished_in(folder)
    about, whole = of_run(place)
    _check_lens(kinds, whole.lens)
    size = picture_size(about)
    lens = {"lens_file": whole.lens.content[0]} if whole.lens and whole.lens.content else {}
    told = json.dumps(about | lens | origin_of(place, size))
    pictures, source = _pictures(folder, size)
    out.mkdir(parents=True, exist_ok=True)
    expect_looks((1 + len(kinds)) * len(pictures))
    wanted = _scores(whole, pictures)
    return [
        _write(kind, whole, told, out / f"model.{kind}", pictures, wanted) | {"compared on": source} for kind in kinds
    ]


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in WRITERS:
            fix = did_you_mean(kind, WRITERS) or f"one or more of: {','.join(WRITERS)}"
            raise ConfigError("E184", f"cannot export to {kind!r}", where="--to", fix=fix)
    if "onnx" in kinds:
        require_onnx()


def _check_lens(kinds: Sequence[str], lens: Lens | None) -> None:
    """A program that onnxruntime runs cannot be traced into another one; in a safetensors file it lies as it is."""
    traced = [kind for kind in kinds if kind != "safetensors"]
    if traced and lens is not None and isinstance(getattr(lens.module, "net", None), Program):
        raise DataError(
            "E228",
            f"a model behind an ONNX lens cannot be exported to {' or '.join(traced)}",
            where="--to",
            why=f"{lens.name} is a program of its own",
            fix="--to safetensors, which holds lens and head",
        )


def _write(kind: str, whole: Whole, told: str, path: Path, pictures: Tensor, wanted: Tensor) -> Row:
    with replacing(path, path.with_name(f"draft.{kind}")) as draft:  # a file under its own name has been checked
        WRITERS[kind](whole, told, draft)
        found = difference(wanted, open_model(draft, trust=True).scores, pictures)
        if found > TOLERANCE:
            raise RunError(
                "E420",
                f"the exported {kind} file does not compute what the model does",
                where=str(path),
                why=f"scores differ by {found:.1e} of the largest; {TOLERANCE:.0e} would be rounding",
                fix="use another --to",
            )
    return {"file": str(path), "MB": round(path.stat().st_size / 1e6, 2), "largest difference": f"{found:.1e}"}


@torch.no_grad()
def difference(wanted: Tensor, other: Callable[[Tensor], Tensor], pictures: Tensor) -> float:
    """Largest difference from the wanted scores, as a share of the largest one; batches of 1 and of many must both work."""
    got = torch.cat([_scores(other, pictures[:1]), _scores(other, pictures[1:])])
    if got.shape != wanted.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


@torch.no_grad()
def _scores(model: Callable[[Tensor], Tensor], pictures: Tensor) -> Tensor:
    """Scores of pictures, some at a time."""
    found = []
    for part in pictures.split(AT_ONCE):
        found.append(model(part))
        tell_looked(len(part))
    return torch.cat(found)


def _pictures(folder: Path, size: int) -> tuple[Tensor, str]:
    """Random pictures, and test images of the run where they are on this machine."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (NUM_RANDOM, 3, size, size), generator=generator, dtype=torch.uint8)
    recipe, test, why = resolve(folder / "config.yaml").recipe, noise[:0], "images are at the sites"
    if recipe.sites is None:
        try:
            pixels = load_data(recipe.images).test.pixels
            test = pixels[:: max(1, len(pixels) // NUM_TEST)][:NUM_TEST]
        except DataError as error:
            why = error.what
    words = f"{len(test)} test" if len(test) else f"no test ({why})"
    return torch.cat([noise, test]), f"{NUM_RANDOM} random and {words} images"


UID, PORT = 10002, 8000
TORCH = "torch==2.13.0"
CONTAINERFILE = """\
# A model's service in a container: no root, nothing writable, no way out. Build and run it in this folder (docker: the same
# without --format; without a GPU, torch's CPU build saves gigabytes):
#
#   podman build --format docker -t rescene-model -f Containerfile .
#   podman run -d --name rescene-model --read-only --tmpfs /tmp --cap-drop=all --security-opt=no-new-privileges \\
#     --memory 2g --pids-limit 128 -p 127.0.0.1:{port}:{port} rescene-model
#
# Then open http://127.0.0.1:{port}/. The service has no password and speaks plain HTTP: to publish it beyond this machine,
# put a proxy with both before it, and add "--allow-host", "NAME" to the last line.
FROM python:3.11-slim
RUN pip install --no-cache-dir --no-deps "rescene=={version}" \\
 && pip install --no-cache-dir --no-deps --require-hashes -r \\
    "$(python -c 'import rescene; print(rescene.__path__[0])')/locks/base.txt" \\
 && pip install --no-cache-dir "{torch}"{onnx}
RUN useradd --uid {uid} --no-create-home --home-dir /tmp --shell /usr/sbin/nologin service
COPY --chmod=444 {model} /model/{model}
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER {uid}
WORKDIR /tmp
EXPOSE {port}
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \\
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:{port}/health', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT {start}
"""


def write_container(model: Path, out: Path, trust: bool = False) -> list[Path]:
    """Put a model and its Containerfile into the folder ``out``, which must be new or empty. A run is exported first."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = "name a folder that does not exist yet"
        raise ConfigError("E502", "the folder of the container is not empty", where=str(out), fix=fix)
    open_model(model, trust)  # a file that cannot be opened here cannot be opened there
    out.mkdir(parents=True, exist_ok=True)
    if model.is_dir():
        export(model, ["safetensors"], out)
        file = out / "model.safetensors"
    else:
        file = Path(shutil.copyfile(model, out / f"model{model.suffix.lower()}"))
    recipe, ignore = out / "Containerfile", out / ".dockerignore"
    recipe.write_text(containerfile(file.name), encoding="utf-8")
    ignore.write_text(f"*\n!Containerfile\n!{file.name}\n", encoding="utf-8")
    return [recipe, ignore, file]


def containerfile(model: str) -> str:
    """The Containerfile that serves the file ``model`` of its folder."""
    kind = model.rpartition(".")[2]
    trust = ["--trust"] if kind in CAN_RUN_CODE else []
    start = ["rescene", "serve", f"/model/{model}", "--host", "0.0.0.0", "--port", str(PORT), *trust]
    return CONTAINERFILE.format(
        port=PORT,
        uid=UID,
        version=rescene.__version__,
        torch=TORCH,
        model=model,
        onnx=' "onnx>=1.17" "onnxscript>=0.6" "onnxruntime>=1.18"' if kind == "onnx" else "",
        start=json.dumps(start),
    )
