"""`rescene deploy check`: what it finds on the server and at a site, one row per check.

    both        the machine, Flower, keys
    server      keys, certificates, port, processes, clock, what the sites need from here
    site        its keys, its images, the way to the server; nothing of the images leaves

The way to the server is looked at before anything is sent: is it there, is it ours, and what time does it have?
"""

from __future__ import annotations

import shlex
import shutil
import ssl
import stat
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rescene.config import Recipe
from rescene.core.errors import ConfigError, ResceneError, ResceneWarning, command
from rescene.data import Dataset, content_rows
from rescene.data.inspection import APART, TESTED, in_series
from rescene.deploy.federation_folder import FederationFolder, broken_apps
from rescene.deploy.node_key import key_fault, number_fault
from rescene.deploy.plan_file import read_plan
from rescene.deploy.processes import LOOPBACK, changed_keys, check_port, running
from rescene.deploy.site import Site
from rescene.deploy.site_config import SiteSection, held_by, ledger_of, own_images
from rescene.engine.experiment import load_data, pick_device
from rescene.lens import open_lens
from rescene.methods import method_class
from rescene.privacy.promise import HOW_TO_MEASURE, NO_COUNTS, limit

FLOWER = ("1.41.", "1.42.")  # those that were tried; server and sites must share major.minor
ENOUGH_DISK_GB = 2.0
ENOUGH_TEMPORARY_GB = 0.1  # Flower unpacks the app there
ENOUGH_MEMORY_GB = 1.0  # a node and its app hold about 0.8 GB before any work
CheckRow = dict[str, str]  # check, result, problem, fix


def row(check: str, result: str = "", problem: str = "", fix: str = "") -> CheckRow:
    """One line of the table; a problem comes with its fix."""
    return {"check": check, "result": result, "problem": problem, "fix": fix if problem else ""}


def machine_rows(folder: Path) -> list[CheckRow]:
    """Versions, disk and memory of this machine."""
    return [_flower(), _packages(), *_disks(folder), _memory()]


def _flower() -> CheckRow:
    found = _version("flwr")
    wrong = "" if found.startswith(FLOWER) else f"needs {'* or '.join(FLOWER)}*" if found else "Flower is not installed"
    return row("Flower", found, wrong, 'pip install "rescene[deploy]"')


def _packages() -> CheckRow:
    """Server and sites must have the same rescene (E343); another torch may give other bits (W341)."""
    return row("versions", ", ".join(f"{name} {_version(name) or 'missing'}" for name in ("rescene", "torch")))


def _version(package: str) -> str:
    if package == "rescene":
        import rescene

        return rescene.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _disks(folder: Path) -> list[CheckRow]:
    """The disk of the folder, and that of temporary files if it is another."""
    spare = Path(tempfile.gettempdir())
    same = spare.stat().st_dev == folder.stat().st_dev
    own = _disk("disk", folder, ENOUGH_DISK_GB)
    return [own] if same else [own, _disk(f"disk of {spare}", spare, ENOUGH_TEMPORARY_GB)]


def _disk(check: str, folder: Path, enough_gb: float) -> CheckRow:
    free = shutil.disk_usage(folder).free / 1e9
    problem = f"less than {enough_gb:g} GB" if free < enough_gb else ""
    return row(check, f"{free:.1f} GB free", problem, "make room: rounds are refused with E410 when it is full")


def app_row(folder: Path) -> CheckRow:
    """Flower's copies of the app under this folder are whole."""
    broken = broken_apps(folder / "flwr")
    problem = "; ".join(f"{app.name} is not as rescene writes it: {name}" for app, name in broken.items())
    fix = "was the disk full? make room: with the next message it is removed and written anew"
    return row("app", "" if problem else "no broken copy", problem, fix)


def part_rows(up: set[str], parts: Sequence[str], again: str) -> list[CheckRow]:
    """Two processes that need each other: one alone does nothing."""
    gone = "it has ended while the other runs" if len(up & set(parts)) == 1 else ""
    return [row(part, "up") if part in up else row(part, "not started", gone, again) for part in parts]


