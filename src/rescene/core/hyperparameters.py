"""Sections of a recipe and hyperparameters as frozen, validated records; a hyperparameter has a symbol, a place and a meaning."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of keys. It is frozen, and an unknown key or a number that is not finite is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Hyperparameters(Section):
    """Base of the records of hyperparameters."""

    @classmethod
    def table(cls) -> list[dict[str, Any]]:
        """One row per hyperparameter (name, symbol, default, place, meaning), for `rescene list` and the docs."""
        rows = []
        for name, field in cls.model_fields.items():
            about = field.json_schema_extra
            if isinstance(about, dict) and "place" in about:
                default = field.get_default(call_default_factory=True)
                row = {"name": name, "symbol": about["symbol"], "default": default, "place": about["place"]}
                rows.append(row | {"meaning": field.description})
        return rows


def hyper(default: Any, symbol: str, place: str, meaning: str, **bounds: Any) -> Any:
    """A hyperparameter: its default, the paper's symbol, where the default comes from, and what it means.

    ``bounds`` are pydantic's (gt, ge, lt, le, ...). A place in brackets marks a choice of ours where the paper is silent.
    """
    return Field(default, description=meaning, json_schema_extra={"symbol": symbol, "place": place}, **bounds)
