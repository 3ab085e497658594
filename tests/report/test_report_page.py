"""The page: complete in itself, well formed, honest, and the same numbers as the files beside it."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from page_parser import Page
from PIL import Image
from report_fixtures import (
    CLASSES,
    NUM_TASKS,
    accuracy_matrix,
    config,
    leakage,
    partition,
    results,
    write_means,
    write_run,
    write_running,
)

import rescene.report
from rescene.core.errors import DataError
from rescene.report import comparison_rows, load_run, write_report
from rescene.report.page_sections import setting

FIGURES = {
    *("old-recent", "inside-between", "forgetting", "tasks", "incremental", "rounds", "confusion"),
    *("sites", "participation", "upload", "compute", "timing", "near-copies", "distance", "matrix-rescene"),
    *("matrix-fedavg", "matching"),
}
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "=1+1", r"$\frac{", "a\u202eb", "{{ 7*7 }}")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that compares two methods, one seed each."""
    base = tmp_path_factory.mktemp("two")
    folders = [write_run(base / f"{method}-s0", method) for method in ("rescene", "fedavg")]
    return write_report(folders, base / "out" / "report.html")


def rows_of(page: Path, name: str) -> list[dict[str, str]]:
    with (page.parent / "plots" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def unresolved(html: str) -> set[str]:
    """References inside the page that lead nowhere."""
    page = Page(html)
    inner = [value[1:] for value in page.values("href") if value.startswith("#")]
    inner += re.findall(r"url\(#([^)]*)\)", html) + page.values("aria-labelledby")
    assert inner
    return set(inner) - set(page.values("id"))


def test_page_is_well_formed_and_ids_are_unique(two: Path) -> None:
    ids = Counter(Page(two.read_text("utf-8")).values("id"))
    assert [name for name, num in ids.items() if num > 1] == []
    assert unresolved(two.read_text("utf-8")) == set()


def test_page_loads_nothing_and_runs_only_its_own_script(two: Path) -> None:
    html = two.read_text("utf-8")
    page = Page(html)
    for value in page.values("src") + page.values("href"):
        assert value.startswith(("data:", "#")), value[:80]
    assert not re.search(r"url\(\s*['\"]?(?!#)", html) and "@import" not in html
    assert "http://" not in html and "https://" not in html
    assert page.count("script") == 1 and page.count("link") == 0 and page.count("iframe") == 0
    (policy,) = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    script = html[html.index("<script>") + 8 : html.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)


def test_all_figures_are_on_the_page_and_beside_it(two: Path) -> None:
    page = Page(two.read_text("utf-8"))
    assert {value.removeprefix("figure-") for value in page.values("id") if value.startswith("figure-")} == FIGURES
    assert sum(attrs.get("class") == "plot" for _, attrs in page.tags) == len(FIGURES)
    plots = two.parent / "plots"
    for name in FIGURES:
        assert (plots / f"{name}.svg").read_text("utf-8").startswith("<?xml")
        assert (plots / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert rows_of(two, name)
    assert [path.name for path in two.parent.iterdir() if path.name.startswith(".")] == []  # no draft left behind


def test_figures_follow_the_theme_on_the_page_but_not_in_their_files(two: Path) -> None:
    html, file = two.read_text("utf-8"), (two.parent / "plots" / "tasks.svg").read_text("utf-8")
    body = html[html.index("</style>") :]
    assert "#22262e" in file and "#22262e" not in body and "fill: var(--ink)" in body
    assert "prefers-color-scheme: dark" in html


def test_csv_files_hold_the_numbers_of_the_runs(two: Path) -> None:
    for method, label in (("rescene", "ReSCENE"), ("fedavg", "FedAvg")):
        matrix, told = accuracy_matrix(method, 0), results(method, 0)
        final = [float(row["accuracy"]) for row in rows_of(two, "tasks") if row["method"] == label]
        assert final == matrix[-1].tolist()
        seen = [float(row["accuracy"]) for row in rows_of(two, "incremental") if row["method"] == label]
        assert np.mean(seen) == pytest.approx(told["aia"])
        cells = {(int(r["after_task"]), int(r["task"])): float(r["accuracy"]) for r in rows_of(two, f"matrix-{method}")}
        assert len(cells) == NUM_TASKS * (NUM_TASKS + 1) // 2 and all(
            matrix[key] == value for key, value in cells.items()
        )
        lost = [float(row["forgetting"]) for row in rows_of(two, "forgetting") if row["method"] == label]
        assert np.mean(lost) == pytest.approx(told["forgetting"])
        (point,) = [row for row in rows_of(two, "old-recent") if row["method"] == label]
        assert (float(point["old"]), float(point["recent"])) == (told["old"], told["recent"])
        (parts,) = [row for row in rows_of(two, "inside-between") if row["method"] == label]
        assert float(parts["right"]) + float(parts["lost_between_tasks"]) == pytest.approx(np.mean(told["within_task"]))
    held = {(int(row["site"]), row["class"]): int(row["images"]) for row in rows_of(two, "sites")}
    counts = partition()["tasks"][3]["counts"]
    assert held[4, CLASSES[7]] == counts[4][1] and len(held) == 100


def test_the_summary_has_verdict_chance_comparison_one_curve_and_uploads(two: Path) -> None:
    html = two.read_text("utf-8")
    first = html[html.index("<header>") : html.index("</header>") + 9]
    text, told = Page(f"<!doctype html><html>{first}</html>").text, results("rescene", 0)
    assert f"ReSCENE reaches {told['aa']:.1f}" in text and "Guessing gives 10.0" in text
    assert "It learned its first task" in text and 'id="comparison"' in first and 'id="left"' in first
    for key in ("aa", "aia", "old"):
        assert f"{told[key]:.1f}" in text
    assert re.findall('id="figure-([^"]*)"', first) == ["incremental"]
    assert "97 %" in text and "61.4 kB" in text and "<details" not in first


def test_everything_below_the_summary_is_folded_and_nothing_else_is_open(two: Path) -> None:
    html = two.read_text("utf-8")
    body = html[html.index("<main>") : html.index("</main>")]
    sections = re.findall(r'<section id="([^"]*)"><details class="fold"( open)?>', body)
    assert len(sections) == body.count("<section") >= 10 and not any(opened for _, opened in sections)


def test_the_page_tells_what_left_the_sites(two: Path) -> None:
    text = Page(two.read_text("utf-8")).text
    assert "61.4 kB" in text and "What left the sites not private" in text and "97 %" in text
    assert "No guarantee: rescene adds no noise" in text and leakage()["statement"] in text
    assert "rescene run demo --method rescene --seed 0" in text
    # of both methods; no small talk
    assert text.count("site 3 did not answer") == 1 and "checkpoint written" not in text


def test_every_surrogate_stands_beside_its_nearest_image(two: Path) -> None:
    page = Page(two.read_text("utf-8"))
    assert page.count("img") == 2 * 3 * len(CLASSES)
    badges = two.read_text("utf-8").count(">near-copy</span>")
    assert badges == 2 * len(CLASSES)  # 38.1 and 33.1 dB, not 28.1
    assert (two.parent / "plots" / "surrogates-rescene.png").is_file()
    assert len(rows_of(two, "surrogates-rescene")) == 3 * len(CLASSES)


def test_an_exact_copy_is_a_near_copy_though_its_psnr_is_infinite(tmp_path: Path, blank_figures: set[str]) -> None:
    folder = write_run(tmp_path / "run")
    entries = json.loads((folder / "surrogates.json").read_text())
    entries = [{**entry, "rms": 0.0, "psnr": None} for entry in entries]
    (folder / "surrogates.json").write_text(json.dumps(entries))
    html = write_report([folder], tmp_path / "report.html").read_text("utf-8")
    assert html.count(">near-copy</span>") == len(entries) and "∞ dB" in html


def test_what_a_paper_prints_stands_beside_ours(tmp_path: Path, blank_figures: set[str]) -> None:
    runs = [write_run(tmp_path / method, method) for method in ("rescene", "fedavg")]
    page = tmp_path / "report.html"
    assert "<small>paper, Δ ours</small>" not in write_report(runs, page).read_text("utf-8")
    html = write_report(runs, page, {runs[0].resolve(): {"aa": "61.78 ± 1.14"}}).read_text("utf-8")
    assert html.count("<small>paper, Δ ours</small>") == 2
    apart = results("rescene", 0)["aa"] - 61.78
    assert f'<td data-value="61.78">61.78 ± 1.14<small>Δ {apart:+.2f}</small></td>' in html
    assert html.count('<td data-value="">–</td>') >= 3, "no AIA, and nothing of FedAvg"


def test_class_means_stand_beside_the_real_ones_and_say_who_knows_them(tmp_path: Path, blank_figures: set[str]) -> None:
    folder = write_run(tmp_path / "run")
    assert "Class means" not in write_report([folder], tmp_path / "old.html").read_text("utf-8")  # of an older version
    write_means(folder)
    out = write_report([folder], tmp_path / "report.html")
    page = Page(out.read_text("utf-8"))
    assert "known to the simulator only" in page.text and "T5, 19 uploads, 600 real" in page.text
    images = {attrs["alt"]: attrs["src"] for tag, attrs in page.tags if tag == "img"}
    png = base64.b64decode(images["Mean upload labelled Bag"].partition(",")[2])
    with Image.open(io.BytesIO(png)) as image:
        assert image.getpixel((5, 5)) == (180, 180, 180)
    assert [row["class"] for row in rows_of(out, "class-means-rescene")] == list(CLASSES)


def test_means_that_do_not_fit_their_rows_are_left_out(tmp_path: Path, blank_figures: set[str]) -> None:
    folder = write_run(tmp_path / "run")
    write_means(folder)
    told = json.loads((folder / "surrogates.json").read_text())
    (folder / "surrogates.json").write_text(json.dumps(told | {"means": told["means"][1:]}))
    html = write_report([folder], tmp_path / "report.html").read_text("utf-8")
    assert "Class means" not in html and "recorded pairs" in html


def test_the_recipe_can_be_taken_along(two: Path) -> None:
    html = two.read_text("utf-8")
    (uri,) = re.findall('download="config.yaml" href="([^"]*)"', html)
    assert yaml.safe_load(base64.b64decode(uri.partition(",")[2])) == config("rescene", 0)


def test_resumes_are_among_the_events(tmp_path: Path, blank_figures: set[str]) -> None:
    folder = write_run(tmp_path / "run")
    row = {"task": 2, "round": 1, "level": "info", "code": "I401", "message": "resumed after step 9", "client": None}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    text = Page(write_report([folder], tmp_path / "report.html").read_text("utf-8")).text
    assert "resumed after step 9" in text and "checkpoint written" not in text


def test_a_mechanism_tells_its_figures(tmp_path: Path, blank_figures: set[str]) -> None:
    told = {"private": True, "statement": "A guarantee.", "mechanism": "release", "noise_multiplier": 0.6, "clip": 5.0}
    told |= {"delta": 1e-5, "sampling_rate": 1.0, "epsilon_per_round": 4.25, "epsilon": 8.0}
    text = Page(write_report([write_run(tmp_path / "a", privacy=told)], tmp_path / "a.html").read_text("utf-8")).text
    assert "Mechanism release: σ = 0.6, C = 5, δ = 1e-05, sampling rate = 1, ε of one upload" in text
    assert "= 4.25, ε of the whole run = 8." in text
    older = {key: told[key] for key in ("private", "statement", "mechanism", "noise_multiplier", "epsilon")}
    text = Page(write_report([write_run(tmp_path / "b", privacy=older)], tmp_path / "b.html").read_text("utf-8")).text
    assert "Mechanism release: σ = 0.6, ε of the whole run = 8." in text


def test_accuracy_against_noise_needs_two_amounts_of_it(tmp_path: Path, blank_figures: set[str]) -> None:
    blank_figures.add("noise")

    def noised(sigma: float, seed: int, aa: float) -> Path:
        recipe = config("rescene", seed) | {"privacy": {"noise_multiplier": sigma}}
        told = {"private": False, "statement": "None.", "mechanism": "paper-experiment", "noise_multiplier": sigma}
        return write_run(tmp_path / f"{sigma}-{seed}", "rescene", seed, config=recipe, privacy=told, aa=aa)

    folders = [noised(1.0, 0, 70.0), noised(1.0, 1, 72.0)]
    assert "figure-noise" not in write_report(folders, tmp_path / "one" / "report.html").read_text("utf-8")
    out = write_report([noised(3.0, 0, 60.0), *folders], tmp_path / "two" / "report.html")
    assert 'id="figure-noise"' in out.read_text("utf-8")
    assert [(row["sigma"], row["aa"]) for row in rows_of(out, "noise")] == [("1.0", "71.0"), ("3.0", "60.0")]


def test_what_says_no_more_than_the_table_is_not_drawn(tmp_path: Path, blank_figures: set[str]) -> None:
    """A method alone has one point in a comparison, and a single task is no curve."""
    page = Page(write_report([write_run(tmp_path / "a")], tmp_path / "a.html").read_text("utf-8"))
    drawn = {value.removeprefix("figure-") for value in page.values("id") if value.startswith("figure-")}
    assert drawn == FIGURES - {"old-recent", "upload", "compute", "near-copies", "distance", "matrix-fedavg"}
    one = {"accuracy_matrix": [[80.0]], "incremental_accuracy": [80.0], "tasks": results("rescene", 0)["tasks"][:1]}
    page = Page(write_report([write_run(tmp_path / "b", **one)], tmp_path / "b.html").read_text("utf-8"))
    drawn = {value.removeprefix("figure-") for value in page.values("id") if value.startswith("figure-")}
    assert not drawn & {"tasks", "incremental", "forgetting"} and "rounds" in drawn


def test_identical_problems_and_statements_are_told_once(tmp_path: Path, blank_figures: set[str]) -> None:
    told = {"private": False, "statement": "The same words."}
    folders = [write_run(tmp_path / name, name, privacy=told) for name in ("refed", "fedavg")]
    for folder in folders:
        (folder / "timing.json").write_text("damaged")
    html = write_report(folders, tmp_path / "r.html").read_text("utf-8")
    assert (
        Page(html).text.count("timing.json could not be read") == 1 and "refed, fedavg: timing.json" in Page(html).text
    )
    assert html.partition("</header>")[2].count("The same words.") == 1


def test_large_federations_stay_light(tmp_path: Path) -> None:
    folder, num = write_run(tmp_path / "run"), 100
    tasks = [{"task": t, "classes": [t], "counts": [[k * t % 7] for k in range(num)]} for t in range(150)]
    told = {"num_clients": num, "classes": [f"a rather long class name {t}" for t in range(150)], "tasks": tasks}
    (folder / "partition.json").write_text(json.dumps(told))
    out = write_report([folder], tmp_path / "report.html")
    page = Page(out.read_text("utf-8"))
    assert len(rows_of(out, "sites")) == num * 150
    assert "sites.csv" not in page.values("download") and "tasks.csv" in page.values("download")
    assert page.count("image") == 2  # sites and participation as bitmaps, not as 16,500 shapes
    assert out.stat().st_size < 1_000_000


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>run", "<i>evil</i>/../x", classes=HOSTILE + CLASSES[6:])
    events = {"level": "error", "code": "<u>", "message": "<script>alert(3)</script>", "task": "<s>"}
    (folder / "events.jsonl").write_text(json.dumps(events))
    out = write_report([folder], tmp_path / "out" / "report.html")
    page = Page(out.read_text("utf-8"))
    assert page.count("script") - 1 == page.count("i") == page.count("u") == page.count("s") == page.count("b") - 1 == 0
    assert "onerror" not in {key for _, attrs in page.tags for key in attrs}
    assert HOSTILE[0] in page.text and "{{ 7*7 }}" in page.text and "<script>alert(3)</script>" in page.text
    assert "\u202e" not in out.read_text("utf-8")
    assert {row["class"] for row in rows_of(out, "sites")} >= {"'=1+1", HOSTILE[0]}  # no formula in a spreadsheet
    assert {path.parent for path in tmp_path.rglob("*.svg")} == {tmp_path / "out" / "plots"}


def test_least_possible_runs_still_make_a_page(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "results.json").write_text('{"schema": 1, "method": "fedavg", "aa": 12.5}')
    html = write_report([bare], tmp_path / "report.html").read_text("utf-8")
    text = Page(html).text
    assert unresolved(html) == set()
    assert "FedAvg reaches 12.5 %." in text and "no privacy statement" in text


@pytest.mark.parametrize("key", sorted(set(results("rescene", 0)) - {"method"}))
def test_any_key_of_the_results_may_be_missing_or_null(tmp_path: Path, blank_figures: set[str], key: str) -> None:
    for value in ("missing", None):
        folder = write_run(tmp_path / f"run-{value}")
        told = json.loads((folder / "results.json").read_text())
        told[key] = value
        if value == "missing":
            del told[key]
        (folder / "results.json").write_text(json.dumps(told))
        Page(write_report([folder], tmp_path / "report.html").read_text("utf-8"))


@pytest.mark.parametrize(
    "name",
    [
        "timing",
        "status",
        "env",
        "partition",
        "metrics",
        "events",
        "command",
        "config",
        "surrogates.json",
        "safetensors",
    ],
)
def test_any_other_file_may_be_missing(tmp_path: Path, blank_figures: set[str], name: str) -> None:
    folder = write_run(tmp_path / "run")
    gone = [path for path in folder.iterdir() if name in path.name]
    assert gone
    for path in gone:
        path.unlink()
    assert "ReSCENE reaches" in Page(write_report([folder], tmp_path / "report.html").read_text("utf-8")).text


def test_several_seeds_show_deviation_and_number(tmp_path: Path, blank_figures: set[str]) -> None:
    folders = [write_run(tmp_path / f"s{seed}", "rescene", seed, aa=aa) for seed, aa in enumerate((80.0, 84.0, 88.0))]
    out = write_report(folders, tmp_path / "report.html")
    assert "84.0 ± 4.0" in Page(out.read_text("utf-8")).text
    assert len({row["seed"] for row in rows_of(out, "tasks")}) == 3
    mean = np.mean([accuracy_matrix("rescene", seed) for seed in range(3)], axis=0)
    assert float(rows_of(out, "matrix-rescene")[0]["accuracy"]) == pytest.approx(mean[0, 0])


def test_page_reloads_only_while_a_run_is_going(tmp_path: Path, two: Path) -> None:
    out = write_report([write_running(tmp_path / "rescene-s0")], tmp_path / "report.html")
    page = Page(out.read_text("utf-8"))
    refresh = {"http-equiv": "refresh", "content": "10"}
    assert ("meta", refresh) in page.tags and "task 2 of 5 · round 3 of 3 · server" in page.text
    assert "No run has finished yet" in page.text and "figure-rounds" in page.values("id")
    assert ("meta", refresh) not in Page(two.read_text("utf-8")).tags


def test_a_run_whose_process_is_gone_is_not_running(tmp_path: Path, blank_figures: set[str]) -> None:
    folder = write_running(tmp_path / "rescene-s0")
    status = json.loads((folder / "status.json").read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid, state in ((os.getpid(), "running"), (gone.pid, "interrupted")):
        (folder / "status.json").write_text(json.dumps({**status, "pid": pid}))
        html = write_report([folder], tmp_path / "report.html").read_text("utf-8")
        assert load_run(folder).state == state and ('http-equiv="refresh"' in html) == (state == "running")


def test_other_settings_are_pointed_out(tmp_path: Path, blank_figures: set[str]) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "fedavg")]
    told = json.loads((folders[1] / "results.json").read_text())
    told["config"]["federation"]["beta"] = 0.1
    (folders[1] / "results.json").write_text(json.dumps(told))
    assert "federation.beta differs" in Page(write_report(folders, tmp_path / "r.html").read_text("utf-8")).text


