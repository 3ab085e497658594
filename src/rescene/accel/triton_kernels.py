"""Batch normalisation, addition of a shortcut and ReLU as one operation on a GPU (Triton), forward and backward.

    y = relu(gamma (x - m) / sqrt(v + eps) + beta + r)        r and the relu are optional

The three together move each image two or three times through memory instead of six. Images are channels-last, so that a
batch is a matrix [rows = n h w, channels]. Training takes m and v from the batch and updates the running statistics. Sums
over rows are collected as integers (fixed point), which gives the same bits in whatever order programs finish. Only the
first ``valid`` images of a batch count, so that one recorded step serves batches of every size. Without Triton, or off a
GPU, ``rescene.accel.fused_layers`` uses torch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGE = 2**22  # elements of a batch from which on memory, not the number of programs, limits a kernel
FORWARD_SCALE = 2.0**20  # fixed point: sums of x and x^2 up to 8e12, to 1e-6
BACKWARD_SCALE = 2.0**40  # sums of gradients up to 8e6, to 1e-12


@triton.jit
def _moments(sums, lanes, channels, rows, SCALE: tl.constexpr):
    """Mean and variance of these channels."""
    m = tl.load(sums + lanes).to(tl.float32) / (SCALE * rows)
    return m, tl.maximum(tl.load(sums + channels + lanes).to(tl.float32) / (SCALE * rows) - m * m, 0.0)


@triton.jit(do_not_specialize=["relu", "from_y"])
def _sums_kernel(
    x, dy, y, gamma, beta, forward, backward, valid, area, channels, eps, relu, from_y,
    FORWARD_SCALE: tl.constexpr, BACKWARD_SCALE: tl.constexpr, BACKWARD: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Forward: sum x and sum x^2 of each channel. Backward: sum g and sum g xhat."""
    rows = tl.load(valid) * area
    lanes = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first = tl.zeros([ROWS, WIDTH], tl.float32)
    second = tl.zeros([ROWS, WIDTH], tl.float32)
    if BACKWARD:
        mean, variance = _moments(forward, lanes, channels, rows, FORWARD_SCALE)
        r = 1.0 / tl.sqrt(variance + eps)
        scale = (tl.load(gamma + lanes) * r)[None, :]
        m, r = mean[None, :], r[None, :]
        shift = tl.load(beta + lanes)[None, :]
    for tile in tl.static_range(TILES):
        index = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask = (index < rows)[:, None]
        place = index[:, None] * channels + lanes[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            g = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
            below = (value - m) * scale + shift  # what the relu saw, unless a shortcut was added
            above = tl.load(y + place, mask=mask & (index < rows * from_y)[:, None], other=0.0).to(tl.float32)
            g = tl.where((tl.where(from_y != 0, above, below) > 0) | (relu == 0), g, 0.0)
            first += g
            second += g * (value - m) * r
        else:
            first += value
            second += value * value
    out = backward if BACKWARD else forward
    fixed = BACKWARD_SCALE if BACKWARD else FORWARD_SCALE
    tl.atomic_add(out + lanes, (tl.sum(first, axis=0) * fixed).to(tl.int64), sem="relaxed")
    tl.atomic_add(out + channels + lanes, (tl.sum(second, axis=0) * fixed).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["relu", "add"])
def _forward_kernel(
    x, gamma, beta, shortcut, y, sums, running_mean, running_var, valid, area, total, channels, momentum, eps, relu, add,
    SCALE: tl.constexpr, TRAIN: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    lanes = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if TRAIN:
        rows = tl.load(valid) * area
        m, v = _moments(sums, lanes, channels, rows, SCALE)
        if tl.program_id(0) == 0:  # one program of each column writes for all
            unbiased = v * rows / tl.maximum(rows - 1, 1)
            tl.store(running_mean + lanes, (1 - momentum) * tl.load(running_mean + lanes) + momentum * m)
            tl.store(running_var + lanes, (1 - momentum) * tl.load(running_var + lanes) + momentum * unbiased)
    else:
        m, v = tl.load(running_mean + lanes), tl.load(running_var + lanes)
    scale = tl.load(gamma + lanes) * (1.0 / tl.sqrt(v + eps))
    shift = tl.load(beta + lanes)
    for tile in tl.static_range(TILES):
        index = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        place = index[:, None] * channels + lanes[None, :]
        mask = place < total
        value = tl.load(x + place, mask=mask).to(tl.float32)
        value = (value - m[None, :]) * scale[None, :] + shift[None, :]
        value += tl.load(shortcut + place, mask=place < total * add, other=0.0).to(tl.float32)
        value = tl.where((value > 0) | (relu == 0), value, 0.0)
        tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["relu", "add", "from_y"])
def _backward_kernel(
    dy, y, x, gamma, beta, forward, backward, running_var, dx, dshortcut, dgamma, dbeta, valid, area, total, channels,
    eps, relu, add, from_y,
    FORWARD_SCALE: tl.constexpr, BACKWARD_SCALE: tl.constexpr, TRAIN: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    lanes = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if TRAIN:
        rows = tl.load(valid) * area
        m, v = _moments(forward, lanes, channels, rows, FORWARD_SCALE)
        r = 1.0 / tl.sqrt(v + eps)
        shift = tl.load(beta + lanes)
        sum_g = tl.load(backward + lanes).to(tl.float32) / BACKWARD_SCALE
        sum_gx = tl.load(backward + channels + lanes).to(tl.float32) / BACKWARD_SCALE
        if tl.program_id(0) == 0:
            tl.store(dbeta + lanes, sum_g)
            tl.store(dgamma + lanes, sum_gx)
        share, slope = sum_g / rows, r * sum_gx / rows
    else:
        r = 1.0 / tl.sqrt(tl.load(running_var + lanes) + eps)
    scale = tl.load(gamma + lanes) * r
    for tile in tl.static_range(TILES):
        index = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        place = index[:, None] * channels + lanes[None, :]
        mask = place < total
        g = tl.load(dy + place, mask=mask).to(tl.float32)
        above = tl.load(y + place, mask=place < total * from_y, other=0.0).to(tl.float32)
        if TRAIN:
            centred = tl.load(x + place, mask=mask).to(tl.float32) - m[None, :]
            above = tl.where(from_y != 0, above, centred * scale[None, :] + shift[None, :])
        g = tl.where((above > 0) | (relu == 0), g, 0.0)
        tl.store(dshortcut + place, g.to(dshortcut.dtype.element_ty), mask=place < total * add)
        if TRAIN:
            g -= share[None, :] + centred * slope[None, :]
            g = tl.where((index < rows)[:, None], g, 0.0)  # images that do not count teach nothing
        tl.store(dx + place, (g * scale[None, :]).to(dx.dtype.element_ty), mask=mask)


def _tiles(x: Tensor, rows: int, width: int, tiles: int, num_warps: int = 4) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid over the matrix [rows, channels], and what a program does: ``tiles`` tiles of rows x width, one after another.

    Where ``width`` does not divide the channels, tiles get narrower and longer. The sizes our callers ask for are the
    fastest of a search over the layers of a ResNet-18 (results/bench/README.md).
    """
    height, channels = x.numel() // x.shape[1], x.shape[1]
    narrow = min(width, channels & -channels)  # Triton wants powers of two
    rows = rows * width // narrow
    tile = {"ROWS": rows, "TILES": tiles, "WIDTH": narrow, "num_warps": num_warps}
    return (triton.cdiv(height, rows * tiles), channels // narrow), tile


def _many(x: Tensor, share: int) -> int:
    """1 to 4 tiles of a program, one for each ``share`` elements."""
    return 4 if x.numel() >= 4 * share else 2 if x.numel() >= 2 * share else 1


def _collect_sums(
    x: Tensor, dy: Tensor, y: Tensor, gamma: Tensor, beta: Tensor, place: dict[str, Any], relu: bool, from_y: bool,
    backward: bool,
) -> None:  # fmt: skip
    grid, tile = _tiles(x, 128, 32, 2) if backward else _tiles(x, 256, 32, _many(x, 2**20))
    _sums_kernel[grid](
        x, dy, y, gamma, beta, place["sums"][0], place["sums"][1], place["valid"], x[0, 0].numel(), x.shape[1],
        place["eps"], int(relu), int(from_y),
        FORWARD_SCALE=FORWARD_SCALE, BACKWARD_SCALE=BACKWARD_SCALE, BACKWARD=backward, **tile,
    )  # fmt: skip


class NormAct(torch.autograd.Function):
    """``place`` holds what outlives the call: running statistics, the number of valid images, and the channels' sums
    [2, 2, channels] (forward, backward), which must be zero when a training step begins."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None, relu: bool, train: bool,
        place: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        x = x.contiguous(memory_format=torch.channels_last)
        if shortcut is not None:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        if train:
            _collect_sums(x, x, x, gamma, beta, place, False, False, backward=False)
        y, add = torch.empty_like(x), shortcut is not None
        grid, tile = _tiles(x, 128, 64, _many(x, 2**21), 8) if x.numel() >= LARGE else _tiles(x, 64, 32, 2)
        _forward_kernel[grid](
            x, gamma, beta, x if shortcut is None else shortcut, y, place["sums"][0], place["running_mean"],
            place["running_var"], place["valid"], x[0, 0].numel(), x.numel(), x.shape[1], place["momentum"],
            place["eps"], int(relu), int(add), SCALE=FORWARD_SCALE, TRAIN=train, **tile,
        )  # fmt: skip
        from_y = relu and (add or not train)  # else what the relu saw can be computed again from x
        ctx.save_for_backward(x if train else None, gamma, beta, y if from_y else None)
        ctx.settings = (relu, train, add, from_y, place)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, y = ctx.saved_tensors
        relu, train, add, from_y, place = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        x, y = dy if x is None else x, dy if y is None else y
        if train:
            _collect_sums(x, dy, y, gamma, beta, place, relu, from_y, backward=True)
        dx, dgamma, dbeta = torch.empty_like(dy), torch.empty_like(gamma), torch.empty_like(beta)
        masked = add and relu  # else the shortcut's gradient is dy itself
        dshortcut = torch.empty_like(dy) if masked else dy
        grid, tile = _tiles(dy, 64, 64, _many(dy, 2**21)) if dy.numel() >= LARGE else _tiles(dy, 128, 64, 1)
        _backward_kernel[grid](
            dy, y, x, gamma, beta, place["sums"][0], place["sums"][1], place["running_var"], dx, dshortcut, dgamma,
            dbeta, place["valid"], dy[0, 0].numel(), dy.numel(), dy.shape[1], place["eps"],
            int(relu), int(masked), int(from_y),
            FORWARD_SCALE=FORWARD_SCALE, BACKWARD_SCALE=BACKWARD_SCALE, TRAIN=train, **tile,
        )  # fmt: skip
        gradients = (dgamma, dbeta) if train else (None, None)
        return dx, *gradients, dshortcut if add else None, None, None, None


@triton.jit
def _look_kernel(
    pictures, labels, order, start, end, crops, x, y, valid, total, height, width, pad, num_orders, size,
    m0, m1, m2, s0, s1, s2, f0, f1, f2,
    BYTES: tl.constexpr, CROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    channel, rest = place % 3, place // 3
    column, rest = rest % width, rest // width
    row, image = rest % height, rest // height
    begin = tl.load(start)
    if tl.program_id(0) == 0:
        tl.store(valid, tl.minimum(tl.load(end) - begin, size).to(tl.int32))
    turn = begin + image
    index = tl.load(order + turn, mask=mask, other=0)
    tl.store(y + image, tl.load(labels + index, mask=mask, other=0), mask=mask & (place % (3 * height * width) == 0))
    inside = mask
    if CROP:
        down = tl.load(crops + turn, mask=mask, other=0)
        right = tl.load(crops + num_orders + turn, mask=mask, other=0)
        mirror = tl.load(crops + 2 * num_orders + turn, mask=mask, other=0)
        row = row + down - pad
        column = tl.where(mirror != 0, width - 1 - column, column) + right - pad
        inside = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    value = tl.load(pictures + ((index * 3 + channel) * height + row) * width + column, mask=inside, other=0)
    value = value.to(tl.float32)
    if BYTES:
        mean = tl.where(channel == 0, m0, tl.where(channel == 1, m1, m2))
        std = tl.where(channel == 0, s0, tl.where(channel == 1, s1, s2))
        value = (value / 255 - mean) / std
    if CROP:
        black = tl.where(channel == 0, f0, tl.where(channel == 1, f1, f2))
        value = tl.where(inside, value, black)
    tl.store(x + place, value.to(x.dtype.element_ty), mask=mask)


def look(
    pictures: Tensor, labels: Tensor, order: Tensor, span: tuple[Tensor, Tensor], crops: Tensor | None,
    x: Tensor, y: Tensor, valid: Tensor, transform: Any,
) -> None:  # fmt: skip
    """See ``rescene.accel.fused_layers.look``; ``x`` is channels-last."""
    start, end = span
    _look_kernel[(triton.cdiv(x.numel(), 1024),)](
        pictures, labels, order, start, end, order if crops is None else crops, x, y, valid, x.numel(),
        x.shape[2], x.shape[3], transform.pad, len(order), len(x), *transform.mean, *transform.std, *transform.fill,
        BYTES=pictures.dtype == torch.uint8, CROP=crops is not None, BLOCK=1024,
    )  # fmt: skip


@triton.jit
def _sgd_kernel(theta, velocity, gradient, low, lr, momentum, decay, total, LOW: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    t = tl.load(theta + place, mask=mask)
    g = tl.load(gradient + place, mask=mask).to(tl.float32) + decay * t
    v = momentum * tl.load(velocity + place, mask=mask) + g
    t -= tl.load(lr) * v
    tl.store(velocity + place, v, mask=mask)
    tl.store(theta + place, t, mask=mask)
    if LOW:
        tl.store(low + place, t.to(low.dtype.element_ty), mask=mask)


def sgd_(
    theta: Tensor, velocity: Tensor, gradient: Tensor, low: Tensor | None, lr: Tensor, momentum: float, decay: float
) -> None:
    """v <- momentum v + (g + decay theta); theta <- theta - lr v; ``low`` receives theta in half precision."""
    _sgd_kernel[(triton.cdiv(theta.numel(), 2048),)](
        theta, velocity, gradient, theta if low is None else low, lr, momentum, decay, theta.numel(),
        LOW=low is not None, BLOCK=2048, num_warps=8,
    )  # fmt: skip


@triton.jit
def _loss_kernel(logits, adjustment, y, valid, losses, gradient, classes, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < classes
    count = tl.load(valid)
    f = tl.load(logits + row * classes + lane, mask=mask, other=float("-inf"))
    f += tl.load(adjustment + lane, mask=mask, other=0.0)
    top = tl.max(f, axis=0)
    e = tl.exp(f - top)
    total = tl.sum(e, axis=0)
    label = tl.load(y + row)
    share = tl.where(row < count, 1.0 / count, 0.0)  # an image that does not count has no loss and no gradient
    own = tl.sum(tl.where(lane == label, f, 0.0), axis=0)
    tl.store(losses + row, (top + tl.log(total) - own) * share)
    g = (e / total - tl.where(lane == label, 1.0, 0.0)) * share
    tl.store(gradient + row * classes + lane, g, mask=mask)


def loss_and_gradient(logits: Tensor, adjustment: Tensor, y: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """See ``rescene.accel.fused_layers.loss_and_gradient``."""
    losses, gradient = torch.empty(len(logits), device=logits.device), torch.empty_like(logits)
    classes = logits.shape[1]
    _loss_kernel[(len(logits),)](
        logits, adjustment, y, valid, losses, gradient, classes, BLOCK=triton.next_power_of_2(classes), num_warps=1
    )  # fmt: skip
    return losses, gradient
