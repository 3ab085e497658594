"""A mistyped class leaves a plan again, before its task has begun."""

import pytest

from rescene.core.errors import ConfigError
from rescene.deploy.plan_file import add_classes, read_plan, remove_classes


def test_a_mistyped_class_is_taken_out_and_an_empty_plan_goes(tmp_path):
    plan, run = tmp_path / "plan.yaml", tmp_path / "run"
    add_classes(plan, run, ["scracth", "dent"], None, None)
    with pytest.raises(ConfigError, match="scracth") as caught:
        remove_classes(plan, run, ["scratch"])
    assert caught.value.code == "E193"
    assert list(remove_classes(plan, run, ["scracth"]).classes) == list(read_plan(plan).classes) == ["dent"]
    assert remove_classes(plan, run, ["dent"]) is None and not plan.exists()


def test_a_class_whose_task_has_begun_stays(tmp_path):
    plan, run = tmp_path / "plan.yaml", tmp_path / "run"
    add_classes(plan, run, ["dent"], None, None)
    run.mkdir()
    (run / "config.yaml").write_text("sites: {tasks: [{classes: [dent], rounds: 3}]}")
    with pytest.raises(ConfigError, match="cannot be taken out") as caught:
        remove_classes(plan, run, ["dent"])
    assert caught.value.code == "E192" and read_plan(plan) is not None
