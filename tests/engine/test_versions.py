"""Folders of older versions are read and continued; those of newer ones are refused everywhere."""

import json
import shutil

import pytest

import rescene
from rescene.config import resolve
from rescene.core.errors import RunError
from rescene.core.versions import FOLDER
from rescene.engine import RunFolder
from rescene.engine.loop import run
from rescene.engine.run_folder import folder_format, migrate
from rescene.report.galleries import recorded_pairs as pairs_of
from rescene.report.load import load_run
from rescene.report.page import write_report

SMALL = {"federation.num_rounds": 1, "train.server_epochs": 1, "method.num_steps": 1, "tasks.limit": 2,
         "model.width": 8}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return rescene.run("smoke", out=tmp_path_factory.mktemp("versions") / "run", **SMALL).folder


def edit(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def as_format_1(folder):
    """The folder as the first version wrote it."""
    for name in ("origin.json", "partition.json"):
        edit(folder / name, lambda told: {key: value for key, value in told.items() if key != "schema"})
    edit(folder / "surrogates.json", lambda told: told["pairs"])


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_every_json_file_has_a_version(folder):
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))
    assert {"origin.json", "partition.json", "surrogates.json", "results.json", "model/model.json"} <= set(names)
    for name in names:
        assert json.loads((folder / name).read_text())["schema"] >= 1, name


def test_an_older_folder_is_read_as_it_is_and_migrated_to_todays(folder, finished, tmp_path, blank_figures):
    wanted = {name: (folder / name).read_text() for name in ("origin.json", "partition.json", "surrogates.json")}
    as_format_1(folder)
    assert folder_format(folder) == 1
    assert rescene.load(folder).values == rescene.load(finished).values
    assert len(pairs_of(load_run(folder))[0]) == len(json.loads(wanted["surrogates.json"])["pairs"])
    write_report([folder], tmp_path / "page.html")
    assert folder_format(folder) == 1  # reading changed nothing
    assert migrate(folder) and not migrate(folder)
    assert folder_format(folder) == FOLDER
    for name, text in wanted.items():
        told = {key: value for key, value in json.loads(text).items() if key != "means"}  # which format 1 had not
        assert json.loads((folder / name).read_text()) == told


def test_an_interrupted_run_of_an_older_version_goes_on(finished, tmp_path):
    resolved, path = resolve("smoke", SMALL), tmp_path / "run"

    def stop(event):
        if event["event"] == "task":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(resolved, RunFolder(path), stop)
    as_format_1(path)
    result = rescene.run("smoke", out=path, **SMALL)
    assert result.values == rescene.load(finished).values and folder_format(path) == FOLDER


@pytest.mark.parametrize("name", ["results.json", "origin.json"])
def test_newer_folders_are_refused(folder, name):
    edit(folder / name, lambda told: told | {"schema": 99})
    with pytest.raises(RunError, match="newer version") as error:
        if name == "results.json":
            rescene.load(folder)
        else:
            rescene.run("smoke", out=folder, **SMALL)
    assert error.value.code == "E414" and error.value.exit_code == 4
    if name == "results.json":
        with pytest.raises(RunError, match="newer version"):
            load_run(folder)


def test_damaged_results_say_so(folder):
    (folder / "results.json").write_text("{")
    with pytest.raises(RunError, match="no finished run") as error:
        rescene.load(folder)
    assert "damaged" in error.value.why
