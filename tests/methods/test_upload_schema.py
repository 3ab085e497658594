"""What a method says of its answers: honest ones fit, and each way of not fitting is named."""

import math

import pytest
import torch

from rescene.data import Task
from rescene.methods import method_class
from rescene.methods.upload_schema import Misfit, Place, anything, check_form

SIDE = 8
PLACE = Place(Task(1, (2, 3), 4, None, torch.arange(0), torch.arange(0)), SIDE)
MODEL = {
    "norm.running_var": torch.ones(3),
    "norm.num_batches_tracked": torch.tensor(2),
    "head.weight": torch.zeros(4, 3),
}


def pictures(labels, /, **more):
    images = torch.zeros(len(labels), 3, SIDE, SIDE)
    return {"images": images, "labels": torch.tensor(labels, dtype=torch.int64), "notes": {"matching_loss": 1.0}} | more


def weights(**parts):
    return {"model": MODEL | parts, "num_images": 5, "notes": {"local_loss": math.nan}}


def rows(labels, weight=1):
    """Class means as FedAF sends them."""
    count = len(labels)
    return {"labels": torch.tensor(labels), "weights": torch.full((count,), weight), "rows": torch.zeros(count, 4)}


def form_of(name, verb="client_round", **settings):
    return method_class(name)(**settings).expects(verb, {"model": MODEL}, PLACE)


@pytest.mark.parametrize(
    ("name", "verb", "upload"),
    [
        ("rescene", "client_round", pictures([2, 2, 3])),
        ("rescene", "client_round", pictures([])),
        ("fedavg", "client_round", weights()),
        ("fedavg", "client_round", {"num_images": 0, "notes": {"num_declined": 1}}),
        ("fedewc", "consolidate", {}),
        ("target", "picture_size", {"image_size": SIDE}),
        ("fedcbdr", "share_features", {"moments": torch.eye(3, dtype=torch.float64)}),
        ("fedaf", "class_logits", {"class_logits": rows([2, 3])}),
    ],
)
def test_honest_answers_fit_also_before_they_have_memory(name, verb, upload):
    check_form(form_of(name, verb), upload)
    check_form(form_of(name, verb), _without_memory(upload))


def _without_memory(value):
    if isinstance(value, dict):
        return {key: _without_memory(part) for key, part in value.items()}
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    "upload",
    [
        pictures([2] * 11),  # more than IPC of a class
        pictures([1]),  # a class of an earlier task
        pictures([4]),
        pictures([-1]),
        pictures([2], images=torch.zeros(2, 3, SIDE, SIDE)),
        pictures([2], images=torch.zeros(1, 3, SIDE + 1, SIDE)),
        pictures([2], images=torch.zeros(1, 1, SIDE, SIDE)),
        pictures([2], images=torch.zeros(1, 3, SIDE, SIDE, dtype=torch.float64)),
        pictures([2], images=torch.full((1, 3, SIDE, SIDE), torch.nan)),
        pictures([2], images=torch.full((1, 3, SIDE, SIDE), 1e5)),
        pictures([2], labels=torch.tensor([2], dtype=torch.int32)),
        pictures([2], labels=[2]),
        pictures([2], more=1),
        pictures([2], notes=3),
        pictures([2], notes={"num_withheld": math.nan}),
        pictures([2], notes={"num_withheld": -1}),
        pictures([2], notes={"<b>": 1.0}),
        pictures([2], notes={"loss": 10**400}),
        pictures([2], notes={f"a{i}": 1.0 for i in range(99)}),
        {"labels": torch.tensor([2])},
        {},
        None,
        [],
    ],
)
def test_pictures_that_do_not_fit(upload):
    with pytest.raises(Misfit, match="upload"):
        check_form(form_of("rescene"), upload)


@pytest.mark.parametrize(
    "upload",
    [
        weights(**{"norm.running_var": torch.tensor([1.0, -1.0, 1.0])}),  # its square root would be NaN
        weights(**{"norm.num_batches_tracked": torch.tensor(-1)}),
        weights(**{"head.weight": torch.full((4, 3), torch.inf)}),
        weights(**{"head.weight": torch.full((4, 3), 1e30)}),
        weights(**{"head.weight": torch.zeros(5, 3)}),
        weights(**{"head.weight": torch.zeros(4, 3, dtype=torch.float16)}),
        weights(extra=torch.zeros(1)),
        weights() | {"model": dict(reversed(MODEL.items()))},
        weights() | {"num_images": True},
        weights() | {"num_images": 0},
        weights() | {"num_images": 1 << 41},
        weights() | {"num_images": 1.0},
        {"num_images": 5},
        {"model": MODEL},
    ],
)
def test_weights_that_do_not_fit(upload):
    with pytest.raises(Misfit, match="upload"):
        check_form(form_of("fedavg"), upload)


@pytest.mark.parametrize(
    ("name", "verb", "upload"),
    [
        ("fedewc", "consolidate", {"model": MODEL}),
        ("target", "picture_size", {"image_size": SIDE + 1}),
        ("fedcbdr", "share_features", {"moments": torch.ones(2, 2, dtype=torch.float64)}),
        ("fedcbdr", "share_features", {"moments": -torch.eye(3, dtype=torch.float64)}),
        ("fedcbdr", "share_features", {"moments": torch.arange(9.0).double().reshape(3, 3)}),
        ("fedaf", "class_logits", {"class_logits": rows([2, 2])}),
        ("fedaf", "class_logits", {"class_logits": rows([2], weight=0)}),
        ("fedaf", "class_logits", {"class_logits": rows([1])}),
        ("fedaf", "client_round", pictures([2], soft_labels=rows([2]))),  # not probabilities
        ("glfc", "client_round", weights() | {"prototypes": {"gradients": {}, "height": SIDE, "width": SIDE}}),
    ],
)  # fmt: skip
def test_other_answers_that_do_not_fit(name, verb, upload):
    with pytest.raises(Misfit):
        check_form(form_of(name, verb), upload)


def test_a_method_that_states_nothing_is_still_kept_from_harm():
    form = anything(PLACE)
    check_form(form, {"mine": torch.ones(3), "notes": {"loss": 1.0}, "n": [1, "a"]})
    check_form(form, pictures([0, 3]))
    for bad in (
        {"mine": torch.tensor([torch.nan])},
        {"notes": 5},
        {"images": torch.ones(1)},
        pictures([4]),
        7,
        {"a": object()},
    ):
        with pytest.raises(Misfit):
            check_form(form, bad)
