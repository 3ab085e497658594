"""Help, version, completion, colours and the time that is left."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.cli.completion import complete_recipe
from rescene.cli.examples import EXAMPLES
from rescene.cli.live import Pace
from rescene.config import recipe_names

invoke = CliRunner().invoke


def test_version_and_bare_call():
    assert invoke(app, ["--version"]).output == f"rescene {rescene.__version__}\n"
    assert "Commands:" in invoke(app, []).output


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_of_the_help_parses(line):
    program, name, *words = shlex.split(line)
    assert program == "rescene" and name in EXAMPLES
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, words)  # raises UsageError on an unknown option or a missing argument
    shown = invoke(app, [name, "--help"], terminal_width=200).output
    assert f"  {line}\n" in shown


@pytest.mark.parametrize("verb", [("run",), ("table",), ("paper", "run"), ("data", "inspect"), ("deploy", "check")])
def test_help_says_once_what_each_argument_is_and_has_no_escapes(verb):
    shown = invoke(app, [*verb, "--help"]).output
    assert shown.count("rguments:\n") == 1 and "\\[" not in shown and "[required]" in shown
    first = shown.partition("Arguments:\n")[2].splitlines()[0]
    assert len(first.partition("[required]")[0].split()) > 1, "the first argument is not described"


@pytest.mark.parametrize("group", [(), ("paper",), ("deploy",)])
def test_the_list_of_verbs_is_in_whole_sentences(group):
    shown = invoke(app, [*group, "--help"]).output.partition("Commands:\n")[2]
    assert shown and "..." not in shown


def test_exit_codes_stand_in_the_help():
    text = " ".join(invoke(app, ["--help"]).output.split())
    for words in ("0 done", "2 recipe or usage", "3 data", "4 run failed", "5 check failed", "130 interrupted"):
        assert words in text


def asked(line):
    """What a shell says on TAB at the end of a line."""
    words = line.split(" ")
    return {"_RESCENE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}


def offered(line):
    """What it gets."""
    return invoke(app, [], env=asked(line), prog_name="rescene").output.split()


def test_the_shell_completes_recipes_keys_and_methods():
    code = "import sys; sys.argv = ['rescene']; from rescene.cli import main; main()"
    environment = os.environ | asked("rescene run smo")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == offered("rescene run smo") == ["smoke"]
    assert complete_recipe("") == recipe_names() and complete_recipe("cifar") == ["cifar10", "cifar100"]
    assert offered("rescene run demo federation.be") == ["federation.beta="]
    assert "method=fedavg" in offered("rescene run demo method=fed")
    assert offered("rescene run no-such-recipe fed") == []


def test_no_color_is_honoured():
    def colours(**told):
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | told
        code = "from rich.console import Console; from rescene.cli.listing import print_rows; print_rows([{'a': 1}])"
        code += "; Console().print('[red]x')"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        return re.findall(r"\x1b\[[0-9;]*3[0-9]m", done.stdout)

    assert colours(FORCE_COLOR="1", TERM="xterm") and not colours(FORCE_COLOR="1", TERM="xterm", NO_COLOR="1")


def pace(*seconds):
    """The time left after rounds of this length, of ten in one task."""
    found, now = Pace(), 0.0
    found.start({"done": 1, "steps": 12, "elapsed_s": now})
    for number, length in enumerate(seconds):
        now += length
        found.step({"event": "round", "task": 0, "round": number, "num_rounds": 10, "elapsed_s": now})
    return found.left()


def test_the_time_left_is_a_number_a_range_or_unknown():
    assert pace() == "-"
    assert pace(30, 30) == "4:30"  # 9 steps to go: 8 rounds and the end of the task
    assert pace(10, 50) == "4:30 to 7:30"  # mean 30 s, slowest 50 s


def test_doctor_tells_of_extras_and_ends_with_a_verdict(monkeypatch):
    from rescene.cli import checks

    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    result = invoke(app, ["doctor"])
    assert result.exit_code == 0 and "extra onnx" in result.output and result.output.endswith("all is well\n")
    monkeypatch.setattr(checks, "ENOUGH_DISK_GB", 1e12)
    result = invoke(app, ["doctor"])
    assert result.exit_code == 5 and "use --out on another disk" in result.output
    assert re.search(r"1 of \d+ checks need something done", result.output)
