"""Many rounds, and a large model for many sites: memory, descriptors, threads and temporary files stay where they are.

    python benchmarks/trust_soak.py [--full] [--seed 0] [--only loopback] [--rounds 30]

Short: 80 rounds of 5 sites through Flower's two apps in one process; ResNet-18 for 10 sites.
Full: 500 rounds of 20 sites; ResNet-18 for 100; and 30 rounds (or ``--rounds``) of three sites as processes over TLS. Writes
results/trust/soak.json. ``--only loopback`` is that last part alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import smallworld as world
from soak_measure import (
    Sample,
    bounded,
    flat,
    held_by,
    judged,
    judged_by_halves,
    last_of_each_round,
    middle_of_each_round,
)
from trust import RESULTS, parser, tell

from rescene.config import resolve
from rescene.deploy.message_bytes import unpack_message
from rescene.deploy.site import KEPT

FILES = 6  # of a site, beside what it remembers: site.yaml, ledger and its mark, recipe, answer, model
# ReSCENE without what it keeps of each round by design: its pool, and a sketch of the model for the buffer's theory
STEADY = {"rescene": {"method.accumulate": False, "method.buffer": "none"}, "refed": {}}
# oneDNN keeps 1,024 compiled convolutions by default, one for each number of images: until it has them, that is growth
FEW_CONVOLUTIONS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
FLOWERS_OWN = (" link", " executor", " node")  # processes that do nothing but Flower's work
ROUNDS = 30  # on loopback


def images(path: Path, num_classes: int, per_class: int, seed: int) -> Path:
    """Noise around greys, 8 x 8 pixels."""
    random, parts = np.random.default_rng(seed), {}
    for split, count in (("train", per_class), ("test", 1)):
        labels = np.arange(num_classes * count) % num_classes
        pixels = random.integers(0, 60, (len(labels), 8, 8, 3)) + 9 * labels.reshape(-1, 1, 1, 1)
        parts |= {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **parts)
    return path


def recipe(data: Path, method: str, num_sites: int, seed: int, **more: Any) -> Any:
    """All sites in every round, every image at one of them."""
    sites = {"num_clients": num_sites, "per_round": num_sites, "engine": "one-by-one", "partition": "iid"}
    values = world.overrides(data, method) | {f"federation.{key}": value for key, value in sites.items()}
    values |= {"federation.evaluate_every": 0, "tasks.per_task": 2, "device": "cpu", "seed": seed, **more}
    return resolve("smoke", [f"{key}={json.dumps(value)}" for key, value in values.items()])


def in_one_process(method: str, num_sites: int, num_rounds: int, seed: int) -> list[Sample]:
    """What the process of both apps holds before each round.

    One task, so nothing new has to be kept.
    """
    from localgrid import LocalGrid, serve, site_folders

    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        root = Path(spare)
        data = images(root / "images.npz", 2, 2 * num_sites, seed)
        rounds = {"tasks.limit": 1, "federation.num_rounds": num_rounds}
        resolved = recipe(data, method, num_sites, seed, **rounds, **STEADY[method])
        sites = site_folders(root / "sites", num_sites, data)
        (root / "tmp").mkdir()
        tempfile.tempdir = str(root / "tmp")

        def watch(messages: list[Any]) -> None:
            head = bytes(messages[0].content["letter"]["head"].data)
            if unpack_message(head).tree.verb == "client_round":
                spares = [path for path in root.rglob("*") if path.name.startswith(".") or path.parent.name == "tmp"]
                kept = max(sum(path.is_file() for path in site.rglob("*")) for site in sites)
                beyond = max(0, kept - KEPT - FILES)
                samples.append({"round": len(samples), **held_by(), "temporary": len(spares), "beyond": beyond})

        serve(LocalGrid(sites, watch), resolved, root, root / "run")
    return samples


def sent_to_all(num_sites: int, seed: int) -> Sample:
    """One round of ReSCENE with ResNet-18: what each site has kept of the model, and the peak of memory.

    The copy of a site is hashed and removed after its answer; a hundred of them would be 4.5 GB on this disk.
    """
    from localgrid import LocalGrid, serve, site_folders

    copies, sent = list[tuple[str, ...]](), set[tuple[str, ...]]()

    class Hashing(LocalGrid):
        def answered(self, message: Any) -> Any:
            body = bytes(message.content["letter"]["body"].data)
            answer = super().answered(message)
            kept = sorted(self.sites[message.metadata.dst_node_id].glob("state/*/client-*/client_round/*"))
            if body:
                sent.add(tuple(sorted(unpack_message(body).large)))
                copies.append(tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in kept))
            for path in kept:
                path.unlink()
            return answer

    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        root = Path(spare)
        data = images(root / "images.npz", 2, num_sites, seed)
        model = {"model.name": "resnet18", "model.width": None, "federation.num_rounds": 1, "tasks.limit": 1}
        resolved = recipe(data, "rescene", num_sites, seed, **model)
        begin, before = time.monotonic(), held_by()["mb"]
        serve(Hashing(site_folders(root / "sites", num_sites, data)), resolved, root, root / "run")
        size = (root / "run" / "model" / "final.safetensors").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {"sites": num_sites, "model_mb": size / 1e6, "copies": len(copies), "different": len({*copies, *sent})}
    return facts | {"peak_mb": peak, "before_mb": before, "seconds": time.monotonic() - begin}


def as_processes(num_sites: int, num_rounds: int, seed: int) -> dict[str, list[Sample]]:
    """What link, executor, server app and nodes hold after each round, and the files in Flower's temporary folder.

    A site's app is a new process for every letter; of it, the most that it held in a round.
    """
    from rescene.deploy.exchange import Patience
    from rescene.deploy.federation_folder import init
    from rescene.deploy.operator import run
    from rescene.deploy.processes import _descendants, free_port, running, start_server, start_site, stop

    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        root = Path(spare)
        (root / "tmp").mkdir()
        os.environ["TMPDIR"] = str(root / "tmp")
        data = images(root / "images.npz", 2, 2 * num_sites, seed)
        rounds = {"tasks.limit": 1, "federation.num_rounds": num_rounds}
        resolved = recipe(data, "rescene", num_sites, seed, **rounds, **STEADY["rescene"])
        federation = init(root / "fed", [f"site-{k}" for k in range(num_sites)], port=free_port())
        places = [federation.server, *map(federation.site, federation.sites)]
        for site in places[1:]:
            path = site / "site.yaml"
            path.write_text(path.read_text().replace("{name: auto}", f"{{path: {data}}}"))
        found: dict[str, list[Sample]] = {}
        apps: dict[str, dict[int, Sample]] = {}
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(1):
                try:
                    done = json.loads((root / "run" / "status.json").read_text())["done"]
                except (OSError, ValueError):
                    continue
                pids = {f"{place.name} {one.name}": one.pid for place in places for one in running(place)}
                below = _descendants(pids["server executor"]) if "server executor" in pids else []
                pids |= {"server app": below[-1]} if below else {}
                for name, pid in pids.items():
                    if now := held_by(pid):
                        row = {"round": done - 1, **now, "temporary": len(os.listdir(root / "tmp"))}
                        found.setdefault(name, []).append(row)
                for name in [name for name in pids if name.endswith(" executor") and name != "server executor"]:
                    held = [now for pid in _descendants(pids[name]) if is_app(pid) and (now := held_by(pid))]
                    rounds = apps.setdefault(name.replace(" executor", " app"), {})
                    for now in held:
                        before = rounds.get(done - 1, {"round": done - 1, **now})
                        rounds[done - 1] = {key: max(before[key], value) for key, value in (before | now).items()}

        thread = threading.Thread(target=watch, daemon=True)
        try:
            start_server(federation)
            for site in places[1:]:
                start_site(site)
            thread.start()
            run(federation, resolved, root / "run", Patience(300, 600), lambda line: print(line, file=sys.stderr))
        finally:
            ended.set()
            for place in places:
                stop(place)
        found = {
            name: (middle_of_each_round if name.endswith(FLOWERS_OWN) else last_of_each_round)(samples)
            for name, samples in found.items()
        }
        return found | {name: list(rounds.values()) for name, rounds in apps.items()}


def is_app(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "flwr-clientapp"
    except OSError:
        return False


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own, so that nothing else has grown there."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def keep(name: str, facts: dict[str, Any], full: bool) -> None:
    """What the long form has found, part by part."""
    if full:
        path = RESULTS / "soak.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | {name: facts}, indent=1) + "\n")


def many_rounds(method: str, full: bool, seed: int) -> None:
    num_sites, num_rounds, begin = (20, 500, 50) if full else (5, 80, 30)
    samples = apart(in_one_process, method, num_sites, num_rounds, seed)
    found = judged(samples, begin)
    keep(f"in one process, {method}", {"seed": seed, "sites": num_sites, **found, "samples": samples}, full)
    counts = ", ".join(f"{key} {found['first'][key]} to {found['last'][key]}" for key in found["last"])
    figure = f"{len(samples)} rounds x {num_sites} sites: {found['mb_per_round']:+.4f} MB a round; {counts}"
    tell(f"{method}: both apps for many rounds, nothing grows", figure, flat(found))


def large_model(full: bool, seed: int) -> None:
    sent = apart(sent_to_all, 100 if full else 10, seed)
    keep("one model to all", {"seed": seed, **sent}, full)
    equal = sent["copies"] == sent["sites"] and sent["different"] == 1
    figure = f"{sent['model_mb']:.1f} MB to {sent['sites']} sites, {sent['copies']} copies, {sent['different']} hash; "
    tell("a large model, the same for all", figure + f"peak {sent['peak_mb']:.0f} MB", equal)


def loopback(num_rounds: int, seed: int) -> None:
    part = "on loopback" if num_rounds == ROUNDS else f"on loopback for {num_rounds} rounds"
    for name, samples in apart(as_processes, 3, num_rounds, seed).items():
        flowers = name.endswith(FLOWERS_OWN)
        # the end of the task begins before its last round is told
        counted = [one for one in samples if one["round"] < num_rounds - 1]
        found = (judged_by_halves if flowers else judged)(counted, 10)
        keep(f"{part}, {name}", {"seed": seed, **found, "samples": samples}, full=True)
        counts = ", ".join(f"{key} {found['first'][key]} to {found['last'][key]}" for key in found["last"])
        figure = f"{len(samples)} rounds x 3 sites: {found['mb_per_round']:+.4f} MB a round; {counts}"
        if flowers:
            tell(f"loopback: {name} holds no more files or threads", figure, bounded(found))
        else:
            tell(f"loopback: {name}, nothing grows", figure, flat(found))


def main() -> None:
    words = parser(__doc__ or "")
    words.add_argument("--only", choices=["loopback"], help="this part alone, in its long form")
    words.add_argument("--rounds", type=int, default=ROUNDS, help="of that part")
    asked = words.parse_args()
    if asked.rounds < 20:
        words.error("--rounds: at least 20, as the first 10 are not counted")
    os.environ.update(FEW_CONVOLUTIONS)
    if not asked.only:
        for method in world.METHODS:
            many_rounds(method, asked.full, asked.seed)
        large_model(asked.full, asked.seed)
    if asked.full or asked.only:
        loopback(asked.rounds, asked.seed)


if __name__ == "__main__":
    main()
