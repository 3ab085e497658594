"""Run the published code of other groups on small tensors, and store what goes in and what comes out.

    python tests/oracles/make_oracles.py CLONES

CLONES holds a clone (bare or not) of each repository in ``SOURCES``, named ``owner+name``. The code is read from the commit that is
named here, the needed functions are cut out of it and run on the CPU, and only tensors are written, to ``fixtures/``.
``test_oracles.py`` compares our own functions with them and needs no clone. ``fixtures/oracles.json`` says which function of which
commit made each file, and where that code differs from ours.
"""

from __future__ import annotations

import ast
import collections
import copy
import io
import json
import math
import random
import subprocess
import sys
from abc import ABC
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from scipy.spatial.distance import cdist
from torch import nn, optim
from torch.autograd import Variable

from rescene.nets import Arch

HERE = Path(__file__).parent
GLFC, TARGET = "conditionWang/FCIL", "zj-jayzhang/Federated-Class-Continual-Learning"
AFL, ACIL = "ZHUANGHP/Analytic-federated-learning", "ZHUANGHP/Analytic-continual-learning"
PILORA, FEDWEIT, FEDCIL = "Ghy0501/PILoRA", "wyjeong/FedWeIT", "daiqing98/FedCIL"
CPROMPT = "grbagwe/Fed-CPrompt"
CGS, DM, ICARL = "Yuqin-G/FedCGS", "VICO-UoE/DatasetCondensation", "srebuffi/iCaRL"
SOURCES = {  # repository: commit, licence
    GLFC: ("11e161a9d57ecd14126201b7bd9a424137749ee5", "none stated"),
    TARGET: ("78cb9c05eea2555c33c0b83391811c3bb1ef059c", "none stated"),
    AFL: ("1e7c2d9978430c6cde0708268dd03128f0bb6c1c", "none stated"),
    ACIL: ("0afd6bf87622e808ce7f730f8556e78229b9e758", "MIT"),
    CGS: ("25402e60e1b242e965634e2b6b4b3056eec4595c", "none stated"),
    DM: ("53f63a672eab9ade02aabe6432706ef56f317d64", "MIT"),
    PILORA: ("6d1c4efaca134cfc4493cf151329d693e07e75c8", "none stated"),
    FEDWEIT: ("83c0bcd10b4934abe3af3a9b6d2e5b77566b9567", "none stated"),
    FEDCIL: ("c439de076ae8423fdc676299e8a0ef40ebf75312", "none stated"),
    CPROMPT: ("a19c98b90e28d134e867a39f9f686a10369f6007", "none stated"),
    ICARL: ("7a3d254da4b3f0f19f67b8c25ba72374674bafaf", "MIT"),
}
GIVEN = {"torch": torch, "nn": nn, "F": F, "np": np, "optim": optim, "copy": copy, "Variable": Variable, "ABC": ABC}
Tensors = dict[str, torch.Tensor]


