"""Grouping and comparison: seeds averaged with n-1, recipes kept apart, words that follow the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import config, leakage, write_run, write_running

from rescene.core.method_style import style_of
from rescene.report import comparison_rows, load_run
from rescene.report.formatting import NONE, plain, slug
from rescene.report.groups import differing_settings, group_runs, telling_keys, traits
from rescene.report.load import RunRecord
from rescene.report.page import page_cells
from rescene.report.summary import departure, verdict
from rescene.report.tables import PAGE, comparison_grid, render


def make(tmp_path: Path, method: str, seed: int, tag: str = "", **changes: Any) -> RunRecord:
    return load_run(write_run(tmp_path / f"{method}-s{seed}-{tag}", method, seed, **changes))


def test_seeds_are_averaged_with_n_minus_one(tmp_path: Path) -> None:
    runs = [make(tmp_path, "rescene", seed, aa=aa, old=60.0) for seed, aa in enumerate((80.0, 84.0, 88.0))]
    (row,) = comparison_rows(runs)
    assert (row["num_seeds"], row["aa"]) == (3, 84.0)
    assert row["aa_std"] == pytest.approx(4.0)  # squares 16 + 0 + 16 over n-1 = 2
    assert (row["old"], row["old_std"]) == (60.0, 0.0)
    assert row["near_copies"] == pytest.approx(0.97)


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    (row,) = comparison_rows([make(tmp_path, "fedavg", 0)])
    assert row["num_seeds"] == 1 and row["aa_std"] is None
    assert row["near_copies"] is None  # never measured is not zero


def test_the_same_seed_twice_counts_once(tmp_path: Path) -> None:
    runs = [make(tmp_path, "rescene", 0, "a", aa=80.0), make(tmp_path, "rescene", 0, "b", aa=80.0)]
    (group,) = group_runs([*runs, make(tmp_path, "rescene", 1, aa=90.0)])
    assert [run.seed for run in group.runs] == [0, 1]
    assert [run.folder.name for run in group.repeats] == ["rescene-s0-b"]
    assert comparison_rows(list(group.runs + group.repeats))[0]["aa"] == 85.0


def test_other_recipes_of_one_method_stay_apart_and_say_how(tmp_path: Path) -> None:
    other = config("rescene", 0)
    other["federation"]["beta"] = 0.1
    runs = [make(tmp_path, "rescene", 0, aa=80.0), make(tmp_path, "rescene", 0, "b", aa=50.0, config=other)]
    groups = group_runs(runs)
    assert [group.label for group in groups] == ["ReSCENE beta=0.5", "ReSCENE beta=0.1"]
    assert len({group.slug for group in groups}) == 2
    assert differing_settings(groups) == ["federation.beta"]


def recipes(tmp_path: Path, *told: tuple[str, dict[str, Any]]) -> list[RunRecord]:
    """Runs of recipes with these names and method settings."""
    runs = []
    for i, (name, settings) in enumerate(told):
        made = config("rescene", 0)
        made["method"] |= settings
        folder = write_run(tmp_path / f"run-{i}", "rescene", 0, aa=90.0 - i, config=made)
        if name:
            (folder / "origin.json").write_text(json.dumps({"recipe": name}))
        runs.append(load_run(folder))
    return runs


@pytest.mark.parametrize(("told", "labels"), [
    ([("demo", {"a": 0, "b": 0, "c": 0, "d": 0}), ("private", {"a": 1, "b": 1, "c": 1, "d": 0}),
      ("private-dp", {"a": 1, "b": 1, "c": 1, "d": 1})], ["demo", "private", "private-dp"]),
    ([("demo", {"a": 0, "b": 0, "c": 0, "d": 0}), ("private", {"a": 1, "b": 1, "c": 1, "d": 0}),
      ("private", {"a": 1, "b": 1, "c": 1, "d": 1})], ["demo", "private", "private d=1"]),
    ([("demo", {"a": 0}), ("private", {"a": 1})], ["a=0", "a=1"]),
    ([("demo", {"a": 0, "b": 0, "c": 0, "d": 0}), ("demo", {"a": 1, "b": 1, "c": 1, "d": 0}),
      ("demo", {"a": 1, "b": 1, "c": 1, "d": 1})], ["a=0 b=0 c=0", "a=1 b=1 c=1", "a=1 b=1 c=1 d=1"]),
    ([("demo", {"a": 0, "b": 0, "c": 0, "d": 0}), ("", {"a": 1, "b": 1, "c": 1, "d": 1})],
     ["a=0 b=0 c=0 …", "a=1 b=1 c=1 …"]),
])  # fmt: skip
def test_where_many_settings_differ_the_recipes_name_is_the_label_and_no_two_are_alike(
    tmp_path: Path, told: list[tuple[str, dict[str, Any]]], labels: list[str]
) -> None:
    assert [group.label for group in group_runs(recipes(tmp_path, *told))] == [f"ReSCENE {words}" for words in labels]


def test_seed_and_device_do_not_make_another_recipe(tmp_path: Path) -> None:
    moved = config("rescene", 1) | {"device": "cuda", "order_seed": 5}
    assert len(group_runs([make(tmp_path, "rescene", 0), make(tmp_path, "rescene", 1, config=moved)])) == 1


def test_a_key_that_older_runs_do_not_know_makes_no_other_recipe(tmp_path: Path) -> None:
    younger = config("rescene", 1)
    younger["federation"]["patience"] = 3
    runs = [make(tmp_path, "rescene", 0), make(tmp_path, "rescene", 1, config=younger)]
    assert [group.label for group in group_runs(runs)] == ["ReSCENE"]
    impatient = {**younger, "federation": {**younger["federation"], "patience": 0}}
    assert len(group_runs([*runs[1:], make(tmp_path, "rescene", 2, config=impatient)])) == 2


def test_a_record_from_before_there_was_a_choice_of_steps_is_of_fixed_ones(tmp_path: Path) -> None:
    """The default is another one since: averaged together, or counted as a repetition, one of the two would be lost."""
    older = config("rescene", 0)
    older["method"] |= {"literal": False, "reduction": "sum", "precision": "auto"}
    younger = {**older, "method": {**older["method"], "step": "polyak"}}
    made = {"older": older, "younger": younger}
    groups = group_runs([make(tmp_path, "rescene", 0, tag, config=each) for tag, each in made.items()])
    assert sorted(group.label for group in groups) == ["ReSCENE+", "ReSCENE+ fixed steps"]


def test_a_record_from_before_a_method_had_a_choice_is_of_what_it_did_then(tmp_path: Path) -> None:
    summed, averaged = (config("fedlwf", 0) for _ in range(2))
    summed["method"]["kd_reduction"], averaged["method"]["kd_reduction"] = "sum", "mean"
    made = {"older": config("fedlwf", 0), "summed": summed, "averaged": averaged}
    groups = group_runs([make(tmp_path, "fedlwf", 0, tag, config=each) for tag, each in made.items()])
    assert sorted((group.label, len(group.repeats)) for group in groups) == [
        ("FedLwF kd_reduction=mean", 0),
        ("FedLwF kd_reduction=sum", 1),
    ]


def test_rows_are_ordered_best_first_and_unfinished_last(tmp_path: Path) -> None:
    runs = [load_run(write_running(tmp_path / "going")), make(tmp_path, "fedavg", 0), make(tmp_path, "refed", 0)]
    rows = comparison_rows(runs)
    assert [row["label"] for row in rows] == ["Re-Fed", "FedAvg", "ReSCENE"]
    assert (rows[-1]["num_seeds"], rows[-1]["num_unfinished"], rows[-1]["aa"]) == (0, 1, None)


def test_best_cells_are_marked_by_direction_and_ties_share(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, "rescene", 0, aa=80.01, forgetting=9.0),
        make(tmp_path, "fedavg", 0, aa=80.04, forgetting=60.0),
        make(tmp_path, "refed", 0, aa=10.0, forgetting=20.0),
    ]
    groups = group_runs(runs)
    keys = [column.key for column in PAGE]
    cells = {
        group.label: dict(zip(keys, line, strict=True)) for group, line in zip(groups, page_cells(groups), strict=True)
    }
    assert [cells[name]["aa"].best for name in ("ReSCENE", "FedAvg", "Re-Fed")] == [
        True,
        True,
        False,
    ]  # both print 80.0
    assert [cells[name]["forgetting"].best for name in ("ReSCENE", "FedAvg", "Re-Fed")] == [
        True,
        False,
        False,
    ]  # less is better
    assert not any(line["near_copies"].best for line in cells.values())  # no winner among near-copies


def test_leakage_stands_right_beside_accuracy(tmp_path: Path) -> None:
    """A narrow screen shows the first columns only."""
    assert [column.key for column in PAGE][:3] == ["aa", "aia", "near_copies"]
    groups = group_runs([make(tmp_path, "rescene", 0), make(tmp_path, "fedavg", 0)])
    told = {group.label: line[2].text for group, line in zip(groups, page_cells(groups), strict=True)}
    assert told == {"ReSCENE": "97", "FedAvg": "no images"}
    assert {row[0]: row[4] for row in comparison_grid(groups).rows}["FedAvg"] == "no images"


def test_latex_table_escapes_and_marks(tmp_path: Path) -> None:
    runs = [make(tmp_path, "rescene", 0, aa=80.0), make(tmp_path, "my_method&co", 0, aa=10.0)]
    text = render(comparison_grid(group_runs(runs)), "latex")
    assert r"\textbf{80.0}" in text and r"my\_method\&co" in text and r"\bottomrule" in text


def test_the_hero_is_the_best_method_that_was_run_whatever_it_is_called(tmp_path: Path) -> None:
    runs = [make(tmp_path, "rescene", 0, aa=50.0), make(tmp_path, "refed", 0, aa=55.5)]
    found = verdict(group_runs(runs))
    assert found.title.startswith("Re-Fed reaches 55.5") and found.title.endswith("5.5 points above ReSCENE.")


def test_only_a_method_in_the_same_setting_is_a_rival(tmp_path: Path) -> None:
    other = config("refed", 0)
    other["federation"]["beta"] = 0.1
    runs = [make(tmp_path, "rescene", 0, aa=50.0), make(tmp_path, "refed", 0, aa=99.0, config=other)]
    assert verdict(group_runs(runs)).title == "Re-Fed beta=0.1 reaches 99.0\u00a0% over all 5 tasks."


def test_another_form_of_the_same_method_is_no_rival(tmp_path: Path) -> None:
    fixed = config("rescene", 0)
    fixed["method"]["step"] = "fixed"
    runs = [make(tmp_path, "rescene", 0, aa=77.1), make(tmp_path, "rescene", 0, "b", aa=77.0, config=fixed)]
    assert verdict(group_runs([*runs, make(tmp_path, "refed", 0, aa=45.1)])).title.endswith("32.0 points above Re-Fed.")
    assert verdict(group_runs(runs)).title.endswith("reaches 77.1\u00a0% over all 5 tasks.")


def with_epochs(tmp_path: Path, method: str, epochs: int, aa: float, seed: int = 0) -> RunRecord:
    told = config(method, seed)
    told["train"]["server_epochs"] = epochs
    return make(tmp_path, method, seed, str(epochs), aa=aa, config=told)


def test_server_epochs_are_told_on_every_row_they_act_on(tmp_path: Path) -> None:
    """A control with E_srv=10 under ours with 100 would read as a comparison that nobody made."""
    told = {"rescene": (100, 87.0), "raw-upload": (10, 81.1), "feddm": (100, 17.6), "fedcbdr": (100, 78.0)}
    groups = group_runs([with_epochs(tmp_path, method, *values) for method, values in told.items()])
    labels = ["ReSCENE E_srv=100", "Raw upload (control) E_srv=10", "FedCBDR", "FedDM E_srv=100"]
    assert [group.label for group in groups] == labels
    assert differing_settings(groups) == ["train.server_epochs"]
    assert verdict(groups).title.endswith("9.0 points above FedCBDR.")  # E_srv says nothing about the problem
    assert differing_settings([group for group in groups if group.method != "raw-upload"]) == []


def test_augmentation_is_told_where_rows_differ_in_it(tmp_path: Path) -> None:
    told = [config(method, 0) for method in ("rescene", "refed", "fedavg")]  # the last one is older than the setting
    for own, augment in zip(told, (True, False), strict=False):
        own["train"]["augment"] = augment
    groups = group_runs([make(tmp_path, own["method"]["name"], 0, config=own) for own in told])
    assert differing_settings(groups) == ["train.augment"]
    assert differing_settings([group for group in groups if group.method != "refed"]) == []
    told[0]["method"]["server_augment"] = True
    again = group_runs([make(tmp_path, own["method"]["name"], 0, "again", config=own) for own in told])
    assert differing_settings(again) == ["train.augment"]


def test_server_epochs_make_no_other_recipe_where_no_server_trains(tmp_path: Path) -> None:
    runs = [with_epochs(tmp_path, "fedavg", epochs, 10.0, seed) for seed, epochs in enumerate((10, 100))]
    (group,) = group_runs(runs)
    assert (group.label, len(group.runs)) == ("FedAvg", 2)
    assert len(group_runs([with_epochs(tmp_path, "rescene", epochs, 10.0) for epochs in (10, 100)])) == 2


def test_two_ways_to_say_that_the_server_does_not_augment_are_one_setting(tmp_path: Path) -> None:
    def run(seed: int, augment: bool, server_augment: bool) -> RunRecord:
        told = config("rescene", seed)
        told["train"]["augment"], told["method"]["server_augment"] = augment, server_augment
        return make(tmp_path, "rescene", seed, config=told)

    groups = group_runs([run(0, False, True), run(1, True, False), run(2, False, False), run(3, True, True)])
    assert sorted([run.seed for run in group.runs] for group in groups) == [[0, 1, 2], [3]]


def test_how_often_a_run_was_evaluated_is_no_other_setting(tmp_path: Path) -> None:
    told = [config("fedavg", seed) for seed in (0, 1)]
    for own, every in zip(told, (0, 1), strict=True):
        own["federation"]["evaluate_every"] = every
    (group,) = group_runs([make(tmp_path, "fedavg", own["seed"], config=own) for own in told])
    assert (group.label, len(group.runs)) == ("FedAvg", 2)


def test_without_a_mechanism_nothing_else_in_the_privacy_section_is_a_setting(tmp_path: Path) -> None:
    idle = config("rescene", 0) | {"privacy": {"mechanism": "none", "epsilon": 8.0, "clip": 1.0}}
    plain_run = config("fedavg", 0) | {"privacy": {"mechanism": "none", "epsilon": None, "clip": 5.0}}
    runs = [make(tmp_path, "rescene", 0, config=idle), make(tmp_path, "fedavg", 0, config=plain_run)]
    groups = group_runs(runs)
    assert (
        differing_settings(groups) == [] and telling_keys(groups) == []
    )  # `rescene table` has a column for each of these
    assert {traits(group)["epsilon"] for group in groups} == {NONE}


def test_where_a_named_set_lies_is_no_other_setting(tmp_path: Path) -> None:
    def at(path: str, name: str) -> list[RunRecord]:
        told = [config(method, 0) for method in ("rescene", "refed")]
        told[0]["data"] = {"name": name, "path": path}
        told[1]["data"] = {"name": name, "path": None}
        return [make(tmp_path, own["method"]["name"], 0, name, config=own) for own in told]

    assert differing_settings(group_runs(at("data/cifar10", "cifar10"))) == []
    assert differing_settings(group_runs(at("photos", "folder"))) == ["data.path"]


def test_precision_is_named_only_where_nothing_else_tells_runs_apart(tmp_path: Path) -> None:
    def run(tag: str, **method: str) -> RunRecord:
        told = config("rescene", 0)
        told["method"] |= method
        return make(tmp_path, "rescene", 0, tag, aa=80.0 - len(tag), config=told)

    rough, fine = run("", step="polyak", precision="auto"), run("a", step="fixed", precision="float32")
    assert [group.label for group in group_runs([rough, fine])] == ["ReSCENE", "ReSCENE fixed steps"]
    other = run("ab", step="fixed", precision="auto")
    assert len({group.label for group in group_runs([rough, fine, other])}) == 3


def test_no_two_groups_share_a_label_or_a_slug(tmp_path: Path) -> None:
    """Even where what sets them apart lies in the middle of long words."""
    runs = []
    for i, middle in enumerate("xyz"):
        told = config("rescene", 0)
        told["method"]["anything"] = f"a-rather-long-beginning-{middle}-and-a-rather-long-end"
        runs.append(make(tmp_path, "rescene", 0, str(i), config=told))
    groups = group_runs(runs)
    assert len({group.label for group in groups}) == len({group.slug for group in groups}) == 3


def test_the_best_form_of_a_method_is_drawn_as_the_method(tmp_path: Path) -> None:
    runs = [with_epochs(tmp_path, "rescene", epochs, aa) for epochs, aa in ((5, 70.0), (10, 75.0), (100, 87.0))]
    assert [(group.variant, group.label) for group in group_runs(runs)] == [
        (0, "ReSCENE E_srv=100"),
        (1, "ReSCENE E_srv=10"),
        (2, "ReSCENE E_srv=5"),
    ]


def test_verdict_names_the_spread_over_seeds(tmp_path: Path) -> None:
    ours = [make(tmp_path, "rescene", seed, aa=aa) for seed, aa in enumerate((70.0, 80.0))]
    theirs = [make(tmp_path, "refed", seed, aa=aa) for seed, aa in enumerate((69.0, 79.0))]
    text = " ".join(verdict(group_runs(ours + theirs)).lines)
    assert "within the spread over seeds" in text
    assert any(line.startswith("One seed only") for line in verdict(group_runs(ours[:1])).lines)


def test_verdict_on_old_tasks_follows_the_numbers(tmp_path: Path) -> None:
    said = []
    for i, (old, recent) in enumerate(((0.0, 40.0), (60.0, 62.0), (50.0, 80.0), (1.0, 4.0))):
        said.append(verdict(group_runs([make(tmp_path, "fedavg", i, old=old, recent=recent)])).lines[1])
    ends = ("are forgotten.", "about as well as new ones.", "trail by 30.0 points.", "it has learned little.")
    assert all(line.endswith(end) for line, end in zip(said, ends, strict=True))


def test_verdict_tells_chance_and_whether_the_first_task_was_learned(tmp_path: Path) -> None:
    line = verdict(group_runs([make(tmp_path, "rescene", 0)])).lines[0]
    assert line.startswith("Guessing gives 10.0\u00a0%. It learned its first task: ")
    assert line.endswith("where guessing gives 50.0\u00a0%.")
    flat = [[50.5 if t <= i else None for t in range(5)] for i in range(5)]
    poor = verdict(group_runs([make(tmp_path, "fedavg", 0, accuracy_matrix=flat, aa=10.4)]))
    assert "It did not learn its first task: 50.5\u00a0%" in poor.lines[0]
    assert poor.title.endswith("over all 5 tasks, no better than guessing.")


def test_a_reference_line_is_the_hero_only_where_nothing_competes(tmp_path: Path) -> None:
    joint, fedavg = make(tmp_path, "joint", 0, aa=99.0), make(tmp_path, "fedavg", 0, aa=20.0)
    assert [(group.method, group.hero) for group in group_runs([joint, fedavg])] == [("joint", False), ("fedavg", True)]
    assert [group.hero for group in group_runs([joint])] == [True]


def test_a_method_of_ones_own_looks_as_its_run_recorded_it(tmp_path: Path) -> None:
    """No list in the report knows it: title, colour and marker come from results.json, damaged ones from the name."""
    told = {"title": "My Method", "colour": "#123456", "marker": "D", "uploads": "images", "sends": "drawings"}
    (group,) = group_runs([make(tmp_path, "my-method", 0, style=told)])
    assert (group.label, group.style.colour, group.style.marker) == ("My Method", "#123456", "D")
    assert departure(group).sends == "drawings"
    (other,) = group_runs([make(tmp_path, "my-method", 0, "b", style=told | {"colour": "red;}</style>"})])
    assert other.label == "my-method" and other.style == style_of("my-method")


def test_nothing_is_called_private_unless_every_run_says_so(tmp_path: Path) -> None:
    claim = {"private": True, "statement": "epsilon 4 at delta 1e-5 per site"}
    (mixed,) = group_runs([make(tmp_path, "rescene", 0, privacy=claim), make(tmp_path, "rescene", 1)])
    assert not departure(mixed).private and departure(mixed).in_short == "none"
    (silent,) = group_runs([make(tmp_path, "fedavg", 0, privacy=None)])
    assert not departure(silent).private and "no privacy statement" in departure(silent).guarantee
    (kept,) = group_runs([make(tmp_path, "rescene", 2, privacy=claim)])
    assert departure(kept).private and departure(kept).in_short == claim["statement"]


def test_departure_reports_near_and_exact_copies(tmp_path: Path) -> None:
    (group,) = group_runs([make(tmp_path, "rescene", 0, leakage={**leakage(), "near_copies": 0.42, "exact_copies": 3})])
    assert departure(group).finding == "42\u00a0% near-copies of 1,234 images, 3 exact"


def test_styles_are_fixed_and_unknown_methods_stable() -> None:
    assert style_of("re-fed") == style_of("ReFed") == style_of("Re-Fed")
    assert style_of("brand new") == style_of("brand new")
    known = ["rescene", "fedavg", "fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed", "feddm", "fedaf"]
    assert len({style_of(name).colour for name in known}) == len(known)
    assert len({style_of(name).marker for name in known}) == len(known)  # told apart without colour


def test_names_from_files_are_made_harmless() -> None:
    assert plain("a\u202eb\x00c\n") == "a b c"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug("///").startswith("method-")
