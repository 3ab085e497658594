"""First steps: demo, list, data, doctor."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.shared_options import AsJson, Overrides, Plugin, Quiet, verb_group
from rescene.cli.terminal import interruptible, print_rows
from rescene.core.errors import ConfigError, ResceneError, command, with_guess
from rescene.core.json_files import Row
from rescene.core.run_state import runs_root

if TYPE_CHECKING:
    from rescene.bench import SpeedFigure
    from rescene.data import Dataset

Layout = Annotated[
    str, typer.Option("--layout", help="what the first folders are, if unclear: classes, domains, sites, sites-domains")
]
Columns = Annotated[
    str, typer.Option("--columns", help="what the columns of a table are: path=FILE,label=SPECIES,site=WARD,...")
]
SHEET_COLUMNS, SHEET_ROWS = 12, 8  # of a contact sheet
ENOUGH_DISK_GB = 2.0
EXTRAS = {
    "deploy": ("flwr", "federations across sites"),
    "privacy": ("dp_accounting", "accounting for sampled records"),
    "onnx": ("onnxruntime", "rescene export --to onnx"),
    "tensorboard": ("tensorboard", "rescene run --log tensorboard"),
    "wandb": ("wandb", "rescene run --log wandb"),
    "mlflow": ("mlflow", "rescene run --log mlflow"),
    "trackio": ("trackio", "rescene run --log trackio"),
    "slurm": ("submitit", "rescene sweep --slurm"),
    "search": ("optuna", "rescene sweep --search"),
}
BUFFERS = {
    "temporal": "herd towards the mean of the recent rounds (the paper)",
    "full-pool": "herd towards the mean of all rounds",
    "earliest": "the first B surrogates of a class",
    "latest": "the last B surrogates of a class",
    "random": "B surrogates at random",
    "keep-all": "everything: full accumulation",
    "none": "nothing is kept of finished tasks",
}
MOST_CLASSES = 40  # listed on a terminal; --json has them all
SHEET = "contact-sheet"
REASON = (
    "recipe own: sites send sums of what a frozen lens sees, and nothing is trained. On 2,000 photographs it was the most "
    "accurate of the recipes that were tried (docs/own-images.md). Exact sums are for a simulation like this one: they guarantee nothing"
)
WHY_SMALL = (
    "larger pictures give more numbers through the lens of recipe own, which cost time and, behind a guarantee, more noise. "
    "data.image_size=SIDE takes another size"
)
data_app = verb_group("Look at, prepare and check image data.")


def demo(
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="folder for the runs (default: runs/demo)")] = None,
    privacy: Annotated[
        bool,
        typer.Option(
            "--privacy",
            help="compare three uploads: near-copies (demo), drawn pictures without a guarantee (waves), "
            "drawn pictures with one (waves-dp)",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Compare three methods on built-in images: minutes on a laptop, with a report."""
    from rescene.cli.running import run_demo

    interruptible(lambda: run_demo(list(overrides or []), out, quiet, privacy))


