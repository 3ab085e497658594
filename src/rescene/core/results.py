"""The files of a run folder as typed records: results.json, timing.json, env.json, metrics.jsonl and their neighbours.

A run writes results.json from a ``Results`` (``written``), and ``read_results`` makes one from the file. Accuracies are in percent,
sizes in bytes, times in seconds, ``near_copies`` is a share from 0 to 1. None says that a figure was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rescene.core.errors import DECLINED, DataError, command
from rescene.core.json_files import (
    LEFT_OUT,
    NULL,
    Row,
    as_json,
    beside,
    json_lines,
    noted,
    record_file,
    record_of,
    records_of,
)
from rescene.core.run_state import read_object
from rescene.core.versions import RESULTS, as_it_was, refuse_newer

Numbers = tuple[float | None, ...]
DIGITS = 10  # decimals of a number in results.json


@dataclass(frozen=True)
class TaskFacts:
    """One task: its classes, its domain where tasks are domains, and its images.

    A task of a plan for several sites also has its rounds, and whether it was closed before its last one.
    """

    index: int | None = None
    classes: tuple[str, ...] = ()
    domain: str = field(default="", metadata=NULL)
    train_size: int | None = None
    test_size: int | None = None
    rounds: int | None = field(default=None, metadata=LEFT_OUT)
    closed: bool | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class CostFigures:
    """What was sent, kept and computed. ``per_message``: per site and round; the other figures are of the whole run."""

    uplink_bytes: float | None = field(default=None, metadata=LEFT_OUT)
    downlink_bytes: float | None = field(default=None, metadata=LEFT_OUT)
    uplink_bytes_per_message: float | None = None
    downlink_bytes_per_message: float | None = None
    client_state_bytes: float | None = None
    server_state_bytes: float | None = field(default=None, metadata=LEFT_OUT)
    client_flops: float | None = None
    server_flops: float | None = None

    def uplink_bytes_per_turn(self, rounds: Sequence[RoundRecord]) -> float | None:
        """Mean bytes that a site sends for each of the ``rounds`` in which it is asked for something.

        All bytes count, so it differs from the mean message of a round where a method sends something at the end of a task.
        Of a run that is not finished, the bytes of its rounds so far count.

        >>> CostFigures(uplink_bytes=600.0).uplink_bytes_per_turn([RoundRecord(0, 0, (1, 2)), RoundRecord(0, 1, (0, 2))])
        150.0
        """
        turns, total = sum(row.num_asked for row in rounds), self.uplink_bytes
        if total is None and rounds:
            total = sum(row.uplink_bytes or 0.0 for row in rounds)
        return total / turns if total is not None and turns else self.uplink_bytes_per_message


@dataclass(frozen=True)
class Cost:
    """Figures as counted, and as the paper's formulas give them."""

    measured: CostFigures = CostFigures()
    nominal: CostFigures = field(default=CostFigures(), metadata=NULL)


@dataclass(frozen=True)
class Leakage:
    """Uploaded images against real ones, of the whole run or (in ``per_task``) of one task.

    ``start_...`` and ``unmoved`` are against the images that condensation began with, ``traced...`` and ``nearest_seen...`` of the
    ``num_traced`` images that were looked at with care.
    """

    num_images: int | None = None
    nearest_rms_mean: float | None = None
    nearest_rms_median: float | None = None
    nearest_rms_min: float | None = None
    nearest_psnr_median_db: float | None = None
    near_copies: float | None = None
    exact_copies: int | None = None
    start_rms_mean: float | None = field(default=None, metadata=LEFT_OUT)
    start_rms_median: float | None = field(default=None, metadata=LEFT_OUT)
    start_rms_min: float | None = field(default=None, metadata=LEFT_OUT)
    start_psnr_median_db: float | None = field(default=None, metadata=LEFT_OUT)
    unmoved: int | None = field(default=None, metadata=LEFT_OUT)
    num_traced: int | None = field(default=None, metadata=LEFT_OUT)
    traced: float | None = field(default=None, metadata=LEFT_OUT)
    traced_by_chance: float | None = field(default=None, metadata=LEFT_OUT)
    nearest_seen: float | None = field(default=None, metadata=LEFT_OUT)
    nearest_seen_by_chance: float | None = field(default=None, metadata=LEFT_OUT)
    statement: str = field(default="", metadata=LEFT_OUT)
    task: int | None = field(default=None, metadata=LEFT_OUT)
    per_task: tuple[Leakage, ...] = field(default=(), metadata=LEFT_OUT)


