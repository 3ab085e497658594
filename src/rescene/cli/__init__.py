"""The command line.

``app`` is the program and its help. Each group of the help has a file of verbs, such as ``start_verbs``. What verbs share is in
``shared_options`` and ``terminal``. Nothing heavy is imported before a verb needs it: ``running``, ``costing``, ``progress`` and
``run_folders`` load torch or numpy, so verbs import them inside.
"""

from rescene.cli.app import main

__all__ = ["main"]
