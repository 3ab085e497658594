"""Runs in sentences: the first screen of the page (the verdict, and what left the sites) and the model card in Markdown.

The sentences follow the numbers and never the wish: a method that is beaten is said to be beaten, and nothing is called
private unless the run's own record says so. The card is of one finished run: what the model is, how good, at what price, and
its limits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rescene import __version__
from rescene.core.errors import DECLINED, RunError, command
from rescene.core.method_style import GENERATOR, RECONSTRUCTED
from rescene.core.noised_accuracy import noise_line
from rescene.core.results import Privacy
from rescene.report.formatting import (
    bytes_text,
    count,
    percent,
    percent_sign,
    plain,
    seconds_text,
    server_work,
    site_work,
    task_name,
)
from rescene.report.groups import RunGroup, Spread, headline_group, rivals
from rescene.report.load import RunRecord, load_run
from rescene.report.tables import TableCell, TableEntry, TableGrid, render

_SURE = 3.0  # standard errors above guessing, from which on an accuracy is better than that
_FLATTER = ("W217", "W548", "W561", "W563", "W568")  # or make it uncertain
_UNSURE_POINTS = 5.0  # the same in points, where the number of test images is not known


@dataclass(frozen=True)
class RunVerdict:
    """One sentence to remember, and what must be known to read it rightly."""

    title: str
    lines: tuple[str, ...]


def verdict(groups: Sequence[RunGroup]) -> RunVerdict:
    """The page's first words."""
    head = headline_group(groups)
    if head is None:
        return RunVerdict("No run has finished yet.", ("The figures below show what has been measured so far.",))
    run = head.finished[0]
    if head.aa is None:
        title = f"{head.label} has finished; its accuracy was not measured."
        return RunVerdict(title, (*absent(run), *unmeasured(run)))
    rival = max((group for group in groups if group.aa and rivals(head, group)), key=_mean_aa, default=None)
    lines = [_simulated(head), *absent(run), *flattered(run), chance_line(head), _after(head)]
    lines.append(_seeds(head.aa, rival.aa if rival else None))
    return RunVerdict(_title(head, head.aa, rival), tuple(line for line in lines if line))


def _mean_aa(group: RunGroup) -> float:
    return group.aa.mean if group.aa else math.nan


def unmeasured(run: RunRecord) -> tuple[str, ...]:
    """Why a finished run has no accuracy, as far as it says so; nothing for a run that has one."""
    if run.results.aa is not None:
        return ()
    told = plain(run.results.not_measured.get("accuracy", "not measured: the run does not say why"), 600)
    return (f"Accuracy: {told.rstrip('.')}.",)


def flattered(run: RunRecord) -> tuple[str, ...]:
    """What the run warned of that makes its accuracy look better than it is; of each kind the last, as a continued run says it
    again for all its images."""
    told = {row.code: plain(row.message, 800) for row in run.events if row.code in _FLATTER}
    noised = noise_line(run.events, run.results)
    return (*(f"{words[0].upper()}{words[1:]}." for words in told.values()), *([noised] if noised else []))


def absent(run: RunRecord) -> tuple[str, ...]:
    """Which sites declined to send what they were asked for: the model was made without it."""
    told = dict.fromkeys(plain(row.message, 300) for row in run.events if row.code == DECLINED)
    return tuple(f"The model was made without what a site declined to send: {words}." for words in told)


def _title(head: RunGroup, aa: Spread, rival: RunGroup | None) -> str:
    num_tasks = len(head.shown[0].matrix)
    span = f" over all {num_tasks} tasks" if num_tasks > 1 else ""
    start = f"{head.label} reaches {percent_sign(aa.mean)}{span}"
    run = head.finished[0]
    if run.guessing and not better_than_guessing(aa.mean, run.guessing[-1], _num_tested(run)):
        return f"{start}, no better than guessing."
    if rival is None:
        return start + "."
    gap = aa.mean - _mean_aa(rival)
    if abs(gap) < 0.05:
        return f"{start}, level with {rival.label}."
    return f"{start}, {percent(abs(gap))} points {'above' if gap > 0 else 'below'} {rival.label}."