class Clones:
    """The published files at the commits named above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tree(self, repository: str, file: str) -> ast.Module:
        place = self.folder / repository.replace("/", "+")
        show = ["git", "-C", str(place), "show", f"{SOURCES[repository][0]}:{file}"]
        return ast.parse(subprocess.run(show, check=True, capture_output=True, text=True).stdout)

    def take(self, repository: str, file: str, *names: str, **given: Any) -> SimpleNamespace:
        """These functions, classes and constants of a file, run with stand-ins for what they import."""
        wanted = [node for node in self.tree(repository, file).body if _name(node) in names]
        space = GIVEN | given
        exec(compile(ast.Module(wanted, []), file, "exec"), space)
        return SimpleNamespace(**{name: space[name] for name in names})

    def run_inside(self, repository: str, file: str, first: str, last: str, space: dict[str, Any]) -> dict[str, Any]:
        """Statements that stand in the middle of a script: from the one that begins with ``first`` to that with ``last``."""
        for node in ast.walk(self.tree(repository, file)):
            body = getattr(node, "body", None)
            lines = [ast.unparse(one).lstrip("(") for one in body] if isinstance(body, list) else []
            starts = [i for i, line in enumerate(lines) if line.startswith(first)]
            ends = [i for i, line in enumerate(lines) if line.startswith(last)]
            if starts and ends:
                found = GIVEN | space
                exec(compile(ast.Module(body[starts[0] : ends[0] + 1], []), file, "exec"), found)
                return found
        raise LookupError(f"{file} has no block from {first!r} to {last!r}")


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", "")


@contextmanager
def on_the_cpu() -> Any:
    """The published code moves everything to a GPU; here that changes nothing."""

    def stays(self: Any, *_: Any, **__: Any) -> Any:
        return self

    with patch.object(torch.Tensor, "cuda", stays), patch.object(nn.Module, "cuda", stays):
        yield


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def small_net(num_classes: int, size: int, seed: int) -> nn.Module:
    """A ConvNet with BatchNorm, in eval mode, whose running statistics are not those of a new network."""
    net = Arch("convnet", size, "batch", 4).build(num_classes, seeded(seed))
    net(drawn(seed + 1, 16, 3, size, size))
    return net.eval()


def with_prefix(prefix: str, state: Tensors) -> Tensors:
    return {f"{prefix}.{key}": value.detach().clone() for key, value in state.items()}


# --- GLFC


def glfc_losses(clones: Clones) -> Tensors:
    got = clones.take(GLFC, "src/GLFC.py", "get_one_hot", "entropy", "GLFC_model")
    z, u = 2 * drawn(0, 8, 5), 2 * drawn(1, 8, 3)
    labels, learned = torch.tensor([0, 1, 1, 3, 4, 3, 4, 2]), [0, 1]
    client = SimpleNamespace(numclass=5, device="cpu", learned_classes=learned, old_model=None, model=None)
    client.efficient_old_class_weight = lambda *a: got.GLFC_model.efficient_old_class_weight(client, *a)

    def loss(logits: torch.Tensor, old: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = logits.clone().requires_grad_()
        client.model, client.old_model = (lambda _: x), None if old is None else (lambda _: old)
        value = got.GLFC_model._compute_loss(client, None, None, labels)
        return value.detach(), torch.autograd.grad(value, x)[0]

    alone, together = loss(z, None), loss(z, u)
    fitted = z.clone()
    fitted[labels < 2] = 200.0  # every old sample is right without any doubt
    return {
        **{"z": z, "u": u, "labels": labels, "learned": torch.tensor(learned)},
        "weights": client.efficient_old_class_weight(z, labels).squeeze(1),
        "loss_without_old": alone[0],
        "gradient_without_old": alone[1],
        "loss": together[0],
        "gradient": together[1],
        "fitted": fitted,
        "weights_fitted": client.efficient_old_class_weight(fitted, labels).squeeze(1),
        "entropy": got.entropy(z.softmax(dim=1)),
    }


def glfc_herding(clones: Clones) -> Tensors:
    got = clones.take(GLFC, "src/GLFC.py", "GLFC_model")

    def picks(z: torch.Tensor, budget: int) -> torch.Tensor:
        wide = F.pad(z, (0, 512 - z.shape[1])).numpy()  # the code knows features of 512 numbers only
        client = SimpleNamespace(exemplar_set=[], transform=None)
        client.compute_class_mean = lambda *_: (wide.mean(axis=0), wide)
        got.GLFC_model._construct_exemplar_set(client, list(range(len(z))), budget)
        return torch.tensor(client.exemplar_set[0])

    z = F.normalize(drawn(2, 20, 6), dim=1)
    near = F.normalize(torch.cat([torch.tensor([[1.0, 0.0]]), drawn(3, 5, 2)]), dim=1)
    return {"z": z, "picks": picks(z, 5), "near": near, "picks_near": picks(near, 5)}


def glfc_pictures(clones: Clones) -> Tensors:
    """A prototype is perturbed and encoded at a site; the proxy reads its label and searches for it (one call of L-BFGS)."""

    class Tools:
        """Stands in for torchvision: pictures stay arrays, and what the proxy would store is kept as it is."""

        Compose = staticmethod(lambda steps: steps[0])
        ToTensor = staticmethod(lambda: lambda a: torch.from_numpy(a).permute(2, 0, 1).float() / 255)
        ToPILImage = staticmethod(lambda: lambda t: t.detach())

    tools = {"transforms": Tools, "Image": SimpleNamespace(fromarray=lambda a: a)}
    tools |= {"model_to_device": lambda model, *_: model}
    lenet = clones.take(GLFC, "src/myNetwork.py", "LeNet").LeNet(hideen=768, num_classes=3)
    grid = {name: torch.randint(-128, 128, w.shape, generator=seeded(5)) for name, w in lenet.state_dict().items()}
    lenet.load_state_dict({name: w / 256 for name, w in grid.items()})
    pictures = torch.randint(0, 256, (3, 32, 32, 3), generator=seeded(6)).to(torch.uint8)
    z = drawn(7, 3, 4)
    net = small_net(3, 32, 8)
    got = clones.take(GLFC, "src/GLFC.py", "get_one_hot", "GLFC_model", **tools)
    client = SimpleNamespace(current_class=[1], numclass=3, device="cpu", learning_rate=2.0, transform=None)
    client.model, client.encode_model = net, lenet
    client.train_dataset = SimpleNamespace(get_image_class=lambda _: pictures.numpy())
    client.compute_class_mean = lambda *_: (z.numpy().mean(axis=0), z.numpy())
    gradients = got.GLFC_model.prototype_mask(client)
    server = clones.take(GLFC, "src/ProxyServer.py", "proxyServer", **tools).proxyServer
    proxy = SimpleNamespace(Iteration=1, num_image=1, device="cpu", encode_model=lenet, pool_grad=gradients)
    proxy.gradient2label = lambda: server.gradient2label(proxy)
    torch.manual_seed(9)
    server.reconstruction(proxy)
    names = [name for name, _ in lenet.named_parameters()]
    return {
        **with_prefix("encoder", {name: w.to(torch.int8) for name, w in grid.items()}),
        **with_prefix("net", net.state_dict()),
        **with_prefix("gradient", dict(zip(names, gradients[0], strict=True))),
        **{"pictures": pictures, "features": z, "label": torch.tensor(proxy.new_set_label)},
        "found": torch.tensor(np.stack(proxy.new_set[0])).reshape(3, 32, 32),
    }


def glfc_average(clones: Clones) -> Tensors:
    average = clones.take(GLFC, "src/Fed_utils.py", "FedAvg").FedAvg
    states = [{"w": drawn(seed, 3, 2), "num_batches_tracked": torch.tensor(seed - 8)} for seed in (10, 11, 13)]
    stored = {f"{key}{i}": value.clone() for i, state in enumerate(states) for key, value in state.items()}
    return stored | {f"average.{key}": value for key, value in average(states).items()}


# --- TARGET, and the two baselines of its repository


def target_search(clones: Clones) -> Tensors:
    """Two rounds of a search, the second with the student: the images found, and what the generator learned."""
    names = (
        "fomaml_grad",
        "reptile_grad",
        "DeepInversionHook",
        "Generator",
        "kldiv",
        "GlobalSynthesizer",
        "Normalizer",
    )
    still = {"RandomCrop": lambda **_: lambda x: x, "RandomHorizontalFlip": lambda: lambda x: x}
    tools = {"augmentation": SimpleNamespace(**still), "transforms": SimpleNamespace(Compose=_after_each_other)}
    tools |= {"ImagePool": lambda root: SimpleNamespace(add=lambda images: found.append(images.clone()))}
    tools |= {"time": SimpleNamespace(time=lambda: 0.0)}
    got = clones.take(TARGET, "methods/target.py", "normalize", *names, **tools)
    teacher, student = small_net(3, 8, 20), small_net(3, 8, 30)
    stored = with_prefix("teacher", teacher.state_dict()) | with_prefix("student", student.state_dict())
    for meta, is_maml in (("fomaml", 1), ("reptile", 0)):
        found: list[torch.Tensor] = []
        torch.manual_seed(40)
        generator = got.Generator(nz=5, ngf=3, img_size=8, nc=3)
        stored |= with_prefix("before", generator.state_dict())
        search = got.GlobalSynthesizer(
            Answering(teacher),
            Answering(student),
            generator,
            **{"nz": 5, "num_classes": 3, "img_size": (3, 8, 8), "iterations": 3, "lr_g": 0.002, "lr_z": 0.01},
            **{"synthesis_batch_size": 4, "adv": 1.0, "bn": 10.0, "oh": 0.5, "warmup": 2, "bn_mmt": 0.9},
            **{"normalizer": got.Normalizer((0.5, 0.4, 0.3), (0.25, 0.2, 0.3)), "is_maml": is_maml},
        )
        for r in range(2):
            torch.manual_seed(50 + r)
            search.synthesize()
        for hook in search.hooks:
            hook.remove()
        stored |= {f"{meta}.images": torch.stack(found)} | with_prefix(f"{meta}.after", generator.state_dict())
    constants = clones.tree(TARGET, "methods/target.py")
    cifar = next(node for node in constants.body if isinstance(node, ast.If)).body
    values = {_name(node): node.value for node in cifar if isinstance(node, ast.Assign)}
    published = {name: ast.literal_eval(values[name]) for name in ("warmup", "syn_round")}
    return stored | {f"published.{name}": torch.tensor(value) for name, value in published.items()}


class Answering(nn.Module):
    """Networks of that repository answer with a dictionary."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.net(x)}


