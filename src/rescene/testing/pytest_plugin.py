"""The conformance suite as a pytest plug-in: ``python -m pytest --rescene my_method.py`` checks every method of the file.

``--rescene-set num_steps=2`` sets a hyperparameter, so that a costly method is small enough to be checked in seconds.
pytest finds this module by itself (entry point ``pytest11``); it imports nothing heavy until the option is given.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--rescene`` and ``--rescene-set``."""
    group = parser.getgroup("rescene")
    group.addoption("--rescene", action="store_true", help="the named files hold methods: check them for conformance")
    group.addoption(
        "--rescene-set", action="append", default=[], metavar="KEY=VALUE", help="a hyperparameter for these checks"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, list[Any], list[Any]]:
    """Collect the named files as files of methods when ``--rescene`` is given."""
    others = yield
    config = parent.config
    named = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    if not config.getoption("rescene") or file_path.resolve() not in named:
        return others
    return [MethodFile.from_parent(parent, path=file_path)]


class MethodFile(pytest.File):
    """A file that registers methods."""

    def collect(self) -> Iterator[pytest.Item]:
        """One test for each method of the file and each conformance check."""
        from pydantic import ValidationError

        from rescene.core.errors import ResceneError
        from rescene.testing.conformance import CHECKS
        from rescene.training import Training

        train = Training(local_epochs=1, server_epochs=1, batch_size=8)
        try:
            given = _settings(self.config.getoption("rescene_set"))
            methods = [kind(train=train, **given) for kind in _methods(self.path)]
        except (ResceneError, ValidationError) as error:
            raise self.CollectError(str(error)) from None
        if not methods:
            raise self.CollectError(f"{self.path} registers no method; `rescene method new NAME` writes one that does")
        for method in methods:
            for check in CHECKS:
                yield Check.from_parent(self, name=f"{method.name}: {check.__name__}", check=check, method=method)


class Check(pytest.Item):
    """One promise of the contract, for one method."""

    def __init__(self, *, check: Callable[[Any], None], method: Any, **rest: Any) -> None:
        super().__init__(**rest)
        self.check, self.method = check, method

    def runtest(self) -> None:
        """Run the check."""
        self.check(self.method)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the check is, for pytest's report."""
        return self.path, None, self.name


def _methods(path: Path) -> list[Any]:
    import sys

    from rescene.core.plugins import load_plugin
    from rescene.methods import Method

    load_plugin(path)
    found = vars(sys.modules[path.stem]).values()
    return [
        kind for kind in found if isinstance(kind, type) and issubclass(kind, Method) and kind.__module__ == path.stem
    ]


def _settings(texts: list[str]) -> dict[str, Any]:
    from rescene.core.documents import parse_yaml
    from rescene.core.errors import ConfigError

    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not equals or not key.isidentifier():
            raise ConfigError("E106", f"cannot read the setting {key!r}", fix="--rescene-set num_steps=2")
    return {key: parse_yaml(value, key) for key, _, value in pairs}
