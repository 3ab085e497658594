"""site.yaml: who a site is, which images it holds, and what it allows. The server can change none of it.

holds: share   all sites have the same data set, and this one works on its part of the recipe's split (rehearsals)
holds: own     the folder of images is this site's own; classes, size and normalisation are the federation's plan
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from rescene.config import Recipe
from rescene.config.schema import DataSection
from rescene.config.site_sections import PlannedTask, SitesSection
from rescene.core.errors import ConfigError, DataError, RunError, did_you_mean
from rescene.core.hyperparameters import Section
from rescene.data import Dataset
from rescene.data.derived_sets import adopt, check_labels
from rescene.engine import Experiment, prepare
from rescene.engine.experiment import load_data, look_of
from rescene.lens import BUILT_IN, FeatureCache, open_lens
from rescene.privacy.ledger import Declined, End, Floor, Ledger

OWN = "own images"  # in the place of the fingerprint that sites with a common data set must share


class SiteData(DataSection):
    """What leaves a site is made of its images. Whoever packed a folder or wrote a CSV must not choose others than its own."""

    outside: Literal["warn", "refuse"] = Field(
        "refuse", description="images that a link or a CSV names outside of the folder"
    )


class SiteSection(Section):
    """site.yaml."""

    client: int = Field(ge=0, description="the site's number in the federation")
    server: str = Field("", description="host:port of the server")
    data: SiteData = Field(SiteData(), description="where the images lie; never taken from the server")
    holds: Literal["share", "own"] = Field("share", description="share: a part of the recipe's split; own: all of data")
    labels: dict[str, str | None] = Field(
        default_factory=dict, description="own: local class name -> the federation's; null leaves the class out"
    )
    hold_out: float = Field(0.2, ge=0, lt=1, description="own: share of the images kept for evaluation at the site")
    lens: str | None = Field(
        None, description="the lens file that the operator gave out, for a run that does not look through one of ours"
    )
    privacy: Floor | None = Field(None, description="limits that the server cannot lower")
    device: str = "auto"

    @field_validator("labels", mode="before")
    @classmethod
    def _names_are_text(cls, value: Any) -> Any:
        """YAML reads a folder called 0 as a number."""
        return {str(k): None if v is None else str(v) for k, v in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _own_needs_a_folder(self) -> SiteSection:
        if self.holds == "own" and self.data.path is None:
            raise ValueError("holds: own needs data: {path: FOLDER}, one folder of images per class")
        if self.holds == "own" and self.data.held_out != "drawn":
            raise ValueError(
                "data.held_out has no meaning with holds: own, where hold_out chooses; or make train/ and test/"
            )
        if self.holds == "share" and self.labels:
            raise ValueError("labels has no meaning with holds: share; holds: own")
        return self


def experiment_of(
    section: SiteSection, recipe: Recipe, kept: FeatureCache | None = None, hidden: bool = False
) -> Experiment:
    """The run as this site sees it, with the images it holds. ``kept``: the site's own place for what a lens saw of them.
    ``hidden``: a site without an image of the plan takes part as well, because staying away would say that it has none.
    """
    if section.holds == "share":
        if recipe.sites is not None:
            raise RunError("E356", "the federation has a plan, but this site has no images of its own (holds: own)")
        return prepare(recipe, kept=kept)
    plan = recipe.sites
    if plan is None:
        raise RunError("E356", "this site has its own images, but the run has no plan (rescene deploy add-classes)")
    return prepare(recipe, held_by(section, plan, local_images(section, plan.image_size), hidden), kept)


def held_by(section: SiteSection, plan: SitesSection, found: Dataset, hidden: bool = False) -> Dataset:
    """The site's own images under the plan's names, split into those to learn from and those held out."""
    return adopt(found, plan.classes, section.labels, look_of(plan), section.hold_out, may_be_empty=hidden)


def own_images(section: SiteSection) -> tuple[Dataset, SitesSection]:
    """The site's own images, and a plan of one task with all classes that it has, under the federation's names."""
    size = section.data.image_size or 32  # as in a plan that says nothing else
    found = local_images(section, size)
    names = [section.labels.get(name, name) for name in found.classes]
    task = PlannedTask(classes=tuple(dict.fromkeys(name for name in names if name)), rounds=1)
    return found, SitesSection(image_size=size, tasks=(task,))


def bad_site_file(error: ValidationError, path: Path) -> ConfigError:
    """E120: the first thing that is wrong in site.yaml, with the key that was meant or those that there are."""
    first = error.errors()[0]
    key, why = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    fix = f"correct {key or 'it'} in site.yaml; docs/deploy.md shows one, and `rescene deploy init` writes one"
    if first["type"] == "extra_forbidden":
        parents: dict[str, type[Section]] = {"data": SiteData, "privacy": Floor}
        section = parents.get(str(first["loc"][0]), SiteSection) if len(first["loc"]) > 1 else SiteSection
        known = list(section.model_fields)
        why = "there is no such key"
        fix = did_you_mean(str(first["loc"][-1]), known) or f"the keys are {', '.join(known)}"
    return ConfigError(
        "E120", "site.yaml makes no sense", where=str(path), why=f"{key}: {why}".removeprefix(": "), fix=fix
    )


def lens_of(section: SiteSection, name: str | None) -> str | None:
    """The lens to look through at this site. A file is the site's own: the server cannot make it open another."""
    return name if name is None or name in BUILT_IN else section.lens


def hash_of(name: str | None) -> str:
    """SHA-256 of a lens; an empty text where there is none."""
    return open_lens(name).sha256 if name else ""


def check_lens(name: str | None, wanted: str) -> None:
    """This site's lens must be the one that the run looks through: sums seen through two lenses do not add up."""
    if hash_of(name) != wanted:
        raise DataError("E221", other_lens(hash_of(name), wanted))


def other_lens(here: str, wanted: str) -> str:
    """
    >>> other_lens("", "0123456789abcdef0123")
    "the run looks through lens 0123456789abcdef, this site through no lens; `lens: FILE` in site.yaml must be the operator's file"
    """
    run, site = (f"lens {value[:16]}" if value else "no lens" for value in (wanted, here))
    return (
        f"the run looks through {run}, this site through {site}; `lens: FILE` in site.yaml must be the operator's file"
    )


def local_images(section: SiteSection, image_size: int | None = None) -> Dataset:
    """What lies in the site's own folder, with its own names."""
    data = section.data
    if data.path is None or not Path(data.path).expanduser().exists():
        raise DataError(
            "E211",
            "the site's folder of images is not there",
            where=str(data.path),
            fix="data: {path: FOLDER} in site.yaml, one folder of images per class",
        )
    size = image_size or data.image_size
    found = load_data(data.model_copy(update={"image_size": size}))
    check_labels(found.classes, section.labels, str(data.path))
    return found


def check_floor(floor: Floor | None, recipe: Recipe) -> None:
    """What the site's floor refuses before an image is opened; the ledger sees to the rest."""
    if floor is None:
        return
    promise = recipe.promise(1)  # nothing here depends on the number of tasks
    if promise is None:
        raise Declined("E413", "site declines: it has a privacy floor, and the run has no mechanism")
    if promise.test_mode:
        raise Declined("E413", "site declines: the noise would come from the run's seed, which the server knows")


def ledger_of(section: SiteSection, folder: Path, least: End | None = None) -> Ledger:
    """The ledger of the site in this folder, with the floor of its site.yaml. The mark lies outside state/, which people put
    back from backups; ``least`` is what the server remembers.
    """
    return Ledger(folder / "state" / "ledger.jsonl", section.privacy, folder / "ledger-mark.json", least)
