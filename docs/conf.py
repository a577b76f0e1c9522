"""Sphinx settings; `make docs` builds with warnings as errors."""

from importlib import metadata

project = "groupwise"
release = metadata.version("groupwise")
author = "the groupwise authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "generated/ablation.md"]  # the latter is included by a page

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]

smartquotes = False  # they turn the dashes of options into one

html_theme = "furo"
html_title = f"groupwise {release}"
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False
