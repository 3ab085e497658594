"""Mistakes in the code of a method, told as errors that name the method, the verb and the line in its file (E328).

What goes wrong in a client's verb belongs to that site, and the run may go on without it (E321, ``engine.transport``). An answer or a
state that is not what the contract says is wrong at every site, so it stops the run at once.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rescene.core.errors import ResceneError, RunError, for_people, kind_of
from rescene.core.plugins import from_outside, own_frame
from rescene.core.record import check_tree
from rescene.methods import Method


@contextmanager
def naming_mistakes(method: Method, verb: str) -> Iterator[None]:
    """Inside, the server works as the method says. What this machine refuses, and what goes wrong in our code, is raised as it is."""
    try:
        yield
    except ResceneError:
        raise
    except Exception as error:
        if for_people(error) is not error or not (from_outside(type(method)) or own_frame(error)):
            raise
        what, where = f"the method {method.name} failed in {verb}: {first_line(error)}", own_frame(error)
        where = where or _definition(method, verb)
        raise RunError("E328", what, where=where, fix=f"{_mend(where)}; --debug shows the traceback") from error


def checked_answer(method: Method, verb: str, answer: Any) -> Any:
    """What a client's verb returned, if it is a pair of what the client sends and what it remembers."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Mapping):
        return answer
    why = "the answer is a dict, and the memory is what this site is given in its next round (None: nothing)"
    raise _wrong(method, verb, "(answer, memory)", answer, why)


def checked_payload(method: Method, verb: str, payload: Any) -> Any:
    """What a server's verb returned for the sites, if it is a dict."""
    if isinstance(payload, Mapping):
        return payload
    raise _wrong(method, verb, "a dict", payload, "it is what every site of the round receives")


def checked_state(method: Method, verb: str, state: Any) -> Any:
    """What a server's verb returned, if it is a state that can be saved, with the global model."""
    if not isinstance(getattr(state, "model", None), Mapping):
        why = "a state is a record whose `model` is a dict of tensors, as in `replace(state, model=...)`"
        raise _wrong(method, verb, "the server's state", state, why)
    with naming_mistakes(method, verb):
        check_tree(state, "the state")
    return state


def _wrong(method: Method, verb: str, wanted: str, found: Any, why: str) -> RunError:
    what = f"{verb} of the method {method.name} must return {wanted}, it returned {_kind(found)}"
    where = _definition(method, verb)
    return RunError("E328", what, where=where, why=why, fix=_mend(where))


def _mend(where: str) -> str:
    """With the place again: the table of a sweep's failures shows the fix alone."""
    return f"mend it ({where}), then start the run again in another folder (--out)"


def _kind(value: Any) -> str:
    """
    >>> _kind({}), _kind(None), _kind(3), _kind(({}, 2, 3))
    ('a dict', 'None', 'an int', '(dict, int, int)')
    """
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return "None" if value is None else kind_of(value)


def _definition(method: Method, verb: str) -> str:
    """Where the verb is written; for one that the method did not write, where the method is."""
    function = inspect.unwrap(getattr(type(method), verb))
    if not from_outside(function) and from_outside(type(method)):
        with suppress(TypeError, OSError):  # a class that was typed into a notebook has no file
            return f"{Path(inspect.getfile(type(method))).name}, class {type(method).__name__}"
        return f"class {type(method).__name__}"
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} in {verb}"


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def place_of(error: BaseException) -> str:
    """The innermost line of a user's own file that an error came through; without one, the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return own_frame(error) or f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
