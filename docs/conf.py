"""The site. Everything it says about commands, keys, methods, results and errors is made from the program when it is built."""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generate import mathml, pages  # noqa: E402

from rescene import __version__  # noqa: E402

project, author, release = "ReSCENE", "the ReSCENE authors", __version__
copyright = "the ReSCENE authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = [
    "_build",
    "generate",
    "methods/[!r]*",
    "methods/re[!f]*",
    "methods/refed.md",
]  # pasted into generated pages
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the parts of a generated page bring their own headings
smartquotes = False  # "--option" is not a dash
highlight_language = "text"  # most blocks are commands
html_theme = "furo"
html_title = "ReSCENE"
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {"light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#0072b2"},
                      "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"}}  # fmt: skip
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

pages.write(HERE / "generated")  # before Sphinx looks for pages


def copy_leaderboard(app, error):
    """The leaderboard is a page of its own: it goes beside the others as it is."""
    if error is None and app.builder.format == "html":
        shutil.copytree(HERE / "leaderboard", Path(app.outdir) / "leaderboard", dirs_exist_ok=True)


def setup(app):
    app.add_html_math_renderer("mathml", (mathml.inline, None), (mathml.block, None))
    app.connect("build-finished", copy_leaderboard)
