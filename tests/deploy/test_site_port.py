"""The port at which a site's node gives out its tasks: whoever lacks the secret takes no task and answers none."""

import json
import os
import ssl
import stat
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")

import httpx
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResultStatus

from rescene.deploy.executor import QuietExecutor
from rescene.deploy.federation_folder import APP, broken_apps, init
from rescene.deploy.processes import alive, free_port, running, start_site, stop, wait_for_port

auth = pytest.importorskip("flwr.supercore.auth", reason="this Flower has no secret for executors")
runtime = pytest.importorskip("flwr.proto.runtime_pb2", reason="this Flower has other messages")

PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@pytest.fixture
def site(tmp_path):
    """A site whose server is away: its node opens the port all the same. Yields its folder and the port, as ``ps`` shows it."""
    folder = init(tmp_path / "fed", ["north"], port=free_port()).site("north")
    try:
        start_site(folder)
        (node,) = [one for one in running(folder) if one.name == "node"]
        words = []
        while "--port" not in words:  # a moment after it has begun
            assert alive(node)
            words = Path(f"/proc/{node.pid}/cmdline").read_bytes().decode().split("\0")
        port = int(words[words.index("--port") + 1])
        wait_for_port(node, port)
        yield folder, port
    finally:
        stop(folder)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_without_the_secret_no_task_is_given_and_no_answer_taken(site):
    folder, port = site
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    with httpx.Client(verify=anyone, trust_env=False) as thief:
        home = next(url for url in (f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}") if answers(thief, url))
        paths = thief.get(f"{home}/openapi.json").json()["paths"]
        verbs = [path for path, ways in paths.items() if {"post", "put", "delete", "patch"} & {*ways}]
        assert {"/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/v1/runtime/push-task-output"} <= {*verbs}
        assert {verb: thief.post(home + verb, headers=PROTOBUF).status_code for verb in verbs} == dict.fromkeys(
            verbs, 401
        )
        guess = {"flwr-task-token": "00" * 32}
        assert thief.post(f"{home}/v1/runtime/push-messages", headers=PROTOBUF | guess).status_code == 401

        def asks(secret):
            request = runtime.AcquireTaskRequest()
            key = auth.derive_auth_secret(secret)
            proof = auth.create_superexec_auth_metadata(auth_secret=key, method=ACQUIRE, request=request)
            body = request.SerializeToString(deterministic=True)
            return thief.post(
                f"{home}/v1/runtime/acquire-task", content=body, headers=PROTOBUF | dict(proof)
            ).status_code

        assert asks(b"guessed") == 401
        assert asks((folder / "door" / "executor.secret").read_bytes()) == 200  # so the refusals mean something
    own = ssl.create_default_context(cafile=folder / "door" / "ca.crt")  # and nobody can stand in for the node
    with httpx.Client(verify=own, trust_env=False) as executor:
        assert executor.get(f"https://127.0.0.1:{port}/openapi.json").status_code == 200
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder / "door", *(folder / "door").iterdir()]}
    assert (modes["door"], modes["executor.secret"], modes["server.key"]) == (0o700, 0o600, 0o600)
    assert "ca.key" not in modes


def answers(client, url):
    try:
        return client.get(f"{url}/openapi.json").status_code == 200
    except httpx.HTTPError:
        return False


FAKE_APP = """#!{python}
import json, sys
words = sys.argv[1:]
with open(words[words.index("--token-file") + 1]) as file:
    print(json.dumps([words, file.read()]), flush=True)
"""


def install(app, texts=APP):
    """A copy of the app as Flower installs it."""
    (app / "rescene_app").mkdir(parents=True)
    for name, text in texts.items():
        (app / name).write_text(text)


def test_an_app_gets_its_token_off_the_command_line_and_never_a_broken_copy(tmp_path, monkeypatch, capfd):
    whole, broken = (tmp_path / "home" / "apps" / f"rescene.rescene-app.1.0.0.{n}" for n in ("0a", "0b"))
    install(whole)
    install(broken, APP | {"rescene_app/client.py": ""})  # the disk was full
    assert broken_apps(tmp_path / "home") == {broken: "rescene_app/client.py"}
    program = tmp_path / "bin" / "flwr-clientapp"
    program.parent.mkdir()
    program.write_text(FAKE_APP.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    spec = ExecutionSpec(
        task_type=TaskType.CLIENT_APP, runtime_api_address="127.0.0.1:1", token="5ec7e7", insecure=False,
        root_certificates_path="ca.crt", runtime_dependency_install=False, parent_pid=os.getpid(), suppress_output=False,
        task_id=1, fab_hash=None,
    )  # fmt: skip
    assert QuietExecutor().launch(spec).status == LaunchResultStatus.ACCEPTED
    os.wait()
    words, token = json.loads(capfd.readouterr().out)
    assert token == "5ec7e7" and not [word for word in words if token in word]
    assert [path.name for path in (tmp_path / "home" / "apps").iterdir()] == [whole.name]
