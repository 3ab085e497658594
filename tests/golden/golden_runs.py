"""The golden runs: small runs of everything, described by recipe keys alone, and what is stored of each.

Nothing here imports a part of the package: only ``rescene.run``, recipe keys and the files of a run folder are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import rescene

HERE = Path(__file__).parent
RECIPE = Path("base.yaml")
CLASSES, DOMAINS, SIDE = ("red", "green", "blue", "grey"), ("day", "dusk"), 16


@dataclass(frozen=True)
class GoldenRun:
    """One run. ``noisy``: its noise comes from the operating system, so only what does not depend on it is stored."""

    name: str
    overrides: dict[str, Any]
    noisy: bool = False
    needs: str | None = None  # a run whose model this one starts from

    @property
    def slow(self) -> bool:
        return self.name in SLOW


@dataclass
class _Register:
    runs: list[GoldenRun] = field(default_factory=list)

    def add(self, name: str, method: str, noisy: bool = False, needs: str | None = None, **keys: Any):
        """``keys``: dotted recipe keys with a double underscore in the place of the dot."""
        overrides = {"method": method} | {key.replace("__", "."): value for key, value in keys.items()}
        self.runs.append(GoldenRun(name, overrides, noisy, needs))


def _all_runs() -> list[GoldenRun]:
    add = (register := _Register()).add
    _methods(add)
    _options_of_methods(add)
    _condensation(add)
    _mechanisms(add)
    _federation(add)
    _tasks_and_networks(add)
    return register.runs


def _methods(add) -> None:
    """Every method as the base recipe has it."""
    plain = (
        "rescene",
        "rescene-plus",
        "fedavg",
        "fedewc",
        "fedlwf",
        "target",
        "glfc",
        "fedcbdr",
        "refed",
        "feddm",
        "fedaf",
        "fedprox",
        "scaffold",
        "fot",
        "fedssi",
        "fedweit",
        "joint",
        "icarl",
        "cfed",
        "mfcl",
        "fedcil",
    )
    for method in (*plain, "local", "raw-upload"):
        add(method, method)
    for method in ("afl", "fedcgs", "moments"):
        add(method, method, **LINEAR)
    add("pilora", "pilora", **TRANSFORMER)
    add("fedcprompt", "fedcprompt", **TRANSFORMER)


PLUS = (
    "rescene-plus"  # runs that were made when its settings were the defaults of `rescene`: their bits are of that day
)
OLD_SETTINGS = {"method__server_augment": True, "method__surrogates_per_class": "half"}  # the same for other methods
LINEAR = {"model__name": "linear", "model__lens": "waves", "model__width": None, "train__augment": False}
MLP = {"model__name": "mlp", "model__lens": "waves", "train__augment": False}
TRANSFORMER = {"model__name": "vit-mini", "model__width": 8}
GROUP = {"model__norm": "group"}


def _options_of_methods(add) -> None:
    add("fedavg-uniform", "fedavg", method__weighting="uniform", method__local_ce="new")
    add("fedewc-batch", "fedewc", method__anchor="last_round", method__fisher="batch_mean", method__fisher_decay=0.5)
    add("fedlwf-all", "fedlwf", method__kd_t2=True, method__local_ce="all")
    add("scaffold-keep", "scaffold", method__new_task="keep", method__momentum_steps="plain", method__server_lr=0.5,
        method__weighting="size")  # fmt: skip
    add("fot-free", "fot", method__others="free", method__sketch_columns=8, method__local_ce="all")
    add("fedssi-end", "fedssi", method__psm_start="task_end", method__locality=0.2, method__psm_epochs=2,
        method__local_ce="new")  # fmt: skip
    add("target-reptile", "target", method__meta_update="reptile", method__images_per_client=4)
    add("glfc-entropy", "glfc", method__trigger="entropy", method__entropy_threshold=0.01, method__reduction="sum",
        method__prototype_classes="previous", method__perturbation_input="normalised")  # fmt: skip
    add("fedcbdr-global", "fedcbdr", method__budget_scope="global", method__form="svd", method__reweight=True)
    add("cfed-batch", "cfed", method__statistics="batch", method__weighting="size", method__server_distillation=False)
    add("icarl-softmax", "icarl", method__objective="softmax", method__classifier="head")
    add("pilora-new", "pilora", **TRANSFORMER, method__trains_with="new", method__weighting="uniform")
    add("fedweit-fixed", "fedweit", method__old_adaptive="fixed", method__local_ce="all", method__weighting="uniform",
        method__mask_weight=0.01, method__dropped_outputs=0.5)  # fmt: skip
    add("fedcil-teacher", "fedcil", method__consistency="teacher", method__weighting="uniform", method__new_weight=0.3)
    add("fedcprompt-late", "fedcprompt", **TRANSFORMER, federation__delay=1, method__weighting="uniform")
    add("refed-last-layer", "refed", method__importance="last-layer", method__locality=0.2)
    add(
        "fedaf-ball",
        "fedaf",
        **OLD_SETTINGS,
        method__perturbation="ball",
        method__draw="step",
        method__soft_labels="condensed",
    )
    for method in ("feddm", "fedaf", "raw-upload"):
        add(f"{method}-plus", method, **OLD_SETTINGS)  # compared with rescene-plus
    add("rescene-domains", "rescene", data__path="domains", tasks__scenario="domain", tasks__per_task=None)
    add("rescene-paper-experiment", "rescene", privacy__mechanism="paper-experiment", privacy__noise_multiplier=1.0,
        privacy__noise="seeded")  # fmt: skip
    add("local-site", "local", method__site=1)
    add("moments-few-features", "moments", **LINEAR, method__num_features=64, method__ridge=0.01)


def _condensation(add) -> None:
    """ReSCENE's own choices: how pixels move, what is kept, how the server learns."""
    add("rescene-fixed", PLUS, method__step="fixed", method__reduction="mean", method__match_logits=False,
        method__real_batch="all", method__surrogates_per_class="min")  # fmt: skip
    add("rescene-noise-start", PLUS, method__start="noise", method__step="fixed", method__image_momentum=0.5,
        method__clip=None, method__real_batch="ipc", method__surrogates_per_class="fixed")  # fmt: skip
    add("rescene-leaves-start", PLUS, method__start="leaves")
    add("rescene-match", PLUS, method__match=["features", "logits", "stages", "pixels", "covariance"])
    add("rescene-random-nets", PLUS, method__match=["features", "logits"], method__random_nets=2,
        method__own_net=False)  # fmt: skip
    add("rescene-neighbours", PLUS, method__match=["features"], method__neighbours=2)
    add("rescene-literal", PLUS, method__literal=True)
    for buffer in ("temporal", "full-pool", "earliest", "latest", "random", "keep-all", "none"):
        add(f"buffer-{buffer}", PLUS, method__buffer=buffer, method__recent_fraction=0.4, method__budget=3)
    add(
        "rescene-forgetful",
        PLUS,
        method__accumulate=False,
        method__tau=0.0,
        method__alpha=0.2,
        method__guard=False,
    )
    add("rescene-coloured", PLUS, **MLP, method__start="coloured", method__num_steps=0)


