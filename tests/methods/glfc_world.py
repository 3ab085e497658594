"""A small world for the tests of GLFC: tasks of two classes, clients with random images, a tiny network."""

import math

import torch

from rescene.core.rng import Rng, seeded_generator
from rescene.data import Images, Task, Transform
from rescene.methods import method_class
from rescene.methods.base import Client, weights_of
from rescene.nets import Arch
from rescene.training import Training

GLFC = method_class("glfc")
SIDE = 8
ARCH = Arch("convnet", SIDE, "batch", 4)
TRANSFORM = Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), 1)
QUICK_SEARCH = {"num_inversions": 2, "inversion_steps": 2, "num_iterates": 2}
QUICK = {**QUICK_SEARCH, "num_perturbations": 2}
ONE_EPOCH = Training(local_epochs=1, batch_size=8)


def logit(p):
    return math.log(p / (1 - p))


def task(index, domain=None):
    """Two classes per task: 0 1, then 2 3, ...; with a domain always 0 1."""
    classes = (0, 1) if domain is not None else (2 * index, 2 * index + 1)
    return Task(index, classes, classes[-1] + 1, domain, torch.arange(0), torch.arange(0))


def shard(of_task, counts, seed=0):
    """A client with so many random images of each label."""
    labels = torch.tensor([label for label, n in counts.items() for _ in range(n)], dtype=torch.long)
    generator = seeded_generator(seed)
    pixels = torch.randint(256, (len(labels) + 5, 3, SIDE, SIDE), generator=generator).to(torch.uint8)
    strangers = torch.full((5,), 99)  # somebody else's images come first: positions are not numbers of the client
    images = Images(pixels, torch.cat([strangers, labels]))
    return Client(images, torch.arange(5, len(pixels)), of_task, TRANSFORM, ARCH.restore)


def model(num_classes, seed=1):
    return weights_of(ARCH.build(num_classes, seeded_generator(seed)))


def method(**given):
    return GLFC(train=ONE_EPOCH, **{**QUICK, **given})


def payload(num_classes, seed=1):
    return {"model": model(num_classes, seed), "encoder_seed": 7}


def empty(of_shard):
    none = torch.zeros(0, dtype=torch.long)
    return of_shard.images.pixels[:0], none, none


class Site:
    """A federation of given shards without an engine."""

    def __init__(self, glfc, shards, of_task):
        self.method, self.shards, self.task = glfc, shards, of_task
        self.clients = self.participants = range(len(shards))
        self.num_rounds, self.transform, self.device = 2, TRANSFORM, torch.device("cpu")
        self.states, self.asked = {}, []

    def ask(self, clients, verb, message):
        self.asked.append((verb, list(clients), message))
        answers = {}
        for k in clients:
            answers[k], self.states[k] = getattr(self.method, verb)(
                message, self.shards[k], self.states.get(k), Rng(0).at(verb, k)
            )
        return answers

    def net(self, weights):
        return ARCH.restore(weights)
