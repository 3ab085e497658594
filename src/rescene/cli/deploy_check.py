"""rescene deploy check: what a server or a site sees before a federation runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rescene.cli.frame import AsJson, Overrides, Plugin, load_plugins, verb
from rescene.errors import ConfigError, ResceneError

if TYPE_CHECKING:
    from rescene.deploy.trial import Trial

Rows = list[dict[str, str]]


@verb
def check(
    folder: Annotated[Path, typer.Argument(help="folder of the federation, or of one site")],
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option("--recipe", help="what to try at a site: shipped recipe or file")] = "demo",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="condensation steps, to try it quickly")] = None,
    trial: Annotated[bool, typer.Option("--trial/--no-trial", help="at a site: work through one round")] = True,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Check a server or a site, and try a round at the site: nothing is sent; exit code 5 if something needs fixing."""
    load_plugins(plugin)
    if (folder / "federation.yaml").is_file():
        from rescene.deploy.check_server import check_server
        from rescene.deploy.folder import Federation

        _show(check_server(Federation.open(folder)), {}, as_json)
    elif (folder / "site.yaml").is_file():
        chosen = [*(overrides or []), *([f"method.num_steps={steps}"] if steps else [])]
        _check_site(folder, recipe, chosen, trial, as_json)
    else:
        raise ConfigError(
            "E195",
            "this is the folder of neither a federation nor a site",
            where=str(folder),
            why="it holds no federation.yaml and no site.yaml",
            fix="rescene deploy init NAME --sites A,B,C",
        )


def _check_site(folder: Path, recipe: str, overrides: list[str], trial: bool, as_json: bool) -> None:
    from rescene.config import resolve
    from rescene.deploy.check_site import check_site
    from rescene.report.check_page import write_check

    resolved = resolve(recipe, overrides)
    rows, found = check_site(folder, resolved.recipe), None
    if trial:
        from rescene.deploy.site import Site
        from rescene.deploy.trial import try_round

        try:
            found = try_round(Site.open(folder), resolved)
            rows.append(_row("trial round", f"{found.method}: {found.seconds:.1f} s, {found.num_bytes:,} bytes"))
        except ResceneError as error:
            problem = f"{error.code}: {error.what}" + (f"; {error.why}" if error.why else "")
            rows.append(_row("trial round", "", problem, error.fix or "see the rows above"))
    name = folder.resolve().name
    try:
        page = str(write_check(rows, _preview(found) if found else None, name, folder / "check.html"))
    except OSError as error:
        page = ""
        rows.append(_row("check.html", "", f"cannot be written: {error.strerror}", "make room, or chown the folder"))
    _show(rows, {"page": page, "sent": "nothing"} | (_facts(found) if found else {}), as_json)


def _facts(trial: Trial) -> dict[str, str]:
    copies = f"{100 * trial.near_copies:.0f} % of {trial.num_images}" if trial.num_images else "no images are sent"
    parts = ", ".join(f"{one.verb} {one.seconds:.1f} s, {one.num_bytes:,} bytes" for one in trial.answers)
    return {
        "method": f"{trial.method}, recipe {trial.recipe}",
        "leaves the site": trial.leaves_site,
        "upload on the wire": f"{trial.num_bytes:,} bytes in {trial.seconds:.1f} s"
        + (f" ({parts})" if len(trial.answers) > 1 else ""),
        "near-copies of own images": copies,
    }


def _preview(trial: Trial) -> Any:
    from rescene.report.check_page import Preview

    return Preview(
        _facts(trial),
        trial.leaves_site,
        trial.drawn,
        trial.num_images,
        trial.near_copies,
        trial.pairs,
        trial.surrogates.numpy(),
        trial.nearest.numpy(),
    )


def _row(check: str, result: str, problem: str = "", fix: str = "") -> dict[str, str]:
    from rescene.deploy.findings import row

    return row(check, result, problem, fix)


def _show(rows: Rows, facts: dict[str, str], as_json: bool) -> None:
    from rescene.cli.listing import print_rows

    problems = sum(bool(row["problem"]) for row in rows)
    if as_json:
        print(json.dumps({"checks": rows, **facts}))
    else:
        print_rows(rows)
        print(f"\n{problems} of {len(rows)} checks need something done" if problems else "\nall is well")
        for key, value in facts.items():
            print(f"{key}: {value}")
    if problems:
        raise typer.Exit(5)
