"""Writing while the run goes on: one piece of work at a time in a thread beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

import torch

from rescene.accel.cuda_graph import lasting_stream


class Writer:
    """At most one piece of work is under way. Its error is raised by the next ``start`` or ``wait``, never lost."""

    def __init__(self, device: torch.device) -> None:
        self._stream = lasting_stream(device) if device.type == "cuda" else None
        self._under_way: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work`` once what was started before is done. It must read only what nobody changes any more."""
        self.wait()
        if self._stream is not None:  # what is to be copied from the device may still be being computed there
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        thread = ThreadPoolExecutor(1, thread_name_prefix="rescene-writer")
        self._under_way = thread.submit(copy_context().run, self._do, work)  # warnings reach the run that started it
        thread.shutdown(wait=False)  # it ends with its work; an exiting interpreter waits for it

    def wait(self) -> None:
        """Until nothing is under way. An interrupt while waiting leaves the work going, to be waited for again."""
        if self._under_way is not None:
            error = self._under_way.exception()
            self._under_way = None
            if error is not None:
                raise error

    def _do(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):  # no stream: nothing changes
            work()
