"""What the shell offers on TAB (rescene --install-completion). Recipes come at once; keys load the program first."""

from __future__ import annotations

import typer


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes; files are the shell's own business."""
    from importlib.resources import files

    names = (entry.name for entry in (files("rescene") / "config" / "recipes").iterdir())
    return sorted(
        name.removesuffix(".yaml") for name in names if name.startswith(incomplete) and name.endswith(".yaml")
    )


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of the recipe at hand with an equals sign behind them; after ``method=`` the methods."""
    from rescene.config import resolve
    from rescene.errors import ResceneError
    from rescene.methods import method_names

    if incomplete.startswith("method="):
        return [f"method={name}" for name in method_names() if f"method={name}".startswith(incomplete)]
    try:
        keys = resolve(ctx.params.get("recipe") or "demo", []).flat()
    except ResceneError:  # a half-typed recipe has no keys
        return []
    return [f"{key}=" for key in ["method", *keys] if key.startswith(incomplete)]