def _mechanisms(add) -> None:
    seeded = {"privacy__noise": "seeded"}
    release = {"privacy__mechanism": "release", "privacy__noise_multiplier": 0.5, "privacy__threshold": 0.5,
               "privacy__num_nets": 2, "privacy__clip": 1.0}  # fmt: skip
    noise_start = {"method__start": "noise"}
    add("release", PLUS, **release, **seeded, **noise_start)
    add("release-sums", PLUS, **release, **seeded, **noise_start, privacy__send="sums")
    add(
        "release-centre",
        PLUS,
        **release,
        **seeded,
        **noise_start,
        privacy__send="sums",
        privacy__centre="released",
    )
    add("release-feddm", "feddm", **OLD_SETTINGS, **release, **seeded, **noise_start)
    coloured = {
        "method__start": "coloured",
        "method__num_steps": 0,
        "privacy__mean_grid": 4,
        "privacy__covariance_grid": 2,
    }
    add("release-coloured", PLUS, **release, **seeded, **coloured)
    add("release-pooled", PLUS, **release, **seeded, **coloured, **MLP, privacy__send="sums", privacy__pool=True,
        privacy__covariance_colour=True)  # fmt: skip
    for method in ("afl", "fedcgs", "moments"):
        add(f"release-{method}", method, **release, **seeded, **LINEAR)
    add("release-epsilon", "moments", **LINEAR, **seeded, privacy__mechanism="release", privacy__epsilon=8.0,
        privacy__clip=1.0, privacy__covariance_weight=2.0)  # fmt: skip
    for method in ("afl", "fedcgs", "moments"):
        add(
            f"secure-sum-{method}",
            method,
            **release,
            **seeded,
            **LINEAR,
            privacy__honest_sites=2,
            method__num_features=64,
        )
    each = {"privacy__mechanism": "per-example", "privacy__noise_multiplier": 0.5, "privacy__sampling_rate": 0.5,
            "privacy__typical_count": 10.0}  # fmt: skip
    add("per-example", PLUS, **each, **seeded, **noise_start, **GROUP)
    add("per-example-feddm", "feddm", **OLD_SETTINGS, **each, **seeded, **noise_start)
    paper = {"privacy__mechanism": "paper-experiment", "privacy__noise_multiplier": 1.0}
    add("paper-experiment", PLUS, **paper, **seeded)
    add("paper-experiment-fedavg", "fedavg", **paper, **seeded, **GROUP)
    sgd = {"privacy__mechanism": "dp-sgd", "privacy__noise_multiplier": 0.5, "privacy__sampling_rate": 0.5,
           "privacy__typical_count": 10.0, "privacy__clip": 1.0}  # fmt: skip
    for method in ("fedavg", "fedlwf", "fedcbdr", "refed", "icarl", "fedprox", "scaffold"):
        add(f"dp-sgd-{method}", method, **sgd, **seeded, **GROUP)
    add("dp-sgd-capped", "fedavg", **sgd, **seeded, **MLP, privacy__max_participations=1)
    add("os-release", "moments", **release, **LINEAR, noisy=True)
    add("os-dp-sgd", "fedavg", **sgd, **GROUP, noisy=True)


