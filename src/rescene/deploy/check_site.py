"""`rescene deploy check` at a site: its keys, its images, the way to the server. Nothing of the images leaves."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from rescene.config import Recipe
from rescene.core.errors import ResceneError, ResceneWarning, command
from rescene.data import Dataset, content_rows
from rescene.deploy.connection import authority_row, server_rows
from rescene.deploy.findings import Row, app_row, key_row, machine_rows, part_rows, row
from rescene.deploy.processes import running
from rescene.deploy.site import Site
from rescene.deploy.site_config import ledger_of
from rescene.engine.experiment import load_data, pick_device
from rescene.lens import open_lens
from rescene.methods import method_class
from rescene.privacy.statement import HOW_TO_MEASURE, NO_COUNTS, limit

PARTS = ("node", "executor")
MOST_NAMES = 12  # of classes in one line


def check_site(folder: Path, recipe: Recipe | None = None) -> list[Row]:
    """Rows of the table; a site.yaml that cannot be read is one row, and the rest is still looked at."""
    try:
        site = Site.open(folder)
    except ResceneError as error:
        return [_failed("site.yaml", error), key_row(folder), authority_row(folder / "ca.crt"), *machine_rows(folder)]
    server = site.section.server
    missing = "" if server else "it names no server"
    return [
        row("site.yaml", f"site {site.section.client}", missing, "server: host:port, as the operator says"),
        key_row(folder),
        authority_row(folder / "ca.crt"),
        *data_rows(site),
        _lens(site),
        *_ledger(site),
        *privacy_rows(site, recipe),
        *_evaluation(site, recipe),
        _device(site),
        *machine_rows(folder),
        *(server_rows(server, folder / "ca.crt") if server else []),
        app_row(folder),
        *part_rows({one.name for one in running(folder)}, PARTS, command("deploy", "site", folder)),
    ]


def data_rows(site: Site) -> list[Row]:
    """Whether the images can be read, how many there are of each class, what is odd about them."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResceneWarning)
            dataset = load_data(site.section.data.model_copy(update={"skip_unreadable": True}))
    except ResceneError as error:
        return [_failed("images", error)]
    told = [w.message for w in caught if isinstance(w.message, ResceneWarning)]
    damaged = [warning.what for warning in told if warning.code == "W203"]
    where = site.section.data.path or f"the embedded {dataset.name}: not images of your own"
    return [
        row("images", f"{len(dataset.train):,} to learn from, {len(dataset.test):,} to test with; {where}"),
        row("classes", _counts(dataset)),
        _readable(damaged, site.section.data.skip_unreadable),
        *(
            row(f"files [{warning.code}]", "", warning.what, warning.fix or "")
            for warning in told
            if warning.code != "W203"
        ),
        *(
            row(one["check"], "" if one["problem"] else "yes", one["problem"], one["fix"])
            for one in content_rows(dataset)
        ),
    ]


def _readable(damaged: list[str], skips: bool) -> Row:
    """Whether every image can be read, or the site has agreed to do without those that cannot."""
    if skips and damaged:
        return row("images readable", f"{'; '.join(damaged)}: left out, as site.yaml says (skip_unreadable)")
    fix = "copy them again, or remove them; or leave them out with data: {path: FOLDER, skip_unreadable: true} in site.yaml"
    return row("images readable", "" if damaged else "all", "; ".join(damaged), fix)


def _counts(dataset: Dataset) -> str:
    numbers = torch.bincount(dataset.train.labels, minlength=len(dataset.classes)).tolist()
    named = [f"{name} {number}" for name, number in zip(dataset.classes, numbers, strict=True)]
    more = len(named) - MOST_NAMES
    return ", ".join(named[:MOST_NAMES]) + (f" and {more} more classes" if more > 0 else "")


def _ledger(site: Site) -> list[Row]:
    """Whether the privacy ledger is whole and reaches its mark, and what the site allows at most."""
    try:
        ledger = ledger_of(site.section, site.folder)
        book, floor = ledger.book(), ledger.floor()
    except ResceneError as error:
        return [_failed("privacy ledger", error)]
    limits = "none yet: the first run with a guarantee sets it"
    if floor is not None:
        limits = f"{floor.words()}; {ledger.floor_from(book)}"
    return [row("privacy ledger", f"{len(book.begun)} participations"), row("privacy floor", limits)]


def privacy_rows(site: Site, recipe: Recipe | None) -> list[Row]:
    """The site's own limit, and what the recipe that is tried promises for its images."""
    own = site.section.privacy
    found = [] if own is None else [row("privacy limit", limit(own.epsilon_max, own.delta_max))]
    if recipe is None:
        return found
    if recipe.tasks.limit is None and method_class(recipe.method["name"]).reuses_records:
        words = "grows with the number of tasks, since images are used again: see rescene privacy"
    else:
        promise = recipe.promise(recipe.tasks.limit or 1)
        words = "no mechanism: nothing is promised" if promise is None else promise.statement()
    return [*found, row("privacy of the recipe", words)]


def _evaluation(site: Site, recipe: Recipe | None) -> list[Row]:
    """Whether this site will help to measure the accuracy of the recipe that is tried: not behind a guarantee alone."""
    try:
        floor = ledger_of(site.section, site.folder).floor()
    except ResceneError:
        return []  # the row of the ledger says so
    if site.section.holds != "own" or (floor is None and not (recipe and recipe.formal)):
        return []
    if floor is None or floor.evaluation_sigma is None:
        return [
            row(
                "accuracy [W560]",
                f"will not be measured at this site: {NO_COUNTS}; to have it measured, {HOW_TO_MEASURE}",
            )
        ]
    return [
        row("accuracy", f"measured on images held out here, with noise (evaluation_sigma {floor.evaluation_sigma:g})")
    ]


def _lens(site: Site) -> Row:
    """The lens of site.yaml, or the one of this release that most runs look through: the operator can compare its hash."""
    try:
        return row("lens", open_lens(site.section.lens or "leaves").words())
    except ResceneError as error:
        return _failed("lens", error)


def _device(site: Site) -> Row:
    try:
        return row("device", str(pick_device(site.section.device)))
    except ResceneError as error:
        return _failed("device", error)


def _failed(check: str, error: ResceneError) -> Row:
    told = "; ".join(text for text in (error.what, error.why) if text)
    return row(check, "", f"{error.code}: {told}", error.fix or "see docs/deploy.md")
