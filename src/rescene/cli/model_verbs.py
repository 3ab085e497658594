"""Use a model: export, predict, serve."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rescene.cli.shared_options import AsJson, Plugin, Quiet, load_plugins
from rescene.cli.terminal import print_rows, until_stopped, verb
from rescene.core.errors import ConfigError, DataError, command

if TYPE_CHECKING:
    from rescene.use import Model, Prediction

FORMATS = ("table", "json", "csv")

Trust = Annotated[bool, typer.Option("--trust", help="open a .pt2 file, which can run code of the person who made it")]


@verb
def export(
    folder: Annotated[Path, typer.Argument(help="finished run folder")],
    to: Annotated[
        str, typer.Option("--to", help="safetensors, onnx, pt2; separate several with commas")
    ] = "safetensors",
    out: Annotated[Path | None, typer.Option("--out", help="folder for the files (default: RUN/export)")] = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as a file with its classes and normalisation, check it, and write its model card."""
    from rescene.cli.progress import watch_looks
    from rescene.report.summary import write_card
    from rescene.use import export as export_model

    load_plugins(plugin)
    target = out or folder / "export"
    with watch_looks(quiet=as_json):
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
    top: Annotated[int, typer.Option("--top", min=1, help="how many classes per image")] = 3,
    kind: Annotated[str, typer.Option("--format", help="table, json or csv")] = "table",
    gallery: Annotated[Path | None, typer.Option("--gallery", help="also write an HTML page with the images")] = None,
    trust: Trust = False,
    plugin: Plugin = None,
) -> None:
    """Name what is in images: the likeliest classes and the model's confidence."""
    from rescene.cli.progress import watch_looks
    from rescene.use import find_images, mending, open_model
    from rescene.use import predict as answer

    if kind not in FORMATS:
        raise ConfigError("E140", f"no such format: {kind}", where="--format", fix=f"one of: {', '.join(FORMATS)}")
    load_plugins(plugin)
    opened, files = open_model(model, trust), find_images(images)
    with watch_looks(quiet=kind == "json"):
        answers, unreadable = answer(opened, files, top)
    for path, why in unreadable.items():
        print(f"warning[W203] left out, cannot be read as an image: {path} ({why})", file=sys.stderr)
    if not answers:
        raise DataError("E203", "none of the images could be read", fix=mending(unreadable))
    _print(answers, kind)
    if gallery:
        print(f"Gallery: {_write_gallery(opened, answers, gallery)}", file=sys.stderr)


@verb
def serve(
    model: Annotated[Path, typer.Argument(help="finished run folder, or a .safetensors, .onnx or .pt2 file")],
    host: Annotated[
        str, typer.Option("--host", help="address to listen on; 0.0.0.0: all, so that others can ask")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free")] = 8000,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="a name that the service may be called by; may be repeated")
    ] = None,
    max_mb: Annotated[float, typer.Option("--max-mb", min=0.001, help="largest file of a picture, in MB")] = 20.0,
    max_pixels: Annotated[int, typer.Option("--max-pixels", min=1, max=2**27, help="most pixels of a picture")] = 2**26,
    container: Annotated[
        Path | None,
        typer.Option("--container", help="write a folder that builds the service as a container; serve nothing"),
    ] = None,
    trust: Trust = False,
    plugin: Plugin = None,
    quiet: Quiet = False,
) -> None:
    """Answer pictures over HTTP: a page to drop a picture on, and JSON for programs."""
    from rescene.engine import use_all_cores
    from rescene.use import Service, open_model, serving, write_container

    if container is not None:
        print(*write_container(model, container, trust), sep="\n")
        print("The first lines of the Containerfile say how to build and run it.")
        return
    load_plugins(plugin)
    use_all_cores()
    service = Service(open_model(model, trust), int(max_mb * 2**20), max_pixels, frozenset(allow_host or ()))
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(
            "note: whoever can reach this machine can send pictures; there is no password and no encryption",
            file=sys.stderr,
        )
    say = (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    with serving(service, host, port, say) as address:
        print(f"{address}  ({len(service.model.classes)} classes; Ctrl-C stops it)", flush=True)
        until_stopped()
    print("stopped", file=sys.stderr)


def _print(answers: list[Prediction], kind: str) -> None:
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
    """Columns class, confidence, class_2, confidence_2 and so on; in a table, both in one cell."""
    row: dict[str, str] = {}
    for i, (name, value) in enumerate(answer.top, start=1):
        suffix = "" if i == 1 else f"_{i}"
        if kind == "csv":
            row |= {f"class{suffix}": name, f"confidence{suffix}": f"{value:.4f}"}
        else:
            row["class" if i == 1 else f"{i}."] = f"{name} {100 * value:.0f} %"
    return row


def _write_gallery(model: Model, answers: list[Prediction], out: Path) -> Path:
    from rescene.report.galleries import GalleryAnswer, write_gallery

    shown = [GalleryAnswer("/".join(a.file.parts[-2:]), a.top, a.pixels.numpy()) for a in answers]
    return write_gallery(shown, model.path.name, model.classes, out)
