"""What a site's process has loaded when Flower is there, when the app is imported, and when its first answer is ready.

    pip install "rescene[deploy]"         then         python benchmarks/site_imports.py [NAME]

Flower starts a process for every message, so all of this is paid each time. Means of three processes; adds an entry NAME
(default: now) to results/deploy/imports.json. The smoke recipe, so that the work itself is short.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

OUT = Path(__file__).parents[1] / "results" / "deploy" / "imports.json"
METHODS, TIMES = ("rescene", "fedavg"), 3
CHILD = """
import json, os, sys, time
from pathlib import Path
def look():
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return {"modules": len(sys.modules), "cpu_s": time.process_time(), "resident_mb": resident}
import flwr.clientapp, flwr.serverapp
rows = {"flower": look()}
from rescene.deploy import flower
rows["app"] = look()
from rescene.deploy.exchange import Letter
from rescene.deploy.site import Site
folder = Path(sys.argv[1])
reply = Site.open(folder).answer(Letter((folder / "head").read_bytes(), (folder / "body").read_bytes()))
rows["answer"] = look()
from rescene.deploy.message_bytes import unpack_message
assert unpack_message(reply).tree.problem is None
print(json.dumps(rows))
"""


def write_letter(folder: Path, method: str) -> None:
    import rescene
    from rescene.config import resolve
    from rescene.deploy.exchange import Request
    from rescene.deploy.message_bytes import pack_message
    from rescene.engine import prepare
    from rescene.methods.base import weights_of

    recipe = resolve("smoke", [f"method={method}", "device=cpu"]).recipe
    text = json.dumps(recipe.model_dump(mode="json"))
    request = Request(rescene.__version__, "run", text, "client_round", 0, 0, ("client", 0, 0), None, "t")
    payload = {"model": weights_of(prepare(recipe).initial_net()), "noise_seed": 1}
    (folder / "site.yaml").write_text("client: 0\ndevice: cpu\n")
    (folder / "head").write_bytes(pack_message(request).data)
    (folder / "body").write_bytes(pack_message(payload).data)


def measured(method: str) -> dict[str, dict[str, float]]:
    rows = []
    for _ in range(TIMES):
        with tempfile.TemporaryDirectory() as folder:
            write_letter(Path(folder), method)
            child = [sys.executable, "-c", CHILD, folder]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            rows.append(json.loads(subprocess.run(child, env=env, check=True, stdout=subprocess.PIPE).stdout))
    return {stage: {key: fmean(row[stage][key] for row in rows) for key in values} for stage, values in rows[0].items()}


def main() -> None:
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    found[sys.argv[1] if len(sys.argv) > 1 else "now"] = {method: measured(method) for method in METHODS}
    print(json.dumps(found, indent=1))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
