"""Orders of their own: which classes each site meets when, how labels are numbered, and that no image moves."""

import pytest
import torch

from rescene.core.rng import Rng
from rescene.data import Dataset, Images, Transform, plan_tasks
from rescene.data import tasks as task_plan
from rescene.data.tasks import SiteOrders, draw_orders, in_own_orders

PER_CLASS, TESTED = 4, 3


def data_of(num_classes):
    def split(per_class):
        labels = torch.arange(num_classes).repeat_interleave(per_class)
        return Images(torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8), labels)

    names = tuple("abcdefgh"[:num_classes])
    return Dataset("letters", names, split(PER_CLASS), split(TESTED), Transform((0.5,) * 3, (0.25,) * 3, 1))


def every_second(tasks):
    """Two sites: each has every second image of every task."""
    return [[task.train[0::2], task.train[1::2]] for task in tasks]


def names_of(dataset, images):
    return {dataset.classes[c] for c in dataset.train.labels[images].tolist()}


@pytest.fixture
def by_hand(monkeypatch):
    """Site 0 meets cd then ab, site 1 meets ac then bd."""
    drawn = SiteOrders((((2, 3), (0, 1)), ((0, 2), (1, 3))))
    monkeypatch.setattr(task_plan, "draw_orders", lambda sizes, sites, steps, seed: drawn)
    dataset, tasks = plan_tasks(data_of(4), per_task=2)
    return in_own_orders(dataset, tasks, every_second(tasks), seed=0)


def test_labels_are_numbered_as_anybody_meets_the_classes(by_hand):
    dataset, steps, _, orders = by_hand
    assert dataset.classes == ("a", "c", "d", "b"), "a, c and d come in the first step, b in the second"
    assert orders.steps == (((1, 2), (0, 3)), ((0, 1), (2, 3)))
    assert [(step.index, step.classes, step.num_seen) for step in steps] == [(0, (0, 1, 2), 3), (1, (0, 2, 3), 4)]
    assert orders.met(0, 0) == (1, 2) and orders.met(0, 1) == orders.met(1, 1) == (0, 1, 2, 3)


def test_each_site_holds_its_own_images_of_its_own_classes(by_hand):
    dataset, steps, shards, _ = by_hand
    assert [[names_of(dataset, own) for own in parts] for parts in shards] == [
        [{"c", "d"}, {"a", "c"}],
        [{"a", "b"}, {"b", "d"}],
    ]
    for site in (0, 1):
        held = torch.cat([parts[site] for parts in shards]).sort().values
        assert torch.equal(held, torch.arange(site, 4 * PER_CLASS, 2)), "the images that it has in one order, each once"
    for step, parts in zip(steps, shards, strict=True):
        assert torch.equal(step.train, torch.cat(parts).sort().values)


def test_a_test_image_belongs_to_the_step_in_which_anybody_meets_its_class(by_hand):
    dataset, steps, _, _ = by_hand
    found = [{dataset.classes[c] for c in dataset.test.labels[step.test].tolist()} for step in steps]
    assert found == [{"a", "c", "d"}, {"b"}]
    assert [len(step.test) for step in steps] == [3 * TESTED, TESTED]


def test_an_order_depends_on_seed_and_site_alone():
    few, many = draw_orders([3, 2, 1], 2, 3, seed=5), draw_orders([3, 2, 1], 4, 2, seed=5)
    assert [own[:2] for own in few.steps] == list(many.steps[:2])
    assert few == draw_orders([3, 2, 1], 2, 3, seed=5) != draw_orders([3, 2, 1], 2, 3, seed=6)
    drawn = torch.randperm(6, generator=Rng(5).at("class-order", 1).generator()).tolist()
    assert few.steps[1] == (tuple(sorted(drawn[:3])), tuple(sorted(drawn[3:5])), (drawn[5],))
    assert all(sorted(sum(own, ())) == list(range(6)) for own in few.steps), "every class once"
    assert few.steps[0] != few.steps[1]


def test_a_limit_keeps_the_first_steps_and_counts_what_was_met_in_them():
    dataset, tasks = plan_tasks(data_of(8), per_task=2)
    whole, short = (in_own_orders(dataset, tasks, every_second(tasks), 3, limit) for limit in (None, 1))
    first = {c for own in draw_orders([2] * 4, 2, 4, seed=3).steps for c in own[0]}
    assert len(short[1]) == 1 and short[1][0].num_seen == len(first) == whole[1][0].num_seen
    assert set(short[0].classes[: len(first)]) == {dataset.classes[c] for c in first}
    assert all(torch.equal(a, b) for a, b in zip(short[2][0], whole[2][0], strict=True))
    assert whole[1][-1].num_seen == 8 and sorted(short[0].classes) == sorted(dataset.classes)
