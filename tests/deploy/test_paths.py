"""A path may hold spaces, quotation marks, percent signs, backslashes and emoji: whoever reads it gets the same path."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")

from flwr.common.config import parse_config_args

from rescene.cli.app import app
from rescene.core.errors import RunError
from rescene.deploy.federation_folder import check_path, init, proxy, unit
from rescene.deploy.processes import ended, toml_string

ODD = ["a b", 'say "hi"', "it's", "100%", "%h %n", "back\\slash\\", "😀 ä", "a;b {c} #d", """'"%\\ """, "a?b&c=d"]


def words_of_systemd(text, command):
    """As systemd.syntax says: words may be in double quotes, with backslashes before what is meant literally; then %% and $$."""
    words = [re.sub(r"\\(.)", r"\1", quoted or bare) for quoted, bare in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', text)]
    assert not re.search(r"(?<!%)(%%)*%(?!%)", text), "a percent sign alone is a specifier"
    words = [word.replace("%%", "%") for word in words]
    return [words[0], *(word.replace("$$", "$") for word in words[1:])] if command else words


def settings(text, name):
    return next(line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}="))


@pytest.mark.parametrize("odd", [*ODD, "5$", "$HOME ${x}"])
def test_a_systemd_unit_means_the_path_it_was_given(tmp_path, odd):
    folder, python = tmp_path / odd / "fed", f"/opt/{odd}/python"
    text = unit("server", folder, python)
    command = words_of_systemd(settings(text, "ExecStart"), command=True)
    command = command[1:] if command[0] == "/usr/bin/env" else command
    assert command == [python, "-m", "rescene", "deploy", "server", str(folder), "--wait"]
    assert words_of_systemd(settings(text, "ReadWritePaths"), command=False) == [str(folder)]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_itself_takes_the_unit(tmp_path):
    place = tmp_path / "".join(ODD)
    place.mkdir()
    (place / "python").symlink_to(sys.executable)
    path = tmp_path / "rescene-test.service"
    path.write_text(unit("server", place, str(place / "python")))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert not [line for line in done.stderr.splitlines() if path.name in line], done.stderr


@pytest.mark.parametrize("odd", ODD)
def test_nginx_means_the_path_it_was_given(tmp_path, odd):
    text = proxy("127.0.0.1", 8443, tmp_path / odd)
    found = re.findall(r'ssl_(?:trusted_)?certificate(?:_key)? "((?:[^"\\]|\\.)*)";', text)
    assert [re.sub(r"\\(.)", r"\1", one) for one in found] == [
        str(tmp_path / odd / name) for name in ("server.pem", "server.key", "ca.crt")
    ]


@pytest.mark.parametrize("odd", [*ODD, "5$", "\\\"\\'", ".toml"])
def test_flower_reads_the_path_it_was_given(odd):
    assert parse_config_args([f"folder={toml_string(odd)} poll-s=1.0"]) == {"folder": odd, "poll-s": 1.0}
    assert yaml.safe_load(toml_string(odd)) == odd


@pytest.mark.parametrize("odd", ["line\nbreak", "bell\a", "not utf-8 \udcff", "5$"])
def test_what_cannot_be_written_into_those_files_is_refused_before_anything_is_made(tmp_path, odd):
    with pytest.raises(RunError, match="E357") as refused:
        init(tmp_path / odd / "fed", ["north"])
    assert repr(odd[-1] if odd[-1] in "\a\udcff$" else "\n") in refused.value.what
    assert str(refused.value).isascii() and not list(tmp_path.iterdir())
    check_path(tmp_path / "5$")  # a site has no nginx


@pytest.mark.parametrize("host", ["a b", "x; }", "fl.example.org:8443", "-", "ä.example.org", ""])
def test_what_is_no_host_is_refused(tmp_path, host):
    with pytest.raises(RunError, match="E358"):
        init(tmp_path / "fed", ["north"], host=host)
    assert not (tmp_path / "fed").exists()


def test_an_address_of_version_6_stands_in_brackets(tmp_path):
    federation = init(tmp_path / "fed", ["north"], host="2001:db8::7", port=8443)
    assert yaml.safe_load((federation.site("north") / "site.yaml").read_text())["server"] == "[2001:db8::7]:8443"
    assert "listen [2001:db8::7]:8443 ssl;" in (federation.server / "nginx.conf").read_text()


def test_printed_commands_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = "it's here/fed"
    done = CliRunner().invoke(app, ["deploy", "init", folder, "--sites", "north"])
    assert done.exit_code == 0
    found = re.search(r"\d\. (rescene deploy server .*)", done.output)[1]
    assert shlex.split(found) == ["rescene", "deploy", "server", folder]
    (tmp_path / folder).chmod(0o755)
    rows = CliRunner().invoke(app, ["deploy", "check", folder, "--json"]).output
    fix = next(row["fix"] for row in yaml.safe_load(rows)["checks"] if row["check"] == "folder")
    assert shlex.split(fix) == ["chmod", "700", str(tmp_path / folder)]
    look = ended(tmp_path / folder, "CERTIFICATE_VERIFY_FAILED").fix
    assert shlex.split(look) == ["rescene", "deploy", "check", str(tmp_path / folder)]
