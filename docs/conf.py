"""Builds the documentation: `make docs`. Every warning is an error there."""
import logging
import re
import sys
from pathlib import Path

import gluon_amp

HERE = Path(__file__).parent

project = "gluon_amp"
version = release = gluon_amp.__version__
project_copyright = "the gluon_amp contributors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "figures"]

html_theme = "furo"
pygments_style = "tango"          # removed lines red, added ones green
pygments_dark_style = "monokai"
html_title = f"gluon_amp {version}"
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3
smartquotes_action = "D"           # quotation marks stay as they are written
default_role = "code"             # `name` in a docstring
# of signatures of dataclasses, which name inner rooms
nitpick_ignore = [("py:class", name) for name in (
    "dataclasses.InitVar", "gluon_amp.formats.Format", "NoneType")]
autodoc_typehints = "none"        # most are Any: MXNet has none
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
napoleon_use_ivar = True
nitpick_ignore = [("py:class", "dataclasses.InitVar"), ("py:class", "NoneType")]  # no pages of ours


def code_blocks(app, what, name, obj, options, lines):
    """Docstrings are plain text: an indented part behind an empty line is code, or a formula."""
    text, result = list(lines), []
    indents = [len(line) - len(line.lstrip()) for line in text]
    outer, code = 0, False
    for i, line in enumerate(text):
        if line.strip():
            begins = i > 0 and not text[i - 1].strip() and indents[i] > outer
            if begins and not code:
                result += [" " * outer + ".. code-block:: python", ""]
                code = True
            elif indents[i] <= outer:
                outer, code = indents[i], False
            elif not code:
                outer = indents[i]
        result.append(line)
    lines[:] = result


def files_beside(app, name, text):
    """A link to a page outside docs/ downloads it, as links to scripts there do."""
    text[0] = re.sub(r"\]\((\.\./[^)#]+\.md)\)", r"](path:\1)", text[0])


def draw_figures(app):
    """Those that a checkout has are kept: their last bits depend on the processor."""
    if (HERE / "figures").exists():
        return
    logging.getLogger("gluon_amp").setLevel(logging.WARNING)
    sys.path.insert(0, str(HERE))
    import figures
    figures.draw(HERE / "figures")


def setup(app):
    app.connect("autodoc-process-docstring", code_blocks, priority=100)  # before napoleon
    app.connect("source-read", files_beside)
    app.connect("builder-inited", draw_figures)
