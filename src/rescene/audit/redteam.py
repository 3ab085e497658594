"""``rescene audit --all``: every claim, the attack on it, its positive control, what was found and what was promised."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from rescene.audit import drawn_pictures as drawn
from rescene.audit import lying_requests as letters
from rescene.audit import sums
from rescene.audit.rows import AttackRow, Found, row_of
from rescene.core.errors import ResceneError

EXTRAS = ("E174", "E439")  # codes of "a package that is not installed is needed"


class Attack(NamedTuple):
    """One attack of the red team: the claim that it tests, what it does, and the function that runs it."""

    claim: str
    words: str
    run: Callable[[], Found]


def masked(name: str) -> Callable[[], Found]:
    """An attack on secure sums; these need packages that a base installation does not have."""

    def attack() -> Found:
        import_module("rescene.privacy.secure_sum")  # says what is missing, and how to get it
        found: Found = getattr(import_module("rescene.audit.masked"), name)()
        return found

    return attack


ATTACKS = (
    Attack("a reply holds what the mechanism released, and constants", "all fields, from 40 and from 42 images", letters.replies),
    Attack("what a site remembers does not name its images", "hashes of memory of two sites with the same images", letters.remembered),
    Attack("no request buys a second release", "a lie in every field; other runs, tasks, rounds, recipes", letters.requests),
    Attack("a site remembers an image once", "verbs that fill a site's memory, five times each", letters.memories),
    Attack("a site does what its method's verbs say, and nothing else", "names of other functions", letters.verbs),
    Attack("under a mechanism a hold-out is no oracle", "evaluation of any weights", letters.evaluation),
    Attack("errors of a site tell nothing of its images", "a site with a class of its own only", letters.errors),
    Attack("moments: epsilon", "canaries on two draws, inner product with the noised sums", sums.membership),
    Attack("moments: a class of 1, 3 or 5 images stays hidden", "which of 64 pictures is it?", sums.reconstruction),
    Attack("moments: sums cannot be solved for images", "lattice reduction (LLL) of the second moment", sums.lattice),
    Attack("moments: no release is a certain proof", "gaps of floating-point numbers", sums.whole_numbers),
    Attack("moments: an image is in one sum only", "two sums that differ by a site, subtracted", sums.differencing),
    Attack("secure sum: epsilon while H sites are honest", "canaries, all other sites' parts subtracted", masked("honest_few")),
    Attack("secure sum: a site's numbers are in one sum only", "a second sum without the site, subtracted", masked("second_sum")),
    Attack("secure sum: no site's part is opened alone", "two lists of sites shown to two groups", masked("two_lists")),
    Attack("secure sum: a masked upload tells nothing", "inner product, lowest and highest bits", masked("traces")),
    Attack("secure sum: masks cannot be guessed", "small seeds and seconds of the last hour", masked("guesses")),
    Attack("dp-sgd: weights hide the images they were trained on", "gradient inversion: which of 64 pictures?", sums.gradient_inversion),
    Attack("release, condensed images: epsilon", "canaries in one run, replay", drawn.canaries(
        "demo", "method.start=noise", "method.num_steps=3", "privacy.mechanism=release", "privacy.epsilon=1")),
    Attack("release, waves-dp: epsilon", "canaries in one run, replay", drawn.canaries("waves-dp", "privacy.epsilon=1")),
    Attack("waves without a mechanism: nothing is promised", "known seed, then lattice reduction", drawn.known_seed),
    Attack("the near-copy figure sees changed copies", "thirteen changes: share of copies that are missed", drawn.blind_spots),
)  # fmt: skip

UNTESTED = (
    ("per-example: epsilon", "rescene audit RECIPE attacks it; it takes too long here"),
    ("a crash between noise and sending never leads to a second draw", "tests kill the process; no attack here"),
    ("secure sum: a site's own numbers are honest", "nobody can see it in a sum; docs/security.md measures one liar"),
    ("times and sizes of messages", "not hidden, and not measured"),
    ("settings chosen by looking at private data", "outside of every epsilon here"),
)


def red_team(say: Callable[[str], None] = lambda text: None) -> list[AttackRow]:
    """All rows; an attack that needs a package that is not there is listed as not run."""
    rows = []
    for number, attack in enumerate(ATTACKS, start=1):
        say(f"{number} of {len(ATTACKS)}: {attack.claim}")
        began = time.perf_counter()
        try:
            rows.append(row_of(attack.claim, attack.words, attack.run(), time.perf_counter() - began))
        except (ImportError, ResceneError) as error:
            if isinstance(error, ResceneError) and error.code not in EXTRAS:
                raise
            needs = f"needs {error.name}" if isinstance(error, ImportError) else error.fix or error.what
            rows.append(AttackRow(attack.claim, attack.words, "-", "-", "-", "not run", needs))
    return rows + [AttackRow(claim, "-", "-", "-", "-", "untested", why) for claim, why in UNTESTED]


def red_team_words(rows: list[AttackRow]) -> str:
    """One sentence on the table."""
    broken = [row.claim for row in rows if row.verdict == "BROKEN"]
    silent = [row.claim for row in rows if row.verdict == "CONTROL DID NOT FIRE"]
    held = sum(row.verdict == "held" for row in rows)
    text = f"{held} claims held under attack."
    if broken:
        text += f" {len(broken)} BROKEN: {'; '.join(broken)}."
    if silent:
        text += f" {len(silent)} attacks missed what was broken on purpose, so they show nothing: {'; '.join(silent)}."
    missing = sum(row.verdict == "not run" for row in rows)
    if missing:
        text += f" Not run, because packages are missing: {missing} (the table says which)."
    return text + " An attack can refute a claim, it cannot prove one."