@dataclass(frozen=True)
class Privacy:
    """What is guaranteed over the whole run. ``images``: whether the compared images were uploaded or drawn by the server.

    A run without a mechanism has a statement only.
    """

    private: bool = False
    statement: str = ""
    leaves_site: str = field(default="", metadata=beside("mechanism"))
    images: str = field(default="uploaded", metadata=beside("mechanism"))
    mechanism: str = field(default="", metadata=LEFT_OUT)
    noise_multiplier: float | None = field(default=None, metadata=beside("mechanism"))
    clip: float | None = field(default=None, metadata=beside("mechanism"))
    sampling_rate: float | None = field(default=None, metadata=beside("mechanism"))
    epsilon: float | None = field(default=None, metadata=beside("mechanism"))
    epsilon_replaced: float | None = field(default=None, metadata=beside("mechanism"))
    epsilon_per_round: float | None = field(default=None, metadata=beside("mechanism"))
    delta: float | None = field(default=None, metadata=beside("mechanism"))
    neighbours: str | None = field(default=None, metadata=beside("mechanism"))
    releases_per_record: int | None = field(default=None, metadata=beside("mechanism"))
    max_participations: int | None = field(default=None, metadata=beside("mechanism"))


@dataclass(frozen=True, kw_only=True)
class ClassTheory:
    """The theory of one class's buffer, measured; symbols in docs/theory.md. ``rounds`` holds columns, one entry per round."""

    task: int
    class_name: str = field(metadata={"key": "class"})
    num_pool: int
    num_window: int
    num_kept: int
    target_distance: float
    target_bound: float
    target_random: float
    delta_window: float | None = None
    coverage_fails_at: int | None = None
    full_pool_distance: float
    full_pool_bound: float
    delta_pool: float | None = None
    full_pool_coverage_fails_at: int | None = None
    bias_pool: float | None = None
    bias_window: float | None = None
    removed_bias: float
    sigma: float
    coherence: float
    theorem_needs: float
    corollary_needs: float
    largest_margin: float
    herded_to_real: float
    pool_to_real: float
    window_to_real: float | None = None
    full_pool_to_real: float
    rounds: dict[str, tuple[Any | None, ...]] = field(default_factory=dict)
    kept_to_real: float
    sampling_error: float | None = None  # below it a round's figures are noise
    smoothness: float | None = None
    seed: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class Theory:
    """The theory of every class of a run whose server keeps buffers."""

    classes: tuple[ClassTheory, ...] = ()
    recent_fraction: float | None = None
    num_rounds: int | None = None
    real_per_class: int | None = None


@dataclass(frozen=True)
class StreamClass:
    """When a class was at the sites and when its buffer closed, in rounds of the stream from 1."""

    arrives: int
    leaves: int
    class_name: str = field(default="?", metadata={"key": "class"})
    task: int | None = None
    closed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stream:
    """A stream without announced tasks."""

    classes: tuple[StreamClass, ...] = ()
    rounds_per_task: int = 1
    num_rounds: int = 1
    drift: int = 0


