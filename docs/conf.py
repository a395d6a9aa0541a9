"""Sphinx configuration of the documentation: `make docs`, where warnings are errors."""
import base64
import importlib
import json
import logging
import os
import re
import sys
import tempfile
from pathlib import Path

import gluon_amp
import numpy as np
from docutils import nodes
from PIL import Image
from sphinx.transforms import SphinxTransform

HERE = Path(__file__).parent
ROOT = HERE.parent
# Pages of the site with sources elsewhere in the project.
PUBLISHED = {"readme": "README.md", "results": "results/README.md",
             "plan": "results/plan.md", "comparisons": "results/comparisons.md",
             "imagenet": "results/imagenet/README.md",
             "tensor_core_results": "results/tensor_cores/README.md",
             "xray_results": "results/xray/README.md",
             "ranks_results": "results/ranks/README.md",
             "gpu_results": "results/gpu/README.md",
             "h100": "results/gpu/h100/README.md", "h200": "results/gpu/h200/README.md",
             "benchmarks": "benchmarks/README.md", "gpu_path": "benchmarks/gpu_path.md",
             "contributing": "CONTRIBUTING.md",
             "changelog": "CHANGELOG.md"}

project = "gluon_amp"
version = release = gluon_amp.__version__
project_copyright = "the gluon_amp contributors, Apache-2.0"
extensions = ["myst_nb"]
exclude_patterns = ["_build", "figures"]

html_theme = "furo"
pygments_style = "default"         # removed lines red, added ones green; contrasts of at least 4.5
pygments_dark_style = "monokai"
html_title = f"gluon_amp {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
smartquotes_action = "D"           # no smart quotes

# ---- the tutorial's notebooks: run at each build, each in its own folder

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"  # MXNet's messages; tests/test_tutorial.py checks warnings
for name, value in {
        "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
        # MXNet 1.9.1 imports newer packages with deprecations
        "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
        "MATPLOTLIBRC": str(HERE / "_static" / "matplotlibrc")}.items():
    os.environ.setdefault(name, value)

def read_page(app, name, text):
    """Includes the text of a file, with links adapted, and a download link of a notebook."""
    folder = (HERE / name).parent
    if name in PUBLISHED:
        source = ROOT / PUBLISHED[name]
        app.env.note_dependency(str(source))
        text[0], folder = source.read_text(), source.parent
    here = (HERE / name).parent
    text[0] = re.sub(r'<picture>.*?srcset="(.*?)".*?src="(.*?)" alt="(.*?)".*?</picture>',
                     _both_widths, text[0], flags=re.S)
    text[0] = re.sub(r"\]\(([^)\s#]+)((?:#[^)\s]*)?)\)",
                     lambda link: f"]({_link(link[1], folder, here)}{link[2]})", text[0])
    if name.startswith("tutorial/"):
        file = f"{name.rpartition('/')[2]}.ipynb"
        download = rf"\g<0>\n{{nb-download}}`Download this notebook <{file}>`\n"
        text[0] = re.sub(r"(?m)^# .*\n", download, text[0], count=1)


def finish_notebooks(app, error):
    """Writes the notebooks for download, with embedded pictures and without roles."""
    for path in () if error else Path(app.outdir).glob("_downloads/*/*.ipynb"):
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                text = re.sub(r"\{nb-download\}.*\n?", "", "".join(cell["source"]))
                cell["source"] = re.sub(r"(!\[[^\]]*\]\()([^)\s:]+\.png)\)", _embedded, text)
        path.write_text(json.dumps(notebook, indent=1) + "\n")


def _embedded(picture):
    png = base64.b64encode((HERE / "tutorial" / picture[2]).read_bytes()).decode()
    return f"{picture[1]}data:image/png;base64,{png})"


def _both_widths(picture):
    """Returns the light and dark versions of a picture; site.css shows one."""
    narrow, wide, alt = (" ".join(part.split()) for part in picture.groups())
    return "\n\n".join(f":::{{container}} {width}\n![{alt}]({path})\n:::"
                       for width, path in (("wide", wide), ("narrow", narrow)))


def _link(target, folder, here):
    """Returns a link of a file in `folder` as a link of a page in `here`."""
    path = (folder / target).resolve()
    if "://" in target or not path.exists():
        return target
    for page, file in PUBLISHED.items():
        if path == ROOT / file:
            path = HERE / f"{page}.md"
    if path.is_dir() or path.suffix == ".md" and HERE not in path.parents:
        path = path / "README.md" if path.is_dir() else path.with_suffix(".html")  # a report
    return os.path.relpath(path, here)


