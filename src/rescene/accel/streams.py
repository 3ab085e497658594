"""Several pieces of work at a time on one GPU: a thread and a CUDA stream for each."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from rescene.accel.cuda_graph import TURN, lasting_stream

T = TypeVar("T")


def attempt(work: Callable[[Any], T], item: Any) -> T | Exception:
    """What ``work`` gives for this item, or the exception that stopped it."""
    try:
        return work(item)
    except Exception as error:
        return error


class Streams:
    """A fixed set of threads, so that what a thread has recorded (``rescene.accel.sgd_graph``) serves its later work too.

    Work begins after everything the caller has asked of the GPU so far, and an outcome is handed out when the GPU has
    finished it: tensors can pass from one side to the other without further care.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._local = device, threading.local()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="stream")

    def outcomes(self, work: Callable[[Any], T], items: Sequence[Any]) -> Iterator[T | Exception]:
        """One outcome per item, in order."""
        caller = torch.cuda.current_stream(self._device)
        futures = [self._pool.submit(contextvars.copy_context().run, self._run, caller, work, item) for item in items]
        for future in futures:
            with TURN.given_up():
                outcome = future.result()
            yield outcome

    def _run(self, caller: torch.cuda.Stream, work: Callable[[Any], T], item: Any) -> T | Exception:
        if not hasattr(self._local, "stream"):
            self._local.stream = lasting_stream(self._device)
        stream: torch.cuda.Stream = self._local.stream
        stream.wait_stream(caller)
        with torch.cuda.stream(stream), TURN.taken():
            outcome = attempt(work, item)
            with TURN.given_up():
                stream.synchronize()
        return outcome
