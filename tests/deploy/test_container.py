"""The container file of a site, as far as it can be judged without a container engine."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import rescene
from rescene.deploy.federation_folder import CONTAINERFILE, DOCKERIGNORE

KNOWN = {"FROM", "RUN", "ENV", "USER", "WORKDIR", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT"}


def instructions():
    lines = [line for line in CONTAINERFILE.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in joined]


def test_it_has_no_root_no_open_port_and_nothing_of_the_folder_in_it():
    found = instructions()
    assert {word for word, _ in found} == KNOWN and found[0][0] == "FROM"  # no EXPOSE, COPY, ADD or VOLUME
    words = [word for word, _ in found]
    assert max(i for i, word in enumerate(words) if word == "RUN") < words.index("USER") < words.index("ENTRYPOINT")
    user = dict(found)["USER"]
    assert int(user) > 0 and any(f"--uid {user} " in rest for word, rest in found if word == "RUN")
    assert DOCKERIGNORE.splitlines() == ["*", "!Containerfile"]  # node.key is in that folder


def test_it_installs_this_version_and_starts_a_command_that_exists():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    installs = next(rest for word, rest in instructions() if rest.startswith("pip install"))
    assert f'--no-deps "rescene=={rescene.__version__}"' in installs
    program, *words = json.loads(dict(instructions())["ENTRYPOINT"])
    assert program in project["project"]["scripts"]
    done = subprocess.run([sys.executable, "-m", "rescene", *words[:2], "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and all(word in done.stdout for word in words[3:])


def test_all_but_torch_is_installed_from_the_lock_that_the_wheel_brings():
    root = Path(__file__).parents[2]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    brought = {inside: (root / outside).read_text() for outside, inside in wheel["force-include"].items()}
    installs = next(rest for word, rest in instructions() if rest.startswith("pip install"))
    script, lock = re.search(r"--no-deps --require-hashes -r\s+\"\$\((.*)\)/(\S+)\"", installs).groups()
    place = subprocess.run(["sh", "-c", script.replace("python", sys.executable, 1)], capture_output=True, text=True)
    assert Path(place.stdout.strip()) == Path(rescene.__file__).parent
    assert "\nflwr==1.41" in brought[f"rescene/{lock}"]
    for name in re.findall(r"^-r (\S+)", brought[f"rescene/{lock}"], re.M):
        assert f"rescene/{Path(lock).parent / name}" in brought


def test_the_health_check_follows_the_node(tmp_path):
    from rescene.deploy.processes import start, stop

    shell, flag, script = json.loads(re.search(r"CMD (\[.*\])", dict(instructions())["HEALTHCHECK"])[1])

    def healthy():
        asked = script.replace("/site/", f"{tmp_path}/")
        return subprocess.run([shell, flag, asked], capture_output=True).returncode == 0

    assert not healthy()
    start(tmp_path, "node", ["sleep", "600"], os.environ)
    assert healthy()
    text = (tmp_path / "processes" / "node.json").read_text()
    stop(tmp_path)
    (tmp_path / "processes" / "node.json").write_text(text)
    assert not healthy()
