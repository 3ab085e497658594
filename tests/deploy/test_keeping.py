"""A node that the link refuses for a while is started again; one that it never takes is explained."""

import sys

import pytest

from rescene.core.errors import RunError
from rescene.deploy.processes import environment, running, start, start_kept, stop


def nodes(folder, *scripts):
    """Starts the scripts, one after the other, as if each were Flower's node; counts the starts."""
    left = list(scripts)

    def begin():
        begin.starts += 1
        return [start(folder, "node", [sys.executable, "-c", left.pop(0)], environment(folder))]

    begin.starts = 0
    return begin


REFUSED = "print('[code: 2004] Failed to activate SuperNode.')"
TAKEN = "import time; print('SuperNode ID: 7', flush=True); time.sleep(600)"
SILENT = "import time; time.sleep(600)"
SLOW = "import time; time.sleep(2); " + REFUSED


def kept(folder, begin, **more):
    told = []
    try:
        return start_kept(folder, begin, told.append, **({"pause_s": 0.0, "settle_s": 30.0} | more)), told
    except RunError as error:
        return error, told


def test_a_refusal_after_a_crash_is_waited_for(tmp_path):
    begin = nodes(tmp_path, REFUSED, REFUSED, TAKEN)
    started, told = kept(tmp_path, begin)
    assert running(tmp_path) == started and begin.starts == 3
    assert len(told) == 3 and "again in" in told[0] and told[2] == "the server has taken this site"
    stop(tmp_path)


def test_a_server_that_is_away_is_no_reason_to_give_up(tmp_path):
    started, told = kept(tmp_path, nodes(tmp_path, SILENT), settle_s=0.1, patience_s=0.2)
    assert running(tmp_path) == started and "does not answer yet" in told[0]
    stop(tmp_path)


def test_a_refusal_that_takes_its_time_is_not_missed(tmp_path):
    begin = nodes(tmp_path, SLOW, TAKEN)
    _, told = kept(tmp_path, begin, settle_s=0.1)
    assert begin.starts == 2 and "does not answer yet" in told[0] and "again in" in told[1]
    stop(tmp_path)


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (REFUSED, "E361", "does not know this node.key"),
        ("print('CERTIFICATE_VERIFY_FAILED')", "E362", "not signed by this site's ca.crt"),
        ("print('SuperNode terminated gracefully.')", "E363", "clocks"),
        ("raise SystemExit('out of memory')", "E350", "out of memory"),
        ("print('Exit Code: 606\\nversions differ\\n' + 9 * 'Shutting down\\n')", "E350", "versions differ"),
    ],
)
def test_what_lasts_is_explained(tmp_path, said, code, words):
    begin = nodes(tmp_path, said)
    error, _ = kept(tmp_path, begin, patience_s=0.0)
    assert error.code == code and words in error.why and begin.starts == 1
    assert str(tmp_path) in error.where and not running(tmp_path)


def test_old_words_in_the_log_are_not_taken_for_new_ones(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "node.log").write_text("Failed to activate\nSuperNode ID: 3\n")
    error, told = kept(tmp_path, nodes(tmp_path, "raise SystemExit('broken')"))
    assert error.code == "E350" and "broken" in error.why and not told
