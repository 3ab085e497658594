"""The verbs of `rescene lens`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import AsJson, verb
from rescene.errors import ConfigError

lens_app = typer.Typer(
    help="Look at the lenses, or make one from procedural pictures.", no_args_is_help=True, rich_markup_mode=None
)


@lens_app.command("list")
@verb
def lens_list(as_json: AsJson = False) -> None:
    """Each lens with its hash, its size and what it was made from."""
    from rescene.cli.listing import print_rows
    from rescene.lens import BUILT_IN, open_lens

    print_rows([open_lens(name).about() for name in BUILT_IN], as_json)


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

    if out.suffix != ".safetensors":
        raise ConfigError("E137", "a lens is one .safetensors file", where=str(out), fix="--out my-lens.safetensors")
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
