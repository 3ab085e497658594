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
from rescene.cli import progress
from rescene.cli.app import GROUPS, app, examples, leaves
from rescene.cli.progress import Pace
from rescene.cli.shared_options import complete_method, complete_recipe, recipe_keys
from rescene.config import recipe_names, resolve
from rescene.lens import expect_looks, look_progress, tell_looked
from rescene.methods import method_class
from shipped_methods import SHIPPED

invoke = CliRunner().invoke
PROGRAM = typer.main.get_command(app)


def test_version_and_bare_call():
    assert invoke(app, ["--version"]).output == f"rescene {rescene.__version__}\n"
    assert invoke(app, []).output.strip() == invoke(app, ["--help"]).output.strip()


def test_the_first_screen_has_every_verb_in_twelve_lines_of_eighty_columns():
    lines = invoke(app, ["--help"]).output.rstrip("\n").split("\n")
    assert len(lines) <= 12 and max(map(len, lines)) <= 80 and lines[-1].startswith("More: rescene help")
    shown = [name for line in lines for name in re.split(r",? +", line.strip())[1:]]
    grouped = [name for _, verbs in GROUPS.values() for name in verbs]
    assert len(grouped) == 28 and set(grouped) <= set(shown)
    there = {name for name, command in PROGRAM.commands.items() if not command.hidden}
    assert sorted([*grouped, "help"]) == sorted(there)


def test_all_verbs_are_listed_in_whole_sentences(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke(app, ["help"]).output
    assert max(len(line) for line in shown.splitlines()) <= 82 and "..." not in shown.partition("\n")[2]
    for name, command in leaves(PROGRAM, ""):
        if name != "help":
            assert f"\n  {name} " in shown and command.help.split()[-1] in shown, name


def test_help_of_one_verb_is_the_verbs_own_help():
    assert invoke(app, ["help", "data", "inspect"]).output == invoke(app, ["data", "inspect", "--help"]).output
    assert "Did you mean" in invoke(app, ["help", "swep"]).output


@pytest.mark.parametrize(("typed", "meant"), [("swep", "sweep"), ("reprot", "report"), ("deplyo", "deploy")])
def test_an_unknown_verb_gets_a_suggestion(typed, meant):
    found = invoke(app, [typed])
    assert found.exit_code == 2 and found.output.count(f"Did you mean '{meant}'?") == 1
    unknown = invoke(app, ["deploy", "qqq"])
    assert unknown.exit_code == 2 and "No such verb: qqq. rescene help lists them." in unknown.output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["explain", "fedavg"], ["method", "explain", "fedavg"]),
        (["theory", "nowhere"], ["paper", "theory", "nowhere"]),
        (["quarantine", "nowhere"], ["deploy", "quarantine", "nowhere"]),
        (["bench", "--device", "warp"], ["doctor", "--speed", "--device", "warp"]),
        (["new", "method", "Not-A-Name"], ["method", "new", "Not-A-Name"]),
    ],
)
def test_an_old_name_works_and_says_the_new_one(old, new):
    before, now = invoke(app, old), invoke(app, new)
    length = len(new) - (2 if "--device" in new else 1)
    told = f"has a new name: rescene {' '.join(new[:length])}\n"
    assert told in before.stderr and told not in before.stdout
    assert (before.exit_code, before.stdout) == (now.exit_code, now.stdout)
    assert old[0] not in {name.split()[0] for name, _ in leaves(PROGRAM, "")}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in examples().items() for line in lines])
def test_every_example_of_the_help_parses(name, line):
    program, *words = shlex.split(line)
    names = name.split()
    assert program == "rescene" and words[: len(names)] == names
    command = dict(leaves(PROGRAM, ""))[name]
    command.make_context(name, words[len(names) :])  # raises UsageError on an unknown option or a missing argument
    assert f"  {line}\n" in invoke(app, [*names, "--help"], terminal_width=200).output


@pytest.mark.parametrize("verb", [("run",), ("table",), ("paper", "table"), ("data", "inspect"), ("deploy", "check")])
def test_help_says_once_what_each_argument_is_and_has_no_escapes(verb):
    shown = invoke(app, [*verb, "--help"]).output
    assert shown.count("rguments:\n") == 1 and "\\[" not in shown and "[required]" in shown
    first = shown.partition("Arguments:\n")[2].splitlines()[0]
    assert len(first.partition("[required]")[0].split()) > 1, "the first argument is not described"


@pytest.mark.parametrize("group", [("paper",), ("deploy",), ("data",), ("lens",), ("method",)])
def test_the_list_of_verbs_is_in_whole_sentences(group):
    shown = invoke(app, [*group, "--help"]).output.partition("Commands:\n")[2]
    assert shown and "..." not in shown


