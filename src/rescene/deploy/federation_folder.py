"""The folder of a federation: what `rescene deploy init` writes and the other commands read.

federation.yaml     name, address and sites, in the order of their numbers
plan.yaml           classes and tasks, where sites hold their own images (rescene deploy add-classes)
server/             certificates (ca.key and server.key are secret), database, logs, runs
app/                the bundle that Flower sends to the nodes: a shim, without any dependency
sites/<name>/       to be carried to the site: site.yaml, ca.crt, node.key (secret), node.pub, peers.pub (the public keys of
                    all sites, by which they know each other), a unit and a container file
                    (CONTAINERFILE says how to build and run a site in a container)
"""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import yaml

import rescene
from rescene.core.documents import parse_toml, read_yaml
from rescene.core.errors import ConfigError, RunError

UID = 10001
CONTAINERFILE = f"""\
# A site in a container: no root, images read-only, no way in. Build and run it in this folder (docker: the same without
# --format and --userns; without a GPU, torch's CPU build saves gigabytes):
#
#   podman build --format docker -t rescene-site -f Containerfile .
#   podman run -d --name rescene-site --restart=always --user $(id -u) --userns=keep-id \\
#     --read-only --tmpfs /tmp --cap-drop=all --security-opt=no-new-privileges \\
#     -v "$PWD":/site -v /data/images:/images:ro rescene-site
#
# In site.yaml:  data: {{path: /images}}.  This folder stays outside the image: it holds node.key, and state/ must outlive
# the container. No port is published; the site calls the server, so let it out to that address alone.
FROM python:3.11-slim
RUN pip install --no-cache-dir --no-deps "rescene=={rescene.__version__}" \
 && pip install --no-cache-dir --no-deps --require-hashes -r \
    "$(python -c 'import rescene; print(rescene.__path__[0])')/locks/deploy.txt" \
 && pip install --no-cache-dir "torch==2.13.0"
RUN useradd --uid {UID} --no-create-home --home-dir /tmp --shell /usr/sbin/nologin site
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER {UID}
WORKDIR /site
HEALTHCHECK --interval=60s --timeout=10s --start-period=120s --retries=3 \\
  CMD ["sh", "-c", "kill -0 $(sed -n 's/.*\\"pid\\": *\\\\([0-9]*\\\\).*/\\\\1/p' /site/processes/node.json)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["rescene", "deploy", "site", "/site", "--wait"]
"""
DOCKERIGNORE = "*\n!Containerfile\n"  # nothing of this folder, and node.key least of all, goes into an image

NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
APP = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "rescene-app"
version = "1.0.0"
description = "Imports the two apps of the rescene that is installed at each site"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = []  # anything here would be downloaded at every run

[tool.flwr.app]
publisher = "rescene"
fab-include = ["rescene_app/*.py"]

[tool.flwr.app.components]
serverapp = "rescene_app.server:app"
clientapp = "rescene_app.client:app"

[tool.flwr.app.config]
recipe = ""
out = ""
gather-s = 600.0
deadline-s = 3600.0
poll-s = 1.0
plan = ""
elsewhere = false
""",
    "rescene_app/__init__.py": "",
    "rescene_app/server.py": "from rescene.deploy import flower\n\napp = flower.server\n",
    "rescene_app/client.py": "from rescene.deploy import flower\n\napp = flower.client\n",
}
SITE = """\
# Who this site is, and where its images lie. The server can change none of this.
client: {client}            # the site's number in the federation
server: "{host}:{port}"
data: {{name: auto}}      # path: FOLDER, image_size: 32, ...; without a path the embedded fashion-mini
device: auto         # auto, cpu, cuda
# Images of your own, one folder per class:
# holds: own
# hold_out: 0.2        # of them are kept to test with
# labels:              # your folder's name: the federation's name; null leaves a folder out
#   katze: cat
# For a run through a lens that does not come with rescene; the operator gives its file out:
# lens: /path/to/lens.safetensors
# Limits that the server cannot lower; above them this site sends nothing:
# privacy:
#   epsilon_max: 8
#   min_sigma: 0.5
#   evaluation_sigma: 2  # noise on counts of the images that you keep to test with; without it no accuracy is told
#   max_participations: 20
"""
PROXY = """\
# Lets sites in and nobody else: the control API of Flower has no login and must stay on this machine.
server {{
    listen {host}:{port} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    client_max_body_size 32m;  # Flower sends in parts of 5 MB
    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{port};
        proxy_ssl_trusted_certificate {authority};
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_request_buffering off;
        proxy_read_timeout 120s;
    }}
    location / {{ return 403; }}
}}
"""
UNIT = """\
[Unit]
Description=rescene {role}
After=network-online.target time-sync.target

