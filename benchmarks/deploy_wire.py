"""What a round across four sites costs Flower's link: our packed letters against the state dict as it is, in one run.

    pip install "rescene[deploy]"         then         python benchmarks/deploy_wire.py

Real processes on loopback, TLS, node keys, SQLite, as `rescene deploy` starts them. ResNet-18 (44.7 MB) goes down to every site,
0.25 MB come up, nobody trains. Three layouts take turns: ``unpacked`` (Flower's ArrayRecord of the state dict), ``packed`` (one
array with a header), ``engine`` (packed, through `ask` and a site that opens its data and answers; raw-upload, which
only picks images). CPU-seconds from /proc, since wall times depend on who else is at work. Writes results/deploy/wire.json.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from rescene.deploy import flower
from rescene.deploy.exchange import Letter, Patience
from rescene.deploy.message_bytes import pack_message, unpack_message

NUM_SITES, NUM_ROUNDS, IDLE_S = 4, 3, 40.0
LAYOUTS = ("unpacked", "packed", "engine")
OUT = Path(__file__).parents[1] / "results" / "deploy" / "wire.json"
RECIPE = ["method=raw-upload", "model.name=resnet18", f"federation.num_clients={NUM_SITES}", "device=cpu"]
RECIPE += [f"federation.per_round={NUM_SITES}", "federation.engine=one-by-one"]
APP = "import deploy_wire\n\napp = deploy_wire.{name}\n"
PICTURES = {"images": torch.zeros(20, 3, 32, 32), "labels": torch.zeros(20, dtype=torch.int64)}  # what comes up

MODEL_MB, UP_MB = 44.75, 0.25

client, server = ClientApp(), ServerApp()


def cpu_s(pid: int) -> float:
    """CPU-seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def idle_cores(pid: int) -> float:
    """CPU-seconds per second while nobody works."""
    before = cpu_s(pid)
    time.sleep(IDLE_S)
    return (cpu_s(pid) - before) / IDLE_S


