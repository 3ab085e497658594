"""The verbs of `rescene lens`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import AsJson, verb
from rescene.errors import ConfigError

lens_app = typer.Typer(
    help="Look at the lenses, make one from procedural pictures, or take a network of your own.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@lens_app.command("list")
@verb
def lens_list(
    lenses: Annotated[
        list[str] | None, typer.Argument(help="names or files; without one, the lenses of the package")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Each lens with its hash, its size and what it was made from."""
    from rescene.cli.listing import print_rows
    from rescene.lens import BUILT_IN, open_lens

    print_rows([open_lens(name).about() for name in lenses or BUILT_IN], as_json)


@lens_app.command("seen")
@verb
def lens_seen(
    clear: Annotated[bool, typer.Option("--clear", help="remove all of it; the next run looks again")] = False,
    as_json: AsJson = False,
) -> None:
    """What lenses saw of the images of simulations, and lenses taken on first use: where it is kept, and how much."""
    from rescene.cli.listing import print_rows
    from rescene.lens.keeping import Kept, users_own
    from rescene.lens.lens import lens_folder

    rows = []
    for what, kept in (("features", users_own()), ("lenses", Kept(lens_folder()))):
        found = kept.files()
        rows.append({"kept": what, "files": len(found), "bytes": sum(size.st_size for _, size in found)})
        rows[-1] |= {"folder": str(kept.folder)} | ({"freed": kept.clear()} if clear else {})
    print_rows(rows, as_json)


@lens_app.command("take")
@verb
def lens_take(
    source: Annotated[str, typer.Argument(help="timm:NAME@CHECKPOINT, FILE.onnx or FILE.pt2")],
    out: Annotated[Path, typer.Option("--out", help="safetensors file to write")],
    made_from: Annotated[
        str | None, typer.Option(help="which images made the network; reports and model cards repeat it")
    ] = None,
    mean: Annotated[
        tuple[float, float, float], typer.Option(help="of each channel, for an ONNX program that takes floats")
    ] = (0, 0, 0),
    std: Annotated[tuple[float, float, float], typer.Option(help="of each channel, likewise")] = (1, 1, 1),
    trust: Annotated[bool, typer.Option("--trust", help="open a .pt2 file, which can run code")] = False,
) -> None:
    """Make a lens of a frozen network of your own. The file goes to every site."""
    from rescene.lens.lens import read_lens, take, write_content

    _check_out(out)
    write_content(take(source, made_from, trust, mean, std), out)
    print(f"{out}: {read_lens(out, out.stem).words()}")


def _check_out(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError("E137", "a lens is one .safetensors file", where=str(out), fix="--out my-lens.safetensors")


@lens_app.command("make")
@verb
def lens_make(
    out: Annotated[Path, typer.Option("--out", help="safetensors file to write")],
    seed: Annotated[int, typer.Option(help="everything random comes from it")] = 0,
    small: Annotated[bool, typer.Option("--small", help="a weak lens in minutes on a CPU, to try the way")] = False,
    steps: Annotated[int | None, typer.Option(help="training steps, in the place of the usual number", min=1)] = None,
) -> None:
    """Make a lens from procedural pictures only: about 15 minutes on a large GPU. The defaults made `leaves`."""
    import torch

    from rescene.lens.contrast import SMALL, Contrast
    from rescene.lens.leaves import VERSION
    from rescene.lens.lens import read_lens, write_lens
    from rescene.lens.making import SMALL_MEASURING, Measuring, make_lens

    _check_out(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contrast, measuring = (SMALL, SMALL_MEASURING) if small else (Contrast(), Measuring())
    contrast = contrast.taking(steps) if steps else contrast
    lens = make_lens(
        contrast, measuring, seed, device, lambda step, loss: print(f"step {step:,}  loss {loss:.3f}", flush=True)
    )
    made_from = (
        f"procedural pictures only (dead leaves, version {VERSION}, seed {seed}): {contrast.num_steps:,} steps of contrast on "
        f"{contrast.num_pictures:,} pictures, {measuring.num_patches:,} patches; no photograph"
    )
    write_lens(lens, made_from, out)
    made = read_lens(out, out.stem)
    print(f"{out}: {made.num_bytes:,} bytes, SHA-256 {made.sha256}")
