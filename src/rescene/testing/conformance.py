"""What every method must satisfy, ours and yours. Each check takes a method and raises AssertionError if it fails.

In a test file of your own::

    import pytest
    from rescene.testing.conformance import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_method_conforms(check):
        check(MyMethod(steps=2))

The world is small and unkind: five sites, of which one holds no image, one a single image and one a single class; two
tasks of two classes; two of five sites take part in a round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rescene.core.errors import ConfigError
from rescene.core.record import Tree, check_tree, map_tensors, num_bytes, pack, tensors, unpack
from rescene.core.rng import Rng
from rescene.data import Dataset, Images, Task, Transform
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.faults import LateAnswers
from rescene.engine.federation import RunFederation
from rescene.engine.transport import Answer, Call, FederationSettings, InProcess
from rescene.methods import Method, Payload, Uploads
from rescene.methods.base import Client
from rescene.methods.upload_schema import Misfit, Place, check_form
from rescene.nets import Arch
from rescene.nets.cost import FlopMeter

SIZE, NUM_CLIENTS, NUM_ROUNDS = 16, 5, 2
PARTICIPANTS = [[2, 3], [3, 4], [0, 4], [1, 3]]  # of each round, over both tasks


@dataclass
class World:
    """A tiny federation to drive a method through."""

    dataset: Dataset
    tasks: list[Task]
    shards: list[list[Tensor]]
    arch: Arch = Arch("convnet", SIZE, "batch", 4)
    events: list[str] = field(default_factory=list)


def world_for(method: Method, domains: bool = False) -> World:
    """The small world with a network that the method can use: a ConvNet, or a transformer if it refuses that one."""
    world = make_world(domains)
    try:
        method.check_network(world.arch)
    except ConfigError:
        world.arch = Arch("vit-mini", SIZE, width=8)
    return world


def make_world(domains: bool = False) -> World:
    """Two tasks: new classes, or the same two classes in a second domain. Class c is a colour plus noise."""
    generator = torch.Generator().manual_seed(0)
    per_class, num_classes = 24, 2 if domains else 4
    groups = [(c, t) for t in range(2) for c in ((0, 1) if domains else (2 * t, 2 * t + 1))]
    labels = torch.tensor([c for c, _ in groups for _ in range(per_class)])
    task_of = torch.tensor([t for _, t in groups for _ in range(per_class)])
    level = (50 + 45 * labels + 20 * task_of).reshape(-1, 1, 1, 1)
    pixels = (level + torch.randint(-25, 25, (len(labels), 3, SIZE, SIZE), generator=generator)).clamp(0, 255)
    images = Images(pixels.to(torch.uint8), labels, task_of if domains else None)
    transform = Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), 2)
    names = tuple(f"class {c}" for c in range(num_classes))
    dataset = Dataset("tiny", names, images, images, transform, domains=("a", "b") if domains else ())
    tasks, shards = [], []
    for t in range(2):
        index = (task_of == t).nonzero().squeeze(1)
        classes = (0, 1) if domains else (2 * t, 2 * t + 1)
        tasks.append(Task(t, classes, num_classes if domains else 2 * (t + 1), t if domains else None, index, index))
        # nobody, one image, one class only, and two ordinary sites
        shards.append(
            [
                index[:0],
                index[:1],
                index[1:10],
                torch.cat([index[10:18], index[24:36]]),
                torch.cat([index[18:24], index[36:]]),
            ]
        )
    return World(dataset, tasks, shards)


def world_of_own_orders(told: Sequence[tuple[int, ...]]) -> World:
    """Two steps in which each site meets other classes, ``told`` as the classes of each step; three are known after the first.

    Site 0 holds nothing. Class 1 comes to site 3, and class 2 to sites 1, 2 and 4, after others have met it.
    """
    world = make_world()
    first, second = [(), (0,), (0, 1), (0, 2), (0, 1)], [(), (2,), (2, 3), (1, 3), (2, 3)]
    labels, tasks, shards = world.dataset.train.labels, [], []
    everybody = torch.arange(len(labels))
    for t, steps in enumerate((first, second)):
        held = [
            torch.isin(labels, torch.tensor(own, dtype=torch.int64)) & (everybody % 4 == k % 4)
            for k, own in enumerate(steps)
        ]
        shards.append([everybody[own] for own in held])
        index = torch.cat(shards[-1]).sort().values
        tasks.append(Task(t, told[t], 3 + t, None, index, index[:0]))
    return replace(world, tasks=tasks, shards=shards)


def federation_of(
    method: Method, world: World, form: str = "one-by-one", transport: InProcess | None = None, **options: Any
) -> RunFederation:
    """A federation around a method, on the small test world."""
    ledger = CostLedger(FlopMeter(world.arch))

    def shard_of(task: Task, client: int) -> Client:
        part = world.shards[task.index][client]
        return Client(world.dataset.train, part, task, world.dataset.transform, federation.net)

    def note(level: str, code: str, message: str, client: int | None = None) -> None:
        world.events.append(message)

    settings = FederationSettings(
        method,
        world.arch,
        shard_of,
        ledger,
        note,
        num_clients=NUM_CLIENTS,
        num_rounds=NUM_ROUNDS,
        transform=world.dataset.transform,
        device=torch.device("cpu"),
        rng=Rng(0),
        form=form,
        **options,
    )
    federation = RunFederation(settings, transport)
    return federation


def drive(
    method: Method, world: World, federation: RunFederation, after_step: Callable[[Any], Any] = lambda state: state
) -> Any:
    """The engine's loop without its records; ``after_step`` may replace the state after each step."""
    rng = Rng(0).at("server")
    state = method.init(world.arch.build(world.tasks[0].num_seen, Rng(0).at("init").generator()), rng.at("init"))
    rounds = iter(PARTICIPANTS)
    for task in world.tasks:
        federation.move(task, None)
        state = after_step(method.begin_task(state, task, federation, rng.at(task.index, "begin")))
        for r in range(NUM_ROUNDS):
            federation.move(task, r, next(rounds))
            here = rng.at(task.index, r)
            payload = method.broadcast(state, r, federation, here.at("broadcast"))
            uploads = federation.ask(federation.participants, "client_round", payload)
            state = after_step(method.server_round(state, uploads, r, federation, here.at("round")))
        federation.move(task, None)
        state = after_step(method.end_task(state, task, federation, rng.at(task.index, "end")))
    return state


