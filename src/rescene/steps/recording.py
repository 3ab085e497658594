"""A piece of GPU work that is always the same, recorded once as a CUDA graph."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch

from rescene.errors import ResceneWarning

_ONE_AT_A_TIME = threading.Lock()  # recordings of several threads would spoil each other


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """``work`` as a graph that can be replayed, or ``work`` itself (with a warning) where recording is refused.

    ``work`` reads and writes fixed tensors; it is run three times before it is recorded. The recording has a stream of its
    own, because libraries keep work space per stream and two graphs that share it must not run side by side.
    """
    with _ONE_AT_A_TIME:
        benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
            return graph.replay
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            warnings.warn(
                ResceneWarning("W302", f"CUDA graph capture was refused ({first}); running step by step"), stacklevel=2
            )
            return work
        finally:
            torch.backends.cudnn.benchmark = benchmark
