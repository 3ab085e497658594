"""A site leaves a federation: the run goes on in another folder, and the site is asked for nothing."""

import json

import pytest
import yaml
from local_sites import PATIENT, LocalPost
from own_sites import NAMES, SMALL, own_sites, plan_of
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ConfigError, RunError
from rescene.deploy.exchange import HELLO, Request
from rescene.deploy.federation_folder import FederationFolder
from rescene.deploy.message_bytes import unpack_message
from rescene.deploy.operator import federation_of, place_without, without_left
from rescene.deploy.plan_file import with_plan
from rescene.deploy.server import run_across
from rescene.engine import RunFolder

invoke = CliRunner().invoke
FIRST, SECOND = NAMES[:2], NAMES[2:]


@pytest.fixture
def federation(tmp_path):
    facts = {"name": "clinic", "host": "127.0.0.1", "port": 8000, "sites": ["north", "south", "west"]}
    (tmp_path / "server" / "runs").mkdir(parents=True)
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(facts))
    return tmp_path


class Asked(LocalPost):
    """Remembers which verbs each node was asked."""

    def push(self, letters):
        self.verbs = getattr(self, "verbs", [])
        for node, letter in letters.items():
            request = unpack_message(letter.head).tree
            assert isinstance(request, Request)
            self.verbs.append((1000 - node, request.verb))
        return super().push(letters)


def run_on(root, plan, folders):
    """What `rescene deploy run` does, without Flower."""
    federation = FederationFolder.open(root)
    place, post = federation.plan_run, Asked(folders)
    given = resolve("smoke", [*SMALL, "federation.quorum=0.3"])
    resolved = without_left(federation, with_plan(given, plan, len(federation.sites), place))
    return run_across(resolved, RunFolder(place), post, PATIENT), post, place


def test_it_goes_on_without_the_site_by_name(federation, tmp_path):
    folders = own_sites(tmp_path / "at")
    _, _, place = run_on(federation, plan_of((FIRST, 2)), folders)
    assert federation_of(place).sites == ["north", "south", "west"] and federation_of(tmp_path) is None
    told = invoke(app, ["forget", str(place), "--client", "south"])
    assert told.exit_code == 0, told.output
    new = place.with_name("plan-without-1")
    assert "Removed of site south" in told.output and "rescene deploy run" in told.output
    assert "measured at the sites" in told.output
    found = json.loads((new / "results.json").read_text())
    assert found["aa"] is None and found["forgotten"][0]["name"] == "south"  # nobody has measured the new model yet
    now = FederationFolder.open(federation)
    assert (now.left, now.exclude, now.plan_run) == (["south"], [1], new)
    old = invoke(app, ["forget", str(place), "--client", "west"])
    assert old.exit_code == 2 and "E165" in old.output

    results, post, where = run_on(federation, plan_of((FIRST, 2), (SECOND, 2)), folders)
    assert where == new and results["aa"] is not None
    assert {verb for client, verb in post.verbs if client == 1} == {HELLO}
    assert {client for client, verb in post.verbs if verb == "client_round"} == {0, 2}
    assert [row["client"] for row in results["forgotten"]] == [1]
    events = (new / "events.jsonl").read_text()
    assert "site 1 cannot take part: this run has sites 0, 2" in events


def test_a_site_that_left_secure_sums_is_never_asked_again(federation, monkeypatch):
    """The command of E230 is the withdrawal; next month's usual command follows it."""
    facts = yaml.safe_load((federation / "federation.yaml").read_text())
    facts["sites"] += ["east", "centre"]
    (federation / "federation.yaml").write_text(yaml.safe_dump(facts))
    (federation / "plan.yaml").write_text(yaml.safe_dump(plan_of((FIRST, 1)).model_dump(mode="json")))
    asked = []

    def run(federation, resolved, out, *rest, **more):
        recipe = resolved.recipe
        asked.append((out.name, list(recipe.federation.exclude or ()), recipe.privacy.earlier_sums))
        raise RunError("E351", "nobody is there")

    monkeypatch.setattr("rescene.deploy.operator.run", run)
    usual = ["deploy", "run", str(federation), "own", "privacy.honest_sites=2", "federation.num_clients=5"]
    first = [*usual, "federation.exclude=[1]", "privacy.earlier_sums=1"]
    for words in (usual, first, first, usual, [*usual, "federation.exclude=[2]", "privacy.earlier_sums=2"], usual):
        told = invoke(app, words)
        assert told.exit_code == 4 and "E351" in told.output, told.output
    again, later = ("plan-summed-again-1", [1], 1), ("plan-summed-again-2", [1, 2], 2)
    assert asked == [("plan", [], None), again, again, again, later, later]
    now = FederationFolder.open(federation)
    assert (now.left, now.earlier_sums) == (["south", "west"], 2)
    assert "E531" in invoke(app, first).output
    few = invoke(app, [*usual, "federation.exclude=[3]", "privacy.earlier_sums=3"])
    assert few.exit_code == 2 and "E532" in few.output and FederationFolder.open(federation) == now
    assert "E165" in invoke_forget(federation, "plan")


def invoke_forget(federation, run):
    """What `rescene forget` says of this run's folder."""
    place = federation / "server" / "runs" / run
    with pytest.raises(ConfigError) as refused:
        place_without(FederationFolder.open(federation), place, 0)
    return str(refused.value)


def test_bad_requests_in_a_federation(federation, tmp_path):
    folders = own_sites(tmp_path / "at")
    _, _, place = run_on(federation, plan_of((FIRST, 1)), folders)
    for words, code in (
        (["soth"], "E166"),
        (["south", "--check"], "E164"),
        (["south", "--out", str(tmp_path / "x")], "E194"),
    ):
        told = invoke(app, ["forget", str(place), "--client", *words])
        assert told.exit_code == 2 and code in told.output, told.output
    assert FederationFolder.open(federation).left == []