def fingerprint(tree: Tree) -> str:
    """A hash of all values of a tree."""
    skeleton, _ = pack(tree)
    digest = hashlib.sha256(repr(skeleton).encode())
    for tensor in tensors(tree):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Spy(RunFederation):
    """A federation that keeps what passes through ``ask``, and checks that nobody changed it."""

    traffic_log: list[tuple[Payload, Uploads, int]]

    def ask(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Uploads:
        before, states = fingerprint(payload), {k: fingerprint(v) for k, v in self.client_states.items()}
        old_states = dict(self.client_states)
        uploads = super().ask(clients, verb, payload, late)
        assert fingerprint(payload) == before, f"{verb} changed the payload it was given"
        for client, state in old_states.items():
            assert fingerprint(state) == states[client], f"{verb} changed the state of client {client} in place"
        self.traffic_log.append((payload, uploads, len(clients)))
        return uploads


def _spied(method: Method, world: World, **options: Any) -> Spy:
    federation = federation_of(method, world, **options)
    federation.__class__ = Spy
    federation.traffic_log = []  # type: ignore[attr-defined]
    return federation  # type: ignore[return-value]


def runs_in_an_unkind_world(method: Method) -> None:
    """Empty sites, single images, missing classes, K < N: the run ends and the model is finite and has every class."""
    world = world_for(method)
    state = drive(method, world, federation_of(method, world))
    assert not world.events, world.events
    assert len(state.model["head.weight"]) == 4
    assert all(bool(torch.isfinite(value).all()) for value in state.model.values() if value.is_floating_point())


def runs_on_domains(method: Method) -> None:
    """Domain-incremental: the classes stay, the head does not grow."""
    world = world_for(method, domains=True)
    state = drive(method, world, federation_of(method, world))
    assert not world.events, world.events
    assert len(state.model["head.weight"]) == 2


def leaves_its_arguments_alone(method: Method) -> None:
    """No verb changes a state, a payload or a client's memory in place; everything is a tree of values."""
    world = world_for(method)
    federation = _spied(method, world)
    seen: list[tuple[Any, str]] = []

    def keep(state: Any) -> Any:
        check_tree(state, "server state")
        for earlier, before in seen:
            assert fingerprint(earlier) == before, "a server verb changed an earlier state in place"
        seen[:] = [(state, fingerprint(state))]
        return state

    drive(method, world, federation, keep)
    for client, state in federation.client_states.items():
        check_tree(state, f"state of client {client}")


def draws_only_from_its_streams(method: Method) -> None:
    """The global random state neither matters nor moves."""
    world = world_for(method)
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        models.append(fingerprint(drive(method, world, federation_of(method, world)).model))
        assert torch.equal(torch.get_rng_state(), before), "the global random stream was used"
    assert models[0] == models[1], "the result depends on the global random state"


def does_not_depend_on_the_order_of_clients(method: Method) -> None:
    """Asking in another order gives the same bits."""

    class Backwards(InProcess):
        def carry(self, clients: Sequence[int], call: Call) -> dict[int, Answer]:
            answers = super().carry(list(reversed(clients)), call)
            return {client: answers[client] for client in sorted(answers)}

    world = world_for(method)
    forward = drive(method, world, federation_of(method, world))
    federation = _spied(method, world, transport=Backwards())
    assert fingerprint(drive(method, world, federation).model) == fingerprint(forward.model)


def survives_saving_after_every_step(method: Method) -> None:
    """State and clients' memories are packed and unpacked after each step; the end is the same, bit for bit."""
    world = world_for(method)
    whole = drive(method, world, federation_of(method, world))
    federation = federation_of(method, world)

    def saved(tree: Tree) -> Tree:
        skeleton, chunks = pack(tree)
        return map_tensors(torch.clone, unpack(skeleton, chunks))

    def save_and_load(state: Any) -> Any:
        federation.client_states = {client: saved(s) for client, s in federation.client_states.items()}
        return saved(state)

    assert fingerprint(drive(method, world, federation, save_and_load)) == fingerprint(whole)


def is_charged_for_what_it_sends(method: Method) -> None:
    """The ledger's bytes are those of the payloads that really passed."""
    world = world_for(method)
    federation = _spied(method, world)
    drive(method, world, federation)
    up = sum(num_bytes(upload) for _, uploads, _ in federation.traffic_log for upload in uploads.values())
    down = sum(num_bytes(payload) * asked for payload, _, asked in federation.traffic_log)
    measured = federation.ledger.measured()
    assert (measured["uplink_bytes"], measured["downlink_bytes"]) == (up, down)
    assert up + down > 0


def survives_a_failing_client(method: Method) -> None:
    """Client 3 raises whenever it is asked; the others go on and the run ends."""

    class Broken(InProcess):
        def carry(self, clients: Sequence[int], call: Call) -> dict[int, Answer]:
            return super().carry([k for k in clients if k != 3], call)

    world = world_for(method)
    federation = _spied(method, world, transport=Broken(), quorum=0.0)
    state = drive(method, world, federation)
    assert all(bool(torch.isfinite(value).all()) for value in state.model.values() if value.is_floating_point())


def has_a_batched_form_that_agrees(method: Method) -> None:
    """Where a verb has a batched form, uploads agree with one client at a time to 1e-5."""
    world = world_for(method)
    logs = []
    for form in ("one-by-one", "batched"):
        federation = _spied(method, world, form=form)
        first = replace_tasks(world, 1)
        drive_first_round(method, first, federation)
        logs.append([upload for _, uploads, _ in federation.traffic_log for upload in uploads.values()])
    for single, batched in zip(*logs, strict=True):
        for a, b in zip(tensors(single), tensors(batched), strict=True):
            assert torch.allclose(a.double(), b.double(), atol=1e-5, rtol=1e-5)


def replace_tasks(world: World, count: int) -> World:
    """The same world with its first tasks only."""
    return replace(world, tasks=world.tasks[:count], shards=world.shards[:count])


def drive_first_round(method: Method, world: World, federation: RunFederation) -> None:
    """Only the first exchange: later ones start from models that differ in the last bits."""
    rng, task = Rng(0).at("server"), world.tasks[0]
    state = method.init(world.arch.build(task.num_seen, Rng(0).at("init").generator()), rng.at("init"))
    federation.move(task, None)
    state = method.begin_task(state, task, federation, rng.at(0, "begin"))
    federation.move(task, 0, PARTICIPANTS[0])
    payload = method.broadcast(state, 0, federation, rng.at(0, 0, "broadcast"))
    federation.ask(federation.participants, "client_round", payload)


def sends_what_it_expects(method: Method) -> None:
    """Across sites an answer that is not what ``expects`` says is refused, so every honest one must be."""

    class Strict(Spy):
        def ask(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Uploads:
            uploads = super().ask(clients, verb, payload, late)
            form = method.expects(verb, payload, Place(self.task, self.arch.image_size))
            for client, upload in uploads.items():
                try:
                    check_form(form, upload)
                except Misfit as misfit:
                    raise AssertionError(
                        f"{verb} of client {client}, against {method.name}.expects: {misfit}"
                    ) from None
            return uploads

    for world in (world_for(method), world_for(method, domains=True)):
        federation = _spied(method, world)
        federation.__class__ = Strict
        drive(method, world, federation)


def learns_in_own_orders(method: Method) -> None:
    """A method that says ``own_orders`` learns all classes that anybody meets, and takes ``task.classes`` for nothing more than
    the classes that may occur: with all known classes in their place it does the same."""
    if not method.own_orders or any(getattr(method, k, None) == v for k, v in method.one_order_only.items()):
        return
    models = []
    for told in (((0, 1, 2), (1, 2, 3)), ((0, 1, 2), (0, 1, 2, 3))):
        world = world_of_own_orders(told)
        state = drive(method, world, federation_of(method, world))
        assert not world.events, world.events
        assert len(state.model["head.weight"]) == 4
        assert all(bool(torch.isfinite(value).all()) for value in state.model.values() if value.is_floating_point())
        models.append(fingerprint(state.model))
    assert models[0] == models[1], "it learns from the classes that other sites meet"


def learns_from_late_answers(method: Method) -> None:
    """A method that names ``late_verbs`` learns from answers up to two rounds late, and goes on the same after each is saved."""
    if not method.late_verbs:
        return
    ends, counts = [], dict[str, int]()
    for save in (False, True):
        world = world_for(method)
        federation = federation_of(method, world)
        late = LateAnswers(method, 2, None, 0.5, NUM_ROUNDS, Rng(0), lambda *told, **more: None, lambda: counts)
        federation.late_answers = late

        def step(state: Any, late: LateAnswers = late, save: bool = save) -> Any:
            if save:
                kept = unpack(*pack(late.under_way_tree()))
                late.under_way = {int(client): answer for client, answer in kept.items()}
            return state

        ends.append(drive(method, world, federation, step))
        assert not world.events, world.events
    assert counts["late"] > 0, "no answer was late"
    model = ends[0].model
    assert len(model["head.weight"]) == 4
    assert all(bool(torch.isfinite(value).all()) for value in model.values() if value.is_floating_point())
    assert fingerprint(ends[0]) == fingerprint(ends[1]), "saving the answers under way changed the end"


CHECKS: tuple[Callable[[Method], None], ...] = (
    runs_in_an_unkind_world,
    runs_on_domains,
    leaves_its_arguments_alone,
    draws_only_from_its_streams,
    does_not_depend_on_the_order_of_clients,
    survives_saving_after_every_step,
    is_charged_for_what_it_sends,
    survives_a_failing_client,
    has_a_batched_form_that_agrees,
    sends_what_it_expects,
    learns_in_own_orders,
    learns_from_late_answers,
)
