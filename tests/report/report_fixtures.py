"""Run folders as the engine writes them: made up, but every summary number is computed from the accuracy matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
NUM_TASKS, NUM_CLIENTS, NUM_ROUNDS, PER_ROUND = 5, 10, 3, 5
# method: (accuracy when learned, points lost per later task, within-task accuracy, bytes per upload)
CHARACTER = {
    "rescene": (94.0, 4.0, 97.0, 61_440),
    "fedavg": (98.0, 100.0, 88.0, 268_000),
    "refed": (92.0, 12.0, 93.0, 268_000),
}


def accuracy_matrix(method: str, seed: int) -> np.ndarray:
    """[stage, task] in percent, NaN above the diagonal."""
    start, loss, _, _ = CHARACTER.get(method, (80.0, 10.0, 90.0, 100_000))
    wobble = np.random.default_rng([seed, len(method)]).normal(0, 1.5, (NUM_TASKS, NUM_TASKS))
    age = np.arange(NUM_TASKS)[:, None] - np.arange(NUM_TASKS)[None, :]
    learned = start - 2.0 * np.arange(NUM_TASKS)[None, :]
    return np.where(age < 0, np.nan, np.clip(learned - loss * age + wobble * (age < 2), 0, 100)).round(2)


def confusion_matrix(final: np.ndarray) -> np.ndarray:
    """Counts whose diagonal gives back the final accuracies; errors go to the newest class."""
    counts = np.diag(np.repeat(final, 2) * 2).round().astype(int)
    counts[:, -1] += 200 - counts.sum(axis=1)
    return counts


def results(method: str, seed: int, classes: tuple[str, ...] = CLASSES) -> dict[str, Any]:
    matrix = accuracy_matrix(method, seed)
    final, half = matrix[-1], NUM_TASKS // 2
    incremental = [float(np.nanmean(row)) for row in matrix]
    lost = [float(np.nanmax(matrix[:, t]) - final[t]) for t in range(NUM_TASKS - 1)]
    _, _, within, message = CHARACTER.get(method, (80.0, 10.0, 90.0, 100_000))
    surrogate = method == "rescene"
    turns = NUM_TASKS * NUM_ROUNDS * PER_ROUND
    return {
        "schema": 1,
        "method": method,
        "seed": seed,
        "aa": float(final.mean()),
        "aia": float(np.mean(incremental)),
        "forgetting": float(np.mean(lost)),
        "bwt": float(np.mean([final[t] - matrix[t, t] for t in range(NUM_TASKS - 1)])),
        "old": float(final[:half].mean()),
        "recent": float(final[half:].mean()),
        "worst_task": float(final.min()),
        "balanced_accuracy": float(final.mean()),
        "within_task": [max(within, float(value)) for value in final],
        "incremental_accuracy": incremental,
        "accuracy_matrix": [[None if np.isnan(value) else float(value) for value in row] for row in matrix],
        "confusion": confusion_matrix(final).tolist(),
        "tasks": [
            {
                "index": t,
                "classes": list(classes[2 * t : 2 * t + 2]),
                "domain": None,
                "train_size": 1200,
                "test_size": 400,
            }
            for t in range(NUM_TASKS)
        ],
        "cost": cost(message, turns, surrogate),
        "leakage": leakage() if surrogate else None,
        "privacy": {"private": False, "statement": f"No guarantee: {method} adds no noise to what the sites send."},
        "events_summary": {"warnings": 3, "client_failures": 1},
        "config": config(method, seed),
    }


def cost(message: int, turns: int, surrogate: bool) -> dict[str, Any]:
    measured = {
        "uplink_bytes": message * turns,
        "downlink_bytes": 268_000 * turns,
        "uplink_bytes_per_message": float(message),
        "downlink_bytes_per_message": 268_000.0,
        "client_state_bytes": 0 if surrogate else 268_000,
        "server_state_bytes": 4_100_000 if surrogate else 268_000,
        "client_flops": 3.1e11 if surrogate else 2.2e12,
        "server_flops": 5.4e12 if surrogate else 0,
    }
    kept = (
        "uplink_bytes_per_message",
        "downlink_bytes_per_message",
        "client_state_bytes",
        "client_flops",
        "server_flops",
    )
    return {"measured": measured, "nominal": {key: measured[key] * 1.25 for key in kept} if surrogate else None}


def leakage() -> dict[str, Any]:
    numbers = {
        "num_images": 1234,
        "nearest_rms_mean": 0.014,
        "nearest_rms_median": 0.012,
        "nearest_rms_min": 0.001,
        "nearest_psnr_median_db": 38.0,
        "near_copies": 0.97,
        "exact_copies": 0,
    }
    statement = "Surrogates start from real images and hardly move: nearly every upload shows a training image."
    return {
        **numbers,
        "per_task": [{"task": t, **numbers, "near_copies": 0.99 - 0.01 * t} for t in range(NUM_TASKS)],
        "statement": statement,
    }


def config(method: str, seed: int) -> dict[str, Any]:
    return {
        "data": {"name": "fashion-mini"},
        "tasks": {"num_tasks": NUM_TASKS},
        "federation": {
            "num_clients": NUM_CLIENTS,
            "clients_per_round": PER_ROUND,
            "num_rounds": NUM_ROUNDS,
            "beta": 0.5,
        },
        "model": {"name": "convnet"},
        "method": {"name": method},
        "train": {"lr": 0.05},
        "privacy": None,
        "seed": seed,
        "device": "cpu",
    }


def metrics(method: str, seed: int) -> list[dict[str, Any]]:
    matrix, rng = accuracy_matrix(method, seed), np.random.default_rng(seed)
    message = CHARACTER.get(method, (80.0, 10.0, 90.0, 100_000))[3]
    lines: list[dict[str, Any]] = []
    for t in range(NUM_TASKS):
        end = float(np.nanmean(matrix[t]))
        for r in range(NUM_ROUNDS):
            lines.append(
                {
                    "kind": "round",
                    "task": t,
                    "round": r,
                    "participants": sorted(rng.choice(NUM_CLIENTS, PER_ROUND, replace=False).tolist()),
                    "accuracy": None if r == 1 and t == 3 else end * (0.7 + 0.15 * r),
                    "uplink_bytes": message * PER_ROUND,
                    "downlink_bytes": 268_000 * PER_ROUND,
                    "notes": {"server_loss": 0.4 / (r + 1)}
                    | ({"matching_loss": (t + 1) / (r + 1 + seed)} if method == "rescene" else {}),
                }
            )
        lines.append({"kind": "task", "task": t, "accuracy": [float(value) for value in matrix[t, : t + 1]], "aa": end})
    return lines


def partition(classes: tuple[str, ...] = CLASSES) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    shares = [rng.dirichlet([0.5] * NUM_CLIENTS, 2) for _ in range(NUM_TASKS)]
    tasks = [
        {"task": t, "classes": [2 * t, 2 * t + 1], "counts": np.floor(600 * shares[t]).astype(int).T.tolist()}
        for t in range(NUM_TASKS)
    ]
    return {"num_clients": NUM_CLIENTS, "classes": list(classes), "tasks": tasks}


def write_surrogates(folder: Path, classes: tuple[str, ...] = CLASSES, per_class: int = 3) -> None:
    """Soft blobs as images and slightly disturbed copies of them as surrogates."""
    rng, size = np.random.default_rng(3), 28
    y, x = np.mgrid[0:size, 0:size] / size
    real, entries = [], []
    for c, name in enumerate(classes):
        for i in range(per_class):
            blob = np.exp(-(((x - 0.3 - 0.04 * c) ** 2) + ((y - 0.5) ** 2) * (1 + i)) * 14)
            real.append(np.repeat((255 * blob).astype(np.uint8)[None], 3, axis=0))
            psnr = 38.1 - 5 * i
            entries.append(
                {"task": c // 2, "round": i, "label": c, "class": name, "rms": float(10 ** (-psnr / 20)), "psnr": psnr}
            )
    nearest = np.stack(real)
    noise = np.array([entry["rms"] for entry in entries])[:, None, None, None] * rng.normal(0, 255, nearest.shape)
    save_file(
        {"surrogates": np.clip(nearest + noise, 0, 255).astype(np.uint8), "nearest": nearest},
        folder / "surrogates.safetensors",
    )
    (folder / "surrogates.json").write_text(json.dumps(entries))


def write_means(folder: Path, classes: tuple[str, ...] = CLASSES) -> None:
    """Beside the pairs, the means of the classes: grey uploads, of which the real ones are half as bright."""
    tensors = load_file(folder / "surrogates.safetensors")
    sent = np.stack([np.full((3, 28, 28), 20 * (c + 1), np.uint8) for c in range(len(classes))])
    save_file({**tensors, "surrogate_means": sent, "real_means": sent // 2}, folder / "surrogates.safetensors")
    rows = [
        {"task": c // 2, "class": name, "num_uploads": 10 + c, "num_real": 600, "rms": 0.1 + 0.01 * c}
        for c, name in enumerate(classes)
    ]
    pairs = json.loads((folder / "surrogates.json").read_text())
    (folder / "surrogates.json").write_text(json.dumps({"schema": 1, "pairs": pairs, "means": rows}))


def write_run(
    folder: Path, method: str = "rescene", seed: int = 0, classes: tuple[str, ...] = CLASSES, **changes: Any
) -> Path:
    """A finished run folder; ``changes`` replace keys of results.json."""
    folder.mkdir(parents=True)
    done = {**results(method, seed, classes), **changes}
    status = {
        "state": "done",
        "task": NUM_TASKS - 1,
        "round": NUM_ROUNDS - 1,
        "num_tasks": NUM_TASKS,
        "num_rounds": NUM_ROUNDS,
    }
    phases = {"client": 20.1, "server": 30.0, "evaluate": 2.0, "checkpoint": 0.5, "leakage": 1.0, "other": 0.3}
    env = {
        "python": "3.11.9",
        "torch": "2.13.0",
        "platform": "Linux",
        "device": "cpu",
        "threads": 2,
        "commit": "0123abc",
        "data_fingerprint": "9f3c",
    }
    events = [
        {
            "task": 0,
            "round": 1,
            "level": "warning",
            "code": "W121",
            "message": "2 sites hold no image of class 'Bag'",
            "client": None,
        },
        {
            "task": 1,
            "round": 1,
            "level": "warning",
            "code": "W121",
            "message": "2 sites hold no image of class 'Bag'",
            "client": None,
        },
        {"task": 3, "round": 2, "level": "error", "code": "E331", "message": "site 3 did not answer", "client": 3},
        {"task": 0, "round": 0, "level": "info", "code": "I100", "message": "checkpoint written", "client": None},
    ]
    objects = {
        "results": done,
        "status": {**status, "phase": "server"},
        "timing": {"total_s": 53.9, "phases": phases},
        "env": env,
    }
    for name, value in {**objects, "partition": partition(classes), "origin": {"schema": 2}}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(method, seed)))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (folder / "command.txt").write_text(f"rescene run demo --method {method} --seed {seed}\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(done["config"]))
    if method == "rescene":
        write_surrogates(folder, classes)
    return folder


def write_running(folder: Path, method: str = "rescene", num_lines: int = 7) -> Path:
    """A run in its second task: no results yet, the last metrics line half written."""
    write_run(folder, method)
    for name in ("results.json", "timing.json", "surrogates.json", "surrogates.safetensors"):
        (folder / name).unlink(missing_ok=True)
    status = {
        "state": "running",
        "task": 1,
        "round": 2,
        "num_tasks": NUM_TASKS,
        "num_rounds": NUM_ROUNDS,
        "phase": "server",
    }
    (folder / "status.json").write_text(json.dumps(status))
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:num_lines]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "round", "ta')
    return folder
