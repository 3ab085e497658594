"""What sets runs apart: the keys of their recipes that can head a column, and their values as words."""

from __future__ import annotations

from collections.abc import Sequence

from rescene.errors import ConfigError, did_you_mean
from rescene.report.formats import NONE
from rescene.report.groups import UNNAMED, Group, acting, guaranteed
from rescene.report.labels import quiet
from rescene.report.look import plain

ALWAYS = ("method", "data", "seed", "epsilon")  # names that are not keys of a recipe


def traits(group: Group) -> dict[str, str]:
    """Every dotted key of the group's recipe as text, and ``method``, ``data``, ``seed``, ``epsilon`` (as guaranteed)."""
    run = group.runs[0]
    flat = {key: value for key, value in acting(run).items() if key not in ("method", "method.name")}
    flat = dict(
        sorted(flat.items(), key=lambda item: item[0].startswith("method."))
    )  # what is a method's own comes last
    name, path = flat.get("data.name"), flat.get("data.path")
    data = run.env.get("data") or (path or name if name in UNNAMED else name) or NONE
    seeds = sorted({other.seed for other in group.runs if other.seed is not None})
    words = {key: plain(NONE if value is None else value, 40) for key, value in flat.items()}
    return words | {
        "method": group.look.label,
        "data": plain(data, 40),
        "seed": ", ".join(map(str, seeds)) or NONE,
        "epsilon": NONE if (epsilon := guaranteed(run)) is None else f"{epsilon:g}",
    }


def differing(groups: Sequence[Group]) -> list[str]:
    """Keys in which groups differ. A method's own settings count only against other groups of that method."""
    told = [traits(group) for group in groups]
    keys = dict.fromkeys(key for own in told for key in own if key not in ALWAYS)
    found = [key for key in keys if _varies(key, groups, told)]
    if len({own["data"] for own in told}) > 1:  # the name says it; where it lies is of no interest
        found = ["data", *(key for key in found if key not in ("data.name", "data.path"))]
    return found


def telling_keys(groups: Sequence[Group]) -> list[str]:
    """Keys that differ and tell rows apart: where data lie or how exactly they are computed with only if nothing else does."""
    apart = differing(groups)
    keys = [key for key in apart if not quiet(key)]
    for key in apart:
        if key not in keys and _num_looks(groups, [*keys, key]) > _num_looks(groups, keys):
            keys.append(key)
    return keys


def _num_looks(groups: Sequence[Group], keys: Sequence[str]) -> int:
    """How many different rows these keys and the method give."""
    told = [traits(group) for group in groups]
    return len({tuple(own.get(key, NONE) for key in ("method", *keys)) for own in told})


def _varies(key: str, groups: Sequence[Group], told: Sequence[dict[str, str]]) -> bool:
    values: dict[str, set[str]] = {}
    for group, own in zip(groups, told, strict=True):
        if key in own:
            values.setdefault(group.method if key.startswith("method.") else "", set()).add(own[key])
    return any(len(found) > 1 for found in values.values())


def resolve_keys(text: str, groups: Sequence[Group]) -> list[str]:
    """Comma-separated names as full keys: ``beta`` is federation.beta if no other key ends so."""
    known = list(dict.fromkeys(key for group in groups for key in traits(group)))
    return list(dict.fromkeys(_resolve(name.strip(), known) for name in text.split(",") if name.strip()))


def _resolve(name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    ends = [key for key in known if name in (key.rpartition(".")[2], key.removesuffix(".name"))]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigError("E142", f"{name!r} may be {' or '.join(ends)}", where="--by", fix=f"--by {ends[0]}")
    close = did_you_mean(name, [*known, *(key.rpartition(".")[2] for key in known)])
    raise ConfigError(
        "E141",
        f"no run has a setting {name!r}" + (f"; did you mean {close}?" if close else ""),
        where="--by or --across",
        fix="rescene show RUN   lists the settings of a run",
    )


def heads(keys: Sequence[str]) -> list[str]:
    """Column titles: the part of each key that says most, where it is unambiguous.

    >>> heads(["method", "federation.beta", "model.name", "train.lr", "method.lr"])
    ['method', 'beta', 'model', 'train.lr', 'method.lr']
    """
    ends = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]