def _after_each_other(steps: list[Any]) -> Any:
    def run(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return run


def target_distillation(clones: Clones) -> Tensors:
    got = clones.take(TARGET, "methods/target.py", "_KD_loss", "kldiv")
    z, u = 3 * drawn(60, 6, 4), 3 * drawn(61, 6, 4)
    found = {"student": z, "teacher": u}
    for name, value in {
        "client": lambda x: got._KD_loss(x, u, 2),
        "server": lambda x: got.kldiv(x, u, T=20.0),
    }.items():
        x = z.clone().requires_grad_()
        loss = value(x)
        found |= {f"{name}.loss": loss.detach(), f"{name}.gradient": torch.autograd.grad(loss, x)[0]}
    return found


class Linear(nn.Linear):
    """One layer that answers as that repository's networks do."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": super().forward(x)}


def _linear(num_outputs: int, seed: int) -> Linear:
    made = Linear(4, num_outputs)
    made.load_state_dict({"weight": drawn(seed, num_outputs, 4), "bias": drawn(seed + 1, num_outputs)})
    return made


def lwf_step(clones: Clones) -> Tensors:
    """One step of a client in its second task: two old classes and two new ones."""
    got = clones.take(TARGET, "methods/lwf.py", "T", "lamda", "_KD_loss", "LwF", BaseLearner=object)
    model, old = _linear(4, 70), _linear(2, 72)
    x, labels = drawn(74, 6, 4), torch.tensor([2, 3, 3, 2, 2, 3])
    learner = SimpleNamespace(args={"local_ep": 1}, _known_classes=2, _old_network=old)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = got.LwF._local_finetune(learner, model, [(None, x, labels)])
    stored = with_prefix("before", before) | with_prefix("after", after) | with_prefix("old", old.state_dict())
    return stored | {"x": x, "labels": labels, "weight": torch.tensor(got.lamda), "temperature": torch.tensor(got.T)}


def ewc_step(clones: Clones) -> Tensors:
    """Fisher and penalty of a client after its first task, and one step in its second one."""
    got = clones.take(TARGET, "methods/ewc.py", "lamda", "fishermax", "EWC", BaseLearner=object)
    first, x, labels = _linear(2, 80), 0.03 * drawn(82, 12, 4), torch.arange(12) % 2
    batches = [(None, part, y) for part, y in zip(x.split(4), labels.split(4), strict=True)]
    learner = SimpleNamespace(args={"local_ep": 1}, _known_classes=2, _total_classes=4, mean_list={}, fisher_list={})
    learner.getFisherDiagonal = lambda *a: got.EWC.getFisherDiagonal(learner, *a)
    learner.compute_ewc = lambda idx: got.EWC.compute_ewc(learner, idx)
    learner.fisher_list[0] = learner.getFisherDiagonal(batches, first)
    learner.mean_list[0] = {name: value.detach().clone() for name, value in first.named_parameters()}
    stored = with_prefix("first", first.state_dict()) | with_prefix("fisher", learner.fisher_list[0])
    learner._network = _linear(4, 84)
    stored |= {"penalty": learner.compute_ewc(0).detach(), "x": x, "labels": labels}
    model = copy.deepcopy(learner._network)
    stored |= with_prefix("before", model.state_dict())
    after = got.EWC._local_finetune(learner, model, [(None, x, labels + 2)], 0)
    return stored | with_prefix("after", after) | {"limit": torch.tensor(got.fishermax)}


# --- closed forms


def _features(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.randint(3, (60,), generator=seeded(seed))
    return (2 * drawn(seed + 1, 3, 5)[y] + drawn(seed + 2, 60, 5)), y


def afl_aggregation(clones: Clones) -> Tensors:
    """Three sites solve, the server joins them and takes the sites' ridges out again."""
    matrices = SimpleNamespace(mat=np.asarray, eye=np.eye)  # numpy has no mat any more
    got = clones.take(AFL, "afl.py", "local_update", "aggregation", "clean_regularization", np=matrices)
    z, y = _features(90)
    args = SimpleNamespace(feat_size=5, num_classes=3, gpu="cpu", rg=1.0, num_clients=3)
    as_it_is = (lambda x: x), (lambda x: (x, None))
    sites = [got.local_update([(x, t)], *as_it_is, args) for x, t in zip(z.split(20), y.split(20), strict=True)]
    weight, _, total = got.aggregation(*map(list, zip(*sites, strict=True)), args)
    return {"z": z, "y": y, "joined": weight, "cleaned": got.clean_regularization(weight, total, args)}


def acil_recursion(clones: Clones) -> Tensors:
    """Two phases: first two classes, then all three, in batches."""
    from abc import ABCMeta, abstractmethod
    from typing import Optional, Union

    types = {"Optional": Optional, "Union": Union, "ABCMeta": ABCMeta, "abstractmethod": abstractmethod}
    head = clones.take(ACIL, "analytic/AnalyticLinear.py", "AnalyticLinear", "RecursiveLinear", **types)
    z, y = _features(93)
    order = torch.cat([torch.where(y < 2)[0], torch.where(y == 2)[0]])
    z, y = z[order], y[order]
    made = head.RecursiveLinear(5, gamma=0.5)
    for x, t in zip(z.split(15), y.split(15), strict=True):
        made.fit(x, F.one_hot(t, int(t.max()) + 1))
    return {"z": z, "y": y, "weight": made.weight, "inverse": made.R}


def fedcgs_head(clones: Clones) -> Tensors:
    z, y = _features(96)

    class Lens:
        def to(self, _: Any) -> Lens:
            return self

        def __call__(self, x: torch.Tensor, return_features: bool) -> tuple[None, torch.Tensor]:
            return None, x

    loaders = [[(x, t)] for x, t in zip(z.split(20), y.split(20), strict=True)]
    given = {"train_loader_list": loaders, "model": Lens(), "num_classes": 3, "num_d": 5, "device": "cpu"}
    found = clones.run_inside(CGS, "main_fedcgs.py", "cs_l = ", "A, B, Aj", given)
    heads: list[nn.Module] = []
    scored = clones.take(CGS, "utils_fl.py", "eval", test=lambda model, _: heads.append(model))
    inverse = torch.as_tensor(np.linalg.inv(found["S"].numpy()))
    scored.eval(SimpleNamespace(fc=nn.Linear(5, 3)), found["Aj"], inverse, found["N"], found["Nj"], None, "cpu")
    head = heads[0].fc
    return {"z": z, "y": y, "covariance": found["S"], "weight": head.weight.detach(), "bias": head.bias.detach()}


# --- condensation and herding


def matching(clones: Clones) -> Tensors:
    """One step's loss of distribution matching, and its gradient with respect to the surrogates."""
    net = clones.take(DM, "networks.py", "ConvNet").ConvNet(3, 2, 4, 2, "relu", "instancenorm", "avgpooling", (8, 8))
    state = {name: drawn(100 + i, *value.shape) for i, (name, value) in enumerate(net.state_dict().items())}
    net.load_state_dict(state)
    real, surrogates = drawn(120, 2, 6, 3, 8, 8), drawn(121, 6, 3, 8, 8).requires_grad_()
    given = {"num_classes": 2, "channel": 3, "im_size": (8, 8), "get_images": lambda c, n: real[c, :n]}
    given |= {"image_syn": surrogates, "embed": net.embed}
    given["args"] = SimpleNamespace(model="ConvNet", ipc=3, batch_real=6, dsa=False, device="cpu")
    loss = clones.run_inside(DM, "main_DM.py", "loss = torch.tensor(0.0)", "for c in range(num_classes)", given)["loss"]
    stored = {"real": real, "surrogates": surrogates.detach(), "loss": loss.detach()}
    gradient = torch.autograd.grad(loss, surrogates)[0]
    features = net.embed(surrogates).detach()
    return stored | with_prefix("net", state) | {"gradient": gradient, "features": features}


def icarl_herding(clones: Clones) -> Tensors:
    z = drawn(130, 20, 6)
    nothing = np.zeros((1, 20, 1))
    given = {"iteration": 0, "nb_cl": 1, "iter_dico": 0, "nb_protos_cl": 6, "prototypes": z.numpy()[None]}
    given |= {"function_map": lambda x: [x], "alpha_dr_herding": nothing}
    file = "iCaRL-TheanoLasagne/main_cifar_100_theano.py"
    found = clones.run_inside(ICARL, file, "mapped_prototypes = function_map", "while not", given)
    rank = torch.from_numpy(found["alpha_dr_herding"][0, :, 0]).long()
    return {"z": z, "rank": rank}


# --- PILoRA


class Toy(nn.Module):
    """An attention layer with the published pairs, features that depend on queries and values, and published distances."""

    def __init__(self, clones: Clones, width: int, rank: int, num_classes: int, num_old: int) -> None:
        super().__init__()
        got = clones.take(PILORA, "PILoRA-cifar/VLT.py", "_LoRA_qkv_timm", "VLT", Tensor=torch.Tensor)
        layers = [[nn.Linear(*size, bias=False) for _ in range(2)] for size in [(width, rank), (rank, width)] * 2]
        self.encoder = got._LoRA_qkv_timm(nn.Linear(width, 3 * width), *layers)
        self.encoder.change_lora(1)
        self.centers = nn.ParameterList([nn.Parameter(drawn(150 + c, width, 1)) for c in range(num_classes)])
        self.distances = got.VLT.compute_distance
        for seed, (name, value) in enumerate(self.encoder.named_parameters()):
            value.data = 0.5 * drawn(160 + seed, *value.shape)
            value.requires_grad_(not name.startswith("qkv"))
        for center in self.centers[:num_old]:
            center.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        queries, _, values = self.encoder(x).chunk(3, dim=-1)
        features = (queries.tanh() + values).mean(dim=1)
        distances, centers = self.distances(self, features)
        return None, features, distances, centers, None


def pilora_step(clones: Clones) -> Tensors:
    """One step of a site in its second task: two old classes and two new ones; gradients, weights, mean features."""
    published = clones.take(PILORA, "PILoRA-cifar/CPN.py", "pl_loss", "DCE")
    site = clones.take(PILORA, "PILoRA-cifar/update.py", "LocalUpdate", DCE=published.DCE).LocalUpdate
    model, x, labels = Toy(clones, 5, 2, 4, 2), drawn(140, 6, 3, 5), torch.tensor([2, 3, 3, 2, 2, 3])
    earlier = {"q": 0.5 * drawn(141, 2, 5), "v": 0.5 * drawn(142, 2, 5)}
    stored = with_prefix("before", model.state_dict()) | with_prefix("earlier", earlier) | {"x": x, "labels": labels}
    _, _, distances, _, _ = model(x)
    stored["distances"], stored["loss"] = distances.detach(), published.DCE(labels, distances)[1].detach()
    client = SimpleNamespace(args=SimpleNamespace(local_ep=1, device="cpu"), trainloader=[(x, labels)])
    after, means = site.update_weights(client, model, model, 0.002, 1e-5, 1, [earlier["q"]], [earlier["v"]])
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    found = {str(label): torch.from_numpy(mean) for label, mean in means.items() if len(mean)}
    return stored | with_prefix("after", after) | with_prefix("gradient", gradients) | with_prefix("mean", found)


def pilora_server(clones: Clones) -> Tensors:
    """The server's average of three sites over ten classes (no site has the last one), and its global model in two tasks."""
    file = "PILoRA-cifar/utils.py"
    names = ("get_trainable_param_names", "compute_weight", "average_weights", "global_server")
    got = clones.take(PILORA, file, *names, cdist=cdist, collections=collections)
    sites = [{f"centers.{c}": drawn(200 + 20 * k + c, 3, 1) for c in range(10)} for k in range(3)]
    for k, site in enumerate(sites):
        site["lora"] = drawn(190 + k, 2, 3)
    means, held = drawn(300, 3, 10, 3), torch.rand(3, 10, generator=seeded(301)) < 0.6
    held[:, 9] = False
    lists = [[means[k, c].numpy() if held[k, c] else [] for k in range(3)] for c in range(10)]
    model = {name: nn.Parameter(value.clone()) for name, value in sites[0].items()}
    average = got.average_weights(sites, Named(model), None, "Q", lists, [0.5, 0.3, 0.2])
    stored = {"means": means, "held": held.to(torch.int8)} | with_prefix("average", average)
    for k, site in enumerate(sites):
        stored |= with_prefix(f"site{k}", site)
    whole = Named({f"linear_{kind}_0": nn.Parameter(torch.zeros(8, 8)) for kind in KINDS})
    for task in (0, 1):
        learned = Named({f"linear_{kind}_{task}": nn.Parameter(drawn(310, *KINDS[kind])) for kind in KINDS})
        earlier = [[drawn(320 + i, *KINDS[kind])] for i, kind in enumerate(("a_q", "a_v", "b_q", "b_v"))]
        got.global_server(learned, whole, *earlier, task)
        stored |= with_prefix(f"global{task}", whole.held)
    return stored


KINDS = {"a_q": (4, 8), "a_v": (4, 8), "b_q": (8, 4), "b_v": (8, 4)}


class Named:
    """Parameters under names with dots, which a module would take apart."""

    def __init__(self, held: dict[str, nn.Parameter]) -> None:
        self.held = held

    def named_parameters(self) -> Any:
        return list(self.held.items())

    def state_dict(self) -> Any:
        return self.held


# --- FedWeIT: its code needs TensorFlow; here it runs with torch's operations of the same meaning under TensorFlow's names


class Ragged:
    """One array for each layer; layers have different sizes."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = [torch.as_tensor(layer) for layer in layers]

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self.layers[layer]

    def __add__(self, other: Ragged) -> Ragged:
        return Ragged([a + b for a, b in zip(self.layers, other.layers, strict=True)])

    def __radd__(self, number: float) -> Ragged:
        return Ragged([number + layer for layer in self.layers])


def _cross_entropy(y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return -(y * (p / p.sum(dim=-1, keepdim=True)).clamp(1e-7, 1 - 1e-7).log()).sum(dim=-1)


def tensorflow(training: bool) -> SimpleNamespace:
    """The few operations of TensorFlow that the published functions call."""
    backend = SimpleNamespace(
        learning_phase=lambda: training,
        sum=lambda x, axis: x.sum(dim=axis),
        flatten=torch.flatten,
        is_sparse=lambda x: False,
    )
    losses = SimpleNamespace(categorical_crossentropy=_cross_entropy)
    keras = SimpleNamespace(backend=backend, losses=losses, layers=SimpleNamespace(Dense=object))
    return SimpleNamespace(
        keras=keras,
        nn=SimpleNamespace(l2_loss=lambda x: x.square().sum() / 2),
        math=SimpleNamespace(multiply=lambda a, b: torch.as_tensor(a) * b),
        ragged=SimpleNamespace(constant=lambda value, dtype: [Ragged(one) for one in value]),
        reduce_sum=torch.sum,
        abs=torch.abs,
        multiply=torch.multiply,
        greater=torch.gt,
        sort=lambda x: x.sort().values,
        cast=lambda x, dtype: x.to(dtype),
        float32=torch.float32,
    )


class Variables:
    """The variables of a site with one layer in its second task, in TensorFlow's layout [inputs, outputs]."""

    def __init__(self, shared: torch.Tensor, adaptive: list[torch.Tensor], mask: list[torch.Tensor]) -> None:
        self.shapes = [tuple(shared.shape)]
        self.decomposed_variables = {"shared": [shared], "mask": dict(enumerate([value] for value in mask))}
        self._held = {"adaptive": adaptive, "mask": mask}

    def get_variable(self, var_type: str, lid: int, tid: int | None = None) -> torch.Tensor:
        return self.decomposed_variables["shared"][lid] if tid is None else self._held[var_type][tid]

    generate_mask = staticmethod(torch.sigmoid)


def fedweit_site(clones: Clones) -> Tensors:
    """A site in its second task: weights of a layer, outputs, loss and gradients, what it sends of B and of A."""
    stored = {
        "x": drawn(400, 6, 5), "shared": drawn(401, 5, 10), "old.adaptive": 0.1 * drawn(402, 5, 10), "adaptive": 0.002 * drawn(403, 5, 10),
        "old.mask": drawn(404, 10), "mask": drawn(405, 10).abs(), "received": drawn(406, 5, 10, 3), "attention": drawn(407, 3),
        "bias": drawn(408, 10), "head": drawn(409, 10, 4), "anchor": drawn(410, 5, 10),
    }  # fmt: skip
    labels, learned = torch.tensor([0, 1, 3, 2, 2, 1]), ("shared", "adaptive", "old.adaptive", "mask", "attention")
    leaf = {name: value.clone().requires_grad_(name in learned) for name, value in stored.items()}
    outputs = {}
    for training in (True, False):
        tf = tensorflow(training)
        given = {
            "tf": tf,
            "math_ops": SimpleNamespace(cast=lambda x, dtype: x),
            "K": tf.keras.backend,
            "gen_math_ops": SimpleNamespace(mat_mul=torch.matmul),
            "nn": SimpleNamespace(bias_add=torch.add),
        }
        layer = clones.take(FEDWEIT, "modules/layers.py", "DecomposedDense", **given).DecomposedDense
        one = layer.__new__(layer)
        values = {"sw": "shared", "aw": "adaptive", "aw_kb": "received", "atten": "attention", "bias": "bias"}
        vars(one).update({key: leaf[name] for key, name in values.items()}, mask=leaf["mask"].sigmoid())
        vars(one).update(lambda_l1=1e-3, lambda_mask=0, use_bias=True, activation=torch.relu, _compute_dtype=None)
        outputs[training] = one.call(leaf["x"])
        stored[f"theta.{'training' if training else 'answering'}"] = one.my_theta.detach()
    tf = tensorflow(True)
    given = {"tf": tf, "ClientModule": object, "math": math}
    site = clones.take(FEDWEIT, "models/fedweit/client.py", "Client", **given).Client
    module = clones.take(FEDWEIT, "modules/federated.py", "ClientModule", **given).ClientModule
    state = {"curr_task": 1, "prev_body_weights": [[leaf["anchor"]]]}
    args = SimpleNamespace(
        wd=1e-4, lambda_l1=1e-3, lambda_l2=100.0, lambda_mask=0, model="fedweit", sparse_comm=True, client_sparsity=0.3
    )
    nets = Variables(leaf["shared"], [leaf["old.adaptive"], leaf["adaptive"]], [leaf["old.mask"], leaf["mask"]])
    predicted = (outputs[True] @ leaf["head"]).softmax(dim=1)
    loss = site.loss(SimpleNamespace(nets=nets, args=args, state=state), nn.functional.one_hot(labels, 4), predicted)
    loss.mean().backward()
    gradients = {name: leaf[name].grad for name in learned}
    plain = Variables(
        stored["shared"], [stored["old.adaptive"], stored["adaptive"]], [stored["old.mask"], stored["mask"]]
    )
    told = SimpleNamespace(calculate_communication_costs=lambda params: None)
    sender = SimpleNamespace(nets=plain, args=args, state=state, train=told)
    (rows,), (kept,) = module.get_weights(sender)
    stored |= {"rows": torch.from_numpy(rows).float(), "kept": torch.tensor(kept)}
    stored["sent"] = torch.from_numpy(site.get_adaptives(sender)[0])
    return stored | with_prefix("gradient", gradients) | {"loss": loss.detach(), "labels": labels}


def fedweit_server(clones: Clones) -> Tensors:
    """The server's mean over three sites and two layers, with rows that nobody sent."""
    got = clones.take(FEDWEIT, "modules/train.py", "TrainModule", tf=tensorflow(False)).TrainModule
    server = SimpleNamespace(args=SimpleNamespace(sparse_comm=True, model="fedweit"))
    sites, stored = [], {}
    for k in range(3):
        kept = [(torch.rand(size, generator=seeded(430 + 10 * k + size)) < 0.6).float() for size in (4, 6)]
        kept[0][1] = 0  # nobody sends this one
        sent = [drawn(460 + 10 * k + size, 3, size) * which for size, which in zip((4, 6), kept, strict=True)]
        sites.append((([one.numpy() for one in sent], [one.tolist() for one in kept]), 7))
        for layer in (0, 1):
            stored |= {f"sent{k}.{layer}": sent[layer], f"kept{k}.{layer}": kept[layer]}
    return stored | {f"mean.{layer}": torch.as_tensor(one) for layer, one in enumerate(got.aggregate(server, sites))}


# --- FedCIL


class Cpu:
    """torch for code that names a GPU: every device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")


class ToyCritic(nn.Module):
    """The outputs of the published critic on a single layer: sigmoid of the score, softmax of the classes, their logits."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.body, self.fc, self.fc_aux = nn.Linear(9, 5), nn.Linear(5, 1), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, if_features: bool = False) -> Any:
        features = self.body(x.flatten(1)).tanh()
        logits = self.fc_aux(features)
        out = self.fc(features).sigmoid().squeeze(), logits.softmax(dim=1), logits
        return (*out, features) if if_features else out


class ToyGenerator(nn.Module):
    """Three places for the class and four of noise -> a picture of 3 x 3."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 9)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.fc(z).tanh().view(-1, 1, 3, 3)


def toy_gan(clones: Clones, seed: int, heard: list[Tensors] | None = None) -> Any:
    """The published GAN around the two toys; what it draws is appended to ``heard``."""
    space = {"gan": SimpleNamespace(Critic=ToyCritic, Generator=ToyGenerator), "torch": Cpu()}
    made = clones.take(FEDCIL, "FLAlgorithms/generator/model.py", "WGAN", **space).WGAN(7, 3, 1, 1, 1, "MNIST")
    made.num_classes = 3
    for place, value in enumerate(made.parameters()):
        value.data = 0.5 * drawn(seed + place, *value.shape)
    options = {"lr": 1e-4, "weight_decay": 1e-5, "betas": (0.5, 0.99)}  # main.py: the defaults
    made.set_critic_optimizer(optim.Adam(made.critic.parameters(), **options))
    made.set_generator_optimizer(optim.Adam(made.generator.parameters(), **options))
    draw = made.generate_noise_with_classes

    def listening(*args: Any, **named: Any) -> Any:
        noise, labels, fake = draw(*args, **named)
        if heard is not None:
            heard.append({"noise": noise.clone(), "labels": labels.clone()})
        return noise, labels, fake

    made.generate_noise_with_classes = listening
    return made


def fedcil_step(clones: Clones) -> Tensors:
    """One step of a site in the second round of its second task."""
    np.random.seed(0)
    heard: list[Tensors] = []
    site, server = toy_gan(clones, 400, heard), toy_gan(clones, 420)
    given = {"x": drawn(440, 6, 1, 3, 3), "x_": drawn(441, 6, 1, 3, 3)}
    given |= {"y": torch.tensor([1, 2, 2, 1, 2, 2]), "y_": torch.tensor([0, 1, 1, 0, 0, 1])}
    stored = given | with_prefix("before", site.state_dict()) | with_prefix("server", server.generator.state_dict())
    gradients: Tensors = {}

    def moving(*_: Any) -> None:  # later steps add to these gradients
        gradients.update(
            {name: value.grad.clone() for name, value in site.named_parameters() if value.grad is not None}
        )

    site.critic_optimizer.register_step_pre_hook(moving)
    told = site.train_a_batch_all(
        available_labels=[0, 1, 2], classes_so_far=[0, 1, 2], generator_server=server, glob_iter_=1, **given
    )
    stored |= {name: torch.tensor(told[name]) for name in ("c_loss", "g_loss", "kd_loss_d", "kd_loss_g")}
    gradients |= {name: value.grad for name, value in site.named_parameters() if name.startswith("generator")}
    stored |= with_prefix("gradient", gradients) | with_prefix("after", site.state_dict())
    return stored | {name: torch.stack([draws[name] for draws in heard]) for name in ("noise", "labels")}


def fedcil_consolidation(clones: Clones) -> Tensors:
    """Two steps of the server in the second task, on pictures of two sites."""
    np.random.seed(1)
    random.seed(1)
    heard: list[Tensors] = []
    space = {"Server": object, "random": random, "torch": Cpu()}
    published = clones.take(FEDCIL, "FLAlgorithms/servers/serverpFedCL.py", "FedCL", **space).FedCL
    server, batches = object.__new__(published), []
    server.generator, server.current_task = toy_gan(clones, 450, heard), 1
    server.selected_users = server.users = [
        SimpleNamespace(generator=toy_gan(clones, 470 + 40 * k), last_generator=toy_gan(clones, 490 + 40 * k),
                        current_labels=[k, 2], classes_past_task=[1 - k], gen_batch_size=6,
                        available_labels=[0, 1, 2], available_labels_current=[0, 1, 2])
        for k in range(2)
    ]  # fmt: skip

    def listening(*args: Any) -> Any:
        batches.append(published.get_balanced_samples(server, *args))
        return batches[-1]

    server.get_balanced_samples = listening
    stored = with_prefix("before", server.generator.state_dict())
    server.fine_tune_generator(SimpleNamespace(md_iter=2, gen_batch_size=6))
    stored |= {"x": torch.stack([x.detach() for x, _ in batches]), "y": torch.stack([y for _, y in batches])}
    stored |= {name: torch.stack([draws[name] for draws in heard]) for name in ("noise", "labels")}
    return stored | with_prefix("after", server.generator.state_dict())


# --- Fed-CPrompt


class Patches(nn.Module):
    """timm's layer of this name, as far as it is needed here."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


def prompted_model(clones: Clones, num_tasks: int) -> nn.Module:
    """Their network with their prompts in two blocks, two for each of two tasks; what it gives beside logits is cut to what
    their step takes (line 489 of vit_coda_p.py returns four values, line 196 of prompt.py takes three)."""
    given = {"partial": partial, "PatchEmbed": Patches, "trunc_normal_": nn.init.trunc_normal_}
    parts = clones.take(
        CPROMPT, "models/vision_transformer.py", "Mlp", "Attention", "Block", "VisionTransformer", **given
    )
    file, names = "models/vit_coda_p.py", ("DEBUG_METRICS", "CodaPrompt", "tensor_prompt", "ortho_penalty", "ResNetZoo")
    zoo = clones.take(CPROMPT, file, *names)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = {"embed_dim": 4, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
            self.feat = parts.VisionTransformer(8, 4, norm_layer=nn.LayerNorm, **size).requires_grad_(False)
            self.prompt, self.last = zoo.CodaPrompt(4, 2, [4, 4, 6, 0, 0], key_dim=4), nn.Linear(4, 4)
            self.task_id, self.prompt.task_count_f = None, num_tasks - 1

        def forward(self, x: torch.Tensor, train: bool) -> Any:
            return zoo.ResNetZoo.forward(self, x, train=train)[:3]

    return Whole()


def fedcprompt_step(clones: Clones) -> Tensors:
    """A site's step in its second task: features, contrastive loss, gradients, weights after Adam; and the loss of a first task."""
    names = ("TripletLoss", "positive_loss", "DualPrompt")
    got = clones.take(CPROMPT, "learners/prompt.py", *names, LWF=nn.Module)
    default = clones.take(CPROMPT, "learners/default.py", "NormalNN").NormalNN
    old, received, model = prompted_model(clones, 1), prompted_model(clones, 2), prompted_model(clones, 2)
    state = {name: 0.5 * drawn(400 + i, *value.shape) for i, (name, value) in enumerate(model.state_dict().items())}
    for net in (old, received, model):
        net.load_state_dict(state)
    new = dict(model.prompt.named_parameters())
    with torch.no_grad():
        for i, value in enumerate(new.values()):
            value[2:] += 0.02 * drawn(450 + i, *value[2:].shape)  # a step of the round has been made
    stored = with_prefix("received", state) | with_prefix("before", new)
    x, labels = drawn(460, 3, 3, 8, 8), torch.tensor([2, 3, 2])
    learner = SimpleNamespace(model=model, fedmoon=[3], triplet_loss=got.TripletLoss(margin=1), dw_k=torch.ones(5))
    learner.valid_out_dim, learner.last_valid_out_dim = 4, 2
    learner.criterion_fn = nn.CrossEntropyLoss(reduction="none")
    learner.criterion = lambda *given: default.criterion(learner, *given)
    learner.optimizer = torch.optim.Adam([*model.prompt.parameters(), *model.last.parameters()], lr=1e-4)
    with patch.object(torch.Tensor, "cuda", torch.Tensor.clone):  # as on a GPU: their step adds to what comes back
        for name, net in (("old", old), ("received", received), ("own", model)):
            stored[f"features.{name}"] = net(x, train=True)[2].detach()
        first = got.positive_loss()(stored["features.own"], stored["features.received"])
        loss, _, _, _, contrast = got.DualPrompt.update_model(learner, x, labels, None, received, old)
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    stored |= {"x": x, "labels": labels, "loss": loss, "contrast": contrast, "first": first}
    after = {name: value for name, value in model.state_dict().items() if not name.startswith("feat")}
    return stored | with_prefix("gradient", gradients) | with_prefix("after", after)


def fedcprompt_average(clones: Clones) -> Tensors:
    """The server's average over three sites."""
    average = clones.take(CPROMPT, "trainer.py", "federated_average").federated_average
    sites = [{"prompts": drawn(470 + k, 2, 3), "head": drawn(480 + k, 2)} for k in range(3)]
    stored = with_prefix("average", average(sites, [5, 1, 2]))
    for k, site in enumerate(sites):
        stored |= with_prefix(f"site{k}", site)
    return stored


NOTES: dict[str, dict[str, Any]] = {
    "glfc_losses": {
        "source": (GLFC, "src/GLFC.py:189-245", "_compute_loss, efficient_old_class_weight, entropy"),
        "difference": "If every old (or new) sample of a batch is fitted in float32, line 232 (236) divides 0 by 0 and the whole "
        "loss is NaN; our weights are 1 there. Line 23 adds 1e-5 inside the logarithm, so their entropy is too low by at "
        "most 1e-5 for each class.",
    },
    "glfc_herding": {
        "source": (GLFC, "src/GLFC.py:247-259", "_construct_exemplar_set"),
        "difference": "Line 255 does not leave out what was picked before, so one image may fill several places of the memory. "
        "Ours picks an image once (GLFC-5). Both agree up to the first repetition.",
    },
    "glfc_pictures": {
        "source": (
            GLFC,
            "src/GLFC.py:294-341, src/ProxyServer.py:67-132",
            "prototype_mask, gradient2label, reconstruction",
        ),
        "difference": "None up to rounding. Ours clamps the pictures to 0..1 before they are stored; line 128 of ProxyServer.py "
        "hands values outside of it to a conversion to bytes.",
    },
    "glfc_average": {
        "source": (GLFC, "src/Fed_utils.py:57-63", "FedAvg"),
        "difference": "Every site counts the same; ours does so with weighting=uniform (GLFC-7). Line 62 turns the integer "
        "counter of BatchNorm into a fraction; ours takes the maximum.",
    },
    "target_search": {
        "source": (TARGET, "methods/target.py:177-465", "GlobalSynthesizer.synthesize and what it calls"),
        "difference": "Without crops and mirrors, which draw from other streams, the rounds are the same. The published "
        "constants for CIFAR-100 make 10 rounds (line 40) after a warm-up of 20 (line 29): the student is never trained and the "
        "adversarial term never used. Ours has 100 rounds, as the paper we follow.",
    },
    "target_distillation": {
        "source": (TARGET, "methods/target.py:316-319, 764-767", "kldiv, _KD_loss"),
        "difference": "Clients: the same number. Server: theirs is the divergence, ours the cross-entropy, which is larger by T^2 "
        "times the teacher's entropy; the gradients are the same.",
    },
    "lwf_step": {
        "source": (TARGET, "methods/lwf.py:101-121, 283-286", "LwF._local_finetune, _KD_loss"),
        "difference": "None. The weight is 3 in the code; a comment beside it names 25.",
    },
    "ewc_step": {
        "source": (TARGET, "methods/ewc.py:99-193", "EWC._local_finetune, compute_ewc, getFisherDiagonal"),
        "difference": "compute_ewc (line 162) reads the server's network while the optimiser moves a copy of it, so the penalty "
        "has no gradient and the method is plain training on the new classes. Ours penalises the network that is trained. Their "
        "Fisher squares the gradient of a batch's mean (line 189); ours squares each image's, and fisher=batch_mean does theirs.",
    },
    "afl_aggregation": {
        "source": (AFL, "afl.py:20-93", "local_update, aggregation, clean_regularization"),
        "difference": "None up to rounding: sums in float32 there, in float64 here. Ours sends the sums and solves once.",
    },
    "acil_recursion": {
        "source": (ACIL, "analytic/AnalyticLinear.py:82-131", "RecursiveLinear.fit"),
        "difference": "None up to rounding. Ours does not depend on the order of the batches, and keeps S in the place of its inverse.",
    },
    "fedcgs_head": {
        "source": (CGS, "main_fedcgs.py:52-95, utils_fl.py:270-278", "the sums and the head"),
        "difference": "Ours leaves out what all classes share, m'T^-1 z, so scores differ by one number for each image and answers "
        "do not. Theirs inverts T as it is, which fails with fewer images than features; ours then takes the pseudo-inverse.",
    },
    "matching": {
        "source": (DM, "main_DM.py:150-163, networks.py:36-112", "the loss of a step, ConvNet.embed"),
        "difference": "Theirs matches features only and under a new random network each step. Eq. 1 of our paper adds the same "
        "term for logits and perturbs the global model instead.",
    },
    "icarl_herding": {
        "source": (ICARL, "iCaRL-TheanoLasagne/main_cifar_100_theano.py:225-242", "the herding loop"),
        "difference": "The largest inner product with unit features is the smallest distance, so the picks are the same. When an "
        "image wins again, line 242 counts it into the mean once more although it is kept once; ours never picks it again.",
    },
    "pilora_step": {
        "source": (
            PILORA,
            "PILoRA-cifar/update.py:37-100, VLT.py:16-57, 242-252, CPN.py:10-36",
            "LocalUpdate.update_weights, _LoRA_qkv_timm, compute_distance, DCE",
        ),
        "difference": "None for one step. Prototypes of classes that have not come yet are random there and count in the softmax; "
        "ours has only those of classes seen (PILORA-4).",
    },
    "pilora_server": {
        "source": (PILORA, "PILoRA-cifar/utils.py:126-224", "compute_weight, average_weights, global_server"),
        "difference": "Where no site has a class, line 144 gives each site the weight 0.1, a mean for ten sites only; ours is the "
        "mean. Where all prototypes of a class are as far away, line 141 divides 0 by 0; ours is the mean. From the second task "
        "on no name in line 213 fits the global model, so that its pairs stay those of the first task and only prototypes are "
        "learned; ours adds up the pairs of all tasks.",
    },
    "fedweit_site": {
        "source": (
            FEDWEIT,
            "models/fedweit/client.py:66-101, modules/layers.py:98-130, modules/federated.py:200-214",
            "Client.loss, Client.get_adaptives, DecomposedDense.call, ClientModule.get_weights",
        ),
        "difference": "TensorFlow was not there: torch's operations of the same meaning stood in for it. The published loss is a "
        "vector, and its gradient is that of the sum over the batch; ours is the mean, which Adam does not notice. The penalty has "
        "a gradient for A of earlier tasks, but the published optimiser does not move it (FEDWEIT-5). Line 210 ranks outputs by |v|, "
        "where a small mask has a large |v|, and its comparison drops one output more; ours ranks by m (FEDWEIT-4).",
    },
    "fedweit_server": {
        "source": (FEDWEIT, "modules/train.py:228-252", "TrainModule.aggregate"),
        "difference": "A row that nobody sent is 0 there and each site keeps its own; here the server's row stays (FEDWEIT-4).",
    },
    "fedcil_step": {
        "source": (
            FEDCIL,
            "FLAlgorithms/generator/model.py:179-299, 417-512",
            "WGAN.train_a_batch_all, _c_loss, _g_loss, generate_noise_with_classes",
        ),
        "difference": "Line 494 multiplies the three consistency terms by 0, so that they are computed and change nothing; ours "
        "has a weight for them. The class stands in the first numbers of the noise there, and after the noise here.",
    },
    "fedcil_consolidation": {
        "source": (
            FEDCIL,
            "FLAlgorithms/servers/serverpFedCL.py:322-394, FLAlgorithms/generator/model.py:103-150",
            "FedCL.fine_tune_generator, get_balanced_samples, WGAN.train_a_batch",
        ),
        "difference": "None for these steps. Adam goes on from round to round there, and starts anew here.",
    },
    "fedcprompt_step": {
        "source": (
            CPROMPT,
            "learners/prompt.py:27-46, 189-388, models/vit_coda_p.py:276-410, 473-490, models/vision_transformer.py:45-222",
            "DualPrompt.update_model, TripletLoss, positive_loss, CodaPrompt.forward, ResNetZoo.forward, VisionTransformer",
        ),
        "difference": "None for one step. As stored, that code does not run: its network returns four values and its step takes "
        "three; the fourth is left out here.",
    },
    "fedcprompt_average": {
        "source": (CPROMPT, "trainer.py:47-62", "federated_average"),
        "difference": "None. Theirs also averages what no site has changed.",
    },
}


def main(folder: Path) -> None:
    clones = Clones(folder)
    records = {}
    for name, note in NOTES.items():
        with on_the_cpu(), redirect_stdout(io.StringIO()):
            tensors = globals()[name](clones)
        save_file(
            {key: value.contiguous() for key, value in tensors.items()}, HERE / "fixtures" / f"{name}.safetensors"
        )
        repository, place, function = note["source"]
        commit, licence = SOURCES[repository]
        records[name] = {
            "repository": f"https://github.com/{repository}",
            **{"commit": commit, "licence": licence, "place": place, "function": function},
            **{"difference": note["difference"], "torch": torch.__version__},
        }
    text = json.dumps(records, indent=1)
    (HERE / "fixtures" / "oracles.json").write_text(text + "\n", encoding="utf-8")
    print(*sorted((HERE / "fixtures").iterdir()), sep="\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
