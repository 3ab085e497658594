"""A method, a network and a data set of one's own in one file, compared with FedAvg in a sweep.

rescene run smoke --plugin examples/own_experiment.py method=nudged model=tiny-net data=stripes
rescene sweep smoke --plugin examples/own_experiment.py method=fedavg,nudged model=tiny-net data=stripes --seeds 0,1 --out runs/stripes
rescene table runs/stripes
rescene plot runs/stripes --kind curves --out stripes.png
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import rescene
from rescene.core.hyperparameters import hyper
from rescene.methods.averaging import AveragingMethod, trained


@rescene.register_method
class Nudged(AveragingMethod):
    """FedAvg whose server goes only part of the way from its model to the average of the sites."""

    name: ClassVar[str] = "nudged"
    title: ClassVar[str] = "Nudged FedAvg"
    paper: ClassVar[str] = "an example"

    share: float = hyper(0.7, "-", "[example]", "part of the way that the server goes", gt=0, le=1)

    def client_round(self, payload, shard, client_state, rng):
        net = shard.net(payload["model"])
        return trained(net, shard, self.train, rng.at("sgd").generator(shard.device)), client_state

    def server_round(self, state, uploads, round, federation, rng):
        after = super().server_round(state, uploads, round, federation, rng)
        moved = {key: torch.lerp(old.float(), after.model[key].float(), self.share) for key, old in state.model.items()}
        return replace(after, model={key: value.to(state.model[key].dtype) for key, value in moved.items()})


@rescene.register_model("tiny-net")
class TinyNet(nn.Module):
    """Two convolutions and a linear head; the head is found by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


class Stripes(Dataset):
    """Pictures of stripes; the class is their direction."""

    classes = ("flat", "rising", "steep", "upright", "falling", "sinking")

    def __init__(self, per_class: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(len(self.classes)).repeat(per_class)
        self.phases = torch.rand(len(self.labels), generator=draw) * 6.28
        self.noise = torch.rand(len(self.labels), 3, 32, 32, generator=draw) * 0.6

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        angle = self.labels[i] * torch.pi / len(self.classes)
        y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
        wave = torch.sin(0.8 * (x * torch.sin(angle) + y * torch.cos(angle)) + self.phases[i])
        return 0.2 + 0.2 * wave + self.noise[i] * 0.6, int(self.labels[i])


@rescene.register_dataset("stripes")
def stripes() -> tuple[Dataset, Dataset]:
    return Stripes(60, seed=0), Stripes(20, seed=1)
