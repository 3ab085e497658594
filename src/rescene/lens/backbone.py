"""A user's own frozen network as a lens: a timm model with a checkpoint file, or an ONNX program.

    picture    resized to the side that the network takes, from 0 to 1, minus ``pixel_mean``, divided by ``pixel_std``
    network    one vector for each picture (maps are averaged over their places)
    features   in deviations from the mean of procedural pictures, as those of `leaves` are: a public unit, in which no site's
               image has a part

Nothing is downloaded. Checkpoints are read as numbers only, and an ONNX file holds operators only; a .pt2 file could run code,
so it is turned into an ONNX program once, by somebody who trusts it (`rescene lens take FILE.pt2 --trust`).
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.errors import DataError, lines_of
from rescene.lens.features import resized
from rescene.lens.leaves import draw_leaves
from rescene.nets.timm_networks import TIMM, checkpoint, fitting, need, timm_network

IDENTITY = {  # what a lens computes, besides its tensors
    "timm": ("kind", "net", "size", "pixel_mean", "pixel_std"),
    "onnx": ("kind", "size", "pixel_mean", "pixel_std"),
}
UNSAID = "a file of the user; nobody here knows what it was made from"
NUM_PICTURES = 256  # procedural ones, for mean and deviation of each feature
LEAST_DEVIATION = 0.1  # of the median one: what hardly varies on procedural pictures is not blown up
BATCH = 16
Content = tuple[dict[str, Any], dict[str, Tensor]]  # what a lens file says, and its tensors


class Backbone(nn.Module):
    """pixels uint8 [n, 3, s, s] -> standardised features [n, d]."""

    pixel_mean: Tensor
    pixel_std: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(self, net: nn.Module, told: Mapping[str, Any], mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.net, self.size = net, int(told["size"])
        for name in ("pixel_mean", "pixel_std"):
            self.register_buffer(name, torch.tensor(told[name], dtype=torch.float32).reshape(1, 3, 1, 1))
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        self.requires_grad_(False).eval()

    def forward(self, pixels: Tensor) -> Tensor:
        return (self.raw(pixels) - self.mean) / self.deviation

    def raw(self, pixels: Tensor) -> Tensor:
        """Features before they are standardised."""
        x = resized(pixels.float() / 255, self.size)
        z: Tensor = self.net((x - self.pixel_mean) / self.pixel_std)
        return z.float() if z.ndim == 2 else z.float().mean(dim=(2, 3))


class Program(nn.Module):
    """An ONNX program, run by onnxruntime on the CPU."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__()
        need("onnxruntime", "onnx")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no public base
            raise no_program(where, lines_of(error)[0]) from None
        taken = self.session.get_inputs()
        if len(taken) != 1:
            raise no_program(where, f"it takes {len(taken)} inputs, not one batch of pictures")
        self.input, shape = taken[0].name, taken[0].shape
        if taken[0].type not in ("tensor(uint8)", "tensor(float)"):
            raise no_program(where, f"its input is a {taken[0].type}, not uint8 or float32")
        self.takes_bytes = taken[0].type == "tensor(uint8)"
        if len(shape) != 4 or shape[1] != 3 or not isinstance(shape[2], int) or shape[2] != shape[3]:
            raise no_program(where, f"its input is {shape}, not [n, 3, side, side] with a fixed side")
        if isinstance(shape[0], int) and shape[0] != 1:
            raise no_program(where, f"it takes {shape[0]} pictures at a time; let the number free, or make it one")
        self.size, self.one_by_one = int(shape[2]), shape[0] == 1

    def forward(self, x: Tensor) -> Tensor:
        """x: what :class:`Backbone` gives; a program that takes bytes gets them back as 0 to 255."""
        values = (x * 255).round().clamp(0, 255).to(torch.uint8) if self.takes_bytes else x
        parts = values.cpu().split(1 if self.one_by_one else len(values))
        found = [torch.from_numpy(self.session.run(None, {self.input: part.numpy()})[0]) for part in parts]
        return torch.cat(found).to(x.device)


