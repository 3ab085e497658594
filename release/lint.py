"""Checks the files of a release: `make lint` runs it, and it fails on any error.

    python release/lint.py [FILE ...]      without names all of the repository, and the files that rescene writes for others

`document_problems` reads the cards and the paper, `zenodo_problems` what Zenodo is told, `yaml_problems` the conda recipe and
the citation. hadolint reads container files, but knows neither our files nor our torch: `container_problems` looks at these.
zizmor reads workflows, and finds what does not parse and what is unsafe. It lets unknown keys pass, and does not know our
Makefile, so `workflow_problems` looks at these. Both programs come with the extra `check`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from dependencies import torch_version

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TOP = {"name", "run-name", "on", "permissions", "env", "defaults", "concurrency", "jobs"}
JOB = {
    "name", "permissions", "needs", "if", "runs-on", "environment", "concurrency", "outputs", "env", "defaults", "steps",
    "timeout-minutes", "strategy", "continue-on-error", "container", "services", "uses", "with", "secrets",
}  # fmt: skip
STEP = {
    "id",
    "if",
    "name",
    "uses",
    "run",
    "working-directory",
    "shell",
    "with",
    "env",
    "continue-on-error",
    "timeout-minutes",
}

INPUTS = {  # what the actions that we use take under `with`; a new action needs a row
    "actions/checkout": {
        "repository", "ref", "token", "ssh-key", "ssh-known-hosts", "ssh-strict", "ssh-user", "persist-credentials", "path",
        "clean", "filter", "sparse-checkout", "sparse-checkout-cone-mode", "fetch-depth", "fetch-tags", "show-progress", "lfs",
        "submodules", "set-safe-directory", "github-server-url",
    },
    "actions/setup-python": {
        "python-version", "python-version-file", "cache", "architecture", "check-latest", "token", "cache-dependency-path",
        "update-environment", "allow-prereleases", "freethreaded", "pip-version",
    },
    "actions/upload-artifact": {
        "name", "path", "if-no-files-found", "retention-days", "compression-level", "overwrite", "include-hidden-files",
    },
    "actions/download-artifact": {
        "name", "artifact-ids", "path", "pattern", "merge-multiple", "github-token", "repository", "run-id",
    },
    "pypa/gh-action-pypi-publish": {
        "user", "password", "repository-url", "packages-dir", "verify-metadata", "skip-existing", "verbose", "print-hash",
        "attestations",
    },
}  # fmt: skip
CONDA = {"schema_version", "package", "source", "build", "requirements", "tests", "about"}  # parts that ours must have
CITATION = {"cff-version", "message", "title", "type", "license", "version", "authors"}
YAML_PARTS = {"recipe.yaml": CONDA, "CITATION.cff": CITATION}
MADE = ("dist/",)  # parts of the build context that `make dist` brings
FRONT_MATTER = {  # what Hugging Face reads at the top of a card, and the Journal of Open Source Software at that of a paper
    "model-card.md": {"license", "library_name", "pipeline_tag", "tags"},
    "data-card.md": {"license", "pretty_name", "task_categories", "size_categories", "tags"},
    "paper.md": {"title", "tags", "authors", "affiliations", "date", "bibliography"},
}
PAPER_WORDS = (250, 1000)  # as the journal asks
ZENODO = {  # the keys that we use, as Zenodo's deposits have them; a set names the values it takes
    "title": None, "description": None, "version": None, "license": None, "creators": None, "keywords": None,
    "upload_type": {"publication", "poster", "presentation", "dataset", "image", "video", "software", "lesson", "other"},
    "access_right": {"open", "embargoed", "restricted", "closed"},
}  # fmt: skip


def document_problems(name: str, text: str) -> list[str]:
    """Keys that the front matter of a card or of the paper lacks, and a paper that is too short or too long.

    >>> document_problems("model-card.md", "---\\nlicense: mit\\nlibrary_name: x\\ntags: [y]\\n---\\n# A lens")
    ["the front matter lacks 'pipeline_tag'"]
    """
    parts = re.match(r"---\n(.*?)\n---\n(.*)", text, re.S)
    if parts is None:
        return ["no front matter"]
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    stated = {key for key, value in found.items() if value} if isinstance(found, dict) else set()
    problems = [f"the front matter lacks {key!r}" for key in sorted(FRONT_MATTER[name] - stated)]
    words = len(re.sub(r"\[@[^]]*\]", "", parts[2]).split())
    if name == "paper.md" and not PAPER_WORDS[0] <= words <= PAPER_WORDS[1]:
        problems.append(f"{words} words; the journal takes {PAPER_WORDS[0]} to {PAPER_WORDS[1]}")
    return problems


def zenodo_problems(text: str) -> list[str]:
    """Keys that are unknown or missing, values that Zenodo does not take, and creators without a name."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return [f"no JSON: {error}"]
    problems = [f"unknown key {key!r}" for key in sorted(found.keys() - ZENODO.keys())]
    problems += [f"no {key!r}" for key in sorted(ZENODO.keys() - found.keys())]
    for key, allowed in ZENODO.items():
        if allowed and key in found and found[key] not in allowed:
            problems.append(f"{key!r} is {found[key]!r}, not one of {', '.join(sorted(allowed))}")
    return problems + ["a creator has no name" for one in found.get("creators", []) if not one.get("name")]


