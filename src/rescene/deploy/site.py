"""A site: opens its own images, runs the verb it is asked for, keeps what it remembers in files under its own folder.

    site.yaml                            who it is and where its images lie
    state/<run>/client-<k>/memory-*.bin  what it remembers between rounds, by hash, whole or not at all
    state/<run>/client-<k>/<verb>/       parts of messages that did not change, by hash
    state/<run>/client-<k>/answer-*.bin  the last answer, by the token of its question
    state/<run>/client-<k>/recipe.json   what this run is; it may open new tasks and change nothing else
    state/seen/                          what a lens saw of the images, of the last look only
    state/<run>/client-<k>/sums/, state/summed/  its part in secure sums (``summing``)
    state/ledger.jsonl, state/ledger/    what was released under a privacy mechanism, in all runs
    state/floor.yaml                     limits taken from the first run, where site.yaml states none
    ledger-mark.json                     how far that ledger goes, outside state/: it shows when the ledger was set back

All of it can be read by the site's own user alone.

A site does a client verb of the method, in a task and a round of the plan, and nothing else. A request is looked at before an
image is opened and before the ledger is; one outside its bounds changes nothing. It says from which memory to start. Asked twice,
a site gives the same answer twice: a letter that comes again, or a server that goes back to its last checkpoint, does no harm.

Under a mechanism with a guarantee, or with a floor of the site's own, a reply holds what the mechanism released and constants:
no work, no size or hash of what the site remembers, no words about its images. When it is sent is not hidden.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import json
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

import rescene
from rescene.config import Recipe
from rescene.config.site_sections import grows
from rescene.core.documents import read_yaml
from rescene.core.errors import DECLINED, ConfigError, DataError, ResceneError, RunError
from rescene.core.record import Tree, num_bytes, to_device
from rescene.core.rng import Rng, torch_draws_from
from rescene.deploy.exchange import (
    EVALUATE,
    HELLO,
    SUM_STEPS,
    Letter,
    Remembered,
    Reply,
    Request,
    declines,
    in_a_line,
    is_digest,
)
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.site_config import (
    OWN,
    SiteSection,
    bad_site_file,
    check_floor,
    check_lens,
    experiment_of,
    hash_of,
    ledger_of,
    lens_of,
)
from rescene.engine import Experiment, use_all_cores
from rescene.engine import wire as on_wire
from rescene.engine.checkpoint import save_atomically
from rescene.engine.evaluate import Tally, noised, tally
from rescene.engine.method_mistakes import checked_answer, first_line
from rescene.engine.run_context import warnings_to
from rescene.engine.transport import site_at
from rescene.lens import FeatureCache
from rescene.methods import Method
from rescene.nets import flops_to
from rescene.nets.cost import FlopMeter
from rescene.privacy.ledger import Charge, Declined, End, Floor, Ledger, Released
from rescene.privacy.ledger_file import EVALUATION
from rescene.privacy.mechanism import count_deviation, digest
from rescene.privacy.noise import Noise
from rescene.privacy.promise import floor_of
from rescene.privacy.totals import threshold

if TYPE_CHECKING:
    from rescene.deploy.summing import Parties


VERB = ["self", "payload", "shard", "client_state", "rng"]
LONGEST_ADDRESS = 64


def check_request(request: Request, method: Method) -> None:
    """What can be said of a request without looking at any image; E374, or E346 for a verb that there is not."""
    numbers, place = (request.task, request.round), request.address
    if any(type(number) is not int for number in numbers) or request.task < 0 or request.round < -1:
        raise outside("its task and round are no places in a plan")
    if (
        not isinstance(place, tuple)
        or len(place) > LONGEST_ADDRESS
        or any(type(one) not in (str, int) for one in place)
    ):
        raise outside("its address is none")
    if request.state is not None and not is_digest(request.state):
        raise outside("it does not name a memory")
    end = request.ledger
    if end is not None and not (isinstance(end, End) and type(end.entries) is int and isinstance(end.head, str)):
        raise outside("it does not name the end of a ledger")
    if not isinstance(request.lens, str) or not isinstance(request.session, str):
        raise outside("it does not name a lens or a sum")
    if request.verb in (HELLO, EVALUATE, *SUM_STEPS):
        return
    client_verb(method, request.verb)
    if request.verb == "client_round" and request.round < 0:
        raise outside("client_round belongs to a round")


def check_place(request: Request, experiment: Experiment) -> None:
    """Task and round are in the plan."""
    if request.task >= len(experiment.tasks):
        raise outside(f"the plan has {len(experiment.tasks)} tasks")
    num_rounds = experiment.rounds_told(experiment.tasks[request.task])
    if request.round >= num_rounds:
        raise outside(f"this task has {num_rounds} rounds")


def client_verb(method: Method, name: str) -> Callable[..., Any]:
    """The method's client verb of this name; nothing else can be called from outside."""
    known = isinstance(name, str) and name.isidentifier() and not name.startswith("_")
    found = getattr(type(method), name, None) if known else None
    if not inspect.isfunction(found) or list(inspect.signature(found).parameters) != VERB:
        raise RunError("E346", f"{method.title} has no client verb {name!r}")
    return getattr(method, name)  # type: ignore[no-any-return]