def test_exit_codes_stand_in_the_help():
    text = " ".join(invoke(app, ["help"]).output.split())
    for words in ("0 done", "2 recipe or usage", "3 data", "4 run failed", "5 check failed", "130 interrupted"):
        assert words in text


def asked(*words):
    """What bash says on TAB at the end of these words. It cuts a word at an equals sign."""
    parts = [part for word in words for part in (re.split("(=)", word) if "=" in word else [word])]
    parts = parts[:-1] if parts[-2:] == ["=", ""] else parts
    return {
        "_RESCENE_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["rescene", *parts]),
        "COMP_CWORD": str(len(parts)),
    }


def offered(*words, shell=asked):
    """What it gets."""
    return invoke(app, [], env=shell(*words), prog_name="rescene").output.split()


def zsh(*words):
    return {"_RESCENE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": " ".join(["rescene", *words])}


def test_the_shell_completes_recipes_keys_and_methods():
    assert offered("run", "smo") == ["smoke"] and complete_recipe("") == recipe_names()
    assert complete_recipe("cifar") == ["cifar10", "cifar100"]
    assert offered("run", "demo", "method=feda") == ["fedaf", "fedavg"]
    ours = sorted(SHIPPED)
    assert offered("run", "demo", "seed=3", "method=") == complete_method("")
    assert [name for name in complete_method("") if name in ours] == ours  # other tests register methods of their own
    assert offered("sweep", "demo", "method=gl") == offered("method", "explain", "gl") == ["glfc"]
    assert offered("run", "demo", "data.path=im") == []
    assert "method=fedavg" in " ".join(offered("run", "demo", "method=feda", shell=zsh))


def test_no_space_is_put_behind_an_equals_sign():
    """A shell puts one behind the only answer; of two it takes what they share."""
    found = offered("run", "demo", "federation.be")
    assert len(found) == 2 and os.path.commonprefix(found) == "federation.beta="


def test_the_keys_are_those_of_recipes_and_methods():
    known = set(recipe_keys())
    own = {f"method.{row['name']}" for name in SHIPPED for row in method_class(name).table()}
    wanted = {key for key in resolve("demo").flat() if not key.startswith("method.")} | {"method", *own}
    assert wanted - known == set() and known - wanted <= {"method.name"}


def test_completion_loads_no_torch():
    code = "import sys; sys.argv = ['rescene']\nfrom rescene.cli import main\n"
    code += "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    for words in (
        ("run", "smo"),
        ("run", "demo", "federation.be"),
        ("run", "demo", "method=fed"),
        ("method", "explain", ""),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | asked(*words), capture_output=True, text=True
        )
        assert done.stdout and done.stderr.split()[-1] == "False", (words, done)


def test_no_color_is_honoured():
    def colours(**told):
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | told
        code = "from rich.console import Console; from rescene.cli.terminal import print_rows; print_rows([{'a': 1}])"
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
    from rescene.cli import start_verbs

    monkeypatch.setattr(start_verbs, "find_spec", lambda name: None)
    result = invoke(app, ["doctor"])
    assert result.exit_code == 0 and "extra onnx" in result.output and result.output.endswith("all is well\n")
    monkeypatch.setattr(start_verbs, "ENOUGH_DISK_GB", 1e12)
    result = invoke(app, ["doctor"])
    assert result.exit_code == 5 and "use --out on another disk" in result.output
    assert re.search(r"1 of \d+ checks need something done", result.output)


def test_a_look_says_how_many_pictures_of_how_many_and_the_time_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(look_progress.time, "monotonic", lambda: now[0])
    line, log = look_progress.LookWords(), look_progress.LookLog()
    words = []
    for done in (32, 64, 96, 128):
        now[0] += 6
        line.take(done, 128)
        log.take(done, 128)
        words.append(line.words)
    assert words == ["looked at 32 of 128 pictures", "looked at 64 of 128 pictures, 0:12 left",
                     "looked at 96 of 128 pictures, 0:06 left", ""]  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [words[2]], "18 s after the start; the next one would be due at 33 s"
    line.take(32, 320)
    assert line.words == "looked at 32 of 320 pictures", "another look: nothing is known of its pace"


@pytest.mark.parametrize(("quiet", "lines"), [(False, 1), (True, 0)])
def test_looks_are_told_unless_somebody_wants_quiet(quiet, lines, monkeypatch, capsys):
    monkeypatch.setattr(look_progress, "LINE_S", 0.0)
    for watched in (progress.watch, progress.watch_looks):
        with watched(quiet):
            expect_looks(3)
            tell_looked(2)
            tell_looked(1)
        assert len(capsys.readouterr().err.splitlines()) == lines
    tell_looked(1)  # nobody listens any more
    assert capsys.readouterr().err == ""
