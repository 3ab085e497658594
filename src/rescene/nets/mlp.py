"""No hidden layer or one over all values of the picture: for pictures whose lens has already done the looking."""

from __future__ import annotations

import torch
from torch import nn

DEFAULT_WIDTH = 256


class Perceptron(nn.Sequential):
    """Pictures [n, channels, s, s] -> [n, width]: linear, ReLU."""

    def __init__(self, num_values: int, width: int | None = None) -> None:
        self.feature_size = DEFAULT_WIDTH if width is None else width
        super().__init__(nn.Flatten(), nn.Linear(num_values, self.feature_size), nn.ReLU())

    def initialise(self, generator: torch.Generator) -> None:
        """Kaiming-normal weights (fan in, ReLU), no bias."""
        linear = self[1]
        assert isinstance(linear, nn.Linear)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(linear.bias)


class Identity(nn.Flatten):
    """Pictures [n, channels, s, s] -> their values, [n, channels * s * s]: the head is then the whole network."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.feature_size = num_values

    def initialise(self, generator: torch.Generator) -> None:
        """There is nothing to set."""