def _federation(add) -> None:
    add("wire-float16", PLUS, federation__wire="float16")
    add("wire-uint8", PLUS, federation__wire="uint8")
    add("one-by-one", PLUS, federation__engine="one-by-one")
    add("one-by-one-fedavg", "fedavg", federation__engine="one-by-one")
    add("debug-engine", "fedewc", federation__engine="debug")
    faults = {"federation__num_clients": 4, "federation__per_round": 4, "federation__quorum": 0.25}
    add("faults", PLUS, **faults, federation__faults__dropout=0.3, federation__faults__slow=[1],
        federation__faults__deadline=3.0)  # fmt: skip
    add("faults-fedavg", "fedavg", **faults, federation__faults__dropout=0.3)
    attack = {"federation__faults__attack": "flip", "federation__faults__attackers": [0]}
    add("screen", PLUS, **attack, federation__num_clients=6, federation__per_round=6, federation__partition="iid",
        federation__screen="features", method__start="coloured", method__num_steps=0, **MLP)  # fmt: skip
    add("trigger", "fedavg", **faults, federation__faults__attack="trigger", federation__faults__attackers=[2])
    add("exclude", PLUS, federation__exclude=[1])
    for partition in ("dirichlet", "iid", "lazy-dirichlet"):
        add(f"partition-{partition}", "fedavg", federation__partition=partition)
    add("evaluated-at-the-end", "fedavg", federation__evaluate_every=0)


def _tasks_and_networks(add) -> None:
    drift = {"tasks__drift": 1, "federation__num_rounds": 3}
    add("drift", PLUS, **drift)
    add("drift-closing", PLUS, **drift, method__close_after=1)
    add("drift-fedavg", "fedavg", **drift)
    add("drift-moments", "moments", **drift, **LINEAR)
    domain = {"data__path": "domains", "tasks__scenario": "domain", "tasks__per_task": None}
    for method in ("fedavg", "glfc", "target", "fedcbdr", "fot"):
        add(f"domain-{method}", method, **domain)
    add("domain-rescene", PLUS, **domain)
    add("domain-moments", "moments", **domain, **LINEAR)
    add("tasks-seeded", "fedavg", tasks__order="seeded")
    add("tasks-sizes", "fedavg", tasks__per_task=None, tasks__sizes=[1, 3])
    add("tasks-plan", "fedavg", tasks__per_task=None, tasks__plan=[["blue", "red"], ["grey", "green"]])
    add("group-norm", PLUS, **GROUP)
    add("plain-pictures", PLUS, train__augment=False, train__soften=0.1)
    add("mlp", "fedavg", model__name="mlp")
    add("linear", "fedavg", model__name="linear", model__width=None)
    add("lens-mlp", "fedavg", **MLP)
    add("small-pictures", "fedavg", data__image_size=8)
    add("from-a-model", "fedavg", needs="fedavg", model__init="runs/fedavg/model/final.safetensors", seed=1)
    add("lens-leaves", "moments", **LINEAR | {"model__lens": "leaves"})


