"""What a reader may be told besides where the data is."""

from __future__ import annotations

from dataclasses import dataclass

from rescene.core.errors import ConfigError

LAYOUTS = ("auto", "classes", "domains", "sites", "sites-domains")
OUTSIDE = ("warn", "refuse")


@dataclass(frozen=True)
class Options:
    """``image_size``: None keeps or guesses the size. ``test_fraction`` and ``seed`` matter only where the data has no
    test set of its own. ``skip_unreadable``: leave damaged images out (counted in a warning) instead of refusing.
    ``layout`` says what the first folders are, classes, domains or sites, where nothing else tells; ``outside``: warn of
    files that lie outside of the folder, or refuse them. ``columns``: pairs that say what the columns of a table
    are called, such as ("label", "species")."""

    image_size: int | None = None
    test_fraction: float = 0.2
    seed: int = 0
    skip_unreadable: bool = False
    layout: str = "auto"
    outside: str = "warn"
    columns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.test_fraction < 1:
            raise ConfigError(
                "E208", f"test_fraction is {self.test_fraction}", fix="a number from 0 up to, not including, 1"
            )
        if self.image_size is not None and not 8 <= self.image_size <= 1024:
            raise ConfigError("E208", f"image_size is {self.image_size}", fix="a size in pixels from 8 to 1024")
        for key, value, possible in (("layout", self.layout, LAYOUTS), ("outside", self.outside, OUTSIDE)):
            if value not in possible:
                raise ConfigError("E208", f"{key} is {value!r}", fix=f"one of: {', '.join(possible)}")

    @property
    def split(self) -> str:
        """How a data set says that its test images were drawn with these options."""
        return f"fraction={self.test_fraction:g} seed={self.seed}"
