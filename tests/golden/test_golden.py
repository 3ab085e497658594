"""The golden net: the same results, to the bit, before and after a move. README.md of this folder says how to use it."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from golden_runs import RUNS, machine, play, prepare, summary
from golden_surface import SURFACE, index_of_results
from make_golden import CHECKPOINTS, INDEX, INTERRUPTED, STORED, TODAY, differences

GOLDEN = Path(os.environ.get("RESCENE_GOLDEN", STORED))
# stored checkpoint -> code of the error with which this version refuses it: both stopped between a release and its checkpoint
REFUSED: dict[str, str] = {
    "secure-sum-moments": "E412",  # a release that is made once in a task stood under the round then
    "release-sums": "E412",  # the question names every setting of the method in their order, and the order changed
}
# on another machine: test images by which accuracies, and share by which bytes and work may differ
FEW_IMAGES, SHARE = 12, 0.02


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    prepare(root)
    return root


def compare(name, found, record_property, capsys):
    """With the stored file: all of it on the machine it was made on, else the numbers, within a tolerance."""
    stored = json.loads((GOLDEN / f"{name}.json").read_text())
    exactly = stored["machine"] == machine()
    record_property("golden", "bits" if exactly else "numbers")
    with capsys.disabled():
        if not exactly:
            print(f"\n{name}: numbers only, the bits are of {stored['machine']}, this is {machine()}")
    differing = differences({k: v for k, v in stored.items() if k in found}, found)
    if not exactly:
        differing = far_apart(stored, found)
    assert stored.keys() - {"run", "machine"} <= found.keys()
    told = "to the bit" if exactly else "within the tolerance"
    accept = f"if this is meant: python tests/golden/make_golden.py --accept {name}"
    assert not differing, "\n".join([f"{name} is not what it was, {told}:", *differing[:40], accept])


def far_apart(stored, found):
    """What another machine must have alike: tensors, tasks and who took part; accuracies and bytes nearly."""
    same = ("method", "tasks", "shapes", "charges")
    told = differences({key: stored[key] for key in same}, found)
    rounds = zip(stored["rounds"], found["rounds"], strict=True)
    told += [f"  rounds: {a}, now {b}" for a, b in rounds if a["participants"] != b["participants"]]
    for kind in ("measured", "nominal"):
        for key, value in (stored["cost"][kind] or {}).items():
            now = found["cost"][kind][key]
            if abs((value or 0) - (now or 0)) > SHARE * abs(value or 0):
                told.append(f"  cost.{kind}.{key}: {value}, now {now}")
    sizes = [size for *_, size in stored["tasks"]]
    for i, (row, now) in enumerate(
        zip(stored.get("accuracy_matrix", ()), found.get("accuracy_matrix", ()), strict=True)
    ):
        for j, (a, b, size) in enumerate(zip(row, now, sizes, strict=True)):
            if (a is None) != (b is None) or (a is not None and abs(a - b) * size / 100 > FEW_IMAGES):
                told.append(f"  accuracy_matrix[{i}][{j}]: {a}, now {b}")
    return told


def marked(names):
    return [pytest.param(name, marks=pytest.mark.slow) if RUNS[name].slow else name for name in names]


@pytest.mark.parametrize("name", marked(RUNS))
def test_a_run_ends_as_it_did(name, place, record_property, capsys):
    run = RUNS[name]
    compare(name, summary(play(run, place), run.noisy), record_property, capsys)


def test_every_method_has_a_golden_run():
    known = re.findall(r"^([\w-]+): ", (SURFACE / "methods.txt").read_text(), re.MULTILINE)
    assert len(known) > 10 and set(known) == {run.overrides["method"] for run in RUNS.values()}
    assert {path.stem for path in STORED.iterdir()} == set(RUNS)


def unpacked(name, root):
    """The stored folder of an interrupted run, beside the pictures it was learning from."""
    prepare(root)
    with tarfile.open(fileobj=io.BytesIO((CHECKPOINTS / f"{name}.tar.gz").read_bytes())) as archive:
        careful = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4
        archive.extractall(root, **careful)
    assert not (root / "runs" / name / "results.json").exists()
    return root


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_stored_checkpoint_goes_on_to_the_same_end(name, tmp_path, record_property, capsys):
    """Or is refused with a code that REFUSED names."""
    root, run = unpacked(name, tmp_path), RUNS[TODAY.get(name, name)]
    if name in REFUSED:
        with pytest.raises(Exception, match=rf"error\[{REFUSED[name]}\]") as refused:
            play(run, root, elsewhere=True)
        assert refused.value.fix
        return
    folder = play(run, root, called=name, elsewhere=True)
    events = (folder / "events.jsonl").read_text()
    assert "resumed after step" in events, "it must go on, not begin anew"
    compare(run.name, summary(folder), record_property, capsys)


@pytest.mark.slow
def test_the_command_line_goes_on_too(tmp_path, record_property, capsys):
    root = unpacked("rescene", tmp_path)
    words = [sys.executable, "-m", "rescene", "resume", "runs/rescene", "--elsewhere", "--quiet"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    compare("rescene-plus", summary(root / "runs" / "rescene"), record_property, capsys)


def test_every_stored_result_still_loads():
    stored, found = json.loads(INDEX.read_text()), index_of_results()
    accept = "new or changed on purpose: python tests/golden/make_golden.py --accept results"
    lost = [folder for folder in stored if folder not in found]
    assert not lost, "\n".join(["these run folders are gone or do not load:", *lost, accept])
    differing = differences(stored, found)
    assert not differing, "\n".join(["these tell other numbers than before:", *differing[:40], accept])
    new = sorted(found.keys() - stored.keys())
    assert not new, "\n".join(["these run folders are not in the index yet:", *new, accept])


@pytest.mark.parametrize("name", ["recipes.txt", "verbs.txt", "methods.txt", "errors.txt", "names.txt"])
def test_the_surface_is_what_it_was(name, all_surface):
    before, now = (text.splitlines() for text in ((SURFACE / name).read_text(), all_surface[name]))
    gone, new = ([line for line in one if line not in set(other)] for one, other in ((before, now), (now, before)))
    accept = "if this is meant: python tests/golden/make_golden.py --accept surface, and look at the diff"
    assert before == now, "\n".join([f"{name}:", *(f"- {x}" for x in gone), *(f"+ {x}" for x in new), accept])


@pytest.fixture(scope="module")
def all_surface():
    """In a process of its own: here, other tests may have registered methods."""
    code = "import json; from golden_surface import surface; print(json.dumps(surface()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