def backbone(told: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Backbone:
    """The network of a lens file. ValueError and its kin for what does not fit."""
    if told["kind"] == "onnx":
        net: nn.Module = Program(tensors["program"].numpy().tobytes(), where)
        if net.size != told["size"]:
            raise ValueError(f"the program takes {net.size} pixels, the file says {told['size']}")
    else:
        net = timm_network(told["net"], where)
        net.load_state_dict({key[4:]: value for key, value in tensors.items() if key.startswith("net.")})
    return Backbone(net, told, tensors["mean"].float(), tensors["deviation"].float())


def take_timm(name: str, file: Path, made_from: str | None = None) -> Content:
    """A timm network with the weights of a checkpoint file, its own input size and normalisation, without its classifier."""
    net = timm_network(name, f"{TIMM}{name}")
    net.load_state_dict(fitting(checkpoint(file), net.state_dict(), file, name))
    about: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    told = {
        "kind": "timm",
        "net": name,
        "size": int(about["input_size"][1]),
        "pixel_mean": list(about["mean"]),
        "pixel_std": list(about["std"]),
        "made_from": made_from or UNSAID,
    }
    tensors = {f"net.{key}": value.contiguous() for key, value in net.state_dict().items()}
    return measured(told, tensors, net, f"{TIMM}{name}")


def take_onnx(
    data: bytes,
    where: str,
    made_from: str | None = None,
    pixel_mean: Sequence[float] = (0.0, 0.0, 0.0),
    pixel_std: Sequence[float] = (1.0, 1.0, 1.0),
) -> Content:
    """An ONNX program whose input is one batch of RGB pictures, [n, 3, side, side]: uint8, or float32 normalised as said."""
    net = Program(data, where)
    if min(pixel_std) <= 0:
        raise no_program(where, "--std must be above zero")
    if net.takes_bytes and (any(pixel_mean) or any(value != 1 for value in pixel_std)):
        raise no_program(where, "it takes bytes, which are not normalised; leave --mean and --std out")
    told = {"kind": "onnx", "size": net.size, "pixel_mean": list(pixel_mean), "pixel_std": list(pixel_std)}
    program = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return measured(told | {"made_from": made_from or UNSAID}, {"program": program}, net, where)


def onnx_of_pt2(file: Path) -> bytes:
    """An exported torch program as ONNX. Opening the file can run its maker's code: the caller has asked for trust."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        need(module, "onnx")
    try:
        program = torch.export.load(file)
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            made = Path(folder) / "program.onnx"
            torch.onnx.export(program, (), made, dynamo=True, external_data=False, verbose=False)
            return made.read_bytes()
    except Exception as error:  # zip, pickle and torch's own, depending on what is wrong
        raise no_program(str(file), lines_of(error)[0]) from None


@torch.no_grad()
def measured(told: dict[str, Any], tensors: dict[str, Tensor], net: nn.Module, where: str) -> Content:
    """With mean and deviation of every feature over procedural pictures, always the same ones."""
    raw = Backbone(net, told, torch.zeros(1), torch.ones(1)).raw
    pictures = draw_leaves(NUM_PICTURES, torch.Generator().manual_seed(0))
    try:
        z = torch.cat([raw(part) for part in pictures.split(BATCH)])
    except Exception as error:  # of whatever runs the network
        raise no_program(where, f"it gives no features for a picture: {lines_of(error)[0]}") from None
    if z.ndim != 2 or not z.isfinite().all():
        raise no_program(where, f"it gives {list(z.shape[1:])} numbers for a picture, or some that are not finite")
    deviation = z.std(dim=0)
    deviation = deviation.clamp_min(max(LEAST_DEVIATION * float(deviation.median()), 1e-6))
    return told, tensors | {"mean": z.mean(dim=0), "deviation": deviation}


def no_program(where: str, why: str) -> DataError:
    """The error for an ONNX program that does not map pictures to features."""
    fix = "one input, RGB pictures [n, 3, side, side] in uint8 or float32; one output, [n, features]"
    return DataError("E226", "this program is not a lens", where=where, why=why, fix=fix)
