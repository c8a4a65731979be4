"""Sphinx configuration of the documentation site."""

from importlib import metadata

project = "pbp_jax"
copyright = "the pbp_jax authors"
release = metadata.version("pbp_jax")

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.mathjax",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx-mathjax-offline",  # formulas need no network either
]
html_theme = "furo"
html_title = "pbp_jax"
html_static_path = ["static"]
html_css_files = ["formulas.css"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# Single backticks are code in docstrings.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; docstrings have the types
napoleon_use_ivar = True
napoleon_attr_annotations = False

# A reference that leads nowhere is a warning; other projects' types lead
# nowhere, since the build is to need no network.
nitpicky = True
nitpick_ignore_regex = [
  (
    "py:class",
    r"(collections|jax|numpy|optax|typing)\..*",
  ),
]


def _skip_fields(app, kind, name, member, skip, options):
  """Leaves out fields of named tuples, which their class describes."""
  del app, kind, name, options
  return skip or type(member).__name__ == "_tuplegetter"


def setup(app):
  """Called by Sphinx."""
  app.connect("autodoc-skip-member", _skip_fields)