def test_the_same_folders_give_the_same_page(two: Path) -> None:
    folders = sorted(path for path in two.parent.parent.iterdir() if path.name != "out")
    again = write_report(folders[::-1], two.parent.parent / "out" / "again.html")
    assert again.read_bytes() == two.read_bytes()


def test_no_folders_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        write_report([], tmp_path / "report.html")
    assert caught.value.code == "E213"


def test_comparison_on_the_page_is_comparison_rows(two: Path) -> None:
    runs = [load_run(path) for path in two.parent.parent.iterdir() if path.name != "out"]
    uris = {attrs["download"]: attrs["href"] for _, attrs in Page(two.read_text("utf-8")).tags if "download" in attrs}
    kind, _, body = uris["comparison.json"].partition(";base64,")
    assert kind == "data:application/json"
    assert json.loads(base64.b64decode(body)) == comparison_rows(runs)


def test_report_layer_reads_files_only_and_imports_lazily() -> None:
    allowed = {
        "rescene",
        "rescene.core.files",
        "rescene.core.json_files",
        "rescene.core.method_style",
        "rescene.core.noised_accuracy",
        "rescene.core.recipe_keys",
        "rescene.core.results",
        "rescene.core.errors",
        "rescene.core.run_state",
        "rescene.core.verification",
        "rescene.core.versions",
    }
    for path in Path(rescene.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            ours = [name for name in names if name.startswith("rescene")]
            assert all(name in allowed or name.startswith("rescene.report") for name in ours), path.name
            assert not any(name.split(".")[0] == "torch" for name in names), path.name
    probe = "import sys, rescene.report; print([m for m in ('torch', 'matplotlib', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_setting_tells_every_value_where_runs_differ(tmp_path: Path) -> None:
    runs = []
    for beta in (0.5, 0.1):
        own = config("rescene", 0)
        own["federation"]["beta"] = beta
        runs.append(load_run(write_run(tmp_path / f"run-{beta}", config=own)))
    told = dict(setting(runs[0], runs))
    assert told["Skew β"] == "0.1, 0.5" and told["Tasks"] == str(NUM_TASKS)


def test_the_time_per_run_is_no_mean_over_methods(tmp_path: Path) -> None:
    runs = []
    for seconds in (70.0, 15.04, 15.0):
        folder = write_run(tmp_path / f"run-{seconds}")
        timing = json.loads((folder / "timing.json").read_text())
        (folder / "timing.json").write_text(json.dumps(timing | {"total_s": seconds}))
        runs.append(load_run(folder))
    assert dict(setting(runs[0], runs))["Time per run"] == "15.0 s to 1 min 10 s"
    assert dict(setting(runs[1], runs[1:]))["Time per run"] == "15.0 s"


def test_the_page_says_whose_sites_it_shows(two: Path, tmp_path: Path) -> None:
    told = "Shown for one run, "
    (words,) = re.findall(rf"{told}<span[^>]*>[^<]*</span>([^;]*);", two.read_text())
    assert words == "ReSCENE, seed 0"  # the best one, by its label
    assert told not in write_report([write_run(tmp_path / "run")], tmp_path / "report.html").read_text()


def test_classes_are_those_of_the_tasks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    told = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(told | {"classes": [*CLASSES, "never asked"]}))
    run = load_run(folder)
    assert dict(setting(run, [run]))["Classes"] == str(len(CLASSES))
