"""The command line: thin verbs over the other layers. Nothing heavy is imported before a verb needs it."""

from rescene.cli.app import main

__all__ = ["main"]
