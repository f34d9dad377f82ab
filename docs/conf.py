"""The documentation as a site: `make docs`."""

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "EventSQL Orchestration"
author = "EventSQL Orchestration"
version = release = installed_version("eventsql-orchestration")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "settings_table",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["examples"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# Quotes and dots become typographic; `--` stays, because help texts name options.
smartquotes_action = "qe"

# Docstrings have names in single backquotes.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = "EventSQL Orchestration"


def readable(_app, _what, _name, _object, _options, signature, returned):
    """A signature with the names of its types alone, and without the addresses of objects."""
    if signature is None:
        return None
    signature = re.sub(r"[~\w.]*\bAnnotated\[(.*?), <dagster\.[^>]*>\]", r"\1", signature)
    signature = re.sub(r"~(?:\w+\.)*(\w+)", r"\1", signature)
    signature = re.sub(r"<function (\w+)>", r"\1", signature)
    return re.sub(r"<(?:factory|function .*?<lambda>)>", "...", signature), returned


def setup(app):
    app.connect("autodoc-process-signature", readable)
