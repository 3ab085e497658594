"""Rounds per second of FedAvg: our in-process federation against Flower's simulation on Ray, in one run on one machine.

    pip install "flwr[simulation]==1.41.*"         then         python benchmarks/flower.py

Ten sites, all in every round, the small ConvNet, fashion-mini, one local epoch; the same model, split, batch size and optimiser
on both sides; the first round of each is left out (start-up). Two sizes: a task of the demo (1,200 images in all), where the cost of
the framework shows, and all 6,000 images in one task, where both are bound by the same arithmetic. Writes results/bench/flower.json.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0", FLWR_TELEMETRY_ENABLED="0", OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")
)

import torch

from rescene.config import resolve
from rescene.core.rng import Rng
from rescene.data import Shard
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.experiment import Experiment, prepare
from rescene.engine.federation import RunFederation
from rescene.engine.transport import FederationSettings
from rescene.functional import weighted_average
from rescene.methods.base import weights_of
from rescene.nets.cost import FlopMeter
from rescene.training import fit_shard

NUM_CLIENTS, NUM_ROUNDS = 10, 6
OVERRIDES = [
    "method=fedavg",
    "federation.num_clients=10",
    "federation.per_round=10",
    "train.local_epochs=1",
    "device=cpu",
]
SIZES = {"demo_task_1200_images": 2, "one_task_6000_images": 10}  # classes per task
OUT = Path(__file__).parents[1] / "results" / "bench" / "flower.json"


def experiment(per_task: int) -> Experiment:
    torch.set_num_threads(1)
    return prepare(resolve("demo", [*OVERRIDES, f"tasks.per_task={per_task}"]).recipe)


def shard_of(e: Experiment, client: int) -> Shard:
    return e.shard(e.tasks[0], client, e.arch.restore)


def ours(e: Experiment, per_task: int) -> list[float]:
    """Seconds of each round, two threads as Flower gets two actors."""
    torch.set_num_threads(2)
    settings = FederationSettings(
        e.method, e.arch, lambda task, k: e.shard(task, k, federation.net), CostLedger(FlopMeter(e.arch)), lambda *a, **k: None,
        num_clients=NUM_CLIENTS, num_rounds=NUM_ROUNDS, transform=e.dataset.transform, device=e.device, rng=Rng(0),
    )  # fmt: skip
    federation = RunFederation(settings)
    task, rng = e.tasks[0], Rng(0)
    federation.move(task, None)
    state = e.method.begin_task(e.method.init(e.initial_net(), rng), task, federation, rng)
    times = []
    for r in range(NUM_ROUNDS):
        begin = time.perf_counter()
        federation.move(task, r)
        payload = e.method.broadcast(state, r, federation, rng)
        uploads = federation.ask(federation.participants, "client_round", payload)
        state = e.method.server_round(state, uploads, r, federation, rng)
        times.append(time.perf_counter() - begin)
    return times


def flower(e: Experiment, per_task: int) -> list[float]:
    """The same work as a ClientApp and a ServerApp under Flower's simulation, two actors of one core."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    client_app, server_app, times = ClientApp(), ServerApp(), []
    cached: dict[str, Any] = {}

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        if "e" not in cached:
            cached["e"] = experiment(per_task)
        own = cached["e"]
        shard = shard_of(own, int(context.node_config["partition-id"]))
        net = shard.net(message.content["model"].to_torch_state_dict())
        fit_shard(net, shard, own.method.train, Rng(0).generator())
        metrics = MetricRecord({"num-examples": len(shard)})
        return Message(RecordDict({"model": ArrayRecord(weights_of(net)), "metrics": metrics}), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model = weights_of(e.initial_net())
        while len(list(grid.get_node_ids())) < NUM_CLIENTS:
            time.sleep(0.1)
        nodes = list(grid.get_node_ids())
        for r in range(NUM_ROUNDS):
            begin = time.perf_counter()
            content = RecordDict({"model": ArrayRecord(model)})
            requests = [Message(content=content, message_type="train", dst_node_id=n, group_id=str(r)) for n in nodes]
            waiting, replies = set(grid.push_messages(requests)), []
            while waiting:  # our own polling: send_and_receive waits three seconds at a time
                arrived = list(grid.pull_messages(list(waiting)))
                waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
                replies += arrived
                time.sleep(0.01)
            failed = [reply.error for reply in replies if reply.has_error()]
            if failed:
                raise RuntimeError(f"{len(failed)} sites failed: {failed[0].reason}")
            states = [reply.content["model"].to_torch_state_dict() for reply in replies]
            model = weighted_average(states, [reply.content["metrics"]["num-examples"] for reply in replies])
            times.append(time.perf_counter() - begin)

    run_simulation(
        server_app=server_app, client_app=client_app, num_supernodes=NUM_CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}},
    )  # fmt: skip
    return times


def main() -> None:
    found: dict[str, Any] = {
        "command": "python benchmarks/flower.py",
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    for name, per_task in SIZES.items():
        e = experiment(per_task)
        rows = {}
        for engine, work in (("ours", ours), ("flower", flower)):
            seconds = work(e, per_task)
            rows[engine] = {"round_s": seconds, "rounds_per_s": (len(seconds) - 1) / sum(seconds[1:])}
        found[name] = {**rows, "ratio": rows["ours"]["rounds_per_s"] / rows["flower"]["rounds_per_s"], "goal": 5.0}
    print(json.dumps(found, indent=1))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
