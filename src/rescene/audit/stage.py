"""Where an audit takes place: sites made up for the purpose, which run the real condensation behind the real mechanism.

Sites do not influence each other, so a site for each question costs nothing in strength and makes all questions independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rescene.core.errors import ConfigError, DataError
from rescene.core.rng import Rng
from rescene.data import Images, Task, Transform
from rescene.engine.experiment import Experiment
from rescene.methods import method_class, method_names
from rescene.methods.base import Client
from rescene.methods.surrogates import surrogates_of
from rescene.privacy.accounting import Composition
from rescene.privacy.ledger import Released
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Condensation

At = Callable[[int, int], SitePrivacy | None]  # site, turn -> its mechanism, noise and ledger; None without a mechanism


@dataclass(frozen=True, eq=False)
class Stage:
    """The network that the server broadcasts, the images of one task, and how sites condense.

    ``images`` holds the training images and after them the test images, which no site ever had.
    """

    net: nn.Module
    images: Images
    task: Task
    transform: Transform
    settings: Condensation
    rng: Rng
    known: dict[int, Tensor]  # label -> training images of the task
    strangers: dict[int, Tensor]  # label -> test images


@dataclass(frozen=True, eq=False)
class Brighter(Client):
    """A site some of whose pictures are multiplied by a factor, beyond anything that a photograph can be."""

    factor: Tensor | None = None

    def pictures(self, positions: Tensor) -> Tensor:
        found = super().pictures(positions)
        return found if self.factor is None else found * self.factor[positions].reshape(-1, 1, 1, 1)


@dataclass(frozen=True, eq=False)
class Watched(SitePrivacy):
    """A site that shows what it releases, as its ledger sees it: this is what the guarantee is about."""

    seen: list[Released] = field(default_factory=list)

    def release(self, question: str, draw: Callable[[], Released]) -> Released:
        self.seen.append(super().release(question, draw))
        return self.seen[-1]


@dataclass(frozen=True, eq=False)
class Seen:
    """What one participation of one site shows: the pictures the server gets, and the noised sums behind them if there are."""

    images: Tensor
    labels: Tensor
    sums: dict[int, Tensor]  # by label

    def of(self, label: int) -> Tensor:
        """All that the mechanism released about a class."""
        return self.sums[label] if self.sums else self.images[self.labels == label]


def stage_of(experiment: Experiment, net: nn.Module | None = None, task: Task | None = None) -> Stage:
    """The first task and the fresh network unless others are given."""
    task = task or experiment.tasks[0]
    method = experiment.method
    if not isinstance(method, Condensation) or "release" not in method.mechanisms:
        promise = experiment.recipe.promise(len(experiment.tasks))
        sent = method.leaving(promise.mechanism if promise else None)
        raise ConfigError(
            "E197",
            f"the uploads of {method.title} cannot be audited",
            why=f"these attacks are made for condensed images alone; it sends: {sent}",
            fix=f"rescene audit --all attacks sums and weights too; here method={' or method='.join(_auditable())}",
        )
    train, test = experiment.dataset.train, experiment.dataset.test
    images = Images(torch.cat([train.pixels, test.pixels]), torch.cat([train.labels, test.labels]))

    def by_label(positions: Tensor) -> dict[int, Tensor]:
        return {label: positions[images.labels[positions] == label] for label in task.classes}

    known, strangers = by_label(task.train), by_label(task.test + len(train))
    empty = [experiment.dataset.classes[c] for c in task.classes if not len(known[c]) or not len(strangers[c])]
    if empty:
        raise DataError(
            "E199",
            f"no audit without training and test images of every class: {', '.join(empty)}",
            why="canaries are images that no site had",
            fix="add images of these classes, or leave them out",
        )
    return Stage(
        (net or experiment.initial_net()).eval(),
        images,
        task,
        experiment.dataset.transform,
        method,
        experiment.rng.at("audit"),
        known,
        strangers,
    )


def _auditable() -> list[str]:
    """Names of the methods that send condensed images and can send them behind noise."""
    known = {name: method_class(name) for name in method_names()}
    return [name for name, one in known.items() if issubclass(one, Condensation) and "release" in one.mechanisms]


def uploads(
    stage: Stage, held: Sequence[Tensor], at: At, turn: int, factor: Tensor | None = None, pictures: bool = True
) -> list[Seen]:
    """What sites that hold these images show at one participation. ``pictures=False`` saves the steps after a release."""
    sites = [at(k, turn) for k in range(len(held))]
    watched = [None if site is None else Watched(**vars(site)) for site in sites]
    shards = [
        Brighter(stage.images, index, stage.task, stage.transform, lambda model: stage.net, site, None, factor)
        for index, site in zip(held, watched, strict=True)
    ]
    released = watched[0] is not None and watched[0].mechanism.kind == "release"
    settings = stage.settings
    if released and not pictures:
        settings = settings.model_copy(update={"num_steps": 0, "ipc": 1})
    place, classes = stage.rng.at("round", turn), stage.task.classes
    made = surrogates_of(
        stage.net, shards, [place.at(k) for k in range(len(held))], settings, place.at("noise").integer()
    )
    return [
        Seen(one.images, one.labels, dict(zip(classes, site.seen[0]["sums"], strict=True)) if site and released else {})
        for one, site in zip(made, watched, strict=True)
    ]


def as_promised(mechanism: Mechanism | None) -> At:
    """Sites with this mechanism and noise of the operating system, without a ledger: each participation is new."""
    return lambda site, turn: None if mechanism is None else SitePrivacy(mechanism, Noise())


def seeded(mechanism: Mechanism, rng: Rng, task: int) -> At:
    """Sites whose noise comes from the run's seed, at the address of the test mode: whoever knows the seed can draw it too."""
    return lambda site, turn: SitePrivacy(mechanism, Noise(rng.at("privacy", task, turn, site).generator()))


def without_noise(mechanism: Mechanism | None) -> At:
    """What the attacker expects: the same mechanism with its noise at zero and every record sampled."""
    if mechanism is None:
        return as_promised(None)
    each = Composition(mechanism.composition.steps, 1)
    return as_promised(replace(mechanism, sigma=0.0, composition=each))