[Service]
ExecStart={program} -m rescene deploy {role} {argument} --wait
Restart=always
RestartSec=10
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={folder}

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class FederationFolder:
    """The folder of a federation on the operator's machine, and what ``federation.yaml`` says."""

    path: Path
    name: str
    host: str
    port: int
    sites: list[str]
    left: list[str] = field(default_factory=list)  # sites that withdrew: their uploads are gone, they are never asked
    plan_folder: str = "plan"  # name of the plan's run folder; another one once a site has left
    earlier_sums: int = 0  # how often the images of the plan were in secure sums that a site has left since

    @property
    def server(self) -> Path:
        """The server's folder."""
        return self.path / "server"

    @property
    def plan(self) -> Path:
        """The file with the plan: classes, tasks, rounds and sites."""
        return self.path / "plan.yaml"

    @property
    def plan_run(self) -> Path:
        """The one run folder of a plan: it grows with it, for months."""
        return self.server / "runs" / self.plan_folder

    @property
    def exclude(self) -> list[int]:
        """Numbers of the sites that left."""
        return [number for number, name in enumerate(self.sites) if name in self.left]

    @property
    def app(self) -> Path:
        """The folder of the Flower app."""
        return self.path / "app"

    def site(self, name: str) -> Path:
        """The folder that is made for one site, to be handed to it."""
        return self.path / "sites" / name

    @property
    def public_keys(self) -> dict[int, Path]:
        """The public key of each site, by its number."""
        return {number: self.site(name) / "node.pub" for number, name in enumerate(self.sites)}

    @staticmethod
    def open(path: Path) -> FederationFolder:
        """Read the folder. A folder without a readable ``federation.yaml`` is a ConfigError (E122)."""
        try:
            return FederationFolder(path.resolve(), **read_yaml(path / "federation.yaml"))
        except (OSError, TypeError):
            raise ConfigError(
                "E122",
                "this is not the folder of a federation",
                where=str(path),
                why="it has no federation.yaml that can be read",
                fix="rescene deploy init NAME --sites A,B,C",
            ) from None


def require_flower() -> None:
    """Raise a ConfigError (E121) if Flower is not installed."""
    if find_spec("flwr") is None:
        raise ConfigError(
            "E121",
            "Flower is not installed",
            why="only federations across sites need it",
            fix='pip install "rescene[deploy]"',
        )


def images_of(data: Path, sites: Sequence[str]) -> dict[str, Path]:
    """The folder of images of each site: ``data``/SITE in any case, with one folder per class. E560 where one is missing."""
    data = data.expanduser().resolve()
    found = {name: _folder_of(name, data) for name in sites}
    missing = [name for name, folder in found.items() if not any(map(Path.is_dir, _inside(folder)))]
    if missing:
        raise ConfigError(
            "E560",
            f"site {missing[0]} has no folder of images",
            where=str(found[missing[0]]),
            why="--data FOLDER holds one folder for each site, and in it one folder of images per class",
            fix="FOLDER/SITE/CLASS/, or leave out --data and write each site's folder into its site.yaml",
        )
    return found


def _folder_of(site: str, data: Path) -> Path:
    """The site's folder; one in another case if it is the only one."""
    alike = [path for path in _inside(data) if path.is_dir() and path.name.lower() == site.lower()]
    return alike[0] if len(alike) == 1 else data / site


def classes_of(images: Iterable[Path]) -> list[str]:
    """Names of the class folders of all sites that are not empty, sorted."""
    return sorted({path.name for folder in images for path in _inside(folder) if path.is_dir() and _inside(path)})


def _inside(folder: Path) -> list[Path]:
    """What lies in a folder, without hidden entries; nothing where there is no such folder."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def _site_yaml(client: int, address: str, port: int, images: Path | None) -> str:
    """site.yaml; with the site's own folder of images where it is known."""
    text = SITE.format(client=client, host=address, port=port)
    if images is None:
        return text
    lines = text.splitlines(keepends=True)
    own = {"data:": f"data: {{path: {json.dumps(str(images))}}}\n", "# holds: own": "holds: own\n"}
    return "".join(next((new for old, new in own.items() if line.startswith(old)), line) for line in lines)