def outside(why: str) -> RunError:
    """The error for a request outside its bounds (E374)."""
    return RunError("E374", f"the request is refused: {why}")


KEPT = 12  # memories: two checkpoints of the server and the step under way, a few exchanges each
HEARD = (DECLINED, "W342")  # warnings the server hears: also classes outside the plan; others may name files
# words that name classes or a lens' hash at most
TOLD = ("E204", "E205", "E209", "E210", "E214", "E216", "E217", "E221")
# errors that depend on the request, the version and the state of the site's files, never on its images
ABOUT_REQUESTS = (
    *("E340", "E341", "E343", "E345", "E346", "E355", "E356", "E374", "E375", "E221"),
    *("E366", "E367", "E368", "E369", "E411", "E412", "E413"),
    *("E439", "E440", "E441", "E442", "E443", "E444", "E445"),
)
SILENT = ("E378", "the site cannot do this; its own log says why")


@dataclass(frozen=True)
class _Asked:
    """What a site works from. ``recipe`` is the server's, with this site's data, device and lens file.

    ``hidden``: nothing may leave but what a mechanism releases, for the run has one with a guarantee, or the site a floor.
    """

    request: Request
    recipe: Recipe
    hidden: bool


@dataclass(frozen=True)
class Site:
    """A site's folder and what its site.yaml says. ``real_folder``: in a trial, the folder of the site that tries it."""

    folder: Path
    section: SiteSection
    real_folder: Path | None = None

    @property
    def features(self) -> FeatureCache:
        """What a lens saw of the site's images at the last look."""
        return FeatureCache((self.real_folder or self.folder) / "state" / "seen", last_only=True)

    @staticmethod
    def open(folder: Path) -> Site:
        """Read a site's folder. A missing or bad ``site.yaml`` is a ConfigError (E120)."""
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
            raise bad_site_file(error, path) from None

    def answer(self, letter: Letter) -> bytes:
        """The reply to a letter, also when something goes wrong: the server is told what, and goes on without us."""
        with _files_for_us_alone():
            return self._reply(letter)

    def _reply(self, letter: Letter) -> bytes:
        token, hidden = "", True  # until the request says otherwise
        try:
            use_all_cores()
            request = unpack_message(letter.head).tree
            if not isinstance(request, Request):
                raise RunError("E340", "the message is refused: it is no request")
            token = request.token
            if request.version != rescene.__version__:  # before the recipe is read, which may have new keys
                told = f"this site has rescene {rescene.__version__}, the server {request.version}"
                raise RunError("E343", f"{told}: pip install rescene=={request.version}")
            recipe = self.recipe_of(request)
            hidden = self._has_floor() or recipe.formal
            return self._answer(_Asked(request, recipe, hidden), letter.body)
        except ResceneError as error:
            print(error, file=sys.stderr)  # the whole of it, for the site's own log
            problem = _told(error, hidden)
        except Exception as error:
            print(f"error[E321] {first_line(error)}", file=sys.stderr)
            problem = SILENT if hidden else ("E321", in_a_line(first_line(error)))
        return pack_message(Reply(self.section.client, None, problem=problem, token=token)).data

    def _has_floor(self) -> bool:
        return self.section.privacy is not None or ledger_of(self.section, self.folder).floor_path.exists()

    def _answer(self, asked: _Asked, body: bytes) -> bytes:
        request = asked.request
        if request.verb == HELLO:
            return _packed(self._hello(asked), request)
        check_request(request, asked.recipe.build_method())
        files = SiteMemory(self.folder / "state" / _safe(request.run) / f"client-{self.section.client}")
        files.check_run(request.recipe)
        if request.verb == EVALUATE:
            return _packed(self._evaluate(asked, body, files), request)
        if request.verb in SUM_STEPS:
            return _packed(self._sum_step(request, body, files), request)
        token = _safe(request.token)
        if kept := files.answered(token):
            return kept
        reply = self._work(asked, body, files)
        packed = _packed(reply, request)
        return packed if declines(reply) else files.keep(token, packed)  # asked again, it looks at its floor again

    def recipe_of(self, request: Request) -> Recipe:
        """The server's recipe with this site's data, device and lens file."""
        given = json.loads(request.recipe) | {"data": self.section.data.model_dump(), "device": self.section.device}
        if model := given.get("model"):
            model["lens"] = lens_of(self.section, model.get("lens"))
            check_lens(model["lens"], request.lens)  # before an image is opened
        return Recipe.model_validate(given)

    def _experiment(self, asked: _Asked) -> Experiment:
        return experiment_of(self.section, asked.recipe, self.features, asked.hidden)

    def _hello(self, asked: _Asked) -> Reply:
        with _heard(asked.hidden) as told:
            experiment = self._experiment(asked)
        dataset = experiment.dataset
        fingerprint = OWN if self.section.holds == "own" else dataset.pictures or dataset.fingerprint()
        lens = hash_of(experiment.recipe.model.lens)
        greeting = {"fingerprint": fingerprint, "torch": torch.__version__, "lens": lens}
        return Reply(self.section.client, greeting, told=tuple(told))

    def _evaluate(self, asked: _Asked, body: bytes, files: SiteMemory) -> Reply:
        """How the model does on the hold-out: counts and right answers per class, nothing else."""
        request, client = asked.request, self.section.client
        ledger = ledger_of(self.section, self.folder, request.ledger)
        floor = ledger.floor()
        check_floor(floor, asked.recipe)
        sigma = None if floor is None else floor.evaluation_sigma
        if (asked.hidden or floor is not None) and sigma is None:
            raise Declined("E413", "site declines: its floor allows no evaluation (evaluation_sigma)")
        experiment = self._experiment(asked)
        check_place(request, experiment)
        meter, tasks = FlopMeter(experiment.arch), experiment.tasks[: request.task + 1]
        model = to_device(files.payload(request.verb, body), experiment.device)["model"]

        def found() -> Tally:
            net = meter.attach(experiment.arch.restore(model), len(model["head.weight"]))
            with meter.on("evaluation"):
                return tally(net, experiment.dataset, tasks)

        if sigma is None:
            return Reply(client, {"tally": found()}, flops=meter.flops["evaluation"])

        def draw() -> Released:
            return vars(noised(found(), sigma, Noise()))

        charge = Charge(request.run, request.task, request.round, EVALUATION, sigma, 1, 1.0, why=EVALUATE)
        index = torch.cat([task.test for task in tasks])
        touched = experiment.digests.at(experiment.digests.test, index)
        delta = asked.recipe.privacy.delta
        counts = ledger.once(charge, digest(model.items(), "evaluation"), delta, None, draw, touched)
        told = ("W374", f"counts of its hold-out carry noise of deviation {count_deviation(sigma, len(counts)):.3g}")
        return Reply(client, {"tally": Tally(**counts)}, told=(told,), ledger=ledger.handed)

    def _work(self, asked: _Asked, body: bytes, files: SiteMemory) -> Reply:
        request, hidden = asked.request, asked.hidden
        ledger = ledger_of(self.section, self.folder, request.ledger)
        check_floor(ledger.floor(), asked.recipe)
        experiment = self._experiment(asked)
        check_place(request, experiment)
        self._take_floor(ledger, experiment, request.run)
        client, task, meter = self.section.client, experiment.tasks[request.task], FlopMeter(experiment.arch)
        verb = client_verb(experiment.method, request.verb)
        payload = to_device(files.payload(request.verb, body), experiment.device)
        state = to_device(files.read(request.state, hidden), experiment.device)

        def net(model: Any) -> torch.nn.Module:
            return meter.attach(experiment.arch.restore(model), len(model["head.weight"]))

        rng = Rng(experiment.rng.seed, request.address).at(client)
        site = site_at(experiment, request.run, request.task, request.round, client, ledger, request.verb)
        drawn = torch_draws_from(rng, experiment.arch.draws)
        with meter.on("client"), flops_to(meter.add), drawn, _heard(hidden) as told:
            answer = verb(payload, experiment.shard(task, client, net, site), state, rng)
        upload, after = checked_answer(experiment.method, request.verb, answer)
        message = on_wire.sent(upload, experiment.recipe.federation.wire)
        message = self._for_sum(request, experiment.recipe, message, files, released=ledger.handed is not None)
        if hidden:
            remembers = after is not None or experiment.method.remembers != Method.remembers  # "nothing" for any images
            kept = files.write(after, _handle(ledger.secret(), request)) if remembers else None
            return Reply(client, message, kept, told=tuple(told), ledger=ledger.handed)
        return Reply(client, message, files.write(after), meter.flops["client"], told=tuple(told), ledger=ledger.handed)

    def _take_floor(self, ledger: Ledger, experiment: Experiment, run: str) -> None:
        """Without a floor, the first run's epsilon becomes it: another name of a run buys nothing."""
        limits: Floor | None = floor_of(experiment.recipe.promise(len(experiment.tasks)))
        if limits is not None and ledger.begin(limits, run) and self.real_folder is None:
            words = f"epsilon {limits.epsilon_max:g} at delta {limits.delta_max:g}, over all runs"
            first = f"the first run, {run}, sets this site's privacy floor"
            print(f"{first}: {words}; {ledger.floor_path}", file=sys.stderr)

    def _for_sum(self, request: Request, recipe: Recipe, upload: Tree, files: SiteMemory, released: bool) -> Tree:
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

    def _sum_step(self, request: Request, body: bytes, files: SiteMemory) -> Reply:
        found = self._parties(files).answer(_safe(request.session), request.verb, files.payload(request.verb, body))
        return Reply(self.section.client, found)

    def _parties(self, files: SiteMemory) -> Parties:
        from rescene.deploy.summing import Parties  # cryptography is for those who need it

        return Parties(self.folder, files.folder, self.section.client)


