"""Settings that people hand over: whatever is in the text, the answer is a value or a coded error, and it comes at once."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.documents import MOST_VALUES, parse_json, parse_toml, parse_yaml
from rescene.core.errors import ConfigError, DataError, RunError
from rescene.core.json_files import yaml_object
from rescene.data import load
from rescene.data.sources.array_files import FORMAT
from rescene.deploy.federation_folder import FederationFolder
from rescene.deploy.plan_file import read_plan
from rescene.deploy.site import Site
from rescene.privacy.ledger import Ledger

DIGITS, DEEP = "9" * 5000, 3000


# each line stands for nine times the line before: 9**8 values in less than a kilobyte
SECTIONS = "a0: &a0 {x: 1}" + "".join(
    f"\na{i}: &a{i} {{{', '.join(f'p{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 9)
)
MERGED = "a0: &a0 {x: 1}" + "".join(f"\na{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 9))
CHAIN = "a0: &a0 [1]" + "".join(f"\na{i}: &a{i} [*a{i - 1}]" for i in range(1, 200))
HOSTILE = [  # name, text, code
    ("not-utf8.yaml", b"extends: smoke\ndata: {path: /home/m\xfcller}\n", "E138"),
    ("sections.yaml", SECTIONS, "E149"),
    ("merged.yaml", MERGED, "E149"),
    ("chain.yaml", CHAIN, "E149"),
    ("itself.yaml", "tasks: &a [*a]", "E149"),
    ("lists.yaml", f"tasks: {'[' * DEEP}{']' * DEEP}", "E149"),
    ("lists.json", f'{{"tasks": {"[" * DEEP}{"]" * DEEP}}}', "E149"),
    ("lists.toml", f"tasks = {'[' * DEEP}{']' * DEEP}", "E149"),
    ("keys.toml", f"{'.'.join(['a'] * DEEP)} = 1", "E149"),
    ("maps.yaml", f"tasks: {'{a: ' * DEEP}1{'}' * DEEP}", "E149"),
    ("digits.yaml", f"seed: {DIGITS}", "E149"),
    ("digits.toml", f"seed = {DIGITS}", "E149"),
    ("hex.yaml", f"seed: 0x{DIGITS}", "E149"),
    ("hex.toml", f"seed = 0x{DIGITS}", "E149"),
    ("sixty.yaml", f"seed: {':'.join('1' * 3000)}", "E149"),
    ("large.yaml", f"# {'x' * 2_000_000}", "E149"),
    ("twice.yaml", "train:\n  lr: 0.1\n  batch_size: 4\n  lr: 0.2\n", "E139"),
    ("twice.json", '{"seed": 1,\n "seed": 2}', "E139"),
    ("date.yaml", "data: {name: 2024-13-45}", "E105"),
    ("tag.yaml", "data: {name: !!bool maybe}", "E105"),
]


@pytest.mark.parametrize(("name", "text", "code"), HOSTILE, ids=[name for name, _, _ in HOSTILE])
def test_a_hostile_recipe_gets_a_code(tmp_path, name, text, code):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = CliRunner().invoke(app, ["show", str(path)])
    assert result.exit_code == 2 and f"error[{code}]" in result.output and name in result.output, result.output


def test_with_and_without_libyaml_a_text_means_the_same(monkeypatch):
    """Recipes that ship, configs of stored runs, and hostile texts, each with its values or its code."""
    root = Path(__file__).parents[1]
    paths = [*(root / "src" / "rescene").rglob("*.yaml"), *sorted((root / "results").rglob("config.yaml"))[::20]]
    texts = [path.read_text("utf-8") for path in paths]
    texts += [text for name, text, _ in HOSTILE if name.endswith("yaml") and isinstance(text, str)]

    def meaning(text):
        try:
            return parse_yaml(text, "here")
        except ConfigError as error:
            return error.code, error.where

    quick = [meaning(text) for text in texts]
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert len(texts) > 50 and quick == [meaning(text) for text in texts]


def test_a_key_that_stands_twice_is_named_with_its_lines():
    with pytest.raises(ConfigError) as caught:
        parse_yaml("train:\n  lr: 0.1\n  batch_size: 4\n  'lr': 0.2\n", "mine.yaml")
    assert "'lr'" in caught.value.what and caught.value.where == "mine.yaml, line 4" and "line 2" in caught.value.why


@pytest.mark.slow
def test_aliases_and_merged_sections_work_within_the_bounds():
    text = "base: &b {lr: 1, size: 2}\nown: {<<: *b, lr: 3}\nagain: {<<: *b}\nlist: [*b, *b]"
    found = parse_yaml(text, "here")
    assert found["own"] == {"lr": 3, "size": 2} and found["again"] == found["base"] == found["list"][1]
    many = f"[{', '.join(['1'] * (MOST_VALUES - 1))}]"
    assert len(parse_yaml(many, "here")) == MOST_VALUES - 1
    with pytest.raises(ConfigError, match="E149"):
        parse_yaml(many.replace("[", "[1, "), "here")


@pytest.mark.parametrize(
    ("override", "code"),
    [
        (f"seed={DIGITS}", "E149"),
        (f"tasks.plan={'[' * DEEP}", "E149"),
        ("train={lr: 1, lr: 2}", "E139"),
        *[(f"train.lr={value}", "E104") for value in (".inf", ".nan", "1e999", "-.inf")],
        ("federation.beta=.inf", "E104"),
        ("method.name=-0.5", "E103"),
        ("method.name=no.such.method", "E103"),
        ("federation.faults.slowdown=.inf", "E104"),
        ("method.clip=.inf", "E104"),
        ("privacy.clip=.inf", "E104"),
    ],
)
def test_a_hostile_override_gets_a_code(override, code):
    with pytest.raises(ConfigError) as caught:
        resolve("smoke", [override])
    assert caught.value.code == code and len(str(caught.value)) < 1000


def test_an_override_that_is_no_yaml_is_text():
    flat = resolve("smoke", ["data.name=2024-13-45", "data.path=*x"]).flat()
    assert flat["data.name"] == "2024-13-45" and flat["data.path"] == "*x"


def test_a_number_from_python_can_be_shown_however_long():
    with pytest.raises(ConfigError, match="E104"):
        resolve("smoke", {"federation.beta": -(10**5000)})


def test_a_section_that_is_also_a_value_is_refused():
    with pytest.raises(ConfigError, match="it is a section"):
        resolve("smoke", ["privacy=5", "privacy.epsilon=1"])


@pytest.mark.parametrize("text", [SECTIONS, "client: 0\nclient: 1", f"client: {DIGITS}", f"client: {'[' * DEEP}"])
def test_the_files_of_a_federation_are_read_the_same_way(tmp_path, text):
    for name in ("site.yaml", "plan.yaml", "federation.yaml", "floor.yaml", "config.yaml"):
        (tmp_path / name).write_text(text)
    for read in (Site.open, FederationFolder.open, lambda folder: read_plan(folder / "plan.yaml")):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path)
        assert caught.value.code in ("E139", "E149") and str(tmp_path) in caught.value.where
    with pytest.raises(RunError) as refused:  # a floor that cannot be understood allows nothing
        Ledger(tmp_path / "ledger.jsonl").floor()
    assert refused.value.code == "E411"
    problems = []
    assert yaml_object(tmp_path / "config.yaml", problems) == {} and problems  # one bad run does not hide the others


def test_no_other_place_reads_yaml_or_toml():
    for path in Path(rescene.__file__).parent.rglob("*.py"):
        if path.name != "documents.py":
            assert not re.search(r"yaml\.(safe_|full_|unsafe_)?load|tomllib", path.read_text(encoding="utf-8")), path


def test_json_of_others_gets_a_code():
    for text in ("[" * 100_000, DIGITS, "{", b"\xff"):
        with pytest.raises(ConfigError):
            parse_json(text, "here")
    assert parse_json(b'{"a": 1}', "here") == parse_toml("a = 1", "here") == {"a": 1}


@pytest.mark.parametrize("about", ["[" * 100_000, "{", "3", f'{{"classes": {DIGITS}}}'])
def test_a_prepared_file_with_a_hostile_header_gets_a_code(tmp_path, about):
    file = tmp_path / "prepared.safetensors"
    save_file({"train.pixels": torch.zeros(1)}, file, {"format": FORMAT, "about": about})
    with pytest.raises(DataError, match="prepared") as caught:
        load(path=file)
    assert caught.value.code == "E202"
