"""A model card in Markdown, written from a finished run: what the model is, how good, at what price, and its limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rescene import __version__
from rescene.errors import RunError, command
from rescene.report.formats import Cell, Entry, Grid, render
from rescene.report.look import look_of, plain
from rescene.report.runs import Run, load_run, number, table
from rescene.report.words import bytes_text, count, flops_text, percent, seconds_text, simulated

NAME = "MODEL_CARD.md"


def write_card(folder: Path, out: Path | None = None) -> Path:
    """MODEL_CARD.md in the run folder, or in ``out``."""
    path = (out or folder) / NAME
    path.write_text(model_card(load_run(folder)), encoding="utf-8")
    return path


def model_card(run: Run) -> str:
    """The card of a finished run; every number is one of results.json."""
    if not run.finished:
        raise RunError("E408", "no finished run here", where=str(run.folder), fix=command("resume", run.folder))
    title = f"# {look_of(run.method).label} on {plain(run.env.get('data', 'images'))}"
    parts = [_model, _data, _accuracy, _privacy, _cost, _limits, _again]
    return "\n\n".join([title, *(part(run) for part in parts)]) + "\n"


def _model(run: Run) -> str:
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
        ("trained with", f"{look_of(run.method).label}, task by task, seed {run.seed}"),
    ]
    return _table("", ("", ""), rows)


def _data(run: Run) -> str:
    sites = table(run.config, "federation")
    lines = [
        f"{plain(run.env.get('data', 'not recorded'))}, split over {sites.get('num_clients', '?')} sites "
        f"({sites.get('per_round', '?')} in each of {sites.get('num_rounds', '?')} rounds per task, "
        f"partition {sites.get('partition', '?')}, beta {sites.get('beta', '?')}).",
        *(f"- {_escaped(note)}" for note in run.env.get("data_notes") or ()),
        f"- Fingerprint of the images: `{plain(run.env.get('data_fingerprint', 'not recorded'))}`",
    ]
    return "## Data\n\n" + "\n".join([lines[0], "", *lines[1:]])


def _accuracy(run: Run) -> str:
    final = run.matrix[-1] if len(run.matrix) else []
    rows = [
        (
            str(task.get("index")),
            plain(task.get("domain") or ", ".join(map(str, task.get("classes") or ())), 400),
            str(task.get("train_size") if task.get("train_size") is not None else "at the sites"),
            str(task.get("test_size")),
            Cell(float(value), digits=1),
        )
        for task, value in zip(run.tasks, final, strict=False)
    ]
    words = (
        f"After the last task the model names {percent(run.number('aa'))} % of all test images rightly (AA), "
        f"{percent(run.number('aia'))} % on average over the tasks as they came (AIA); it forgot "
        f"{percent(run.number('forgetting'))} points. The worst task is at {percent(run.number('worst_task'))} %. One run, one seed."
    )
    names = ("task", "classes", "training images", "test images", "accuracy, %")
    return f"## Accuracy\n\n{words}\n\n" + _table("", names, rows)


def _privacy(run: Run) -> str:
    lines = [
        _escaped(run.privacy.get("statement") or "The run recorded no privacy statement: take it for not private.")
    ]
    found = run.leakage
    if found:
        share, median = number(found.get("near_copies")), number(found.get("nearest_psnr_median_db"))
        lines.append(
            f"Of {found.get('num_images')} {run.images} images {percent(100 * (share or 0.0), 0)} % are near-copies (PSNR above "
            f"30 dB) of a real training image and {found.get('exact_copies')} are exact copies; the median PSNR to the nearest "
            f"real image is {percent(median)} dB."
        )
    else:
        missing = table(run.results, "not_measured").get("leakage")
        lines.append(f"Leakage: {missing or 'no images were uploaded, so none were compared'}.")
    sends = run.privacy.get("leaves_site") or look_of(run.method).sends or "see the page of the method"
    lines.append(f"What leaves a site: {_escaped(sends)}.")
    gone = [row for row in run.results.get("forgotten") or () if isinstance(row, dict)]
    if gone:
        names = ", ".join(_escaped(row.get("name") or row.get("client")) for row in gone)
        done = (
            "Its sums were subtracted and the model was solved anew: it is the model that never met the site."
            if all(row.get("exact") is True for row in gone)
            else "Its uploads were removed and the model was trained anew; this is no proof of unlearning."
        )
        lines.append(f"Withdrawn: site {names}. {done}")
    return "## Privacy\n\n" + "\n\n".join(lines)


def _cost(run: Run) -> str:
    cost = table(run.cost, "measured")
    rows = [
        ("upload of a site per round", bytes_text(run.upload_bytes)),
        ("download of a site per round", bytes_text(number(cost.get("downlink_bytes_per_message")))),
        ("compute of all sites", flops_text(number(cost.get("client_flops")))),
        ("compute of the server", flops_text(number(cost.get("server_flops")))),
        (
            "time",
            f"{seconds_text(number(run.timing.get('total_s')))} on {plain(run.env.get('device', 'not recorded'))}",
        ),
    ]
    return "## Cost\n\n" + _table("", ("", ""), rows)


def _limits(run: Run) -> str:
    num = sum(len(task.get("classes") or ()) for task in run.tasks)
    lines = [
        f"- It knows the {count(num, 'class')} above and names one of them for any picture, also of something else."
        if not any(task.get("domain") for task in run.tasks)
        else "- It names one of its classes for any picture, also of something else.",
        "- Accuracy was measured on test images like the training images; on other cameras or places expect less.",
        "- Sites were simulated from one data set." if table(run.results, "config").get("sites") is None else "",
        f"- Trained under simulated faults: {'; '.join(simulated(run))}." if simulated(run) else "",
        "- A research model: do not decide about people with it without a test of your own.",
    ]
    return "## Limits\n\n" + "\n".join(line for line in lines if line)


def _again(run: Run) -> str:
    versions = (
        f"rescene {run.env.get('rescene', '?')}, torch {run.env.get('torch', '?')}, Python {run.env.get('python', '?')}"
    )
    command = f"```\n{run.command}\n```\n\n" if run.command else ""
    return f"## Again\n\n{command}Made with {versions}; card written by rescene {__version__}."


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[Entry, ...]]) -> str:
    return render(Grid(title, columns, tuple(rows)), "markdown").strip()


def _numbers(values: Sequence[float]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]:.4f}"
    return ", ".join(f"{value:.4f}" for value in values)


def _escaped(text: object) -> str:
    return plain(text, 1000).replace("|", "\\|").replace("<", "&lt;")
