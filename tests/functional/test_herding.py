"""Herding against the literal form of Eq. 2, its edge cases, and the lemma that bounds it."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rescene.functional import herd, herding, recent_window


def literal(z, target, budget):
    """Eq. 2 word for word: every candidate mean is formed, the closest wins, ties to the lowest index."""
    z, target = z.double(), target.double()
    picks, left = [], list(range(len(z)))
    for j in range(1, min(budget, len(z)) + 1):
        done = sum((z[i] for i in picks), torch.zeros_like(target))
        errors = [float(((target - (z[i] + done) / j) ** 2).sum()) for i in left]
        best = min(errors)
        pick = next(i for i, error in zip(left, errors, strict=True) if error <= best + 1e-12)
        picks.append(pick)
        left.remove(pick)
    return picks


@pytest.mark.parametrize("seed", range(25))
def test_equals_the_literal_form(seed):
    generator = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(int(torch.randint(5, 40, (1,), generator=generator)), 6, generator=generator), dim=1)
    target = z[len(z) // 3 :].mean(dim=0)
    budget = len(z) // 2
    assert herd(z, target, budget).tolist() == literal(z, target, budget)


def test_equals_the_literal_form_without_the_gram_matrix(monkeypatch):
    monkeypatch.setattr(herding, "GRAM_LIMIT_BYTES", 0)
    z = F.normalize(torch.randn(30, 5, generator=torch.Generator().manual_seed(3)), dim=1)
    assert herd(z, z.mean(dim=0), 12).tolist() == literal(z, z.mean(dim=0), 12)


def test_ties_go_to_the_lowest_index():
    z = torch.tensor([[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 5)
    # the target is the first kind: all five copies are equally good, in order; then the second kind, in order
    assert herd(z, torch.tensor([1.0, 0.0]), 7).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_many_duplicates_keep_their_order():
    z = F.normalize(torch.randn(4, 33, generator=torch.Generator().manual_seed(1)), dim=1).repeat_interleave(50, dim=0)
    picks = herd(z, z.mean(dim=0), 60).tolist()
    for kind in range(4):
        own = [p for p in picks if p // 50 == kind]
        assert own == sorted(own) and own == list(range(kind * 50, kind * 50 + len(own)))


@pytest.mark.parametrize("budget", [7, 8, 1000])
def test_a_budget_of_at_least_the_pool_keeps_everything_in_order(budget):
    z = torch.randn(7, 3)
    assert herd(z, z.mean(dim=0), budget).tolist() == list(range(7))


def test_one_pick_is_the_nearest_candidate():
    z = torch.tensor([[0.0, 0.0], [3.0, 0.0], [1.0, 1.0]])
    assert herd(z, torch.tensor([1.2, 0.9]), 1).tolist() == [2]


def test_a_rotation_of_feature_space_changes_nothing():
    generator = torch.Generator().manual_seed(5)
    z = F.normalize(torch.randn(40, 6, generator=generator, dtype=torch.float64), dim=1)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    target = z[10:].mean(dim=0)
    assert herd(z, target, 15).tolist() == herd(z @ rotation, target @ rotation, 15).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), n=st.integers(3, 60), fraction=st.floats(0.1, 1.0))
def test_lemma_holds_whenever_coverage_held(seed, n, fraction):
    """||m_H - m_W|| <= Delta_W / sqrt(B) if at every step some candidate lies at or beyond the target (Assumption 1)."""
    z = F.normalize(torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1)
    target = z[int(n * (1 - fraction)) :].mean(dim=0)
    budget = max(1, n // 2)
    picks = herd(z, target, budget).tolist()
    residual, covered, left = torch.zeros(4, dtype=torch.float64), True, set(range(n))
    for pick in picks:
        covered &= max(float(residual @ (z[q] - target)) for q in left) >= 0
        residual = residual - (z[pick] - target)
        left.remove(pick)
    if covered:
        widest = (z - target).norm(dim=1).max()
        assert (z[picks].mean(dim=0) - target).norm() <= widest / math.sqrt(budget) + 1e-12


def test_window_of_the_paper_is_fifteen_of_twenty_rounds():
    window = recent_window(torch.arange(1, 21), 20, 0.75)
    assert window.sum() == 15 and window.tolist() == [False] * 5 + [True] * 15


@pytest.mark.parametrize(
    ("fraction", "rounds", "width"), [(0.3, 10, 3), (0.1, 30, 3), (0.7, 10, 7), (0.01, 20, 1), (1.0, 3, 3)]
)
def test_window_width_is_an_exact_ceiling(fraction, rounds, width):
    # .3 * 10 and .1 * 30 lie just above the integer in floating point; the ceiling must not
    assert int(recent_window(torch.arange(1, rounds + 1), rounds, fraction).sum()) == width


def test_window_without_members_falls_back_to_the_latest_round():
    assert recent_window(torch.tensor([1, 2, 2]), 20, 0.25).tolist() == [False, True, True]


def test_window_of_nothing_is_nothing():
    assert recent_window(torch.zeros(0, dtype=torch.long), 20, 0.5).tolist() == []


def test_all_classes_together_pick_what_each_picks_alone():
    from rescene.functional.herding import _herd_together

    generator = torch.Generator().manual_seed(3)
    z = [torch.randn(n, 6, generator=generator) for n in (30, 4, 17)]
    z[2][5] = z[2][9]  # a tie goes to the lower index
    targets = [own.mean(dim=0) for own in z]
    for budget in (1, 10, 17, 40):
        together = _herd_together(z, targets, budget)
        alone = [herd(own, target, budget) for own, target in zip(z, targets, strict=True)]
        assert [t.tolist() for t in together] == [a.tolist() for a in alone], budget
