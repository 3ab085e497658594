"""A model card in Markdown, written from a finished run: what the model is, how good, at what price, and its limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rescene import __version__
from rescene.core.errors import RunError, command
from rescene.report.formatting import bytes_text, count, percent, plain, seconds_text, server_work, site_work, task_name
from rescene.report.load import RunRecord, load_run
from rescene.report.summary import flattered, simulated, unmeasured
from rescene.report.tables import TableCell, TableEntry, TableGrid, render

NAME = "MODEL_CARD.md"


def write_card(folder: Path, out: Path | None = None) -> Path:
    """MODEL_CARD.md in the run folder, or in ``out``."""
    path = (out or folder) / NAME
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
    return _table("", ("", ""), rows)


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
    return f"## Accuracy\n\n{words}\n\n" + _table("", names, rows) + _by_site(run)


def _by_site(run: RunRecord) -> str:
    if not run.results.sites:
        return ""
    rows = [
        (plain(site.name, 60), str(site.train_size), str(site.test_size), TableCell(site.accuracy, digits=1))
        for site in run.results.sites
    ]
    told = f"The worst site is at {percent(run.results.worst_site)} %."
    return f"\n\n{told}\n\n" + _table("", ("site", "training images", "test images", "accuracy, %"), rows)


def _privacy(run: RunRecord) -> str:
    lines = [_escaped(run.privacy.statement or "The run recorded no privacy statement: take it for not private.")]
    found = run.leakage
    if found:
        lines.append(
            f"Of {found.num_images} {run.privacy.images} images {percent(100 * (found.near_copies or 0.0), 0)} % are "
            f"near-copies (PSNR above 30 dB) of a real training image and {found.exact_copies} are exact copies; the median "
            f"PSNR to the nearest real image is {percent(found.nearest_psnr_median_db)} dB."
        )
    else:
        missing = run.results.not_measured.get("leakage")
        lines.append(f"Leakage: {missing or 'no images were uploaded, so none were compared'}.")
    sends = run.privacy.leaves_site or run.style.sends or "see the page of the method"
    lines.append(f"What leaves a site: {_escaped(sends)}.")
    gone = run.results.forgotten
    if gone:
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
        (
            "time",
            f"{seconds_text(run.timing.total_s)} on {plain(run.env.get('device', 'not recorded'))}",
        ),
    ]
    left_out = "Compute is convolutions and linear layers. The look through a lens, averages, sums and solvers are not counted."
    return "## Cost\n\n" + _table("", ("", ""), rows) + f"\n\n{left_out}"


def _limits(run: RunRecord) -> str:
    num = sum(len(task.classes) for task in run.tasks)
    lines = [
        f"- It knows the {count(num, 'class')} above and names one of them for any picture, also of something else."
        if not any(task.domain for task in run.tasks)
        else "- It names one of its classes for any picture, also of something else.",
        "- Accuracy was measured on test images like the training images; on other cameras or places expect less."
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
    command = f"```\n{run.command}\n```\n\n" if run.command else ""
    return f"## Again\n\n{command}Made with {versions}; card written by rescene {__version__}."


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[TableEntry, ...]]) -> str:
    return render(TableGrid(title, columns, tuple(rows)), "markdown").strip()


def _numbers(values: Sequence[float]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]:.4f}"
    return ", ".join(f"{value:.4f}" for value in values)


def _escaped(text: object) -> str:
    return plain(text, 1000).replace("|", "\\|").replace("<", "&lt;")
