"""What an audit's numbers mean, for the person who must sign."""

from __future__ import annotations

from typing import Any

Found = dict[str, Any]


def audit_words(found: Found) -> list[str]:
    """A few sentences on an audit; the first is the verdict."""
    return [_verdict(found), _strength(found), _membership(found["membership"]), *_stored(found)]


def control_words(rows: list[Found]) -> str:
    """One sentence on the controls."""
    fired = sum(row["fired"] for row in rows)
    if fired == len(rows):
        return (
            f"All {fired} controls fired: each breach made on purpose was noticed, and each sound twin was left alone."
        )
    return (
        f"Only {fired} of {len(rows)} controls fired: this audit would miss such a breach (or accuse a sound site), so its "
        "verdicts mean little. More canaries may help (--canaries)."
    )


def _verdict(found: Found) -> str:
    shown, sure = found["lower_bound"], f"{found['confidence']:.0%}"
    if found["verdict"] == "no promise":
        if shown == 0:
            return "Nothing is promised, and the canaries showed nothing. That is no evidence of privacy: other attacks may."
        return f"Nothing is promised, and rightly so: whatever epsilon somebody claims must be at least {shown:.2f} ({sure} sure)."
    claim = f"epsilon at most {found['promised']:.2f} (delta {found['delta']:g}) over {_times(found)}"
    if found["verdict"] == "contradicted":
        return (
            f"CONTRADICTED. The mechanism promises {claim}, but the attacks show at least {shown:.2f} ({sure} sure). Send "
            "nothing with this setting until the reason is known."
        )
    return (
        f"Not contradicted. The mechanism promises {claim}; the attacks show at least {shown:.2f} ({sure} sure). An audit "
        "can refute a promise, it cannot prove one."
    )


def _times(found: Found) -> str:
    num = found["participations"]
    return "one participation" if num == 1 else f"{num} participations"


def _strength(found: Found) -> str:
    most = found["most_to_show"]
    text = f"With {found['num_canaries']} canaries no attack, however good, could show more than {most:.2f}."
    if found["promised"] is not None and found["promised"] >= most:
        text += " The promise lies above that: only a larger audit (--canaries) could refute it."
    return text


def _membership(found: Found) -> str:
    if not found["num_pictures"]:
        return "Membership: no picture was uploaded (all classes were suppressed), so there was nothing to attack."
    rates, spread = ({rate: one[f"tpr_at_{rate:g}"] for rate in (0.001, 0.01)} for one in (found, found["spread"]))
    text = (
        f"Membership: of the images that a site held, the attack names {rates[0.001]:.1%} (+- {spread[0.001]:.1%}) while wrongly "
        f"accusing 0.1 % of those it did not hold, and {rates[0.01]:.1%} (+- {spread[0.01]:.1%}) at 1 %; a blind guess would name "
        f"0.1 % and 1 %. {found['num_in']} trials with and {found['num_out']} without the image; area under the curve {found['auc']:.2f}."
    )
    if (most := found.get("allowed", {}).get("tpr_at_0.001", 1.0)) < 1:
        text += f" The promise allows at most {most:.1%} for the first."
    if found["num_out"] < 1000:
        text += " Below 1,000 trials without, the first figure allows no wrong accusation at all."
    return text


def _stored(found: Found) -> list[str]:
    words = []
    if found.get("ledger"):
        books = found["ledger"]
        words.append(
            f"The books of the most-used site and task add up to epsilon {books['epsilon']:.2f} "
            f"({books['participations']} participations)."
        )
    if found.get("stored"):
        stored = found["stored"]
        words.append(
            f"Of {stored['num_uploads']} uploads stored with the run, {stored['nearest_was_there']:.0%} lie nearest to an image that was "
            f"trained on; {stored['by_chance']:.0%} would by chance."
        )
    return words