def trained(model: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """No two tensors alike, as after training: Flower sends equal ones, such as the scales of a fresh BatchNorm, once."""
    moved = {k: v + 1e-3 * torch.randn(v.shape, generator=generator) for k, v in model.items() if v.is_floating_point()}
    return model | moved


@client.train()
def answer(message: Message, context: Context) -> Message:
    """Notes how much CPU the process had used when the message was there, and what the answer took."""
    before, began = cpu_s(os.getpid()), time.perf_counter()
    folder = Path(str(context.node_config["folder"]))
    if "model" in message.content.array_records:
        layout = "unpacked"
        message.content.array_records["model"].to_torch_state_dict()
        content = RecordDict({"pictures": ArrayRecord(PICTURES)})
    else:
        letter = Letter(flower._bytes(message, "head"), flower._bytes(message, "body"))
        layout = "packed" if letter.head == b"packed" else "engine"
        if layout == "packed":
            unpack_message(letter.body)
            reply = pack_message(PICTURES).data
        else:
            from rescene.deploy.site import Site

            reply = Site.open(folder).answer(letter)
        content = flower._content(Letter(reply))
    row = {"layout": layout, "cpu_before_s": before, "cpu_s": cpu_s(os.getpid()) - before}
    with open(folder / "handled.jsonl", "a") as file:
        file.write(json.dumps(row | {"wall_s": time.perf_counter() - began}) + "\n")
    return Message(content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    from rescene.methods.base import weights_of

    out = Path(str(context.run_config["out"]))
    pids = json.loads(out.with_suffix(".pids").read_text())
    post = flower.FlowerPost(grid, ttl_s=600)
    while len(post.nodes()) < NUM_SITES:
        time.sleep(1)
    experiment, federation = engine(post)
    model = weights_of(experiment.initial_net())
    federation._gather(federation.clients)  # who is who, before anything is measured
    found: dict[str, Any] = {"idle_link_cores": {str(NUM_SITES): idle_cores(pids["link"])}}
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
    for r in range(NUM_ROUNDS):
        for layout in LAYOUTS:
            model = trained(model, generator)
            used, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
            own = time.process_time()
            if layout == "engine":
                federation.move(experiment.tasks[0], r)
                federation.ask(federation.clients, "client_round", {"model": model, "noise_seed": r})
            else:
                exchange(grid, post, layout, model)
            spent = {name: cpu_s(pid) - used[name] for name, pid in pids.items()}
            nodes = sum(value for name, value in spent.items() if name != "link")
            rows[layout].append(
                {"wall_s": time.perf_counter() - began, "link_cpu_s": spent["link"], "nodes_cpu_s": nodes}
                | {"server_app_cpu_s": time.process_time() - own}
            )
            print(layout, rows[layout][-1], flush=True)
    out.write_text(json.dumps(found | {"rounds": rows}))


def exchange(grid: Grid, post: flower.FlowerPost, layout: str, model: dict[str, torch.Tensor]) -> None:
    """One message to every site and its answer, without the engine."""
    if layout == "unpacked":
        content = RecordDict({"model": ArrayRecord(model)})
    else:
        content = flower._content(Letter(b"packed", pack_message({"model": model}).data))
    waiting = set(grid.push_messages([
        Message(content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=600.0) for node in post.nodes()
    ]))  # fmt: skip
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
            waiting.discard(reply.metadata.reply_to_message_id)
        time.sleep(1)


def engine(post: flower.FlowerPost) -> tuple[Any, Any]:
    """The federation of a real run, without the loop around it."""
    from rescene.config import resolve
    from rescene.deploy.server import PostTransport
    from rescene.engine import prepare
    from rescene.engine.cost_ledger import CostLedger
    from rescene.engine.federation import RunFederation
    from rescene.engine.transport import FederationSettings
    from rescene.nets.cost import FlopMeter

    recipe = resolve("demo", RECIPE).recipe
    e = prepare(recipe)
    settings = FederationSettings(
        e.method, e.arch, lambda task, k: e.shard(task, k, federation.net), CostLedger(FlopMeter(e.arch)), print,
        num_clients=NUM_SITES, num_rounds=NUM_ROUNDS, transform=e.dataset.transform, device=e.device, rng=e.rng,
    )  # fmt: skip
    text, uploads = json.dumps(recipe.model_dump(mode="json")), Path(tempfile.mkdtemp())
    transport = PostTransport(post, "wire", text, Patience(300, 600), uploads)
    transport.fingerprint = e.dataset.fingerprint()
    federation = RunFederation(settings, transport)
    return e, federation


def run() -> None:
    from rescene.deploy.federation_folder import init
    from rescene.deploy.processes import flwr, free_port, runs, start_server, start_site, stop

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as spare:
        federation = init(Path(spare) / "fed", [f"site-{k}" for k in range(NUM_SITES)], port=free_port())
        places, out = [federation.server, *map(federation.site, federation.sites)], Path(spare) / "found.json"
        for name in ("server", "client"):
            (federation.app / "rescene_app" / f"{name}.py").write_text(APP.format(name=name))
        try:
            pids = {one.name: one.pid for one in start_server(federation)}
            alone = idle_cores(pids["link"])
            pids = {"link": pids["link"]} | {
                name: start_site(federation.site(name))[0].pid for name in federation.sites
            }
            out.with_suffix(".pids").write_text(json.dumps(pids))
            answer = flwr(federation, "run", str(federation.app), "--run-config", f'out="{out}"')
            status = ""
            while not status.startswith("finished"):
                time.sleep(5)
                status = next(str(row["status"]) for row in runs(federation) if row["run-id"] == answer["run-id"])
            if not out.exists():
                raise SystemExit(f"{status}\n{(federation.server / 'logs' / 'executor.log').read_text()[-3000:]}")
            handled = [
                [json.loads(line) for line in (federation.site(name) / "handled.jsonl").read_text().splitlines()]
                for name in federation.sites
            ]
            found = json.loads(out.read_text())
            found["idle_link_cores"]["0"] = alone
            found = summary(found, handled)
        finally:
            for place in places:
                stop(place)
    print(json.dumps(found, indent=1))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def summary(found: dict[str, Any], handled: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over rounds, the first included; the engine's share of a site's work beside Flower's own."""
    keys = ("wall_s", "link_cpu_s", "nodes_cpu_s", "server_app_cpu_s")
    means = {name: {key: fmean(row[key] for row in rows) for key in keys} for name, rows in found["rounds"].items()}
    for name in LAYOUTS:
        own = [
            row for site in handled for row in [r for r in site if r["layout"] == name][-NUM_ROUNDS:]
        ]  # without hello
        means[name]["client_app_cpu_s_before_the_answer"] = fmean(row["cpu_before_s"] for row in own)
        means[name]["client_app_cpu_s_of_the_answer"] = fmean(row["cpu_s"] for row in own)
    packed, whole = means["packed"], means["engine"]
    flower_own = packed["client_app_cpu_s_before_the_answer"]
    flower_own += (packed["link_cpu_s"] + packed["nodes_cpu_s"] + packed["server_app_cpu_s"]) / NUM_SITES
    idle = found["idle_link_cores"]
    megabytes = NUM_SITES * (MODEL_MB + UP_MB)
    server_more = max(0.0, whole["server_app_cpu_s"] - packed["server_app_cpu_s"]) / NUM_SITES
    return {
        "command": "python benchmarks/deploy_wire.py",
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "setting": f"{NUM_SITES} sites, ResNet-18 down, 20 pictures up, TLS, node keys, SQLite, {NUM_ROUNDS} rounds each",
        "mean_per_round": means,
        "link_cpu_s_per_mb": (packed["link_cpu_s"] - idle[str(NUM_SITES)] * packed["wall_s"]) / megabytes,
        "link_cores_per_idle_site": (idle[str(NUM_SITES)] - idle["0"]) / NUM_SITES,
        "link_cpu_ratio": means["unpacked"]["link_cpu_s"] / packed["link_cpu_s"],
        "goal": 3.0,
        "per_site_and_round_cpu_s": {
            "flower": flower_own,
            "engine": whole["client_app_cpu_s_of_the_answer"] + server_more,
        },
    } | found


if __name__ == "__main__":
    run()
