"""Keys and certificates of a federation: one authority, one certificate for the server, one key for each site."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rescene.core.errors import RunError

VALID = timedelta(days=825)
Key = ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, name: str, host: str) -> None:
    """ca.crt, ca.key, server.pem and server.key, valid for ``host`` and for this machine's loopback."""
    authority, server = _new_key(), _new_key()
    issuer = _name(f"{name} authority")
    root = (
        _certificate(issuer, issuer, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA384())
    )
    hosts = dict.fromkeys([host, "localhost", "127.0.0.1"])
    leaf = (
        _certificate(_name(host), issuer, server)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.crt").write_bytes(root.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(leaf.public_bytes(Encoding.PEM))
    for file, key in (("ca.key", authority), ("server.key", server)):
        write_secret(folder / file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def make_node_key(folder: Path) -> None:
    """node.key and node.pub as ssh-keygen writes them; Flower takes no other kind."""
    key = _new_key()
    write_secret(folder / "node.key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (folder / "node.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def write_peers(path: Path, public: Mapping[int, Path]) -> None:
    """peers.pub: the public keys of all sites, each with its site's number, as ssh writes a list of keys."""
    rows = [" ".join([*file.read_text().split()[:2], str(client)]) for client, file in sorted(public.items())]
    path.write_text("".join(f"{row}\n" for row in rows))


def replace_peer(path: Path, client: int, public: Path) -> None:
    """Put another public key into peers.pub for one site; those of the others stay."""
    rows = {int(row.split()[-1]): row for row in path.read_text().splitlines() if row.strip()}
    rows[client] = " ".join([*public.read_text().split()[:2], str(client)])
    path.write_text("".join(f"{rows[number]}\n" for number in sorted(rows)))


def read_peers(path: Path) -> dict[int, ec.EllipticCurvePublicKey]:
    """The public key of each site by its number; RunError E440 if the list is missing or makes no sense."""
    try:
        rows = [row.split() for row in path.read_text().splitlines() if row.strip()]
        found = {int(number): load_ssh_public_key(f"{kind} {key}".encode()) for kind, key, number in rows}
        if len(found) != len(rows) or not all(isinstance(key, ec.EllipticCurvePublicKey) for key in found.values()):
            raise ValueError("a site stands there twice, or a key is of another kind")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        fix = "copy server/peers.pub of the federation to this place; `rescene deploy server` writes it"
        raise _unreadable("the list of the sites' public keys", path, error, fix) from None
    return found  # type: ignore[return-value]


def read_node_key(folder: Path) -> Key:
    """The site's own long-lived key."""
    path = folder / "node.key"
    try:
        found = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise _unreadable("the site's own key", path, error, "put back the node.key of this site") from None
    return found


def _unreadable(what: str, path: Path, error: Exception, fix: str) -> RunError:
    told = f"{what} cannot be read, so this site takes part in no sum"
    return RunError("E440", told, where=str(path), why=str(error), fix=fix)


def write_secret(path: Path, data: bytes) -> None:
    """A new file that nobody else can read, at no moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(subject: x509.Name, issuer: x509.Name, key: Key) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    """What the key may do: the authority's signs certificates, the server's proves who it is."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
