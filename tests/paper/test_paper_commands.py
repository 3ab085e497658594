"""`rescene paper` as a person uses it, the figures, and the documents it writes."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paper_runs import cell_of, write_run
from typer.testing import CliRunner

from rescene.cli import running
from rescene.cli.app import app
from rescene.core.errors import ResceneWarning
from rescene.paper import Store, compare, known_open, paper_recipe, printed, recipes, store
from rescene.paper.figures import _final_rows, _mark, task_curves
from rescene.paper.pages import refreshed, verdicts_grid
from rescene.paper.paper_tables import ATTACKED, table_grid

ROOT = Path(__file__).parents[2]
MAIN = paper_recipe("main")


def invoke(*args):
    return CliRunner().invoke(app, ["paper", *map(str, args)])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder without data sets, where runs go."""
    for name in ("RESCENE_DATA", "XDG_CACHE_HOME", "RESCENE_RUNS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    return tmp_path


@pytest.fixture
def tiny(monkeypatch):
    """Lite forms of seconds."""
    sizes = ("tasks.limit=2", "federation.num_clients=3", "federation.per_round=2", "federation.num_rounds=1")
    small = (*sizes, "train.server_epochs=1", "method.num_steps=1", "method.ipc=2", "model.width=8")
    monkeypatch.setattr(recipes, "LITE_OVERRIDES", small)
    paper_recipe.cache_clear()
    yield "imbalance-lite"
    paper_recipe.cache_clear()


def test_list_and_table(here):
    write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/fedavg"), aa=15.0)
    listed = json.loads(invoke("list", "--runs", "kept", "--format", "json").output)["rows"]
    assert listed[0]["recipe"] == "paper/main" and listed[0]["runs done"] == "1/216" and len(listed) == 16
    assert len(json.loads(invoke("list", "--lite", "--runs", "kept", "--format", "json").output)["rows"]) == 32
    for kind in ("text", "markdown", "latex", "csv", "html", "json"):
        result = invoke("table", "main", "--only", "cifar10/0.5/fedavg", "--runs", "kept", "--format", kind)
        assert result.exit_code == 0 and "15.84" in result.output, result.output
    assert invoke("table", "main", "--runs", "kept", "--out", "made/main.tex").exit_code == 0
    printed = (here / "made" / "main.tex").read_text()
    assert "toprule" in printed and "rescene paper run" not in printed and "runs are stored" not in printed
    assert "main-lite" in invoke("list", "--runs", "kept").output


def test_where_nothing_is_stored_a_line_says_so(here, monkeypatch):
    monkeypatch.setattr(store, "default_roots", lambda: [Path("results"), Path("runs")])
    write_run(here / "runs", cell_of(MAIN, "cifar10/0.5/fedavg"))  # a run of the user's own is no stored result
    shown = (("list",), ("table", "main"), ("check", "main"), ("figure", "old-recent"))
    for args in shown:
        told = invoke(*args).stderr
        assert "no stored results in results: run this in a checkout of rescene, or give --runs FOLDER" in told, args
    assert "no stored results in kept:" in invoke("list", "--runs", "kept").stderr
    write_run(here / "results", cell_of(MAIN, "cifar10/0.5/fedavg"))
    for args in shown:
        assert "no stored results" not in invoke(*args).stderr, args
    assert "no stored results" not in invoke("list", "--runs", "results").stderr


def test_a_table_counts_every_stored_seed_or_those_that_are_asked_for(here):
    for seed, aa in enumerate((10.0, 20.0, 30.0, 80.0)):
        write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/fedavg"), seed=seed, aa=aa)
    args = ("table", "main", "--only", "cifar10/0.5/fedavg", "--runs", "kept", "--format", "json")
    for seeds, mean, told in (((), 35.0, "4/4"), (("--seeds", "0,1,2"), 20.0, "3/3")):
        (row,) = json.loads(invoke(*args, *seeds).output)["rows"]
        assert (row["AA"]["mean"], row["seeds"]) == (mean, told)


def test_tables_and_figures_by_task_say_which_is_the_first():
    told = "T0 is the first task, as in the paper; runs and reports call it T1."
    assert told in table_grid(paper_recipe("per-task"), Store([])).notes
    assert told not in table_grid(MAIN, Store([])).notes
    assert told in task_curves(Store([])).caption


def test_what_cannot_be_written_gets_an_answer(here):
    (here / "file").write_text("")
    for args, code in [
        (("table", "budget", "--out", "file/t.tex"), "E147"),
        (("table", "budget", "--out", "t.doc"), "E140"),
        (("figure", "old-recent", "--out", "file/drawn"), "E147"),
        (("figure", "old-recent", "--out", "drawn.foo"), "E145"),
    ]:
        result = invoke(*args, "--runs", "kept")
        assert result.exit_code == 2 and code in result.output, result.output


@pytest.mark.slow
def test_the_plan_names_the_small_form_and_says_that_it_is_not_comparable(here, tiny):
    assert "Not comparable with the paper" in invoke("run", tiny, "--plan", "--runs", "kept").output
    full = invoke("run", "budget", "--only", "*B=500", "--seeds", "0", "--plan", "--runs", "kept").output
    assert "rescene paper run budget-lite" in full


def test_a_cell_without_a_forecast_still_needs_its_images(here):
    shown = invoke("run", "privacy", "--only", "*sigma=5", "--seeds", "0", "--plan", "--runs", "kept").output
    assert shown.count("cannot run: E201") == 4 and "to run" not in shown
    assert "rescene data prepare cifar10" in shown and "No cost in advance for 4 of 4 cells" in shown


def test_a_table_is_no_recipe_and_the_message_says_what_to_type():
    result = CliRunner().invoke(app, ["sweep", "paper/main", "--plan"])
    assert result.exit_code == 2 and "rescene paper run main --plan" in result.output


def test_run_goes_on_where_a_cell_cannot(here, tiny, blank_figures):
    first = invoke("run", tiny, "--only", "*alpha=0.5+tau=0.0", "--out", "made", "-q", "--runs", "kept")
    assert first.exit_code == 0 and "1 of 1 runs are stored" in first.output, first.output
    (folder,) = (here / "made").iterdir()
    before = (folder / "results.json").stat().st_mtime_ns
    plan = json.loads(invoke("run", tiny, "--out", "made", "--runs", "kept", "--plan", "--json").output)
    assert sorted(row["state"] for row in plan) == ["done", "to run", "to run", "to run"]
    again = invoke("run", tiny, "--only", "*alpha=0.5+tau=0.0", "--runs", "made")
    assert again.exit_code == 0 and (folder / "results.json").stat().st_mtime_ns == before
    assert invoke("run", tiny, "--only", "*alpha=0.5+tau=0.0", "-q", "--runs", "kept").exit_code == 0
    (own,) = (here / "RESCENE_RUNS").iterdir()  # not in runs/demo, where the runs of `rescene demo` lie
    assert own.name == "paper-lite" and [run.name for run in own.iterdir()] == [folder.name]

    write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/fedavg"), aa=15.0)
    blocked = invoke("run", "main", "--only", "cifar10/0.5/f*", "--seeds", "0", "--runs", "kept", "-q")
    assert blocked.exit_code == 4 and "'cifar10' is not on this machine" in blocked.output
    assert "rescene data prepare cifar10" in blocked.output and "15.00" in blocked.output


@pytest.mark.slow
def test_fast_plans_a_tenth_of_the_server_epochs(here):
    write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/rescene"), overrides=("train.server_epochs=10",))
    args = ("run", "main", "--only", "cifar10/0.5/rescene", "--seeds", "0", "--runs", "kept", "--plan", "--json")
    (row,) = json.loads(invoke(*args).output)
    assert row["state"] == "cannot run: E201" and "data prepare cifar10" in row["fix"]
    assert "data.path" not in row["fix"]  # the command takes no overrides
    assert [row["state"] for row in json.loads(invoke(*args, "--fast").output)] == ["done"]


def test_a_cell_too_large_for_the_device_is_listed_and_the_rest_goes_on(here, tiny, monkeypatch, blank_figures):
    real = running.execute

    def execute(resolved, folder, progress, **options):
        if resolved.recipe.method["tau"] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(resolved, folder, progress, **options)

    monkeypatch.setattr(running, "execute", execute)
    result = invoke("run", tiny, "--only", "*alpha=0.5*", "--out", "made", "--runs", "kept", "-q")
    assert (
        result.exit_code == 4 and "too large for this device" in result.output and "method.real_batch" in result.output
    )
    assert "1 of 2 runs are stored" in result.output


def test_check_fails_where_a_result_falls_out_of_its_band(here):
    assert invoke("check", "main", "--runs", "kept").exit_code == 0
    write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/rescene"), aa=67.0, aia=74.0)
    good = invoke("check", "main", "--runs", "kept", "--all")
    assert good.exit_code == 0 and "accuracy: 2 in band of 2" in good.output and "67.96" in good.output
    assert "run-0" in good.output, "the folder stands beside every figure"
    write_run(here / "kept", cell_of(MAIN, "cifar10/1.0/rescene"), aa=60.0, aia=75.0)
    bad = invoke("check", "main", "--runs", "kept")
    assert bad.exit_code == 5 and "open" in bad.output and "68.80 to " in bad.output


def test_check_fails_where_the_papers_own_method_is_ten_points_too_good(here, monkeypatch):
    monkeypatch.setattr(known_open, "FILE", here / "known_open.csv")
    for name, more in (("exact", 0.0), ("planted", 10.0)):
        (here / name).mkdir()
        for n in printed("main"):
            if n.data == "cifar10" and n.metric == "aa":
                extra = more if n.method == "rescene" else 0.0
                aia = next(o.mean for o in printed("main") if (o.cell, o.metric) == (n.cell, "aia"))
                write_run(here / name, cell_of(MAIN, n.cell), aa=n.mean + extra, aia=aia + extra)
    assert invoke("check", "main", "--runs", "exact").exit_code == 0
    planted = invoke("check", "main", "--runs", "planted", "--format", "json")
    rows = json.loads(planted.output)["rows"]
    assert planted.exit_code == 5 and {row["cell"].split("/")[2] for row in rows} == {"rescene"}
    assert {(row["metric"], row["verdict"]) for row in rows} == {("AA", "open"), ("AIA", "open")} and len(rows) == 6
    claims = json.loads(invoke("check", "claims", "--runs", "planted", "--format", "json").output)["rows"]
    verdicts = {row["claim"]: row["verdict"] for row in claims}
    assert verdicts["reaches 67.96 % AA on CIFAR-10"] == "not supported"
    invoke("check", "--accept-open", "--runs", "exact")
    assert invoke("check", "--known-open", "--runs", "exact").exit_code == 0
    shutil.copy(known_open.FILE, here / "before.csv")
    again = invoke("check", "--known-open", "--runs", "planted", "--format", "json")
    bands, claims = json.loads(again.stdout)
    opened = [row for row in bands["rows"] if row["table"] == "main" and row["verdict"] == "open"]
    assert again.exit_code == 5 and {row["cell"].split("/")[2] for row in opened} == {"rescene"} and len(opened) == 6
    assert known_open.FILE.read_text() == (here / "before.csv").read_text(), "only --accept-open writes it"


def test_what_is_known_to_be_open_does_not_fail_again_and_the_list_can_shrink(here, monkeypatch):
    """An entry holds for one figure: another one at the same place is new, also a better one."""
    file = here / "known_open.csv"
    monkeypatch.setattr(known_open, "FILE", file)
    file.write_text("where,kind,metric,ours,since\nmain:cifar10/0.5/fedavg,accuracy,aa,77.00,2026-01-02\n")
    cell = cell_of(MAIN, "cifar10/0.5/fedavg")

    def checked(aa, *options):
        shutil.rmtree(here / "kept")
        write_run(here / "kept", cell, aa=aa, aia=32.90)
        return invoke("check", "--runs", "kept", *options)

    known = checked(77.0, "--known-open")
    assert known.exit_code == 0 and "known to be open since 2026-01-02" in " ".join(known.stdout.split())
    assert checked(77.0).exit_code == 5, "without the option nothing changes"
    worse = checked(87.0, "--known-open")
    assert worse.exit_code == 5 and "no longer open" in worse.stderr and "fedavg aa 77.00" in worse.stderr
    assert checked(87.0, "--accept-open", "--known-open").exit_code == 0
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert row["ours"] == "87.00" and row["since"] > "2026-01-02"
    good = checked(15.84, "--known-open")
    assert good.exit_code == 0 and "no longer open" in good.stderr
    assert checked(15.84, "--accept-open").exit_code == 0 and len(file.read_text().splitlines()) == 1
    refused = invoke("check", "main", "--known-open")
    assert refused.exit_code == 2 and "E533" in refused.output


def test_the_list_that_ships_is_what_the_stored_results_leave_open():
    result = invoke("check", "--known-open", "--runs", ROOT / "results")
    assert result.exit_code == 0 and "no longer open" not in result.output, result.output


def test_a_run_whose_figures_contradict_each_other_does_not_count_and_fails_the_check(here):
    folder = write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/rescene"), aa=58.0, aia=74.0)
    text = (folder / "results.json").read_text().replace('"aa": 58.0', '"aa": 68.0')
    (folder / "results.json").write_text(text)
    with pytest.warns(ResceneWarning, match="W550.*aa: results.json says 68.0, its accuracy matrix gives 58"):
        found = invoke("check", "main", "--runs", "kept", "--all")
    assert found.exit_code == 5 and "68.00" not in found.output


def test_a_table_on_a_terminal_has_the_cells_that_were_run(here):
    write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/rescene"), aa=67.0, aia=74.0)
    few, every = (invoke("table", "main", "--runs", "kept", *more).output for more in ((), ("--all",)))
    assert "67.00" in few and "TinyImageNet" not in few and "89 cells have no figure of ours yet" in few
    assert "67.00" in every and "TinyImageNet" in every


def test_formulas_are_not_added_to_accuracies(here):
    write_run(
        here / "kept",
        cell_of(MAIN, "cifar10/0.5/fedavg"),
        aa=15.84,
        aia=32.90,
        cost={"measured": {"client_flops": 9e16}},
    )
    notes = json.loads(invoke("check", "--runs", "kept", "--format", "json").output)[0]["notes"]
    kinds = {note.partition(":")[0]: note for note in notes}
    assert kinds["accuracy"] == "accuracy: 2 in band of 2", "one run, several tables: it supports one row once"
    assert "formulas (no run)" in kinds and "counted otherwise" in kinds["measured costs"]


def test_check_of_everything_is_one_json_document(here):
    bands, claims = json.loads(invoke("check", "--runs", "kept", "--format", "json").stdout)
    assert "allowed" in bands["columns"] and "claim" in claims["columns"]


def test_check_claims(here):
    write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/rescene"), aa=50.0)
    result = invoke("check", "claims", "--runs", "kept", "--format", "json")
    assert result.exit_code == 5
    rows = {row["claim"]: row for row in json.loads(result.output)["rows"]}
    assert rows["reaches 67.96 % AA on CIFAR-10"]["verdict"] == "not supported"


def test_a_failing_claim_counts_unless_its_cause_is_known(here, monkeypatch):
    row = {"where": "claims:n100-compute", "kind": "formula", "metric": "share", "ours": "0.49", "why": "another split"}
    for high, code in (("0.50", 0), ("0.46", 5)):
        told = {**row, "shown_by": "", "low": "0.45", "high": high}
        monkeypatch.setattr(compare, "_registered", lambda told=told: (told,))
        result = invoke("check", "claims", "--runs", "kept")
        assert result.exit_code == code and "another split" in result.output


@pytest.mark.parametrize(
    ("name", "columns"),
    [("cost-client-lite", {"client PFLOP", "up MB"}), ("per-task-lite", {"T0", "T1"}), ("server-epochs-lite", {"AA", "server ratio"})],
)  # fmt: skip
def test_a_lite_table_shows_what_its_table_shows(here, name, columns):
    measured = {"client_flops": 1e12, "server_flops": 2e12, "uplink_bytes_per_message": 5e6}
    for cell in paper_recipe(name).cells:
        write_run(here / "kept", cell, cost={"measured": measured})
    shown = json.loads(invoke("table", name, "--runs", "kept", "--format", "json").output)
    assert columns <= set(shown["columns"]) and "T2" not in shown["columns"]
    assert all(shown["rows"][0][column] not in ("", None, "–") for column in columns), shown["rows"][0]
    if name == "cost-client-lite":  # a thousandth of what the paper counts
        assert "0.0010" in invoke("table", name, "--runs", "kept").output


def test_results_without_accuracies_are_named_and_left_out(here):
    folder = write_run(here / "kept", cell_of(MAIN, "cifar10/0.5/fedavg"))
    results = json.loads((folder / "results.json").read_text())
    del results["accuracy_matrix"]
    (folder / "results.json").write_text(json.dumps(results))
    shown = invoke("table", "per-task", "--only", "cifar10/0.5/fedavg", "--runs", "kept")
    assert shown.exit_code == 0 and f"own): {Path('kept') / folder.name}" in shown.output


def test_mistakes_get_an_answer(here):
    for args, says in [
        (("table", "mian"), "did you mean main"),
        (("table", "main", "--only", "mnist"), "no cell of main matches"),
        (("table", "main", "--format", "htm"), "did you mean html"),
        (("table", "main", "--runs", "nowhere"), "no such folder"),
        (("run", "main", "--seeds", "a"), "cannot read the seeds"),
        (("figure", "curves"), "task-curves"),
        (("check", "claim"), "no table 'claim'; did you mean claims?"),
        (("table", "lambda", "--only", "lambda=0.25", "--only", "lambda=2"), "no cell of lambda matches lambda=2"),
        (("readme", "--write", "none.md"), "no such document"),
    ]:
        result = invoke(*args)
        assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output, result.output
    (here / "plain.md").write_text("# nothing\n")
    assert "no place for a table" in invoke("readme", "--write", "plain.md", "--runs", "kept").output
    (here / "odd.md").write_text("<!-- rescene paper: weather -->\n<!-- end -->\n")
    assert "unknown table 'weather'" in invoke("readme", "--write", "odd.md", "--runs", "kept").output


@pytest.mark.parametrize(("name", "rows"), [("old-recent", 30), ("task-curves", 600)])
def test_figures(here, name, rows):
    # paper: 10 methods x 3 sets at beta .1; curves of 8 methods x 3 betas x (5 + 10 + 10) tasks; and one run of ours each
    matrix = [[50.0 if j <= i else None for j in range(5)] for i in range(5)]
    write_run(here / "kept", cell_of(MAIN, "cifar10/0.1/rescene"), matrix=matrix)
    told = invoke("figure", name, "--runs", "kept", "--out", "drawn")
    assert told.exit_code == 0 and told.output.split() == [f"drawn/paper-{name}.{end}" for end in ("png", "svg", "csv")]
    assert {path.name for path in (here / "drawn").iterdir()} == {Path(word).name for word in told.output.split()}
    lines = (here / "drawn" / f"paper-{name}.csv").read_text().splitlines()
    ours = [line for line in lines if ",ours," in line]
    assert len(lines) - 1 - len(ours) == rows and len(ours) == (1 if name == "old-recent" else 5)
    svg = (here / "drawn" / f"paper-{name}.svg").read_text()
    assert all(text in svg for text in ("CIFAR-100", "TinyImageNet", "ReSCENE (ours)", "ReSCENE (paper)"))


def test_no_curve_is_cut_off(here):
    """All panels share one axis: it must hold the highest and the lowest value of any panel."""
    from matplotlib.figure import Figure

    plot, sheet = task_curves(Store([here / "kept"])), Figure()
    plot.draw(sheet)
    shown = [row["accuracy"] for row in plot.rows]
    assert max(shown) > 80
    for axes in sheet.axes:
        low, high = axes.get_ylim()
        assert low <= min(shown) and max(shown) <= high and axes.get_yticks().max() > 80


def test_a_figure_as_one_file(here):
    told = invoke("figure", "old-recent", "--runs", "kept", "--out", "drawn/f.pdf").stdout.split()
    assert told == ["drawn/f.pdf", "drawn/f.csv"]
    assert (here / "drawn" / "f.pdf").read_bytes().startswith(b"%PDF")
    assert (here / "drawn" / "f.csv").read_text().startswith("data,beta,method,whose")


def test_fewer_server_epochs_look_different_in_a_figure(here):
    cell, drawn = cell_of(MAIN, "cifar10/0.1/rescene"), []
    for overrides in ((), ("train.server_epochs=10",)):
        matrix = [[50.0 if j <= i else None for j in range(5)] for i in range(5)]
        write_run(here / "kept", cell, matrix=matrix, overrides=overrides)
    for row in _final_rows(Store([here / "kept"])):
        if row["whose"] == "ours":
            drawn.append(_mark(row, 8))
    full, fast = drawn
    assert full.get("fillstyle", "full") == "full" and fast["fillstyle"] != "full"


def test_the_page_says_how_many_figures_of_the_paper_are_open():
    judged = [("accuracy", "open"), ("accuracy", "in band"), ("accuracy", "open"), ("formula", "explained")]
    grid = verdicts_grid([SimpleNamespace(kind=kind, verdict=verdict) for kind, verdict in judged])
    assert grid.columns == ("figures of the paper", "compared", "in band", "explained", "open")
    assert grid.rows == (("accuracy", "3", "1", "0", "2"), ("formulas (no run)", "1", "0", "1", "0"))
    page = (ROOT / "docs" / "paper.md").read_text("utf-8")
    assert "<!-- rescene paper: check -->\n| figures of the paper | compared |" in page


@pytest.mark.parametrize(
    "name", ["docs/paper.md", "results/paper-lite/README.md", "results/theory/README.md", "README.md"]
)
def test_documents_are_up_to_date(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    fresh = refreshed(text, Store([ROOT / "results"]))
    assert fresh == text, f"rescene paper readme --write {name}"


def test_what_is_said_of_glfc_follows_from_the_stored_file():
    lines = (ROOT / "results" / "privacy" / "glfc-reconstruction.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    (found,) = [row["psnr_db"] for row in rows if (row["data"], row["num_inversions"]) == ("cifar10", 250)]
    back = [value for value in found if value > 30]  # near-copies, as everywhere
    assert f"{len(back)} of {len(found)} at {min(back):.0f} to {max(back):.0f} dB" == ATTACKED["glfc", "cifar10"]
