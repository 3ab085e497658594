"""What touches bytes from the network never unpickles, and unpacks nothing without a bound."""

import ast
from pathlib import Path

import pytest

import rescene

ROOT = Path(rescene.__file__).parent
FILES = sorted(
    [
        *(ROOT / "deploy").glob("*.py"),
        ROOT / "engine" / "wire.py",
        ROOT / "core" / "record.py",
        ROOT / "methods" / "upload_schema.py",
    ]
)
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "zipfile",
    "tarfile",
    "gzip",
    "bz2",
    "lzma",
}
CALLS = {"load", "loads", "decompress", "eval", "exec", "__import__", "import_module", "from_pretrained"}
ALLOWED = {"json.loads", "tomllib.loads", "yaml.safe_load"}


def faults(source):
    """What this code must not do, as 'line: words'."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rsplit(".", 1)[-1]
            # at most so many bytes
            bounded = last == "decompress" and len(node.args) == 2 and name != "zlib.decompress"
            if last in CALLS and name not in ALLOWED and not bounded:
                found.append(f"{node.lineno}: {name}")
            if any(keyword.arg in ("allow_pickle", "weights_only") for keyword in node.keywords):
                found.append(f"{node.lineno}: {name} of a format that can hold code")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_code_can_come_in(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load(f)", "torch.load(f, weights_only=True)",
        "np.load(f)", "np.load(f, allow_pickle=False)", "zlib.decompress(d)", "zlib.decompressobj().decompress(d)",
        "zlib.decompress(d, 15)", "import zipfile", "from gzip import decompress", "yaml.load(t)", "eval(t)", "marshal.loads(b)",
    ],
)  # fmt: skip
def test_the_rule_sees_what_it_forbids(source):
    assert faults(source)
