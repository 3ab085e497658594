"""Sites that missed the secure sum of a task: they have a sum of their own, or add the whole noise; nobody is in two sums."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Images, Task, Transform
from rescene.engine import RunFolder
from rescene.engine.faults import Faults
from rescene.engine.transport import ledger_in
from rescene.methods.base import Client
from rescene.methods.moments import EVERYBODY, Moments
from rescene.nets import Arch
from rescene.privacy.accounting import Composition
from rescene.privacy.feature_sums import STEPS, Grid, deviations, on_diagonal
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.privacy.totals import late_threshold, most_colluders, threshold
from small_images import some_of_fashion_mini

NUM, HONEST = 5, 2  # three sites open the first sum of a task, and two that missed it a sum of their own
SETTING = {"model.name": "linear", "model.lens": "waves", "train.augment": False, "method": "moments", "tasks.limit": 1,
           "federation.num_clients": NUM, "federation.per_round": 2, "federation.num_rounds": 3, "data.image_size": 16,
           "method.num_features": 12, "privacy.mechanism": "release", "privacy.noise_multiplier": 0.8, "privacy.clip": 1,
           "privacy.honest_sites": HONEST}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return some_of_fashion_mini(tmp_path_factory.mktemp("late"), 40, 10, num_classes=2)


@pytest.fixture
def run(images, tmp_path, monkeypatch):
    def start(away, slow=None, **more):
        """Who is lost and who answers after the deadline, by round."""

        def absent(self, clients, place, *rest):
            return tuple([k for k in clients if k in who.get(place[1], ())] for who in (away, slow or {}))

        monkeypatch.setattr(Faults, "absent", absent)
        return rescene.run("smoke", out=tmp_path / "run", **{**SETTING, "data.path": images, **more})

    return start


def parts_of(found):
    return {part.client: part for part in RunFolder(found.folder).checkpoints.load().tree["state"].parts}


def num_charges(found, client):
    return len(ledger_in(found.folder / "ledgers", client).charges())


def num_unopened(found):
    return (found.folder / "events.jsonl").read_text().count("W435")


def test_a_lone_late_site_waits_and_its_part_is_never_opened(run):
    found = run({0: [4]})
    assert parts_of(found)[EVERYBODY].noises == 4 / HONEST and parts_of(found).keys() == {EVERYBODY}
    assert num_unopened(found) == 2, "asked in both later rounds"
    assert [num_charges(found, k) for k in range(NUM)] == [1] * NUM


def test_a_late_site_that_stays_away_stops_nothing(run):
    found = run({0: [4], 1: [4], 2: [4]})
    assert parts_of(found)[EVERYBODY].noises == 4 / HONEST and num_charges(found, 4) == 0


def test_late_sites_have_one_sum_of_their_own_with_the_numbers_they_drew_first(run):
    """Site 3 is there in round 1 and waits; site 4 comes in round 2, and both are in. What each site drew is in once."""
    found = run({0: [3, 4], 1: [4]})
    part = parts_of(found)[EVERYBODY]
    assert part.noises == NUM / HONEST and parts_of(found).keys() == {EVERYBODY}
    assert num_unopened(found) == 1
    assert [num_charges(found, k) for k in range(NUM)] == [1] * NUM
    grid = Grid.of(resolve(found.folder / "config.yaml").recipe.promise(1).mechanism, 12, 2)
    drawn = []
    for k in range(NUM):
        ledger = ledger_in(found.folder / "ledgers", k)
        (kept,) = ledger.book().releases.values()
        drawn.append(ledger._read_release(kept)["counts"])
    assert torch.allclose(part.counts, sum(drawn).double() / grid.counts)


def test_a_first_sum_that_too_few_answered_is_opened_later_with_the_same_numbers(run):
    found = run({0: [2, 3, 4]}, **{"federation.quorum": 0.2})
    assert parts_of(found)[EVERYBODY].noises == NUM / HONEST and num_unopened(found) == 1
    assert [num_charges(found, k) for k in range(NUM)] == [1] * NUM


@pytest.mark.parametrize("honest", [None, HONEST])
def test_an_answer_after_the_deadline_comes_in_with_the_next_round(run, honest):
    """The site has drawn its numbers and was charged. It gives the same ones again, not others and not none."""
    found = run({}, slow={0: [3, 4]}, **{"privacy.honest_sites": honest})
    parts = parts_of(found)
    assert parts.keys() == ({EVERYBODY} if honest else set(range(NUM)))
    assert sum(part.noises for part in parts.values()) == (NUM / honest if honest else NUM)
    assert [num_charges(found, k) for k in range(NUM)] == [1] * NUM


def test_a_late_site_alone_sends_its_own_release_with_the_whole_noise(run):
    found = run({0: [4]}, **{"privacy.late": "alone"})
    parts = parts_of(found)
    assert parts.keys() == {EVERYBODY, 4}
    assert parts[EVERYBODY].noises == 4 / HONEST and parts[4].noises == 1
    assert [num_charges(found, k) for k in range(NUM)] == [1] * NUM, "charged once, and not asked again in round 2"
    told = found.values["privacy"]
    waits = resolve("smoke", SETTING).recipe.promise(1)
    assert told["statement"].startswith(waits.words()) and told["epsilon"] == pytest.approx(waits.epsilon())
    assert "A site that missed a sum adds the whole noise by itself." in told["statement"]


D, NUM_CLASSES = 60, 3
MECHANISM = Mechanism("release", 0.5, 1.0, Composition(1, 1), kappa=0.3, covariance_weight=2.0, honest_sites=4)


def asked(site, state=None, **payload):
    """A site without images, asked for its sums: what it sends is noise alone."""
    task = Task(0, tuple(range(NUM_CLASSES)), NUM_CLASSES, None, torch.arange(0), torch.arange(0))
    nothing = Images(torch.zeros(0, D, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    arch, look = Arch("linear", 1, channels=D), Transform((0.5,) * D, (STEPS / 255,) * D, 0)
    shard = Client(nothing, torch.arange(0), task, look, arch.restore, site)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Moments().sum_up({"model": arch.build(NUM_CLASSES).state_dict(), **payload}, shard, state, Rng(0))


@pytest.mark.parametrize("alone", [False, True])
def test_noise_of_a_site_alone_has_the_whole_deviation(alone):
    upload, _ = asked(SitePrivacy(MECHANISM, Noise(torch.Generator().manual_seed(0))), alone=alone)
    grid, share = Grid.of(MECHANISM, D, NUM_CLASSES), 1 if alone else 1 / math.sqrt(4)
    _, of_sum, of_square = deviations(MECHANISM, D)
    sums, off = upload["sums"].double() / grid.sums, upload["second"][~on_diagonal(D)].double() / grid.second
    assert float(sums.std()) == pytest.approx(share * of_sum, rel=0.2)
    assert float(off.std()) == pytest.approx(share * of_square / math.sqrt(2), rel=0.1)


def test_a_site_in_a_sum_gives_nothing_more_whatever_it_is_asked(tmp_path):
    """Also one that has lost its memory: its ledger has the same numbers for the sum, and no second release."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    site = SitePrivacy(MECHANISM, Noise(), "run", max_participations=1, ledger=ledger)
    first, state = asked(site)
    assert asked(site, state) == asked(site, state, alone=True) == ({}, state)
    again, _ = asked(site)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert asked(site, alone=True)[0] == {}, "it declines: with other noise on the same numbers both could be averaged"
    assert len(ledger.charges()) == 1


