"""Three people who have never seen this program: what they type in a fresh clone, what they see, how long it takes.

    python benchmarks/newcomers.py [student] [engineer] [reviewer]     writes results/newcomers/<who>.md

Each starts with nothing but the address of the repository and works in a clone and an environment of their own. A command that
fails ends the path, and the script with it. Long answers are cut in the middle; the time is that of the whole command.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "newcomers"
SHOWN = 22  # lines of an answer

SMALL = "tasks.count=3 federation.num_clients=2 federation.per_round=2"
STOP = "for part in works works/sites/north works/sites/south; do rescene deploy stop $part; done"
SITES = "federation.per_round=2 federation.evaluate_every=0 train.server_epochs=5 model.width=32 device=cpu"


def installed(extras: str = "") -> list[str]:
    return [
        f"git clone --quiet {shlex.quote(str(ROOT))} rescene && cd rescene",
        "python3 -m venv .venv && . .venv/bin/activate",
        f'pip install --quiet --disable-pip-version-check -c constraints.txt -e ".{extras}"',
    ]


def at_site(name: str) -> str:
    """What the person at a site writes into site.yaml."""
    return (
        f"sed -i 's|^# holds: own|holds: own|; s|^data:.*|data: {{path: '$PWD/{name}'}}|' works/sites/{name}/site.yaml"
    )


PATHS: dict[str, tuple[str, list[str]]] = {
    "student": (
        "A student adds a method: FedAvg whose sites pull less far from where they started.",
        [
            *installed("[dev]"),
            "rescene list methods",
            "rescene method new near_start",
            # The idea: the template's penalty on the weights becomes one on the distance from the broadcast weights.
            'sed -i \'s/extra = sum(.*/extra = sum((p - payload["model"][name]).square().sum() for name, p in '
            "net.named_parameters())/' near_start.py && grep -n 'extra' near_start.py",
            "python -m pytest -q --rescene near_start.py",
            "rescene run smoke --plugin near_start.py method=near_start method.penalty=0.1 --out runs/first",
            "rescene sweep demo --plugin near_start.py method=near_start,fedavg,rescene tasks.limit=2 --out runs/mine",
            "rescene table runs/mine --metric aa,forgetting --format latex",
            "rescene plot runs/mine --kind curves --out curves.pdf",
        ],
    ),
    "engineer": (
        "An engineer has a folder of images, later two factories with a folder each, and a new class every month.",
        [
            *installed("[deploy]"),
            "python examples/own_images.py images",
            "rescene data inspect images",
            f"rescene run demo data.path=images {SMALL} --out runs/shapes -q",
            "rescene export runs/shapes --to safetensors,pt2",
            "rescene predict runs/shapes/export/model.pt2 images/star --gallery stars.html | tail -n 5",
            "rescene deploy init works --sites north,south --port 9443",
            "cp -r images north && cp -r images south && rm north/*/*[02468].png south/*/*[13579].png",
            f"{at_site('north')} && {at_site('south')}",
            "rescene deploy add-classes works circle,cross --rounds 1 --image-size 32",
            "cat works/sites/north/site.yaml | head -n 8",
            "rescene deploy server works && rescene deploy site works/sites/north && rescene deploy site works/sites/south",
            "rescene deploy check works/sites/north --no-trial",
            f"rescene deploy run works demo {SITES} --deadline 120",
            "rescene deploy add-classes works star --rounds 1            # a month later",
            f"rescene deploy run works demo {SITES} --deadline 120",
            "rescene deploy status works",
            STOP,
        ],
    ),
    "reviewer": (
        "A reviewer checks a table: what is claimed, what was run, does it come out again.",
        [
            *installed(),
            "rescene paper list",
            "rescene paper table main | head -n 16",
            "rescene paper check main",
            "cat results/cifar10/rescene-beta0.5-s0/command.txt",
            "rescene method explain rescene | head -n 40",
            "rescene rerun results/fashion-mini/fedavg-s0 --out runs/again || true   # 5: a number differs",
            "rescene paper run safl-lite --only '*/0.5/fedaf' --seeds 0",
        ],
    ),
}


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    for who in sys.argv[1:] or PATHS:
        about, lines = PATHS[who]
        with tempfile.TemporaryDirectory() as spare:
            text, ok = walk(about, lines, Path(spare))
        (OUT / f"{who}.md").write_text(text)
        print(text)
        if not ok:
            return 1
    return 0


def walk(about: str, lines: list[str], home: Path) -> tuple[str, bool]:
    """The path as a page, and whether every command ended well."""
    told, total, ok = [], 0.0, True
    before = "true"  # what makes a shell look like the one that typed everything so far
    for line in lines:
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", f"{before} && {line}"], cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        seconds = time.monotonic() - begin
        total += seconds
        told.append(f"$ {line}\n{shown(done.stdout)}[{seconds:.1f} s]\n")
        if done.returncode:
            told.append(f"ended with {done.returncode}\n")
            ok = False
            break
        if line.startswith(("git clone", "python3 -m venv")):
            before = f"cd {home}/rescene" if "clone" in line else f"{before} && . .venv/bin/activate"
    if not ok:  # end what was started
        subprocess.run(["bash", "-c", f"{before} && {STOP}"], cwd=home, stdout=subprocess.DEVNULL)
    text = clean("\n".join(told), home)
    return f"# {about}\n\n{len(lines)} commands, {total / 60:.1f} minutes in all.\n\n```text\n{text}```\n", ok


def shown(answer: str) -> str:
    lines = [line.rstrip()[:160] for line in answer.splitlines()]
    if len(lines) > SHOWN:
        lines = [*lines[: SHOWN // 2], f"... {len(lines) - SHOWN} lines ...", *lines[-SHOWN // 2 :]]
    return "".join(f"{line}\n" for line in lines)


def clean(text: str, home: Path) -> str:
    """Without the places of this machine."""
    text = text.replace(f"{home}/rescene", "~/rescene").replace(str(home), "~").replace(str(ROOT), "REPOSITORY")
    return re.sub(r"Location '[^']*' is ignored[^\n]*\n|WARNING: [^\n]*\n", "", text)


if __name__ == "__main__":
    sys.exit(main())