def yaml_problems(name: str, text: str) -> list[str]:
    """What keeps the conda recipe or the citation from being read, and parts that it lacks.

    >>> yaml_problems("CITATION.cff", "title: [rescene")[0].splitlines()[0]
    'no YAML: while parsing a flow sequence'
    """
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    stated = found.keys() if isinstance(found, dict) else set()
    return [f"no {key!r}" for key in sorted(YAML_PARTS[name] - stated)]


def container_problems(text: str, context: Path, torch: str) -> list[str]:
    """Files to copy that the folder of the build does not have, and another torch than the tested one.

    >>> container_problems("COPY --chown=1 . locks/no.txt b/\\nRUN pip install torch==1.0", Path("."), "2.0")
    ['locks/no.txt is copied, but is not there to build from', 'torch==1.0, but constraints.txt has 2.0']
    """
    copies = re.findall(r"^(?:COPY|ADD)\s(.*)", text.replace("\\\n", " "), re.M)
    words = [re.findall(r"[^\s\",\[\]]+", line) for line in copies if "--from=" not in line]
    sources = [word for line in words for word in line[:-1] if not word.startswith(("--", *MADE)) and "://" not in word]
    pins = re.findall(r"\btorch([<>=~!]=?)([\w.]+)", text)
    return [f"{name} is copied, but is not there to build from" for name in sources if not _is_there(context, name)] + [
        f"torch{sign}{version}, but constraints.txt has {torch}"
        for sign, version in pins
        if (sign, version) != ("==", torch)
    ]


def _is_there(context: Path, name: str) -> bool:
    """Whether the folder of the build has a file of this name, in which * and ? may stand."""
    pattern = name.strip("/").removeprefix("./")
    return pattern in ("", ".") or any(context.glob(pattern))


def workflow_problems(text: str, targets: set[str]) -> list[str]:
    """Keys that GitHub does not know, jobs that wait for none, and calls of make without such a target.

    >>> workflow_problems("on: push\\njobs: {a: {runs-on: x, needs: b, steps: [{run: make tset, shel: sh}]}}", {"test"})
    ['job a needs b, which is no job', "job a, step 1: no target 'tset' in the Makefile", "job a, step 1: unknown key 'shel'"]
    """
    try:
        found = yaml.load(text, yaml.BaseLoader)  # `on` stays a word
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    if not isinstance(found, dict) or not isinstance(found.get("jobs"), dict):
        return ["no jobs"]
    problems = [f"unknown key {key!r}" for key in found.keys() - TOP]
    for name, job in found["jobs"].items():
        problems += _job_problems(f"job {name}", job, targets)
        needs = job.get("needs", [])
        wanted = [needs] if isinstance(needs, str) else needs
        problems += [f"job {name} needs {other}, which is no job" for other in wanted if other not in found["jobs"]]
    return sorted(problems)


