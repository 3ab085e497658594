"""One page per method: what was written about it, then what the program knows about it, then what was measured."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

from generate.markdown import code, safe, table, yaml_value

WRITTEN = Path(__file__).parents[1] / "methods"
REFERENCES = ("joint", "local", "raw-upload")
RESULTS = Path(__file__).parents[2] / "results"
STUDIES = {"bench", "theory", "wire", "private"}  # many runs for one question; their own pages show them


def pages() -> dict[str, str]:
    """Text by method name, in the paper's order."""
    from rescene.methods import method_names

    return {name: _page(name) for name in method_names() if name.replace("-", "_") in _built_in()}


def _built_in() -> set[str]:
    import pkgutil

    import rescene.methods

    return {module.name for module in pkgutil.iter_modules(rescene.methods.__path__)}


def _page(name: str) -> str:
    from rescene.cli.experiment_verbs import explain_method

    facts, rows = explain_method(name)
    title = facts.pop("method").rsplit(" (", 1)[0]
    about = facts.pop("about")
    if name in REFERENCES:
        top = f"# {title}\n\nA line to read the others by; why it exists and how to read it: [](../../methods/references.md)."
    else:
        top = (WRITTEN / f"{name}.md").read_text(encoding="utf-8").replace("](../", "](../../")
    lines = [
        top,
        "",
        "## What the program says",
        "",
        table(("", ""), [(safe(k), safe(v)) for k, v in facts.items()]),
        "",
    ]
    lines += ["```text", about, "```", "", "### Hyperparameters", ""]
    cells = [
        (
            code(f"method.{r['name']}"),
            safe(r["symbol"]),
            code(yaml_value(r["default"])),
            safe(r["place"]),
            safe(r["meaning"]),
        )
        for r in rows
    ]
    lines += [table(("key", "symbol", "default", "place", "meaning"), cells) if cells else "None of its own.", ""]
    measured = _measured(name)
    if measured:
        columns = ("setting", "seed", "AA", "AIA", "uploads that are near-copies", "stored in")
        lines += [
            "## Measured here",
            "",
            "Every stored run. Its folder holds recipe, command and machine; other settings than the paper's are the recipe's.",
            "",
        ]
        lines += [table(columns, measured), ""]
    return "\n".join(lines)


def _measured(name: str) -> list[tuple[str, ...]]:
    return [_result_row(run) for run in _stored_runs() if run.method == name]


@functools.cache
def _stored_runs() -> list[Any]:
    """Every stored run, loaded once for all pages."""
    from rescene.core.errors import ResceneError
    from rescene.report.load import load_run

    runs = []
    for path in sorted(RESULTS.rglob("results.json")):
        if path.parts[len(RESULTS.parts)] not in STUDIES:
            with contextlib.suppress(ResceneError):  # an older form, told by `rescene paper list`
                runs.append(load_run(path.parent))
    return runs


def _result_row(run: Any) -> tuple[str, ...]:
    sections = run.config  # as it was, where the record is older than a choice
    data, model = sections["data"]["name"], sections["model"]["name"]
    setting = f"{'fashion-mini' if data == 'auto' else data}, {model}, {len(run.tasks)} tasks, beta {sections['federation']['beta']}, "
    setting += f"{sections['federation']['num_rounds']} rounds a task, E_srv {sections['train']['server_epochs']}"
    if "step" in sections["method"]:
        setting += f", {sections['method']['step']} steps"
    copies = run.near_copies
    where = run.folder.relative_to(RESULTS.parent).as_posix()
    shown = run.style.without_images() if copies is None else f"{100 * copies:.0f} %"
    return safe(setting), str(run.seed), f"{run.results.aa:.2f}", f"{run.results.aia:.2f}", shown, code(where)
