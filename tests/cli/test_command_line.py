"""The command line as a person uses it: commands, messages, exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from rescene.cli.app import app

TINY = ["federation.num_clients=3", "federation.per_round=2", "federation.num_rounds=1", "tasks.limit=2", "train.server_epochs=1",
        "method.num_steps=1", "method.ipc=2", "model.width=8"]  # fmt: skip
invoke = CliRunner().invoke


def fails(*args, code, says):
    result = invoke(app, list(args))
    assert result.exit_code == code, result.output
    for text in [says] if isinstance(says, str) else says:
        assert text in result.output, result.output
    assert "Traceback" not in result.output
    return result


def test_help_names_the_verbs():
    output = invoke(app, ["--help"]).output
    for name in ("demo", "run", "resume", "list", "show", "data", "report", "runs", "doctor"):
        assert name in output


def test_lists():
    found = json.loads(invoke(app, ["list", "methods", "--json"]).output)
    assert {"rescene", "fedavg", "feddm"} <= {row["name"] for row in found}
    for what in ("recipes", "datasets", "models", "buffers", "methods"):
        assert invoke(app, ["list", what]).exit_code == 0
    fails("list", "method", code=2, says="did you mean methods?")


def test_show_tells_where_values_come_from():
    values = json.loads(invoke(app, ["show", "demo", "method.budget=5", "--json"]).output)
    assert values["method.budget"] == {"value": 5, "origin": "command line"}
    assert values["federation.num_clients"]["origin"] == "recipe demo"
    assert values["method.tau"] == {"value": 1.0, "origin": "default"}
    assert "command line" in invoke(app, ["show", "demo", "seed=3"]).output


def test_recipe_files_in_three_formats(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: smoke\nseed: 7\n")
    (tmp_path / "b.toml").write_text('extends = "smoke"\nseed = 7\n')
    (tmp_path / "c.json").write_text('{"extends": "smoke", "seed": 7}')
    for name in ("a.yaml", "b.toml", "c.json"):
        values = json.loads(invoke(app, ["show", str(tmp_path / name), "--json"]).output)
        assert values["seed"]["value"] == 7 and values["federation.num_clients"]["value"] == 4


def test_the_privacy_demo_puts_leakage_and_guarantee_beside_accuracy(tmp_path, image_folder):
    few = [
        f"data.path={image_folder}",
        "federation.num_clients=2",
        "federation.per_round=2",
        "federation.partition=iid",
    ]
    few += ["federation.num_rounds=1", "tasks.limit=1", "model.width=4"]
    result = invoke(app, ["demo", "--privacy", *few, "train.server_epochs=1", "--out", str(tmp_path / "d"), "--quiet"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    rows = {line.split()[0]: line for line in lines[1:4]}
    assert lines[0].startswith("recipe") and "near-copies" in lines[0] and list(rows) == ["demo", "waves", "waves-dp"]
    # such pictures are all alike to the lens, and a draw that is near to one of them stays at home
    assert rows["waves"].rstrip().endswith(("0 %", "no images sent")) and rows["waves-dp"].rstrip().endswith("0 %")
    assert "waves: Not private" in result.output
    (promise,) = (line for line in lines if line.startswith("waves-dp: "))
    assert "(8.00, 1e-05)-differentially private" in promise
    assert (tmp_path / "d" / "report.html").is_file()


def test_the_demo_has_three_lines_and_claims_no_guarantee(tmp_path, image_folder):
    few = [f"data.path={image_folder}", "federation.num_clients=2", "federation.per_round=2", "tasks.limit=2"]
    few += ["federation.num_rounds=1", "model.width=4", "train.server_epochs=1", "train.local_epochs=1"]
    result = invoke(app, ["demo", *few, "--out", str(tmp_path / "d"), "--quiet"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["FedAvg", "ReSCENE", "Moments"]
    (told,) = (line for line in lines if line.startswith("Moments: "))
    assert told.startswith("Moments: Simulation, exact sums. Not private") and "epsilon" not in told
    page = (tmp_path / "d" / "report.html").read_text()
    assert all(name in page for name in ("FedAvg", "ReSCENE", "Moments"))


def test_another_plan_of_tasks_replaces_the_recipes(tmp_path, image_folder):
    def tasks(*overrides):
        found = invoke(app, ["run", "demo", f"data.path={image_folder}", *overrides, "--dry-run", "--json"])
        assert found.exit_code == 0, found.output
        return [row["classes"] for row in json.loads(found.output)["tasks"]]

    assert tasks("tasks.sizes=[3,2]") == ["ant, bee, cat", "dog, eel"]
    assert tasks("tasks.plan=[[eel,ant],[dog]]") == ["eel, ant", "dog"]
    assert tasks("tasks.count=5") == ["ant", "bee", "cat", "dog", "eel"]
    fails("run", "demo", "tasks.sizes=[5,5]", "tasks.count=2", "--dry-run", code=2, says="exactly one of")


def test_domains_are_tasks_of_the_same_classes(tmp_path, image_folder, blank_figures):
    for domain in ("night", "day"):
        (tmp_path / "sites" / domain).mkdir(parents=True)
        for name in ("ant", "bee"):
            (image_folder / "train" / name).rename(
                tmp_path / "sites" / domain / name
            ) if domain == "day" else shutil.copytree(image_folder / "train" / name, tmp_path / "sites" / domain / name)
    out = tmp_path / "r"
    args = [
        "run",
        "demo",
        f"data.path={tmp_path / 'sites'}",
        "tasks.scenario=domain",
        *TINY[:3],
        *TINY[4:],
        "--out",
        str(out),
        "-q",
    ]
    result = invoke(app, args)
    assert result.exit_code == 0, result.output
    values = json.loads((out / "results.json").read_text())
    assert [task["domain"] for task in values["tasks"]] == ["day", "night"]
    assert values["aa"] == pytest.approx(sum(values["accuracy_matrix"][-1]) / 2)


def test_mistakes_get_an_answer(tmp_path):
    fails("run", "dmeo", code=2, says=["unknown recipe 'dmeo'", "did you mean 'demo'"])
    fails(
        "run", "smoke", "method.buget=3", code=2, says=["unknown key 'method.buget'", "method.budget", "command line"]
    )
    fails("run", "smoke", "methd=fedavg", code=2, says="did you mean method?")
    fails("run", "smoke", "num_rounds=3", code=2, says="did you mean federation.num_rounds")
    lacking = ["fedavg has no such setting", "methods.NAME.ipc=VALUE"]
    fails("run", "smoke", "method=fedavg", "method.ipc=3", code=2, says=lacking)
    fails("run", "smoke", "method=fedavgg", code=2, says=["unknown method", "did you mean 'fedavg'"])
    fails("run", "smoke", "method=", code=2, says=["no method is named", "rescene list methods"])
    fails("run", "smoke", "federation.per_round=9", code=2, says=["federation.per_round", "num_clients has only 4"])
    fails("run", "smoke", "method.budget=0", code=2, says=["method.budget (B) = 0", "greater than or equal to 1"])
    fails("run", "smoke", "method.ipc=0", code=2, says="method.ipc (IPC) = 0")
    fails("run", "smoke", "federation.beta=-1", code=2, says=["federation.beta = -1", "greater than 0"])
    fails("run", "smoke", "seed", code=2, says="key=value")
    fails("run", "smoke", "device=warp", code=2, says="unknown device")
    fails("run", str(tmp_path / "no.yaml"), code=2, says="no recipe file")
    fails("run", str(tmp_path), code=2, says=["is a folder, not a recipe", "own images", "rescene run own data.path="])
    fails("audit", str(tmp_path / "none"), code=2, says=["E101", "no recipe and no folder"])
    fails("data", "inspect", "nowhere", code=3, says=["unknown data set 'nowhere'", "no file or folder of this name"])
    fails("run", "smoke", f"data.path={tmp_path / 'none'}", code=3, says="error[E2")
    fails("run", "cifar10", "data.path=", f"data.name=cifar{10}x", code=3, says="cifar10")
    fails("resume", str(tmp_path), code=2, says="not a run folder")
    fails("report", str(tmp_path), code=2, says="no run folder")
    (tmp_path / "loop.yaml").write_text(f"extends: {tmp_path / 'loop.yaml'}")
    fails("run", str(tmp_path / "loop.yaml"), code=2, says="circle")
    (tmp_path / "bad.yaml").write_text("a: [")
    fails("run", str(tmp_path / "bad.yaml"), code=2, says="cannot be read")


def test_several_values_are_a_sweep():
    fails("run", "smoke", "method=fedavg,rescene", code=2, says="rescene sweep smoke method=fedavg,rescene\n")
    fix = "rescene sweep smoke federation.beta=0.1,0.5 --seeds 0,1\n"
    fails("run", "smoke", "federation.beta=0.1,0.5", "seed=0,1", code=2, says=fix)
    other = fails("run", "smoke", "tasks.sizes=[1,2,a]", "federation.num_clients=0", code=2, says="E104")
    assert "sweep" not in other.output


def test_what_was_meant_for_another_key_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pics").mkdir()
    fails("run", "smoke", "data=pics", code=3, says="data.path=pics")
    assert "data.path" not in fails("run", "smoke", "data=cifarr10", code=3, says="cifar10").output
    fails("run", "smoke", "--seed", "1", code=2, says="It is a setting, written without dashes: seed=VALUE")
    fails("sweep", "smoke", "--federation.beta", "1", code=2, says="federation.beta=VALUE")
    fails("sweep", "smoke", "--seed", "1", code=2, says="--seeds")  # an option that is nearly so
    assert "setting" not in fails("run", "smoke", "--foo", code=2, says="--foo").output


def test_the_hint_on_a_key_has_the_value_of_the_recipe():
    fails("run", "smoke", "rounds=3", code=2, says="did you mean federation.num_rounds (2 in recipe smoke)?")
    fails("run", "smoke", "federation.num_sites=3", "sed=1", code=2, says="did you mean federation.num_clients (4 in")
    fails("run", "smoke", "federation.quorm=1", code=2, says="did you mean federation.quorum (default ")


def test_debug_shows_the_traceback():
    done = subprocess.run([sys.executable, "-m", "rescene", "run", "dmeo", "--debug"], capture_output=True, text=True)
    assert "Traceback" in done.stderr and "E101" in done.stderr


def test_dry_run_trains_nothing(tmp_path):
    result = invoke(app, ["run", "smoke", "--dry-run", "--out", str(tmp_path / "r")])
    assert result.exit_code == 0 and "nothing was trained" in result.output and "Trouser" in result.output
    assert not (tmp_path / "r").exists()
    facts = json.loads(invoke(app, ["run", "smoke", "--dry-run", "--json"]).output)
    assert len(facts["tasks"]) == 2


def test_own_images_in_one_command(tmp_path, image_folder):
    out = tmp_path / "r"
    result = invoke(app, ["run", "demo", f"data.path={image_folder}", *TINY, "tasks.limit=null", "--out", str(out)])
    assert result.exit_code == 0, result.output
    values = json.loads((out / "results.json").read_text())
    assert [task["classes"] for task in values["tasks"]] == [["ant", "bee"], ["cat", "dog"], ["eel"]]
    assert (out / "report.html").is_file() and "Not private" in result.output


def test_an_unreadable_image_is_named_and_skipped_only_on_request(tmp_path, image_folder, blank_figures):
    (image_folder / "train" / "ant" / "broken.png").write_bytes(b"not a picture")
    args = ["run", "demo", f"data.path={image_folder}", *TINY, "--out", str(tmp_path / "r")]
    fails(*args, code=3, says="broken.png")
    assert invoke(app, [*args, "data.skip_unreadable=true"]).exit_code == 0


def test_runs_and_reports(tmp_path, blank_figures):
    for seed in (0, 1):
        assert (
            invoke(app, ["run", "smoke", *TINY, f"seed={seed}", "--out", str(tmp_path / f"s{seed}"), "-q"]).exit_code
            == 0
        )
    rows = json.loads(invoke(app, ["runs", str(tmp_path), "--json"]).output)
    assert [row["state"] for row in rows] == ["done", "done"] and all(row["aa"] is not None for row in rows)
    assert invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")]).exit_code == 0
    assert "ReSCENE" in (tmp_path / "page.html").read_text()
    values = json.loads(invoke(app, ["run", "smoke", *TINY, "seed=0", "--out", str(tmp_path / "s0"), "--json"]).stdout)
    assert values["aa"] == rows[0]["aa"]


def test_doctor_and_data():
    rows = json.loads(invoke(app, ["doctor", "--json"]).output)
    assert {"python", "torch", "device", "disk"} <= {row["check"] for row in rows}
    assert json.loads(invoke(app, ["data", "list", "--json"]).output)
    inspected = invoke(app, ["data", "inspect", "fashion-mini"])
    assert inspected.exit_code == 0 and "Sneaker" in inspected.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_politely_and_the_run_can_go_on(tmp_path, number, code):
    folder = tmp_path / "r"
    command = [
        sys.executable,
        "-m",
        "rescene",
        "run",
        "smoke",
        "federation.num_rounds=50",
        *TINY[:2],
        "--out",
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # where the tests were started in the background it is ignored
    before = signal.signal(number, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
    finally:
        signal.signal(number, before)
    while process.poll() is None and len(list((folder / "checkpoints").glob("step-*"))) < 2:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Go on with" in errors and "Traceback" not in errors
    assert json.loads(invoke(app, ["runs", str(folder), "--json"]).output)[0]["state"] == "interrupted"
