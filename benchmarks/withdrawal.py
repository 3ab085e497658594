"""What `rescene forget` leaves behind: a site's share of accuracy before, after, and in the run that never saw it.

    python benchmarks/withdrawal.py --out results/withdrawal/cells.jsonl --jobs 16

The demo (fashion-mini, five tasks of two classes, ten sites); of each seed the site whose uploads the server holds most of.
`python benchmarks/withdrawal.py --table` puts the table into results/withdrawal/README.md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from cells import Cell, page


def work(cell: Cell) -> dict[str, Any]:
    import rescene
    from rescene.config import resolve
    from rescene.engine import RunFolder, prepare
    from rescene.engine.withdrawal import accuracy_on, forget
    from rescene.nets import load_weights

    setting = {"federation.evaluate_every": 0, "device": "cpu", "seed": cell["seed"]}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        before = rescene.run("demo", out=root / "run", **setting)
        saved = RunFolder(root / "run").checkpoints.load()
        assert saved is not None
        senders = Counter(int(k) for part in saved.tree["state"].buffers for k in part.clients)
        client = senders.most_common(1)[0][0]
        resolved = resolve(root / "run" / "config.yaml")
        record = forget(RunFolder(root / "run"), resolved, client, RunFolder(root / "new"))
        after = rescene.load(root / "new")
        never = rescene.run("demo", out=root / "never", **setting | {"federation.exclude": [client]})
        experiment = prepare(resolved.recipe)
        model = load_weights(root / "never" / "model" / "final.safetensors")
        own = accuracy_on(experiment, model, client, experiment.tasks)
    return {
        "client": client,
        "removed": record["num_images"],
        "left": record["num_images_left"],
        "aa": {"before": before.aa, "after": after.aa, "never": never.aa},
        "own_images": {"before": record["own_images_before"], "after": record["own_images_after"], "never": own},
        "setting": setting,
        "recipe": "demo",
    }


def table(path: Path) -> str:
    """Mean and deviation over seeds, as Markdown."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = ["| accuracy on | before | after | never saw the site |", "|---|--:|--:|--:|"]
    for key, words in (("aa", "all test images (AA)"), ("own_images", "the site's own training images")):
        columns = [[row[key][stage] for row in rows] for stage in ("before", "after", "never")]
        shown = [f"{statistics.fmean(column):.1f} ± {statistics.stdev(column):.1f}" for column in columns]
        lines.append(f"| {words} | {' | '.join(shown)} |")
    share = statistics.fmean(row["removed"] / (row["removed"] + row["left"]) for row in rows)
    return "\n".join(
        [*lines, "", f"n = {len(rows)} seeds; removed {100 * share:.0f} % of the server's images on average"]
    )


if __name__ == "__main__":
    page(__doc__ or "", "0,1,2,3", "withdrawal", lambda seeds: [{"seed": seed} for seed in seeds], work, table)
