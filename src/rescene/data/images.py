"""Pictures as tensors: one uint8 tensor per split, how it looks to a network, and the parts that belong to a task and to a client.

Everything works on whole batches on the tensor's own device; there is no per-image Python code and no loader process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

Device = torch.device | str
Channels = tuple[float, ...]  # three, or as many as a lens gives


@dataclass(frozen=True, eq=False)
class Images:
    """One split. ``pixels`` uint8 [n, 3, H, W], ``labels`` int64 [n], ``domains`` and ``sites`` int64 [n] where there are any.

    Through a lens (``rescene.lens``) pictures have other channels.
    """

    pixels: Tensor
    labels: Tensor
    domains: Tensor | None = None
    sites: Tensor | None = None

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4 or self.pixels.shape[1] < 3:
            raise TypeError(f"pixels must be uint8 [n, 3, H, W], not {self.pixels.dtype} {tuple(self.pixels.shape)}")
        for name, values in (("labels", self.labels), ("domains", self.domains), ("sites", self.sites)):
            if values is not None and (values.dtype != torch.int64 or values.shape != self.pixels.shape[:1]):
                raise TypeError(f"{name} must be int64 [{len(self.pixels)}], not {values.dtype} {tuple(values.shape)}")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: Device) -> Images:
        """The same pictures on another device (no copy if they are there already)."""
        domains, sites = (None if own is None else own.to(device) for own in (self.domains, self.sites))
        moved = Images(self.pixels.to(device), self.labels.to(device), domains, sites)
        return self._hand_on(moved, slice(None))

    def relabelled(self, labels: Tensor) -> Images:
        """The same pictures with other labels."""
        return self._hand_on(replace(self, labels=labels), slice(None))

    def groups(self, *, domains: bool, sites: bool) -> Tensor:
        """A number for each picture, on the CPU: the same for those of one class and, where asked for, of one domain and site."""
        group = self.labels.cpu()
        for own, is_asked in ((self.domains, domains), (self.sites, sites)):
            if is_asked and own is not None and len(own):
                group = group * (int(own.max()) + 1) + own.cpu()
        return group

    def select(self, index: Tensor | Sequence[int] | slice) -> Images:
        """The pictures at these positions (positions, a boolean mask or a slice), copied unless a slice."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.labels.device)
            index = index if index.dtype == torch.bool else index.long()
        domains, sites = (None if own is None else own[index] for own in (self.domains, self.sites))
        return self._hand_on(Images(self.pixels[index], self.labels[index], domains, sites), index)

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """One digest of 16 bytes for each picture, by its pixels. Computed once; parts and copies of this split know theirs."""
        rows = self.pixels.cpu().flatten(1).contiguous().numpy()
        return tuple(hashlib.blake2b(row.data, digest_size=16).digest() for row in rows)

    def _hand_on(self, part: Images, index: Tensor | slice) -> Images:
        """``part``, which has the pictures at these positions, with their digests if they are known."""
        if "digests" in vars(self):
            places = torch.arange(len(self))[index if isinstance(index, slice) else index.cpu()].tolist()
            vars(part)["digests"] = tuple(self.digests[i] for i in places)
        return part


