"""What an epsilon means, in words. The run, its report and model card, `rescene privacy` and a site's check all take them from here."""

from __future__ import annotations

from rescene.privacy.accounting import Composition, replaced_epsilon, sigma_for

OUTSIDE = "Not covered: settings and clips that were chosen by looking at private images, class names, sizes of sites, timing."
NO_COUNTS = "behind a guarantee sites answer no evaluation, because exact counts would tell of single images"
HOW_TO_MEASURE = (
    "name test images of the server before the first run (`test: FOLDER` in plan.yaml, one folder per class), "
    "or let each site put noise on its counts (`privacy: {epsilon_max: 8, evaluation_sigma: 2}` in site.yaml)"
)


def guarantee(epsilon: float, replaced: float, delta: float) -> str:
    """The guarantee: in plain words, then for an image added or removed and for an image replaced."""
    return (
        f"What a site sends looks nearly the same with and without any one image. Epsilon says how nearly: {epsilon:.2f} is "
        f"{strength(epsilon)}. "
        f"({epsilon:.2f}, {delta:g})-differentially private for each image over the whole run, all tasks, if the image is added "
        f"or removed, and ({replaced:.2f}, {delta:g}) if another takes its place."
    )


def strength(epsilon: float) -> str:
    """How much an epsilon protects, in words.

    >>> strength(1.0), strength(8.0), strength(50.0)
    ('strong', 'moderate, and often used in practice', 'hardly any protection')
    """
    steps = ((1.0, "strong"), (10.0, "moderate, and often used in practice"), (20.0, "weak"))
    return next((words for most, words in steps if epsilon <= most + 1e-6), "hardly any protection")


def trust(honest_sites: int | None, late_alone: bool = False) -> str:
    """Who must be trusted for it."""
    if honest_sites is None:
        return (
            "Trust: each site adds the whole noise by itself, so it needs to trust neither the server nor other sites."
        )
    return (
        f"Trust: the server learns only sums over sites, and each site adds a part of the noise; at least {honest_sites} honest "
        "sites must be in every sum."
        + (" A site that missed a sum adds the whole noise by itself." if late_alone else "")
    )


def released_before(earlier_sums: int) -> str:
    """What stays released although a site withdrew."""
    times = "Once" if earlier_sums == 1 else f"{earlier_sums} times"
    return (
        f"{times} a site withdrew and sums over the other sites were taken anew. The sums from before stay released, and epsilon "
        "counts them too."
    )


def limit(epsilon: float | None, delta: float) -> str:
    """A site's own limit, over all runs."""
    if epsilon is None:
        return "no largest epsilon: privacy.epsilon_max is not set"
    once = Composition(1, 1)
    replaced = replaced_epsilon(sigma_for(epsilon, once, delta), once, delta, 2.0)
    return (
        f"epsilon {epsilon:g} at delta {delta:g} for each image over all runs and tasks, if it is added or removed; "
        f"about {replaced:.0f} if another takes its place. {OUTSIDE}"
    )
