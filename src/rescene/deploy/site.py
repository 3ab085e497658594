"""A site: opens its own images, runs the verb it is asked for, keeps what it remembers in files under its own folder.

    site.yaml                            who it is and where its images lie
    state/<run>/client-<k>/memory-*.bin  what it remembers between rounds, by hash, whole or not at all
    state/<run>/client-<k>/<verb>/       parts of messages that did not change, by hash
    state/<run>/client-<k>/answer-*.bin  the last answer, by the token of its question
    state/<run>/client-<k>/recipe.json   what this run is; it may open new tasks and change nothing else
    state/seen/                          what a lens saw of the images, of the last look only
    state/<run>/client-<k>/sums/, state/summed/  its part in secure sums (``parties``)
    state/ledger.jsonl                   what was released under a privacy mechanism, in all runs
    ledger-mark.json                     how far that ledger goes, outside state/: it shows when the ledger was set back

All of it can be read by the site's own user alone.

A request says from which memory to start. Asked twice, a site gives the same answer twice: a letter that comes again, or a
server that goes back to its last checkpoint, does no harm.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

import rescene
from rescene.config import Recipe
from rescene.config.plan import grows
from rescene.deploy.holding import OWN, SiteSection, check_floor, check_lens, experiment_of, hash_of, ledger_of, lens_of
from rescene.deploy.letters import EVALUATE, HELLO, SUM_STEPS, Letter, Remembered, Reply, Request, in_a_line
from rescene.deploy.message import pack_message, unpack_message
from rescene.documents import read_yaml
from rescene.engine import Experiment, use_all_cores
from rescene.engine import wire as on_wire
from rescene.engine.checkpoint import write_atomically
from rescene.engine.evaluate import tally
from rescene.engine.federation import first_line
from rescene.engine.ledger import FlopMeter
from rescene.engine.sites import site_at
from rescene.engine.watch import warnings_to
from rescene.errors import ConfigError, DataError, ResceneError, RunError
from rescene.lens import Kept
from rescene.methods import Method
from rescene.nets import flops_to
from rescene.privacy.ledger import Declined
from rescene.privacy.totals import threshold
from rescene.record import Tree, num_bytes, to_device
from rescene.rng import Rng

if TYPE_CHECKING:
    from rescene.deploy.parties import Parties

KEPT = 12  # memories: two checkpoints of the server and the step under way, a few exchanges each
VERB = ["self", "payload", "shard", "client_state", "rng"]
HEARD = (
    "W310",
    "W342",
)  # warnings the server hears: the site declines, classes outside the plan; others may name files
TOLD = (
    "E204",
    "E205",
    "E209",
    "E210",
    "E214",
    "E216",
    "E217",
    "E221",
)  # errors whose words name classes, or a lens' hash, at most


@dataclass(frozen=True)
class Site:
    """A site's folder and what its site.yaml says."""

    folder: Path
    section: SiteSection

    @staticmethod
    def open(folder: Path) -> Site:
        path = folder / "site.yaml"
        try:
            return Site(folder, SiteSection.model_validate(read_yaml(path)))
        except OSError as error:
            raise ConfigError(
                "E120",
                f"no site.yaml can be read: {error.strerror}",
                where=str(folder),
                fix="rescene deploy init makes a folder for each site",
            ) from None
        except ValidationError as error:
            lines = str(error).splitlines()
            raise ConfigError("E120", "site.yaml makes no sense", where=str(path), why=" ".join(lines[1:3])) from None

    def answer(self, letter: Letter) -> bytes:
        """The reply to a letter, also when something goes wrong: the server is told what, and goes on without us."""
        with _files_for_us_alone():
            return self._reply(letter)

    def _reply(self, letter: Letter) -> bytes:
        client, token = self.section.client, ""
        try:
            use_all_cores()
            request = unpack_message(letter.head).tree
            if not isinstance(request, Request):
                raise RunError("E340", "the message is refused: it is no request")
            token = request.token
            return self._answer(request, letter)
        except ResceneError as error:
            print(error, file=sys.stderr)  # the whole of it, for the site's own log
            private = isinstance(error, (ConfigError, DataError)) and error.code not in TOLD
            words = "its images or settings cannot be used; its log says why" if private else _with_fix(error)
            reply = Reply(client, None, None, 0, (error.code, in_a_line(words)))
        except Exception as error:
            reply = Reply(client, None, None, 0, ("E321", in_a_line(first_line(error))))
        return pack_message(replace(reply, token=token)).data

    def _answer(self, request: Request, letter: Letter) -> bytes:
        if request.version != rescene.__version__:
            fix = f"pip install rescene=={request.version}"
            raise RunError("E343", f"this site has rescene {rescene.__version__}, the server {request.version}: {fix}")
        if request.verb == HELLO:
            return self._packed(self._hello(request), request)
        files = Memory(self.folder / "state" / _safe(request.run) / f"client-{self.section.client}")
        files.check_run(request.recipe)
        if request.verb == EVALUATE:
            return self._packed(self._evaluate(request, letter.body, files), request)
        if request.verb in SUM_STEPS:
            return self._packed(self._sum_step(request, letter.body, files), request)
        token = _safe(request.token)
        return files.answered(token) or files.keep(
            token, self._packed(self._work(request, letter.body, files), request)
        )

    def _packed(self, reply: Reply, request: Request) -> bytes:
        return pack_message(replace(reply, token=request.token)).data

    def _recipe(self, request: Request) -> Recipe:
        """The server's recipe with this site's data, device and lens file."""
        given = json.loads(request.recipe) | {"data": self.section.data.model_dump(), "device": self.section.device}
        if model := given.get("model"):
            model["lens"] = lens_of(self.section, model.get("lens"))
            check_lens(model["lens"], request.lens)  # before an image is opened
        return Recipe.model_validate(given)

    def _experiment(self, request: Request) -> Experiment:
        kept = Kept(self.folder / "state" / "seen", last_only=True)
        return experiment_of(self.section, self._recipe(request), kept)

    def _hello(self, request: Request) -> Reply:
        with _heard() as told:
            experiment = self._experiment(request)
        dataset = experiment.dataset
        fingerprint = OWN if self.section.holds == "own" else dataset.pictures or dataset.fingerprint()
        told = [] if self.section.privacy else told  # which classes it has is nobody's business then
        greeting = {
            "fingerprint": fingerprint,
            "torch": torch.__version__,
            "lens": hash_of(experiment.recipe.model.lens),
        }
        return Reply(self.section.client, greeting, None, 0, None, tuple(told))

    def _evaluate(self, request: Request, body: bytes, files: Memory) -> Reply:
        """How the model does on the hold-out: counts and right answers per class, nothing else."""
        if self.section.privacy is not None:
            raise Declined("E413", "site declines: counts of its hold-out are exact, and it has a privacy floor")
        experiment = self._experiment(request)
        meter, tasks = FlopMeter(experiment.arch), experiment.tasks[: request.task + 1]
        model = to_device(files.payload(request.verb, body), experiment.device)["model"]
        net = meter.attach(experiment.arch.restore(model), len(model["head.weight"]))
        with meter.on("evaluation"):
            found = tally(net, experiment.dataset, tasks)
        return Reply(self.section.client, {"tally": found}, None, meter.flops["evaluation"])

    def _work(self, request: Request, body: bytes, files: Memory) -> Reply:
        check_floor(self.section, self._recipe(request))
        experiment = self._experiment(request)
        client, task, meter = self.section.client, experiment.tasks[request.task], FlopMeter(experiment.arch)
        verb = client_verb(experiment.method, request.verb)
        payload = to_device(files.payload(request.verb, body), experiment.device)
        state = to_device(files.read(request.state), experiment.device)

        def net(model: Any) -> torch.nn.Module:
            return meter.attach(experiment.arch.restore(model), len(model["head.weight"]))

        rng = Rng(experiment.rng.seed, request.address).at(client)
        ledger = ledger_of(self.section, self.folder, request.ledger)
        site = site_at(experiment, request.run, request.task, request.round, client, ledger)
        with meter.on("client"), flops_to(meter.add), _heard() as told:
            upload, after = verb(payload, experiment.shard(task, client, net, site), state, rng)
        message = on_wire.sent(upload, experiment.recipe.federation.wire)
        message = self._for_sum(request, experiment.recipe, message, files, released=ledger.handed is not None)
        kept, flops = files.write(after), meter.flops["client"]
        return Reply(client, message, kept, flops, told=tuple(told), ledger=ledger.handed)

    def _for_sum(self, request: Request, recipe: Recipe, upload: Tree, files: Memory, released: bool) -> Tree:
        """What may be sent of an upload: in a secure sum the site's keys in its place, and its numbers only under masks later.

        With ``privacy.honest_sites`` a release has only this site's share of the noise, so it never leaves bare.
        """
        honest, federation = recipe.privacy.honest_sites, recipe.federation
        if honest is None and request.session:
            raise RunError("E443", "the run has no secure sums: its recipe does not say how many sites are honest")
        if not request.session or not upload:
            if honest is not None and released and upload:
                raise RunError("E443", "what this site released is for a secure sum, and is not sent alone")
            return upload
        least = threshold(federation.num_clients, federation.quorum, honest)
        return self._parties(files).begin(_safe(request.session), least, federation.num_clients, upload)

    def _sum_step(self, request: Request, body: bytes, files: Memory) -> Reply:
        found = self._parties(files).answer(_safe(request.session), request.verb, files.payload(request.verb, body))
        return Reply(self.section.client, found, None, 0)

    def _parties(self, files: Memory) -> Parties:
        from rescene.deploy.parties import Parties  # cryptography is for those who need it

        return Parties(self.folder, files.folder, self.section.client)


