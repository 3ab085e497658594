"""Whose memory grows in the processes of a federation: Flower's or ours.

    python benchmarks/whose_memory.py [--rounds 30] [--seed 0]     writes results/trust/whose-memory.json

The three sites on loopback of trust_soak.py, with a thread in link, executor, nodes and server app that looks every half minute.
After the fifth round it has Python note where memory is taken; what is still held later belongs to the package of the innermost
frame that is Flower's or ours. ``heap``: what the C library has given out, and what it keeps for later, whoever asked for it.
What the processes hold as a whole is trust_soak.py's to say: these notes are memory too.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

STAYING = ("flower-superlink", "flower-superexec", "flower-supernode", "flwr-serverapp")
BEGIN, EVERY_S, FRAMES = 5, 30.0, 25
OUT, STATUS = "RESCENE_WHOSE_MEMORY", "RESCENE_WHOSE_STATUS"  # words for the processes that are watched
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Heap(ctypes.Structure):
    """What glibc's mallinfo2 tells."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def watch() -> None:
    """In a process of the federation: begin to look, if it is one that stays."""
    names = [Path(word).name for word in sys.orig_argv]
    name = next((name for name in names if name in STAYING), None)
    if name:
        threading.Thread(target=look, args=(name,), daemon=True).start()


def look(name: str) -> None:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Heap
    while True:
        time.sleep(EVERY_S)
        try:
            done = json.loads(Path(os.environ[STATUS]).read_text())["done"]
        except (OSError, ValueError):
            continue
        if done <= BEGIN:
            continue
        if not tracemalloc.is_tracing():
            tracemalloc.start(FRAMES)
            continue
        heap = library.mallinfo2()
        row = {"process": f"{name} {os.getpid()}", "round": done - 1, **taken()}
        row |= {"heap_given": heap.uordblks + heap.hblkhd, "heap_kept": heap.fordblks}
        with open(os.environ[OUT], "a") as file:
            file.write(json.dumps(row) + "\n")


def taken() -> dict[str, Any]:
    """Bytes taken since tracing began and still held, by owner, and the lines that hold the most."""
    snapshot = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    )
    owners, lines = Counter[str](), Counter[str]()
    for trace in snapshot.traces:
        frames = [(frame.filename, frame.lineno) for frame in reversed(trace.traceback)]
        owner, place = next(((owner, at) for at in frames if (owner := owner_of(at[0]))), ("neither", frames[0]))
        owners[owner] += trace.size
        lines[f"{owner}: {'/'.join(Path(place[0]).parts[-3:])}:{place[1]}"] += trace.size
    return {"owners": dict(owners), "lines": dict(lines.most_common(12))}


def owner_of(file: str) -> str | None:
    """
    >>> owner_of("/x/site-packages/flwr/app/message.py"), owner_of("src/rescene/engine/loop.py"), owner_of("json.py")
    ('Flower', 'ours', None)
    """
    parts = Path(file).parts
    return "Flower" if "flwr" in parts else "ours" if "rescene" in parts else None


def growth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """MB a round of each owner and of the heap, by least squares; and the lines that held the most in the end."""
    import numpy as np

    rounds = [row["round"] for row in rows]
    series = {owner: [row["owners"].get(owner, 0) for row in rows] for owner in ("ours", "Flower", "neither")}
    series |= {key: [row[key] for row in rows] for key in ("heap_given", "heap_kept")}
    slopes = {key: float(np.polyfit(rounds, values, 1)[0]) / 2**20 for key, values in series.items()}
    ends = {key: [values[0] / 2**20, values[-1] / 2**20] for key, values in series.items()}
    return {"rounds": [rounds[0], rounds[-1]], "mb_per_round": slopes, "mb": ends, "lines": rows[-1]["lines"]}


def main() -> None:
    import argparse
    import tempfile

    from trust import RESULTS
    from trust_soak import FEW_CONVOLUTIONS, apart, as_processes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        root = Path(spare)
        (root / "sitecustomize.py").write_text("import whose_memory\nwhose_memory.watch()\n")
        path = os.pathsep.join([str(root), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        out, status = root / "rows.jsonl", root / "run" / "status.json"
        os.environ.update({OUT: str(out), STATUS: str(status), "PYTHONPATH": path, **FEW_CONVOLUTIONS})
        apart(as_processes, 3, asked.rounds, asked.seed, str(status.parent))
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {}
    for name in sorted({row["process"] for row in rows}):
        own = [row for row in rows if row["process"] == name]
        if len({row["round"] for row in own}) > 2:
            found[name] = growth(own)
            slopes = ", ".join(f"{key} {value:+.4f}" for key, value in found[name]["mb_per_round"].items())
            print(f"{name}: MB a round: {slopes}")
    (RESULTS / "whose-memory.json").write_text(json.dumps({"seed": asked.seed, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