def _memory() -> CheckRow:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1e6
    except (OSError, StopIteration, ValueError):
        return row("memory", "not known on this system")
    problem = f"less than {ENOUGH_MEMORY_GB:.0f} GB" if free < ENOUGH_MEMORY_GB else ""
    return row("memory", f"{free:.1f} GB free", problem, "close other programs, or a machine with more memory")


def secret_row(path: Path, needed: bool = True) -> CheckRow:
    """A secret is there, and its owner alone can read it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        return row(path.name, "not here", "it is missing" if needed else "", "ask the operator for the site's folder")
    except OSError as error:
        return row(path.name, "", f"cannot be read: {error.strerror}", f"give {path} to the user who runs this")
    shared = f"others can read it (mode {mode:04o})" if mode & 0o077 else ""
    return row(path.name, f"mode {mode:04o}", shared, f"chmod 600 {shlex.quote(str(path))}")


def key_row(folder: Path) -> CheckRow:
    """node.key: secret, of the kind Flower takes, and the one whose other half the operator has."""
    found = secret_row(folder / "node.key")
    if found["problem"]:
        return found
    problem, fix = key_fault(folder)
    paired = "" if problem or not (folder / "node.pub").is_file() else ", belongs to node.pub"
    return row("node.key", found["result"] + paired, problem, fix)


AHEAD_S, BEHIND_S = 4.0, 300.0  # Flower refuses a signature from 5 s in its future or 305 s in its past
SOON_S = 30 * 86_400.0
TIMEOUT_S = 10.0
_FOREIGN = {7, 18, 19, 20, 21, 30}  # OpenSSL's codes: another authority signed, or none that we know
_OTHER_NAME = {62, 64}
_NOT_YET, _EXPIRED = 9, 10


def server_rows(server: str, authority: Path) -> list[CheckRow]:
    """Reach the server as a node would, through the proxy if there is one; ask it for nothing but its time."""
    host, port = split(server)
    try:
        context = ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError):
        return []  # the row of ca.crt says so
    connection, way = _connection(host, port, context)
    try:
        connection.request("GET", "/v1/fleet/", headers={"Connection": "close"})
        answer = connection.getresponse()
    except ssl.SSLError as error:
        return [row("server reachable", f"{server}{way}"), row("TLS", "", *explain(error, host))]
    except (OSError, HTTPException) as error:
        why = f"{getattr(error, 'strerror', None) or error or type(error).__name__}"
        fix = "is the server up, the port open in the firewall, `server` in site.yaml right, HTTPS_PROXY right?"
        return [row("server reachable", "", f"no connection to {server}{way}: {why}", fix)]
    finally:
        connection.close()
    shut = "the door forbids /v1/fleet/" if answer.status == 403 else ""
    return [
        row("server reachable", f"{server}{way}", shut, "the operator's proxy must forward it: server/nginx.conf"),
        row("TLS", "the server's certificate is this federation's"),
        _server_clock(answer),
    ]


def split(server: str) -> tuple[str, int]:
    """
    >>> split("fl.example.org:8443"), split("[::1]:8443"), split("10.0.0.7")
    (('fl.example.org', 8443), ('::1', 8443), ('10.0.0.7', 443))
    """
    parts = urlsplit(f"//{server}")
    return parts.hostname or server, parts.port or 443


def _connection(host: str, port: int, context: ssl.SSLContext) -> tuple[HTTPSConnection, str]:
    proxy = urllib.request.getproxies().get("https")
    if not proxy or urllib.request.proxy_bypass(host):
        return HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context), ""
    way = urlsplit(proxy)
    made = HTTPSConnection(way.hostname or "", way.port or 3128, timeout=TIMEOUT_S, context=context)
    made.set_tunnel(host, port)
    return made, f" through the proxy {way.hostname}"


def explain(error: ssl.SSLError, host: str) -> tuple[str, str]:
    """Problem and fix in words."""
    code = getattr(error, "verify_code", None)
    if code in _FOREIGN:
        return "the server's certificate is not signed by this ca.crt", "ask the operator for the federation's ca.crt"
    if code in _OTHER_NAME:
        fix = "`server` in site.yaml must be the --host of `deploy init`"
        return f"the server's certificate is not for {host}", fix
    if code == _NOT_YET:
        return "the certificate is not valid yet", "set this machine's clock (NTP)"
    if code == _EXPIRED:
        return "the certificate has expired", "the operator makes a new federation; or this clock is wrong"
    return f"no TLS: {error.reason or error}", "is this the server's port, and not a plain web server?"


def _server_clock(answer: HTTPResponse) -> CheckRow:
    told = answer.headers.get("Date")
    if not told:
        return row("clock", "the server does not tell its time")
    ahead = time.time() - parsedate_to_datetime(told).timestamp()
    words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    wrong = not -BEHIND_S < ahead < AHEAD_S
    return row("clock", words, "the server would refuse this site" if wrong else "", "set the clock of both (NTP)")


def authority_row(path: Path) -> CheckRow:
    """ca.crt can be read and is valid today."""
    try:
        (found, *_) = ssl.create_default_context(cafile=path).get_ca_certs() or [{}]
    except OSError as error:
        return row("ca.crt", "", f"cannot be used: {error.strerror or error}", "ask the operator for it")
    if not found:
        return row("ca.crt", "", "it holds no authority's certificate", "ask the operator for it")
    return row("ca.crt", *_validity(found))


def certificate_row(folder: Path, host: str) -> CheckRow:
    """The server's certificate as a site at ``host`` would see it: a handshake without a socket."""
    try:
        found = _handshake(folder, host)
    except ssl.SSLCertVerificationError as error:
        return row(f"certificate for {host}", "", explain(error, host)[0], "rescene deploy init, and new site folders")
    except (OSError, ssl.SSLError) as error:
        why = "server.key does not belong to server.pem" if isinstance(error, ssl.SSLError) else str(error)
        return row(f"certificate for {host}", "", why, "restore server/ from a backup")
    return row(f"certificate for {host}", *_validity(found))


