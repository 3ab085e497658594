"""Charges are kept by the images they touch, releases are files, and the first run's epsilon is the limit of all runs."""

import json
import subprocess
import sys
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from rescene.core.errors import RunError
from rescene.privacy.accounting import Composition, epsilon_of
from rescene.privacy.ledger import Charge, Declined, Floor, Ledger, Touched
from rescene.privacy.ledger_file import fingerprint
from rescene.privacy.noise import Noise

CHARGE = Charge("run", 0, 0, "release", 2.0, 1, 1.0)
ONCE, TWICE, THRICE = (epsilon_of(2.0, Composition(1, n), 1e-5) for n in (1, 2, 3))


def images(*numbers, view="16 px"):
    return Touched(view, [blake2b(bytes([n])).digest()[:16] for n in numbers])


class Site:
    """A site's ledger with its mark, opened anew for each question."""

    def __init__(self, folder, **limits):
        folder.mkdir(exist_ok=True)
        self.path, self.mark, self.limits = folder / "ledger.jsonl", folder / "mark", limits

    def open(self):
        return Ledger(self.path, Floor(**self.limits) if self.limits else None, self.mark)

    def ask(self, touched, draw=lambda: {"sums": Noise().normal(3)}, **place):
        return self.open().once(replace(CHARGE, **place), "q", 1e-5, None, draw, touched)["sums"]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site", epsilon_max=TWICE + 1e-6)


@pytest.mark.parametrize(
    "again", [{"task": -1}, {"task": 7}, {"round": 5}, {"run": "other"}, {"round": -1}], ids=lambda p: str(p)
)
def test_the_same_images_cost_more_whatever_the_server_calls_the_place(site, again):
    site.ask(images(1, 2))
    site.ask(images(2, 3), task=1)
    with pytest.raises(Declined, match="epsilon would be above its limit"):
        site.ask(images(2), **again)
    site.ask(images(1, 4), **again)  # the others have budget left


@pytest.mark.parametrize("hides", [True, None])
def test_with_one_budget_no_decline_tells_whether_two_runs_share_an_image(tmp_path, hides):
    """The same questions to a site whose second run has the images of the first, and to one whose images are all new."""
    answers = []
    for name, second in (("shared", (1, 2)), ("new", (3, 4))):
        one = Site(tmp_path / name, epsilon_max=TWICE + 1e-6, one_budget=hides)
        given = []
        for run, touched in (("first", (1, 2)), ("other", second), ("third", second), ("fourth", second)):
            try:
                given.append(one.ask(images(*touched), run=run) is not None)
            except Declined:
                given.append(False)
        answers.append(given)
    assert (answers[0] == answers[1]) is bool(hides)
    assert answers[0] == [True, True, False, False]


def test_a_floor_says_that_its_budget_is_one():
    assert (
        Floor(epsilon_max=2.0, one_budget=True).words() == "epsilon_max 2, delta_max 1e-05, one budget for all images"
    )
    assert Floor(epsilon_max=2.0).words() == "epsilon_max 2, delta_max 1e-05"


def test_a_charge_without_a_list_counts_for_every_image(site):
    site.ask(None)
    site.ask(images(1), task=1)
    for touched in (images(1), None):
        with pytest.raises(Declined):
            site.ask(touched, task=2)
    site.ask(images(2), task=3)


def test_charges_of_an_older_ledger_count_for_every_image(site):
    for task in range(2):
        site.ask(images(task), task=task)
    rows = [json.loads(line) for line in site.path.read_text().splitlines()]
    assert all(row["charge"].pop("images") for row in rows if row["kind"] == "intent"), "as older versions wrote them"
    for name in ("before", "sha256"):
        for row in rows:
            row.pop(name)
    site.path.write_text("".join(json.dumps(row | {"sha256": fingerprint(row)}) + "\n" for row in rows))
    site.mark.unlink()
    with pytest.raises(Declined):
        site.ask(images(9), task=9)


@pytest.mark.parametrize("lost", ["images", "secret"])
def test_what_can_no_longer_be_compared_counts_for_every_image(site, lost):
    site.ask(images(1))
    site.ask(images(2), task=1)
    for path in site.open().files.rglob("*"):
        if path.is_file() and lost in str(path):
            path.unlink()
    with pytest.raises(Declined):
        site.ask(images(3), task=2)


def test_images_read_in_another_way_are_not_other_images(site):
    site.ask(images(1))
    site.ask(images(2), task=1)
    with pytest.raises(Declined):
        site.ask(images(3, view="64 px"), task=2)


def test_lists_of_images_can_be_made_by_the_site_alone(tmp_path):
    names = []
    for name in ("here", "there"):
        site = Site(tmp_path / name)
        site.ask(images(1, 2))
        (path,) = (site.open().files / "images").iterdir()
        names.append(json.loads(path.read_text())["images"])
        assert path.stat().st_mode & 0o77 == 0
    assert not set(names[0]) & set(names[1]), "with the digests alone nobody can test for an image"