SLOW = {  # left out of `make test`: variants whose base is in it
    "lens-leaves", "buffer-full-pool", "buffer-earliest", "buffer-latest", "buffer-keep-all", "buffer-none",
    "dp-sgd-fedlwf", "dp-sgd-fedcbdr", "dp-sgd-refed", "dp-sgd-icarl", "os-dp-sgd", "paper-experiment-fedavg", "domain-glfc",
    "domain-target", "domain-fedcbdr", "release-feddm", "release-centre", "per-example-feddm", "rescene-literal",
    "rescene-noise-start", "rescene-leaves-start", "rescene-neighbours", "rescene-random-nets", "drift-closing",
    "plain-pictures", "wire-float16", "one-by-one", "group-norm", "glfc-entropy", "target-reptile", "fedaf-ball",
    "fedewc-batch", "fedcbdr-global", "partition-dirichlet", "partition-iid", "faults-fedavg", "drift-fedavg",
    "paper-experiment", "release-coloured", "rescene-fixed", "exclude", "secure-sum-afl", "secure-sum-fedcgs",
    "release-afl", "release-fedcgs", "rescene-forgetful", "fedavg-uniform",
    "fedlwf-all", "refed-last-layer", "tasks-sizes", "tasks-plan", "small-pictures", "debug-engine", "trigger",
    "dp-sgd-fedprox", "dp-sgd-scaffold", "scaffold-keep", "fot-free", "domain-fot", "fedssi-end",
    "feddm-plus", "raw-upload-plus", "moments-few-features", "buffer-random", "release-pooled", "release-epsilon", "dp-sgd-capped",
    "one-by-one-fedavg", "evaluated-at-the-end", "domain-fedavg", "domain-rescene", "tasks-seeded", "lens-mlp",
    "cfed-batch", "pilora-new", "fedweit-fixed", "fedcil-teacher", "fedcprompt-late", "icarl-softmax",
    "local-site", "rescene-match", "fedaf-plus", "rescene-paper-experiment",
}  # fmt: skip
RUNS = {run.name: run for run in _all_runs()}


def prepare(root: Path) -> None:
    """The recipe, and the pictures: ``images.npz`` (four classes) and ``domains/`` (two domains of two classes).

    The same bytes on every machine. Run folders then hold no path of a machine: all names are relative to ``root``.
    """
    shutil.copy(HERE / RECIPE, root)
    numbers = {"train": 30, "test": 12}
    arrays: dict[str, Any] = {"classes": np.array(CLASSES)}
    for split, number in numbers.items():
        arrays[f"x_{split}"] = np.stack([_picture(c, k, split) for c in range(4) for k in range(number)])
        arrays[f"y_{split}"] = np.repeat(np.arange(4), number)
    np.savez(root / "images.npz", **arrays)
    for domain, shade in zip(DOMAINS, (0, 70), strict=True):
        for split, number in {"train": 16, "test": 8}.items():
            for c in range(2):
                folder = root / "domains" / domain / split / CLASSES[c]
                folder.mkdir(parents=True)
                for k in range(number):
                    Image.fromarray(
                        255 - np.minimum(255, _picture(c, k, domain + split) + shade).astype(np.uint8)
                    ).save(folder / f"{k:02d}.png")


def _picture(label: int, number: int, split: str) -> np.ndarray:
    """Noise from a hash, with more of one colour and a bar whose place depends on the class: it can be learned, not at once."""
    size = SIDE * SIDE * 3
    noise = np.frombuffer(hashlib.shake_256(f"{split} {label} {number}".encode()).digest(size), np.uint8)
    pixels = noise.reshape(SIDE, SIDE, 3).astype(np.int64) // 2
    bar = 3 * label + number % 3
    pixels[bar : bar + 4] += 40
    if label < 3:
        pixels[:, :, label] += 25
    return pixels.astype(np.uint8)


