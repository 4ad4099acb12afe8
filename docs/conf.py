"""Sphinx's settings: sphinx-build -W -n docs DIR."""

import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
sys.path[:0] = [str(_ROOT), str(_ROOT / "docs" / "extensions")]

project = _PROJECT["name"]
version = release = _PROJECT["version"]
source_address = _PROJECT["urls"]["Source"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
    "source_links",
    "mocked_torch",
]
exclude_patterns = ["examples", "extensions"]

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False
# The first figure's twins, which site.css shows in its place.
html_static_path = [
    "static",
    "images/front_dark.png",
    "images/front_narrow_light.png",
    "images/front_narrow_dark.png",
]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": source_address,
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_heading_anchors = 6
myst_heading_slug_func = "anchors.slug"

autodoc_default_options = {
    "members": True,
    "member-order": "groupwise",
    "exclude-members": "count, index",  # every tuple has them
}
autodoc_preserve_defaults = True  # the name in the source, not the value
napoleon_use_rtype = False
napoleon_use_ivar = True  # an attribute stands once, not in an entry of its own too
python_maximum_signature_line_length = 80

# Types without a page here: those of other libraries, and ours of modules below the public ones.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|contextlib|jax|jaxlib|jaxtyping|numpy|pathlib|torch|typing)\..*"),
    ("py:.*", r"ndarray|\w+Error"),
    ("py:.*", r"lowprec_attn\.(arithmetic|check|diagnostics|lab|numerics|runs)\..*"),
    # Words of a `Literal` and axes of a shape, which Sphinx takes for types.
    ("py:class", r"'.*|[a-z_]+"),
]
