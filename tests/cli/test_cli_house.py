"""What may not be in the command line: names of methods, computing with epsilon, imports of torch before a verb runs."""

import ast
from pathlib import Path

import rescene.cli
from rescene.methods import method_class, method_names

FILES = sorted(Path(rescene.cli.__file__).parent.glob("*.py"))
COMPUTES = {"epsilon_of", "total_epsilon", "replaced_epsilon", "sigma_for", "gaussian_epsilon", "largest_total"}
PROGRAM = method_names()[0]  # the program, its first method and the package share a name


def texts(path):
    """Every text in a file, also the parts of f-strings and docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_no_file_names_a_method():
    names = set(method_names())
    titles = {method_class(name).title for name in names - {PROGRAM}}
    found = [
        (path.name, text)
        for path in FILES
        for text in texts(path)
        if text in names - {PROGRAM}
        or any(f"method={name}" in text for name in names)
        or any(title in text.split() for title in titles if title.lower() != title and title != "Local")
    ]
    assert found == []


def test_no_file_computes_with_epsilon():
    used = [
        (path.name, node.id)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Name) and node.id in COMPUTES
    ]
    sums = [
        (path.name, ast.unparse(node))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.BinOp)
        and not isinstance(node.op, ast.BitOr)  # `float | None`
        and any(
            isinstance(part, ast.Name) and part.id in ("epsilon", "sigma", "delta") for part in (node.left, node.right)
        )
    ]
    assert used == [] and sums == []


def test_about_a_dozen_files_with_names_of_their_own():
    elsewhere = {path.name for path in FILES[0].parents[1].rglob("*.py") if path.parent != FILES[0].parent}
    assert len(FILES) <= 14 and {path.name for path in FILES} & elsewhere == {"__init__.py"}
