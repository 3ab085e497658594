"""What a release is made of: one version everywhere, linters that find planted errors, a whole bill of materials, true documents."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import check_version
import dependencies
import lint
import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW, CONTAINER = ROOT / ".github/workflows/test.yml", ROOT / "containers/cpu.Containerfile"
linters = pytest.mark.skipif(
    not all((lint.BIN / name).exists() for name in ("zizmor", "hadolint")), reason="the extra check is not installed"
)


def test_all_files_have_one_version_and_a_tag_must_be_it():
    assert check_version.problems() == []
    assert "the tag v9.9.9 is not the version" in check_version.problems("v9.9.9")[0]


def test_a_release_has_a_dated_entry_in_the_changelog(tmp_path):
    for place in ["pyproject.toml", ".zenodo.json", "CHANGELOG.md", "src/rescene/__init__.py", *check_version.PLACES]:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
    changes, version = tmp_path / "CHANGELOG.md", "0.1.0"
    changes.write_text("# Changelog\n\n## [Unreleased]\n")
    assert check_version.problems(f"v{version}", tmp_path) == [
        f"CHANGELOG.md has no line `## [{version}] - YEAR-MONTH-DAY`"
    ]
    changes.write_text(f"# Changelog\n\n## [{version}] - 2030-01-31\n")
    assert check_version.problems(f"v{version}", tmp_path) == []
    (tmp_path / ".zenodo.json").write_text('{"version": "7"}')
    assert check_version.problems(f"v{version}", tmp_path) == [f".zenodo.json says 7, the source {version}"]


def test_the_changelog_has_the_usual_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## .*", text, re.M)[0] == "## [Unreleased]" or re.search(r"^## \[\d", text, re.M)
    usual = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Results"}
    assert set(re.findall(r"^### (.*)", text, re.M)) <= usual


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("timeout-minutes: 60", "timeout-minute: 60", "unknown key 'timeout-minute'"),
        ("- run: make docs", "- rum: make docs", "needs either run or uses"),
        ("make docs", "make dosc", "no target 'dosc'"),
        ("runs-on: ubuntu-24.04", "uses: x\n    runs-on: y", "needs either runs-on or uses"),
        ("jobs:", "jobs: [", "no YAML"),
        ("python-version: ${{ matrix.python }}", "python-version: ${{ matrix.pyton }}", "the matrix has no 'pyton'"),
        ("fail-fast: false", "fail-fast: ${{ matrix.fast }}", "job suite: the matrix has no 'fast'"),
        ("- run: make docs", "- if: matrix.os == 'x'\n        run: make docs", "job docs: the matrix has no 'os'"),
        ("python-version: $", "pyhton-version: $", "job suite, step 2: actions/setup-python takes no 'pyhton-version'"),
        ("uses: actions/setup-python", "uses: actions/setup-pyton", "inputs of actions/setup-pyton are not listed"),
    ],
)
def test_an_error_in_a_workflow_is_found(before, after, said):
    text = WORKFLOW.read_text()
    assert lint.workflow_problems(text, lint.makefile_targets()) == []
    found = lint.workflow_problems(text.replace(before, after), lint.makefile_targets())
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("release/model-card.md", "library_name: rescene\n", "", "the front matter lacks 'library_name'"),
        ("release/data-card.md", "license: mit", "license:", "the front matter lacks 'license'"),
        ("release/data-card.md", "---\n", "", "no front matter"),
        ("release/paper.md", "tags:", "tags: [", "no YAML"),
        ("release/paper.md", "# Limits", "# Limits" + " and more" * 400, "the journal takes 250 to 1000"),
        (".zenodo.json", '"software"', '"sofware"', "'upload_type' is 'sofware'"),
        (".zenodo.json", '"creators"', '"creator"', "no 'creators'"),
        (".zenodo.json", '"name"', '"nom"', "a creator has no name"),
        ("release/conda/recipe.yaml", "requirements:", "requirements: [", "no YAML"),
        ("release/conda/recipe.yaml", "requirements:", "requirement:", "no 'requirements'"),
        ("CITATION.cff", "authors:\n", "authors: {\n", "no YAML"),
        ("CITATION.cff", "cff-version", "cff-versoin", "no 'cff-version'"),
    ],
)
def test_an_error_in_a_document_of_the_release_is_found(name, before, after, said, tmp_path):
    planted = tmp_path / Path(name).name
    assert lint.problems_of(ROOT / name) == []
    planted.write_text((ROOT / name).read_text().replace(before, after))
    assert any(said in problem for problem in lint.problems_of(planted)), lint.problems_of(planted)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("COPY locks/base.txt", "COPY locks/bsae.txt", "locks/bsae.txt is copied, but is not there"),
        ("COPY locks/base.txt", "COPY --chmod=444 locks/*.lock", "locks/*.lock is copied, but is not there"),
        ("torch==", "torch==0.", "torch==0.{tested}, but constraints.txt has {tested}"),
        ("torch==", "torch>=", "torch>={tested}, but constraints.txt has {tested}"),
    ],
)
def test_an_error_in_a_container_file_is_found(before, after, said):
    text, tested = CONTAINER.read_text(), dependencies.torch_version()
    assert lint.container_problems(text, ROOT, tested) == []
    [found] = lint.container_problems(text.replace(before, after), ROOT, tested)
    assert said.format(tested=tested) in found


def test_a_container_for_others_copies_what_lies_beside_it(tmp_path):
    path = next(path for path in lint.written_for_others(tmp_path) if path.stem == "service")
    assert lint.container_problems(path.read_text(), tmp_path, dependencies.torch_version()) == []
    (tmp_path / "model.safetensors").unlink()
    [found] = lint.container_problems(path.read_text(), tmp_path, dependencies.torch_version())
    assert "model.safetensors is copied" in found


@linters
@pytest.mark.parametrize(
    ("path", "before", "after", "said"),
    [
        (WORKFLOW, r"@[0-9a-f]{40} # v5.0.0", "@v5", "unpinned-uses"),
        (WORKFLOW, r"make test PYTHON=python", "make test && echo ${{ github.event.pull_request.title }}", "template-injection"),
        (CONTAINER, r"^FROM \S+", "FROM", "missing whitespace"),
        (CONTAINER, r"^USER 10003", "USER root", "DL3002"),
        (CONTAINER, r"^WORKDIR /work", "WORKDIR work", "DL3000"),
    ],
)  # fmt: skip
def test_a_planted_error_fails_the_linter(path, before, after, said, tmp_path):
    planted = tmp_path / path.name
    planted.write_text(re.sub(before, after, path.read_text(), flags=re.M))
    done = subprocess.run([sys.executable, lint.__file__, planted], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stdout, done.stdout


@linters
def test_all_files_of_the_release_are_in_order(tmp_path):
    done = subprocess.run([sys.executable, lint.__file__], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and "13 files of the release" in done.stdout, done.stdout
    assert len(lint.written_for_others(tmp_path)) == 3


def test_the_containers_name_the_tested_torch():
    pin = f'"torch=={dependencies.torch_version()}"'
    for path in (ROOT / "containers").iterdir():
        assert pin in path.read_text() and "locks/base.txt" in path.read_text()


def test_the_bill_names_every_locked_package_with_its_hashes():
    bill = dependencies.bill()
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["version"] == PROJECT_VERSION
    named = {one["name"]: one for one in bill["components"]}
    for part in dependencies.PARTS:
        text = (ROOT / "locks" / f"{part}.txt").read_text()
        for name in re.findall(r"^([a-z0-9-]+)==", text, re.M):
            assert f"{name}=={named[name]['version']} " in text.replace("\\", " ")
            first = named[name]["externalReferences"][0]["hashes"][0]["content"]
            assert f"sha256:{first}" in text
    assert named["torch"]["version"] == dependencies.torch_version()
    assert len({one["bom-ref"] for one in bill["components"]}) == len(bill["components"])
    assert json.dumps(bill) == json.dumps(dependencies.bill())
    assert named["packaging"]["licenses"] == [{"expression": "Apache-2.0 OR BSD-2-Clause"}]
    unread = {name for name, one in named.items() if "license" in one.get("licenses", [{}])[0]}
    assert unread <= {"matplotlib", "pycryptodome"}  # SPDX has no name for theirs


PROJECT_VERSION = json.loads((ROOT / ".zenodo.json").read_text())["version"]


def test_the_licence_of_every_locked_package_is_known_and_listed():
    text = (ROOT / "release" / "licences.md").read_text()
    rows = {name: terms for name, _, terms in re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", text, re.M)}
    locked = {name for part in dependencies.PARTS for name in dependencies.locked(part)} | {"torch"}
    assert set(rows) - {"package"} == locked
    assert not [name for name, terms in rows.items() if terms.lower() in ("", "unknown")]
    assert not [name for name, terms in rows.items() if re.search(r"(?<!L)GPL", terms)]  # a user may combine all of it


def test_the_conda_recipe_asks_for_what_the_package_declares():
    recipe = yaml.safe_load((ROOT / "release/conda/recipe.yaml").read_text())
    wanted = dict(line.split(maxsplit=1) for line in recipe["requirements"]["run"])
    assert wanted.pop("python") == PROJECT["requires-python"]
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # as conda-forge calls them
    declared = {names.get(one.name, one.name): one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert {name: sorted(text.split(",")) for name, text in wanted.items()} == {
        name: sorted(str(one) for one in specifier) for name, specifier in declared.items()
    }


@pytest.mark.parametrize("name", ["paper.md", "data-card.md", "model-card.md", "reproducibility.md", "README.md"])
def test_files_that_the_release_documents_name_exist(name):
    text = (ROOT / "release" / name).read_text()
    named = re.findall(r"`((?:results|docs|src|tests|locks|release|examples|containers|\.github)/[\w./-]*)`", text)
    assert named or name == "README.md"
    assert [place for place in named if not (ROOT / place).exists()] == []


def test_the_paper_cites_what_its_bibliography_has():
    text, entries = (ROOT / "release/paper.md").read_text(), (ROOT / "release/paper.bib").read_text()
    keys = set(re.findall(r"^@\w+\{(\w+),", entries, re.M))
    assert set(re.findall(r"@(\w+)", text.split("---", 2)[2])) == keys and len(keys) > 5
    assert {"title", "tags", "authors", "affiliations", "date", "bibliography"} <= set(
        yaml.safe_load(text.split("---")[1])
    )
