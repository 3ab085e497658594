"""Experiments: run, sweep, resume, continue, rerun, cost, method, lens."""

from __future__ import annotations

import json
import keyword
import shlex
import sys
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from rescene.cli.shared_options import (
    AsJson,
    Elsewhere,
    FinishedRun,
    Log,
    MethodName,
    Out,
    Overrides,
    Plugin,
    Quiet,
    RecipeName,
    ServerGflops,
    complete_override,
    plugin_words,
    run_config,
    verb_group,
)
from rescene.cli.start_verbs import list_things
from rescene.cli.terminal import interruptible, print_rows, teller
from rescene.core.documents import parse_yaml
from rescene.core.errors import ConfigError, command
from rescene.core.json_files import Row, json_object
from rescene.core.recipe_keys import flatten
from rescene.core.run_state import is_done

method_app = verb_group("List the methods, explain one, or start one of your own.")
lens_app = verb_group("List the lenses, make one from procedural pictures, or take a network of your own.")
LensFile = Annotated[Path, typer.Option("--out", help="safetensors file to write")]
FOR_OWN_IMAGES = "own"  # the recipe that only makes sense with images of the user's own
NOISED = (
    "This run adds noise for privacy. The noise comes from the operating system on purpose, never from the seed "
    "(docs/privacy.md), so a repetition has other numbers. Only a run with privacy.noise=seeded repeats, and that protects nobody."
)
SKELETON = '''"""{title}: one line on the idea.

    server: broadcast theta
    client: train on local images; send theta_k and n_k
    server: average
"""

from dataclasses import replace
from typing import ClassVar

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import UploadKind
from rescene.core.verification import Verified
from rescene.functional import weighted_average
from rescene.methods import Method, ModelState, register
from rescene.methods.base import weights_of
from rescene.training import Batch, cross_entropy, fit_shard


@register
class {title}(Method):
    name: ClassVar[str] = "{name}"
    title: ClassVar[str] = "{title}"
    paper: ClassVar[str] = "yours"
    leaves_site: ClassVar[str] = "model weights and the number of local images"
    leaves_in_short: ClassVar[str] = "weights"
    uploads: ClassVar[UploadKind] = "weights"  # the kind of what leaves: images, weights, generator, sums or nothing
    # what it was compared with, for example Verified("hand computation", "test_{name}.py::test_a_step", "1e-6, a step")
    verified: ClassVar[tuple[Verified, ...]] = ()

    penalty: float = hyper(0.0, "lambda", "[ours]", "weight of the extra term", ge=0)

    def client_round(self, payload, shard, client_state, rng):
        if len(shard) == 0:
            return {{"num_images": 0}}, client_state
        net = shard.net(payload["model"])

        def loss(net, batch: Batch):
            extra = sum(parameter.square().sum() for parameter in net.parameters())
            return cross_entropy(net, batch) + self.penalty * extra

        fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device), loss)
        return {{"model": weights_of(net), "num_images": len(shard)}}, client_state

    def server_round(self, state: ModelState, uploads, round, federation, rng):
        senders = [upload for upload in uploads.values() if upload["num_images"]]
        if not senders:
            return state
        models, sizes = [u["model"] for u in senders], [u["num_images"] for u in senders]
        return replace(state, model=weighted_average(models, sizes))
'''

TEST = '''"""{title} keeps the contract that every method keeps."""

import pytest
from {name} import {title}

from rescene.testing.conformance import CHECKS
from rescene.training import Training


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(check):
    check({title}(train=Training(local_epochs=1, server_epochs=1, batch_size=8)))
'''


