from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rescene.core.errors import ConfigError, ResceneWarning
from rescene.data import dirichlet_partition, iid_partition, partition
from rescene.data.partition import _draw_sizes

TWO_CLASSES = torch.arange(10_000) % 2


def check_split(parts: list[torch.Tensor], n: int) -> None:
    assert all(part.dtype == torch.int64 and torch.equal(part, part.sort().values) for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))  # every image exactly once


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    labels=st.lists(st.integers(0, 6), max_size=120),
    num_clients=st.integers(1, 12),
    beta=st.floats(1e-3, 100),
    kind=st.sampled_from(["capped", "dirichlet", "iid"]),
    seed=st.integers(0, 2**31),
)
def test_every_split_is_disjoint_complete_and_repeatable(
    labels: list[int], num_clients: int, beta: float, kind: str, seed: int
) -> None:
    values = torch.tensor(labels, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (partition(values, num_clients, kind=kind, beta=beta, seed=seed, min_size=0) for _ in range(2))
    assert len(first) == num_clients
    check_split(first, len(labels))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("min_size", [1, 10])
def test_minimum_size_is_kept_without_a_warning(min_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = dirichlet_partition(TWO_CLASSES, 20, 0.5, seed=1, min_size=min_size)
    check_split(parts, 10_000)
    assert min(map(len, parts)) >= min_size


def test_impossible_rule_warns_and_keeps_the_best_draw() -> None:
    labels = torch.zeros(30, dtype=torch.int64)
    with pytest.warns(ResceneWarning) as caught:
        parts = dirichlet_partition(labels, 10, 0.05, seed=0, min_size=4, max_draws=50)  # 10 * 4 > 30
    assert [w.message.code for w in caught] == ["W121"]  # type: ignore[union-attr]
    check_split(parts, 30)
    smallest = []
    for max_draws in (1, 2, 5, 50):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResceneWarning)
            tried = dirichlet_partition(labels, 10, 0.05, seed=0, min_size=4, max_draws=max_draws)
        sizes = [len(part) for part in tried]
        smallest.append((min(sizes), -sum(size < 4 for size in sizes)))
    assert smallest == sorted(smallest) and smallest[-1] > smallest[0]  # more draws never make it worse


def test_cap_stops_clients_that_hold_their_part() -> None:
    # One class after the other: whoever holds n / N images may get none of the class that follows.
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = _draw_sizes(rng, [50, 50, 50], 5, 0.2, capped=True)
        before = np.cumsum(sizes, axis=0) - sizes
        assert not sizes[before >= 150 / 5].any() and (sizes.sum(1) == 50).all()


def test_without_cap_some_client_goes_on() -> None:
    rng = np.random.default_rng(0)
    draws = [_draw_sizes(rng, [50, 50], 5, 0.2, capped=False) for _ in range(50)]
    assert any(sizes[1][sizes[0] >= 20].any() for sizes in draws)


def test_all_mass_on_full_clients_falls_back_to_the_open_ones() -> None:
    class Fixed:
        """Both classes go to client 0 alone, which is full after the first."""

        def dirichlet(self, alpha: np.ndarray, size: int) -> np.ndarray:
            return np.tile([1.0, 0.0, 0.0], (size, 1))

    sizes = _draw_sizes(Fixed(), [6, 6], 3, 0.5, capped=True)  # type: ignore[arg-type]
    assert sizes.tolist() == [[6, 0, 0], [0, 3, 3]]


def test_small_beta_is_skewed_and_large_beta_is_even() -> None:
    def spread(beta: float) -> float:
        parts = dirichlet_partition(TWO_CLASSES, 10, beta, seed=0, capped=False)
        return float(np.std([len(part) for part in parts]))

    assert spread(1000) < 50 < 500 < spread(0.2)


def test_capped_pool_matches_the_count_the_paper_prints() -> None:
    """CIFAR-10, beta 0.5: 16,763 surrogates in the pools of five tasks (methods: min(10, n) per class and upload)."""
    totals = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        total = 0
        for task in range(5):
            parts = dirichlet_partition(TWO_CLASSES, 20, 0.5, seed=1000 * seed + task)
            upload = [sum(min(10, int((TWO_CLASSES[part] == c).sum())) for c in (0, 1)) for part in parts]
            total += sum(upload[k] for _ in range(20) for k in rng.choice(20, 10, replace=False))
        totals.append(total)
    assert np.mean(totals) == pytest.approx(16_763, rel=0.03)
    uncapped = [
        sum(min(10, int((TWO_CLASSES[part] == c).sum())) for part in parts for c in (0, 1)) * 10 * 5
        for parts in (dirichlet_partition(TWO_CLASSES, 20, 0.5, seed=s, capped=False) for s in range(12))
    ]
    assert abs(np.mean(uncapped) / 16_763 - 1) > 0.05  # the plain split does not explain that number


def test_iid_parts_differ_by_at_most_one_and_mix_classes() -> None:
    labels = torch.arange(103) % 2
    parts = iid_partition(labels, 4, seed=3)
    check_split(parts, 103)
    assert sorted(len(part) for part in parts) == [25, 26, 26, 26]
    assert all(set(labels[part].tolist()) == {0, 1} for part in parts)
    assert not torch.equal(parts[0], iid_partition(labels, 4, seed=4)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 0.0}, "beta=0"),
        ({"beta": -1.0}, "beta=-1"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"num_clients": 0}, "at least one client"),
        ({"kind": "cappd"}, "unknown partition"),
        ({"kind": "iid", "num_clients": 0}, "at least one client"),
    ],
)
def test_bad_arguments(change: dict, words: str) -> None:
    arguments = {"num_clients": 3, "kind": "capped", "beta": 0.5, "seed": 0, **change}
    with pytest.raises(ConfigError, match=words):
        partition(TWO_CLASSES, **arguments)