def init(
    path: Path,
    sites: list[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    images: Mapping[str, Path] | None = None,
) -> FederationFolder:
    """Write the folder; refuse one that exists, so that no key is ever replaced unseen.

    ``images``: the folder of images of each site, where it lies on this machine (``images_of``).
    """
    require_flower()
    from rescene.deploy.keys import make_certificates, make_node_key, write_peers

    _check_names([path.name, *sites])
    check_path(path.resolve(), but="$")  # nginx reads it as the beginning of a variable, and knows no way to quote it
    address = _address(host)
    if path.exists() and any(path.iterdir()):
        raise ConfigError("E123", "the folder is not empty", where=str(path), fix="another NAME, or remove the folder")
    federation = FederationFolder(path.resolve(), path.name, host, port, sites)
    try:
        for folder in (federation.server, federation.app / "rescene_app", *map(federation.site, sites)):
            folder.mkdir(parents=True)
        federation.path.chmod(0o700)
        make_certificates(federation.server, federation.name, host)
        for client, name in enumerate(sites):
            make_node_key(federation.site(name))
            shutil.copy(federation.server / "ca.crt", federation.site(name))
            _write(federation.site(name), _site_files(client, address, port, (images or {}).get(name)))
        for folder in (federation.server, *map(federation.site, sites)):
            write_peers(folder / "peers.pub", federation.public_keys)
        service = unit("server", federation.path, sys.executable)
        _write(
            federation.server,
            {"nginx.conf": proxy(address, port, federation.server), "rescene-server.service": service},
        )
        _write(federation.app, APP)
        facts = {"name": path.name, "host": host, "port": port, "sites": sites}
        _write(path, {"federation.yaml": yaml.safe_dump(facts, sort_keys=False)})  # last: now it is one
    except OSError as error:
        raise ConfigError("E123", f"cannot write the folder: {error.strerror}", where=str(path)) from None
    return federation


def _site_files(client: int, address: str, port: int, images: Path | None) -> dict[str, str]:
    """What a site's folder holds beside keys and certificate."""
    return {
        "site.yaml": _site_yaml(client, address, port, images),
        "Containerfile": CONTAINERFILE,
        ".dockerignore": DOCKERIGNORE,
        "rescene-site.service": unit("site", Path("/srv/rescene/site"), "/srv/rescene/venv/bin/python"),
    }


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def unit(role: str, folder: Path, python: str) -> str:
    """The systemd unit that runs a server or a site."""
    program = systemd_word(python)
    if set(python) & set("\"'\\"):  # systemd takes these in an argument, but not in the program itself
        program = f"/usr/bin/env {_argument(python)}"
    return UNIT.format(role=role, program=program, folder=systemd_word(folder), argument=_argument(folder))


def proxy(address: str, port: int, server: Path) -> str:
    """The nginx site that lets sites in."""
    files = {"certificate": "server.pem", "key": "server.key", "authority": "ca.crt"}
    return PROXY.format(host=address, port=port, **{name: _in_quotes(server / file) for name, file in files.items()})


def systemd_word(text: Path | str) -> str:
    r"""One word of a unit.

    >>> print(systemd_word('/srv/a "b" 100%'))
    "/srv/a \"b\" 100%%"
    """
    return _in_quotes(text).replace("%", "%%")


def _argument(text: Path | str) -> str:
    """A word of a unit's command, where a dollar sign begins a variable."""
    return systemd_word(text).replace("$", "$$")


def _in_quotes(text: Path | str) -> str:
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def check_path(path: Path, but: str = "") -> None:
    """E357 for characters that no file of ours can hold, and for those in ``but``."""
    wrong = next((c for c in str(path) if c in but or unicodedata.category(c) in ("Cc", "Cs")), None)
    if wrong:
        raise RunError(
            "E357",
            f"the path has a character that cannot be used: {wrong!r}",
            where=ascii(str(path)),
            why="other programs read this path from files, and they would misread it",
            fix="another folder, or rename the one with that character",
        )


def _address(host: str) -> str:
    """The host as it stands before a port."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        if HOST.fullmatch(host):
            return host
    raise RunError(
        "E358", f"{host!r} is no host", why="a host is a DNS name or an IP address, without a port", fix="--host"
    )


def broken_apps(home: Path) -> dict[Path, str]:
    """What Flower has installed from our bundle and is not as we wrote it -> the file that differs.

    Flower takes an installed app as it is. A disk that was full while it was installed leaves an empty file there.
    """
    apps = sorted((home / "apps").glob("rescene.rescene-app.*"))
    wrong = {app: next((name for name, text in APP.items() if not _same(app / name, text)), None) for app in apps}
    return {app: name for app, name in wrong.items() if name is not None}


def _same(path: Path, text: str) -> bool:
    """Flower writes pyproject.toml anew, with the same meaning."""
    try:
        there = path.read_text(encoding="utf-8")
        return parse_toml(there, str(path)) == parse_toml(text, "the app") if path.suffix == ".toml" else there == text
    except (OSError, ValueError, ConfigError):
        return False


def _possible(name: str) -> str:
    """
    >>> _possible("Leeds"), _possible("9 (a)")
    ('leeds', 'such as north')
    """
    close = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:31]
    return close if NAME.fullmatch(close) else "such as north"


def _check_names(names: list[str]) -> None:
    wrong = [name for name in names if not NAME.fullmatch(name)]
    if wrong:
        raise ConfigError(
            "E124",
            f"{wrong[0]!r} cannot be a name",
            why="a name is lower-case letters, digits and hyphens, a letter first, at most 31",
            fix=_possible(wrong[0]),
        )
    if len(names) < 2 or len(set(names[1:])) != len(names) - 1:
        raise ConfigError("E124", "sites need names of their own", fix="--sites north,south,west")