def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would run; run nothing")] = False,
    log: Log = "",
    elsewhere: Elsewhere = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Run one experiment. The same command continues one that was interrupted."""
    from rescene.cli.running import plan_run, run_one
    from rescene.config import resolve

    try:
        resolved = resolve(recipe, overrides or [])
    except ConfigError as error:
        several = [text for text in overrides or [] if "," in text and repr(text.partition("=")[2]) in error.what]
        if several:
            error.fix = f"a run for each value: {_as_sweep(recipe, overrides or [])}"
        raise
    if dry_run:
        plan_run(resolved, out, as_json)
        return
    data = resolved.recipe.data
    if resolved.name == FOR_OWN_IMAGES and data.path is None and data.name == "auto":
        teller(quiet)("no data.path: built-in images (fashion-mini). Your own: rescene run own data.path=FOLDER")
    interruptible(lambda: run_one(resolved, out, quiet, as_json, log=log, elsewhere=elsewhere))


def _as_sweep(recipe: str, overrides: list[str]) -> str:
    """The command that takes each of several values, for somebody who gave them to ``run``."""
    seeds = [word for text in overrides if text.startswith("seed=") for word in ("--seeds", text.removeprefix("seed="))]
    return command("sweep", recipe, *(text for text in overrides if not text.startswith("seed=")), *seeds)


def sweep(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=a,b,c: every combination; also method=all", autocompletion=complete_override),
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="seeds, separated by commas, such as 0,1,2")] = "0",
    out: Annotated[Path | None, typer.Option("--out", help="folder for the cells (default: runs/<recipe>)")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="how many runs at the same time (default: 1, or one per GPU)")
    ] = None,
    gpus: Annotated[str, typer.Option("--gpus", help="GPUs that runs take in turn, such as 0,1")] = "",
    slurm: Annotated[bool, typer.Option("--slurm", help="run each cell as a job of a SLURM cluster")] = False,
    slurm_set: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm-set", help="partition=, account=, qos=, constraint=, minutes=, cpus=, gpus=, mem_gb=, at_once="
        ),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option("--search", min=1, help="try so many settings, chosen by Optuna; also key=log:0.001..0.1"),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", help="with --search: aa, aia, balanced_accuracy, worst_task")
    ] = "aa",
    plan: Annotated[bool, typer.Option("--plan", help="list the cells and what they will cost; run nothing")] = False,
    log: Log = "",
    elsewhere: Elsewhere = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Run a grid of experiments times seeds. Finished cells are skipped; exit code 4 if one fails."""
    from rescene.cli.running import SweepOptions, plan_sweep, run_search, run_sweep
    from rescene.trackers import open_trackers

    open_trackers(log)  # a tracker that is not there is told before anything runs
    asked, plugins = list(overrides or []), tuple(str(path.resolve()) for path in plugin or ())
    how = SweepOptions(jobs, gpus, slurm, tuple(slurm_set or ()), log, plugins, elsewhere, quiet, as_json)
    if plan:
        plan_sweep(recipe, asked, seeds, out, search, metric, how)
    elif search:
        interruptible(lambda: 4 if run_search(recipe, asked, seeds, out, search, metric, how) else 0)
    else:
        interruptible(lambda: 4 if run_sweep(recipe, asked, seeds, out, how) else 0)


