"""Checks the files of a release: `make lint` runs it, and it fails on any error.

    python release/lint.py [FILE ...]      without names all of the repository, and the files that rescene writes for others

`document_problems` reads the cards and the paper, `zenodo_problems` what Zenodo is told. hadolint reads container files.
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
    if ("runs-on" in job) == ("uses" in job):
        problems.append(f"{place}: needs either runs-on or uses")
    for number, step in enumerate(job.get("steps", []), start=1):
        here = f"{place}, step {number}"
        problems += [f"{here}: unknown key {key!r}" for key in step.keys() - STEP]
        if ("run" in step) == ("uses" in step):
            problems.append(f"{here}: needs either run or uses")
        called = re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
        problems += [f"{here}: no target {target!r} in the Makefile" for target in called if target not in targets]
    return problems


def makefile_targets() -> set[str]:
    """What can be made."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def written_for_others(folder: Path) -> list[Path]:
    """The container files of a site and of a model's service, as rescene writes them."""
    from rescene.deploy.federation_folder import CONTAINERFILE
    from rescene.use.exporting import containerfile

    texts = {"site": CONTAINERFILE, "service": containerfile("model.safetensors"), "onnx": containerfile("model.onnx")}
    for name, text in texts.items():
        (folder / f"{name}.Containerfile").write_text(text)
    return sorted(folder.iterdir())


def says(program: str, *words: str) -> str:
    """What a linter has to say; nothing if all is well."""
    try:
        done = subprocess.run([BIN / program, *words], capture_output=True, text=True)
    except FileNotFoundError:
        return f"{program} is not installed: pip install 'rescene[check]'"
    return (done.stdout + done.stderr).strip() or f"{program} failed" if done.returncode else ""


def problems_of(path: Path) -> list[str]:
    """All that is wrong with one file."""
    if path.name in FRONT_MATTER:
        return document_problems(path.name, path.read_text())
    if path.suffix == ".json":
        return zenodo_problems(path.read_text())
    if path.suffix not in (".yml", ".yaml"):
        return [found] if (found := says("hadolint", str(path))) else []
    found = says(
        "zizmor", "--offline", "--no-progress", "--quiet", "--config", str(ROOT / ".github/zizmor.yml"), str(path)
    )
    return [*workflow_problems(path.read_text(), makefile_targets()), *([found] if found else [])]


def main() -> int:
    with tempfile.TemporaryDirectory() as spare:
        own = [*ROOT.glob(".github/workflows/*.y*ml"), *ROOT.glob("containers/*")]
        told = [ROOT / ".zenodo.json", *(ROOT / "release" / name for name in FRONT_MATTER)]
        paths = [Path(name) for name in sys.argv[1:]] or [*own, *told, *written_for_others(Path(spare))]
        problems = [f"{path}: {problem}" for path in sorted(paths) for problem in problems_of(path)]
    print("\n".join(problems) or f"{len(paths)} files of the release are in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
