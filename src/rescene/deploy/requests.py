"""What a site does for a server: a client verb of the method, in a task and a round of the plan, and nothing else.

A request is looked at before an image is opened and before the ledger is; one outside its bounds changes nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from rescene.core.errors import RunError
from rescene.deploy.exchange import EVALUATE, HELLO, SUM_STEPS, Request
from rescene.engine import Experiment
from rescene.methods import Method
from rescene.privacy.ledger import End

VERB = ["self", "payload", "shard", "client_state", "rng"]
DIGEST = re.compile(r"[0-9a-f]{64}")
LONGEST_ADDRESS = 64


def check_request(request: Request, method: Method) -> None:
    """What can be said of a request without looking at any image; E374, or E346 for a verb that there is not."""
    numbers, place = (request.task, request.round), request.address
    if any(type(number) is not int for number in numbers) or request.task < 0 or request.round < -1:
        raise outside("its task and round are no places in a plan")
    if (
        not isinstance(place, tuple)
        or len(place) > LONGEST_ADDRESS
        or any(type(one) not in (str, int) for one in place)
    ):
        raise outside("its address is none")
    if request.state is not None and not (isinstance(request.state, str) and DIGEST.fullmatch(request.state)):
        raise outside("it does not name a memory")
    end = request.ledger
    if end is not None and not (isinstance(end, End) and type(end.entries) is int and isinstance(end.head, str)):
        raise outside("it does not name the end of a ledger")
    if not isinstance(request.lens, str) or not isinstance(request.session, str):
        raise outside("it does not name a lens or a sum")
    if request.verb in (HELLO, EVALUATE, *SUM_STEPS):
        return
    client_verb(method, request.verb)
    if request.verb == "client_round" and request.round < 0:
        raise outside("client_round belongs to a round")


def check_place(request: Request, experiment: Experiment) -> None:
    """Task and round are in the plan."""
    if request.task >= len(experiment.tasks):
        raise outside(f"the plan has {len(experiment.tasks)} tasks")
    num_rounds = experiment.rounds_told(experiment.tasks[request.task])
    if request.round >= num_rounds:
        raise outside(f"this task has {num_rounds} rounds")


def client_verb(method: Method, name: str) -> Callable[..., Any]:
    """The method's client verb of this name; nothing else can be called from outside."""
    known = isinstance(name, str) and name.isidentifier() and not name.startswith("_")
    found = getattr(type(method), name, None) if known else None
    if not inspect.isfunction(found) or list(inspect.signature(found).parameters) != VERB:
        raise RunError("E346", f"{method.title} has no client verb {name!r}")
    return getattr(method, name)  # type: ignore[no-any-return]


def outside(why: str) -> RunError:
    """The error for a request outside its bounds (E374)."""
    return RunError("E374", f"the request is refused: {why}")
