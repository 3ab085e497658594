"""A method is one file: nothing outside methods/, paper/ and recipes knows a single one.

Files for people may name methods, because people choose them: help texts and examples that are no Python (``examples.txt``,
``demos.yaml``), recipes, and the settings of the attacked runs (``audit/targets.yaml``, each a recipe with changes). So do the two
files that are written from the registry (``core/method_styles.json``) or tell the history of a name (``core/split_methods.json``).
"""

from pathlib import Path

import rescene
from rescene.methods import method_class
from shipped_methods import SHIPPED
from source_rules import method_mentions

ROOT = Path(rescene.__file__).parent
ALLOWED = {
    "audit/sums.py imports rescene.methods.moments",  # an attack on what this very method sends, read as its server reads it
    "engine/checkpoint.py imports rescene.methods.rescene",  # the address of a record in checkpoints of format 1; nothing is loaded
}


def test_no_method_is_known():
    titles = {name: method_class(name).title for name in SHIPPED}
    assert {"rescene", "fedavg", "raw-upload"} <= set(titles)
    assert set(method_mentions(ROOT, titles)) == ALLOWED
