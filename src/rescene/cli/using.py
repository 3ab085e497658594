"""rescene export and rescene predict: from a finished run to something people use."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rescene.cli.frame import AsJson, verb
from rescene.errors import ConfigError, DataError, command

if TYPE_CHECKING:
    from rescene.use import Model, Prediction

FORMATS = ("table", "json", "csv")


@verb
def export(
    folder: Annotated[Path, typer.Argument(help="finished run folder")],
    to: Annotated[str, typer.Option("--to", help="safetensors, onnx, pt2; several with commas")] = "safetensors",
    out: Annotated[Path | None, typer.Option("--out", help="folder for the files (default: RUN/export)")] = None,
    as_json: AsJson = False,
) -> None:
    """A run's model as a file with classes and normalisation inside, checked against the original, and its card."""
    from rescene.cli.listing import print_rows
    from rescene.report.model_card import write_card
    from rescene.use import export as export_model

    target = out or folder / "export"
    rows = export_model(folder, [kind.strip() for kind in to.split(",")], target)
    card = write_card(folder, target)
    if as_json:
        print(json.dumps({"files": rows, "card": str(card)}))
        return
    print_rows(rows)
    print(f"Model card: {card}")
    trust = ["--trust"] if rows[0]["file"].endswith(".pt2") else []
    print(f"Try it: {command('predict', rows[0]['file'], 'IMAGES', *trust)}")


@verb
def predict(
    model: Annotated[Path, typer.Argument(help="finished run folder, or a .safetensors, .onnx or .pt2 file")],
    images: Annotated[list[Path], typer.Argument(help="image files, or folders that hold some")],
    top: Annotated[int, typer.Option("--top", min=1, help="classes per image")] = 3,
    kind: Annotated[str, typer.Option("--format", help="table, json or csv")] = "table",
    gallery: Annotated[Path | None, typer.Option("--gallery", help="also write an HTML page with the images")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="open a .pt2 file, which can run code of whoever made it")
    ] = False,
) -> None:
    """Name what is in images: the likeliest classes with the model's confidence."""
    from rescene.use import find_images, open_model
    from rescene.use import predict as answer

    if kind not in FORMATS:
        raise ConfigError("E140", f"no such format: {kind}", where="--format", fix=f"one of: {', '.join(FORMATS)}")
    opened, files = open_model(model, trust), find_images(images)
    answers, unreadable = answer(opened, files, top)
    for path, why in unreadable.items():
        print(f"warning[W203] left out, cannot be read as an image: {path} ({why})", file=sys.stderr)
    if not answers:
        raise DataError("E203", "none of the images could be read", fix="copy them again")
    _print(answers, kind)
    if gallery:
        print(f"Gallery: {_write_gallery(opened, answers, gallery)}", file=sys.stderr)


def _print(answers: list[Prediction], kind: str) -> None:
    from rescene.cli.listing import print_rows

    rows: list[dict[str, Any]] = [{"file": str(a.file)} | _numbered(a, kind) for a in answers]
    if kind == "json":
        print(
            json.dumps(
                [{"file": str(a.file), "top": [{"class": n, "confidence": v} for n, v in a.top]} for a in answers]
            )
        )
    elif kind == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print_rows(rows)


def _numbered(answer: Prediction, kind: str) -> dict[str, str]:
    """class, confidence, then class_2, confidence_2 and so on; in a table both in one cell."""
    row = {}
    for i, (name, value) in enumerate(answer.top, start=1):
        suffix = "" if i == 1 else f"_{i}"
        if kind == "csv":
            row |= {f"class{suffix}": name, f"confidence{suffix}": f"{value:.4f}"}
        else:
            row["class" if i == 1 else f"{i}."] = f"{name} {100 * value:.0f} %"
    return row


def _write_gallery(model: Model, answers: list[Prediction], out: Path) -> Path:
    from rescene.report.gallery import Answer, write_gallery

    shown = [Answer("/".join(a.file.parts[-2:]), a.top, a.pixels.numpy()) for a in answers]
    return write_gallery(shown, model.path.name, model.classes, out)