def list_things(
    what: Annotated[str, typer.Argument(help="methods, recipes, datasets, models or buffers")],
    verified: Annotated[
        bool, typer.Option("--verified", help="of methods: what each was compared with, how close, and where")
    ] = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """List what you can choose: methods, recipes, datasets, models or buffers."""
    if verified and what != "methods":
        raise ConfigError("E109", f"--verified says nothing of {what}", fix="rescene list methods --verified")
    if what not in LISTS:
        raise ConfigError("E109", with_guess(f"cannot list {what!r}", what, LISTS), why=", ".join(LISTS))
    rows = LISTS[what]()
    if what == "methods" and not as_json:
        _print_methods(rows, verified)
    else:
        print_rows(rows, as_json)
    if what == "recipes" and not as_json:
        print("The paper's tables are recipes of many cells: rescene paper list")


def _methods() -> list[Row]:
    from dataclasses import asdict

    from rescene.methods import method_class, method_names

    classes = [method_class(name) for name in method_names()]
    return [
        {
            "name": c.name,
            "title": c.title,
            "paper": c.paper,
            "leaves the site": c.leaves_site,
            "leaves the site, in short": c.leaving_in_short(None),
            "client remembers": c.remembers,
            "verified": [asdict(one) for one in c.verifications()],
        }
        for c in classes
    ]


def _print_methods(rows: Sequence[Row], verified: bool) -> None:
    """A table with the short words, or what each method was compared with: a block for each, because names of tests are long."""
    from rescene.core.verification import NOT_VERIFIED, Verified, in_short

    if not verified:
        shown = [
            {key: row[key] for key in ("name", "title", "paper")}
            | {"leaves the site": row["leaves the site, in short"]}
            | {"verified against": in_short([Verified(**one) for one in row["verified"]])}
            for row in rows
        ]
        print_rows(shown)
        print("How close and where: rescene list methods --verified. All of one method: rescene method explain NAME")
        return
    for row in rows:
        print(f"{row['name']}" if row["verified"] else f"{row['name']}: {NOT_VERIFIED}")
        for one in row["verified"]:
            print(f"  {one['against']}: {one['close']}\n    {one['where']}")


def _recipes() -> list[Row]:
    from rescene.config import recipe_names, recipe_text

    return [{"name": n, "about": recipe_text(n).splitlines()[0].lstrip("# ")} for n in recipe_names()]


def _datasets() -> list[Row]:
    from rescene.data import available, own_datasets

    own = [{"name": name, "found": "plug-in"} for name in own_datasets()]
    return [*available(), *own]


def _models() -> list[Row]:
    from rescene.nets import NAMES, Arch, forward_flops, own_names, state_bytes

    archs = [(name, Arch(name, 32)) for name in (*NAMES, *filter(_takes_small_pictures, own_names()))]
    return [
        {
            "name": name,
            "MB at 100 classes": round(state_bytes(arch.skeleton(100).state_dict()) / 1e6, 2),
            "GFLOP per image at 32 px": round(forward_flops(arch, 100) / 1e9, 3),
        }
        for name, arch in archs
    ]


def _takes_small_pictures(name: str) -> bool:
    """Whether a plug-in's network can be measured at 32 pixels; one that cannot is named in a warning."""
    from rescene.nets import own_model

    try:
        own_model(name).taken_apart(32)
    except ConfigError as error:
        print(f"{name}: not measured at 32 px: {error.why}", file=sys.stderr)
        return False
    return True


LISTS: dict[str, Callable[[], list[Row]]] = {
    "methods": _methods,
    "recipes": _recipes,
    "datasets": _datasets,
    "models": _models,
    "buffers": lambda: [{"name": name, "keeps": text} for name, text in BUFFERS.items()],
}


def columns_of(text: str) -> dict[str, str]:
    """Role -> column, from ``label=species,site=ward``."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for role, equals, name in pairs:
        if not (role.strip() and equals and name.strip()):
            why = f"{role!r} is not role=column"
            raise ConfigError("E109", "cannot read --columns", why=why, fix="--columns path=file_name,label=species")
    return {role.strip(): name.strip() for role, _, name in pairs}


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the known data sets and where they were found."""
    print_rows(_datasets(), as_json)


@data_app.command("inspect")
def data_inspect(
    path: Annotated[str, typer.Argument(help="folder, file, or name of a known data set")],
    layout: Layout = "auto",
    columns: Columns = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="folder for the contact sheet (default: runs/inspect/NAME)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in your images and what is odd, draw a contact sheet, and print the command that suits them."""
    from rescene.data import inspect, load_readable
    from rescene.data.inspection import found_files
    from rescene.data.loading import detect

    here, roles = Path(path).exists(), columns_of(columns)
    dataset, told = load_readable("auto" if here else path, path if here else None, layout, columns=roles)
    found = inspect(dataset, told)
    found["files"] = found_files(Path(path)) if here and detect(Path(path)) in ("folder", "office31") else {}
    found["tasks"] = _proposed_tasks(dataset, found)
    given = _given(path, here, layout, roles, any(warning.code == "W203" for warning in told))
    given += ["data.held_out=last"] if dataset.has_last_as_test else []
    found |= _advice(dataset, given, found["in_series"])
    found["lines"] = _file_facts(found)
    found["odd"] = [text for text in found["warnings"] if not (found["files"] and text.startswith("not read: "))]
    if not as_json or out is not None:
        found["sheet"] = _write_sheet(dataset, found, out or runs_root() / "inspect" / dataset.name)
    if as_json:
        print(json.dumps(found))
    else:
        _print_inspection(found)


def _given(path: str, here: bool, layout: str, columns: Mapping[str, str], skip: bool) -> list[str]:
    """What the command must say about the data."""
    words = [f"data.path={path}" if here else f"data.name={path}"]
    words += [f"data.layout={layout}"] if layout != "auto" else []
    words += [f"data.columns.{role}={name}" for role, name in columns.items()]
    return words + (["data.skip_unreadable=true"] if skip else [])


def _advice(dataset: Dataset, given: Sequence[str], in_series: bool) -> Row:
    """The command that suits the images and why, and the same with a guarantee; no command where none makes sense."""
    from rescene.config import resolve
    from rescene.data.inspection import propose_settings, why_not
    from rescene.engine import pick_device
    from rescene.lens import seconds_to_look

    problem = why_not(dataset)
    if problem:
        nothing = dict.fromkeys(("command", "apart", "guarantee"), "")
        return {"reason": problem, **nothing, "run_image_size": None, "looking_s": 0.0}
    exact, private = (command("run", "own", *given, *propose_settings(dataset, exact)) for exact in (True, False))
    own = resolve("own").recipe
    side = own.images.image_size or dataset.image_size
    num = len(dataset.train) + len(dataset.test)
    seconds = round(seconds_to_look(str(own.model.lens), side, num, pick_device("auto")), 2)
    apart = f"{exact} data.held_out=last" if in_series else ""
    commands = {"command": exact, "apart": apart, "guarantee": private}
    return {"reason": REASON, **commands, "run_image_size": side, "looking_s": seconds}


def _file_facts(found: Row) -> list[str]:
    """Facts about the files in sentences."""
    how = "the last of" if found["split"].endswith("last") else "drawn from"
    split = "as given" if found["split"] == "given" else f"{how} each class ({found['split']})"
    size, files = f"{found['image_size']}x{found['image_size']} pixels", found["files"]
    lines = []
    if files:
        kinds = ", ".join(f"{num:,} {kind}" for kind, num in files["found"].items())
        lines.append(f"files: {kinds or 'no picture'}")
        lines += (
            [f"sizes: {', '.join(f'{name} {text}' for name, text in files['sizes'].items())}"] if files["sizes"] else []
        )
        lines += [_not_read(row) for row in files["not_read"]]
    return [*lines, f"read for this look at {size}; test images {split}", *found["notes"], *_run_size(found)]


def _run_size(found: Row) -> list[str]:
    """The size at which the recommended run reads the pictures, and why; nothing where no run is recommended."""
    side = found["run_image_size"]
    if side is None:
        return []
    if side == found["image_size"]:
        return [f"the recommended run reads them at {side}x{side} pixels, too"]
    return [f"the recommended run reads them at {side}x{side} pixels: {WHY_SMALL}"]


def _not_read(row: Row) -> str:
    return (
        f"not read: {row['count']:,} {row['what']} ({', '.join(row['examples'])}{', ...' if row['count'] > 3 else ''})"
    )


def _write_sheet(dataset: Dataset, found: Row, folder: Path) -> list[str]:
    """PNG and HTML; both hold the pictures themselves."""
    from rescene.data.inspection import contact_sheet
    from rescene.report.galleries import write_inspection

    folder.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    contact_sheet(dataset).save(stream, "PNG")
    png = folder / f"{SHEET}.png"
    png.write_bytes(stream.getvalue())
    return [str(png), str(write_inspection(found, stream.getvalue(), folder / f"{SHEET}.html"))]


def _print_inspection(found: Row) -> None:
    from rescene.cli.costing import duration

    print(f"{found['name']}: {found['num_train']:,} training and {found['num_test']:,} test images")
    for line in found["lines"]:
        print(line)
    for one, many in (("class", "classes"), ("site", "sites"), ("domain", "domains")):
        if rows := found[many]:
            print(f"\n{len(rows)} {one if len(rows) == 1 else many}")
            print_rows(rows[:MOST_CLASSES])
            if len(rows) > MOST_CLASSES:
                print(f"... and {len(rows) - MOST_CLASSES} more (--json)")
    if found["tasks"]:
        print("\nproposed tasks")
        print_rows([row | {"task": row["task"] + 1} for row in found["tasks"]])
    print("\nwarnings" + (": none" if not found["odd"] else "".join(f"\n  {text}" for text in found["odd"])))
    print(f"\ncontact sheet: {' and '.join(found['sheet'])}")
    print(f"\n{found['reason']}")
    if found["command"]:
        print(f"run it: {found['command']}")
        if found["apart"]:
            print(f"the same with new objects in the test, if names are in the order of the series: {found['apart']}")
        print(
            f"looking at all images through the lens takes about {duration(found['looking_s'])} on this machine, once"
        )
        print(f"\nwith a guarantee of epsilon 8 for each image, as real sites would run it; {found['noise']}")
        print(f"run it: {found['guarantee']}")


def _proposed_tasks(dataset: Dataset, found: Row) -> list[Row]:
    """The proposed tasks. If the data set cannot be split so, the warnings say why."""
    from rescene.data import plan_tasks

    try:
        planned, tasks = plan_tasks(dataset, **found["proposed_tasks"])
    except ResceneError as error:
        found["warnings"].append(f"{error.what} ({error.fix})" if error.fix else error.what)
        return []
    return [
        {
            "task": task.index,
            "brings": planned.domains[task.domain]
            if task.domain is not None
            else ", ".join(planned.classes[c] for c in task.classes),
            "train": len(task.train),
            "test": len(task.test),
        }
        for task in tasks
    ]


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, tinyimagenet, office31, folder, ...")],
    source: Annotated[Path, typer.Option("--from", help="archive or folder to read")],
    out: Annotated[
        Path | None, typer.Option("--out", help="folder for the prepared file (default: the user cache)")
    ] = None,
    layout: Layout = "auto",
    columns: Columns = "",
    held_out: Annotated[
        str | None,
        typer.Option(
            "--held-out",
            help="drawn or last: as data.held_out of the runs that will read the file (default: last for office31, else drawn)",
        ),
    ] = None,
) -> None:
    """Decode a data set once, so that later runs start at once."""
    from rescene.data import prepare

    print(prepare(name, source, out, held_out=held_out, layout=layout, columns=columns_of(columns)))


@data_app.command("verify")
def data_verify(
    name: Annotated[str, typer.Argument(help="name of a data set")],
    path: Annotated[Path | None, typer.Option("--path", help="where it is, if not in the usual places")] = None,
    layout: Layout = "auto",
    as_json: AsJson = False,
) -> None:
    """Check counts, unreadable files and duplicates; exit code 5 if something is wrong."""
    from rescene.data import verify

    rows = verify(name, path, layout)
    print_rows(rows, as_json)
    if any(row.get("problem") for row in rows):
        raise typer.Exit(5)


@data_app.command("draw")
def data_draw(
    what: Annotated[str, typer.Argument(help="leaves: the procedural pictures that the lens was made from")],
    out: Annotated[Path, typer.Option("--out", help="folder for the contact sheet")],
    seed: Annotated[int, typer.Option(help="seed of the pictures")] = 0,
) -> None:
    """Draw a contact sheet of procedural pictures."""
    import torch
    from PIL import Image

    from rescene.lens.leaves import VERSION, draw_leaves

    if what != "leaves":
        raise ConfigError("E109", f"cannot draw {what!r}", fix="rescene data draw leaves --out DIR")
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_leaves(SHEET_COLUMNS * SHEET_ROWS, torch.Generator().manual_seed(seed))
    side = pictures.shape[-1]
    grid = pictures.reshape(SHEET_ROWS, SHEET_COLUMNS, 3, side, side).permute(0, 3, 1, 4, 2)
    path = out / f"leaves-v{VERSION}-seed{seed}.png"
    Image.fromarray(grid.reshape(SHEET_ROWS * side, SHEET_COLUMNS * side, 3).numpy()).save(path)
    print(f"{path}: {len(pictures)} pictures of {side} x {side} pixels")


def doctor(
    speed: Annotated[bool, typer.Option("--speed", help="measure how fast this machine runs the basic steps")] = False,
    device: Annotated[str, typer.Option("--device", help="with --speed: auto, cpu, cuda or cuda:N")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="with --speed: write the figures as JSON")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, device, data, disk, extras; exit code 5 if something needs fixing."""
    if speed:
        measure_speed(device, out, as_json)
        return
    rows = [_python(), _torch(), _device(), _disk(), _writable(), *_data(), *_extras()]
    print_rows(rows, as_json)
    print_verdict(rows, as_json)


def print_verdict(rows: list[Row], as_json: bool) -> None:
    """Say how many checks failed; exit code 5 if one did."""
    problems = sum(bool(row["problem"]) for row in rows)
    if not as_json:
        print(f"\n{problems} of {len(rows)} checks need something done" if problems else "\nall is well")
    if problems:
        raise typer.Exit(5)


def _row(check: str, found: str, problem: str = "", fix: str = "") -> Row:
    return {"check": check, "found": found, "problem": problem, "fix": fix if problem else ""}


def _python() -> Row:
    old = "older than 3.11" if sys.version_info < (3, 11) else ""
    return _row("python", platform.python_version(), old, "install Python 3.11 or newer")


def _torch() -> Row:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return _row("torch", torch.__version__, "older than 2.11" if version < (2, 11) else "", "pip install 'torch>=2.11'")


def _device() -> Row:
    import torch

    if torch.cuda.is_available():
        return _row("device", f"{torch.cuda.get_device_name()} ({torch.cuda.device_count()} GPU)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _row("device", f"CPU only, {cores} cores: enough for the demo and small nets; the paper's runs need a GPU")


def _disk() -> Row:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    low = "little room for checkpoints" if free < ENOUGH_DISK_GB else ""
    return _row("disk", f"{free:.1f} GB free here", low, "use --out on another disk")


def _writable() -> Row:
    root = runs_root()
    parent = root if root.exists() else Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=parent):
            return _row("run folder", str(root))
    except OSError as error:
        return _row("run folder", str(root), f"not writable: {error.strerror}", "set RESCENE_RUNS to a folder you own")


def _data() -> list[Row]:
    return [
        _row(f"data {row['name']}", str(row.get("found") or "not on this machine (optional)")) for row in _datasets()
    ]


def _extras() -> list[Row]:
    """Optional packages. A missing one is no problem."""
    return [
        _row(f"extra {name}", f"{'installed' if find_spec(module) else 'not installed (optional)'}: {use}")
        for name, (module, use) in EXTRAS.items()
    ]


def measure_speed(device_name: str, out: Path | None, as_json: bool) -> None:
    """Print a line per measurement while it goes, then a table or JSON."""
    from rescene.bench import measure, report
    from rescene.engine import pick_device, use_all_cores

    use_all_cores()
    device = pick_device(device_name)
    figures: list[SpeedFigure] = []
    for figure in measure(device):
        figures.append(figure)
        print(f"{figure.name}: {_value(figure)}", file=sys.stderr)
    found = report(device, figures)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(found))
        return
    print(f"{found['device']}, torch {found['torch']}, {found['threads']} threads")
    on_h200 = "H200" in found["device"]
    print_rows(
        [
            {
                "figure": f.name,
                "value": _value(f),
                **({"goal on an H200": f.goal} if on_h200 else {}),
                "of matrix rate": "" if f.share is None else f"{f.share:.0%}",
            }
            for f in figures
        ]
    )


def _value(figure: SpeedFigure) -> str:
    number = f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.3g}"
    return f"{number} {figure.unit}".strip()
