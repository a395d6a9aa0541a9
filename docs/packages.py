"""Reads the imports of gluon_amp's files, and draws its packages."""
import ast
import functools
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PACKAGE = Path(__file__).resolve().parents[1] / "gluon_amp"
INK, LINE, FILL = "#1f2329", "#8a919c", "#e8f1fa"
# From left to right; the imports decide the height.
ACROSS = {"cpu": 0.5, "graph": 0.3, "parallel": 0.75, "gluon": 0.2, "training": 0.6, "cuda": 0.27,
          "symbolic": 0.68, "reports": 0.89, "onnx": 0.12, "inspection": 0.78, "tools": 0.55}


@functools.lru_cache(maxsize=None)
def files():
    """Returns the syntax tree of each Python file, by its path without the suffix."""
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text())
            for path in sorted(PACKAGE.rglob("*.py"))}


@functools.lru_cache(maxsize=None)
def imports():
    """Returns the files that each file imports, also inside functions."""
    trees = files()
    return {name: set(_imported(name, tree, trees)) for name, tree in trees.items()}


def _imported(name, tree, names):
    folder = name.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[:len(folder) - node.level + 1] + (node.module or "").split(".")
            base = [part for part in base if part]
            for alias in node.names:
                for target in ([*base, alias.name], [*base, alias.name, "__init__"], base,
                               [*base, "__init__"]):
                    if "/".join(target) in names:
                        yield "/".join(target)
                        break


def packages():
    """Returns the packages that each package imports."""
    found = {}
    for name, targets in imports().items():
        if "/" in name:
            package = name.split("/")[0]
            found.setdefault(package, set()).update(
                target.split("/")[0] for target in targets if "/" in target)
            found[package].discard(package)
    return found


def picture():
    """Returns a picture of the packages in layers. An arrow leads to each imported package, unless
    another imported package imports it."""
    direct = packages()

    def all_below(package):
        return direct[package].union(*map(all_below, direct[package]))

    def height(package):
        return 1 + max(map(height, direct[package]), default=-1)

    drawn = {package: sorted(below for below in direct[package] if not any(
        below in all_below(other) for other in direct[package])) for package in direct}
    places = {package: (ACROSS[package], height(package)) for package in sorted(direct)}
    # A package without imports is below the first that imports it.
    places.update({package: (ACROSS[package], min(
        places[other][1] for other in direct if package in direct[other]) - 1)
        for package in direct if not direct[package]})
    heights = 1 + max(y for _, y in places.values())
    figure = Figure(figsize=(5.4, 0.58 * heights), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(-0.4, heights - 0.6))
    axes.axis("off")
    for package, below in drawn.items():
        x, y = places[package]
        for other in below:
            to, under = places[other]
            axes.annotate("", (to, under + 0.27), (x, y - 0.27),
                          arrowprops={"arrowstyle": "->", "color": LINE, "lw": 0.9})
    for package, (x, y) in places.items():
        axes.add_patch(FancyBboxPatch((x - 0.09, y - 0.18), 0.18, 0.36, facecolor=FILL,
                                      edgecolor=LINE, boxstyle="round,pad=0.01", lw=0.8))
        axes.text(x, y, f"{package}/", ha="center", va="center", fontsize=9.5, color=INK)
    return figure


def draw(path):
    """Writes the picture as a PNG file, with the imports that it shows as its comment."""
    picture().savefig(path, dpi=150, metadata={"Comment": comment()})


def comment():
    return "; ".join(f"{package}: {' '.join(sorted(below))}"
                     for package, below in sorted(packages().items()))
