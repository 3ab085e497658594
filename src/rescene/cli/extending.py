"""Methods of one's own: a skeleton with its test, loading from a file, and the page that explains any method."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path
from typing import Any

from rescene.errors import ConfigError

SKELETON = '''"""{title}: one line on the idea.

    server: broadcast theta
    client: train on local images; send theta_k and n_k
    server: average
"""

from dataclasses import replace
from typing import ClassVar

from rescene.functional import weighted_average
from rescene.hyperparameters import hyper
from rescene.methods import Method, ModelState, register
from rescene.methods.base import weights_of
from rescene.steps import Batch, cross_entropy, fit_shard


@register
class {title}(Method):
    name: ClassVar[str] = "{name}"
    title: ClassVar[str] = "{title}"
    paper: ClassVar[str] = "yours"
    leaves_site: ClassVar[str] = "model weights and the number of local images"

    penalty: float = hyper(0.0, "lambda", "[ours]", "weight of the extra term", ge=0)

    def client_round(self, payload, shard, client_state, rng):
        if len(shard) == 0:
            return {{"num_images": 0}}, client_state
        net = shard.net(payload["model"])

        def loss(net, batch: Batch):
            extra = sum(parameter.square().sum() for parameter in net.parameters())
            return cross_entropy(net, batch) + self.penalty * extra

        fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device), loss)
        return {{"model": weights_of(net), "num_images": len(shard)}}, client_state

    def server_round(self, state: ModelState, uploads, round, federation, rng):
        senders = [upload for upload in uploads.values() if upload["num_images"]]
        if not senders:
            return state
        models, sizes = [u["model"] for u in senders], [u["num_images"] for u in senders]
        return replace(state, model=weighted_average(models, sizes))
'''

TEST = '''"""{title} keeps the contract that every method keeps."""

import pytest
from {name} import {title}

from rescene.conformance import CHECKS
from rescene.steps import Training


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(check):
    check({title}(train=Training(local_epochs=1, server_epochs=1, batch_size=8)))
'''


def new_method(name: str, folder: Path) -> list[Path]:
    """Write NAME.py and test_NAME.py; existing files are never overwritten."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(
            "E111", f"{name!r} cannot be a method's name", why="lower-case letters, digits and _ only", fix="my_method"
        )
    title = "".join(part.capitalize() for part in name.split("_"))
    files = {folder / f"{name}.py": SKELETON, folder / f"test_{name}.py": TEST}
    for path in files:
        if path.exists():
            raise ConfigError("E112", f"{path} exists already", fix="choose another name or folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text.format(name=name, title=title), encoding="utf-8")
    return list(files)


def load_plugin(path: Path) -> None:
    """Import a file that registers methods."""
    if not path.is_file():
        raise ConfigError("E113", f"there is no plug-in {path}", fix="rescene new method NAME writes one")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError("E113", f"{path} is not a Python file")
    if path.stem in sys.modules:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # records are saved by module name, so a resumed run must find it there
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        del sys.modules[path.stem]
        raise ConfigError(
            "E113", f"the plug-in {path} fails: {type(error).__name__}: {error}", fix="--debug shows where"
        ) from error


def explain(name: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Facts and hyperparameters of a method."""
    from rescene.engine.asymptotics import compute_facts
    from rescene.methods import method_class

    method = method_class(name)
    about = (sys.modules[method.__module__].__doc__ or "").strip()
    facts = {
        "method": f"{method.title} ({method.name})",
        "paper": method.paper,
        "leaves the site": method.leaves_site,
        "client remembers": method.remembers,
        **compute_facts(method.name),
        "about": about,
    }
    return facts, method.table()
