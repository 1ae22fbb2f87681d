"""The site: `make docs`."""

from tfdist import __version__

project = "tfdist"
author = "The tfdist authors"
copyright = "the tfdist authors"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"tfdist {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
default_role = "code"
