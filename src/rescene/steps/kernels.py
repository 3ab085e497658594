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

ROWS = 128  # rows of a tile
WIDTH = 32  # channels of a tile, where there are as many
PARTS = 256  # pieces at most that the rows are cut into; their sums are added up in one go
BLOCK = 4096  # elements of a program that treats every element alone


@triton.jit(do_not_specialize=["relu", "from_y"])
def _sums_kernel(
    x, dy, y, mean, rstd, gamma, beta, partial, counter, out, running_mean, running_var, valid, area, channels,
    per_program, momentum, eps, relu, from_y,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
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
        scale = tl.load(gamma + lanes)[None, :] * r
        shift = tl.load(beta + lanes)[None, :]
    begin = part * per_program
    for row in range(begin, begin + per_program, ROWS):
        index = row + tl.arange(0, ROWS)
        mask = (index < rows)[:, None] & (index < begin + per_program)[:, None]
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
    tl.store(partial + part * channels + lanes, tl.sum(first, axis=0))
    tl.store(partial + (num_parts + part) * channels + lanes, tl.sum(second, axis=0))
    tl.debug_barrier()  # all partial sums of this program are written before it says so
    if tl.atomic_add(counter + column, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        tl.store(counter + column, 0)  # ready for the next call
        index = tl.arange(0, PARTS)  # read past the first-level cache, which does not see what other programs wrote
        mask = (index < num_parts)[:, None]
        place = index[:, None] * channels + lanes[None, :]
        a = tl.sum(tl.load(partial + place, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
        b = tl.sum(tl.load(partial + num_parts * channels + place, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
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


@triton.jit(do_not_specialize=["relu", "add"])
def _forward_kernel(
    x, mean, spread, gamma, beta, shortcut, y, total, channels, eps, relu, add,
    TRAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    lane = place % channels
    r = tl.load(spread + lane)
    if not TRAIN:  # then it is the running variance
        r = 1.0 / tl.sqrt(r + eps)
    value = tl.load(x + place, mask=mask).to(tl.float32)
    value = (value - tl.load(mean + lane)) * (tl.load(gamma + lane) * r) + tl.load(beta + lane)
    value += tl.load(shortcut + place, mask=place < total * add, other=0.0).to(tl.float32)
    value = tl.where((value > 0) | (relu == 0), value, 0.0)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["relu", "add", "from_y"])
def _backward_kernel(
    dy, y, x, mean, spread, gamma, beta, sums, dx, dshortcut, valid, area, total, channels, eps, relu, add, from_y,
    TRAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    lane = place % channels
    r = tl.load(spread + lane)
    g = tl.load(dy + place, mask=mask).to(tl.float32)
    above = tl.load(y + place, mask=place < total * from_y, other=0.0).to(tl.float32)
    if TRAIN:
        centred = tl.load(x + place, mask=mask).to(tl.float32) - tl.load(mean + lane)
        scale = tl.load(gamma + lane) * r
        above = tl.where(from_y != 0, above, centred * scale + tl.load(beta + lane))
    else:
        scale = tl.load(gamma + lane) / tl.sqrt(r + eps)
    g = tl.where((above > 0) | (relu == 0), g, 0.0)
    tl.store(dshortcut + place, g.to(dshortcut.dtype.element_ty), mask=place < total * add)
    if TRAIN:
        rows = tl.load(valid) * area
        g -= (tl.load(sums + lane) + centred * r * tl.load(sums + channels + lane)) / rows
        g = tl.where(place < rows * channels, g, 0.0)  # images that do not count teach nothing
    tl.store(dx + place, (g * scale).to(dx.dtype.element_ty), mask=mask)


def _sums(x: Tensor, backward: tuple[Tensor, ...] | None, relu: bool, from_y: bool, place: dict[str, Any]) -> Tensor:
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    width = min(WIDTH, channels)
    parts = min(PARTS, triton.cdiv(rows, ROWS))
    per_program = triton.cdiv(triton.cdiv(rows, parts), ROWS) * ROWS
    parts = triton.cdiv(rows, per_program)
    partial = torch.empty(2, parts, channels, device=x.device)
    out = torch.empty(2, channels, device=x.device)
    dy, y, mean, rstd, gamma, beta = backward or (x, x, x, x, x, x)
    _sums_kernel[(parts, channels // width)](
        x, dy, y, mean, rstd, gamma, beta, partial, place["counter"], out, place["running_mean"], place["running_var"],
        place["valid"], rows // len(x), channels, per_program, place["momentum"], place["eps"], int(relu), int(from_y),
        BACKWARD=backward is not None, ROWS=ROWS, WIDTH=width, PARTS=PARTS,
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
        found = _sums(x, None, False, False, place) if train else None
        mean, spread = found if found is not None else (place["running_mean"], place["running_var"])
        y = torch.empty_like(x)
        add = shortcut is not None
        _forward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, mean, spread, gamma, beta, x if shortcut is None else shortcut, y, x.numel(), x.shape[1], place["eps"],
            int(relu), int(add), TRAIN=train, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        from_y = relu and (add or not train)  # else what the relu saw can be computed again from x
        ctx.save_for_backward(x if train else None, gamma, beta, mean, spread, y if from_y else None)
        ctx.settings = (relu, train, add, from_y, place)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, spread, y = ctx.saved_tensors
        relu, train, add, from_y, place = ctx.settings
        dy = dy.contiguous(memory_format=torch.channels_last)
        x, y = dy if x is None else x, dy if y is None else y
        sums = _sums(x, (dy, y, mean, spread, gamma, beta), relu, from_y, place) if train else mean
        dx = torch.empty_like(dy)
        masked = add and relu  # else the shortcut's gradient is dy itself
        dshortcut = torch.empty_like(dy) if masked else dy
        _backward_kernel[(triton.cdiv(dy.numel(), BLOCK),)](
            dy, y, x, mean, spread, gamma, beta, sums, dx, dshortcut, place["valid"], dy[0, 0].numel(), dy.numel(),
            dy.shape[1], place["eps"], int(relu), int(masked), int(from_y), TRAIN=train, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        dgamma, dbeta = (sums[1], sums[0]) if train else (None, None)
        return dx, dgamma, dbeta, dshortcut if add else None, None, None, None


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
    """See ``rescene.steps.fused.look``; ``x`` is channels-last."""
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
    """See ``rescene.steps.fused.loss_and_gradient``."""
    losses, gradient = torch.empty(len(logits), device=logits.device), torch.empty_like(logits)
    classes = logits.shape[1]
    _loss_kernel[(len(logits),)](
        logits, adjustment, y, valid, losses, gradient, classes, BLOCK=triton.next_power_of_2(classes), num_warps=1
    )  # fmt: skip
    return losses, gradient