def tighten(folder: Path) -> None:
    """Close to other users what older versions left open in a site's folder: it tells of the site's images."""
    try:
        for name in ("state", "logs", "flwr"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
            place = (folder / name).resolve()
            for path in (place, *place.rglob("*")):
                mode = stat.S_IMODE(path.lstat().st_mode)
                if mode & 0o077 and not path.is_symlink():
                    path.chmod(mode & 0o700)
    except OSError as error:
        raise RunError(
            "E353",
            f"the site's files cannot be closed to other users: {error.strerror}",
            where=str(error.filename or folder),
            fix=f"give the folder to the user who runs the site: chown -R USER {shlex.quote(str(folder))}",
        ) from None


class Memory:
    """Files of one client in one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check_run(self, recipe: str) -> None:
        """A run may open new tasks and change nothing else: an image would be in two tasks, and the ledger would not know."""
        path, after = self.folder / "recipe.json", _comparable(recipe)
        if path.exists():
            before = json.loads(path.read_bytes())
            if _said(before["rest"]) != after["rest"] or not grows(before["tasks"], after["tasks"]):
                raise RunError("E355", "the server has changed this run; only new tasks may be added to it")
            if before == after:
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(after).encode())

    def payload(self, verb: str, body: bytes) -> Tree:
        """The payload of a message; its large parts are kept until the next message of this verb names them no more."""
        folder = self.folder / verb
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
        found = unpack_message(body, _Files(held))
        for digest, data in found.large.items():
            if digest not in held:
                write_atomically(folder / digest, data, sync="none")  # can be sent again
        for digest in held.keys() - found.large.keys():
            held[digest].unlink(missing_ok=True)
        return found.tree

    def read(self, sha256: str | None) -> Tree:
        if sha256 is None:
            return None
        path = self._path(sha256)
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise RunError("E345", f"what this site remembered ({path.name}) is lost or damaged")
        return unpack_message(data).tree

    def write(self, state: Tree) -> Remembered | None:
        if state is None:
            return None
        data = pack_message(state).data
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._path(sha256)
        if path.exists():
            path.touch()  # young again
        else:
            write_atomically(path, data)
        by_age = sorted(self.folder.glob("memory-*.bin"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
        for old in by_age[KEPT:]:
            old.unlink(missing_ok=True)
        return Remembered(sha256, num_bytes(state))

    def answered(self, token: str) -> bytes | None:
        """The answer to this very question, if it was the last one: one that comes twice costs no work."""
        try:
            return self._answer_path(token).read_bytes()
        except OSError:
            return None

    def keep(self, token: str, answer: bytes) -> bytes:
        path = self._answer_path(token)
        for old in self.folder.glob("answer-*.bin"):
            old.unlink(missing_ok=True)
        write_atomically(path, answer, sync="none")
        return answer

    def _answer_path(self, token: str) -> Path:
        return self.folder / f"answer-{token}.bin"

    def _path(self, sha256: str) -> Path:
        return self.folder / f"memory-{sha256[:32]}.bin"


class _Files(dict[str, Any]):
    """Hash -> content of the file kept under it, read when it is asked for."""

    def __getitem__(self, digest: str) -> bytes:
        return bytes(super().__getitem__(digest).read_bytes())


def client_verb(method: Method, name: str) -> Callable[..., Any]:
    """The method's client verb of this name; nothing else can be called from outside."""
    found = getattr(type(method), name, None) if name.isidentifier() and not name.startswith("_") else None
    if not inspect.isfunction(found) or list(inspect.signature(found).parameters) != VERB:
        raise RunError("E346", f"{method.title} has no client verb {name!r}")
    return getattr(method, name)  # type: ignore[no-any-return]


def _comparable(recipe: str) -> dict[str, Any]:
    """A recipe as far as it binds the server: its tasks, which may grow, and the rest without what is the site's own.

    Other sites may leave, and a key that says nothing may be one that an older version did not have.
    """
    given = json.loads(recipe)
    rest = {key: value for key, value in given.items() if key not in ("data", "device", "sites")}
    plan = given.get("sites") or {}
    rest["sites"] = {key: value for key, value in plan.items() if key not in ("tasks", "test")}
    rest["federation"] = (rest.get("federation") or {}) | {"exclude": None}
    return {"rest": _said(rest), "tasks": plan.get("tasks", [])}


def _said(tree: Any) -> Any:
    """Without keys that say nothing."""
    return {key: _said(value) for key, value in tree.items() if value is not None} if isinstance(tree, dict) else tree


@contextmanager
def _files_for_us_alone() -> Iterator[None]:
    """What is written meanwhile gets mode 0600, folders 0700, whatever the umask was."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _heard() -> Iterator[list[tuple[str, str]]]:
    """Collects the warnings that the server is told of; all are printed, for the site's own log."""
    told: list[tuple[str, str]] = []

    def listen(level: str, code: str, words: str) -> None:
        print(f"{level}[{code}] {words}", file=sys.stderr)
        if code in HEARD:
            told.append((code, in_a_line(words)))

    with warnings_to(listen):
        yield told


def _with_fix(error: ResceneError) -> str:
    """What happened and what to do about it, for the operator's list of events."""
    return error.what + (f" (fix: {error.fix})" if error.fix and error.code in TOLD else "")


def _safe(name: str) -> str:
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise RunError("E340", f"the message is refused: {name!r} cannot be a name")
    return name