@dataclass(frozen=True)
class Transform:
    """How pictures look to the network: normalised by channel; training adds a random crop (``pad``) and mirroring.

    >>> black = Transform(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), pad=4)
    >>> black.fill
    (-2.0, -2.0, -2.0)
    """

    mean: Channels
    std: Channels
    pad: int

    @property
    def fill(self) -> Channels:
        """Black in normalised units: what a crop pads with."""
        return tuple((0.0 - m) / s for m, s in zip(self.mean, self.std, strict=True))

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [..., 3, H, W] -> float32 (x / 255 - mean) / std on the same device."""
        return (pixels.float() / 255 - _channels(self.mean, pixels)) / _channels(self.std, pixels)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Inverse of :meth:`normalise`, rounded and clamped to uint8; exact on what ``normalise`` gave."""
        values = (x.detach().float() * _channels(self.std, x) + _channels(self.mean, x)) * 255
        return values.round().clamp(0, 255).to(torch.uint8)

    @property
    def is_grey(self) -> bool:
        """Whether the data set has no colour; its channel statistics, which every site knows, tell."""
        return len(self.mean) == 3 and len(set(self.mean)) == 1 and len(set(self.std)) == 1

    def possible(self, x: Tensor) -> Tensor:
        """The nearest picture that could be one: between black and white, and grey where the data have no colour."""
        x = x.mean(dim=1, keepdim=True).expand_as(x) if self.is_grey else x
        mean, std = (torch.tensor(v, device=x.device).reshape(1, -1, 1, 1) for v in (self.mean, self.std))
        return torch.minimum(torch.maximum(x, -mean / std), (1 - mean) / std)

    def augment(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Random crop of the picture padded with black, then a mirror image or not; normalised [n, 3, H, W] in and out."""
        return self.apply(x, self.draw(len(x), generator))

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """What happens to each of ``n`` pictures: int64 [3, n] on the generator's device: down, right (0..2*pad), mirror (0, 1).

        A CPU generator gives the same draws for every device; ``pad=0`` only mirrors.
        """
        offsets = torch.randint(2 * self.pad + 1, (2, n), generator=generator, device=generator.device)
        mirror = torch.randint(2, (1, n), generator=generator, device=generator.device)
        return torch.cat([offsets, mirror])

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """Crop and mirror normalised pictures [n, 3, H, W] as drawn [3, n]."""
        draws = draws.to(x.device)
        cropped = self._crop(x, draws[:2]) if self.pad else x
        return torch.where(draws[2].bool()[:, None, None, None], cropped.flip(-1), cropped)

    def _crop(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Window of x's own size at ``offsets`` [2, n] (down, right) of each padded picture."""
        n, channels, height, width = x.shape
        black = _channels(self.fill, x).to(x.dtype)
        padded = black.expand(n, channels, height + 2 * self.pad, width + 2 * self.pad).clone()
        padded[..., self.pad : self.pad + height, self.pad : self.pad + width] = x
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [n, 3, 2 pad + 1, 2 pad + 1, H, W], a view
        return windows[torch.arange(n, device=x.device), :, offsets[0], offsets[1]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Two splits with class names. ``notes`` says what was done to the pictures; ``split`` who chose the test set:
    ``given`` (the data) or ``fraction=0.2 seed=0`` (drawn here). ``sites``: names of the places that hold the images."""

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images
    transform: Transform
    domains: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    split: str = "given"
    picture_size: int | None = None  # side before a lens, where there is one
    pictures: str | None = None  # fingerprint before a lens
    sites: tuple[str, ...] = ()

    @property
    def is_drawn(self) -> bool:
        """Whether the test images were drawn at random."""
        return "seed=" in self.split

    @property
    def has_last_as_test(self) -> bool:
        """Whether the test images are the last ones of each class."""
        return self.split.endswith("last")

    @property
    def image_size(self) -> int:
        """Side of the pictures in pixels."""
        return int(self.train.pixels.shape[-1])

    @property
    def num_channels(self) -> int:
        """Channels of the pictures: 3, or what a lens gives."""
        return int(self.train.pixels.shape[1])

    def to(self, device: Device) -> Dataset:
        """The same data set with all tensors on ``device``."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def fingerprint(self) -> str:
        """sha256 (hex) over pixels, labels, domains and sites of both splits and the names; the same on every device."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        sites = ["", "sites", *self.sites] if self.sites else []
        digest = hashlib.sha256("\0".join([*self.classes, "", *self.domains, *sites]).encode())
        for images in (self.train, self.test):
            for values in (images.pixels, images.labels, images.domains, images.sites):
                if values is not None:
                    digest.update(str(tuple(values.shape)).encode())
                    digest.update(values.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def measure(pixels: Tensor, pad: int | None = None) -> Transform:
    """The transform for these uint8 training pictures: their own mean and std (at least 1e-3), pad H // 8.

    >>> measure(torch.full((2, 3, 32, 32), 255, dtype=torch.uint8))
    Transform(mean=(1.0, 1.0, 1.0), std=(0.001, 0.001, 0.001), pad=4)
    """
    total = torch.zeros(2, 3, dtype=torch.float64)
    for chunk in torch.split(pixels, 1024):  # bounds the float copy to about 100 MB at 64 px
        values = chunk.double() / 255
        total += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))]).cpu()
    mean, square = total / (pixels.numel() / 3)
    std = (square - mean.square()).clamp(min=0).sqrt().clamp(min=1e-3)
    return Transform(_triple(mean), _triple(std), pixels.shape[-1] // 8 if pad is None else pad)


def _triple(values: Tensor) -> Channels:
    return tuple(round(v, 6) for v in values.tolist())


def _channels(values: Channels, like: Tensor) -> Tensor:
    """One number per channel as [channels, 1, 1] beside a batch of pictures on their device."""
    return _constant(values, like.device)


@lru_cache(maxsize=64)
def _constant(values: Channels, device: torch.device) -> Tensor:
    """Kept on the device: copying three numbers there for every batch would cost more than using them."""
    with torch.inference_mode(False):  # it must serve training too, whoever asks first
        constant = torch.tensor(values, device=device).view(-1, 1, 1)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # and other streams
    return constant


@dataclass(frozen=True, eq=False)
class Task:
    """One task. ``classes``: labels new in it (class-incremental) or all labels (domain-incremental); labels
    0..``num_seen``-1 are known during it. ``train``, ``test``: positions into the splits, all clients together.
    ``announced`` is False for a stream of classes that come and go while nobody says when: it is one task to a method.

    Where sites meet the classes in orders of their own (``data.site_orders``), a task is a step in time: ``classes`` are those
    that some site meets in it, also if others met them before; ``test`` are those of the classes that are new to everybody.
    """

    index: int
    classes: tuple[int, ...]
    num_seen: int
    domain: int | None
    train: Tensor
    test: Tensor
    announced: bool = True


@dataclass(frozen=True)
class Batch:
    """Network input [n, 3, H, W], labels [n], and where they came from: positions into the set being trained on."""

    x: Tensor
    y: Tensor
    index: Tensor
    beside: Tensor | None = None  # what a method's loss looks at beside the batch


@dataclass(frozen=True, eq=False)
class Shard:
    """One client's part of one task. ``images`` is the whole training split, shared; only ``index`` is the client's.

    ``first_remembered``: from this position of ``images`` on they are pictures of earlier tasks; None: there are none.
    """

    images: Images
    index: Tensor
    task: Task
    transform: Transform
    first_remembered: int | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Tensor:
        """int64 [len(self)], in the order of ``index``."""
        return self.images.labels[self.index]

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.images.pixels.device

    def by_class(self) -> dict[int, Tensor]:
        """Label -> positions into ``images.pixels``; only classes with at least one picture, ascending labels."""
        labels = self.labels
        return {c: self.index[labels == c] for c in torch.unique(labels).tolist()}

    def pictures(self, positions: Tensor) -> Tensor:
        """Normalised float pictures [len(positions), 3, H, W] at these positions of ``images.pixels``."""
        return self.transform.normalise(self.images.pixels[positions])