def resume(
    folder: Annotated[Path, typer.Argument(help="run folder to continue")],
    log: Log = "",
    elsewhere: Elsewhere = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Continue an interrupted run."""
    from rescene.cli.running import run_one
    from rescene.config import resolve

    config = run_config(folder)
    interruptible(
        lambda: run_one(resolve(config), folder, quiet, as_json, log=log, elsewhere=elsewhere),
        command("resume", folder, *plugin_words(plugin)),
    )


def continue_run(
    folder: FinishedRun,
    growth: Annotated[
        list[str] | None,
        typer.Argument(
            help="'tasks+=[[new, classes]]' and data.path=FOLDER; without tasks+ all new classes are one task"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder in which the run goes on (default: RUN-continued)")
    ] = None,
    log: Log = "",
    elsewhere: Elsewhere = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Add new classes or domains to a finished run, and go on with them in a copy of it."""
    from rescene.cli.progress import watch_looks
    from rescene.cli.running import run_one
    from rescene.engine.continuation import continued

    with watch_looks(quiet or as_json):
        resolved, target = continued(folder, *_growth(growth or []), out)
    interruptible(
        lambda: run_one(resolved, target, quiet, as_json, log=log, elsewhere=elsewhere),
        command("resume", target, *plugin_words(plugin)),
    )


def _growth(words: list[str]) -> tuple[list[list[str]] | None, str | None]:
    """New tasks and the place of their images, from the words behind ``rescene continue RUN``.

    >>> _growth(["tasks+=[[boots, sandals], [gloves]]", "data.path=may"])
    ([['boots', 'sandals'], ['gloves']], 'may')
    >>> _growth(["tasks+=[boots, 9]"])
    ([['boots', '9']], None)
    """
    tasks, path = None, None
    for word in words:
        key, equals, value = word.partition("=")
        if key == "data.path" and value:
            path = value
        elif key == "tasks+" and equals:
            tasks = _named_tasks(parse_yaml(value, "tasks+"))
        else:
            raise ConfigError(
                "E509",
                f"{key!r} cannot change in a run that goes on",
                why="what ran stays true, so only tasks and images may be new",
                fix="'tasks+=[[new, classes]]', data.path=FOLDER; for anything else a new run",
            )
    return tasks, path


def _named_tasks(value: Any) -> list[list[str]]:
    """A list of lists of names; a plain list of names is one task."""
    rows = value if isinstance(value, list) else [value]
    rows = rows if any(isinstance(row, list) for row in rows) else [rows]
    names = [name for row in rows if isinstance(row, list) for name in row]
    if not all(isinstance(row, list) for row in rows) or not all(type(name) in (str, int) for name in names):
        raise ConfigError(
            "E511",
            "the new tasks are not lists of names",
            where="tasks+",
            why="a name such as yes, 1.0 or null needs quotes",
            fix="""'tasks+=[[boots, sandals], ["yes"]]'""",
        )
    return [[str(name) for name in row] for row in rows]


def rerun(
    folder: FinishedRun,
    out: Annotated[Path | None, typer.Option("--out", help="folder for the repetition (default: RUN-again)")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Repeat a finished run and compare every number; exit code 5 if one differs."""
    interruptible(lambda: 0 if _repeat(folder, out, quiet, as_json) else 5)


def _repeat(folder: Path, out: Path | None, quiet: bool, as_json: bool) -> bool:
    """Run the recipe of a finished run again in a folder beside it. True if every number is the same."""
    from rescene.api import load
    from rescene.cli.running import run_one
    from rescene.config import resolve

    before = load(folder)
    config = run_config(folder)
    if before.record.forgotten:
        raise ConfigError(
            "E163",
            "a run that forgot a site cannot be repeated from its recipe alone",
            where=str(folder),
            why="its recipe is that of a run which never saw the site",
            fix="rescene rerun the run it was made from, then rescene forget",
        )
    target = out or _beside(folder)
    if target.resolve() == folder.resolve():
        raise ConfigError("E186", "a run cannot be repeated in its own folder", where="--out", fix="another --out")
    run_one(resolve(config), target, quiet, as_json=False, told=not as_json)
    history = {"continued"}  # how the run came to its tasks, not what came out
    told = [{k: v for k, v in one.values.items() if k not in history} for one in (before, load(target))]
    then, now = (flatten(values, into_lists=True) for values in told)
    known = {key: value for key, value in now.items() if key in then}  # the others are newer than that run
    numbers = _differences(then, known)
    machines = _differences(*(json_object(path / "env.json", []) for path in (folder, target)))
    if as_json:
        facts = {"folder": str(target), "identical": not numbers, "numbers": numbers, "environment": machines}
        print(json.dumps(facts))
    else:
        _print_differences(numbers, machines)
        if numbers and _noised(before.record.config):
            print(f"\n{NOISED}")
    return not numbers


def _noised(config: Row) -> bool:
    """Whether the run drew noise that no seed repeats."""
    private = config.get("privacy") or {}
    return bool(private.get("mechanism", "none") != "none" and private.get("noise", "os") == "os")


def _print_differences(numbers: list[Row], machines: list[Row]) -> None:
    if not numbers:
        print("\nidentical: every number of results.json is the same")
    else:
        print(f"\n{len(numbers)} numbers of results.json differ:")
        print_rows(numbers[:20])
    if machines:
        print("\nother differences:")
        print_rows(machines)


def _beside(folder: Path) -> Path:
    """RUN-again, RUN-again2, ...: the first that holds no finished run."""
    names = (folder.with_name(f"{folder.name}-again{n if n > 1 else ''}") for n in count(1))
    return next(path for path in names if not is_done(path))


def _differences(before: Row, after: Row) -> list[Row]:
    keys = dict.fromkeys([*before, *after])
    return [{"what": k, "before": before.get(k), "now": after.get(k)} for k in keys if before.get(k) != after.get(k)]


def cost(
    recipe: RecipeName,
    overrides: Overrides = None,
    uplink_mbps: Annotated[float, typer.Option("--uplink-mbps", help="a site's upload speed in Mbit/s")] = 20.0,
    client_gflops: Annotated[
        float | None, typer.Option("--client-gflops", help="a site's speed in GFLOP/s (default: this device's)")
    ] = None,
    server_gflops: ServerGflops = None,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Say what a run will cost before it runs: FLOPs, bytes, state, time per round, time on this device."""
    from rescene.cli.costing import show_cost
    from rescene.config import resolve

    show_cost(resolve(recipe, overrides or []), uplink_mbps, client_gflops, server_gflops, as_json)


@method_app.command("list")
def list_methods(as_json: AsJson = False, plugin: Plugin = None) -> None:
    """List the methods, as `rescene list methods` does."""
    list_things("methods", as_json=as_json)


@method_app.command("explain")
def explain(method: MethodName, as_json: AsJson = False, plugin: Plugin = None) -> None:
    """Say what a method does, what leaves the site, and its hyperparameters with their place in the paper."""
    facts, rows = explain_method(method)
    if as_json:
        print(json.dumps({**facts, "hyperparameters": rows}))
        return
    for key, value in facts.items():
        print(f"{key}: {value}")
    print()
    print_rows(rows)


def explain_method(name: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Facts about a method, and a row for each of its hyperparameters."""
    from rescene.core.verification import NOT_VERIFIED, in_full
    from rescene.methods import method_class
    from rescene.methods.nominal_cost import compute_facts

    method = method_class(name)
    facts = {
        "method": f"{method.title} ({method.name})",
        "paper": method.paper,
        "leaves the site": method.leaves_site,
        "client remembers": method.remembers,
        "verified": "; ".join(in_full(method.verifications())) or NOT_VERIFIED,
        **compute_facts(method.compute),
        "about": (sys.modules[method.__module__].__doc__ or "").strip(),
    }
    return facts, method.table()


@method_app.command("new")
def new_method(
    name: Annotated[str, typer.Argument(help="lower-case name")],
    folder: Annotated[Path, typer.Option("--in", help="folder for the method and its test")] = Path("."),
) -> None:
    """Write a new method in one file, and its test. Existing files are never overwritten."""
    from rescene.methods import method_names

    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(
            "E111",
            f"{name!r} cannot be a method's name",
            why="it begins with a lower-case letter and has lower-case letters, digits and _ only",
            fix="my_method",
        )
    if name in method_names():
        raise ConfigError("E111", f"{name!r} cannot be a method's name", why="it is taken", fix="choose another name")
    title = "".join(part.capitalize() for part in name.split("_"))
    files = {folder / f"{name}.py": SKELETON, folder / f"test_{name}.py": TEST}
    for path in files:
        if path.exists():
            raise ConfigError("E112", f"{path} exists already", fix="choose another name or folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text.format(name=name, title=title), encoding="utf-8")
        print(path)
    print(f"try: {command('run', 'smoke', '--plugin', folder / f'{name}.py', f'method={name}')}")
    print(f"check: {shlex.join(['python', '-m', 'pytest', str(folder / f'test_{name}.py')])}")
    if find_spec("pytest") is None:
        print("The check needs pytest, which is not installed: pip install pytest")


@lens_app.command("list")
def lens_list(
    lenses: Annotated[
        list[str] | None, typer.Argument(help="names or files; without one, the lenses of the package")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List each lens with its hash, its size and what it was made from."""
    from rescene.lens import BUILT_IN, open_lens

    print_rows([open_lens(name).about() for name in lenses or BUILT_IN], as_json)


@lens_app.command("seen")
def lens_seen(
    clear: Annotated[bool, typer.Option("--clear", help="remove all of it; the next run computes it again")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is cached: features of images in simulations, and lenses that were made on first use."""
    from rescene.lens.feature_cache import FeatureCache, users_own
    from rescene.lens.lens import lens_folder

    rows = []
    for what, kept in (("features", users_own()), ("lenses", FeatureCache(lens_folder()))):
        found = kept.files()
        rows.append({"kept": what, "files": len(found), "bytes": sum(size.st_size for _, size in found)})
        rows[-1] |= {"folder": str(kept.folder)} | ({"freed": kept.clear()} if clear else {})
    print_rows(rows, as_json)


@lens_app.command("take")
def lens_take(
    source: Annotated[str, typer.Argument(help="timm:NAME@CHECKPOINT, FILE.onnx or FILE.pt2")],
    out: LensFile,
    made_from: Annotated[
        str | None, typer.Option(help="which images the network was trained on; reports and model cards say it")
    ] = None,
    mean: Annotated[
        tuple[float, float, float], typer.Option(help="mean of each channel, for an ONNX network that takes floats")
    ] = (0, 0, 0),
    std: Annotated[
        tuple[float, float, float], typer.Option(help="standard deviation of each channel, for the same networks")
    ] = (1, 1, 1),
    trust: Annotated[bool, typer.Option("--trust", help="open a .pt2 file, which can run code")] = False,
) -> None:
    """Make a lens from a frozen network of your own. The file goes to every site."""
    from rescene.lens.lens import read_lens, take, write_content

    _check_out(out)
    write_content(take(source, made_from, trust, mean, std), out)
    print(f"{out}: {read_lens(out, out.stem).words()}")


def _check_out(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError("E137", "a lens is one .safetensors file", where=str(out), fix="--out my-lens.safetensors")


@lens_app.command("make")
def lens_make(
    out: LensFile,
    seed: Annotated[int, typer.Option(help="seed of everything random")] = 0,
    small: Annotated[bool, typer.Option("--small", help="make a weak lens in minutes on a CPU, to try it")] = False,
    steps: Annotated[
        int | None, typer.Option(help="number of training steps (default: as for `leaves`)", min=1)
    ] = None,
) -> None:
    """Make a lens from procedural pictures only, in about 15 minutes on a large GPU. The defaults make `leaves`."""
    import torch

    from rescene.lens.contrast import SMALL, Contrast
    from rescene.lens.leaves import VERSION
    from rescene.lens.lens import read_lens, write_lens
    from rescene.lens.making import SMALL_MEASURING, Measuring, make_lens

    _check_out(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contrast, measuring = (SMALL, SMALL_MEASURING) if small else (Contrast(), Measuring())
    contrast = contrast.taking(steps) if steps else contrast
    lens = make_lens(
        contrast, measuring, seed, device, lambda step, loss: print(f"step {step:,}  loss {loss:.3f}", flush=True)
    )
    made_from = (
        f"procedural pictures only (dead leaves, version {VERSION}, seed {seed}): {contrast.num_steps:,} steps of contrast on "
        f"{contrast.num_pictures:,} pictures, {measuring.num_patches:,} patches; no photograph"
    )
    write_lens(lens, made_from, out)
    made = read_lens(out, out.stem)
    print(f"{out}: {made.num_bytes:,} bytes, SHA-256 {made.sha256}")