def better_than_guessing(accuracy: float, chance: float, num_images: int | None) -> bool:
    """Whether so many test images tell this accuracy from that of guessing (percent).

    >>> better_than_guessing(60.0, 50.0, 400), better_than_guessing(55.0, 50.0, 400), better_than_guessing(12.0, 10.0, None)
    (True, False, False)
    """
    error = 100 * math.sqrt(chance / 100 * (1 - chance / 100) / num_images) if num_images else 0.0
    return accuracy - chance > (_SURE * error or _UNSURE_POINTS)


def _num_tested(run: RunRecord) -> int | None:
    return sum(task.test_size or 0 for task in run.tasks) or None


def chance_line(head: RunGroup) -> str:
    """What guessing gives, and whether the first task was learned at all: else later ones have nothing to forget."""
    run = head.finished[0]
    if not run.guessing:
        return ""
    line = f"Guessing gives {percent_sign(run.guessing[-1])}."
    first = head.mean(_first_accuracy)
    if first is None or len(run.matrix) < 2:
        return line
    chance = run.guessing[0]
    shares = f"{percent_sign(first)} right after it, where guessing gives {percent_sign(chance)}"
    if better_than_guessing(first, chance, run.tasks[0].test_size):
        return f"{line} It learned its first task: {shares}."
    return f"{line} It did not learn its first task: {shares}, so there was little to forget."


def _first_accuracy(run: RunRecord) -> float | None:
    matrix = run.matrix
    return float(matrix[0, 0]) if len(matrix) and np.isfinite(matrix[0, 0]) else None


def _after(head: RunGroup) -> str:
    """Old against recent tasks: does it forget?"""
    old, recent = head.mean(lambda run: run.results.old), head.mean(lambda run: run.results.recent)
    if old is None or recent is None or len(head.shown[0].matrix) < 2:
        return ""
    lost = recent - old
    shares = f"{percent_sign(old)} of the images of old tasks and {percent_sign(recent)} of recent ones"
    start = f"It names {shares} correctly: "
    if max(old, recent) < 10:
        return start + "it has learned little."
    if old < 5:
        return start + "old tasks are forgotten."
    if abs(lost) <= 5:
        return start + "old tasks are held about as well as new ones."
    return start + f"old tasks {'trail' if lost > 0 else 'lead'} by {percent(abs(lost))} points."


def _seeds(aa: Spread, other: Spread | None) -> str:
    """What chance may explain."""
    if aa.std is None:
        return "One seed only: differences of a few points may be chance."
    if other and abs(aa.mean - other.mean) <= math.hypot(aa.std, other.std or 0.0):
        return "The gap lies within the spread over seeds: do not read it as a difference."
    return ""


def _traced(group: RunGroup) -> str:
    """Uploads that can be traced to their image, beside what chance gives."""
    found = group.mean(lambda run: run.leakage.traced if run.leakage else None)
    chance = group.mean(lambda run: run.leakage.traced_by_chance if run.leakage else None)
    if found is None or chance is None or found <= chance:
        return ""
    shares = [percent_sign(100 * one, 0) for one in (found, chance)]
    return f"{shares[0]} can be traced to the image they come from; of images that nobody sent {shares[1]} can."


def simulated(run: RunRecord) -> list[str]:
    """What was made to go wrong on purpose, as the run says."""
    return [plain(words, 200) for words in run.results.simulated]


def _simulated(head: RunGroup) -> str:
    told = list(dict.fromkeys(words for run in head.finished for words in simulated(run)))
    if not told:
        return ""
    success = head.mean(lambda run: run.results.attack_success)
    end = "" if success is None else f" The attack succeeds on {percent_sign(success)} of the test images it aims at."
    return f"Simulated: {'; '.join(told)}.{end}"