def _job_problems(place: str, job: dict[str, Any], targets: set[str]) -> list[str]:
    problems = [f"{place}: unknown key {key!r}" for key in job.keys() - JOB]
    problems += _matrix_problems(place, job)
    if ("runs-on" in job) == ("uses" in job):
        problems.append(f"{place}: needs either runs-on or uses")
    for number, step in enumerate(job.get("steps", []), start=1):
        here = f"{place}, step {number}"
        problems += [f"{here}: unknown key {key!r}" for key in step.keys() - STEP]
        if ("run" in step) == ("uses" in step):
            problems.append(f"{here}: needs either run or uses")
        problems += [f"{here}: {problem}" for problem in _input_problems(step)]
        called = re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
        problems += [f"{here}: no target {target!r} in the Makefile" for target in called if target not in targets]
    return problems


def _matrix_problems(place: str, job: dict[str, Any]) -> list[str]:
    """Keys of the matrix that an expression names and the matrix does not have; a matrix that is computed is not known here."""
    matrix = job.get("strategy", {}).get("matrix", {})
    if not isinstance(matrix, dict):
        return []
    more = [key for one in matrix.get("include", []) if isinstance(one, dict) for key in one]
    known = {*matrix, *more} - {"include", "exclude"}
    conditions = [one.get("if", "") for one in (job, *job.get("steps", []))]  # expressions also without ${{ }}
    expressions = [*re.findall(r"\$\{\{(.*?)\}\}", json.dumps(job)), *conditions]
    named = {key for text in expressions for key in re.findall(r"\bmatrix\.([\w-]+)", text)}
    return [f"{place}: the matrix has no {key!r}" for key in named - known]


def _input_problems(step: dict[str, Any]) -> list[str]:
    """What a step hands to its action and the action does not take."""
    action = step.get("uses", "").partition("@")[0]
    if not action or action.startswith("./"):
        return []
    if action not in INPUTS:
        return [f"the inputs of {action} are not listed in release/lint.py"]
    return [f"{action} takes no {key!r}" for key in step.get("with", {}).keys() - INPUTS[action]]


def makefile_targets() -> set[str]:
    """What can be made."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def written_for_others(folder: Path) -> list[Path]:
    """The container files of a site and of a model's service, as rescene writes them, beside (empty) models."""
    from rescene.deploy.federation_folder import CONTAINERFILE
    from rescene.use.exporting import containerfile

    texts = {"site": CONTAINERFILE, "service": containerfile("model.safetensors"), "onnx": containerfile("model.onnx")}
    for name, text in texts.items():
        (folder / f"{name}.Containerfile").write_text(text)
    for model in ("model.safetensors", "model.onnx"):
        (folder / model).touch()
    return sorted(folder.glob("*.Containerfile"))


def says(program: str, *words: str) -> str:
    """What a linter has to say; nothing if all is well."""
    try:
        done = subprocess.run([BIN / program, *words], capture_output=True, text=True)
    except FileNotFoundError:
        return f"{program} is not installed: pip install 'rescene[check]'"
    return (done.stdout + done.stderr).strip() or f"{program} failed" if done.returncode else ""


def problems_of(path: Path, context: Path = ROOT) -> list[str]:
    """All that is wrong with one file; ``context`` is the folder in which a container file is built."""
    text = path.read_text()
    if path.name in FRONT_MATTER:
        return document_problems(path.name, text)
    if path.name in YAML_PARTS:
        return yaml_problems(path.name, text)
    if path.suffix == ".json":
        return zenodo_problems(text)
    if path.suffix in (".yml", ".yaml"):
        config = str(ROOT / ".github/zizmor.yml")
        found = says("zizmor", "--offline", "--no-progress", "--quiet", "--config", config, str(path))
        own = workflow_problems(text, makefile_targets())
    else:
        found, own = says("hadolint", str(path)), container_problems(text, context, torch_version())
    return [*own, *([found] if found else [])]


def main() -> int:
    with tempfile.TemporaryDirectory() as spare:
        own = [*ROOT.glob(".github/workflows/*.y*ml"), *ROOT.glob("containers/*")]
        told = [ROOT / name for name in (".zenodo.json", "CITATION.cff", "release/conda/recipe.yaml")]
        told += [ROOT / "release" / name for name in FRONT_MATTER]
        named = [Path(name) for name in sys.argv[1:]]
        places = dict.fromkeys(named or [*own, *told], ROOT)
        places |= {} if named else dict.fromkeys(written_for_others(Path(spare)), Path(spare))
        problems = [f"{path}: {one}" for path in sorted(places) for one in problems_of(path, places[path])]
    print("\n".join(problems) or f"{len(places)} files of the release are in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