@dataclass(frozen=True)
class Forgotten:
    """A site that withdrew: what was removed, and accuracies before and after.

    ``epsilon_...``: what an image of another site was charged before and after, where sums were taken again.
    """

    client: int | None = None
    name: str = field(default="", metadata=NULL)
    step: int | None = None
    task: int | None = None
    num_images: int | None = None
    bytes: int | None = None
    num_images_left: int | None = None
    removed: tuple[dict[str, Any], ...] = ()
    classes_lost: tuple[str, ...] = ()
    epochs: int | None = None
    exact: bool = False
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    per_task_before: Numbers = field(default=(), metadata=NULL)
    per_task_after: Numbers = field(default=(), metadata=NULL)
    own_images_before: float | None = None
    own_images_after: float | None = None
    remains: tuple[str, ...] = ()
    summed_again: bool = field(default=False, metadata=LEFT_OUT)
    epsilon_before: float | None = field(default=None, metadata=beside("summed_again"))
    epsilon_after: float | None = field(default=None, metadata=beside("summed_again"))
    epsilon_replaced_before: float | None = field(default=None, metadata=beside("summed_again"))
    epsilon_replaced_after: float | None = field(default=None, metadata=beside("summed_again"))


@dataclass(frozen=True)
class Moved:
    """A part of a run that went on with other code or on another machine: after which step, and what was before and now."""

    step: int | None = None
    changed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grown:
    """Tasks that were added to a finished run: after which one (from 0), and how many there were then."""

    after_task: int = 0
    num_tasks: int = 0


@dataclass(frozen=True)
class Quarantined:
    """A group of pictures, of one site, class and round, that the screen put apart: why, and in which round it was admitted."""

    name: str = ""
    task: int | None = None
    round: int | None = None
    client: int | None = None
    label: int | None = None
    class_name: str = field(default="?", metadata={"key": "class"})
    images: int | None = None
    ratio: float | None = None
    why: str = ""
    sha256: str = ""
    admitted: int | None = None


@dataclass(frozen=True)
class ScreenRecord:
    """What the screen judged, and what it put apart."""

    judged: dict[str, int] = field(default_factory=dict)
    quarantined: tuple[Quarantined, ...] = ()


@dataclass(frozen=True)
class EventCounts:
    """How often something happened that a run goes on after."""

    client_failures: int = 0
    image_fallbacks: int = 0
    images_withheld: int = 0
    uploads_declined: int = 0
    classes_suppressed: int = 0


@dataclass(frozen=True)
class SiteAccuracy:
    """A natural site: its images, and percent of its test images that the run's one model names rightly."""

    name: str = "?"
    train_size: int | None = None
    test_size: int | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class SiteHead:
    """A site in site_heads.json: accuracy on its own test images with the shared head, and with a head tuned at the site."""

    name: str = field(default="?", metadata={"key": "site"})
    shared: float | None = field(default=None, metadata={"key": "shared head"})
    tuned: float | None = field(default=None, metadata={"key": "tuned head"})


@dataclass(frozen=True)
class SiteHeads:
    """site_heads.json, which ``rescene sites RUN --tune`` writes."""

    sites: tuple[SiteHead, ...] = ()


@dataclass(frozen=True)
class LateCounts:
    """Answers of sites that answer when they can: sent = on time + late + dropped + under way when the run ended."""

    sent: int | None = None
    on_time: int | None = None
    late: int | None = None
    rounds_late: int | None = None
    dropped: int | None = None
    under_way: int | None = None


@dataclass(frozen=True)
class SiteOrder:
    """A site with an order of its own: the classes of each step, and after each step the accuracy on all it had met."""

    site: int | None = None
    tasks: tuple[tuple[str, ...], ...] = ()
    accuracy: Numbers = ()


