"""A small network, data set and method of a user's own, and a recipe that is over in a second."""

import torch
from torch import nn
from torch.utils.data import Dataset

SMALL = {
    "tasks.per_task": 2,
    "federation.num_clients": 3,
    "federation.per_round": 2,
    "federation.num_rounds": 2,
    "device": "cpu",
}


class Small(nn.Module):
    """Two convolutions, of which one has groups, and whatever norm and dropout is asked for."""

    def __init__(self, norm=nn.BatchNorm2d, dropout=0.2):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = norm(8) if norm else nn.Identity()
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.fc = nn.Linear(16, 10)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x):
        x = self.second(self.norm(self.first(x)).relu()).relu()
        return self.fc(self.dropout(self.scale * x.mean(dim=(2, 3))))


def small(seed=0, **how):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Small(**how)


def arrays(per_class=16, num_classes=4, side=16, seed=0):
    """Pictures whose class is their colour: (x_train, y_train, x_test, y_test)."""
    draw = torch.Generator().manual_seed(seed)

    def part(count):
        y = torch.arange(num_classes).repeat_interleave(count)
        level = (60 + 40 * y).reshape(-1, 1, 1, 1)
        x = level + torch.randint(-30, 30, (len(y), 3, side, side), generator=draw)
        return x.clamp(0, 255).to(torch.uint8), y

    return (*part(per_class), *part(4))


class Pairs(Dataset):
    """A torch Dataset; ``change`` spoils an item."""

    def __init__(self, x, y, change=lambda x, y: (x, y), classes=None):
        self.x, self.y, self.change = x, y, change
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.change(self.x[i].float() / 255, int(self.y[i]))
