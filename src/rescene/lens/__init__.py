"""Lenses: what every site looks at its images through, and how the lens `leaves` is made from procedural pictures."""

from rescene.lens.feature_cache import FeatureCache, users_own
from rescene.lens.leaves import draw_leaves
from rescene.lens.lens import BUILT_IN, Lens, absolute, no_such_lens, open_lens, seconds_to_look, sized, through
from rescene.lens.look_progress import expect_looks, looks_to, tell_looked

__all__ = [
    "BUILT_IN",
    "FeatureCache",
    "Lens",
    "absolute",
    "draw_leaves",
    "expect_looks",
    "looks_to",
    "no_such_lens",
    "open_lens",
    "seconds_to_look",
    "sized",
    "tell_looked",
    "through",
    "users_own",
]