@dataclass(frozen=True)
class Results:
    """results.json of a finished run. Accuracy [stage][task] is None above the diagonal; all empty for an unfinished run.

    ``orders`` and ``stream`` are there where tasks are of that kind, ``evaluated`` and ``not_measured`` where something could not
    be measured as usual, and other parts where the thing they tell of happened.
    """

    method: str = ""
    aa: float | None = None
    aia: float | None = None
    forgetting: float | None = None
    bwt: float | None = None
    old: float | None = None
    recent: float | None = None
    worst_task: float | None = None
    worst_site: float | None = field(default=None, metadata=beside("sites"))
    sites: tuple[SiteAccuracy, ...] = field(default=(), metadata=LEFT_OUT)
    balanced_accuracy: float | None = None
    within_task: Numbers = ()
    incremental_accuracy: Numbers = ()
    accuracy_matrix: tuple[Numbers, ...] = ()
    confusion: tuple[Numbers, ...] = ()
    tasks: tuple[TaskFacts, ...] = ()
    cost: Cost = Cost()
    leakage: Leakage | None = None
    theory: Theory = field(default=Theory(), metadata=NULL)
    privacy: Privacy = Privacy()
    events_summary: EventCounts = EventCounts()
    evaluated: str = field(default="", metadata=LEFT_OUT)
    accuracy_by_class: dict[str, float] = field(default_factory=dict, metadata=LEFT_OUT)
    not_measured: dict[str, str] = field(default_factory=dict, metadata=LEFT_OUT)
    stream: Stream | None = field(default=None, metadata=LEFT_OUT)
    orders: tuple[SiteOrder, ...] = field(default=(), metadata=LEFT_OUT)
    elsewhere: tuple[Moved, ...] = field(default=(), metadata=LEFT_OUT)
    continued: tuple[Grown, ...] = field(default=(), metadata=LEFT_OUT)
    forgotten: tuple[Forgotten, ...] = field(default=(), metadata=LEFT_OUT)
    filtered_by: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)  # observers of a user
    made_from_objects: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    simulated: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    faults: dict[str, float] = field(default_factory=dict, metadata=LEFT_OUT)
    late_answers: LateCounts | None = field(default=None, metadata=LEFT_OUT)
    attack_success: float | None = field(default=None, metadata=LEFT_OUT)
    screen: ScreenRecord | None = field(default=None, metadata=LEFT_OUT)
    style: dict[str, Any] = field(default_factory=dict)  # a MethodStyle; older runs have none
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """timing.json: seconds, in all and by phase."""

    total_s: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """status.json: how far a run is. ``round`` is -1 between rounds; ``aa`` was measured after ``aa_tasks`` tasks."""

    method: str = ""
    task: int = 0
    round: int = -1
    num_tasks: int | None = None
    num_rounds: int | None = None
    phase: str = ""
    aa: float | None = None
    aa_tasks: int | None = None  # earlier versions did not tell
    done: int = 0
    steps: int | None = None

    @property
    def aa_so_far(self) -> str:
        """AA and after which task it was measured; empty before the first.

        >>> Status(aa=56.24, aa_tasks=2, num_tasks=5).aa_so_far, Status(aa=56.24).aa_so_far, Status().aa_so_far
        ('56.2 after task 2/5', '56.2 so far', '')
        """
        if self.aa is None:
            return ""
        after = "so far" if self.aa_tasks is None else f"after task {self.aa_tasks}"
        return f"{self.aa:.1f} {after}" + (f"/{self.num_tasks}" if self.aa_tasks and self.num_tasks else "")


