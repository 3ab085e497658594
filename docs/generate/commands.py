"""The reference of the command line, from the command line itself."""

from __future__ import annotations

from typing import Any

import typer.main

from generate.markdown import code, safe, table
from rescene.cli.app import app, leaves


def page() -> str:
    root = typer.main.get_command(app)
    lines = ["# Commands", "", safe(root.help), "", "Exit status: 0 fine; 2 recipe or usage; 3 images; 4 a run failed; 5 a check failed; "
             "130 interrupted; 143 terminated. `--debug` may stand anywhere and shows tracebacks.", ""]  # fmt: skip
    for name, command in leaves(root, "rescene"):
        lines += [f"## {name}", "", safe(command.help or ""), "", "```text", f"{name} {_usage(command)}", "```", ""]
        rows = [_row(p) for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
        if rows:
            lines += [table(("", "meaning", "default"), rows), ""]
    return "\n".join(lines) + "\n"


def _usage(command: Any) -> str:
    words = [_argument(p) for p in command.params if p.param_type_name == "argument"]
    return " ".join([*words, "[OPTIONS]"])


def _argument(param: Any) -> str:
    word = param.name.upper() + ("..." if param.nargs == -1 else "")
    return word if param.required else f"[{word}]"


def _row(param: Any) -> tuple[str, str, str]:
    named = param.param_type_name != "argument"
    empty = param.default is None or param.default is False or callable(param.default) or param.default == ()
    name = ", ".join(map(code, param.opts)) if named else code(_argument(param))
    return name, safe(getattr(param, "help", None) or ""), "" if empty else code(param.default)
