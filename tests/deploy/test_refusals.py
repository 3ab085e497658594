"""A real link turns away whoever is not a site: one start, all refusals."""

import base64
import ssl
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from rescene.deploy.federation_folder import init
from rescene.deploy.keys import make_certificates, make_node_key
from rescene.deploy.processes import free_port, registered, replace_key, seats_of, start_server, stop

fleet = pytest.importorskip("flwr.proto.fleet_pb2", reason="this Flower has other messages")
keys = pytest.importorskip("flwr.supercore.primitives.asymmetric", reason="this Flower signs in another way")
heartbeat = pytest.importorskip("flwr.proto.heartbeat_pb2", reason="this Flower has other messages")

PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}


def key_of(folder):
    return load_ssh_private_key((folder / "node.key").read_bytes(), password=None)


def signed(key, late_s=0.0):
    """Headers as a node makes them, at another time if need be."""
    at = (datetime.now(UTC) - timedelta(seconds=late_s)).isoformat()
    signature = keys.sign_message(key, at.encode())
    values = {"flwr-public-key": keys.public_key_to_bytes(key.public_key()), "flwr-signature": signature}
    return PROTOBUF | {name: base64.b64encode(v).decode() for name, v in values.items()} | {"flwr-timestamp": at}


@pytest.mark.slow
def test_strangers_liars_and_the_late_are_refused(tmp_path):
    federation = init(tmp_path / "fed", ["north", "south"], port=free_port())
    north, south = (key_of(federation.site(name)) for name in federation.sites)
    stranger = ec.generate_private_key(ec.SECP384R1())
    (tmp_path / "other").mkdir()
    make_certificates(tmp_path / "other", "other", "localhost")
    address = f"https://localhost:{federation.port}/v1/fleet"
    try:
        start_server(federation)
        own, number = (
            ssl.create_default_context(cafile=federation.server / "ca.crt"),
            int(registered(federation)["north"]),
        )
        assert seats_of(federation)[number] == 0 and len(seats_of(federation)) == 2
        beat = heartbeat.SendNodeHeartbeatRequest()
        beat.node.node_id, beat.heartbeat_interval = number, 30.0
        active = lambda key: fleet.ActivateNodeRequest(  # noqa: E731
            public_key=keys.public_key_to_bytes(key.public_key()), heartbeat_interval=30.0
        )
        with httpx.Client(verify=own, trust_env=False) as link:

            def ask(verb, message, headers):
                body = message.SerializeToString(deterministic=True)
                return link.post(f"{address}/{verb}", content=body, headers=headers).status_code

            # the honest site, so refusals mean something
            assert ask("activate-node", active(north), signed(north)) == 200
            assert ask("send-node-heartbeat", beat, signed(north)) == 200
            assert ask("send-node-heartbeat", beat, PROTOBUF) == 401  # no key
            assert ask("send-node-heartbeat", beat, signed(stranger)) == 401  # a key that nobody registered
            assert ask("activate-node", active(stranger), signed(stranger)) >= 400
            assert ask("send-node-heartbeat", beat, signed(south)) == 401  # another site's key for this number
            assert ask("activate-node", active(north), signed(south)) == 401
            assert ask("send-node-heartbeat", beat, signed(north, late_s=400)) == 401  # recorded and sent again
            assert ask("send-node-heartbeat", beat, signed(north, late_s=-60)) == 401
            forged = signed(north) | {"flwr-timestamp": (datetime.now(UTC) + timedelta(seconds=1)).isoformat()}
            assert ask("send-node-heartbeat", beat, forged) == 401  # the signature is of another time
            assert ask("send-node-heartbeat", beat, signed(north)) == 200  # and it is still well
            for name in ("node.key", "node.pub"):
                (federation.site("north") / name).unlink()
            make_node_key(federation.site("north"))
            new = key_of(federation.site("north"))
            assert ask("activate-node", active(new), signed(new)) >= 400  # until the operator replaces it
            replace_key(federation, "north")
            assert ask("activate-node", active(new), signed(new)) == 200
            assert (
                ask("send-node-heartbeat", beat, signed(north))
                == 401
                <= ask("activate-node", active(north), signed(north))
            )
            assert number not in seats_of(federation) and sorted(seats_of(federation).values()) == [0, 1]
        foreign = ssl.create_default_context(cafile=tmp_path / "other" / "ca.crt")
        with (
            httpx.Client(verify=foreign, trust_env=False) as site,
            pytest.raises(httpx.ConnectError, match="CERTIFICATE"),
        ):
            site.post(f"{address}/send-node-heartbeat", headers=PROTOBUF)
        with httpx.Client(trust_env=False) as site, pytest.raises(httpx.HTTPError):
            site.post(f"http://localhost:{federation.port}/v1/fleet/send-node-heartbeat", headers=PROTOBUF)
    finally:
        stop(federation.server)
