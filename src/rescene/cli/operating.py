"""The operator's page: the report of a run across sites, as it is whenever somebody looks."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rescene.cli.serving import serving
from rescene.deploy.folder import Federation
from rescene.deploy.operator import watch_sites
from rescene.report import write_report
from rescene.report.runs import is_run

NOTHING_YET = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="5"><meta name="color-scheme" content="light dark"><title>{name}</title>
<body style="font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:3em auto;padding:0 1em"><h1>{name}</h1>
<p>No round has been held yet. This page looks again every five seconds.</p>
"""


@contextmanager
def operator_page(federation: Federation, run: Callable[[], Path | None], port: int) -> Iterator[None]:
    """Serve the page of ``run()`` on loopback; says where."""

    def build() -> bytes:
        place = run()
        if place is None or not is_run(place):
            return NOTHING_YET.format(name=html.escape(federation.name)).encode()
        watch_sites(federation, place)
        return write_report([place], place / "report.html").read_bytes()

    with serving(build, port) as address:
        print(f"the operator's page: {address}", flush=True)
        yield


def stay_open() -> None:
    """Until Ctrl-C."""
    print("Ctrl-C ends the page")
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
