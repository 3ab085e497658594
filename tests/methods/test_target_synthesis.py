"""What TARGET's server does: inversion losses, the generator, the search for images, the student."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from target_world import SIZE, TINY, TRANSFORM, same, seeded, small_net

from rescene.core.errors import RunError
from rescene.core.rng import Rng
from rescene.functional.image_losses import adversarial_loss, blend, channel_moments, statistics_loss
from rescene.methods.base import weights_of
from rescene.nets import Arch
from rescene.training.generator import add_gradients, fresh_generator, reptile_gradients
from rescene.training.synthesis import (
    Search,
    Statistics,
    StudentTraining,
    Synthesis,
    Synthetic,
    reinitialise,
    shuffled_batches,
    synthesise,
)


def painted(teacher, student, settings: Synthesis, rng: Rng) -> Synthetic:
    sizes = {"num_classes": len(teacher.head.weight), "image_size": SIZE}
    return synthesise(teacher, student, **sizes, transform=TRANSFORM, settings=settings, rng=rng)


# --- mathematics


def test_moments_are_taken_over_batch_and_space_with_the_biased_variance():
    # channel 0 holds 0, 2, 4, 6: mean 3, squares 9 + 1 + 1 + 9 = 20, 20 / 4 = 5 (20 / 3 would be unbiased)
    x = torch.stack([torch.tensor([0.0, 2.0, 4.0, 6.0]).view(2, 2), torch.ones(2, 2)], dim=0).permute(1, 0, 2)
    x = x.reshape(2, 2, 1, 2)
    mean, variance = channel_moments(x)
    assert mean.tolist() == [3.0, 1.0]
    assert variance.tolist() == [5.0, 0.0]


def test_statistics_loss_by_hand_and_without_gradient_trouble_at_zero():
    # means differ by (3, 4): 5; variances by (0, 2): 2
    mean = torch.tensor([3.0, 4.0], requires_grad=True)
    loss = statistics_loss((mean, torch.tensor([1.0, 3.0])), (torch.zeros(2), torch.ones(2)))
    assert loss.item() == 7.0
    loss.backward()
    assert torch.allclose(mean.grad, torch.tensor([0.6, 0.8]))  # the unit vector, because the norm is not squared
    agreed = torch.zeros(2, requires_grad=True)
    statistics_loss((agreed, torch.ones(2)), (torch.zeros(2), torch.ones(2))).backward()
    assert agreed.grad.tolist() == [0.0, 0.0]


def test_blend_keeps_nine_tenths_of_the_average():
    current, average = (torch.tensor([1.0]), torch.tensor([10.0])), (torch.tensor([2.0]), torch.tensor([20.0]))
    mean, variance = blend(current, average, 0.9)
    assert mean.item() == pytest.approx(0.1 * 1 + 0.9 * 2)
    assert variance.item() == pytest.approx(0.1 * 10 + 0.9 * 20)
    assert blend(current, None, 0.9) is current


def test_adversarial_loss_counts_only_images_on_which_both_agree():
    # image 0: p = (.75, .25), q = (.6, .4), both choose class 0; image 1: they disagree and it counts 0, but n stays 2
    p, q = torch.tensor([[0.75, 0.25], [0.9, 0.1]]), torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    divergence = 0.75 * math.log(0.75 / 0.6) + 0.25 * math.log(0.25 / 0.4)
    assert adversarial_loss(q.log(), p.log()).item() == pytest.approx(-divergence / 2, rel=1e-5)
    assert adversarial_loss(q.flip(1).log(), q.log()).item() == 0.0
    assert adversarial_loss(p.log() + 7, p.log()).item() == pytest.approx(0.0, abs=1e-6)


# --- the statistics of the teacher


def test_statistics_loss_of_a_network_is_zero_when_batch_and_running_statistics_agree():
    net, x = small_net().eval(), torch.randn(16, 3, SIZE, SIZE, generator=seeded())
    layers = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert Statistics(net, 0.9)(x)[1] > 0.1

    def adopt(layer, args):  # a pre-hook, so that deeper layers see what the new statistics give
        layer.running_mean, layer.running_var = (moment.detach() for moment in channel_moments(args[0]))

    handles = [layer.register_forward_pre_hook(adopt) for layer in layers]
    net(x)
    for handle in handles:
        handle.remove()
    logits, loss = Statistics(net, 0.9)(x)
    assert len(layers) == 3
    assert loss.item() == pytest.approx(0.0, abs=1e-5)
    assert torch.equal(logits, net(x))
    assert all(not layer._forward_pre_hooks for layer in layers)


def test_statistics_average_is_taken_once_per_remember():
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Flatten()).eval()  # running mean 0, variance 1
    statistics = Statistics(net, 0.9)

    def constant(value):  # mean = value, variance 0
        return torch.full((2, 1, 1, 2), value)

    assert statistics(constant(2.0))[1].item() == pytest.approx(2 + 1)
    assert statistics(constant(4.0))[1].item() == pytest.approx(4 + 1)  # nothing remembered yet
    statistics.remember()  # mean 4
    assert statistics(constant(1.0))[1].item() == pytest.approx(0.1 * 1 + 0.9 * 4 + 1)
    statistics.remember()  # mean .9 * 4 + .1 * 1 = 3.7
    assert statistics(constant(0.0))[1].item() == pytest.approx(0.9 * 3.7 + 1)


@pytest.mark.parametrize("arch", [Arch("convnet", SIZE, "group", 4), Arch("vit-small", SIZE)])
def test_networks_without_batchnorm_have_no_statistics_loss_and_can_be_inverted(arch):
    teacher, student = arch.build(2, seeded()), arch.build(2, seeded())
    assert Statistics(teacher, 0.9)(torch.randn(2, 3, SIZE, SIZE))[1].item() == 0.0
    settings = Synthesis(
        **TINY | {"synthesis_rounds": 2, "synthesis_batch": 2, "generator_steps": 1, "student_steps": 1}
    )
    made = painted(teacher, student, settings, Rng(0))
    assert made.pixels.shape == (4, 3, SIZE, SIZE)
    assert math.isfinite(made.notes["student_loss"])


# --- the generator


@pytest.mark.parametrize("image_size", [8, 28, 30, 32])
def test_generator_paints_pixels_between_zero_and_one_of_any_size(image_size):
    made = fresh_generator(5, 3, image_size, seeded())
    images = made(torch.randn(4, 5, generator=seeded()))
    assert images.shape == (4, 3, image_size, image_size)
    assert images.min() >= 0 and images.max() <= 1 and images.std() > 0.01


def test_generator_has_the_layers_of_the_paper_and_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made, again = fresh_generator(256, 64, 32, seeded(1)), fresh_generator(256, 64, 32, seeded(1))
    assert torch.equal(before, torch.get_rng_state())
    assert same(made.state_dict(), again.state_dict())
    linear, norms = (256 + 1) * 128 * 8 * 8, 2 * 128 + 2 * 128 + 2 * 64
    convolutions = 128 * 128 * 9 + 128 * 64 * 9 + (64 * 9 + 1) * 3
    assert sum(p.numel() for p in made.parameters()) == linear + norms + convolutions
    assert made.first.bias.abs().max() <= 1 / 16 and made.first.bias.std() > 0.03  # uniform within 1 / sqrt(256)


def test_meta_gradients_by_hand():
    base, copy = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    base.weight.data.fill_(5.0)
    for gradient in (2.0, 3.0):  # first-order MAML sums the gradients along the copy's way
        copy.weight.grad = torch.full((1, 1), gradient)
        add_gradients(base, copy)
    assert base.weight.grad.item() == 5.0
    assert copy.weight.grad.item() == 3.0
    copy.weight.data.fill_(4.5)
    reptile_gradients(base, copy, 67.0)
    assert base.weight.grad.item() == pytest.approx(67 * 0.5)


# --- synthesis


def make_search(settings: Synthesis, norm: str = "batch") -> Search:
    teacher, student = small_net(norm=norm), small_net(norm=norm, seed=1)
    return Search(teacher, student, 3, SIZE, TRANSFORM, settings, Rng(0))


@pytest.mark.parametrize("meta_update", ["fomaml", "reptile"])
def test_base_generator_takes_one_adam_step_of_rate_lr_times_steps(meta_update):
    # Adam's first step is lr * g / (|g| + 1e-8): lr in size wherever the gradient is not tiny. Here lr = .002 * 3.
    settings = Synthesis(**TINY | {"generator_steps": 3, "meta_update": meta_update})
    search = make_search(settings)
    before = search.generator.first.weight.detach().clone()
    search.round(0)
    moved = (search.generator.first.weight - before).detach().abs()
    assert moved.max().item() == pytest.approx(0.006, rel=1e-3)
    assert moved.median().item() == pytest.approx(0.006, rel=1e-2)


def test_rounds_remember_the_statistics_of_their_last_step_but_not_their_gradients():
    search = make_search(Synthesis(**TINY))
    assert search.statistics.averages == [None] * 3
    search.round(0)
    for average, latest in zip(search.statistics.averages, search.statistics.latest, strict=True):
        assert torch.equal(torch.stack(average), torch.stack(latest))
        assert not torch.stack(average).requires_grad
    assert all(parameter.grad is None for parameter in search.generator.parameters())


def test_a_round_returns_the_images_of_lowest_loss(monkeypatch):
    search, painted, values = make_search(Synthesis(**TINY | {"generator_steps": 3})), [], iter([3.0, 1.0, 2.0])

    def scripted(images, labels, *, adversarial, source):
        painted.append(images.detach().clone())
        _, statistics = search.statistics(images)
        return next(values) + statistics - statistics.detach()

    monkeypatch.setattr(search, "loss", scripted)
    images, loss = search.round(0)
    assert loss == 1.0
    assert torch.equal(images, painted[1]) and not torch.equal(images, painted[2])


def test_search_loss_is_the_weighted_sum_of_its_three_terms():
    settings = Synthesis(**TINY, bn_weight=3.0, onehot_weight=0.5, adversarial_weight=2.0)
    search, labels = make_search(settings), torch.tensor([0, 1, 2, 0])
    images = torch.rand(4, 3, SIZE, SIZE, generator=seeded())
    search.student.eval()
    x = TRANSFORM.augment(
        (images - torch.tensor(TRANSFORM.mean).view(3, 1, 1)) / torch.tensor(TRANSFORM.std).view(3, 1, 1), seeded(3)
    )
    logits, statistics = search.statistics(x)
    plain = 3 * statistics + 0.5 * F.cross_entropy(logits, labels)
    assert torch.allclose(search.loss(images, labels, adversarial=False, source=seeded(3)), plain)
    with_student = plain + 2 * adversarial_loss(search.student(x), logits)
    assert torch.allclose(search.loss(images, labels, adversarial=True, source=seeded(3)), with_student)
    assert not torch.allclose(plain, with_student)


def test_search_lowers_its_loss():
    search = make_search(Synthesis(**TINY | {"generator_steps": 30, "generator_lr": 0.02, "synthesis_batch": 16}))
    first = []
    loss = search.loss
    search.loss = lambda *args, **kw: (first.append(loss(*args, **kw)), first[-1])[1]
    assert search.round(0)[1] < 0.8 * first[0].item()


def test_pool_size_kind_and_an_unchanged_teacher():
    teacher = small_net()
    before = weights_of(teacher)
    settings = Synthesis(**TINY)
    made = painted(teacher, small_net(), settings, Rng(0))
    assert made.pixels.dtype == torch.uint8
    assert len(made.pixels) == 3 * 6 == made.notes["synthetic_images"]  # 100 * 256 = 25,600 at the defaults
    assert Synthesis().synthesis_rounds * Synthesis().synthesis_batch == 25_600
    assert same(before, weights_of(teacher))
    assert made.pixels.float().std() > 1


def synthesised_student(**changes) -> dict[str, torch.Tensor]:
    student = small_net(seed=9)
    settings = Synthesis(**TINY | changes)
    painted(small_net(), student, settings, Rng(0))
    return weights_of(student)


def test_student_is_untouched_before_the_warm_up_is_over():
    fresh = small_net(seed=4)
    reinitialise(fresh, Rng(0).at("student").generator())
    assert same(synthesised_student(synthesis_rounds=2, warmup_rounds=2), weights_of(fresh))
    assert not same(synthesised_student(synthesis_rounds=3, warmup_rounds=2), weights_of(fresh))
    assert same(synthesised_student(adversarial_weight=0.0), weights_of(fresh))


def test_student_joins_the_search_in_round_warmup_and_learns_from_the_next_on():
    # Counted from 1, warm-up 2, three rounds: L_adv in rounds 2 and 3 (2 passes each), training in round 3 (4 passes).
    student, passes = small_net(), []
    student.body.register_forward_hook(lambda module, args, out: passes.append(module.training))
    # the student learns in a fused copy, which tells its passes
    student.count_passes = lambda images: passes.append(True)
    settings = Synthesis(**TINY | {"warmup_rounds": 2, "student_steps": 4})
    painted(small_net(), student, settings, Rng(0))
    assert passes == [False] * 2 + [False] * 2 + [True] * 4


def test_reinitialised_student_has_the_stated_law():
    net = Arch("convnet", SIZE, "batch", 64).build(10, seeded())
    net.body.stage1[1].running_mean.fill_(3.0)
    reinitialise(net, seeded(1))
    conv, norm = net.body.stage3[0].weight, net.body.stage3[1]
    assert conv.std().item() == pytest.approx(math.sqrt(2 / (128 * 9 + 256 * 9)), rel=0.02)  # Xavier-normal
    assert norm.weight.mean().item() == pytest.approx(1.0, abs=0.01) and 0.015 < norm.weight.std() < 0.025
    assert net.head.bias.abs().max() == 0 and net.body.stage1[1].running_mean.abs().max() == 0


def test_one_student_step_by_hand():
    # KD gradient at the head's bias: T^2 * (1/T) * mean(p_T(student) - p_T(teacher)). Constant images have no mirror
    # side, and pad 0 leaves nothing to crop, so the batch is known; GroupNorm has no batch statistics.
    flat = replace(TRANSFORM, pad=0)
    pixels = torch.randint(256, (6, 3, 1, 1), generator=seeded()).to(torch.uint8).expand(6, 3, SIZE, SIZE).contiguous()
    teacher, student = small_net(norm="group").eval(), small_net(norm="group", seed=1)
    settings = Synthesis(
        **TINY | {"student_steps": 1, "student_lr": 0.1, "student_weight_decay": 0.0, "student_temperature": 5.0}
    )
    x = flat.normalise(pixels)
    gap = (student(x) / 5).softmax(1) - (teacher(x) / 5).softmax(1)
    expected = student.head.bias.detach() - 0.1 * 5 * gap.mean(0).detach()
    StudentTraining(teacher, student, flat, settings).round(pixels, seeded())
    assert gap.abs().max() > 0.01
    assert torch.allclose(student.head.bias, expected, atol=1e-6)


def test_student_rate_falls_by_a_cosine_over_student_rounds():
    student = small_net()
    settings = Synthesis(**TINY | {"student_lr": 0.2, "student_lr_min": 0.0, "student_lr_period": 2})
    learning, pixels = StudentTraining(small_net(), student, TRANSFORM, settings), torch.zeros(4, 3, SIZE, SIZE)
    rates = []
    for _ in range(3):
        rates.append(learning.rate())
        learning.round(pixels.to(torch.uint8), seeded())
    assert rates == pytest.approx([0.2, 0.1, 0.0])


def test_synthesis_depends_on_its_address_alone():
    def pixels(seed):
        torch.manual_seed(seed + 100)
        settings = Synthesis(**TINY)
        return painted(small_net(), small_net(), settings, Rng(seed % 2)).pixels

    assert torch.equal(pixels(0), pixels(2))
    assert not torch.equal(pixels(0), pixels(1))


@pytest.mark.parametrize("part", ["generator", "teacher", "statistics", "student"])
def test_where_no_loss_is_finite_the_error_names_the_part(part):
    search = make_search(Synthesis(**TINY))
    teacher = search.statistics.net
    broken = {
        "generator": search.generator.first.weight,
        "teacher": teacher.head.weight,
        "statistics": teacher.body.stage2[1].running_var,  # divides, so that infinity leaves the outputs finite
        "student": search.student.head.weight,
    }[part]
    broken.data.fill_(math.inf if part == "statistics" else math.nan)
    with pytest.raises(RunError) as caught:
        search.round(1)
    assert caught.value.code == "E330"
    assert caught.value.where == f"synthesis round 1, {part}"


def test_a_student_with_many_features_and_two_classes_does_not_run_away():
    # The curvature is about 2,000 for a ResNet-18, and SGD of lr .2, momentum .9 is stable up to 2 (1 + .9) / .2 = 19.
    # Unclipped, the loss of these steps is about five times that of the constant answer, which is T^2 ln 2.
    arch = Arch("resnet18", 8)
    teacher, student = arch.build(2, seeded()), arch.build(2, seeded(1))
    reinitialise(student, seeded(3))
    pixels = torch.randint(256, (8, 3, 8, 8), generator=seeded()).to(torch.uint8)
    settings = Synthesis(synthesis_batch=8, student_steps=4)
    learning = StudentTraining(teacher.eval(), student, TRANSFORM, settings)
    assert learning.round(pixels, seeded()) == pytest.approx(20**2 * math.log(2), rel=0.02)
    variances = [module.running_var.max().item() for module in student.modules() if hasattr(module, "running_var")]
    assert max(variances) < 10


def test_shuffled_batches_show_every_item_before_any_twice():
    batches = shuffled_batches(torch.arange(7), 3, seeded())  # 3 + 3, and a single one that waits
    first = torch.cat([next(batches), next(batches)])
    second = torch.cat([next(batches), next(batches)])
    assert len(first.unique()) == len(second.unique()) == 6
    assert first.tolist() != second.tolist()
    assert next(shuffled_batches(torch.tensor([4]), 3, seeded())).tolist() == [4]
