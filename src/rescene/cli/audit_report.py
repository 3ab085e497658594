"""``rescene audit``: attacks on what sites upload, as a table, sentences and audit.json."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rescene.audit import (
    AuditScale,
    audit,
    audit_words,
    control_words,
    red_team,
    red_team_words,
    run_controls,
    stage_of,
)
from rescene.cli.terminal import print_rows
from rescene.config import resolve
from rescene.core.errors import ConfigError, command
from rescene.engine import prepare, use_all_cores
from rescene.engine.checkpoint import write_json

ABOUT = {
    "photograph, replay": "knows all but this one photograph",
    "photograph, look": "looks for the photograph among the uploads",
    "giant, replay": "the same as the first, with a record made to break the clip",
}


def run_audit(
    what: str, overrides: list[str], controls: bool, scale: AuditScale, out: Path | None, quiet: bool, as_json: bool
) -> bool:
    """Attack a recipe or a run, or the broken sites of the controls; whether nothing is wrong."""
    use_all_cores()
    run = _run_folder(what, overrides)
    resolved = resolve(run / "config.yaml" if run else what, overrides)
    found: dict[str, Any]
    if controls:
        rows = run_controls(stage_of(prepare(resolved.recipe)), scale.num_canaries)
        found, good = {"schema": 1, "controls": rows, "words": [control_words(rows)]}, all(r["fired"] for r in rows)
    else:
        found = audit(resolved.recipe, run, scale, _silent if quiet or as_json else _say)
        found["words"] = audit_words(found)
        good = found["verdict"] != "contradicted"
    out = out or (run / "audit.json" if run and not controls else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, found)
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
        if out:
            print(out)
    return good


def run_red_team(out: Path | None, quiet: bool, as_json: bool) -> bool:
    """Attack every claim; whether all that were attacked held and all controls fired."""
    use_all_cores()
    rows = red_team(_silent if quiet or as_json else _say)
    found = {"schema": 1, "rows": [asdict(row) for row in rows], "words": [red_team_words(rows)]}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, found)
    if as_json:
        print(json.dumps(found))
    else:
        print_rows(
            {
                "claim": row.claim,
                "attack": row.attack,
                "positive control": row.control,
                "found": row.found,
                "promised at most": row.promised,
                "verdict": row.verdict + (f": {row.note}" if row.note else ""),
            }
            for row in rows
        )
        print("\n" + textwrap.fill(red_team_words(rows), 118))
        if out:
            print(out)
    return all(row.good for row in rows)


def _run_folder(what: str, overrides: list[str]) -> Path | None:
    folder = Path(what)
    if not folder.is_dir():
        return None
    if not (folder / "config.yaml").is_file():
        raise ConfigError("E108", "not a run folder", where=what, why="it has no config.yaml", fix="rescene runs")
    if overrides:
        raise ConfigError(
            "E198",
            "a finished run cannot be audited with other settings",
            where=", ".join(overrides),
            fix=f"{command('audit', folder / 'config.yaml')} ...",
        )
    return folder


def _print(found: dict[str, Any]) -> None:
    if "controls" in found:
        print_rows(
            {
                "broken on purpose": row["control"],
                "claimed epsilon": f"{row['claimed']:g}",
                "shown, broken": f">= {row['broken']:.2f}",
                "shown, sound twin": f">= {row['sound']:.2f}",
                "control": "fired" if row["fired"] else "DID NOT FIRE",
            }
            for row in found["controls"]
        )
    else:
        print(f"{found['method']} on {found['data']}, mechanism {found['mechanism']}, start {found['start']}\n")
        print_rows(
            {
                "attack": row["attack"],
                "what it does": ABOUT[row["attack"]],
                "right": f"{row['num_right']} of {row['num_guesses']}",
                "epsilon at least": f"{row['epsilon']:.2f}",
                "promised at most": "-" if found["promised"] is None else f"{found['promised']:.2f}",
            }
            for row in found["canaries"]
        )
    print()
    for sentence in found["words"]:
        print(textwrap.fill(sentence, 118))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _silent(text: str) -> None:
    pass
