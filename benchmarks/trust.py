"""What this program promises about crashes, disks and the rest, checked and told in one table: promise, figure, result.

    python benchmarks/trust.py           the short forms (minutes; `make trust`)
    python benchmarks/trust.py --full    the long ones, for a night; writes results/trust/full.json

A check is a script beside this one whose name begins with ``trust_``. It takes ``--full`` and ``--seed`` and calls ``tell``
once for each promise. To add a row, add such a script or a call.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "trust"
BEGIN = time.monotonic()


def parser(about: str) -> argparse.ArgumentParser:
    """What every check understands."""
    common = argparse.ArgumentParser(description=about)
    common.add_argument("--full", action="store_true", help="the long form")
    common.add_argument("--seed", type=int, default=0)
    return common


def options(about: str) -> argparse.Namespace:
    return parser(about).parse_args()


def tell(promise: str, figure: str, held: bool, **more: Any) -> None:
    """One row of the table, as a line of JSON."""
    print(json.dumps({"promise": promise, "figure": figure, "held": held, **more}), flush=True)


def main() -> int:
    asked = options("Every promise, checked.")
    words = ["--seed", str(asked.seed), *(["--full"] if asked.full else [])]
    rows: list[dict[str, Any]] = []
    for script in sorted(HERE.glob("trust_*.py")):
        begin = time.monotonic()
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run([sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not found:
            found.append(
                {"promise": script.stem, "figure": f"the check itself ended with {done.returncode}", "held": False}
            )
        rows += [{"check": script.stem, **row} for row in found]
        print(f"{script.name}: {len(found)} rows, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    RESULTS.mkdir(parents=True, exist_ok=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = {"seconds": round(time.monotonic() - BEGIN), "cpu_seconds": round(used.ru_utime + used.ru_stime)}
    report = {"seed": asked.seed, **times, "rows": rows}
    (RESULTS / f"{'full' if asked.full else 'short'}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows))
    return sum(not row["held"] for row in rows)


def table(rows: list[dict[str, Any]]) -> str:
    """
    >>> print(table([{"promise": "a promise", "figure": "3 of 3", "held": True}]))
    promise    figure  result
    a promise  3 of 3  held
    """
    cells = [("promise", "figure", "result")]
    cells += [(row["promise"], row["figure"], "held" if row["held"] else "BROKEN") for row in rows]
    wide, middle = (max(len(row[column]) for row in cells) for column in (0, 1))
    return "\n".join(f"{a:<{wide}}  {b:<{middle}}  {c}" for a, b, c in cells)


if __name__ == "__main__":
    sys.exit(main())
