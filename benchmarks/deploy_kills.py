"""kill -9 of a site, of the server app and of the link in the middle of a run across sites; the final model keeps its bits.

    python benchmarks/deploy_kills.py          writes results/deploy/kills.log

Needs Flower (pip install "rescene[deploy]"). Minutes: Flower notices a death by missing heartbeats, up to a minute each.
"""

import hashlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rescene.api import execute
from rescene.config import resolve
from rescene.deploy.control import run, start_server, start_site
from rescene.deploy.folder import init
from rescene.deploy.keeping import start_kept
from rescene.deploy.letters import Patience
from rescene.deploy.processes import _descendants, free_port, running, stop

LOG = Path(__file__).parents[1] / "results" / "deploy" / "kills.log"
RECIPE = ["method=fedewc", "federation.num_clients=3", "federation.per_round=3", "federation.engine=one-by-one"]
RECIPE += ["federation.quorum=1", "device=cpu"]


def main() -> None:
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    begin = time.monotonic()

    def tell(line: str) -> None:
        text = re.sub(r"/\S+/fed\b", "FEDERATION", f"{time.monotonic() - begin:6.1f} s  {line}")
        print(text, flush=True)
        with open(LOG, "a") as file:
            file.write(text + "\n")

    with tempfile.TemporaryDirectory() as spare:
        root = Path(spare)
        resolved = resolve("smoke", RECIPE)
        execute(resolved, root / "in-one-process")
        federation = init(root / "fed", ["a", "b", "c"], port=free_port())
        places = [federation.server, *map(federation.site, federation.sites)]
        try:
            start_server(federation)
            for name in federation.sites:
                start_site(federation.site(name))
            out = root / "across"
            going = threading.Thread(
                target=run, args=(federation, resolved, out, Patience(300, 240), tell), daemon=True
            )
            going.start()
            wait_for_answers(out, steps=1)
            tell("kill -9: the node of site a")
            kill(running(federation.site("a"))[0].pid)
            bring_back(federation.site("a"), tell)
            tell("the node of site a is back")
            wait_for_answers(out, steps=2)
            tell("kill -9: the server app")
            (executor,) = (one for one in running(federation.server) if one.name == "executor")
            for pid in _descendants(executor.pid):
                kill(pid)
            wait_for_answers(out, steps=5)
            tell("kill -9: the link")
            (link,) = (one for one in running(federation.server) if one.name == "link")
            kill(link.pid)
            time.sleep(5)
            start_server(federation)
            going.join()
        finally:
            for place in places:
                stop(place)
        files = [root / name / "model" / "final.safetensors" for name in ("across", "in-one-process")]
        across, inside = (hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
        tell(f"final model across sites      {across}")
        tell(f"final model in one process    {inside}")
        tell("the same bits" if across == inside else "THEY DIFFER")


def bring_back(site: Path, tell: Callable[[str], None]) -> None:
    """As `rescene deploy site` does: again while the link refuses a node that it still believes to be there."""
    while running(site):
        time.sleep(0.5)  # a killed process takes a moment to go
    start_kept(site, lambda: start_site(site), tell)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def wait_for_answers(out: Path, steps: int) -> None:
    """Until this many steps are done and somebody is at work on the next."""
    import json

    while True:
        try:
            done = json.loads((out / "status.json").read_text())["done"]
            waiting = json.loads((out / "waiting.json").read_text())["waiting_for"]
            if done >= steps and waiting and all(name.startswith("site") for name in waiting):
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.5)


if __name__ == "__main__":
    main()
