"""Does the package work on a bare machine? The wheel, alone and with each extra, in new environments; needs a package index.

    python benchmarks/fresh.py [newest] [onnx] ...     without words everything (make fresh), and the tables go to results/fresh/
    python benchmarks/fresh.py pythons                 the base with every Python that is on the path: seconds to the first result

locked: the versions of locks/, the base with hashes. newest: whatever the ranges in pyproject.toml allow today. oldest: the lower
ends of these ranges. torch is always the one of constraints.txt. In each environment the commands below run, away from the
checkout. An extra gets an environment of its own, so that none lends its packages to another.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "fresh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RELEASES = ("locked", "newest", "oldest")
PYTHONS = ("python3.11", "python3.12", "python3.13")
SMALL = "tasks.limit=1 federation.num_rounds=1"
PRIVATE = "smoke method=fedavg privacy.mechanism=dp-sgd privacy.epsilon=8 privacy.sampling_rate=0.25 model.norm=group"
NOTEBOOK = (
    "import nbclient, nbformat; book = nbformat.read('reading_a_run.ipynb', 4); nbclient.NotebookClient(book).execute()"
)


def tracked(name: str) -> list[str]:
    return [
        f"python -c 'import {name}'",
        f"rescene run smoke {SMALL} --log {name} --quiet --out with-{name}",
        f'test -n "$(ls with-{name}/{name})"',
    ]


CHECKS = {
    "base": [
        "rescene --help",
        "rescene run smoke --quiet --out run",
        "rescene report run",
        "python own_images.py images",
        "rescene data inspect images",
    ],
    "privacy": [
        f"rescene privacy {PRIVATE} --epsilon 8",
        f"rescene run {PRIVATE} {SMALL} --quiet --out private",
    ],
    "deploy": [f"rescene deploy rehearse {SMALL} --sites 2 --out rehearsal"],
    "docs": ["python -m sphinx -W -q -b html checkout/docs html"],
    "notebooks": [f'python -c "{NOTEBOOK}"'],
    "tensorboard": tracked("tensorboard"),
    "wandb": tracked("wandb"),
    "mlflow": tracked("mlflow"),
    "trackio": tracked("trackio"),
    "onnx": ["rescene export run --to onnx --out model", "rescene predict model/model.onnx images/star"],
    "all": ["rescene --help"],
}


class Failed(Exception):
    """A command did not end well; the message has its last lines."""


def say(command: str, env: Path, cwd: Path) -> str:
    """Run a line of shell with an environment first on the path and without what the checkout offers."""
    inside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    inside |= {
        "PATH": f"{env / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(command, shell=True, cwd=cwd, env=inside, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise Failed(f"{command}: exit status {done.returncode}\n{tail}")
    return done.stdout


class Machine:
    """One set of releases, its environments and the folder in which their commands run."""

    def __init__(self, releases: str, wheel: Path, folder: Path) -> None:
        self.releases, self.wheel, self.folder = releases, wheel, folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        for name in ("own_images.py", "reading_a_run.ipynb"):
            shutil.copy(ROOT / "examples" / name, self.work)
        for name in ("docs", "results", "README.md", "CHANGELOG.md", "examples"):  # what the documentation is made from
            place, kept = ROOT / name, self.work / "checkout" / name
            kept.parent.mkdir(exist_ok=True)
            if place.is_dir():
                shutil.copytree(place, kept, ignore=shutil.ignore_patterns("_build", "generated"))
            else:
                shutil.copy(place, kept)

    def environment(self, part: str) -> Path:
        """The base is installed once. An extra goes on from a copy of it, whose files are links: torch is large."""
        env = self.folder / part
        if part == "base":
            subprocess.run([sys.executable, "-m", "venv", env], check=True)
            if self.releases == "locked":
                self.install(env, f"--no-deps --require-hashes -r {ROOT}/locks/base.txt")
                self.install(env, f"-c {ROOT}/constraints.txt torch")
                self.install(env, f"--no-deps {self.wheel}")
            else:
                self.install(env, f"-c {self.constraints(part)} {self.wheel}")
            return env
        shutil.copytree(self.folder / "base", env, symlinks=True, copy_function=os.link)
        if part == "all":
            self.install(env, f"--no-deps --require-hashes -r {ROOT}/locks/all.txt")
        else:
            self.install(env, f"-c {self.constraints(part)} '{self.wheel}[{part}]'")
        self.install(env, f"--no-deps --force-reinstall {self.wheel}")  # the command `rescene` names its environment
        return env

    def install(self, env: Path, what: str) -> None:
        say(f"python -m pip install --quiet {what}", env, self.folder)

    def constraints(self, part: str) -> Path:
        """A file that holds pip to the releases of this machine."""
        if self.releases == "newest":
            return ROOT / "constraints.txt"
        found = self.folder / f"{part}.txt"
        torch = (ROOT / "constraints.txt").read_text()
        if self.releases == "locked":
            parts = (ROOT / "locks" / f"{name}.txt" for name in ("base", "deploy", "dev", "check", "all"))
            pins = re.findall(r"^[a-z0-9-]+==[^\\\n]*", "".join(path.read_text() for path in parts), re.M)
            found.write_text("\n".join([*pins, torch]))
        else:
            tool = self.folder / "uv"
            if not tool.exists():
                subprocess.run([sys.executable, "-m", "venv", tool], check=True)
                self.install(tool, "uv")
            extra = "" if part == "base" else f"--extra {part}"
            python = f"--python-version {platform.python_version()} --no-emit-package torch"
            lowest = (
                f"uv pip compile pyproject.toml {extra} --resolution lowest-direct {python} -c constraints.txt --quiet"
            )
            found.write_text(say(lowest, tool, ROOT) + torch)
        return found

    def row(self, part: str) -> tuple[str, str, str]:
        """Versions of what the part declares, the result, and every package of its environment."""
        begin = time.monotonic()
        try:
            env = self.environment(part)
            for command in ["python -m pip check", *CHECKS[part]]:
                say(command, env, self.work)
            result = "PASS"
        except Failed as failure:
            print(f"\n{self.releases}, {part}: {failure}\n", file=sys.stderr)
            result = "FAIL"
        result += f"  {time.monotonic() - begin:4.0f} s"
        everything = say("python -m pip list --format=freeze", self.folder / part, self.folder)
        have = {name.lower(): version for name, version in re.findall(r"(\S+)==(\S+)", everything)}
        wanted = PROJECT["dependencies"] if part == "base" else PROJECT["optional-dependencies"].get(part, [])
        names = [re.split(r"[^A-Za-z0-9-]", text)[0].lower() for text in wanted]
        return ", ".join(f"{name} {have.get(name, '-')}" for name in names), result, everything


def check(releases: str, parts: list[str], wheel: Path) -> bool:
    """One table, printed, and stored if it is whole."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(releases, wheel, Path(folder))
        head = f"{releases}: Python {platform.python_version()}, {platform.system()} {platform.machine()}"
        lines, listed = [head], []
        print(head, flush=True)
        for part in parts:
            versions, result, everything = machine.row(part)
            lines.append(f"{part:12} {result}  {versions}".rstrip())
            listed.append(f"\n[{part}]\n{everything}")
            print(lines[-1], flush=True)
            if part != "base":
                shutil.rmtree(machine.folder / part, ignore_errors=True)
    if {*CHECKS} - {"all"} <= {*parts}:  # a part of the table does not replace the whole one
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"{releases}.txt").write_text("\n".join(lines) + "\n" + "".join(listed))
    return not any("FAIL" in line for line in lines)


