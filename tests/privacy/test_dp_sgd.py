"""DP-SGD: gradients of single records, the step they make, what leaves a site, and what replay costs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rescene.core.errors import ConfigError, RunError
from rescene.core.rng import Rng
from rescene.functional.balance import grouped_cross_entropy
from rescene.methods import method_class
from rescene.nets import Arch
from rescene.privacy.accounting import Composition, epsilon_of
from rescene.privacy.dp_sgd import clipped_sum, fit_privately, per_record, record_losses
from rescene.privacy.ledger import Charge, Declined, Ledger, Touched
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Batch, Training, fit_shard

pytest.importorskip("opacus", reason="rescene[privacy]")
PLAIN = Training(local_epochs=3, batch_size=1000, lr=0.1, augment=False)
PLAIN_STEP = Training(local_epochs=1, batch_size=1000, lr=1.0, momentum=0, weight_decay=0, augment=False)
DP = Mechanism("dp-sgd", 1.0, 1.0, Composition(3, 1), typical_count=8.0)
ARCH = Arch("convnet", 16, "group", 4)


class Silent(Noise):
    def words(self):
        return lambda count: torch.zeros(count, dtype=torch.int64)  # the middle of every law

    def normal(self, *shape):  # of the paper's experiment
        return torch.zeros(shape, dtype=torch.float64)


@pytest.fixture
def shard(tiny_world):
    return replace(tiny_world["shards"][1], net=ARCH.restore)  # 13 + 3 images


def fresh():
    return ARCH.build(2, torch.Generator().manual_seed(1))


def at_site(shard, mechanism=DP, noise=None, **more):
    return replace(shard, site=SitePrivacy(mechanism, noise or Noise(Rng(5).generator()), **more))


def trained_at(net, client, settings, generator):
    return fit_privately(net, client, settings, generator, client.site)


def mean_loss(net, batch):
    return F.cross_entropy(net(batch.x), batch.y)


def generator():
    return torch.Generator().manual_seed(0)


def test_the_sum_is_that_of_gradients_clipped_one_by_one(shard):
    """Against a plain loop: autograd of each record's loss on its own, then clip, then sum; a neighbour moves it by C at most."""
    net, rows = fresh(), []
    for x, y in zip(shard.pictures(shard.index), shard.labels, strict=True):
        own = torch.autograd.grad(F.cross_entropy(net(x[None]), y[None]), list(net.parameters()))
        rows.append(torch.cat([g.flatten() for g in own]).double())
    rows = torch.stack(rows)
    clip = float(rows.norm(dim=1).median())  # half of them are clipped
    expected = (rows * (clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(dim=0)
    watched = per_record(net)

    def found(index):
        return clipped_sum(watched, shard, index, PLAIN, generator(), mean_loss, clip)

    whole = found(shard.index)
    assert torch.allclose(whole, expected, rtol=1e-4, atol=1e-6)
    for i in range(len(shard)):
        rest = found(torch.cat([shard.index[:i], shard.index[i + 1 :]]))
        assert 0 < float((whole - rest).norm()) <= clip * (1 + 1e-6)
    assert float(found(shard.index[:0]).norm()) == 0

    def broken(net, batch):  # one record without a finite gradient takes nobody along
        return mean_loss(net, batch) * torch.where(batch.index == shard.index[0], torch.inf, 1.0).sum()

    rest = clipped_sum(watched, shard, shard.index, PLAIN, generator(), broken, clip)
    assert torch.allclose(rest, found(shard.index[1:]), rtol=1e-5, atol=1e-7)


def test_no_loss_can_mix_records():
    """A loss that divides by the sizes of two groups: of each record alone, not of its batch."""
    logits, labels, old = torch.randn(6, 3, generator=generator()), torch.tensor([0, 1, 2, 0, 1, 2]), 4
    weights = torch.arange(6.0)

    def loss(net, batch):
        return grouped_cross_entropy(net(batch.x), batch.y, batch.index >= old, 1.2, 0.8, weights[batch.index])

    found = record_losses(loss, logits, Batch(torch.zeros(6, 3, 2, 2), labels, torch.arange(6)))
    each = F.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(found, each * weights * torch.tensor([0.8] * 4 + [1.2] * 2))


def test_without_noise_clip_and_sampling_it_is_sgd(shard):
    """Momentum and weight decay included; the public count is set to the true one, which makes sums means."""
    plain, private = fresh(), fresh()
    fit_shard(plain, shard, PLAIN, generator())
    mechanism = replace(DP, clip=1e3, typical_count=len(shard) / 2)
    assert trained_at(private, at_site(shard, mechanism, Silent()), PLAIN, generator())
    for a, b in zip(plain.parameters(), private.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("batch_size", "smallest_batch"), [(5, 2), (6, 5)])
def test_the_papers_experiment_is_sgd_with_clipped_records_and_noise_over_the_minibatch(
    shard, batch_size, smallest_batch
):
    """Minibatches of 16 images, the last of one or four left out as in SGD; then clipped, then with noise of sigma C / b."""
    settings = replace_training(batch_size=batch_size, smallest_batch=smallest_batch)
    free = replace(DP, kind="paper-experiment", clip=1e6)
    plain, perturbed = fresh(), fresh()
    fit_shard(plain, shard, settings, generator())
    assert trained_at(perturbed, at_site(shard, free, Silent()), settings, generator())
    for a, b in zip(plain.parameters(), perturbed.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)

    def moved(mechanism, noise):
        net = fresh()
        trained_at(net, at_site(shard, mechanism, noise), PLAIN_STEP, generator())
        pairs = zip(net.parameters(), fresh().parameters(), strict=True)
        return torch.cat([(a - b).detach().flatten() for a, b in pairs])

    tight = replace(free, clip=1e-3, sigma=3.0)
    quiet, loud = moved(tight, Silent()), moved(tight, Noise())
    assert 0 < float(quiet.norm()) <= 1e-3 * (1 + 1e-5)
    assert float((loud - quiet).std()) == pytest.approx(3.0 * 1e-3 / 16, rel=0.1)


def test_the_papers_experiment_hides_nothing_and_noises_fedcbdrs_features(shard):
    mechanism = replace(DP, kind="paper-experiment", sigma=2.0, clip=5.0)
    answer = method_class("fedavg")(train=PLAIN).client_round
    assert answer({"model": fresh().state_dict()}, at_site(shard, mechanism), None, Rng(0))[0]["num_images"] == 16
    empty = at_site(replace(shard, index=shard.index[:0]), mechanism)
    assert answer({"model": fresh().state_dict()}, empty, None, Rng(0))[0] == {"num_images": 0}
    method, payload = method_class("fedcbdr")(train=PLAIN), {"model": fresh().state_dict(), "rotation_seed": 0}
    quiet = method.share_features(payload, at_site(shard, mechanism, Silent()), None, Rng(0))[0]["moments"]
    loud = method.share_features(payload, at_site(shard, mechanism), None, Rng(0))[0]["moments"]
    # 16 rows of N(0, 10^2) in d dimensions add 16 x 100 to each diagonal entry
    assert float((loud - quiet).diagonal().mean()) == pytest.approx(1600, rel=0.3)
    kept = method_class("refed")(train=PLAIN).set_aside({}, at_site(shard, mechanism), None, Rng(0))[1]
    assert len(kept.labels) == 16, "what stays at home is chosen as ever"


def test_the_noise_has_the_promised_size_and_a_site_without_images_answers_too(shard):
    empty = replace(shard, index=shard.index[:0])
    mechanism = replace(DP, sigma=3.0, clip=0.5, composition=Composition(1, 1, 0.25))
    net, before = fresh(), fresh()
    assert trained_at(net, at_site(empty, mechanism), replace_training(lr=1.0, momentum=0, weight_decay=0), generator())
    moved = torch.cat([(a - b).detach().flatten() for a, b in zip(net.parameters(), before.parameters(), strict=True)])
    assert float(moved.std()) == pytest.approx(3.0 * 0.5 / (0.25 * 8 * 2), rel=0.1)  # sigma C / (q x 8 x 2 classes)


def replace_training(**change):
    return Training(**{**PLAIN.model_dump(), **change})


def test_uploads_tell_neither_counts_nor_losses_and_repeat_from_the_ledger(shard, tmp_path):
    method = method_class("fedavg")(train=PLAIN)
    payload = {"model": fresh().state_dict()}

    def ask(round, **more):
        site = at_site(shard, noise=Noise(), run="r", round=round, ledger=Ledger(tmp_path / "l.jsonl"), **more)
        return method.client_round(payload | more.pop("change", {}), site, None, Rng(0))[0]

    first = ask(0)
    assert set(first) == {"model", "num_images"} and first["num_images"] == 1
    assert all(torch.equal(v, ask(0)["model"][k]) for k, v in first["model"].items()), "the same bytes again"
    other = ask(1)["model"]
    assert any(not torch.equal(v, other[k]) for k, v in first["model"].items()), "noise is the operating system's"
    with pytest.warns(match="site declines"):
        declined = ask(2, max_participations=2)
    assert declined == {"num_images": 0, "notes": {"num_declined": 1}}
    payload["model"] = other
    with pytest.raises(RunError) as caught:
        ask(0)
    assert caught.value.code == "E412"


def test_batch_norm_is_refused_with_the_reason(tiny_world):
    with pytest.raises(ConfigError) as caught:
        trained_at(tiny_world["net"], at_site(tiny_world["shards"][1]), PLAIN, generator())
    assert caught.value.code == "E175" and "model.norm=group" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "verb"), [("fedcbdr", "share_features"), ("fedcbdr", "draw_share"), ("refed", "set_aside")]
)
def test_memories_are_chosen_by_coins_that_no_other_record_turns(shard, name, verb):
    """A record more or less leaves the choice of the others as it is, and nothing is sent, whatever a server asks for."""
    method = method_class(name)(train=PLAIN, **({"budget": 4} if name == "fedcbdr" else {}))

    def kept(index):
        own = replace(at_site(shard), index=index)
        upload, memory = getattr(method, verb)({"model": {}, "rotation_seed": 0}, own, None, Rng(0))
        assert upload == {}
        return memory.pixels

    whole, less = kept(shard.index), kept(shard.index[:-1])
    assert len(whole) - len(less) in (0, 1) and torch.equal(whole[: len(less)], less)
    if name == "fedcbdr":  # chance 4 / 8
        many = shard.index.repeat(100)
        assert len(kept(many)) == pytest.approx(800, abs=80)


