"""CFeD: who learns and who reviews, both distillations by hand, and limits that are FedAvg."""

import json
from dataclasses import replace

import pytest
import torch

import rescene
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.methods import cfed
from rescene.methods.base import weights_of
from rescene.methods.cfed import CFeD, ServerState, drawn_pictures
from rescene.methods.fedavg import FedAvg
from rescene.nets import grow_head
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Training, class_scores

ONE_STEP = Training(local_epochs=1, batch_size=64, lr=0.1, momentum=0.0, weight_decay=0.0, augment=False)
FEW = {"num_surrogates": 6}
PRIVATE = Mechanism("dp-sgd", 1.0, 1.0, Composition(2, 1, 0.5), typical_count=8.0)


class World:
    """A federation that asks the method itself and writes down whom it asked."""

    def __init__(self, method, world, task, participants, states=None):
        self.method, self.shards, self.task, self.participants = method, world["shards"], task, participants
        self.clients, self.states, self.calls = range(3), states or {}, []
        self.transform, self.device, self.net = world["transform"], torch.device("cpu"), world["arch"].restore

    def ask(self, clients, verb, payload, late=False):
        self.calls.append((verb, list(clients)))
        answers = {}
        for k in clients:
            shard = replace(self.shards[k], task=self.task)
            answers[k], self.states[k] = getattr(self.method, verb)(payload, shard, self.states.get(k), Rng(k))
        return answers


def second_task(domain=None):
    none = torch.zeros(0, dtype=torch.int64)
    return Task(1, (2, 3), 4, None, none, none) if domain is None else Task(1, (0, 1), 2, domain, none, none)


def state_of(model):
    return ServerState(model=model, image_size=16, notes={})


@pytest.fixture
def grown(tiny_world):
    return grow_head(weights_of(tiny_world["net"]), 4, torch.Generator().manual_seed(2))


def surrogates(world, num=6):
    return world["transform"].possible(world["transform"].normalise(drawn_pictures(num, 16, 0)))


def far(model, factor=1.1):
    return {key: value * factor if value.is_floating_point() else value for key, value in model.items()}


def kd(student, teacher, temperature=2.0):
    """Written out: the cross-entropy of both softened answers over the teacher's outputs."""
    student = student[:, : teacher.shape[1]]
    return -((teacher / temperature).softmax(1) * (student / temperature).log_softmax(1)).sum(1).mean()


# roles


def test_a_share_of_the_participants_learns_and_the_rest_reviews(tiny_world, grown):
    method = CFeD(**FEW, train=ONE_STEP, server_distillation=False)
    teacher = {k: {"teacher": weights_of(tiny_world["net"])} for k in range(3)}
    for seed in range(4):
        world = World(method, tiny_world, second_task(), [0, 1, 2], dict(teacher))
        method.server_round(state_of(grown), {}, 0, world, Rng(seed))
        (learn, learners), (review, reviewers) = world.calls
        assert (learn, review) == ("learn", "review")
        assert len(learners) == 2 and sorted([*learners, *reviewers]) == [0, 1, 2]  # round(0.6 x 3)
    assert [CFeD(learners=0.1)._num_learners(n) for n in (1, 5, 10)] == [1, 1, 1]
    assert [CFeD()._num_learners(n) for n in (1, 5, 10)] == [1, 3, 6]


def test_in_the_first_task_everybody_learns(tiny_world):
    method = CFeD(**FEW, train=ONE_STEP, server_distillation=False)
    world = World(method, tiny_world, tiny_world["task"], [0, 2])
    after = method.server_round(state_of(weights_of(tiny_world["net"])), {}, 0, world, Rng(0))
    assert world.calls == [("learn", [0, 2])] and after.notes["num_reviewers"] == 0


def test_learning_is_fedavg(tiny_world):
    """A site that learns; and a round without reviewers and without the server's distillation, sites weighted by size."""
    train, model = Training(local_epochs=2, batch_size=8), weights_of(tiny_world["net"])
    method = CFeD(learners=1.0, server_distillation=False, weighting="size", train=train)
    task = second_task(domain=1)
    ours = World(method, tiny_world, task, [0, 1, 2])
    after = method.server_round(state_of(model), {}, 0, ours, Rng(0))
    fedavg = FedAvg(train=train)
    theirs = World(fedavg, tiny_world, task, [0, 1, 2])
    uploads = theirs.ask([0, 1, 2], "client_round", {"model": model})
    expected = fedavg.server_round(fedavg.init(tiny_world["net"], Rng(0)), uploads, 0, theirs, Rng(0))
    assert ours.calls == [("learn", [0, 1, 2])]
    assert all(torch.equal(after.model[key], value) for key, value in expected.model.items())


# distillation at a site


def test_one_review_step_equals_the_formula(tiny_world, grown):
    teacher, model = grown, far(grown)
    # no image needed
    shard = replace(tiny_world["shards"][0], task=second_task(), index=torch.zeros(0, dtype=torch.int64))
    upload, _ = CFeD(**FEW, train=ONE_STEP).review({"model": model}, shard, {"teacher": teacher}, Rng(0))
    net, old = tiny_world["arch"].restore(model).eval(), tiny_world["arch"].restore(teacher).eval()
    x = surrogates(tiny_world)
    kd(net(x), old(x).detach()).backward()
    for name, parameter in net.named_parameters():
        step = 0.0 if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(upload["model"][name], parameter.detach() - step, rtol=1e-4, atol=1e-6)
    assert upload["num_images"] == 6
    for key in model:
        if "running" in key or "tracked" in key:
            assert torch.equal(upload["model"][key], model[key]), "surrogates leave no trace in what images left there"


