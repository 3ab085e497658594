"""Sites as the data have them: folders, columns, their hold-out, the split by site, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from picture_files import write_classes, write_picture

from rescene.config import resolve
from rescene.core.errors import DataError
from rescene.data import by_site, load, plan_tasks, prepare, site_names

CLASSES = {"cat": 5, "dog": 5}


def write_sites(root: Path, **classes: dict[str, int]) -> Path:
    for i, (site, own) in enumerate(classes.items()):
        write_classes(root / site, own, start=40 * i)
    return root


def test_a_folder_for_each_site(tmp_path: Path) -> None:
    root = write_sites(tmp_path, north=CLASSES, south=CLASSES)
    with pytest.raises(DataError) as caught:
        load(path=root)
    assert caught.value.code == "E214" and f"rescene data inspect {root} --layout sites" in str(caught.value.fix)
    dataset = load(path=root, layout="sites")
    assert (dataset.sites, dataset.classes, dataset.domains) == (("north", "south"), ("cat", "dog"), ())
    assert dataset.notes[0] == "read as <site>/<class>/*"
    for images, each in ((dataset.train, 8), (dataset.test, 2)):  # a fifth of each class is held out at each site
        assert torch.bincount(images.sites).tolist() == [each, each]  # type: ignore[arg-type]
    assert load(path=root, layout="domains").fingerprint() != dataset.fingerprint()


def test_names_of_folders_can_tell_the_layout_and_the_note_says_why(tmp_path: Path) -> None:
    sites = load(path=write_sites(tmp_path / "a", **{"site-1": CLASSES, "site-2": CLASSES}))
    assert sites.sites == ("site-1", "site-2")
    assert sites.notes[0] == "read as <site>/<class>/*, because the first folders are called site-1, site-2"
    write_classes(tmp_path / "b" / "cat", {"batch1": 5, "batch2": 5})
    write_classes(tmp_path / "b" / "dog", {"batch1": 5}, start=20)
    batches = load(path=tmp_path / "b")
    assert batches.classes == ("cat", "dog")
    assert batches.notes[0] == "read as <class>/*, because the folders below are called batch1, batch2"


def test_a_site_may_lack_a_class_and_have_an_empty_folder_for_it(tmp_path: Path) -> None:
    root = write_sites(tmp_path, north=CLASSES, south={"dog": 5})
    (root / "south" / "cat").mkdir()
    dataset, tasks = plan_tasks(load(path=root, layout="sites"), per_task=1)
    held = [[len(part) for part in by_site(dataset, task, 2)] for task in tasks]
    assert held == [[4, 0], [4, 4]]
    assert site_names("auto", root) == ("north", "south")


def test_sites_with_their_own_train_and_test_folders_and_domains_below(tmp_path: Path) -> None:
    for i, site in enumerate(("north", "south")):
        write_classes(tmp_path / "own" / site / "train", CLASSES, start=40 * i)
        write_classes(tmp_path / "own" / site / "test", {"cat": 2, "dog": 2}, start=40 * i + 20)
        write_classes(tmp_path / "deep" / site / "day", CLASSES, start=40 * i)
        write_classes(tmp_path / "deep" / site / "night", CLASSES, start=40 * i + 20)
    with pytest.raises(DataError) as caught:
        load(path=tmp_path / "own")
    assert "--layout classes" not in str(caught.value.fix) and "cat, dog are classes" in str(caught.value.fix)
    own = load(path=tmp_path / "own", layout="sites")
    assert (len(own.train), len(own.test), own.split, own.sites) == (20, 8, "given", ("north", "south"))
    deep = load(path=tmp_path / "deep", layout="sites-domains")
    assert (deep.sites, deep.domains, deep.classes) == (("north", "south"), ("day", "night"), ("cat", "dog"))
    assert (tmp_path / "deep").is_dir() and deep.notes[0] == "read as <site>/<domain>/<class>/*"


@pytest.mark.parametrize(
    ("layout", "form", "setting"),
    [
        ("sites", "<site>/<class>/*", "federation.partition=sites"),
        ("domains", "<domain>/<class>/*", "tasks.scenario=domain"),
        ("sites-domains", "<site>/<domain>/<class>/*", "federation.partition=sites"),
    ],
)
def test_a_plain_folder_of_classes_is_told_what_its_layout_lacks(tmp_path: Path, layout, form, setting) -> None:  # type: ignore[no-untyped-def]
    write_classes(tmp_path / "plain", {"cat": 2, "dog": 2})
    with pytest.raises(DataError, match="are not arranged as") as caught:
        load(path=tmp_path / "plain", layout=layout)
    error = caught.value
    assert error.code == "E205" and error.what.endswith(form) and error.where == str(tmp_path / "plain")
    assert error.why == "images lie directly in cat, dog, as in <class>/*" and f"leave out {setting}" in error.fix
    write_classes(tmp_path / "half" / "north", {"cat": 2, "dog": 2})
    write_picture(tmp_path / "half" / "south" / "0.png", 0)
    if layout == "sites":
        with pytest.raises(DataError, match="are not arranged as") as caught:
            load(path=tmp_path / "half", layout=layout)
        assert "move the images of south into folders of classes" in caught.value.fix


def test_a_prepared_file_keeps_the_sites(tmp_path: Path) -> None:
    root = write_sites(tmp_path / "images", north=CLASSES, south=CLASSES)
    file = prepare("mine", root, tmp_path, layout="sites")
    again = load(path=file)
    assert again.fingerprint() == load(path=root, layout="sites").fingerprint() and again.sites == ("north", "south")
    assert site_names("auto", file) == ("north", "south")


def table_with_sites(folder: Path, sites: str) -> Path:
    rows = []
    for i in range(12):
        write_picture(folder / f"{i}.png", i)
        rows.append(f"{i}.png,{'ab'[i // 6]},{sites[i % len(sites)]}")
    (folder / "list.csv").write_text("file,kind,ward\n" + "\n".join(rows))
    return folder / "list.csv"


def test_the_number_of_sites_follows_from_the_data(tmp_path: Path) -> None:
    table = table_with_sites(tmp_path, "XYZ")
    words = [f"data.path={table}", "data.columns.label=kind", "data.columns.site=ward", "federation.partition=sites"]
    own = resolve("own", words)
    assert (own.recipe.federation.num_clients, own.recipe.federation.per_round) == (3, 3)
    demo = resolve("demo", words)
    assert (demo.recipe.federation.num_clients, demo.recipe.federation.per_round) == (3, 3)
    assert demo.origins["federation.num_clients"] == "sites of the data"
    few = resolve("demo", [*words, "federation.per_round=2"])
    assert (few.recipe.federation.num_clients, few.recipe.federation.per_round) == (3, 2)
    with pytest.raises(DataError) as caught:
        resolve("demo", [*words, "federation.num_clients=7"])
    assert caught.value.code == "E239" and "X, Y, Z" in str(caught.value.why)


def test_one_site_or_none_is_refused(tmp_path: Path) -> None:
    table = table_with_sites(tmp_path, "X")
    words = [f"data.path={table}", "data.columns.label=kind", "federation.partition=sites"]
    for more, what in (["data.columns.site=ward"], "one site, X"), ([], "name no sites"):
        with pytest.raises(DataError) as caught:
            resolve("demo", [*words, *more])
        assert (
            caught.value.code == "E238"
            and what in caught.value.what
            and "federation.partition=capped" in str(caught.value.fix)
        )
    dataset, tasks = plan_tasks(load(path=table, columns={"label": "kind"}), count=1)
    with pytest.raises(DataError, match="E238"):
        by_site(dataset, tasks[0], 2)
