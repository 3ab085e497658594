"""Methods, networks, data sets and observers of one's own, loaded from a file (``--plugin my_method.py``)."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rescene.core.errors import ConfigError
from rescene.core.own_code import remember_source

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_COUNT = "__rescene_registered__"
_registered: list[str] = []  # modules outside of this package that registered something, once for each thing


def note_registered(thing: object) -> None:
    """The register functions say here what they took, so that a plug-in that registers nothing is noticed."""
    if from_outside(thing):
        _registered.append(str(thing.__module__))


def from_outside(thing: object) -> bool:
    """Whether a class or function was written outside of this package."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] != __name__.partition(".")[0]


def own_frame(error: BaseException) -> str:
    """The innermost line that an error came through in a module that registered something; empty if it came through none."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [(frame.f_code, line) for frame, line in frames if frame.f_globals.get("__name__") in _registered]
    return f"{Path(own[-1][0].co_filename).name}:{own[-1][1]} in {own[-1][0].co_name}" if own else ""


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """What installed packages announce under this name. A process asks once: the answer takes 20 ms and stays the same."""
    from importlib.metadata import entry_points  # a tenth of the time that --help takes

    return tuple(entry_points(group=group))


def load_plugin(path: Path) -> int:
    """Import a file that registers methods, networks, data sets or observers; it may import files beside it.

    Returns how many things it registered; for a file that was imported before, how many that was then.
    """
    if not path.is_file():
        raise ConfigError("E113", f"there is no plug-in {path}", fix="rescene method new NAME writes one")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError("E113", f"{path} is not a Python file")
    if path.stem in sys.modules:
        return int(getattr(sys.modules[path.stem], _COUNT, 1))
    before, module = len(_registered), importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # records are saved by module name, so a resumed run must find it there
    remember_source(module)  # now: the file may be edited while runs go on
    beside = str(path.resolve().parent)
    sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        del sys.modules[path.stem]
        raise ConfigError(
            "E113", f"the plug-in {path} fails: {type(error).__name__}: {error}", fix="--debug shows where"
        ) from error
    finally:
        sys.path.remove(beside)
    setattr(module, _COUNT, len(_registered) - before)
    return len(_registered) - before
