"""Sums over real Flower nodes: a link, three nodes and their apps as processes, TLS, and the lens that comes with rescene.

The simulator adds the sites' numbers up in one process. Here the same numbers come over the network, and no bit may differ.
"""

import os
import signal
import threading
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")
pytest.importorskip("Crypto", reason="pip install 'rescene[deploy]'")

import yaml
from local_sites import in_process
from own_sites import NAMES, write_images

from rescene.config import resolve
from rescene.deploy import operator, processes
from rescene.deploy.exchange import Patience
from rescene.deploy.federation_folder import init
from rescene.deploy.processes import _descendants, free_port, running, stop
from rescene.engine import RunFolder
from rescene.engine import transport as engine
from rescene.methods.moments import EVERYBODY, received
from rescene.privacy.totals import added

pytestmark = pytest.mark.slow

EXACT = ["privacy.mechanism=none", "privacy.epsilon=null"]
NOISED = ["privacy.noise=seeded"]
SECURE = [*NOISED, "privacy.honest_sites=2"]


class Nodes:
    """A server and three sites on this machine, with the same folder of images."""

    def __init__(self, root):
        self.images = write_images(root / "images", dict.fromkeys(NAMES, 12))
        self.federation = init(root / "fed", ["north", "south", "west"], port=free_port())
        self.sites = [self.federation.site(name) for name in self.federation.sites]
        self.places = [self.federation.server, *self.sites]

    def start(self):
        for site in self.sites:
            section = yaml.safe_load((site / "site.yaml").read_text())
            section |= {"data": {"path": str(self.images), "image_size": 32}, "device": "cpu"}
            (site / "site.yaml").write_text(yaml.safe_dump(section))
        processes.start_server(self.federation)
        for site in self.sites:
            processes.start_site(site)

    def stop(self):
        for place in self.places:
            stop(place)

    def recipe(self, *more):
        small = ["method.num_features=256", "tasks.limit=1", "federation.engine=one-by-one", "device=cpu"]
        return resolve("own", [f"data.path={self.images}", *small, *more])

    def run(self, resolved, folder, deadline_s=300):
        patience = Patience(gather_s=300, deadline_s=deadline_s, poll_s=0.5)
        return operator.run(self.federation, resolved, folder, patience, lambda line: None, look_s=4)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    found = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def kept_sums(folder):
    return RunFolder(folder).checkpoints.load().tree["state"].parts


def model_in(folder):
    return (folder / "model" / "final.safetensors").read_bytes()


def same(a, b):
    return (
        a.client == b.client
        and a.noises == b.noises
        and all(getattr(a, name).equal(getattr(b, name)) for name in ("counts", "sums", "second"))
    )


@pytest.mark.parametrize(
    "privacy, sums", [(EXACT, 3), (NOISED, 3), (SECURE, 1)], ids=["exact", "seeded noise", "secure sum"]
)
def test_real_nodes_send_what_the_simulator_adds_up(tmp_path, nodes, privacy, sums):
    resolved = nodes.recipe(*privacy)
    found, expected = nodes.run(resolved, tmp_path / "across"), in_process(resolved, tmp_path / "here")
    there, here = kept_sums(tmp_path / "across"), kept_sums(tmp_path / "here")
    assert len(there) == len(here) == sums and all(map(same, there, here))
    assert model_in(tmp_path / "across") == model_in(tmp_path / "here") and found["aa"] == expected["aa"]
    assert found["events_summary"]["client_failures"] == 0


def killed(site):
    """SIGKILL to the node of this site, its executor and the app at work."""
    up = [one.pid for one in running(site)]
    for pid in [*up, *(child for one in up for child in _descendants(one))]:
        os.kill(pid, signal.SIGKILL)


def test_a_real_node_that_is_killed_in_a_secure_sum_is_missed_by_nobody(tmp_path, nodes, monkeypatch):
    """It dies as soon as it has shown its keys. The others' sum is the plain sum of their numbers, to the bit."""
    resolved = nodes.recipe("seed=1", *SECURE)
    parts = []
    monkeypatch.setattr(engine, "added", lambda given: added(parts.extend(given) or parts))
    in_process(resolved, tmp_path / "here")
    assert len(parts) == 3
    victim, over = nodes.sites[2], threading.Event()

    def watch():
        while not over.is_set():
            if any(victim.glob("state/*s1*/client-2/sums/party-*")):
                killed(victim)
                return
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        nodes.run(resolved, tmp_path / "across", deadline_s=240)
    finally:
        over.set()
        watcher.join()
    (found,) = kept_sums(tmp_path / "across")
    assert not running(victim) and found.client == EVERYBODY and found.noises == 1  # two of the sites, H = 2
    expected = received(EVERYBODY, added(parts[:2]), (0, 1), resolved.recipe.promise(1).mechanism, 1.0)
    assert same(found, expected)
