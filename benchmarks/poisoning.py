"""One site of ten attacks: what it achieves, what the screen catches, and how often the screen hits honest sites.

python benchmarks/poisoning.py --out results/trust/poisoning.jsonl [--jobs N] [--seeds 10,11,12]

The attacker is the site that holds most images. Seeds 1 and 2 were used to choose the screen's limit and are not measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cells import each, mean

Cell = dict[str, Any]
SEEDS = "10,11,12"


def cells(seed: int) -> Iterator[Cell]:
    for beta in (0.1, 0.5):
        for attack in ("none", "flip", "trigger"):
            for screen in ("none", "features"):
                yield {"seed": seed, "beta": beta, "attack": attack, "screen": screen}


def measure(cell: Cell) -> Cell:
    import torch
    from safetensors.torch import load_file

    from rescene.config import resolve
    from rescene.engine.experiment import prepare
    from rescene.engine.loop import run
    from rescene.engine.observers.hostile_sites import Adversary
    from rescene.engine.run_folder import RunFolder

    torch.set_num_threads(1)
    begin = time.perf_counter()
    settings = {
        "seed": cell["seed"],
        "device": "cpu",
        "federation.beta": cell["beta"],
        "federation.per_round": 10,
        "method.num_steps": 10,
        "federation.evaluate_every": 0,
        "federation.screen": cell["screen"],
    }
    honest = prepare(resolve("demo", settings).recipe)
    held = [sum(len(parts[k]) for parts in honest.shards) for k in range(10)]
    attacker = max(range(10), key=held.__getitem__)
    if cell["attack"] != "none":
        settings |= {"federation.faults.attack": cell["attack"], "federation.faults.attackers": [attacker]}
    with tempfile.TemporaryDirectory() as spare:
        folder = Path(spare) / "run"
        found = run(resolve("demo", settings), RunFolder(folder))
        net = honest.arch.restore(load_file(folder / "model" / "final.safetensors"))
    kinds = {kind: Adversary(kind, (attacker,), honest.dataset, honest.tasks) for kind in ("flip", "trigger")}
    return {
        "aa": found["aa"],
        "aia": found["aia"],
        "success": {kind: adversary.success(net, honest.tasks) for kind, adversary in kinds.items()},
        "attacker": attacker,
        "share_held": held[attacker] / sum(held),
        **screened(found, kinds.get(cell["attack"], kinds["flip"]), honest),
        "seconds": round(time.perf_counter() - begin),
    }


def screened(found: Any, adversary: Any, honest: Any) -> Cell:
    """Groups (one site, class, round) that were judged and that were quarantined: of honest sites, and poisoned ones."""
    if "screen" not in found:
        return {}
    (attacker,), rounds = adversary.clients, honest.recipe.federation.num_rounds
    poisoned = set()  # labels under which the attacker, if it attacks, sends what is something else
    for task in honest.tasks:
        true = honest.dataset.train.labels[honest.shards[task.index][attacker]]
        sent = adversary.wanted[true]
        poisoned |= {int(c) for c in sent[sent != true].unique() if int((sent == c).sum()) >= 2}  # fewer are not sent
    judged, rows = found["screen"]["judged"], found["screen"]["quarantined"]
    if "attack_success" not in found:
        return {"honest": sum(judged.values()), "honest_quarantined": len(rows)}
    own = [row for row in rows if row["client"] == attacker]
    return {
        "honest": sum(judged.values()) - judged.get(str(attacker), 0),
        "honest_quarantined": len(rows) - len(own),
        "poisoned": rounds * len(poisoned),
        "poisoned_quarantined": sum(row["label"] in poisoned for row in own),
    }


def row(lines: list[Cell]) -> Cell:
    """All seeds of one setting, for the docs."""
    first, kinds = lines[0], ("flip", "trigger")

    def share(name: str) -> str:
        known = [line for line in lines if name in line]
        return f"{sum(x[name + '_quarantined'] for x in known)} of {sum(x[name] for x in known)}" if known else "–"

    return {
        "beta": first["beta"],
        "attack": first["attack"],
        "screen": first["screen"],
        "seeds": len(lines),
        "AA": mean(lines, lambda line: line["aa"]),
        "AIA": mean(lines, lambda line: line["aia"]),
        "success, %": " / ".join(
            mean(lines, lambda line, kind=kind: line["success"][kind])
            for kind in (kinds if first["attack"] == "none" else [first["attack"]])
        ),
        "poisoned groups apart": share("poisoned"),
        "honest groups apart": share("honest"),
    }


if __name__ == "__main__":
    each(__doc__ or "", "poisoning.jsonl", SEEDS, cells, measure, row)