@dataclass(frozen=True)
class Waiting:
    """waiting.json of a run across sites: when they were asked, until when we wait, who has answered, when each was last heard.

    Times are ISO texts. ``missing``: those of ``waiting_for`` that are away, or had to be asked again.
    """

    asked: str = ""
    until: str = ""
    answered: tuple[str, ...] = ()
    waiting_for: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    heard: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """origin.json: the recipe's name, and the style of the method from the start of the run on."""

    recipe: str = ""
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRecord:
    """A round in metrics.jsonl. ``sites``: bytes up and down of each client. ``summed``: who is in its sums, where it has some.

    ``by_task``: accuracy on each task so far; nothing in records of earlier versions.
    """

    task: int
    round: int
    participants: tuple[int, ...] = ()
    accuracy: float | None = None
    by_task: tuple[float | None, ...] = ()
    uplink_bytes: float | None = None
    downlink_bytes: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    sites: dict[str, tuple[float, ...]] = field(default_factory=dict)
    summed: tuple[int, ...] | None = None

    @property
    def counted(self) -> tuple[int, ...]:
        """Sites whose numbers count: those in its sums, or where it has none, those that sent something."""
        sent = (int(site) for site, traffic in self.sites.items() if site.isdecimal() and any(traffic[:1]))
        return tuple(sorted(sent)) if self.summed is None else self.summed

    @property
    def asked(self) -> tuple[int, ...]:
        """Sites that were drawn, and others that exchanged something: a method may ask everybody."""
        return tuple(sorted({*self.participants, *(int(site) for site in self.sites if site.isdecimal())}))

    @property
    def num_asked(self) -> int:
        """Sites that exchanged something, as the ledger counts them: a method may ask more or fewer than were drawn.

        >>> RoundRecord(0, 0, (1, 2)).num_asked, RoundRecord(0, 0, (1, 2), sites={"0": (9, 1), "1": (9, 1), "2": (9, 1)}).num_asked
        (2, 3)
        """
        return len(self.sites or self.participants)

    @property
    def matching_loss(self) -> float | None:
        """What condensation has left of the difference between surrogates and real images."""
        found = self.notes.get("matching_loss")
        return float(found) if isinstance(found, (int, float)) and math.isfinite(found) else None


@dataclass(frozen=True)
class TaskRecord:
    """The end of a task in metrics.jsonl: accuracy on each task so far and on everything, work and bytes since the run began."""

    task: int
    accuracy: Numbers = ()
    aa: float | None = None
    client_flops: float | None = None
    server_flops: float | None = None
    uplink_bytes_so_far: float | None = None
    downlink_bytes_so_far: float | None = None


@dataclass(frozen=True)
class EventRecord:
    """A line of events.jsonl."""

    level: str = ""
    code: str = ""
    message: str = ""
    task: int | None = None
    round: int | None = None
    client: int | None = None

    @property
    def left_out(self) -> bool:
        """Whether an answer of a site is missing or was not used: it failed, declined, or was not accepted.

        A site that declines an evaluation has an error code at the level of a warning: the round goes on.
        """
        return self.client is not None and (self.level == "error" or self.code.startswith("E") or self.code == DECLINED)