def test_the_teacher_has_the_grown_head_and_goes_to_everybody(tiny_world):
    method = CFeD(server_distillation=False)
    world = World(method, tiny_world, second_task(), [0])
    state = method.begin_task(state_of(weights_of(tiny_world["net"])), tiny_world["task"], world, Rng(0))
    assert world.calls == []
    state = method.begin_task(state, second_task(), world, Rng(0))
    assert world.calls == [("keep_teacher", [0, 1, 2])] and len(state.model["head.weight"]) == 4
    assert torch.equal(world.states[2]["teacher"]["head.weight"], state.model["head.weight"])


def test_who_has_not_moved_has_nothing_to_review_unless_pictures_bring_their_own_statistics(tiny_world):
    model = weights_of(tiny_world["net"])
    shard, state = replace(tiny_world["shards"][0], task=second_task(domain=1)), {"teacher": model}
    moved = {}
    for statistics in ("running", "batch"):
        method = CFeD(**FEW, train=ONE_STEP, statistics=statistics)
        upload, _ = method.review({"model": model}, shard, state, Rng(0))
        moved[statistics] = max(
            float((upload["model"][k] - model[k]).abs().max())
            for k in model
            if k.startswith(("head", "body")) and "num" not in k
        )
    assert moved["running"] < 1e-6 < moved["batch"]


def test_a_site_that_joined_late_has_nothing_to_review(tiny_world):
    answer, state = CFeD(**FEW).review({"model": weights_of(tiny_world["net"])}, tiny_world["shards"][0], None, Rng(0))
    assert answer == {"num_images": 0} and state is None


def test_behind_a_mechanism_a_reviewer_tells_no_number(tiny_world):
    """Nor does it spend: nothing of its images is in what it sends."""
    model = weights_of(tiny_world["net"])
    shard = replace(tiny_world["shards"][0], site=SitePrivacy(PRIVATE, Noise()))
    answer, _ = CFeD(**FEW, train=ONE_STEP).review({"model": model}, shard, {"teacher": model}, Rng(0))
    assert answer["num_images"] == 1 and set(answer) == {"model", "num_images"}


# distillation on the server


def test_the_server_hears_one_teacher_on_each_picture_in_turn(tiny_world):
    """Two sites and the model of the last round: pictures 0 and 3 hear the first, 1 and 4 the second, 2 and 5 the third."""
    model = weights_of(tiny_world["net"])
    teachers = [far(model, 1.2), far(model, 0.8), model]
    method = CFeD(**FEW, train=ONE_STEP)
    world = World(method, tiny_world, tiny_world["task"], [0, 1])
    found, _ = method._distilled(state_of(far(model, 1.05)), teachers, world, Rng(0))
    net, x = tiny_world["arch"].restore(far(model, 1.05)).eval(), surrogates(tiny_world)
    answers = torch.stack(
        [class_scores(tiny_world["arch"].restore(teachers[i % 3]), x[i : i + 1])[0] for i in range(6)]
    )
    kd(net(x), answers).backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-4, atol=1e-6)


def test_teachers_that_agree_leave_the_average_as_it_is(tiny_world):
    model = weights_of(tiny_world["net"])
    method = CFeD(num_surrogates=2, train=ONE_STEP)  # more teachers than pictures
    world = World(method, tiny_world, tiny_world["task"], [0])
    found, _ = method._distilled(state_of(model), [model] * 5, world, Rng(0))
    assert all(torch.allclose(found[key], model[key], atol=1e-6) for key in model)


def test_surrogate_pictures_are_the_same_for_everybody_and_grey_where_the_data_are():
    assert torch.equal(drawn_pictures(4, 16, 7), drawn_pictures.__wrapped__(4, 16, 7))
    assert not torch.equal(drawn_pictures(4, 16, 7), drawn_pictures(4, 16, 8))
    grey = cfed.Transform((0.5,) * 3, (0.25,) * 3, 2)
    x = CFeD(**FEW)._surrogates(16, grey, torch.device("cpu"))
    assert torch.equal(x[:, 0], x[:, 1]) and float(x.std()) > 0.1
    colour = cfed.Transform((0.5, 0.4, 0.5), (0.25,) * 3, 2)
    assert not torch.equal(*CFeD(**FEW)._surrogates(16, colour, torch.device("cpu"))[:, [0, 2]].unbind(1))


def test_a_run_says_who_reviewed_and_how_it_went(tmp_path, image_folder):
    small = {"data.path": str(image_folder), "model.width": 4, "method.num_surrogates": 8, "method.learners": 0.5}
    rescene.run("smoke", out=tmp_path / "r", method="cfed", **small)  # two of four sites in each of two rounds
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    notes = [(row["task"], row["notes"]) for row in rows if row["kind"] == "round"]
    assert [told["num_reviewers"] for _, told in notes] == [0, 0, 1, 1]
    for task, told in notes:
        assert ("review_loss" in told) == (task == 1) and told["distillation_loss"] > 0
