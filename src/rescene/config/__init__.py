"""Recipes, their validation, and where every value came from."""

from rescene.config.compose import Resolved, recipe_names, recipe_text, resolve
from rescene.config.schema import Recipe

__all__ = ["Recipe", "Resolved", "recipe_names", "recipe_text", "resolve"]
