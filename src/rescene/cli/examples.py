"""Examples for the help of the main verbs. A test parses every one of them."""

from __future__ import annotations

import typer

EXAMPLES = {
    "demo": ["rescene demo", "rescene demo seed=1 --out runs/second"],
    "run": [
        "rescene run own data.path=./images --out runs/mine",
        "rescene run cifar10 method=fedavg federation.beta=0.1 --dry-run",
        "rescene run my-recipe.yaml seed=3 --json",
    ],
    "sweep": [
        "rescene sweep demo method=all --plan",
        "rescene sweep lens method=fedavg,rescene,afl,fedcgs,moments",
        "rescene sweep demo method=rescene,fedavg federation.beta=0.1,0.5 --seeds 0,1,2",
    ],
    "resume": ["rescene resume runs/demo/rescene"],
    "rerun": ["rescene rerun runs/demo/rescene"],
    "forget": [
        "rescene forget runs/demo/rescene --client 3 --check",
        "rescene forget clinic/server/runs/plan --client south",
    ],
    "report": ["rescene report runs/demo --open"],
    "table": ["rescene table runs/demo --metric aa,aia,forgetting --out table.tex"],
    "plot": ["rescene plot runs/demo --kind curves --out curves.pdf"],
    "export": ["rescene export runs/mine", "rescene export runs/mine --to onnx --out model/"],
    "predict": [
        "rescene predict runs/mine photo.jpg",
        "rescene predict model/model.safetensors ./photos --gallery answers.html --format csv",
    ],
    "runs": ["rescene runs", "rescene runs runs/demo --json", "rescene runs --prune checkpoints"],
    "quarantine": ["rescene quarantine runs/mine", "rescene quarantine runs/mine --admit task0-round1-site3-class1"],
    "cost": ["rescene cost cifar10 method=refed --uplink-mbps 5"],
    "privacy": ["rescene privacy cifar10 --epsilon 8"],
    "show": ["rescene show cifar10 method=fedavg", "rescene show runs/demo/rescene"],
    "explain": ["rescene explain glfc"],
    "doctor": ["rescene doctor", "rescene doctor --json"],
}


def add_examples(app: typer.Typer) -> None:
    """Below the options of each verb that has some; ``\\b`` keeps the lines as they are."""
    for command in app.registered_commands:
        lines = EXAMPLES.get(command.name or getattr(command.callback, "__name__", ""))
        if lines:
            command.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
