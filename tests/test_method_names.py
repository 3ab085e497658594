"""A method is one file: nothing outside methods/, paper/ and recipes names one."""

import ast
from pathlib import Path

import rescene
from rescene.methods import method_class, method_names

ROOT = Path(rescene.__file__).parent
MAY_NAME_METHODS = ("methods", "paper")
WORDS = {"rescene", "local", "target", "joint", "moments"}  # mean something else as well: the package, a loss, a step
# an attack needs its target: the sums that Moments makes, and the memory verbs of the two methods that have them
AUDITS = {("sums.py", "rescene.methods.moments"), ("lying_requests.py", "refed"), ("lying_requests.py", "fedcbdr")}
SHARED = {"base", "registry", "upload_schema", "nominal_cost", "averaging", "surrogates"}  # modules of no single method


def sources():
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] not in MAY_NAME_METHODS:
            yield path, ast.parse(path.read_text())


def built_in():
    return {name for name in method_names() if method_class(name).__module__.startswith("rescene.methods.")}


def constants(node):
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def is_about_a_method(node):
    """A comparison with something called name or method, in which even an ordinary word names a method."""
    text = ast.unparse(node) if isinstance(node, ast.Compare) else ""
    return "method.name" in text or "method['name']" in text


def test_no_method_is_named():
    known = built_in()
    assert {"rescene", "fedavg", "raw-upload"} <= known
    found = []
    for path, tree in sources():
        found += [(path.name, name) for name in constants(tree) & (known - WORDS)]
        found += [
            (path.name, name) for node in ast.walk(tree) if is_about_a_method(node) for name in constants(node) & known
        ]
    assert not set(found) - AUDITS


def test_no_method_is_imported():
    found = []
    for path, tree in sources():
        for node in ast.walk(tree):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("rescene.methods.") and module.split(".")[2] not in SHARED:
                found.append((path.name, module))
    assert not set(found) - AUDITS