def test_a_crash_before_the_draw_does_not_cover_images_that_came_later(site):
    def dies():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        site.ask(images(1), dies)
    site.ask(images(1, 2))  # the same question, with an image more: charged on its own
    assert [len(found) for found in map(site.open().lists(site.open().charges()).get, listed(site))] == [1, 2]


def listed(site):
    return [charge.images for charge in site.open().charges()]


def test_the_first_run_sets_the_floor_and_another_name_buys_nothing(tmp_path):
    site = Site(tmp_path / "site")
    assert site.open().floor() is None
    assert site.open().begin(Floor(epsilon_max=ONCE + 1e-6), "first")
    assert not site.open().begin(Floor(epsilon_max=99.0), "second"), "only the first"
    site.ask(images(1), run="first")
    with pytest.raises(Declined):
        site.ask(images(1), run="second")
    path = site.path.parent / "floor.yaml"
    assert "first" in path.read_text()
    path.write_text(path.read_text().replace(str(site.open().floor().epsilon_max), "99"))
    site.ask(images(1), run="second")  # the operator has raised it
    path.unlink()
    assert site.open().floor().epsilon_max == ONCE + 1e-6, "the ledger remembers"


@pytest.mark.parametrize(
    "text", ['epsilon_max: "5"', "max_participations: 1.5", "min_sigma: true", "epsilon_max: .inf"]
)
def test_a_floor_is_made_of_numbers(tmp_path, text):
    site = Site(tmp_path / "site")
    (site.path.parent / "floor.yaml").write_text(text)
    with pytest.raises(RunError, match="E411"):
        site.ask(images(1))


def test_releases_are_files_and_the_ledger_stays_small(tmp_path):
    site = Site(tmp_path / "site")
    big = [site.ask(images(1), lambda: {"sums": torch.rand(250_000)}, round=r) for r in range(4)]
    assert site.path.stat().st_size < 8_000
    files = sorted((site.open().files / "releases").iterdir())
    assert len(files) == 4 and all(path.stat().st_size > 1_000_000 for path in files)
    row = json.loads(site.path.read_text().splitlines()[1])
    for path in files:
        if path.name != row["file"]:
            path.unlink()  # nobody needs the others to answer this one
    assert torch.equal(site.ask(images(1), pytest.fail, round=0), big[0])
    with pytest.raises(Declined, match="releases nothing twice"):
        site.ask(images(1), pytest.fail, round=1)


@pytest.mark.parametrize("harm", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_release_is_not_sent_and_not_drawn_again(tmp_path, harm):
    site = Site(tmp_path / "site")
    site.ask(images(1))
    (path,) = (site.open().files / "releases").iterdir()
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(Declined, match="releases nothing twice"):
        site.ask(images(1), pytest.fail)


KILLED = '''
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_charges import Site, images
from rescene.privacy.noise import Noise

def question(folder):
    """Writes down each draw, and what is handed out."""
    def draw():
        found = {"sums": Noise().normal(3)}
        log(folder / "drawn", found["sums"])
        return found
    log(folder / "handed", Site(folder).ask(images(1), draw))

def log(path, sums):
    with open(path, "a") as file:
        file.write(repr(sums.tolist()) + "\\n")

def read(path):
    return path.read_text().splitlines() if path.exists() else []

def killed_at(folder, place):
    """In a process of its own, which is killed at this place before or after a write reaches the disk, or after the draw."""
    if child := os.fork():
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    passed = 0
    def watched(real):
        def call(*args, **more):
            step(); found = real(*args, **more); step()
            return found
        return call
    def step():
        nonlocal passed
        if passed == place:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1
    os.fsync, os.replace = watched(os.fsync), watched(os.replace)
    global log
    log = watched(log)
    question(folder)
    os._exit(0)

root, died = Path(sys.argv[1]), 0
for place in range(200):
    folder = root / str(place)
    if not killed_at(folder, place):
        break
    died += 1
    lines = [line for line in read(folder / "ledger.jsonl") if '"kind": "release"' in line and line.endswith("}")]
    before, handed = read(folder / "drawn"), read(folder / "handed")
    question(folder)
    question(folder)
    after, all_handed = read(folder / "drawn"), read(folder / "handed")
    assert len(set(all_handed)) == 1, "one answer to one question"
    assert all_handed[0] in after
    if lines:
        assert after == before, "what is in the ledger is not drawn again"
    assert len(Site(folder).open().charges()) == 1
print(died)
'''


def test_a_site_killed_anywhere_between_question_and_answer_gives_one_answer(tmp_path):
    """SIGKILL before and after each fsync, rename and draw."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25