def first_result(python: str, wheel: Path) -> str:
    """From nothing to a report with one Python, as somebody does who has only the wheel. One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        env, seconds, begin, worked = Path(folder) / "env", dict[str, float](), time.monotonic(), _cpu()
        steps = {
            "install": f"python -m pip install --quiet -c {ROOT}/constraints.txt {wheel}",
            "help": "rescene --help",
            "run": "rescene run smoke --quiet --out run && test -s run/report.html",
        }
        try:
            say(f"{python} -m venv {env}", env, Path(folder))
            for name, command in steps.items():
                say(command, env, Path(folder))
                seconds[name] = time.monotonic() - begin - sum(seconds.values())
            result = "PASS"
        except Failed as failure:
            print(f"\n{python}: {failure}\n", file=sys.stderr)
            result = "FAIL"
        checked = say("python -m pip check || true", env, Path(folder)).strip() if "install" in seconds else "-"
        ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
        version, torch = say(f"python -c '{ask}'", env, Path(folder)).split() if "install" in seconds else (python, "-")
        parts = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
        total = f"{sum(seconds.values()):4.0f} s, {_cpu() - worked:.0f} CPU-seconds, load {os.getloadavg()[1]:.1f}"
        return f"{version:8} {result}  {total}  ({parts})  torch {torch}  pip check: {checked}"


def _cpu() -> float:
    """CPU-seconds of all commands so far: they tell more than the clock on a machine with other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def each_python(wheel: Path) -> bool:
    """The table of all Pythons that are here."""
    size = wheel.stat().st_size / 1e6
    lines = [
        f"from the wheel ({size:.2f} MB) to the first result: {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    ]
    print(lines[0], flush=True)
    for python in filter(None, map(shutil.which, PYTHONS)):
        lines.append(first_result(python, wheel))
        print(lines[-1], flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "pythons.txt").write_text("\n".join(lines) + "\n")
    return not any("FAIL" in line for line in lines)


def main() -> int:
    words = set(sys.argv[1:])
    only_pythons = words == {"pythons"}
    unknown = words - {*RELEASES, *CHECKS, "pythons"}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join([*RELEASES, *CHECKS, 'pythons'])}")
    parts = [part for part in CHECKS if part == "base" or part in words or not words & {*CHECKS}]
    good = True
    with tempfile.TemporaryDirectory() as built:
        say(f"{sys.executable} -m pip wheel --quiet --no-deps --wheel-dir {built} {ROOT}", Path(built), Path(built))
        [wheel] = Path(built).glob("*.whl")
        if not words or "pythons" in words:
            good &= each_python(wheel)
        if only_pythons:
            return 0 if good else 1
        for releases in [one for one in RELEASES if one in words or not words & {*RELEASES}]:
            good &= check(releases, [part for part in parts if part != "all" or releases == "locked"], wheel)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
