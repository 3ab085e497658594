from __future__ import annotations

import pytest
import torch

from rescene.core.errors import ConfigError, DataError
from rescene.data import Dataset, Images, Transform, plan_tasks

NAMES = ("cat", "dog", "deer", "frog", "ship")


def make(num_classes: int = 5, train: int = 4, test: int = 2, domains: tuple[str, ...] = ()) -> Dataset:
    """Class c has ``train`` + ``test`` pictures filled with the value c."""

    def split(per_class: int) -> Images:
        labels = torch.arange(num_classes).repeat(per_class)
        pixels = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous()
        return Images(pixels, labels, torch.arange(len(labels)) % len(domains) if domains else None)

    names = NAMES if num_classes == 5 else tuple(map(str, range(num_classes)))
    transform = Transform((0.5,) * 3, (0.5,) * 3, 1)
    return Dataset("toy", names, split(train), split(test), transform, domains)


@pytest.mark.parametrize(
    ("num_classes", "how", "sizes"),
    [
        (5, {"per_task": 2}, [2, 2, 1]),
        (10, {"per_task": 2}, [2, 2, 2, 2, 2]),
        (5, {"per_task": 9}, [5]),
        (10, {"count": 3}, [4, 3, 3]),
        (10, {"count": 10}, [1] * 10),
        (10, {"sizes": [4, 3, 3]}, [4, 3, 3]),
    ],
)
def test_sizes_of_tasks(num_classes: int, how: dict, sizes: list[int]) -> None:
    dataset, tasks = plan_tasks(make(num_classes), **how)
    assert [len(task.classes) for task in tasks] == sizes
    assert [c for task in tasks for c in task.classes] == list(range(num_classes))  # consecutive in arrival order
    assert [task.num_seen for task in tasks] == torch.tensor(sizes).cumsum(0).tolist()
    assert [task.index for task in tasks] == list(range(len(sizes)))
    for task in tasks:
        assert set(dataset.train.labels[task.train].tolist()) == set(task.classes)
        assert len(task.train) == 4 * len(task.classes) and len(task.test) == 2 * len(task.classes)


def test_natural_order_returns_the_same_data() -> None:
    original = make()
    assert plan_tasks(original, per_task=2)[0] is original


def test_named_plan_relabels_in_arrival_order_and_drops_the_rest() -> None:
    original = make()
    dataset, tasks = plan_tasks(original, plan=[["deer", "cat"], ["ship"]])
    assert dataset.classes == ("deer", "cat", "ship")
    assert [task.classes for task in tasks] == [(0, 1), (2,)]
    # pixels still carry the old label: deer 2, cat 0, ship 4
    old = torch.tensor([2, 0, 4])
    for images, per_class in ((dataset.train, 4), (dataset.test, 2)):
        assert torch.equal(images.pixels[:, 0, 0, 0].long(), old[images.labels]) and len(images) == 3 * per_class
    assert any("dog, frog" in note for note in dataset.notes) and original.notes == ()
    assert original.train.labels.tolist() == make().train.labels.tolist()  # the given data set is untouched


def test_seeded_order_is_a_permutation_that_depends_on_the_seed() -> None:
    first, again, other = (plan_tasks(make(10), per_task=2, order="seeded", seed=s)[0] for s in (1, 1, 2))
    assert first.classes == again.classes != other.classes
    assert sorted(first.classes) == sorted(other.classes) == sorted(make(10).classes)
    old = torch.tensor([int(name) for name in first.classes])
    assert torch.equal(first.train.pixels[:, 0, 0, 0].long(), old[first.train.labels])


def test_domain_tasks_keep_all_labels() -> None:
    original = make(domains=("amazon", "dslr"))
    dataset, tasks = plan_tasks(original, scenario="domain")
    assert dataset is original
    assert [(task.domain, task.num_seen, task.classes) for task in tasks] == [(d, 5, (0, 1, 2, 3, 4)) for d in (0, 1)]
    assert sorted(torch.cat([task.train for task in tasks]).tolist()) == list(range(20))
    assert all(set(dataset.train.domains[task.train].tolist()) == {task.domain} for task in tasks)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "exactly one"),
        ({"per_task": 2, "count": 2}, "exactly one"),
        ({"per_task": 0}, "at least 1"),
        ({"count": 6}, "6 tasks of 5 classes"),
        ({"sizes": [4, 3]}, "do not add up"),
        ({"sizes": [5, 0]}, "do not add up"),
        ({"plan": [["cat"], ["dogg"]]}, "'dogg'"),
        ({"plan": [["cat"], ["dog", "cat"]]}, "twice"),
        ({"plan": [["cat"], []]}, "no class"),
        ({"plan": [["cat"]], "order": "seeded"}, "fixes the order"),
        ({"per_task": 2, "order": "random"}, "unknown class order"),
        ({"per_task": 2, "scenario": "task"}, "unknown scenario"),
        ({"scenario": "domain"}, "no domains"),
        ({"scenario": "domain", "per_task": 2}, "no meaning"),
    ],
)
def test_bad_plans_are_explained(how: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        plan_tasks(make(), **how)
    assert caught.value.code == "E207"


def test_mistyped_class_gets_a_proposal_and_sums_are_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_tasks(make(), plan=[["dogg"]])
    assert caught.value.fix == "did you mean 'dog'?"
    with pytest.raises(ConfigError) as caught:
        plan_tasks(make(), sizes=[4, 3])
    assert "4 + 3 = 7" in str(caught.value) and "5 classes" in str(caught.value)


def test_class_without_training_image_and_task_without_test_image() -> None:
    full = make()
    no_frog = Dataset("toy", NAMES, full.train.select(full.train.labels != 3), full.test, full.transform)
    with pytest.raises(DataError, match="frog") as caught:
        plan_tasks(no_frog, per_task=2)
    assert caught.value.code == "E204"
    assert len(plan_tasks(no_frog, plan=[["cat", "dog"], ["deer"]])[1]) == 2  # a plan without the class is fine
    untested = Dataset("toy", NAMES, full.train, full.test.select(full.test.labels != 4), full.transform)
    with pytest.raises(DataError, match="task 3 has no test image"):
        plan_tasks(untested, per_task=2)
