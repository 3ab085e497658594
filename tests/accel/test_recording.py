"""Whose turn it is: one thread prepares, others may go on while it waits or replays. And what a refused recording leaves."""

import itertools
import threading
import warnings

import pytest
import torch

from rescene.accel.cuda_graph import _Turn, lasting_stream, recorded
from rescene.accel.fused_layers import SideStream
from rescene.core.errors import ResceneWarning
from rescene.engine.run_parts import Writer


def test_threads_prepare_one_at_a_time():
    turn, inside, most = _Turn(), [], []

    def work():
        with turn.taken():
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5


def test_a_turn_given_up_lets_another_thread_go_on_and_is_taken_back():
    turn, other_was_here, log = _Turn(), threading.Event(), []

    def other():
        with turn.taken():
            log.append("other")
            other_was_here.set()

    with turn.taken():
        thread = threading.Thread(target=other)
        thread.start()
        assert not other_was_here.wait(0.05), "it is our turn"
        with turn.given_up():
            assert other_was_here.wait(5)
        log.append("we")
        assert turn._lock.locked()
    thread.join()
    assert log == ["other", "we"]
    assert not turn._lock.locked()


def test_a_thread_that_never_took_the_turn_is_not_held_up():
    turn = _Turn()
    done = threading.Event()

    def free():
        with turn.given_up():
            done.set()

    with turn.taken():
        threading.Thread(target=free).start()
        assert done.wait(5)


def test_an_error_inside_returns_the_turn():
    turn = _Turn()
    with pytest.raises(ValueError), turn.taken(), turn.given_up():
        raise ValueError
    assert not turn._lock.locked()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: recording is not refused")
def test_where_recording_is_refused_the_work_itself_remains():
    def work():
        pass

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert recorded(work) is work
    assert any(isinstance(w.message, ResceneWarning) and w.message.code == "W302" for w in seen)
    assert torch.backends.cudnn.benchmark is False, "what was changed for recording is set back"


def test_what_goes_on_beside_recordings_never_shares_a_stream_with_one(monkeypatch):
    """Seen on a GPU: a checkpoint was being copied on a stream that, 32 streams later, was under recording again."""
    dealt = {0: itertools.cycle(range(32)), -1: itertools.cycle(range(32, 64))}  # as torch deals them, by priority

    class Stream:
        def __init__(self, device=None, priority=0):
            self.number = next(dealt[priority])

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    device = torch.device("cuda")
    beside = [Writer(device)._stream.number, lasting_stream(device).number]
    recorded_on = {SideStream(device).stream.number for _ in range(100)} | {Stream().number for _ in range(100)}
    assert recorded_on.isdisjoint(beside)
