"""The documentation as a site: pages, tours that run while it is built, and a reference from docstrings.

`scripts/docs.sh` builds it, with warnings as errors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tvm_axe
import tvm_axe.errors

sys.path.insert(0, str(Path(__file__).parent))

project = "tvm_axe"
version = release = tvm_axe.__version__
copyright = "the developers of tvm_axe"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "README.md", "tours/GALLERY_HEADER.rst", "tours/pictures/**"]
html_theme = "furo"
html_title = "tvm_axe"
html_static_path: list[str] = []
templates_path = ["_templates"]
default_role = "py:obj"  # `name` in a docstring is a link where there is such a name, and code where there is none
nitpicky = False
suppress_warnings = ["config.cache"]  # the gallery's scraper is a function

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "exclude-members": ", ".join(vars(tvm_axe.errors)),  # they have a page of their own
}
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True


def pictures(_block: tuple[str, str, int], variables: dict[str, Any], config: dict[str, Any]) -> str:
    """Put the pictures that a tour has drawn since its last block behind the block: what its ``PICTURES`` holds."""
    drawn = variables["example_globals"].get("PICTURES", {})
    shown = variables.setdefault("shown_pictures", set())
    images = []
    for name, picture in drawn.items():
        if name not in shown:
            shown.add(name)
            path = Path(next(variables["image_path_iterator"])).with_suffix(".svg")
            path.write_text(picture if isinstance(picture, str) else picture.svg(), encoding="utf-8")
            images.append(str(path))
    return "".join(_figure(Path(image).relative_to(config["src_dir"])) for image in images)


def _figure(path: Path) -> str:
    return f"\n.. image:: /{path.as_posix()}\n   :class: sphx-glr-single-img\n\n"


sphinx_gallery_conf = {
    "examples_dirs": ["tours"],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"\.py$",
    "image_scrapers": [pictures],
    "reset_modules": (),
    "abort_on_example_error": True,
    "only_warn_on_example_error": False,
    "within_subsection_order": "FileNameSortKey",
    "show_memory": False,
    "min_reported_time": 3600,
    "download_all_examples": False,
    "remove_config_comments": True,
}
