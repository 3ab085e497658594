"""What every verb shares: options, errors as messages, interruption, plug-ins."""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rescene.cli.completion import complete_override, complete_recipe
from rescene.errors import ResceneError, ResceneWarning, for_people

if TYPE_CHECKING:
    from rich.status import Status

RecipeName = Annotated[
    str,
    typer.Argument(
        help="shipped recipe (rescene list recipes) or a .yaml/.toml/.json file", autocompletion=complete_recipe
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value overrides, e.g. federation.beta=0.1 seed=1", autocompletion=complete_override),
]
Out = Annotated[Path | None, typer.Option("--out", help="run folder (default: runs/<recipe>/<method>-s<seed>-<hash>)")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print results only")]
Plugin = Annotated[
    list[Path] | None, typer.Option("--plugin", help="Python file that registers a method; may be repeated")
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="cells at a time, side by side on one GPU")]
Log = Annotated[str, typer.Option("--log", help="also to tensorboard, wandb (offline), mlflow, trackio; with commas")]
Elsewhere = Annotated[
    bool, typer.Option("--elsewhere", help="go on although code or machine have changed; the results then say so")
]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C: the last committed round is safe."""


def _stop(error: ResceneError) -> NoReturn:
    if os.environ.get("RESCENE_DEBUG"):
        raise error
    print(error, file=sys.stderr)
    raise typer.Exit(error.exit_code)


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Errors meant for people become a message and an exit code."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            told = for_people(error)
            if not isinstance(told, ResceneError):
                raise
            _stop(told)

    return guarded


def warnings_for_people() -> None:
    """Our own warnings are printed without the line of code that gave them, as errors are."""
    warnings.formatwarning = _words


_usual = warnings.formatwarning


def _words(message: Any, *rest: Any, **more: Any) -> str:
    return f"{message}\n" if isinstance(message, ResceneWarning) else _usual(message, *rest, **more)


def busy(what: str) -> Status:
    """``with busy("counting") as status``: says on a terminal what takes a while, until it is done; elsewhere nothing."""
    from rescene.cli.terminal import console

    return console(stderr=True).status(f"{what} ...")


def load_plugins(paths: list[Path] | None) -> None:
    if paths:
        from rescene.cli.extending import load_plugin

        for path in paths:
            load_plugin(path)


def interruptible(work: Callable[[], int | None], again: str) -> None:
    """Ctrl-C and SIGTERM end the process politely; every finished round is already on disk. ``work`` may return an exit code."""

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        code = work()
    except KeyboardInterrupt as stop:
        print(f"\ninterrupted; every finished round is saved. Go on with: {again}", file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        raise typer.Exit(code)
