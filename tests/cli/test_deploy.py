"""rescene deploy on the command line: what can go wrong before anything is started."""

import pytest
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.deploy.site import Site


def say(*words):
    found = CliRunner().invoke(app, ["deploy", *map(str, words)])
    return found.exit_code, found.output


@pytest.fixture
def federation(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")
    code, output = say("init", tmp_path / "clinic", "--sites", "north,south", "--port", "9000")
    assert code == 0 and "bring it to north" in output
    return tmp_path / "clinic"


def test_without_flower_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("rescene.deploy.federation_folder.find_spec", lambda name: None)
    for words in (["init", tmp_path / "new", "--sites", "a"], ["rehearse", "--out", tmp_path / "out"]):
        code, output = say(*words)
        assert code == 2 and 'pip install "rescene[deploy]"' in output
    assert not list(tmp_path.iterdir())


def test_init_leads_to_the_recipe_for_images_of_ones_own(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")
    code, output = say("init", tmp_path / "plain", "--sites", "north,south")
    assert code == 0 and f"deploy run {tmp_path / 'plain'} own" in output and "holds: own" in output
    assert "add-classes" in output and "demo" not in output
    for site, names in {"north": ("ant", "bee"), "south": ("bee", "cat"), "empty": ()}.items():
        (tmp_path / "photos" / site).mkdir(parents=True)
        for name in names:
            (tmp_path / "photos" / site / name).mkdir()
            (tmp_path / "photos" / site / name / "1.jpg").touch()
    (tmp_path / "photos" / "south" / "dog").mkdir()  # an empty folder is no class
    words = ("init", tmp_path / "clinic", "--data", tmp_path / "photos", "--sites")
    code, output = say(*words, "north,empty")
    assert code == 2 and "E560" in output and not (tmp_path / "clinic").exists()
    code, output = say(*words, "north,south")
    assert code == 0 and f"add-classes {tmp_path / 'clinic'} ant,bee,cat --rounds 1" in output
    section = Site.open(tmp_path / "clinic" / "sites" / "north").section
    assert section.holds == "own" and section.data.path == str(tmp_path / "photos" / "north")


def test_a_name_in_capitals_has_a_fix_and_finds_its_images(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")
    for site in ("Leeds", "Porto", "PORTO"):
        (tmp_path / "works" / site / "ant").mkdir(parents=True)
    words = ("init", tmp_path / "clinic", "--data", tmp_path / "works", "--sites")
    code, output = say(*words, "Leeds")
    assert code == 2 and "E124" in output and "fix    leeds" in output
    code, output = say(*words, "leeds,porto")
    assert code == 2 and "E560" in output  # two folders could be meant
    assert say(*words, "leeds")[0] == 0
    assert Site.open(tmp_path / "clinic" / "sites" / "leeds").section.data.path == str(tmp_path / "works" / "Leeds")


@pytest.mark.parametrize("words", [["server"], ["status"], ["stop"], ["run"]])
def test_a_folder_that_is_no_federation_is_told(tmp_path, words):
    code, output = say(*words, tmp_path, *(["smoke"] if words == ["run"] else []))
    assert code == 2 and "E122" in output


def test_status_and_stop_of_a_server_that_is_down(federation):
    code, output = say("status", federation)
    assert code == 0 and output.count("down") == 2 and output.count("unknown") == 2
    assert say("stop", federation) == (0, "nothing was running\n")
    assert say("stop", federation / "sites" / "north") == (0, "nothing was running\n")
    code, output = say("run", federation, "smoke")
    assert code == 2 and "E128" in output


def test_only_the_paths_for_sites_pass_the_proxy(federation):
    text = (federation / "server" / "nginx.conf").read_text()
    assert text.count("location") == 2 and "location /v1/fleet/" in text and "location / { return 403; }" in text


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.usefixtures("blank_figures")
def test_a_rehearsal_ends_with_a_report_and_says_where_and_whether_the_bits_agree(tmp_path, monkeypatch, wrong):
    """Here its sites are simulated; that a federation gives the same bits is tested beside this."""
    from rescene.api import execute

    def rehearse(resolved, folder, out):
        execute(resolved, out)
        if wrong:
            (out / "model" / "final.safetensors").write_bytes(b"other bits")

    monkeypatch.setattr("rescene.deploy.trial.rehearse", rehearse)
    small = ["method=fedavg", "tasks.limit=1", "federation.num_rounds=1", "model.width=8", "device=cpu"]
    code, output = say("rehearse", *small, "--sites", 2, "--out", tmp_path / "out")
    assert code == (5 if wrong else 0) and ("they differ" if wrong else "the same bits") in output
    assert f"Report: {tmp_path / 'out' / 'report.html'}" in output and (tmp_path / "out" / "report.html").is_file()


@pytest.fixture
def folder(tmp_path):
    """The folder of a federation as far as plans need it."""
    (tmp_path / "clinic" / "server").mkdir(parents=True)
    (tmp_path / "clinic" / "federation.yaml").write_text("{name: clinic, host: h, port: 1, sites: [north, south]}")
    return tmp_path / "clinic"


def test_classes_are_opened_on_the_command_line(folder):
    code, output = say("add-classes", folder, "scratch, dent", "--rounds", "3")
    assert code == 0 and "task 1: scratch, dent; rounds: 3" in output and "deploy run" in output
    assert say("add-classes", folder, "crack")[1].startswith("task 2: crack; rounds: 3")
    for words in (["add-classes", folder, "dent"], ["add-classes", folder, ", "]):
        code, output = say(*words)
        assert code == 2 and "E193" in output
    code, output = say("close-task", folder)
    assert code == 2 and "it has not run yet" in output
    code, output = say("run", folder, "smoke", "--out", folder / "elsewhere")
    assert code == 2 and "E194" in output
    (folder / "plan.yaml").write_text("tasks: 3")
    code, output = say("add-classes", folder, "hole")
    assert code == 2 and "E191" in output and "plan.yaml" in output


def test_a_site_with_bad_images_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr("rescene.deploy.processes.require_flower", lambda: None)
    (tmp_path / "site.yaml").write_text(f"{{client: 0, holds: own, data: {{path: {tmp_path / 'images'}}}}}")
    code, output = say("site", tmp_path)
    assert code == 3 and "E211" in output and "site.yaml" in output