def test_refed_makes_room_by_public_numbers(shard):
    """Storage 32 at 8 images a class: beside 2 new classes there is room for 2 of the 4, then of the 6 earlier classes."""
    method = method_class("refed")(train=PLAIN, storage=32)
    shard, state, shares = at_site(replace(shard, index=shard.index.repeat(50))), None, []
    for t in (1, 2, 3):
        task = replace(shard.task, index=t - 1, classes=(2 * t - 2, 2 * t - 1), num_seen=2 * t)
        state = method.set_aside({}, replace(shard, task=task), state, Rng(0))[1]
        task = replace(task, index=t, classes=(2 * t, 2 * t + 1), num_seen=2 * t + 2)
        state = method.refresh_cache({"model": {}}, replace(shard, task=task), state, Rng(0))[1]
        shares.append((state.chance, len(state.labels) / (t * len(shard))))
    assert [chance for chance, _ in shares] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [share for _, share in shares] == pytest.approx([1, 1 / 2, 1 / 3], abs=0.05)


def test_replayed_records_are_charged_for_earlier_tasks(tmp_path):
    """The floor allows four participations of a record: spread over tasks they count together only where records stay."""
    limit = epsilon_of(2.0, Composition(10, 4, 0.2), 1e-5) + 1e-3
    (tmp_path / "floor.yaml").write_text(f"epsilon_max: {limit}")

    def allowed(reuses):
        ledger = Ledger(tmp_path / f"{reuses}.jsonl")
        done = 0
        for task, round in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]:
            charge = Charge("run", task, round, "dp-sgd", 2.0, 10, 0.2, reuses)
            try:
                touched = None if reuses else Touched("16 px", [bytes([task])])
                ledger.once(charge, "q", 1e-5, None, lambda: {}, touched)
                done += 1
            except Declined:
                break
        return done

    assert allowed(reuses=False) == 6 and allowed(reuses=True) == 4
