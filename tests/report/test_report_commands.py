"""``rescene table`` and ``rescene plot`` as typed, and the page that follows a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_fixtures import write_run, write_running
from typer.testing import CliRunner

from rescene.cli import progress
from rescene.cli.app import app
from rescene.cli.progress import live_page


def rescene(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for method in ("rescene", "fedavg"):
        write_run(tmp_path / "runs" / method, method)
    return tmp_path / "runs"


def test_table_on_the_terminal_and_in_a_file(runs: Path, tmp_path: Path) -> None:
    code, text = rescene("table", runs, "--metric", "aa,forgetting")
    assert code == 0 and "ReSCENE" in text and "no images" in text and "Forgetting (points)" in text
    for ending, sign in ((".tex", r"\toprule"), (".md", "|---|"), (".csv", "method,n,"), (".html", "<table class=")):
        assert rescene("table", runs, "--out", tmp_path / f"new/t{ending}") == (0, f"{tmp_path}/new/t{ending}\n")
        assert sign in (tmp_path / f"new/t{ending}").read_text("utf-8")
    assert json.loads(rescene("table", runs, "--format", "json")[1])["rows"][0]["method"] == "ReSCENE"


def test_a_run_named_twice_counts_once(runs: Path) -> None:
    assert "repeated" not in rescene("table", runs, runs / "rescene")[1]


def test_plot_writes_beside_or_where_told(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rescene("plot", runs, "--kind", "old-recent") == (0, "old-recent.png\nold-recent.csv\n")
    assert rescene("plot", "cost", runs) == (0, "cost.png\ncost.csv\n"), "the kind as the first word"
    assert (tmp_path / "old-recent.png").is_file() and (tmp_path / "old-recent.csv").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("table", "nowhere"), "there is no such folder"),
        (("table", "RUNS", "."), "it holds no run"),
        (("table", "RUNS", "--format", "latx"), "did you mean latex"),
        (("table", "RUNS", "--out", "t.xls"), "known endings are .txt"),
        (("table", "RUNS", "--format", "csv", "--out", "."), "Is a directory"),
        (("table", "RUNS", "--out", "file/t.csv"), "cannot write"),
        (("plot", "RUNS", "--kind", "cost", "--out", "file/c.png"), "cannot write"),
        (("report", "RUNS", "--out", "file/r.html"), "E147"),
        (("report", "RUNS", "--out", "/proc/r.html"), "E147"),
        (("table", "RUNS", "--by", "bta"), "did you mean beta"),
        (("plot", "RUNS", "--kind", "maps"), "unknown kind of figure"),
        (("plot", "RUNS"), "which figure?"),
        (("plot", "cost"), "of which runs?"),
        (("plot", "frontier", "RUNS"), "it needs finished runs in two modes of privacy"),
        (("plot", "RUNS", "--kind", "cost", "--out", "c.jpg"), "known endings are .png"),
    ],
)
def test_mistakes_get_an_answer(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").write_text("")
    monkeypatch.chdir(tmp_path / "empty")
    code, text = rescene(*(runs if word == "RUNS" else word for word in words))
    assert code == 2 and says in text
    assert [path.name for path in Path(".").iterdir()] == ["file"]


@pytest.mark.slow
def test_a_report_that_is_to_replace_a_folder_leaves_nothing_behind(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "r.html").mkdir(parents=True)
    code, text = rescene("report", runs, "--out", tmp_path / "out" / "r.html")
    assert code == 2 and "E147" in text and "Is a directory" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"r.html", "plots"}


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[float]]:
    """A clock to be set, and the times at which a page was written, each taking two seconds."""
    clock, written = Clock(), []

    def write(folders: list[Path], out: Path) -> None:
        written.append(clock.now)
        clock.now += 2.0

    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "write_report", write)
    return clock, written


def test_the_page_follows_rounds_and_tasks_in_a_twentieth_of_the_time(
    pages: tuple[Clock, list[float]], tmp_path: Path
) -> None:
    clock, written = pages
    told: list[str] = []
    with live_page(lambda event: told.append(event["event"]), [tmp_path], tmp_path / "r.html") as take:
        for second, kind in ((10, "task"), (70, "phase"), (71, "round"), (90, "task"), (112, "task"), (113.5, "task")):
            clock.now = max(clock.now, second)
            take({"event": kind})
    assert written == [71, 113.5]  # 3 s assumed: from 60 s on; 2 s taken: 40 s after 73
    assert told == ["task", "phase", "round", "page", "task", "task", "task"]  # the page is announced once


def test_an_interrupted_run_leaves_no_page_that_says_running(pages: tuple[Clock, list[float]], tmp_path: Path) -> None:
    clock, written = pages
    with pytest.raises(KeyboardInterrupt), live_page(lambda event: None, [tmp_path], tmp_path / "r.html") as take:
        clock.now = 100
        take({"event": "task"})
        raise KeyboardInterrupt
    assert written == [100, 102]
    with pytest.raises(KeyboardInterrupt), live_page(lambda event: None, [tmp_path], tmp_path / "r.html"):
        raise KeyboardInterrupt
    assert len(written) == 2  # no page, nothing to correct
    (tmp_path / "r.html").write_text("running: by rescene report")
    with pytest.raises(KeyboardInterrupt), live_page(lambda event: None, [tmp_path], tmp_path / "r.html"):
        raise KeyboardInterrupt
    assert len(written) == 3


def test_a_page_that_cannot_be_written_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    (tmp_path / "file").write_text("")
    folder = write_running(tmp_path / "rescene-s0")
    with live_page(lambda event: None, [folder], tmp_path / "file" / "r.html") as take:
        clock.now = 100
        take({"event": "task"})


def test_a_table_calls_methods_as_it_is_told(tmp_path):
    from typer.testing import CliRunner

    from rescene.cli.app import app

    write_run(tmp_path / "a", "rescene", 0)
    write_run(tmp_path / "b", "fedavg", 0)
    asked = ["table", str(tmp_path), "--rename", "fedavg=Plain average", "--rename", "ReSCENE=Ours"]
    shown = CliRunner().invoke(app, asked).output
    assert "Plain average" in shown and "Ours" in shown and "FedAvg" not in shown
    for wrong in ("nobody=X", "fedavg"):
        found = CliRunner().invoke(app, ["table", str(tmp_path), "--rename", wrong])
        assert found.exit_code == 2 and "error[E106]" in found.output
