"""A site withdraws: nothing of its uploads is left, the model depends on the others alone, and it is never asked again."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError, RunError
from rescene.core.rng import Rng
from rescene.engine import RunFolder
from rescene.engine.checkpoint import _digest_of
from rescene.engine.loop import run
from rescene.engine.withdrawal import forget
from rescene.methods.rescene import Collected, ReSCENE, ServerState
from rescene.training import Training

SETTING = {
    "federation.num_rounds": 2,
    "federation.num_clients": 4,
    "federation.per_round": 3,
    "train.server_epochs": 2,
    "method.num_steps": 1,
    "method.budget": 20,
    "model.width": 8,
    "tasks.limit": 2,
}
GONE = 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return rescene.run("smoke", out=tmp_path_factory.mktemp("forget") / "run", **SETTING).folder


def stop_after(rounds):
    def stop(event):
        nonlocal rounds
        rounds -= event["event"] == "round"
        if event["event"] == "round" and rounds < 0:  # the round before is safe by now
            raise KeyboardInterrupt

    return stop


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """Stopped in the second task: a buffer and a pool."""
    folder = tmp_path_factory.mktemp("halfway") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(resolve("smoke", SETTING), RunFolder(folder), stop_after(3))
    return folder


def withdraw(folder, out, client=GONE, **more):
    return forget(RunFolder(folder), resolve(folder / "config.yaml"), client, RunFolder(out), **more)


def state_of(folder):
    return RunFolder(folder).checkpoints.load().tree["state"]


def pictures(state, keep):
    parts = (*state.buffers, *state.pool)
    return [
        image.numpy().tobytes() for p in parts for image, k in zip(p.images, p.clients.tolist(), strict=True) if keep(k)
    ]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("which", ["finished", "halfway"])
def test_nothing_of_it_is_left_and_the_others_stay(which, request, tmp_path):
    source, out = request.getfixturevalue(which), tmp_path / "new"
    before, untouched = state_of(source), files(source)
    record = withdraw(source, out)
    own, others = pictures(before, lambda k: k == GONE), pictures(before, lambda k: k != GONE)
    assert own and others
    assert pictures(state_of(out), lambda k: True) == others
    stored = b"".join(files(out).values())
    assert all(image in b"".join(untouched.values()) for image in own)
    assert not any(image in stored for image in own)
    samples = [RunFolder(folder).checkpoints.load().tree["leakage"]["samples"].values() for folder in (source, out)]
    assert [GONE in [k for part in parts for k in part["clients"].tolist()] for parts in samples] == [True, False]
    assert files(source) == untouched
    assert record["num_images"] == len(own) and record["num_images_left"] == len(others)
    assert sum(row["buffer"] + row["pool"] for row in record["removed"]) == len(own)
    assert record["bytes"] == len(own) * len(own[0])
    assert bool(before.pool) == (which == "halfway") == any(row["pool"] for row in record["removed"])


def test_a_finished_run_is_finished_again_with_its_own_numbers(finished, tmp_path):
    record = withdraw(finished, tmp_path / "new")
    old, new = rescene.load(finished).values, rescene.load(tmp_path / "new").values
    assert [row["removed"] for row in new["forgotten"]] == [record["removed"]] and "forgotten" not in old
    assert new["config"]["federation"]["exclude"] == [GONE]
    assert (record["accuracy_before"], record["accuracy_after"]) == (old["aa"], new["aa"])
    assert new["accuracy_matrix"][0] == old["accuracy_matrix"][0]
    assert new["accuracy_matrix"][1] == pytest.approx(record["per_task_after"])
    assert new["incremental_accuracy"][1] == pytest.approx(new["aa"])
    assert record["epochs"] == 2 * 2 * 2  # tasks, rounds, epochs
    events = [json.loads(line) for line in (tmp_path / "new" / "events.jsonl").read_text().splitlines()]
    assert [event["client"] for event in events if event["code"] == "I402"] == [GONE]
    assert withdraw(finished, tmp_path / "new") == record  # done before


def test_the_model_depends_on_the_others_alone(tiny_world):
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1] * 6)
    clients = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])

    def state(own):
        images = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        images[clients == 1] = own
        part = Collected(images, labels, torch.ones_like(labels), clients)
        trained = {key: value + 1 for key, value in fresh.items()}
        return ServerState(trained, (part,), (replace(part, images=images + 1),), {})

    class Server:
        task, transform, device = tiny_world["task"], tiny_world["transform"], torch.device("cpu")
        net = staticmethod(tiny_world["arch"].restore)

    fresh = tiny_world["net"].state_dict()
    method = ReSCENE(train=Training(server_epochs=2, batch_size=4))
    one, two = (
        method.forget(state(own), 1, fresh, 3, Server(), Rng(0))
        for own in (torch.zeros(4, 3, 16, 16), 9 * torch.randn(4, 3, 16, 16, generator=generator))
    )
    assert all(torch.equal(one.model[key], two.model[key]) for key in fresh)
    kept = method.forget(state(torch.zeros(4, 3, 16, 16)), 7, fresh, 3, Server(), Rng(0))
    assert any(not torch.equal(one.model[key], kept.model[key]) for key in fresh)
    nobody = method.forget(
        replace(state(torch.zeros(4, 3, 16, 16)), pool=(), buffers=()), 1, fresh, 3, Server(), Rng(0)
    )
    assert all(torch.equal(nobody.model[key], fresh[key]) for key in fresh)


def test_a_run_goes_on_without_it(halfway, tmp_path):
    out = tmp_path / "new"
    withdraw(halfway, out)
    assert not (out / "results.json").exists()
    result = rescene.run(out / "config.yaml", out=out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    asked = [row["participants"] for row in rows if row["kind"] == "round"]
    assert len(asked) == 4 and GONE in asked[2] and GONE not in asked[3]
    assert result.values["forgotten"][0]["client"] == GONE
    assert GONE not in [int(k) for p in state_of(out).buffers for k in p.clients]


def test_killed_in_between_it_is_done_again(finished, tmp_path):
    out, wanted = tmp_path / "killed", tmp_path / "whole"
    withdraw(finished, wanted)

    def kill(event):
        if event["event"] == "event" and event["code"] == "I402":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        withdraw(finished, out, progress=kill)
    assert RunFolder(out).checkpoints.load() is None  # resumed now, it would be the run that never saw the site
    withdraw(finished, out)
    assert rescene.load(out).values == rescene.load(wanted).values


def test_a_class_that_nobody_else_sent_is_told(halfway, tmp_path):
    source = RunFolder(shutil.copytree(halfway, tmp_path / "run"))
    saved = source.checkpoints.load()
    state = saved.tree["state"]
    (buffer,) = state.buffers
    theirs = replace(buffer, clients=torch.where(buffer.labels == 0, GONE, buffer.clients))
    tree = saved.tree | {"state": replace(state, buffers=(theirs,))}
    source.checkpoints.save(saved.step, tree, saved.facts)
    assert withdraw(source.path, tmp_path / "new")["classes_lost"] == ["T-shirt"]
    assert "nobody else sent images of T-shirt" in (tmp_path / "new" / "events.jsonl").read_text()
    nobody = replace(state, pool=(), buffers=(replace(buffer, clients=torch.full_like(buffer.labels, GONE)),))
    source.checkpoints.save(saved.step, saved.tree | {"state": nobody}, saved.facts)
    with pytest.raises(RunError, match="E419"):
        withdraw(source.path, tmp_path / "other")


@pytest.mark.parametrize("method", ["fedavg", "feddm"])
def test_methods_that_keep_no_uploads_are_refused_with_what_can_be_done(method, tmp_path):
    resolved = resolve("smoke", {"method": method})
    with pytest.raises(ConfigError, match="E162") as error:
        forget(RunFolder(tmp_path / "run"), resolved, 1, RunFolder(tmp_path / "new"))
    assert "federation.exclude=[1]" in error.value.fix and not (tmp_path / "new").exists()


def test_runs_that_cannot_forget_say_why(finished, tmp_path):
    for client in (4, -1):
        with pytest.raises(ConfigError, match="E161"):
            withdraw(finished, tmp_path / "new", client=client)
    pruned = shutil.copytree(finished, tmp_path / "pruned")
    shutil.rmtree(pruned / "checkpoints")
    with pytest.raises(RunError, match="E417"):
        withdraw(pruned, tmp_path / "new")
    with pytest.raises(RunError, match="E406|E405"):
        withdraw(finished, finished)
    assert not (tmp_path / "new").exists()


def as_format_1(folder):
    """Checkpoints as they were before senders were written down."""
    from safetensors.torch import load

    from rescene.engine.checkpoint import encoded

    store = folder / "checkpoints"
    for manifest in store.glob("step-*.json"):
        body = json.loads(manifest.read_text())
        body.pop("sha256")
        for i, digest in enumerate(body["chunks"]):
            chunk = load((store / f"chunk-{digest[:32]}.safetensors").read_bytes())
            if chunk.keys() == {"images", "labels", "rounds", "clients"}:
                del chunk["clients"]
                data = b"".join(bytes(part) for part in encoded(chunk))
                body["chunks"][i] = hashlib.sha256(data).hexdigest()
                (store / f"chunk-{body['chunks'][i][:32]}.safetensors").write_bytes(data)
        body["schema"] = 1
        state = body["skeleton"]["$dict"]["state"]["fields"]
        for part in (*state["pool"]["$tuple"], *state["buffers"]["$tuple"]):
            del part["fields"]["clients"]
        manifest.write_text(json.dumps(body | {"sha256": _digest_of(body)}))


def test_a_run_of_an_older_version_goes_on_but_cannot_forget(halfway, tmp_path):
    old = shutil.copytree(halfway, tmp_path / "old")
    as_format_1(old)
    with pytest.raises(RunError, match="E418") as error:
        withdraw(old, tmp_path / "new")
    assert "did not record it" in error.value.why
    whole = rescene.run("smoke", out=tmp_path / "whole", **SETTING).values
    assert rescene.run("smoke", out=old, **SETTING).values == whole


@pytest.mark.slow
def test_excluded_sites_are_never_asked_and_the_others_turns_stay(tmp_path):
    def turns(method, **more):
        out = tmp_path / f"{method}{len(more)}"
        extra = {"method.num_exemplars": 2} if method == "glfc" else {}
        rescene.run(
            "smoke",
            out=out,
            method=method,
            **{"federation.num_rounds": 4, "tasks.limit": 1, "model.width": 8} | extra | more,
        )
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [row["participants"] for row in rows if row["kind"] == "round"], rows

    everybody, _ = turns("fedavg")
    left, _ = turns("fedavg", **{"federation.exclude": [2]})
    assert any(2 in row for row in everybody) and not any(2 in row for row in left)
    assert all(len(row) == 2 for row in left)
    assert [a for a in everybody if 2 not in a] == [b for a, b in zip(everybody, left, strict=True) if 2 not in a]
    assert all(set(a) - {2} <= set(b) for a, b in zip(everybody, left, strict=True))
    joint, rows = turns("joint", **{"federation.exclude": [2]})  # asks all sites at once
    assert all("2" not in row["sites"] for row in rows if row["kind"] == "round")


@pytest.mark.parametrize("gone", [[4], [-1], [1, 1], [0, 1, 2, 3]])
def test_who_can_be_excluded(gone):
    with pytest.raises(ConfigError, match="federation.exclude"):
        resolve("smoke", {"federation.exclude": gone})


def test_the_experiment_without_a_site_has_a_folder_of_its_own_and_the_same_identity():
    from rescene.api import default_folder

    one, two = resolve("smoke"), resolve("smoke", {"federation.exclude": [1]})
    assert one.digest() == two.digest()
    assert default_folder(two).name == f"{default_folder(one).name}-without-1"
