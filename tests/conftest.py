"""Shared by all tests: one thread, so that bits repeat and two workers fit on two cores."""

import fnmatch
import functools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import typer.testing

from rescene.core.rng import Rng
from rescene.data import Images, Task, Transform, loading
from rescene.engine import continuation, experiment
from rescene.lens import feature_cache as keeping
from rescene.lens import lens
from rescene.methods.base import Client
from rescene.nets import Arch
from rescene.report import drawing

torch.set_num_threads(1)

# left out of `make test`: costly variants of a test that stays in it
SLOW = (
    "test_faults.py::test_interrupted_under_faults_and_attack_it_ends_with_the_same_bits[[]2]",
    "test_every_network_survives_tracing[[]resnet50-pt2]",
    "test_every_network_survives_tracing[[]vit-small-pt2]",
    "test_the_lens_is_inside_the_file[[]pt2]",
    "test_a_student_with_many_features_and_two_classes_does_not_run_away",
    "test_tables_for_the_recipes_sites_per_round_and_for_a_tenth",
    "test_large_federations_stay_light",
    "test_a_share_under_a_mechanism_has_the_bits_of_one_process[[][13]]",
    "test_references.py::test_an_interrupted_run_ends_as_the_uninterrupted_one[[][fj]*]",
    "test_rescene_with_other_statistics_or_a_linear_network[[]match]",
    "test_rescene_with_other_statistics_or_a_linear_network[[]pixels]",
    "test_forecast.py::test_domains[[]rescene]",
    "test_forecast.py::test_domains[[]fedcbdr]",
    "test_it_holds_for_every_kind_of_network[[]arch[02]]",
    "test_a_teacher_answers_as_the_network_does[[]group]",
    "test_methods_that_send_weights_state_what_their_most_used_record_spends[[]refed-2]",
    "test_killed_while_a_checkpoint_is_being_written[[]step--4]",
    "test_one_hostile_group_is_found_and_nobody_else[[]2]",
    "test_a_plan_that_grows_gives_the_same_bits_as_one_known_in_full[[]fed*]",
    "test_a_flood_of_hostile_uploads_changes_no_bit[[]fedcbdr]",
    "test_honest_sums_are_never_left_out[[]*-secure sum]",
    "test_the_same_bits_as_in_one_process[[]fedavg]",
    "test_a_signal_ends_politely_and_the_run_can_go_on[[]2-130]",
    "test_glfc.py::test_a_small_run_with_the_other_options",
    "test_glfc.py::test_a_small_run_over_domains",
    "test_the_same_folders_give_the_same_page",
    "test_what_training_decides_is_near",
    "test_the_privacy_demo_puts_leakage_and_guarantee_beside_accuracy",
    "test_another_buffer_is_measured_as_it_is",
    "test_told_to_go_on_it_does_and_says_so_even_if_it_dies_again",
    "test_every_method_costs_what_was_forecast[[]fedssi]",
    "test_every_method_costs_what_was_forecast[[]icarl]",
    "test_every_method_costs_what_was_forecast[[]cfed]",
    "test_every_method_costs_what_was_forecast[[]scaffold]",
    # each is also part of a command that is run by hand before a release: doctor --speed, audit --all
    "test_bench.py::test_every_figure_is_measured_and_written",
    "test_redteam.py::test_weights_hold_and_weak_ones_are_inverted",
    "test_canaries.py::test_weak_noise_is_seen_through_and_participations_add_up",
    # methods whose code is another's with other settings
    "test_method_conforms[[]rescene-plus-*]",
    "test_method_conforms[[]raw-upload-*]",
    "test_method_conforms[[]fedcgs-*]",
    "test_every_method_costs_what_was_forecast[[]rescene-plus]",
    "test_every_method_costs_what_was_forecast[[]joint]",
    "test_every_method_costs_what_was_forecast[[]raw-upload]",
    "test_every_method_costs_what_was_forecast[[]fedcgs]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if any(fnmatch.fnmatchcase(item.nodeid, f"*{one}") for one in SLOW):
            item.add_marker(pytest.mark.slow)


TINY = {"federation.num_clients": 3, "federation.per_round": 2, "tasks.limit": 2}


@pytest.fixture(scope="session", autouse=True)
def images_are_read_and_looked_at_once():
    """Hundreds of runs and sites in this process see the embedded ones, and nobody writes into a data set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loading.READERS, "fashion-mini", functools.cache(loading.READERS["fashion-mini"]))
        patch.setattr(lens, "_looked", functools.lru_cache(maxsize=4)(lens._looked))  # two data sets
        yield


@pytest.fixture(scope="session", autouse=True)
def features_are_kept_elsewhere(tmp_path_factory):
    """Not in the cache folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        kept = keeping.FeatureCache(tmp_path_factory.mktemp("seen"))
        patch.setattr(experiment, "users_own", lambda: kept)
        patch.setattr(continuation, "users_own", lambda: kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def the_command_line_is_put_together_once():
    """typer would do it at every call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command), raising=False)
        yield


@pytest.fixture
def tiny_world():
    """Three clients with random images of two classes, a small network, and its weights."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 30 + [1] * 30)
    base = torch.where(labels.bool(), 160, 60).reshape(-1, 1, 1, 1)
    noise = torch.randint(-40, 40, (60, 3, 16, 16), generator=generator)
    images = Images((base + noise).clamp(0, 255).to(torch.uint8), labels)
    transform = Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), 2)
    task = Task(0, (0, 1), 2, None, torch.arange(60), torch.arange(60))
    arch = Arch("convnet", 16, "batch", 4)
    net = arch.build(2, torch.Generator().manual_seed(1))
    parts = [torch.arange(0, 12), torch.cat([torch.arange(12, 25), torch.arange(30, 33)]), torch.arange(33, 60)]
    shards = [Client(images, part, task, transform, arch.restore) for part in parts]
    return {"shards": shards, "arch": arch, "net": net, "task": task, "transform": transform, "rng": Rng(0)}


@pytest.fixture
def blank_figures(monkeypatch):
    """Blank figures, for tests of what stands around them: drawing is most of a page. What is added to this set is drawn."""
    drawn, draw = set(), drawing._draw
    blank = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(drawing, "_draw", lambda plot: draw(plot) if plot.name in drawn else (blank, b""))
    return drawn


@pytest.fixture
def image_folder(tmp_path):
    """A folder of small coloured pictures, train/<class>/*.png and test/<class>/*.png, five classes."""
    import numpy as np
    from PIL import Image

    root, random = tmp_path / "pictures", np.random.default_rng(0)
    for c, name in enumerate(["ant", "bee", "cat", "dog", "eel"]):
        for split, count in (("train", 20), ("test", 6)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture = random.integers(0, 60, (32, 32, 3)) + np.array([40 * c, 190 - 40 * c, 90])
                Image.fromarray(picture.clip(0, 255).astype("uint8")).save(folder / f"{i}.png")
    return root
