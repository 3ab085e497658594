"""The three files a model can live in. Each holds the weights and, as JSON, what they are (``about``).

safetensors: weights only, for rescene and people who build the network themselves; with those of a lens of the user's.
pt2, onnx: the whole computation, uint8 pixels [n, 3, S, S] to logits [n, classes]; run without rescene.

Opening a pt2 file can run its maker's code: torch keeps parts of it as pickles. The other two hold numbers and operators.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.errors import ConfigError, lines_of
from rescene.nets.model_file import LENS
from rescene.nets.weights import KEY, read_weights

CAN_RUN_CODE = {"pt2"}  # opened only if the user trusts the file


def write_safetensors(whole: Any, about: str, path: Path) -> None:
    """Write the weights, the user's lens if there is one, and the description to a safetensors file."""
    from safetensors.torch import save

    tensors = dict(whole.net.state_dict())
    if whole.lens is not None and whole.lens.content is not None:  # a lens of the user's: nobody else has its file
        tensors |= {f"{LENS}{key}": value for key, value in whole.lens.content[1].items()}
    path.write_bytes(save({key: value.contiguous() for key, value in tensors.items()}, {KEY: about}))


def write_pt2(whole: nn.Module, about: str, path: Path) -> None:
    """Write the whole model as a ``torch.export`` program, with the description inside."""
    example, shapes = _example(about)
    program = torch.export.export(whole, example, dynamic_shapes=shapes)
    torch.export.save(program, path, extra_files={f"{KEY}.json": about})


def write_onnx(whole: nn.Module, about: str, path: Path) -> None:
    """Write the whole model as an ONNX program, with the description inside."""
    require_onnx()
    import onnx

    example, shapes = _example(about)
    with _hushed():
        torch.onnx.export(
            whole,
            example,
            path,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["pixels"],
            output_names=["scores"],
            external_data=False,
            verbose=False,
        )
    model = onnx.load(path)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, about
    onnx.save(model, path)


def read_pt2(path: Path) -> tuple[str | None, Callable[[Tensor], Tensor]]:
    """The description and a function from pixels to scores. A damaged file is an error."""
    extra = {f"{KEY}.json": ""}
    try:
        module = torch.export.load(path, extra_files=extra).module()
    except Exception as error:  # zip, pickle and torch's own, depending on where the damage is
        raise _damaged(path, error) from None
    return extra[f"{KEY}.json"], torch.no_grad()(module)


def read_onnx(path: Path) -> tuple[str | None, Callable[[Tensor], Tensor]]:
    """The description and a function from pixels to scores, run by onnxruntime on the CPU."""
    require_onnx()
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no public base
        raise _damaged(path, error) from None

    def scores(pixels: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])

    return session.get_modelmeta().custom_metadata_map.get(KEY), scores


WRITERS: dict[str, Callable[[Any, str, Path], None]] = {
    "safetensors": write_safetensors,
    "pt2": write_pt2,
    "onnx": write_onnx,
}
READERS: dict[str, Callable[[Path], tuple[str | None, Any]]] = {
    "safetensors": read_weights,
    "pt2": read_pt2,
    "onnx": read_onnx,
}


def require_onnx() -> None:
    """Raise a ConfigError (E182) that names the missing packages."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "E182",
            f"ONNX files need {', '.join(missing)}",
            why="it is not part of the plain installation",
            fix="pip install 'rescene[onnx]', or --to safetensors",
        )


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Torch's exporter talks about its progress and about packages it does not need here."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _example(about: str) -> tuple[tuple[Tensor], tuple[Any]]:
    """Pictures to trace the computation with; the number of pictures stays free."""
    size = picture_size(json.loads(about))
    return (torch.zeros(2, 3, size, size, dtype=torch.uint8),), ({0: torch.export.Dim("batch")},)


def picture_size(about: dict[str, Any]) -> int:
    """Side of the pictures that the whole computation takes: the network's, or those before its lens."""
    return int(about.get("picture_size") or about["arch"]["image_size"])


def _damaged(path: Path, error: Exception) -> ConfigError:
    why = lines_of(error)[0]
    return ConfigError("E183", "this model file cannot be read", where=str(path), why=why, fix="export it again")