def _packed(reply: Reply, request: Request) -> bytes:
    return pack_message(replace(reply, token=request.token)).data


def _handle(secret: bytes, request: Request) -> str:
    """A name for what the site remembers after this question. It is the same when asked again and depends on no image."""
    place = [request.run, request.verb, request.task, request.round, request.address, request.state, request.token]
    return hmac.new(secret, json.dumps(place).encode(), "sha256").hexdigest()


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


class SiteMemory:
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
        save_atomically(path, json.dumps(after).encode())

    def payload(self, verb: str, body: bytes) -> Tree:
        """The payload of a message; its large parts are kept until the next message of this verb names them no more."""
        folder = self.folder / verb
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
        found = unpack_message(body, _Files(held))
        for name, data in found.large.items():
            if name not in held:
                save_atomically(folder / name, data, sync="none")  # can be sent again
        for name in held.keys() - found.large.keys():
            held[name].unlink(missing_ok=True)
        return found.tree

    def read(self, name: str | None, is_handle: bool = False) -> Tree:
        """What is kept under this name: its hash, or a handle. Each part of the file has a checksum of its own."""
        if name is None:
            return None
        path = self._path(name)
        try:
            data = path.read_bytes()
            if not is_handle and hashlib.sha256(data).hexdigest() != name:
                raise ValueError("it has another hash")
            return unpack_message(data).tree
        except (OSError, ValueError, RunError):
            raise RunError("E345", f"what this site remembered ({path.name}) is lost or damaged") from None

    def write(self, state: Tree, handle: str | None = None) -> Remembered | None:
        """Keep it, by its hash. With a ``handle`` the server learns that alone: no hash, no size, not whether there is any."""
        if state is None and handle is None:
            return None
        data = pack_message(state).data
        sha256 = handle or hashlib.sha256(data).hexdigest()
        path = self._path(sha256)
        if path.exists():  # under a handle too: the first memory of a place stands, as the first answer does
            path.touch()  # young again
        else:
            save_atomically(path, data)
        by_age = sorted(self.folder.glob("memory-*.bin"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
        for old in by_age[KEPT:]:
            old.unlink(missing_ok=True)
        return Remembered(sha256, 0 if handle else num_bytes(state))

    def answered(self, token: str) -> bytes | None:
        """The answer to this very question, if it was the last one: one that comes twice costs no work."""
        try:
            return self._answer_path(token).read_bytes()
        except OSError:
            return None

    def keep(self, token: str, answer: bytes) -> bytes:
        """Store an answer in place of the last one, so that a repeated request gets the same bytes."""
        path = self._answer_path(token)
        for old in self.folder.glob("answer-*.bin"):
            old.unlink(missing_ok=True)
        save_atomically(path, answer, sync="none")
        return answer

    def _answer_path(self, token: str) -> Path:
        return self.folder / f"answer-{token}.bin"

    def _path(self, sha256: str) -> Path:
        return self.folder / f"memory-{sha256[:32]}.bin"


class _Files(dict[str, Any]):
    """Hash -> content of the file kept under it, read when it is asked for."""

    def __getitem__(self, digest: str) -> bytes:
        return bytes(super().__getitem__(digest).read_bytes())


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
def _heard(hidden: bool) -> Iterator[list[tuple[str, str]]]:
    """Collects the warnings that the server is told of; all are printed, for the site's own log."""
    told: list[tuple[str, str]] = []
    codes: Sequence[str] = (DECLINED,) if hidden else HEARD

    def listen(level: str, code: str, words: str) -> None:
        print(f"{level}[{code}] {words}", file=sys.stderr)
        if code in codes:
            told.append((code, in_a_line(words)))

    with warnings_to(listen):
        yield told


def _told(error: ResceneError, hidden: bool) -> tuple[str, str]:
    """Code and words of an error for the operator's list of events; ``hidden``: nothing that depends on an image."""
    if hidden:
        return (error.code, in_a_line(error.what)) if error.code in ABOUT_REQUESTS else SILENT
    if isinstance(error, (ConfigError, DataError)) and error.code not in TOLD:
        return error.code, "its images or settings cannot be used; its log says why"
    return error.code, in_a_line(error.what + (f" (fix: {error.fix})" if error.fix and error.code in TOLD else ""))


def _safe(name: str) -> str:
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise RunError("E340", f"the message is refused: {name!r} cannot be a name")
    return name
