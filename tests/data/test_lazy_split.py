"""A split that is drawn client by client, when somebody asks."""

import pytest
import torch

from rescene.data import LazySplit

LABELS = torch.arange(600) // 200  # three classes
POSITIONS = torch.arange(600) + 1000


def split(num_clients=1_000_000, beta=0.5, size=40, seed=3):
    return LazySplit(POSITIONS, LABELS, num_clients, beta, size, seed)


def test_a_client_draws_the_same_images_whenever_it_is_asked():
    one, other = split(), split()
    late = other[999_999]
    assert torch.equal(one[7], other[7]) and torch.equal(one[999_999], late)
    assert not torch.equal(one[7], one[8]) and not torch.equal(one[7], split(seed=4)[7])
    assert torch.equal(split(num_clients=10)[7], one[7])  # who else there is does not matter


def test_images_are_different_sorted_and_of_the_task():
    drawn = split()[5]
    assert len(drawn) == 40 and len(set(drawn.tolist())) == 40
    assert drawn.tolist() == sorted(drawn.tolist()) and int(drawn.min()) >= 1000 and int(drawn.max()) < 1600


def test_counts_are_those_of_the_draw():
    for client in range(50):
        labels, counts = LABELS[split()[client] - 1000].unique(return_counts=True)
        assert split().counts(client) == dict(zip(labels.tolist(), counts.tolist(), strict=True))


def test_beta_decides_how_skewed_a_client_is():
    def largest_share(beta):
        return sum(max(split(beta=beta).counts(k).values()) for k in range(300)) / (300 * 40)

    # a Dirichlet(b, b, b) share has variance 2 / (9 (3 b + 1)): alike at 100, one class at 0.01
    assert largest_share(100) < 0.5 and largest_share(0.01) > 0.9


def test_clients_together_draw_every_class_alike_and_share_images():
    total = torch.zeros(3)
    for client in range(600):
        for label, n in split().counts(client).items():
            total[label] += n
    assert torch.allclose(total / total.sum(), torch.full((3,), 1 / 3), atol=0.05)
    everything = torch.cat([split()[k] for k in range(30)])  # 1200 draws from 600 images
    assert len(everything.unique()) < len(everything)


def test_a_class_gives_at_most_what_it_has():
    small = LazySplit(torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 1]), 5, 0.01, 100, 0)
    assert all(len(small[k]) in (3, 6) for k in range(5))


def test_it_ends():
    few = split(num_clients=2)
    assert len(few) == 2 and len(list(few)) == 2
    for client in (2, -1):
        with pytest.raises(IndexError):
            few[client]
