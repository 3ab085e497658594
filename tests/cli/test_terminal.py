"""What reaches the terminal: names without escape sequences, commands that can be copied, errors without tracebacks."""

import ast
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import rescene
from rescene.cli import app as entry
from rescene.cli.terminal import Plain, console, print_rows, visible
from rescene.core.errors import RunError, command

ROOT = Path(rescene.__file__).parent
EVIL = "dog\x1b[2J\x1b]0;title\x07\u202egod"


@pytest.fixture
def said(monkeypatch, capsys):
    """What ``rescene WORDS`` prints, as a user starts it."""

    def run(*words):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, getattr(sys, name))  # put back at the end
        monkeypatch.setattr(sys, "argv", ["rescene", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            entry.main()
        return stop.value.code, *capsys.readouterr()

    return run


def is_plain(text):
    return not any(ord(c) < 32 and c not in "\n\t" or c in "\x7f\u202e" for c in text)


def test_names_in_files_and_folders_do_not_steer_the_terminal(said, tmp_path):
    run = tmp_path / EVIL
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "results.json").write_text(json.dumps({"aa": 1.0, "method": EVIL}))
    for words in (["runs", tmp_path], ["show", run / EVIL], ["run", EVIL], [EVIL]):
        code, out, err = said(*words)
        assert r"dog\x1b[2J\x1b]0;title\x07\u202egod" in out + err and is_plain(out + err), (words, code)
    assert is_plain("".join(said("table", tmp_path)[1:]))


def test_a_table_on_a_terminal_has_our_escape_sequences_and_no_others(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", Plain(screen))
    monkeypatch.setenv("TERM", "xterm")
    print_rows([{"class": EVIL}])
    print(f"[bold]{EVIL}")
    told = screen.getvalue()
    assert "\x1b[1mclass" in told and "\x1b[2J" not in told and "\x07" not in told
    assert told.count(visible(EVIL)) == 2 and "[bold]" in told
    assert console().is_terminal and not sys.stdout.isatty()


def test_text_that_is_harmless_stays_as_it_is():
    text = "ÄÖ 犬 🐕\tx\r\ny\n"
    assert visible(text) == text
    assert visible("\udcff\rx") == r"\udcff\rx"  # a name that is not UTF-8 could not be printed at all


def test_every_console_is_ours():
    """One made elsewhere would print names as they are."""
    assert [path.name for path in ROOT.rglob("*.py") if re.search(r"\bConsole\(", path.read_text("utf-8"))] == []


def test_a_path_with_spaces_and_quotes_is_quoted_in_the_command(tmp_path):
    folder = tmp_path / "my 'own' run; rm x"
    folder.mkdir()
    with pytest.raises(RunError, match="E408") as error:
        rescene.load(folder)
    assert shlex.split(error.value.fix.rpartition(",")[0]) == ["rescene", "resume", str(folder)]
    assert shlex.split(command("resume", folder)) == ["rescene", "resume", str(folder)]


OURS = {
    "name",
    "table",
    "recipe.name",
    "data.name",
    "self.name",
    "again",
    "__version__",
}  # words that we chose ourselves


def test_no_command_is_printed_with_a_value_that_is_not_quoted():
    """What stands after `rescene verb` in a message goes through ``command`` or shlex, unless it is a name of ours."""
    found = []
    for path in ROOT.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"rescene [a-z][a-z -]*\{", text) else ():
            if isinstance(node, ast.JoinedStr):
                for before, after in zip(node.values, node.values[1:], strict=False):
                    words = before.value if isinstance(before, ast.Constant) else ""
                    if re.search(r"rescene [a-z][a-z -]*$", words) and ast.unparse(after.value) not in OURS:
                        found.append(f"{path.name}:{node.lineno} {ast.unparse(after.value)}")
    assert found == []


@pytest.mark.parametrize("words", [["run", "smoke", "--out"], ["show"], ["resume"], ["sweep", "smoke", "--out"]])
def test_a_path_that_is_too_long_gets_a_message(said, words):
    code, out, err = said(*words, "a" * 300)
    assert code in (2, 4) and "too long" in out + err


def test_a_folder_that_is_not_ours_gets_a_message(said, tmp_path, monkeypatch):
    def refuse(self, *args, **more):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    code, _, err = said("resume", tmp_path)
    assert code == 2 and "error[E155]" in err and str(tmp_path) in err


def printed(monkeypatch, rows, columns=80):
    """What the rows look like on a terminal of so many columns."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(columns)), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Plain(screen))
        print_rows(rows)
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    return text


def test_no_header_and_no_number_breaks_at_80_columns(monkeypatch):
    heads = ["method", "AA", "AIA", "T1", "T2", "T3", "T4", "T5", "forgetting", "up/site/round", "near-copies"]
    text = printed(
        monkeypatch, [dict.fromkeys(heads, "97.2") | {"method": "raw-upload", "near-copies": "no images sent"}]
    )
    assert all(re.search(rf"(^| ){head}( |$)", text, re.MULTILINE) for head in heads)
    assert text.count("97.2") == len(heads) - 2


def test_a_table_too_wide_for_the_terminal_is_printed_row_by_row(monkeypatch):
    heads = [f"a-long-header-{number}" for number in range(9)]
    first, second = printed(monkeypatch, [dict.fromkeys(heads, number) for number in (1, 2)]).split("\n\n")
    assert first.splitlines() == [f"{head}  1" for head in heads] and second.count("  2") == 9


def test_a_path_may_be_cut_but_sentences_wrap_at_spaces(monkeypatch):
    path = "/".join(["folder"] * 20)
    text = printed(monkeypatch, [{"run": path, "why": "it was interrupted before the first round", "size": "12 MB"}])
    assert "".join(line.split("  ")[0].strip() for line in text.splitlines()[1:]) == path
    assert "interrupted" in text and "12 MB" in text


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_long_word_breaks_after_a_separator(monkeypatch, columns):
    cell, folder = "clients-100:cifar10/0.5/rescene/N=100, E_srv=10", "cifar10/rescene-plus-s4-61967698"
    row = {"cell": cell, "seed": 0, "group": "f. one hundred clients", "folder": folder, "predicted": "not known"}
    text = printed(monkeypatch, [row], columns)
    for piece in re.findall(r"[^\s/:,=_-]+", f"{cell} {folder}"):
        assert re.search(rf"(^|[\s/:,=_-]){re.escape(piece)}($|[\s/:,=_-])", text, re.MULTILINE), (piece, text)