class DarkImages(SphinxTransform):
    """Adds a dark version after each picture; the theme shows one of them."""

    default_priority = 400

    def apply(self):
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.env.relfn2path(image["uri"])[1])
            if path.suffix == ".png" and path.exists():
                with Image.open(path) as file:
                    image["classes"].append("small" if file.width <= 820 else "large")
                other = image.deepcopy()
                other["uri"] = "/" + os.path.relpath(darkened(path, self.app), self.app.srcdir)
                other["classes"].append("only-dark")
                image["classes"].append("only-light")
                image.parent.insert(image.parent.index(image) + 1, other)


class WholeWords(SphinxTransform):
    """Prevents line breaks at hyphens of short code, such as names of flags."""

    default_priority = 400

    def apply(self):
        for code in self.document.findall(nodes.literal):
            if len(code.astext()) <= 26 and " " not in code.astext():
                code["classes"].append("whole")


class StackedTables(SphinxTransform):
    """Marks tables of text: on a phone, a cell is a line that begins with its column's name. Other
    tables scroll there, and their short cells are not broken into lines."""

    default_priority = 400

    def apply(self):
        for table in self.document.findall(nodes.table):
            head, *rows = table.findall(nodes.row)
            for cell in table.findall(nodes.entry):
                if len(cell.astext()) <= 24 and cell.parent is not head:
                    cell["classes"].append("short")
            longest = sorted(max(len(cell.astext()) for cell in row) for row in rows)
            if not rows or longest[len(longest) // 2] < 25:  # a table of numbers
                continue
            table["classes"].append("stacked")
            for row in rows:
                for column, cell in zip(head[1:], row[1:]):
                    if column.astext() and cell.astext():
                        cell[0].insert(0, nodes.inline("", f"{column.astext()}: ",
                                                       classes=["column"]))


class LinkedNames(SphinxTransform):
    """Links code such as `amp.convert(net)`, and the names on the API's first page, to the API."""

    default_priority = 400

    def apply(self):
        pages = {name: path.stem for path in (HERE / "api").glob("*.md")
                 for name in re.findall(r'<a id="gluon_amp\.([\w.]+)">', path.read_text())}
        module = r"(?:(?:gluon_)?amp\.)" + ("?" if self.env.docname == "api" else "")
        called = re.compile(rf"{module}([\w.]+)(?:\(.*\))?")
        for code in list(self.document.findall(nodes.literal)):
            name = called.fullmatch(code.astext())
            if not name or name[1] not in pages \
                    or isinstance(code.parent, (nodes.reference, nodes.title)):
                continue
            uri = self.app.builder.get_relative_uri(self.env.docname, f"api/{pages[name[1]]}")
            link = nodes.reference("", "", refuri=f"{uri}#gluon_amp.{name[1]}", internal=True)
            code.replace_self(link)
            link += code


def darkened(path, app):
    """Inverts the lightness of a picture and keeps its hues. Returns its path."""
    inside = path.relative_to(ROOT) if ROOT in path.parents else path.name  # a notebook's output
    to = Path(app.doctreedir) / "dark" / inside
    to.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(path) as file:
        light = np.asarray(file.convert("RGB")) / 255
    dark = light + 1 - light.max(2, keepdims=True) - light.min(2, keepdims=True)
    page = np.array([19, 20, 22]) / 255  # the theme's dark background, in place of black
    Image.fromarray(np.uint8(np.round(255 * (page + dark * (1 - page))))).save(to)
    return to


def draw_figures(app):
    """Draws missing figures. Existing ones are kept: their last bits depend on the processor."""
    if not (HERE / "figures").exists():
        _figures().draw(HERE / "figures")


def write_live_page(app, error):
    """Writes the X-ray that the first page shows."""
    if error is None:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(_figures().xray_of_overflow().save(Path(folder) / "xray")).read_text()
        Path(app.outdir, "live_xray.html").write_text(page.replace(f"{ROOT}{os.sep}", ""))


def _figures():
    logging.getLogger("gluon_amp").setLevel(logging.WARNING)
    sys.path.insert(0, str(HERE))
    return importlib.import_module("figures")


def setup(app):
    app.connect("source-read", read_page)
    app.connect("build-finished", finish_notebooks)
    app.connect("build-finished", write_live_page)
    app.add_transform(DarkImages)
    app.add_transform(WholeWords)
    app.add_transform(StackedTables)
    app.add_transform(LinkedNames)
    app.connect("builder-inited", draw_figures)