@dataclass(frozen=True)
class Departure:
    """What left the sites under one method."""

    group: RunGroup
    sends: str
    images: str  # uploaded, or drawn from what was
    upload: str
    upload_bytes: float | None
    share: float | None  # near-copies, 0 to 1
    finding: str
    traced: str  # how many can be traced to their image; empty if no more than by chance
    statement: str  # what the leakage check itself says
    private: bool
    guarantee: str
    mechanism: str  # its figures; empty without one

    @property
    def first_words(self) -> str:
        """The whole guarantee, or that there is none: what follows repeats the figures of the first screen."""
        return self.guarantee if self.private else self.guarantee.partition(". ")[0].rstrip(".") + "."

    @property
    def in_short(self) -> str:
        """The guarantee in a few words."""
        if not self.group.finished:
            return "not recorded yet"
        return self.guarantee if self.private else "none"


def departure(group: RunGroup) -> Departure:
    """What the sites sent, how much of it resembles real images, and what is (not) guaranteed."""
    upload, share = group.mean(lambda run: run.upload_bytes), group.mean(lambda run: run.near_copies)
    privacy = [run.privacy for run in group.finished]
    fallback = "The run recorded no privacy statement; treat what was sent as readable by the server."
    sends = _first_of([entry.leaves_site for entry in privacy], 600) or group.style.sends
    return Departure(
        group=group,
        sends=sends or "not described in the run folder",
        images=privacy[0].images if privacy else "uploaded",
        upload=bytes_text(upload),
        upload_bytes=upload,
        share=share,
        finding=_finding(group, share),
        traced=_traced(group),
        statement=_first_of([run.leakage.statement for run in group.finished if run.leakage], 600),
        private=bool(privacy) and all(entry.private for entry in privacy),
        guarantee=_first_of([entry.statement for entry in privacy], 1500) or fallback,
        mechanism=_first_of([_mechanism(entry) for entry in privacy], 1500),
    )


def _first_of(texts: Sequence[str], limit: int) -> str:
    return next((plain(text, limit) for text in texts if text), "")


def _mechanism(entry: Privacy) -> str:
    """The figures of a mechanism, as far as the run has recorded them."""
    if not entry.mechanism:
        return ""
    figures = {
        "σ": entry.noise_multiplier, "C": entry.clip, "δ": entry.delta, "sampling rate": entry.sampling_rate,
        "ε of one upload, one in a round": entry.epsilon_per_round, "ε of the whole run": entry.epsilon,
        "ε if an image is replaced": entry.epsilon_replaced,
    }  # fmt: skip
    told = ", ".join(f"{name} = {value:.4g}" for name, value in figures.items() if value is not None)
    return f"Mechanism {plain(entry.mechanism, 30)}: {told}."


def _finding(group: RunGroup, share: float | None) -> str:
    if not group.finished:
        return "measured when the run ends"
    if share is None:
        return group.style.without_images("no images checked")
    entry = next(run.leakage for run in group.finished if run.leakage)
    total = "" if entry.num_images is None else f" of {count(entry.num_images, 'image')}"
    exact = "" if entry.exact_copies is None else f", {entry.exact_copies} exact"
    return f"{percent_sign(100 * share, 0)} near-copies{total}{exact}"


CARD = "MODEL_CARD.md"


def write_card(folder: Path, out: Path | None = None) -> Path:
    """MODEL_CARD.md in the run folder, or in ``out``."""
    path = (out or folder) / CARD
    path.write_text(model_card(load_run(folder)), encoding="utf-8")
    return path


def model_card(run: RunRecord) -> str:
    """The card of a finished run; every number is one of results.json."""
    if not run.finished:
        raise RunError("E408", "no finished run here", where=str(run.folder), fix=command("resume", run.folder))
    title = f"# {run.style.label} on {plain(run.data or 'images')}"
    parts = [_model, _data, _accuracy, _privacy, _cost, _limits, _again]
    return "\n\n".join([title, *(part(run) for part in parts)]) + "\n"


