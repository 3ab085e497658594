"""Lenses: what every site looks at its images through, and how the lens `leaves` is made from procedural pictures."""

from rescene.lens.leaves import draw_leaves
from rescene.lens.lens import BUILT_IN, Lens, open_lens, through

__all__ = ["BUILT_IN", "Lens", "draw_leaves", "open_lens", "through"]
