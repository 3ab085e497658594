"""Exact second moments of a few whole vectors give them back; sums that are not exact do not."""

import pytest
import torch

from rescene.audit.lattice import basis_of, reduced, vectors_of
from rescene.privacy.epsilon_bounds import most_identified, success_lower_bound, two_world_bound


def second_of(z):
    return (z.T @ z).tolist()


@pytest.mark.parametrize("n", range(1, 7))
def test_all_vectors_come_back(n):
    z = torch.randint(-60, 61, (n, 16), generator=torch.Generator().manual_seed(n))
    found = vectors_of(second_of(z))
    assert all(row in found or [-x for x in row] in found for row in z.tolist()) and len(found) == n


def test_noise_hides_them():
    z = torch.randint(-60, 61, (4, 10), generator=torch.Generator().manual_seed(0))
    noise = torch.randint(-3, 4, (10, 10), generator=torch.Generator().manual_seed(1))
    assert vectors_of((z.T @ z + noise + noise.T).tolist(), most=10) is None
    assert vectors_of([[0, 0], [0, 0]]) is None


def test_a_reduced_basis_is_short_and_spans_the_same():
    basis = [[1, 0, 0], [1000, 1, 0], [77777, 333, 1]]
    gram = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in basis] for x in basis]
    change = reduced(gram)
    short = [[sum(c * row[j] for c, row in zip(line, basis, strict=True)) for j in range(3)] for line in change]
    assert sorted(map(sorted, ([abs(x) for x in row] for row in short))) == [[0, 0, 1]] * 3
    assert basis_of([[4, 6], [6, 9], [2, 3]]) == [[2, 3]]


def test_bounds_on_epsilon_are_below_the_truth_and_grow_with_it():
    """Normal scores a distance mu apart: mu 0.25 is epsilon 1 at delta 1e-5, mu 4 is far above."""
    generator = torch.Generator().manual_seed(0)
    shown = []
    for mu in (0.25, 1.0, 4.0):
        inside, outside = (torch.randn(1000, generator=generator, dtype=torch.float64) for _ in range(2))
        shown.append(two_world_bound(inside + mu, outside, 1e-5))
    assert shown[0] <= 1.0 < shown[2] and shown == sorted(shown)


def test_identification_is_bounded_between_chance_and_certainty():
    assert most_identified(64, 1e6) == pytest.approx(1 / 64, rel=1e-4) and most_identified(64, 0.05) > 0.999
    assert success_lower_bound(0, 10, 0.05) == 0 and 0.30 < success_lower_bound(6, 10, 0.05) < 0.31
