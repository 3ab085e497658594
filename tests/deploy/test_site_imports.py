"""A site's process is started anew for every message: what it loads is paid for each time."""

import json
import subprocess
import sys

import pytest

import rescene
from rescene.config import resolve
from rescene.deploy.exchange import Request
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.methods.base import weights_of
from rescene.nets import Arch

NEVER = (
    "rescene.cli",
    "rescene.report",
    "rescene.paper",
    "rescene.engine.loop",
    "rescene.deploy.server",
    "typer",
    "rich",
)
NEVER += ("matplotlib", "jinja2", "pandas", "pyarrow", "scipy", "sympy", "torch._dynamo", "torch.utils.flop_counter")
# Flower itself may be missing, and loads some of these: a stand-in shows what is ours
CLIENT = """
import sys
from types import ModuleType
from unittest.mock import MagicMock
for name in ("httpx", "flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__getattr__ = lambda key: MagicMock()
import rescene.deploy.flower
before = [name for name in ("rescene.engine", "rescene.config", "yaml") if name in sys.modules]
from pathlib import Path
from rescene.deploy.exchange import Letter
from rescene.deploy.site import Site
folder = Path(sys.argv[1])
answer = Site.open(folder).answer(Letter((folder / "head").read_bytes(), (folder / "body").read_bytes()))
(folder / "answer").write_bytes(answer)
print(*before, *(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize(("method", "sent"), [("rescene", "images"), ("fedavg", "model")])
def test_a_site_loads_neither_the_server_nor_the_compiler_of_torch(tmp_path, method, sent):
    recipe = resolve("smoke", [f"method={method}", "model.width=2", "device=cpu"]).recipe
    request = Request(
        rescene.__version__, "run", json.dumps(recipe.model_dump(mode="json")), "client_round", 0, 0, ("client", 0, 0), None, "t"
    )  # fmt: skip
    (tmp_path / "site.yaml").write_text("client: 0\ndevice: cpu\n")
    (tmp_path / "head").write_bytes(pack_message(request).data)
    model = weights_of(Arch("convnet", 32, "batch", 2).build(2))
    (tmp_path / "body").write_bytes(pack_message({"model": model, "noise_seed": 1}).data)
    done = subprocess.run([sys.executable, "-c", CLIENT, str(tmp_path), *NEVER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
    reply = unpack_message((tmp_path / "answer").read_bytes()).tree
    assert reply.problem is None and len(reply.upload[sent]) > 0  # it really worked
