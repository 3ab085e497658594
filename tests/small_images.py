"""Small data sets as .npz files, for runs that are over in a second."""

import numpy as np
import torch

from rescene.data import load


def some_of_fashion_mini(folder, num_train, num_test, num_classes=4):
    """So many pictures of each of the first classes."""
    whole, parts = load("fashion-mini"), {}
    for split, count in (("train", num_train), ("test", num_test)):
        found = getattr(whole, split)
        index = torch.cat([(found.labels == c).nonzero().flatten()[:count] for c in range(num_classes)])
        parts |= {f"x_{split}": found.pixels[index].movedim(1, -1).numpy(), f"y_{split}": found.labels[index].numpy()}
    return _saved(folder, parts)


def coloured_noise(folder, num_train, num_test, num_classes, step):
    """So many pictures of each class; a class is brighter than the one before by ``step``."""
    random, parts = np.random.default_rng(0), {}
    for split, count in (("train", num_train), ("test", num_test)):
        labels = np.arange(num_classes).repeat(count)
        level = 30 + step * labels[:, None, None, None] * np.array([1.0, 0.5, 0.2])
        parts[f"x_{split}"] = (level + random.integers(0, 40, (len(labels), 16, 16, 3))).clip(0, 255).astype(np.uint8)
        parts[f"y_{split}"] = labels
    return _saved(folder, parts)


def _saved(folder, parts):
    np.savez(folder / "images.npz", **parts)
    return str(folder / "images.npz")
