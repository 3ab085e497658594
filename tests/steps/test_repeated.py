"""Training with a recorded loss is plain training. (Here without a GPU: run, not recorded.)"""

import pytest
import torch
import torch.nn.functional as F

from rescene.methods import method_class
from rescene.steps import Training, fit, repeatable
from rescene.steps.repeated import fit_repeated
from rescene.steps.sgd import Batch, cosine_rate, cross_entropy

SETTINGS = Training(batch_size=8, lr=0.05, precision="float32")


def parts(world, seed):
    shard, generator = world["shards"][2], torch.Generator().manual_seed(seed)

    def plan():
        return shard.index[torch.randperm(len(shard), generator=generator)]

    def fetch(index):
        x = shard.transform.augment(shard.pictures(index), generator)
        return Batch(x, shard.images.labels[index], index)

    return plan, fetch


@pytest.mark.parametrize("cosine", [False, True])
def test_it_agrees_with_the_plain_loop(tiny_world, cosine):
    teacher = tiny_world["arch"].build(2, torch.Generator().manual_seed(9)).eval()

    @repeatable
    def loss(net, batch):
        with torch.no_grad():
            targets = teacher(batch.x).softmax(dim=1)
        return F.cross_entropy(net(batch.x), batch.y) + 0.5 * F.cross_entropy(net.features(batch.x)[:, :2], targets)

    plain, fast = (tiny_world["arch"].restore(tiny_world["net"].state_dict()) for _ in range(2))
    a = fit(plain, *parts(tiny_world, 1), loss, SETTINGS, epochs=3, cosine=cosine)
    rates = [cosine_rate(SETTINGS.lr, epoch, 3) if cosine else SETTINGS.lr for epoch in range(3)]
    b = fit_repeated(fast, *parts(tiny_world, 1), loss, SETTINGS, rates)
    assert abs(a - b) < 1e-4
    for key, value in plain.state_dict().items():
        assert torch.allclose(value.float(), fast.state_dict()[key].float(), atol=1e-4), key


def test_which_losses_say_they_are_repeatable(tiny_world):
    """TARGET's draws new images inside, so it must not."""
    import inspect

    assert cross_entropy.is_repeatable
    marked = {
        name: "@repeatable" in inspect.getsource(inspect.getmodule(method_class(name)))
        for name in ("fedewc", "fedlwf", "fedcbdr", "glfc", "target")
    }
    assert marked == {"fedewc": True, "fedlwf": True, "fedcbdr": True, "glfc": True, "target": False}
