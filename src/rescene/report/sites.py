"""The sites of a federation as its operator sees them: who is there, what came from whom, what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rescene.report.look import plain
from rescene.report.reading import Row, json_object
from rescene.report.runs import Run, number, table
from rescene.report.words import NONE, bytes_text, percent, seconds_text

_MOST = 30  # rounds, and uploads left out, newest first


@dataclass(frozen=True)
class SiteRow:
    """One site, in words."""

    name: str
    client: int
    state: str
    last_answer: str
    late: str
    answered: str
    up: str
    down: str
    left_out: str

    @property
    def here(self) -> bool:
        return self.state.startswith("online")


@dataclass(frozen=True)
class SitesView:
    """The section of the page; ``told`` is the run it speaks of."""

    federation: str
    updated: str
    told: Run
    sites: list[SiteRow]
    rounds: list[list[str]]
    left_out: list[list[str]]


def sites_view(runs: Sequence[Run]) -> SitesView | None:
    """Of the first run that went across sites (it has a sites.json); None if all were simulated."""
    for run in runs:
        found = json_object(run.folder / "sites.json", [])
        sites = [site for site in found.get("sites") or [] if isinstance(site, dict)]
        if sites:
            names = {int(number(site.get("client")) or 0): plain(site.get("name", "?"), 40) for site in sites}
            updated = str(found.get("updated") or "")
            return SitesView(
                plain(found.get("federation", ""), 40),
                _clock(updated),
                run,
                [_site(run, site, updated) for site in sites],
                [_round(row, names) for row in run.rounds[::-1][:_MOST]],
                [_left_out(row, names) for row in _failures(run)[::-1][:_MOST]],
            )
    return None


def _site(run: Run, site: Row, updated: str) -> SiteRow:
    client = int(number(site.get("client")) or 0)
    shares = [table(row, "sites").get(str(client)) for row in run.rounds]
    asked = [share for share in shares if isinstance(share, list) and len(share) == 2]
    up, down = (sum(number(share[side]) or 0.0 for share in asked) for side in (0, 1))
    codes = Counter(plain(row.get("code", ""), 12) for row in _failures(run) if row.get("client") == client)
    since = str(site.get("waiting_since") or "") if run.state == "running" else ""
    return SiteRow(
        name=plain(site.get("name", "?"), 40),
        client=client,
        state=plain(site.get("state", "unknown"), 20),
        last_answer=_ago(str(site.get("last_answer") or ""), updated),
        late=_ago(since, updated) if since else "",
        answered=f"{sum(share[0] > 0 for share in asked)} of {len(asked)}" if asked else NONE,
        up=bytes_text(up) if asked else NONE,
        down=bytes_text(down) if asked else NONE,
        left_out=", ".join(f"{num} × {code}" for code, num in sorted(codes.items())),
    )


def _round(row: Row, names: dict[int, str]) -> list[str]:
    """Place, accuracy, how many answered, bytes from each."""
    shares = {
        int(client): number(share[0]) or 0.0
        for client, share in table(row, "sites").items()
        if client.isdigit() and isinstance(share, list) and share
    }
    each = ", ".join(
        f"{names.get(client, f'site {client}')} {bytes_text(up) if up else 'nothing'}" for client, up in shares.items()
    )
    answered = f"{sum(up > 0 for up in shares.values())} of {len(shares)}"
    return [_place(row), percent(number(row.get("accuracy"))), answered, bytes_text(sum(shares.values())), each]


def _failures(run: Run) -> list[Row]:
    """What a site did not send, or what of it was not accepted."""
    return [row for row in run.events if row.get("level") == "error" and row.get("client") is not None]


def _left_out(row: Row, names: dict[int, str]) -> list[str]:
    client = number(row.get("client"))
    name = NONE if client is None else names.get(int(client), f"site {client:.0f}")
    return [_place(row), name, plain(row.get("code", ""), 12), plain(row.get("message", ""), 400)]


def _place(row: Row) -> str:
    task, turn = number(row.get("task")), number(row.get("round"))
    return f"T{task or 0:.0f}" + ("" if turn is None or turn < 0 else f", round {turn + 1:.0f}")


def _when(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _clock(text: str) -> str:
    when = _when(text)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC" if when else NONE


def _ago(text: str, now: str) -> str:
    """
    >>> _ago("2026-11-15T09:00:00+00:00", "2026-11-15T09:01:01+00:00"), _ago("", "")
    ('1 min 01 s ago', '–')
    """
    then, at = _when(text), _when(now)
    return f"{seconds_text(max((at - then).total_seconds(), 0.0))} ago" if then and at else NONE