def test_a_site_that_sent_alone_is_in_no_sum(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    site = SitePrivacy(MECHANISM, Noise(), "run", max_participations=1, ledger=ledger)
    first, _ = asked(site, alone=True)
    assert asked(site)[0] == {} and len(ledger.charges()) == 1
    again, _ = asked(replace(site, noise=Noise()), alone=True)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("quorum", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("num_sites", range(2, 13))
def test_a_late_sum_stands_as_many_colluders_as_the_first(num_sites, quorum):
    for honest in range(2, num_sites + 1):
        colluders = most_colluders(num_sites, threshold(num_sites, quorum, honest), honest)
        for num_late in range(1, num_sites):
            least = late_threshold(num_sites, quorum, honest, num_late)
            assert least - colluders >= honest
            assert (num_late - colluders) + 2 * colluders < 2 * least


def test_the_options_belong_to_secure_sums():
    own = {**SETTING, "privacy.honest_sites": None}
    for name, value in (("late", "alone"), ("earlier_sums", 1)):
        with pytest.raises(ConfigError, match=f"{name}: there is no secure sum"):
            resolve("smoke", {**own, f"privacy.{name}": value})
    assert resolve("smoke", SETTING).digest() == resolve("smoke", {**SETTING, "privacy.late": None}).digest()
