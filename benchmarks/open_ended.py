"""What it costs that nobody announces tasks: fashion-mini, five tasks of two classes, five rounds each, ten sites.

    python benchmarks/open_ended.py --out results/open-ended/cells.jsonl --jobs 16

Classes drift in over two rounds (and at once). ReSCENE closes a class that stayed away for W rounds; W = 99 never closes one.
`python benchmarks/open_ended.py --table` puts the table into results/open-ended/README.md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from cells import Cell, page

SETTING = {"federation.num_rounds": 5, "federation.evaluate_every": 0, "method.budget": 50, "device": "cpu"}
PATIENCES = (1, 2, 3, 99)


def cells(seeds: list[int]) -> list[Cell]:
    plans: list[Cell] = [{"method": "rescene", "drift": None, "close_after": None}]
    plans += [{"method": "rescene", "drift": 2, "close_after": w} for w in PATIENCES]
    plans += [{"method": "rescene", "drift": 0, "close_after": 3}]
    plans += [{"method": "fedavg", "drift": drift, "close_after": None} for drift in (None, 2)]
    return [plan | {"seed": seed} for seed in seeds for plan in plans]


def work(cell: Cell) -> dict[str, Any]:
    import rescene

    own = {"method": cell["method"], "tasks.drift": cell["drift"], "seed": cell["seed"]}
    ours = {"method.close_after": cell["close_after"]} if cell["method"] == "rescene" else {}
    setting = SETTING if cell["method"] == "rescene" else {k: v for k, v in SETTING.items() if k != "method.budget"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        values = rescene.run("demo", out=out, **setting | own | ours).values
        rounds = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    sizes = [row["notes"].get("pool_size", 0) for row in rounds if row["kind"] == "round"]
    keys = ("aa", "aia", "forgetting", "accuracy_matrix", "stream")
    return {key: values.get(key) for key in keys} | {"most_images": max(sizes), "setting": SETTING, "recipe": "demo"}


def table(path: Path) -> str:
    """Mean and deviation over seeds, as Markdown."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        groups[row["method"], row["drift"], row["close_after"]].append(row)

    def spread(rows: list[dict[str, Any]], key: str) -> str:
        values = [row[key] for row in rows]
        return (
            f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
            if len(values) > 1
            else f"{values[0]:.1f}"
        )

    lines = ["| method | boundaries | W | n | AA | AIA | closings | closed while arriving | most images |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    order = sorted(groups, key=lambda key: (key[0] != "rescene", -1 if key[1] is None else key[1], key[2] or 0))
    for (method, drift, patience), rows in ((key, groups[key]) for key in order):
        told = "announced" if drift is None else f"drift {drift}"
        streams = [row["stream"]["classes"] for row in rows if row["stream"] and method == "rescene"]
        count = sum(len(one["closed"]) for classes in streams for one in classes) / max(len(streams), 1)
        early = sum(n <= one["leaves"] for classes in streams for one in classes for n in one["closed"])
        early_text, count_text = (f"{early / len(streams):.1f}", f"{count:.1f}") if streams else ("", "")
        patience_text = "" if method != "rescene" or drift is None else "never" if patience == 99 else str(patience)
        cells = [
            method,
            told,
            patience_text,
            str(len(rows)),
            spread(rows, "aa"),
            spread(rows, "aia"),
            count_text,
            early_text,
        ]
        most = statistics.fmean(row["most_images"] for row in rows)
        lines.append(f"| {' | '.join(cells)} | {most:.0f} |" if method == "rescene" else f"| {' | '.join(cells)} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    page(__doc__ or "", "0,1,2", "open-ended", cells, work, table)
