"""Hostile uploads to every question of the ten methods, and exchanges in any order: nothing is taken, nothing changes.

    python benchmarks/trust_hostile.py [--full] [--seed 0] [--jobs 1]

Short: 2,000 hostile uploads, 50 sequences of events. Full: 100,000 and 1,000. Each method runs with the same seeds in a process
of its own, undisturbed and with hostile answers in the name of every site before each honest one. Memory is what the process
takes at most between the first hostile answer of an exchange and the last, above what it had before (Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trust import tell

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deploy"))

LIMIT_MB = 64
SHORT = ["federation.num_rounds=1", "model.width=4"]


def flood(job: tuple[str, int, int]) -> dict[str, Any]:
    """One method, undisturbed and flooded."""
    import torch
    from hostile import Canary, FloodedPost
    from local_sites import TINY, LocalPost, across, hashes, sites

    from rescene.config import resolve
    from rescene.deploy.exchange import HELLO, Patience
    from rescene.deploy.message_bytes import unpack_message

    class Watched(FloodedPost):
        """Looks at the memory of the process while hostile answers come."""

        growth, before = 0.0, 0.0

        def pull(self, ids):  # type: ignore[no-untyped-def]
            found = super().pull(ids)  # the honest answers are made here, at the first pull of an exchange
            if self.before:
                self.growth = max(self.growth, _memory_mb("VmHWM") - self.before)
            if any(self.left.values()) and not self.before:
                with contextlib.suppress(
                    OSError
                ):  # not everywhere allowed; the figure is then too large, never too small
                    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
                self.before = _memory_mb("VmRSS")
            elif not any(self.left.values()):
                self.before = 0.0
            return found

    torch.set_num_threads(1)
    method, wanted, seed = job
    resolved = resolve("smoke", [*TINY, *SHORT, f"method={method}"])
    with tempfile.TemporaryDirectory() as spare:
        root = Path(spare)
        Canary.path = root / "pickle was here"
        quiet = LocalPost(sites(root / "a"))
        across(resolved, root / "quiet", quiet)
        num_answers = sum(unpack_message(letter.head).tree.verb != HELLO for letter in quiet.letters)
        per_answer = math.ceil(wanted / num_answers)
        post, crash = Watched(sites(root / "b"), per_answer, seed), None
        try:
            across(resolved, root / "loud", post, Patience(0, 1e9, 0, attempts=per_answer + 2))
        except Exception as error:
            crash = f"{type(error).__name__}: {error}"
        return {
            "method": method,
            "delivered": post.delivered,
            "accepted": post.delivered - post.asked_again,
            "crash": crash,
            "same": crash is None and hashes(root / "loud") == hashes(root / "quiet"),
            "unpickled": Canary.path.exists(),
            "questions": sorted(post.asked - {HELLO}),
            "kinds": post.kinds,
            "growth_mb": round(post.growth, 1),
        }


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def sequences(count: int) -> str | None:
    """Any order of events ends like the undisturbed exchange; what went wrong, if anything did."""
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from test_any_order import exchange_in_any_order

    try:
        settings(max_examples=count, deadline=None, derandomize=True)(given(st.data())(exchange_in_any_order))()
    except AssertionError as error:
        return f"{error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile uploads, and exchanges in any order.")
    parser.add_argument("--full", action="store_true", help="the long form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time")
    asked = parser.parse_args()
    from rescene.methods.registry import ORDER

    total = 100_000 if asked.full else 2_000
    jobs = [(method, math.ceil(total / len(ORDER)), asked.seed) for method in ORDER]
    found = []
    with multiprocessing.get_context("spawn").Pool(asked.jobs, maxtasksperchild=1) as pool:
        for row in pool.imap(flood, jobs):
            print(row["method"], row["delivered"], f"{row['growth_mb']} MB", file=sys.stderr, flush=True)
            found.append(row)
    kinds: Counter[str] = sum((Counter(row["kinds"]) for row in found), Counter())
    delivered, accepted = (sum(row[key] for row in found) for key in ("delivered", "accepted"))
    crashes = [row["crash"] for row in found if row["crash"]]
    num_questions = sum(len(row["questions"]) for row in found)
    figure = (
        f"{delivered:,} of {len(kinds)} kinds to {num_questions} questions, {accepted} accepted, {len(crashes)} crashes"
    )
    held = not accepted and not crashes and delivered >= total and not any(row["unpickled"] for row in found)
    tell("hostile uploads are refused", figure, held, rows=found)
    different = [row["method"] for row in found if not row["same"]]
    figure = f"{len(found)} methods, {len(different)} with other bits"
    tell("with hostile uploads in every exchange the honest round is the same", figure, not different)
    most = max(row["growth_mb"] for row in found)
    tell("hostile uploads take no memory", f"at most {most:.0f} MB", most < LIMIT_MB)
    count = 1_000 if asked.full else 50
    if find_spec("hypothesis") is None:
        return
    wrong = sequences(count)
    tell(
        "uploads delivered, lost, doubled, mixed up, servers killed: the same exchange",
        f"{count} sequences, {'one differs' if wrong else '0 differ'}",
        wrong is None,
        wrong=wrong,
    )


if __name__ == "__main__":
    main()