def _model(run: RunRecord) -> str:
    about = json.loads((run.folder / "model" / "model.json").read_text("utf-8"))
    arch, look = about["arch"], run.env.get("normalisation") or about
    size, lens = about.get("picture_size") or arch["image_size"], about.get("lens")
    made_from = f"{about['lens_made_from']} (SHA-256 {about['lens_sha256'][:16]})" if "lens_made_from" in about else ""
    norm = "" if arch["name"] == "mlp" else f", {arch['norm']} normalisation"
    seen = (
        f"{lens}, {arch.get('channels')} channels of {arch['image_size']}x{arch['image_size']} (inside exported files)"
    )
    rows = [
        ("network", f"{arch['name']}{norm}, {count(len(about['classes']), 'class')}"),
        ("input", f"RGB pictures of {size}x{size} pixels (shorter side scaled, centre cropped)"),
        *([("looked at through", seen)] if lens else []),
        *([("the lens was made from", _escaped(made_from))] if made_from else []),
        ("normalised by", f"mean {_numbers(look['mean'])}, std {_numbers(look['std'])} (inside exported files)"),
        ("output", "one score per class; softmax gives confidences, which are not calibrated"),
        ("trained with", f"{run.style.label}, task by task, seed {run.seed}"),
    ]
    return _table(("", ""), rows)


def _data(run: RunRecord) -> str:
    keys = ("num_clients", "per_round", "num_rounds", "partition", "beta")
    sites, per_round, rounds, partition, beta = (run.settings.get(f"federation.{key}", "?") for key in keys)
    split = f"partition {partition}, beta {beta}" if not run.partition.sites else "each image at its own site"
    lines = [
        f"{plain(run.data or 'not recorded')}, split over {sites} sites "
        f"({per_round} in each of {rounds} rounds per task, {split}).",
        *(f"- {_escaped(note)}" for note in run.env.get("data_notes") or ()),
        f"- Fingerprint of the images: `{plain(run.env.get('data_fingerprint', 'not recorded'))}`",
    ]
    return "## Data\n\n" + "\n".join([lines[0], "", *lines[1:]])


def _accuracy(run: RunRecord) -> str:
    final = run.matrix[-1] if len(run.matrix) else []
    rows = [
        (
            task_name(task.index),
            plain(task.domain or ", ".join(task.classes), 400),
            str(task.train_size if task.train_size is not None else "at the sites"),
            str(task.test_size),
            TableCell(float(value), digits=1),
        )
        for task, value in zip(run.tasks, final, strict=False)
    ]
    words = " ".join(unmeasured(run)) or (
        f"After the last task the model names {percent(run.results.aa)} % of all test images rightly (AA), "
        f"{percent(run.results.aia)} % on average over the tasks as they came (AIA); it forgot "
        f"{percent(run.results.forgetting)} points. The worst task is at {percent(run.results.worst_task)} %. One run, one seed."
    )
    words = "\n\n".join([words, *map(_escaped, flattered(run))])
    names = ("task", "classes", "training images", "test images", "accuracy, %")
    return f"## Accuracy\n\n{words}\n\n" + _table(names, rows) + _by_site(run)


def _by_site(run: RunRecord) -> str:
    if not run.results.sites:
        return ""
    rows = [
        (plain(site.name, 60), str(site.train_size), str(site.test_size), TableCell(site.accuracy, digits=1))
        for site in run.results.sites
    ]
    told = f"The worst site is at {percent(run.results.worst_site)} %."
    return f"\n\n{told}\n\n" + _table(("site", "training images", "test images", "accuracy, %"), rows)


NOT_COMPARED = {
    RECONSTRUCTED: "the server can reconstruct images of the sites from what they send; how well was not measured in this run",
    GENERATOR: "the server gets a generator that paints pictures like a site's; how near they come to its images was not measured",
}


