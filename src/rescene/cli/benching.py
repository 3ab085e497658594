"""``rescene bench``: a table while it goes, JSON at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rescene.bench import Figure, measure, report
from rescene.cli.listing import print_rows
from rescene.engine import pick_device, use_all_cores


def run_bench(device_name: str, out: Path | None, as_json: bool) -> None:
    use_all_cores()
    device = pick_device(device_name)
    figures: list[Figure] = []
    for figure in measure(device):
        figures.append(figure)
        print(f"{figure.name}: {_value(figure)}", file=sys.stderr)
    found = report(device, figures)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(found))
        return
    print(f"{found['device']}, torch {found['torch']}, {found['threads']} threads")
    on_h200 = "H200" in found["device"]
    print_rows(
        [
            {
                "figure": f.name,
                "value": _value(f),
                **({"goal on an H200": f.goal} if on_h200 else {}),
                "of matrix rate": "" if f.share is None else f"{f.share:.0%}",
            }
            for f in figures
        ]
    )


def _value(figure: Figure) -> str:
    number = f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.3g}"
    return f"{number} {figure.unit}".strip()
