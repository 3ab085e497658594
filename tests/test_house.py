"""The house stays readable: no name twice, short functions, and one folder that computes with epsilon."""

import ast
import re
from pathlib import Path

import pytest
import walk

import rescene
from source_rules import budget_computations, repeated_names

ROOT = Path(rescene.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
LONGEST, USUAL = 60, 25  # lines of a function: at most, and of nine in ten
STAYS, RETURNS = 15, 4  # of a reader who follows `condense` through its files (benchmarks/walk.py): at most
DOCUMENTED = 0.95  # share of what is public that has a docstring, at least
# these name the word only: the recipe's keys, texts for people, and records of what a run promised
NAMES_EPSILON = {"privacy", "config", "cli", "deploy", "report", "audit"}
RECORDS_EPSILON = {"core/results.py", "engine/results_writer.py", "engine/withdrawal.py", "data/inspection.py"}


def test_no_file_and_no_type_has_its_name_twice_across_folders():
    """``Model`` may: plug-ins of users import the weights from ``methods.base``, and their programs the opened file from ``use``."""
    assert set(repeated_names(ROOT)) == {"Model"}


def test_functions_are_short():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}: {node.name}")
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]
    lengths = sorted(length for length, _ in functions)
    assert [name for length, name in functions if length > LONGEST] == []
    assert lengths[int(0.9 * len(lengths))] <= USUAL


def test_few_places_name_epsilon():
    naming = {path.relative_to(ROOT) for path in TREES if re.search(r"\bepsilon", path.read_text(encoding="utf-8"))}
    strangers = {path.as_posix() for path in naming if path.parts[0] not in NAMES_EPSILON}
    assert strangers - RECORDS_EPSILON == set()


def test_one_folder_computes_with_epsilon_and_draws_noise():
    """``audit`` is left out because it measures epsilon: attacks prove lower bounds, and must know what was promised."""
    # where a point is drawn
    on_an_axis = re.compile(r"report/figures_tradeoffs.py:\d+ computes math.log2\(p.epsilon\)")
    assert [place for place in budget_computations(ROOT) if not on_an_axis.fullmatch(place)] == []


def _renames(tree):
    """Calls that give a file another name: os.replace, os.rename, Path.replace and Path.rename (one argument; str has two)."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"replace", "rename"}
        ):
            of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            if of_os or len(node.args) == 1 and not node.keywords:
                yield node.func.attr


def test_one_file_lets_a_file_take_the_place_of_another():
    """Else each writer has its own idea of what survives a crash. The ledger sets a damaged file aside, which replaces nothing."""
    found = {path.relative_to(ROOT).as_posix(): list(_renames(tree)) for path, tree in TREES.items()}
    assert {place: names for place, names in found.items() if names} == {
        "core/files.py": ["replace"],
        "privacy/ledger.py": ["rename"],
    }


@pytest.mark.parametrize(
    ("declared", "place"),
    [("\nRow = dict", "core/json_files.py"), ('ConfigDict(frozen=True, extra="forbid"', "core/hyperparameters.py")],
)
def test_a_row_and_a_frozen_section_are_declared_once(declared, place):
    found = [path for path in TREES if declared in path.read_text(encoding="utf-8")]
    assert [path.relative_to(ROOT).as_posix() for path in found] == [place]


def _base_methods(tree, known):
    """Names of the methods that each class of the file inherits from classes of the package: its overrides say nothing new."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            bases += [base.attr for base in node.bases if isinstance(base, ast.Attribute)]
            yield node, set().union(*(known.get(base, set()) for base in bases))


def _inherited():
    """Class name -> the methods that it has or inherits, over the whole package."""
    known = {"Module": {"forward"}, "Function": {"forward", "backward"}}  # of torch
    for _ in range(6):  # as deep as classes derive from one another
        for tree in TREES.values():
            for node, inherited in _base_methods(tree, known):
                own = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                known[node.name] = known.get(node.name, set()) | own | inherited
    return known


def _is_setter_or_overload(node):
    return any(ast.unparse(one).endswith((".setter", ".deleter", "overload")) for one in node.decorator_list)


def public_things():
    """Place and node of every module, and of every class, function and method without an underscore; not of overrides."""
    known = _inherited()
    for path, tree in TREES.items():
        place = path.relative_to(ROOT).as_posix()
        yield place, tree
        overridden = {node.name: inherited for node, inherited in _base_methods(tree, known)}
        for node in tree.body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            yield f"{place}:{node.lineno} {node.name}", node
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                is_public = isinstance(part, ast.FunctionDef) and not part.name.startswith("_")
                if is_public and part.name not in overridden[node.name] and not _is_setter_or_overload(part):
                    yield f"{place}:{part.lineno} {node.name}.{part.name}", part


def test_what_is_public_has_a_docstring():
    things = list(public_things())
    bare = [place for place, node in things if not ast.get_docstring(node)]
    assert len(bare) <= (1 - DOCUMENTED) * len(things), f"{len(bare)} of {len(things)} without: {bare}"


def test_a_walk_is_counted_by_hand():
    """Home, a file, home, the same two again (a loop, not counted), another file, and from there the first once more."""
    calls = [("home", "f"), ("a", "g"), ("a", "h"), ("home", "k"), ("a", "g"), ("home", "f"), ("b", "m"), ("a", "n")]
    found = walk.stays(calls)
    assert found == [("home", {"f"}), ("a", {"g", "h"}), ("home", {"k", "f"}), ("b", {"m"}), ("a", {"n"})]
    assert walk.returns(found) == [False, False, False, False, True]


@pytest.mark.slow
def test_condensation_is_read_in_few_files(tmp_path):
    found = walk.walk_of_condense(tmp_path / "run")
    assert {"training/condensation.py", "functional/matching.py"} <= {place for place, _ in found}
    assert len(found) <= STAYS and sum(walk.returns(found)) <= RETURNS
