"""The files of a report: HTML, Markdown, CSV. What comes from logs is text in all of them."""
import csv
import io
import re
from html import escape
from string import Template
from typing import List, Sequence

from .plots import PALETTE, Plot
from .runs import Run, plain
from .summary import Row

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --line: #ccd; --shade: #f4f5f8; $light }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181d; --line: #3a3f4a; --shade: #20242c; $dark }
}
body { color: var(--color0); background: var(--paper); font: 16px/1.5 system-ui, sans-serif;
       max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.5rem; text-align: right; border-bottom: 1px solid var(--line); }
th.text, td.text { text-align: left; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--color1); }
th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
tbody tr:hover { background: var(--shade); }
figure { margin: 2rem 0; }
figure svg { width: 100%; height: auto; max-width: 46rem; }
figcaption, details { font-size: 0.9rem; }
td { white-space: nowrap; }
li, dd { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1rem; }
dd { margin: 0; }
</style>
</head>
<body>
<h1>$title</h1>
<div class="wide">
<table>
<thead><tr>$head</tr></thead>
<tbody>
$body
</tbody>
</table>
</div>
$notes
$figures
<h2>Arguments</h2>
$arguments
<script>
for (const [column, th] of document.querySelectorAll("th").entries()) {
  th.firstChild.addEventListener("click", () => {
    const up = th.getAttribute("aria-sort") !== "ascending";
    for (const other of document.querySelectorAll("th")) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[column].textContent;
    const body = document.querySelector("tbody");
    const order = (a, b) => {  // empty cells last, numbers as numbers
      const [x, y] = [value(a), value(b)];
      if (!x || !y) return !x - !y;
      return (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y) * (up ? 1 : -1);
    };
    body.append(...[...body.rows].sort(order));
  });
}
</script>
</body>
</html>
""")
TEXT = ("run", "model", "dataset", "dtype")  # columns
DARK = ("#e4e6ea", "#4ea8de", "#f08c4a", "#2fc79b", "#e0a3c4", "#f0b840", "#7cc8f0")  # PALETTE's


def html_page(title: str, table: List[Row], notes: List[str], plots: List[Plot],
              runs: List[Run]) -> str:
    """One file: pictures and style are in it."""
    def cell(tag: str, column: str, text: str) -> str:
        return f"<{tag}{' class=text' if column in TEXT else ''}>{text}</{tag}>"

    return PAGE.substitute(
        title=escape(title), light=_colors(PALETTE), dark=_colors(DARK),
        head="".join(cell("th", c, f"<button>{escape(c)}</button>") for c in table[0]),
        body="\n".join("<tr>" + "".join(cell("td", c, escape(t)) for c, t in row.items()) + "</tr>"
                       for row in table),
        notes="<h2>Notes</h2>\n<ul>\n" + "\n".join(f"<li>{escape(n)}</li>" for n in notes)
        + "\n</ul>" if notes else "",
        figures="\n".join(f"<figure>\n{_inline(plot)}\n<figcaption>{escape(plot.alt)}"
                          "</figcaption>\n</figure>" for plot in plots),
        arguments="\n".join(
            f"<details><summary>{escape(run.name)}</summary><dl>" + "".join(
                f"<dt>{escape(plain(key))}</dt><dd>{escape(plain(value))}</dd>"
                for key, value in run.arguments.items()) + "</dl></details>" for run in runs))


def _colors(palette: Sequence[str]) -> str:
    return " ".join(f"--color{i}: {color};" for i, color in enumerate(palette))


def _inline(plot: Plot) -> str:
    """The SVG without its prologue, in the page's colors, with names of its own and its words."""
    svg = plot.svg[plot.svg.index("<svg"):].rstrip()
    for i, color in enumerate(PALETTE):
        svg = svg.replace(color, f"var(--color{i})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|"#|url\(#)', rf"\g<1>{plot.name}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(plot.alt)}"', 1)


def markdown(title: str, table: List[Row], notes: List[str], plots: List[Plot]) -> str:
    lines = [f"# {_escaped(title)}", ""]
    lines += ["| " + " | ".join(map(_escaped, table[0])) + " |",
              "| " + " | ".join("---" if c in TEXT else "---:" for c in table[0]) + " |"]
    lines += ["| " + " | ".join(map(_escaped, row.values())) + " |" for row in table]
    lines += ["", *(f"- {_escaped(note)}" for note in notes)]
    lines += [f"\n![{_escaped(plot.alt)}]({plot.name}.png)" for plot in plots]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Text that Markdown and HTML take as such."""
    return re.sub(r"([\\`*_{}\[\]<>|#&!$~])", r"\\\1", " ".join(text.split()))


def table_csv(table: List[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return file.getvalue()
