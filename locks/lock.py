"""Writes the lock: every package that the base and all extras need, in one version, with the hashes of all its files.

    make lock        takes the newest releases that pyproject.toml allows; needs a package index

The packages are chosen together, for Python 3.11 and newer on Linux (x86-64, arm64) and macOS (arm64), and written in five parts. Each part
begins with the part before it, so that whoever installs less still has the versions that were tested.
"""

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EVERY_EXTRA = tuple(PROJECT["project"]["optional-dependencies"])
PARTS = {
    "base": ((), "what `pip install rescene` brings, and what builds a checkout (make demo)"),
    "deploy": (("deploy",), "for a server or a site (the Containerfile that `rescene deploy init` writes)"),
    "dev": (("deploy", "dev"), "for tests and documentation (make test)"),
    "check": (
        ("deploy", "dev", "check"),
        "for linters of workflows and containers and for Flower's simulation (make check)",
    ),
    "all": (EVERY_EXTRA, "for every extra (make fresh, make audit)"),
}
HEADER = """\
# {name}.txt: {use}. Made by `make lock`; do not edit.
# torch is left out. Its files differ between CPU and GPU, and so would their hashes; constraints.txt has the version. Install:
#   pip install --no-deps --require-hashes -r {name}.txt && pip install torch=={torch} && pip install --no-deps rescene
"""


def compiled(extras: tuple[str, ...], *options: str) -> dict[str, str]:
    """The lines of the lock by package: those for several versions, one for each Python, belong together."""
    command = ["uv", "pip", "compile", "pyproject.toml", "-", "--quiet", "--universal", "--python-version", "3.11"]
    command += [
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--no-emit-package",
        "torch",
        "--no-emit-package",
        "torchvision",  # of timm; built for one build of torch
        "-c",
        "constraints.txt",
    ]
    command += [word for extra in extras for word in ("--extra", extra)]
    builders = "\n".join(PROJECT["build-system"]["requires"])
    done = subprocess.run([*command, *options], cwd=ROOT, input=builders, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = {}
    for block, name in re.findall(r"^(([a-z0-9-]+)==.*\n(?:    .*\n)+)", done.stdout, re.M):
        found[name] = found.get(name, "") + block
    return found


def main() -> None:
    torch = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    chosen, before, written = compiled(EVERY_EXTRA), "", set()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as whole:
        whole.write("".join(chosen.values()))
        whole.flush()
        for name, (extras, use) in PARTS.items():
            part = sorted(set(compiled(extras, "-c", whole.name)) - written)
            written.update(part)
            text = HEADER.format(name=name, use=use, torch=torch) + before + "".join(chosen[one] for one in part)
            (FOLDER / f"{name}.txt").write_text(text)
            before = f"-r {name}.txt\n"
            print(f"{name}.txt: {len(part)} packages of its own")


if __name__ == "__main__":
    main()
