"""A piece of GPU work that is always the same, recorded once as a CUDA graph; and whose turn it is among threads.

Several pieces of work at a time on one GPU have a thread and a CUDA stream each.
"""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from rescene.core.errors import ResceneWarning
from rescene.nets import flops_to, tell_flops

WARM_UP = 3  # times a piece of work is run before it is recorded


T = TypeVar("T")


class KeptRecordings(threading.local):
    """Recordings of this thread by what they depend on, the latest few: runs side by side must not share one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.by_key: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def get(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What was made for this key before, or what ``make`` gives; the oldest go, with their memory."""
        if key not in self.by_key:
            self.by_key[key] = make()
            while len(self.by_key) > self.most:
                self.by_key.popitem(last=False)
        self.by_key.move_to_end(key)
        found: T = self.by_key[key]
        return found


class _Turn:
    """Threads that share a GPU prepare its work one at a time; only replaying what is recorded goes on side by side.

    A recording fails when another thread allocates or waits meanwhile, and preparing is bound by Python anyway. A thread
    that never took the turn (a run on its own) is not held up by any of this.
    """

    def __init__(self) -> None:
        self._lock, self._own = threading.Lock(), threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """This thread's turn, which it gives up in between while it waits or replays."""
        with self._lock:
            self._own.taken = True
            try:
                yield
            finally:
                self._own.taken = False

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Others may go on meanwhile: for waiting and for replays. Nothing changes for a thread that did not take it."""
        if not getattr(self._own, "taken", False):
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


TURN = _Turn()


def lasting_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing is ever recorded on, for work that goes on beside recordings.

    torch deals out the same 32 streams of a priority in turn. Recordings take many of the normal ones; a stream of those would
    one day be under recording while it is used.
    """
    return torch.cuda.Stream(device, priority=-1)


class _ShortLived(threading.local):
    """Where this thread's short-lived recordings are made: one stream, and memory that the next one takes over.

    By itself a recording asks the driver for fresh memory, after all that is cached was given back; for one that serves a
    single call that is most of its cost. They may share memory since one is replayed after the other and none leaves
    anything in it.
    """

    stream: torch.cuda.Stream | None = None
    pool: tuple[int, int] | None = None
    last: torch.cuda.CUDAGraph | None = None  # memory without a graph in it would be given back

    def place(self) -> tuple[torch.cuda.Stream, tuple[int, int]]:
        if self.stream is None or self.pool is None:
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        return self.stream, self.pool


_SHORT_LIVED = _ShortLived()


def recorded(
    work: Callable[[], None], warm_up: int = WARM_UP, *, search: bool = True, short_lived: bool = False
) -> Callable[[], None]:
    """``work`` as a graph that can be replayed, or ``work`` itself (with a warning) where recording is refused.

    ``search`` tries every algorithm of each convolution first, a second or more for shapes that were not seen before.
    ``work`` reads and writes fixed tensors; it is run a few times before it is recorded. The recording has a stream of its
    own, because libraries keep work space per stream and two graphs that share it must not run side by side.
    """
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, search
    try:
        stream, pool = _SHORT_LIVED.place() if short_lived else (torch.cuda.Stream(), None)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _capture(graph, stream, pool):
            work()
        if short_lived:
            _SHORT_LIVED.last = graph
        return graph.replay
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        warnings.warn(
            ResceneWarning("W302", f"CUDA graph capture was refused ({first}); running step by step"), stacklevel=2
        )
        return work
    finally:
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: tuple[int, int] | None) -> Iterator[None]:
    """What runs inside goes into the graph. Without a pool cached memory is given back first, as torch does it."""
    if pool is None:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            yield
        finally:
            graph.capture_end()


def repeated(work: Callable[[], None], state: Sequence[Tensor], *, search: bool = True) -> Callable[[], None]:
    """``work``, on a GPU as a recording of a short life that leaves ``state`` as it was and keeps nothing but ``state``.

    Each replay tells the FLOPs that ``work`` tells.
    """
    if not state[0].is_cuda:
        return work
    before, told = [value.detach().clone() for value in state], list[int]()
    with flops_to(told.append):
        graph = recorded(work, warm_up=1, search=search, short_lived=True)
    with torch.no_grad():  # warming up was a run too
        for value, old in zip(state, before, strict=True):
            value.copy_(old)
    if graph is work:
        return work
    flops = sum(told) // 2  # once in warming up, once in recording; a replay calls no hooks

    def replay() -> None:
        with TURN.given_up():
            graph()
        tell_flops(flops)

    return replay


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
