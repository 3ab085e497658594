"""What a user of rescene installs: a bill of materials for machines, and a list of licences for people.

    python release/dependencies.py sbom FILE       CycloneDX 1.6 JSON from the locks: versions and hashes, base and deploy
    python release/dependencies.py licences        writes release/licences.md from the packages that are installed here

torch is not in the locks, because its files differ between CPU and GPU; its version is in constraints.txt.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

ROOT = Path(__file__).parents[1]
PARTS = ("base", "deploy")  # what runs at users and sites; the other parts are for developers
SPDX = {  # what packages write, where it is no SPDX expression
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "MIT License": "MIT",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
BSD = "BSD-3-Clause"
STATED = {  # read in the licence files: the metadata says "BSD", or the package is for Windows only and not installed here
    **dict.fromkeys(("colorama", "contourpy", "cycler", "jinja2", "kiwisolver", "mpmath", "prompt-toolkit"), BSD),
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "sympy": "BSD-3-Clause AND MIT",  # MIT: its part from latex2sympy
}
UNKNOWN = "unknown"


def locked(part: str) -> dict[str, tuple[str, list[str]]]:
    """Name -> version and SHA-256 of all its files. Of several versions, one for each Python, the last counts."""
    text = (ROOT / "locks" / f"{part}.txt").read_text()
    entries = re.findall(r"^([a-z0-9-]+)==(\S+).*\n((?:    --hash=.*\n?)+)", text, re.M)
    return {name: (version, re.findall(r"sha256:([0-9a-f]{64})", hashes)) for name, version, hashes in entries}


def torch_version() -> str:
    """The version that is tested."""
    return str(re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[0])


def licence_of(package: Distribution) -> str:
    """As an SPDX expression, from the metadata that the package brings.

    The expression counts, then a short text of the licence field, then the classifiers.
    """
    said = package.metadata.json
    if expression := said.get("license_expression"):
        return str(expression)
    named = [line.split(" :: ")[-1] for line in said.get("classifier", []) if line.startswith("License ::")]
    named = [name for name in named if name != "OSI Approved"]
    short = str(said.get("license", "")).strip()
    if short and short != "UNKNOWN" and "\n" not in short and len(short) < 60:
        return SPDX.get(short, short)
    return " OR ".join(dict.fromkeys(SPDX.get(name, name) for name in named)) or UNKNOWN


def licence(name: str) -> str:
    """The licence that was read for a package, or else that of its metadata, if it is installed here."""
    try:
        return STATED.get(name) or licence_of(distribution(name))
    except PackageNotFoundError:
        return UNKNOWN


def bill() -> dict[str, Any]:
    """The CycloneDX document. It has no time stamp and no random number, so the same locks give the same file."""
    version = re.findall(r'^__version__ = "(\S+)"', (ROOT / "src/rescene/__init__.py").read_text(), re.M)[0]
    here = _component("rescene", version, "Apache-2.0") | {"type": "application"}
    parts = [_component("torch", torch_version(), licence("torch")) | {"scope": "required"}]
    for part in PARTS:
        for name, (number, hashes) in locked(part).items():
            one = _component(name, number, licence(name))
            files = [
                {"type": "distribution", "url": one["purl"], "hashes": [{"alg": "SHA-256", "content": value}]}
                for value in hashes
            ]
            parts.append(one | {"scope": "required" if part == "base" else "optional", "externalReferences": files})
    body = {
        "version": 1,
        "metadata": {"component": here},
        "components": sorted(parts, key=lambda one: str(one["name"])),
    }
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", **body}


def _component(name: str, version: str, terms: str) -> dict[str, Any]:
    url = f"pkg:pypi/{name}@{version}"
    one: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    return one if terms == UNKNOWN else one | {"licenses": [_stated(terms)]}


def _stated(terms: str) -> dict[str, Any]:
    """An SPDX expression, which programs understand, or else the name that people gave the licence."""
    try:
        return {"expression": str(canonicalize_license_expression(terms))}
    except InvalidLicenseExpression:
        return {"license": {"name": terms}}


def licences() -> str:
    """The list for people."""
    lines = [
        "# Licences of what rescene installs",
        "",
        "Made by `make licences` from the metadata of the locked packages. rescene itself is Apache-2.0; the images of",
        "Fashion-MNIST inside it are MIT (`src/rescene/data/embedded/LICENSE-fashion-mnist.txt`).",
    ]
    for part in PARTS:
        rows = {name: version for name, (version, _) in locked(part).items()}
        rows |= {"torch": torch_version()} if part == "base" else {}
        lines += ["", f"## {part}", "", "| package | version | licence |", "|---|---|---|"]
        for name, version in sorted(rows.items()):
            lines.append(f"| {name} | {version} | {licence(name)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["sbom"] and len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(json.dumps(bill(), indent=1) + "\n")
    elif sys.argv[1:] == ["licences"]:
        (ROOT / "release" / "licences.md").write_text(licences())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
