"""Styles of the built-in methods for pages of older runs, which did not record them: writes src/rescene/core/method_styles.json.

python benchmarks/method_styles.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rescene.core.method_style import method_key
from rescene.methods import method_class, method_names

STYLES = Path(__file__).parents[1] / "src/rescene/core/method_styles.json"


def styles() -> str:
    """What the file must hold: every method that comes with the package, by its key."""
    own = [cls for cls in map(method_class, method_names()) if cls.__module__.startswith("rescene.methods.")]
    return json.dumps({method_key(cls.name): asdict(cls.style()) for cls in own}, indent=1) + "\n"


if __name__ == "__main__":
    STYLES.write_text(styles(), encoding="utf-8")