@dataclass(frozen=True)
class PartitionTask:
    """Training images [site][class] of one task; ``classes`` are numbers."""

    task: int = 0
    classes: tuple[int, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Partition:
    """partition.json: who holds what."""

    num_clients: int | None = None
    classes: tuple[str, ...] = ()
    tasks: tuple[PartitionTask, ...] = ()
    sites: tuple[str, ...] = ()  # names, where sites are the data's own


@dataclass(frozen=True)
class PairRecord:
    """An upload and the real image nearest to it, in surrogates.json. A PSNR of an exact copy is infinite, thus None."""

    class_name: str = field(default="?", metadata={"key": "class"})
    task: int | None = None
    round: int | None = None
    label: int | None = None
    rms: float | None = None
    psnr: float | None = None


@dataclass(frozen=True)
class MeanRecord:
    """The mean of a class's uploads against that of its real images, in surrogates.json."""

    class_name: str = field(default="?", metadata={"key": "class"})
    task: int | None = None
    num_uploads: int | None = None
    num_real: int | None = None
    rms: float | None = None


@dataclass(frozen=True)
class AttackRecord:
    """One attack of an audit: its guesses, and the epsilon that they prove at least."""

    attack: str = "?"
    num_right: int | None = None
    num_guesses: int | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class Audit:
    """audit.json: what attacks on the run showed."""

    verdict: str = "?"
    promised: float | None = None
    canaries: tuple[AttackRecord, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class WithoutSite:
    """Accuracy of the run that never saw a site that withdrew."""

    never: float | None = None


@dataclass(frozen=True)
class TasksWithoutSite:
    """The same, task by task."""

    never: Numbers = ()


@dataclass(frozen=True)
class WithdrawalCheck:
    """withdrawal.json: a comparison with the run that never saw the site."""

    client: int | None = None
    aa: WithoutSite = WithoutSite()
    own_images: WithoutSite = WithoutSite()
    per_task: TasksWithoutSite = TasksWithoutSite()


@dataclass(frozen=True)
class SiteRecord:
    """A site as the server of a federation sees it; times are ISO texts."""

    client: int = 0
    name: str = "?"
    state: str = "unknown"
    last_answer: str = ""
    waiting_since: str = ""


@dataclass(frozen=True)
class FederationRecord:
    """sites.json of a run across sites."""

    federation: str = ""
    updated: str = ""
    sites: tuple[SiteRecord, ...] = ()


def read_status(folder: Path) -> Status:
    """status.json of a run folder; what is missing or damaged has its default."""
    return record_file(Status, folder / "status.json", [])


def read_waiting(folder: Path) -> Waiting:
    """waiting.json of a run folder; what is missing or damaged has its default."""
    return record_file(Waiting, folder / "waiting.json", [])


def read_events(folder: Path, problems: list[str]) -> tuple[EventRecord, ...]:
    """The lines of events.jsonl of a run folder; damaged ones are left out and noted."""
    return tuple(records_of(EventRecord, json_lines(folder / "events.jsonl", problems), "events.jsonl", problems))


def read_metrics(folder: Path, problems: list[str]) -> tuple[tuple[RoundRecord, ...], tuple[TaskRecord, ...]]:
    """Rounds and ends of tasks in metrics.jsonl of a run folder, in order; damaged lines are left out and noted.

    A round that is there twice, because the run was resumed, counts once: the later one.
    """
    rows = json_lines(folder / "metrics.jsonl", problems)
    kinds = {kind: [row for row in rows if row.get("kind") == kind] for kind in ("round", "task")}
    rounds = {(row.task, row.round): row for row in records_of(RoundRecord, kinds["round"], "metrics.jsonl", problems)}
    tasks = {row.task: row for row in records_of(TaskRecord, kinds["task"], "metrics.jsonl", problems)}
    return tuple(rounds[place] for place in sorted(rounds)), tuple(tasks[place] for place in sorted(tasks))


def read_results(path: Path, problems: list[str]) -> Results:
    """results.json, converted once; parts that are damaged are noted. DataError E213 if the file cannot be read at all."""
    return results_of_row(results_row(path), problems)


def results_row(path: Path) -> Row:
    """results.json as it stands. E213 if the file cannot be read, E414 if a later version wrote it."""
    try:
        row = read_object(path)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            what, why = f"'{path.parent}' has no results yet", "results.json is written when the run has ended"
            fix = f"wait until it ends ({command('runs', path.parent.parent)} shows how far it is)"
        else:
            what, why = f"'{path.parent}' holds a damaged results.json", str(error)
            fix = "leave this folder out, or run the experiment again"
        raise DataError("E213", what, where=str(path), why=why, fix=fix) from None
    refuse_newer(row.get("schema"), RESULTS, path)
    return row


def results_of_row(row: Row, problems: list[str]) -> Results:
    """What results.json holds, as a record; parts that are damaged are noted.

    Records of earlier versions are upgraded here: keys that came later have their defaults, and the recipe gets the choices
    that did not exist yet.
    """
    damaged: list[str] = []
    config = row.get("config")
    found = record_of(Results, _upgraded(row, config) if isinstance(config, dict) else row, damaged)
    problems += noted("results.json", damaged)
    return found


def _upgraded(row: Row, config: Row) -> Row:
    """With the recipe as it was. Where the method has another name today, that name, and no style of the former one."""
    told = as_it_was(config)
    before, now = (
        each["method"].get("name") if isinstance(each.get("method"), dict) else None for each in (config, told)
    )
    return row | {"config": told} | ({"method": now, "style": {}} if now != before else {})


def written(results: Results) -> Row:
    """What results.json holds of a run. The same bits give the same text."""
    return {"schema": RESULTS, **as_json(results, DIGITS)}
