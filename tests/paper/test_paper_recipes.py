"""Recipes of the paper: every cell is a complete experiment of ours, and the right one."""

import pytest
from paper_runs import cell_of

from rescene.core.errors import ConfigError
from rescene.paper import paper_recipe, recipe_names, table_names
from rescene.paper.store import identity


def flat(recipe, name):
    return cell_of(paper_recipe(recipe), name).resolve().flat()


def test_every_table_has_a_recipe_and_every_cell_resolves():
    assert set(recipe_names(lite=False)) == set(table_names())
    for name in recipe_names():
        for cell in paper_recipe(name).cells:
            assert not cell.unavailable, cell.name


def test_cells_of_a_recipe_are_different_experiments():
    for name in recipe_names(lite=False):
        if name == "matched-memory":
            continue  # Re-Fed and ReSCENE are left unchanged (App. D.3)
        cells = [cell for cell in paper_recipe(name).cells if not cell.unavailable]
        assert len({identity(cell.resolve().recipe) for cell in cells}) == len(cells), name


def test_the_protocol_of_the_main_table():
    values = flat("main", "cifar100/0.1/rescene")
    wanted = {
        "data.name": "cifar100", "tasks.per_task": 10, "federation.beta": 0.1, "federation.num_clients": 20,
        "federation.per_round": 10, "federation.num_rounds": 20, "model.name": "resnet18", "train.server_epochs": 100,
        "method.ipc": 10, "method.num_steps": 25, "method.budget": 1000, "method.recent_fraction": 0.75,
        "method.alpha": 0.5, "method.tau": 1.0, "method.radius": 5.0, "method.buffer": "temporal",
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == wanted
    assert flat("main", "tinyimagenet/1.0/refed")["method.storage"] == 2000
    assert paper_recipe("main").seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("recipe", "cell", "key", "value"),
    [
        ("clients-100", "cifar10/0.5/fedavg/N=100", "federation.per_round", 70),
        ("backbones", "cifar100/0.5/refed/ViT-Small-4", "model.name", "vit-small"),
        ("buffers", "cifar10/0.5/rescene/full-pool", "method.buffer", "full-pool"),
        ("full-accumulation", "tinyimagenet/0.5/rescene/keep-all", "method.buffer", "keep-all"),
        ("server-epochs", "cifar10/0.1/rescene/E_srv=25", "train.server_epochs", 25),
        ("lambda", "cifar10/0.5/rescene/lambda=0.25", "method.recent_fraction", 0.25),
        ("budget", "cifar10/0.5/rescene/B=1500", "method.budget", 1500),
        ("imbalance", "cifar10/0.5/rescene/alpha=1.0+tau=0.0", "method.tau", 0),
        ("matched-memory", "cifar10/0.5/glfc/matched", "method.num_exemplars", 50),
        ("matched-memory", "cifar10/0.5/fedcbdr/matched", "method.budget", 50),
        ("matched-memory", "cifar10/0.5/target/matched", "method.images_per_client", 500),
        ("matched-memory", "cifar10/0.5/refed/matched", "method.storage", 1000),
        ("office31", "office31/1.0/refed", "method.storage", 300),
        ("office31", "office31/1.0/rescene", "federation.per_round", 4),
        ("office31", "office31/1.0/fedaf", "method.guard", False),
        ("server-epochs-lite", "fashion-mini/0.1/rescene/E_srv=10", "train.server_epochs", 2),
        ("main-lite", "fashion-mini/0.1/glfc", "federation.num_rounds", 2),
        ("main-lite", "fashion-mini/0.1/target", "method.synthesis_rounds", 4),
        ("office31-lite", "office31/1.0/target", "method.synthesis_rounds", 4),
    ],
)
def test_settings_mean_what_the_paper_says(recipe, cell, key, value):
    assert flat(recipe, cell)[key] == value


def test_a_reading_that_says_what_the_table_says_is_the_row_itself():
    def labels(recipe, name):
        return [reading for fast, reading, _ in cell_of(paper_recipe(recipe), name).forms() if not fast]

    assert "guard" in labels("office31", "office31/1.0/rescene")
    assert "no guard" not in labels("office31", "office31/1.0/rescene")
    assert "guard" not in labels("main", "cifar10/0.5/rescene")
    assert "no guard" in labels("main", "cifar10/0.5/rescene")


def test_safl_covers_three_betas_on_cifar10_and_main_has_its_control():
    names = {cell.name for cell in paper_recipe("safl").cells}
    assert {f"cifar10/{beta}/{m}" for beta in ("0.1", "0.5", "1.0") for m in ("feddm", "fedaf")} <= names
    assert sum("raw-upload" in cell.name for cell in paper_recipe("main").cells) == 9


def test_lite_forms_need_no_download_and_have_nothing_to_compare_with():
    for name in recipe_names():
        recipe = paper_recipe(name)
        if recipe.lite and not name.startswith("office31"):
            assert {cell.data for cell in recipe.cells} == {"fashion-mini"}
            assert not any(cell.obstacle for cell in recipe.cells)
    assert "backbones-lite" in recipe_names() and all("ViT" not in c.name for c in paper_recipe("backbones-lite").cells)


def test_missing_data_is_an_obstacle_with_a_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    obstacle = cell_of(paper_recipe("main"), "tinyimagenet/0.5/fedavg").obstacle
    assert "tinyimagenet" in obstacle.reason and "rescene data prepare tinyimagenet --from" in obstacle.fix


def test_the_papers_privacy_runs_are_empirical_and_keep_its_values():
    cell = cell_of(paper_recipe("privacy"), "cifar10/0.5/rescene/sigma=5").resolve()
    values = cell.flat()
    assert values["privacy.mechanism"] == "paper-experiment" and values["privacy.noise_multiplier"] == 5
    assert values["method.clip"] == 5 and values["method.start"] == "real" and values["model.norm"] == "batch"
    assert cell.recipe.promise(5).epsilon() is None
    weights = cell_of(paper_recipe("privacy"), "cifar10/0.5/fedcbdr/sigma=3").resolve()
    assert weights.flat()["model.norm"] == "group" and weights.recipe.promise(5).mechanism.clip == 5
    assert not weights.recipe.promise(5).formal


def test_choosing_cells():
    recipe = paper_recipe("paper/main")
    assert {cell.data for cell in recipe.chosen(["cifar10"])} == {"cifar10"}  # and not cifar100
    assert len(recipe.chosen(["cifar10/*/rescene", "cifar100/0.1/fedavg"])) == 4
    with pytest.raises(ConfigError, match="no cell of main matches mnist"):
        recipe.chosen(["mnist"])
    with pytest.raises(ConfigError, match="did you mean lambda"):
        paper_recipe("lamda")