def play(run: GoldenRun, root: Path, called: str = "", **more: Any) -> Path:
    """Run it in ``root``, where the pictures lie; its folder, ``called`` otherwise if it was named before the run got its name.
    A finished one is kept, an interrupted one goes on."""
    folder = root / "runs" / (called or run.name)
    if run.needs:
        play(RUNS[run.needs], root)
    with _inside(root):
        rescene.run(RECIPE, out=Path("runs") / folder.name, **more, **run.overrides)
    return folder


class _inside:
    """The folder of the pictures as the working folder, because recipes name them without a path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> None:
        self.before = Path.cwd()
        os.chdir(self.root)

    def __exit__(self, *error: object) -> None:
        os.chdir(self.before)


def machine() -> dict[str, Any]:
    """What the bits of a run depend on besides the program."""
    return {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.machine()
    told = dict([part.strip() for part in line.split(":", 1)] for line in first.splitlines() if ":" in line)
    keys = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")  # of x86, then of ARM
    return " ".join([platform.machine(), *(told[key] for key in keys if key in told)])


def summary(folder: Path, noisy: bool = False) -> dict[str, Any]:
    """What is stored of a run: hashes for a machine, numbers for a person."""
    results = json.loads((folder / "results.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    model = tensors(folder / "model" / "final.safetensors")
    sent = folder / "surrogates.safetensors"
    told = {
        "method": results["method"],
        "tasks": [
            [task["classes"], task["domain"], task["train_size"], task["test_size"]] for task in results["tasks"]
        ],
        "cost": results["cost"],
        "privacy": {key: value for key, value in results["privacy"].items() if isinstance(value, bool | int | float)},
        "rounds": [{key: line.get(key) for key in ROUND} for line in lines if line["kind"] == "round"],
        "charges": [charge for path in sorted(folder.glob("ledgers/*.jsonl")) for charge in _charges(path)],
        "shapes": {name: shape for name, (shape, _) in model.items()},
    }
    if noisy:  # drawn batches decide the work, and noise decides the length of packed numbers
        for key in ("client_flops", "server_state_bytes"):
            told["cost"]["measured"].pop(key, None)
        return told
    return told | {
        "model": whole(model),
        "tensors": {name: digest[:12] for name, (_, digest) in model.items()},
        "uploads": whole(tensors(sent)) if sent.exists() else None,
        "partition": whole(tensors(folder / "partition.safetensors")),
        "accuracy_matrix": results["accuracy_matrix"],
        "scores": {key: results.get(key) for key in SCORES},
        "confusion": results["confusion"],
        "learning": [line.get("accuracy") for line in lines],
        "notes": [line["notes"] for line in lines if line["kind"] == "round"],
        "events": results["events_summary"],
        "special": {key: results.get(key) for key in SPECIAL},
        "leakage": _numbers(results["leakage"]),
        "theory": _numbers(results.get("theory")),
    }


ROUND = ("task", "round", "participants", "uplink_bytes", "downlink_bytes")
SPECIAL = ("faults", "screen", "attack_success", "within_task", "worst_task")
SCORES = ("aa", "aia", "forgetting", "bwt", "old", "recent", "balanced_accuracy", "incremental_accuracy")


def _charges(ledger: Path) -> list[Any]:
    """What a site's ledger was charged: its site, then place, mechanism, noise and number of steps."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    keys = ("task", "round", "mechanism", "sigma", "steps", "rate", "delta")
    return [[ledger.stem, *(line["charge"][key] for key in keys)] for line in lines if "charge" in line]


def _numbers(value: Any) -> Any:
    """The tree without its texts: words may be rewritten, numbers may not change."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items() if not isinstance(inner, str)}
    return [_numbers(inner) for inner in value if not isinstance(inner, str)] if isinstance(value, list) else value


def tensors(path: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and SHA-256 of each tensor of a safetensors file, by name; read without the library: its bytes are the format."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    return {name: (told["shape"], _digest(told, body)) for name, told in sorted(header.items())}


def _digest(told: dict[str, Any], body: bytes) -> str:
    begin, end = told["data_offsets"]
    return hashlib.sha256(f"{told['dtype']} {told['shape']} ".encode() + body[begin:end]).hexdigest()


def whole(found: dict[str, tuple[list[int], str]]) -> str:
    """One hash over all tensors, by name: the order in the file does not matter."""
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, (_, digest) in found.items()).encode()).hexdigest()
