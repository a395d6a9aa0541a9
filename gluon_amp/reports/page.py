"""The page and the tables of a report or an X-ray. The page, from the files in `pages`, loads no
other files."""
import pkgutil
import re
from html import escape
from string import Template
from typing import Collection, Dict, Mapping, Sequence

from .colors import COLORS, DARK

LONGEST_CELL = 60  # characters; CSV files have all


def part(name: str, package: str = __package__) -> str:
    """Returns a file of a package's folder `pages`."""
    data = pkgutil.get_data(package, f"pages/{name}")
    assert data is not None
    return data.decode()


def page(title: str, body: str, script: str) -> str:
    """Returns a page, with the style and the script that all pages share."""
    style = Template(part("page.css")).substitute(light=_variables(COLORS), dark=_variables(DARK))
    return Template(part("page.html")).substitute(
        title=escape(title), body=body, style=style.rstrip(),
        script=(part("page.js") + script).rstrip())


def _variables(colors: Dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def table(rows: Sequence[Mapping[str, str]], texts: Collection[str], most: int,
          kind: str = "") -> str:
    """Returns a table that sorts by the clicked column.

    Args:
        rows: the text of each column, by its name.
        texts: the columns of text, which is aligned left.
        most: the number of rows that are shown.
        kind: a class of the table.
    """
    if not rows:
        return ""
    kinds = [kind, *(f"text{i}" for i, column in enumerate(rows[0], 1) if column in texts)]
    head = "".join(f"<th><button>{escape(column)}</button></th>" for column in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{_cut(text)}</td>" for text in row.values()) + "</tr>"
                     for row in rows[:most])
    return f'<div class=wide>\n<table class="{" ".join(kinds).strip()}">\n<thead><tr>{head}</tr>' \
           f"</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n" \
           "<p class=hint>→ The table goes on to the right.</p>"


def cell(text: str) -> str:
    """Returns text that a spreadsheet does not interpret as a formula; numbers stay numbers."""
    return f"'{text}" if re.match(r"[=+\-@\t\r]", text) and not re.fullmatch(
        r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text) else text


def _cut(text: str) -> str:
    return escape(text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL - 1]}…")
