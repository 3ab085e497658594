"""Runs that end in the middle, as if they had been killed there."""

from contextlib import contextmanager

import pytest

from rescene.engine import checkpoint


class Stop(BaseException):
    pass


@contextmanager
def stopped_after(steps):
    """What is run inside ends after so many steps, before the last of them is committed."""
    left = [steps]

    def watch(place):
        left[0] -= place == "step done"
        if not left[0]:
            raise Stop

    checkpoint.watcher = watch
    try:
        with pytest.raises(Stop):
            yield
    finally:
        checkpoint.watcher = None