def _privacy(run: RunRecord) -> str:
    lines = [_escaped(run.privacy.statement or "The run recorded no privacy statement: take it for not private.")]
    if found := run.leakage:
        lines.append(
            f"Of {found.num_images} {run.privacy.images} images {percent(100 * (found.near_copies or 0.0), 0)} % are "
            f"near-copies (PSNR above 30 dB) of a real training image and {found.exact_copies} are exact copies; the median "
            f"PSNR to the nearest real image is {percent(found.nearest_psnr_median_db)} dB."
        )
    else:
        missing = run.results.not_measured.get("leakage") or "no images were uploaded, so none were compared"
        lines.append(f"Leakage: {NOT_COMPARED.get(run.style.without_images(), missing)}.")
    sends = run.privacy.leaves_site or run.style.sends or "see the page of the method"
    lines.append(f"What leaves a site: {_escaped(sends)}.")
    if gone := run.results.forgotten:
        names = ", ".join(_escaped(row.name or row.client) for row in gone)
        done = (
            "Sums over the other sites were taken anew, with fresh noise; the old ones stay released, and epsilon counts both."
            if all(row.summed_again for row in gone)
            else "Its sums were subtracted and the model was solved anew: it is the model that never met the site."
            if all(row.exact for row in gone)
            else "Its uploads were removed and the model was trained anew; this is no proof of unlearning."
        )
        lines.append(f"Withdrawn: site {names}. {done}")
    return "## Privacy\n\n" + "\n\n".join(lines)


def _cost(run: RunRecord) -> str:
    cost = run.results.cost.measured
    rows = [
        ("upload of a site per round", bytes_text(run.upload_bytes)),
        ("download of a site per round", bytes_text(cost.downlink_bytes_per_message)),
        ("compute of all sites", site_work(cost.client_flops, run.lens)),
        ("compute of the server", server_work(cost.server_flops)),
        ("time", f"{seconds_text(run.timing.total_s)} on {plain(run.env.get('device', 'not recorded'))}"),
    ]
    left_out = "Compute is convolutions and linear layers. The look through a lens, averages, sums and solvers are not counted."
    return "## Cost\n\n" + _table(("", ""), rows) + f"\n\n{left_out}"


def _last_of_each(run: RunRecord) -> str:
    """That the last images of each class are the test, where the data had no test images of their own."""
    held_out = run.settings.get("data.held_out") == "last"
    return ", the last ones of each class unless the data have a test set of their own" if held_out else ""


def _limits(run: RunRecord) -> str:
    num = sum(len(task.classes) for task in run.tasks)
    lines = [
        f"- It knows the {count(num, 'class')} above and names one of them for any picture, also of something else."
        if not any(task.domain for task in run.tasks)
        else "- It names one of its classes for any picture, also of something else.",
        f"- Accuracy was measured on test images like the training images{_last_of_each(run)}; on other cameras or places expect less."
        if run.results.aa is not None
        else "- Nobody has measured how accurate it is.",
        "- Sites were simulated from one data set."
        if run.config.get("sites") is None and not run.partition.sites
        else "",
        f"- Trained under simulated faults: {'; '.join(simulated(run))}." if simulated(run) else "",
        "- A research model: do not decide about people with it without a test of your own.",
    ]
    return "## Limits\n\n" + "\n".join(line for line in lines if line)


def _again(run: RunRecord) -> str:
    versions = (
        f"rescene {run.env.get('rescene', '?')}, torch {run.env.get('torch', '?')}, Python {run.env.get('python', '?')}"
    )
    typed = f"```\n{run.command}\n```\n\n" if run.command else ""
    return f"## Again\n\n{typed}Made with {versions}; card written by rescene {__version__}."


def _table(columns: tuple[str, ...], rows: Sequence[tuple[TableEntry, ...]]) -> str:
    return render(TableGrid("", columns, tuple(rows)), "markdown").strip()


def _numbers(values: Sequence[float]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]:.4f}"
    return ", ".join(f"{value:.4f}" for value in values)


def _escaped(text: object) -> str:
    return plain(text, 1000).replace("|", "\\|").replace("<", "&lt;")
