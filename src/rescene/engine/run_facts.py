"""What a run has found out so far, and how it is written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Facts:
    """In plain values; part of every checkpoint."""

    matrix: list[list[float]] = field(default_factory=list)
    incremental: list[float] = field(default_factory=list)
    within_task: list[float] = field(default_factory=list)
    confusion: list[list[int]] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    test_sizes: list[int] = field(default_factory=list)
    by_site: list[list[float]] = field(default_factory=list)  # after each task, on what each site has met (own orders)
    leakage: list[dict[str, Any]] = field(default_factory=list)
    theory: list[dict[str, Any]] = field(default_factory=list)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)  # where the run went on with other code or machine
    continued: list[dict[str, Any]] = field(default_factory=list)  # when tasks were added to a finished run
    filtered_by: list[str] = field(default_factory=list)  # observers of a user that decide what the server learns from
    faults: dict[str, float] = field(default_factory=dict)  # counts of what was simulated
    late_answers: dict[str, int] = field(default_factory=dict)  # counts, with federation.delay
    attack_success: float | None = None
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    judged: dict[str, int] = field(default_factory=dict)  # by client: groups of one class and round that were screened
    forgotten: list[dict[str, Any]] = field(default_factory=list)  # sites whose uploads were removed (withdrawal.py)
    closings: list[list[int]] = field(default_factory=list)  # label, round of the stream (stream.py)
    num_client_failures: int = 0
    num_fallbacks: int = 0
    num_withheld: int = 0
    num_declined: int = 0
    num_suppressed: int = 0


def notes_of(state: Any, uploads: Any) -> dict[str, float]:
    """Numbers worth logging: the server's own, and the mean of each of the clients'."""
    gathered: dict[str, list[float]] = {}
    for upload in uploads.values():
        for key, value in upload.get("notes", {}).items():
            gathered.setdefault(key, []).append(float(value))
    means = {key: sum(values) / len(values) for key, values in gathered.items()}
    return {key: value for key, value in (means | getattr(state, "notes", {})).items() if math.isfinite(value)}


def plain(value: Any) -> Any:
    """NaN as null, so that JSON stays JSON."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restored(facts: dict[str, Any]) -> Facts:
    """From a checkpoint, in which NaN is null."""

    def back(value: Any) -> Any:
        return [back(v) for v in value] if isinstance(value, list) else math.nan if value is None else value

    names = ("matrix", "incremental", "within_task", "recall", "by_site")
    return Facts(**facts | {name: back(facts.get(name, [])) for name in names})
