"""The app for `flwr run`: in this process, in Flower's simulation and across nodes; and the two folders that bring it to Flower."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")

import yaml
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import get_fab_config, validate_config
from local_sites import in_process
from test_flower import LocalGrid

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.deploy import flower
from rescene.deploy.federation_folder import init
from rescene.deploy.processes import (
    LINK,
    environment,
    flwr,
    free_port,
    program,
    runs,
    start,
    start_server,
    start_site,
    stop,
    wait_for_port,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = ["flower-app", "flower-baseline"]
SMALL = "tasks.limit=1 model.width=8 device=cpu federation.engine=one-by-one"
PATIENCE = {"gather-s": 300.0, "deadline-s": 600.0, "poll-s": 0.2}


def settings(folder):
    return tomllib.loads((EXAMPLES / folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def expected(tmp_path, num_sites, recipe="smoke"):
    """The final model of the same run in one process."""
    changes = [*SMALL.split(), f"federation.num_clients={num_sites}", f"federation.per_round={min(num_sites, 2)}"]
    in_process(resolve(recipe, [*changes, *QUICK.get(recipe, [])]), tmp_path / "here")
    return (tmp_path / "here" / "model" / "final.safetensors").read_bytes()


QUICK = {"demo": ["federation.num_rounds=1", "train.server_epochs=1"]}


class Simulated(LocalGrid):
    """Nodes as Flower simulates them, in this process."""

    def __init__(self, count, config):
        super().__init__([str(k) for k in range(count)])
        self.config = config

    def _answered(self, message):
        node = message.metadata.dst_node_id
        place = {"partition-id": int(self.folders[node]), "num-partitions": len(self.folders)}
        return flower.client(message, Context(7, node, place, RecordDict(), self.config))


def test_simulated_nodes_are_the_sites_of_the_recipes_split(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)  # the app writes its own
    out = tmp_path / "across"
    config = settings("flower-app") | PATIENCE | {"set": SMALL, "out": str(out), "poll-s": 0.0}
    flower.recipe_server(Simulated(3, config), Context(7, 0, {}, RecordDict(), config))
    assert (out / "model" / "final.safetensors").read_bytes() == expected(tmp_path, 3)
    assert (out / "command.txt").read_text().startswith("flwr run .")
    assert sorted(path.name for path in (tmp_path / "across.sites").iterdir()) == ["site-0", "site-1", "site-2"]


def test_a_node_names_its_folder_or_is_simulated(tmp_path):
    folder = tmp_path / "north"
    folder.mkdir()
    (folder / "site.yaml").write_text(yaml.safe_dump({"client": 4}))
    config = settings("flower-app") | {"out": str(tmp_path / "run")}
    at = lambda node: flower.site_of(Context(7, 1, node, RecordDict(), config))  # noqa: E731
    assert at({"folder": str(folder), "partition-id": 0}).section.client == 4  # what a person wrote counts
    assert at({"partition-id": 2}).section.client == 2
    with pytest.raises(ConfigError, match="E530"):
        at({})


def test_a_run_without_a_folder_is_kept_at_home_by_its_number(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert flower.run_folder(Context(7, 1, {}, RecordDict(), {"out": ""})) == tmp_path / "rescene-flower" / "7"


@pytest.mark.parametrize("folder", FOLDERS)
def test_flower_takes_the_folder_as_an_app(folder):
    bundle = build_fab_from_disk(EXAMPLES / folder)
    config = get_fab_config(bundle)
    good, errors, warnings = validate_config(config, check_module=False)
    assert good and not errors and not warnings, (errors, warnings)
    assert config["tool"]["flwr"]["app"]["fab-format-version"] == 1
    used = set(re.findall(r'(?:run_config|config)\["([a-z-]+)"\]', Path(flower.__file__).read_text())) | {*PATIENCE}
    assert set(settings(folder)) == used  # Flower refuses keys that pyproject.toml does not name
    resolve(settings(folder)["recipe"])


def test_the_baseline_says_what_flower_lists():
    text = (EXAMPLES / "flower-baseline" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert set(head) == {"title", "url", "labels", "dataset"} and 4 <= len(head["labels"]) <= 10
    sections = re.findall(r"^## (.*)", text, re.M)
    assert sections == [
        "About this baseline",
        "Experimental Setup",
        "Environment Setup",
        "Running the Experiments",
        "Expected Results",
    ]
    labels = ["Paper", "Authors", "Abstract", "What's implemented", "Datasets", "Hardware Setup", "Contributors"]
    labels += ["Task", "Model", "Dataset", "Training Hyperparameters"]
    assert re.findall(r"^\*\*(.+?):\*\*", text, re.M) == labels  # the fields of Flower's template, in its order


def as_words(config):
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def wait_for_end(list_runs, seconds=420):
    """How Flower says that the only run ended. The exit code of `flwr run` says nothing."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        [one] = list_runs()
        if one["status"].startswith("finished"):
            return one["status"]
        time.sleep(2)
    return "not in time"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("ray") is None, reason="Flower's simulation is not installed: pip install 'rescene[check]'"
)
@pytest.mark.parametrize(("folder", "num_sites"), [("flower-app", 2), ("flower-baseline", 2)])
def test_in_flowers_simulation(folder, num_sites, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bits depend on it
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    shutil.copytree(EXAMPLES / folder, tmp_path / "app")
    recipe, port, env = settings(folder)["recipe"], free_port(), environment(tmp_path / "flwr")
    address = f"127.0.0.1:{port}"
    link = [program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "{LINK}"\n[superlink.{LINK}]\naddress = "{address}"\ninsecure = true\n'
    )
    changes = " ".join([SMALL, *QUICK.get(recipe, []), "federation.per_round=2"])
    config = PATIENCE | {"set": changes, "out": str(tmp_path / "across"), "sites": num_sites}
    nodes = f"num-supernodes={num_sites} client-resources-num-cpus=1"

    def say(*words):
        done = subprocess.run([program("flwr"), *words], cwd=tmp_path / "app", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    try:
        wait_for_port(start(tmp_path, "link", link, env), port)
        say("run", ".", LINK, "--federation-config", nodes, "--run-config", as_words(config), "--format", "json")
        ended = wait_for_end(lambda: say("list", LINK, "--format", "json")["runs"])
    finally:
        stop(tmp_path)
    assert ended == "finished:completed", (tmp_path / "logs" / "link.log").read_text()[-4000:]
    assert (tmp_path / "across" / "model" / "final.safetensors").read_bytes() == expected(tmp_path, num_sites, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_across_nodes_with_the_same_files(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    federation, recipe = init(tmp_path / "fed", ["north", "south"], port=free_port()), settings(folder)["recipe"]
    changes = " ".join([SMALL, *QUICK.get(recipe, []), "federation.per_round=2"])
    config = PATIENCE | {"set": changes, "out": str(tmp_path / "across"), "sites": 2}
    try:
        start_server(federation)
        for name in federation.sites:
            start_site(federation.site(name))
        app = str(EXAMPLES / folder)
        flwr(federation, "run", app, "--run-config", as_words(config))
        ended = wait_for_end(lambda: runs(federation))
    finally:
        for place in (*map(federation.site, federation.sites), federation.server):
            stop(place)
    assert ended == "finished:completed" and not os.path.exists(EXAMPLES / folder / "build")
    assert (tmp_path / "across" / "model" / "final.safetensors").read_bytes() == expected(tmp_path, 2, recipe)
