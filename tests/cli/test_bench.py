"""`rescene doctor --speed` at sizes that take seconds: what it measures is there, whole and written down."""

import json

import torch
from typer.testing import CliRunner

from rescene import bench
from rescene.cli.app import app
from rescene.nets import Arch

TINY = bench.Size(Arch("convnet", 32, width=16), 64, 1, 8, 1, 64, 20, 10)


def test_every_figure_is_measured_and_written(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.SIZES, "cpu", TINY)
    out = tmp_path / "deep" / "bench.json"
    answer = CliRunner().invoke(app, ["doctor", "--speed", "--device", "cpu", "--out", str(out), "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(out.read_text())
    assert found["torch"] == torch.__version__
    figures = {figure["name"]: figure for figure in found["figures"]}
    wanted = (
        "matrix",
        "server training",
        "condensation of a round",
        "local training",
        "with a teacher",
        "norms of single images",
        "evaluation",
        "herding",
        "upload",
    )
    assert all(any(part in name for name in figures) for part in wanted)
    assert all(figure["value"] > 0 for figure in figures.values())
    assert figures["large matrix product"]["share"] == 1.0
    uploads = [figure["value"] for name, figure in figures.items() if name.startswith("upload")]
    assert uploads == sorted(uploads, reverse=True), "float32, float16, uint8"


def test_a_device_that_is_not_there_is_refused():
    answer = CliRunner().invoke(app, ["doctor", "--speed", "--device", "cuda:99"])
    assert answer.exit_code != 0


def test_a_plain_step_lies_near_the_step_in_float64(monkeypatch):
    monkeypatch.setitem(bench.SIZES, "cuda", TINY)
    recorded, plain, exact = bench.ways(torch.device("cpu"), num_steps=1)
    assert torch.equal(recorded, plain), "without a card there is one path"
    assert 0 < bench.apart(plain, exact) < 1e-3
