"""Batch normalisation, addition of a shortcut and ReLU as one operation on a GPU (Triton), forward and backward.

    y = relu(gamma (x - m) / sqrt(v + eps) + beta + r)        r and the relu are optional

The three together move each image two or three times through memory instead of six. Images are channels-last, so that a
batch is a matrix [rows = n h w, channels]. Training takes m and v from the batch and updates the running statistics; the
sums of a channel always run in the same order. Only the first ``valid`` images of a batch count, so that one recorded step
serves batches of every size. Without Triton, or off a GPU, ``rescene.steps.fused`` uses torch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # rows of a tile
WIDTH = 64  # channels of a tile, where there are as many
PROGRAMS = 264  # two for each multiprocessor of a large card
BLOCK = 4096  # elements of a program that treats every element alone


@triton.jit
def _sums_kernel(
    x, dy, y, mean, rstd, partial, counter, out, running_mean, running_var, valid, area, channels, per_program,
    momentum, eps,
    BACKWARD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Forward: mean and 1/std of each channel. Backward: sum g and sum g xhat. The last program of a column adds up."""
    part, column = tl.program_id(0), tl.program_id(1)
    rows = tl.load(valid) * area
    num_parts = tl.num_programs(0)
    lanes = column * WIDTH + tl.arange(0, WIDTH)
    first = tl.zeros([ROWS, WIDTH], tl.float32)
    second = tl.zeros([ROWS, WIDTH], tl.float32)
    if BACKWARD:
        m = tl.load(mean + lanes)[None, :]
        r = tl.load(rstd + lanes)[None, :]
    begin = part * per_program
    for row in range(begin, begin + per_program, ROWS):
        index = row + tl.arange(0, ROWS)
        mask = (index < rows)[:, None] & (index < begin + per_program)[:, None]
        place = index[:, None] * channels + lanes[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            g = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
            if RELU:
                g = tl.where(tl.load(y + place, mask=mask, other=0.0).to(tl.float32) > 0, g, 0.0)
            first += g
            second += g * (value - m) * r
        else:
            first += value
            second += value * value
    tl.store(partial + part * channels + lanes, tl.sum(first, axis=0))
    tl.store(partial + (num_parts + part) * channels + lanes, tl.sum(second, axis=0))
    tl.debug_barrier()  # all partial sums of this program are written before it says so
    if tl.atomic_add(counter + column, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        tl.store(counter + column, 0)  # ready for the next call
        a = tl.zeros([WIDTH], tl.float32)
        b = tl.zeros([WIDTH], tl.float32)
        for p in range(0, num_parts, PARTS):
            index = p + tl.arange(0, PARTS)
            mask = (index < num_parts)[:, None]
            place = index[:, None] * channels + lanes[None, :]
            a += tl.sum(tl.load(partial + place, mask=mask, other=0.0, volatile=True), axis=0)
            b += tl.sum(tl.load(partial + num_parts * channels + place, mask=mask, other=0.0, volatile=True), axis=0)
        if BACKWARD:
            tl.store(out + lanes, a)
            tl.store(out + channels + lanes, b)
        else:
            m = a / rows
            v = tl.maximum(b / rows - m * m, 0.0)
            tl.store(out + lanes, m)
            tl.store(out + channels + lanes, 1.0 / tl.sqrt(v + eps))
            unbiased = v * rows / tl.maximum(rows - 1, 1)
            tl.store(running_mean + lanes, (1 - momentum) * tl.load(running_mean + lanes) + momentum * m)
            tl.store(running_var + lanes, (1 - momentum) * tl.load(running_var + lanes) + momentum * unbiased)


@triton.jit
def _forward_kernel(
    x, mean, spread, gamma, beta, shortcut, y, total, channels, eps,
    SPREAD_IS_VARIANCE: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    lane = place % channels
    r = tl.load(spread + lane)
    if SPREAD_IS_VARIANCE:
        r = 1.0 / tl.sqrt(r + eps)
    scale = tl.load(gamma + lane) * r
    value = tl.load(x + place, mask=mask).to(tl.float32)
    value = (value - tl.load(mean + lane)) * scale + tl.load(beta + lane)
    if ADD:
        value += tl.load(shortcut + place, mask=mask).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy, y, x, mean, spread, gamma, sums, dx, dshortcut, valid, area, total, channels, eps,
    TRAIN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    lane = place % channels
    g = tl.load(dy + place, mask=mask).to(tl.float32)
    if RELU:
        g = tl.where(tl.load(y + place, mask=mask).to(tl.float32) > 0, g, 0.0)
    if ADD:
        tl.store(dshortcut + place, g.to(dshortcut.dtype.element_ty), mask=mask)
    r = tl.load(spread + lane)
    if TRAIN:
        rows = tl.load(valid) * area
        hat = (tl.load(x + place, mask=mask).to(tl.float32) - tl.load(mean + lane)) * r
        g -= (tl.load(sums + lane) + hat * tl.load(sums + channels + lane)) / rows
        g = tl.where(place < rows * channels, g, 0.0)  # images that do not count teach nothing
    else:
        r = 1.0 / tl.sqrt(r + eps)
    tl.store(dx + place, (g * tl.load(gamma + lane) * r).to(dx.dtype.element_ty), mask=mask)


def _sums(x: Tensor, backward: tuple[Tensor, ...] | None, relu: bool, place: dict[str, Any]) -> Tensor:
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    width = min(WIDTH, channels)
    columns = channels // width
    parts = max(1, min(PROGRAMS // columns, triton.cdiv(rows, ROWS)))
    per_program = triton.cdiv(triton.cdiv(rows, parts), ROWS) * ROWS
    parts = triton.cdiv(rows, per_program)
    partial = torch.empty(2, parts, channels, device=x.device)
    out = torch.empty(2, channels, device=x.device)
    dy, y, mean, rstd = backward or (x, x, x, x)
    _sums_kernel[(parts, columns)](
        x, dy, y, mean, rstd, partial, place["counter"], out, place["running_mean"], place["running_var"],
        place["valid"], rows // len(x), channels, per_program, place["momentum"], place["eps"],
        BACKWARD=backward is not None, RELU=relu, ROWS=ROWS, WIDTH=width, PARTS=32, num_warps=8,
    )  # fmt: skip
    return out


class NormAct(torch.autograd.Function):
    """``place`` holds what outlives the call: running statistics, the number of valid images, the kernel's counters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None, relu: bool, train: bool,
        place: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        x = x.contiguous(memory_format=torch.channels_last)
        if shortcut is not None:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        found = _sums(x, None, False, place) if train else None
        mean, spread = found if found is not None else (place["running_mean"], place["running_var"])
        y = torch.empty_like(x)
        _forward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, mean, spread, gamma, beta, x if shortcut is None else shortcut, y, x.numel(), x.shape[1], place["eps"],
            SPREAD_IS_VARIANCE=not train, ADD=shortcut is not None, RELU=relu, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(x if train else None, gamma, mean, spread, y if relu else None)
        ctx.settings = (relu, train, shortcut is not None, place)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, spread, y = ctx.saved_tensors
        relu, train, add, place = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        y = dy if y is None else y
        sums = _sums(x, (dy, y, mean, spread), relu, place) if train else mean
        dx = torch.empty_like(dy)
        dshortcut = torch.empty_like(dy) if add and relu else dy
        _backward_kernel[(triton.cdiv(dy.numel(), BLOCK),)](
            dy, y, dy if x is None else x, mean, spread, gamma, sums, dx, dshortcut, place["valid"],
            dy[0, 0].numel(), dy.numel(), dy.shape[1], place["eps"],
            TRAIN=train, ADD=add and relu, RELU=relu, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        dgamma, dbeta = (sums[1], sums[0]) if train else (None, None)
        return dx, dgamma, dbeta, dshortcut if add else None, None, None, None


@triton.jit
def _look_kernel(
    pictures, labels, order, start, crops, x, y, total, height, width, pad, num_orders,
    m0, m1, m2, s0, s1, s2, f0, f1, f2,
    BYTES: tl.constexpr, CROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    channel, rest = place % 3, place // 3
    column, rest = rest % width, rest // width
    row, image = rest % height, rest // height
    turn = tl.load(start) + image
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
    pictures: Tensor, labels: Tensor, order: Tensor, start: Tensor, crops: Tensor | None, x: Tensor, y: Tensor,
    transform: Any,
) -> None:  # fmt: skip
    """Fill ``x`` (channels-last) and ``y`` with the batch that begins at place ``start`` of ``order``, cropped and mirrored."""
    _look_kernel[(triton.cdiv(x.numel(), 1024),)](
        pictures, labels, order, start, order if crops is None else crops, x, y, x.numel(), x.shape[2], x.shape[3],
        transform.pad, len(order), *transform.mean, *transform.std, *transform.fill,
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