def _handshake(folder: Path, host: str) -> dict[str, Any]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=folder / "ca.crt")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    there, here = client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)
    for side in (there, here, there):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue  # the other one's turn
    return there.getpeercert() or {}


def _validity(certificate: dict[str, Any]) -> tuple[str, str, str]:
    """Result, problem and fix of a certificate's dates."""
    begins, ends = (ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter"))
    left = ends - time.time()
    until = f"valid until {time.strftime('%Y-%m-%d', time.gmtime(ends))}"
    if time.time() < begins:
        return until, "it is not valid yet", "set this machine's clock (NTP)"
    problem = "it has expired" if left < 0 else "it ends within 30 days" if left < SOON_S else ""
    return until, problem, "the operator makes a new federation (rescene deploy init) and new site folders"


SERVER_PARTS = ("link", "executor")


def check_server(federation: FederationFolder) -> list[CheckRow]:
    """Everything that can be known before a site calls; starts nothing."""
    server = federation.server
    return [
        row("federation.yaml", f"{federation.name}: {', '.join(federation.sites)}"),
        _closed(federation),
        secret_row(server / "ca.key", needed=False),  # may be kept apart: it signs nothing in daily work
        secret_row(server / "server.key"),
        *(certificate_row(server, host) for host in dict.fromkeys([federation.host, "localhost"])),
        *(_site(federation, name) for name in federation.sites),
        *_processes(federation),
        *_planned_evaluation(federation),
        app_row(server),
        _own_clock(federation),
        *machine_rows(federation.path),
    ]


def _closed(federation: FederationFolder) -> CheckRow:
    mode = stat.S_IMODE(federation.path.stat().st_mode)
    shared = f"others can look into it (mode {mode:04o})" if mode & 0o077 else ""
    return row("folder", f"mode {mode:04o}", shared, f"chmod 700 {shlex.quote(str(federation.path))}")


def _site(federation: FederationFolder, name: str) -> CheckRow:
    """The server registers a site by node.pub; a node.key still here is no fault, but no longer a secret of the site."""
    folder = federation.site(name)
    check = f"site {name}"
    if not (folder / "node.pub").is_file():
        return row(check, "", "node.pub is missing", f"copy it from the site into {folder}")
    ours, theirs = federation.server / "ca.crt", folder / "ca.crt"
    if theirs.is_file() and ours.is_file() and theirs.read_bytes() != ours.read_bytes():
        fix = f"{shlex.join(['cp', str(ours), str(theirs)])}, and carry it to the site"
        return row(check, "", "its ca.crt is not the server's", fix)
    if name in changed_keys(federation):
        fix = f"{command('deploy', 'replace-key', federation.path, name)}, if {name} says that it has made a new key"
        return row(check, "", "node.pub is not the key that is registered, so the site is refused", fix)
    left = "; node.key is still here: delete it once the site has it" if (folder / "node.key").is_file() else ""
    return row(check, f"node.pub{left}")


def _planned_evaluation(federation: FederationFolder) -> list[CheckRow]:
    """Where the accuracy of the plan will be measured."""
    plan = read_plan(federation.plan)
    if plan is None:
        return []
    if plan.test is not None:
        return [row("accuracy", f"measured on the server's test images, {plan.test}")]
    behind = f"not with recipe own or another guarantee: {NO_COUNTS}; then {HOW_TO_MEASURE}"
    return [row("accuracy", f"measured at the sites; {behind}")]


def _processes(federation: FederationFolder) -> list[CheckRow]:
    up = {one.name for one in running(federation.server)}
    port = f"{LOOPBACK}:{federation.port}"
    if "link" in up:
        rows = [row("port", f"{port}, ours")]
    else:
        try:
            check_port(LOOPBACK, federation.port)
            rows = [row("port", f"{port}, free")]
        except ConfigError as error:
            rows = [row("port", port, error.what, error.fix or "")]
    return rows + part_rows(up, SERVER_PARTS, command("deploy", "server", federation.path))


def _own_clock(federation: FederationFolder) -> CheckRow:
    """Sites compare their clock with this one, so at least it must not stand before our own files."""
    made = (federation.path / "federation.yaml").stat().st_mtime
    early = "it stands before the day this folder was made" if time.time() < made - 60 else ""
    return row("clock", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", early, "set the clock (NTP)")


SITE_PARTS = ("node", "executor")
MOST_NAMES = 12  # of classes in one line


def check_site(folder: Path, recipe: Recipe | None = None) -> list[CheckRow]:
    """Rows of the table; a site.yaml that cannot be read is one row, and the rest is still looked at."""
    try:
        site = Site.open(folder)
    except ResceneError as error:
        return [_failed("site.yaml", error), key_row(folder), authority_row(folder / "ca.crt"), *machine_rows(folder)]
    server, (images, num_held) = site.section.server, _images(site)
    wrong, fix = number_fault(folder, site.section.client)
    if not server:
        wrong, fix = "it names no server", "server: host:port, as the operator says"
    return [
        row("site.yaml", f"site {site.section.client}", wrong, fix),
        key_row(folder),
        authority_row(folder / "ca.crt"),
        *images,
        _tried("lens", lambda: _lens(site)),
        *_ledger(site),
        *privacy_rows(site, recipe),
        *_site_evaluation(site, recipe, num_held),
        _tried("device", lambda: str(pick_device(site.section.device))),
        *machine_rows(folder),
        *(server_rows(server, folder / "ca.crt") if server else []),
        app_row(folder),
        *part_rows({one.name for one in running(folder)}, SITE_PARTS, command("deploy", "site", folder)),
    ]


def data_rows(site: Site) -> list[CheckRow]:
    """Whether the images can be read, how many there are of each class, what is odd about them."""
    return _images(site)[0]


def _images(site: Site) -> tuple[list[CheckRow], int | None]:
    """The rows of the images, split as the site splits them in a run, and how many it tests with; none if they cannot be read."""
    data = site.section.data.model_copy(update={"skip_unreadable": True})
    section, own = site.section.model_copy(update={"data": data}), site.section.holds == "own"
    split, series = "", None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResceneWarning)
            if own:
                found, plan = own_images(section)
                dataset = held_by(section, plan, found)
                how = "a test split of their own" if found.split == "given" else f"hold_out {section.hold_out:g}"
                split = f" ({how}, pictures of {plan.image_size} pixels; the plan says their size)"
                series = in_series(found, f"{APART}; hold_out is not used then") if section.hold_out else None
            else:
                dataset = load_data(data)
    except ResceneError as error:
        return [_failed("images", error)], None
    told = [w.message for w in caught if isinstance(w.message, ResceneWarning)]
    damaged = [one.what for one in told if one.code == "W203"]
    odd = [row(f"files [{one.code}]", "", one.what, one.fix or "") for one in told if one.code != "W203"]
    where = site.section.data.path or f"the embedded {dataset.name}: not images of your own"
    return [
        row("images", f"{len(dataset.train):,} to learn from, {len(dataset.test):,} to test with{split}; {where}"),
        row("classes", _counts(dataset)),
        _readable(damaged, site.section.data.skip_unreadable),
        *odd,
        *([row(f"series [{series.code}]", series.what)] if series else []),
        *(row(c["check"], "" if c["problem"] else "yes", c["problem"], c["fix"]) for c in _content(section, dataset)),
    ], len(dataset.test)


def _content(section: SiteSection, dataset: Dataset) -> list[dict[str, str]]:
    """What is odd about the images. A site that holds out none wants none to test with: the row of the accuracy says so."""
    rows = content_rows(dataset)
    if section.holds != "own" or dataset.split == "given":
        return rows
    fix = "add images of these classes, or a larger hold_out in site.yaml"
    rows = [one | {"fix": fix} if one["check"] == TESTED and one["problem"] else one for one in rows]
    return [one for one in rows if one["check"] != TESTED or section.hold_out]


def _readable(damaged: list[str], skips: bool) -> CheckRow:
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


def _ledger(site: Site) -> list[CheckRow]:
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


def privacy_rows(site: Site, recipe: Recipe | None) -> list[CheckRow]:
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


def _site_evaluation(site: Site, recipe: Recipe | None, num_held: int | None) -> list[CheckRow]:
    """Whether this site will help to measure the accuracy of the recipe that is tried: not behind a guarantee alone."""
    if site.section.holds == "own" and num_held == 0:
        return [row("accuracy", "will not be measured at this site: it holds out no image (hold_out in site.yaml)")]
    try:
        floor = ledger_of(site.section, site.folder).floor()
    except ResceneError:
        return []  # the row of the ledger says so
    if site.section.holds != "own" or (floor is None and not (recipe and recipe.formal)):
        return []
    if floor is None or floor.evaluation_sigma is None:
        words = f"will not be measured at this site: {NO_COUNTS}; to have it measured, {HOW_TO_MEASURE}"
        return [row("accuracy [W560]", words)]
    noise = f"with noise (evaluation_sigma {floor.evaluation_sigma:g})"
    return [row("accuracy", f"measured on images held out here, {noise}")]


def _lens(site: Site) -> str:
    """The lens of site.yaml, or the one of this release that most runs look through: the operator can compare its hash."""
    return open_lens(site.section.lens or "leaves").words()


def _tried(check: str, look: Callable[[], str]) -> CheckRow:
    """What ``look`` finds, or what it fails with."""
    try:
        return row(check, look())
    except ResceneError as error:
        return _failed(check, error)


def _failed(check: str, error: ResceneError) -> CheckRow:
    told = "; ".join(text for text in (error.what, error.why) if text)
    return row(check, "", f"{error.code}: {told}", error.fix or "see docs/deploy.md")
