"""Writes the files of a report: HTML, Markdown, CSV. Text from logs is escaped in all of them."""
from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from html import escape
from typing import Any, List, Sequence

from .colors import COLORS
from .compare import Group
from .page import cell, page, table
from .plots import Plot
from .runs import plain
from .summary import Cells, Verdict

TEXT = ("run", "runs", "against", "model", "dataset", "dtype", "verdict", "paired")  # columns
MOST_ROWS = 200  # of each table of the page, and of groups whose arguments are listed
LONGEST_VALUE = 200
CLASSES = {"the same": "same", "different": "different"}  # of outcomes: their colors


@dataclass
class Section:
    """The part of a report for one dataset."""
    title: str
    verdicts: List[Verdict]
    groups: List[Cells]
    runs: List[Cells]
    plots: List[Plot]
    prefix: str = ""  # of its plots' file names


def html_page(title: str, sections: Sequence[Section], verdicts: List[Cells], notes: List[str],
              groups: Sequence[Group]) -> str:
    """Returns the page, with plots, style and script in one file."""
    several = len(sections) > 1
    body = ["<ul class=verdicts>", *(_verdict(verdict, section.title if several else "")
                                     for section in sections for verdict in section.verdicts),
            "</ul>"]
    if verdicts:
        body.append(_folded("Table of verdicts", verdicts))
    for section in sections:
        title_of = escape(section.title[:LONGEST_VALUE]) if several else "Groups of runs"
        figures = "\n".join(_figure(plot, section.prefix) for plot in section.plots)
        body += [f"<h2>{title_of}</h2>", f"<div class=plots>\n{figures}\n</div>",
                 _table(section.groups)]
        if len(section.runs) > len(section.groups):
            body.append(_folded("Runs", section.runs))
    if notes:
        body += ["<h2>Notes</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
    body += ["<h2>Arguments</h2>", _arguments(groups)]
    return page(title, "\n".join(body), "")


def _verdict(verdict: Verdict, section: str) -> str:
    name = f"{section[:LONGEST_VALUE]}: " if section else ""
    head = f"<b>{escape(name + verdict.title)}</b> " if name or verdict.outcome else ""
    return f"<li class={CLASSES.get(verdict.outcome, 'open')}>{head}{escape(verdict.text)}</li>"


def _table(rows: List[Cells]) -> str:
    more = f"<p>{len(rows) - MOST_ROWS:,} more rows: the CSV files have all.</p>" \
        if len(rows) > MOST_ROWS else ""
    return table(rows, TEXT, MOST_ROWS) + more


def _folded(summary: str, rows: List[Cells]) -> str:
    return f"<details><summary>{summary} ({len(rows):,})</summary>\n{_table(rows)}</details>"


def _arguments(groups: Sequence[Group]) -> str:
    """Returns the arguments that all groups share, and then those of each group."""
    each = [{plain(name): plain(value)[:LONGEST_VALUE] for name, value in
             group.first.arguments.items()} for group in groups]
    shared = {name: value for name, value in each[0].items()
              if all(other.get(name) == value for other in each)}
    several = len({group.section for group in groups}) > 1
    parts: List[Any] = [("Of all groups", shared)]
    for group, arguments in zip(groups[:MOST_ROWS], each):
        parts.append((group.named(several), {name: value for name, value in arguments.items()
                                             if name not in shared}))
    return "\n".join(
        f"<details><summary>{escape(name)}</summary><dl>" + "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in of.items())
        + "</dl></details>" for name, of in parts if of)


def _figure(plot: Plot, prefix: str) -> str:
    """Returns the SVG without its prologue, in the page's colors, with unique ids and a caption."""
    caption = escape(plot.caption)
    svg = plot.svg[plot.svg.index("<svg"):].rstrip()
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|"#|url\(#)', rf"\g<1>{prefix}{plot.name}-", svg)
    svg = re.sub(r' d="[^"]+"', _shorter, svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
    return f"<figure>\n{svg}\n<figcaption>{caption}</figcaption>\n</figure>"


def _shorter(path: re.Match[str]) -> str:
    """Rounds coordinates to hundredths of a point."""
    return re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace("\n", " ")


# ---- Markdown

def markdown(title: str, sections: Sequence[Section], verdicts: List[Cells],
             notes: List[str]) -> str:
    several = len(sections) > 1
    lines = [f"# {_escaped(title)}", ""]
    for section in sections:
        for verdict in section.verdicts:
            name = ": ".join(filter(None, [section.title if several else "", verdict.title]))
            lines.append(f"- {f'**{_escaped(name)}.** ' if name else ''}{_escaped(verdict.text)}")
    lines += ["", *_markdown_table(verdicts)]
    for section in sections:
        if several:
            lines += [f"## {_escaped(section.title)}", ""]
        for plot in section.plots:
            lines += [f"![{_escaped(plot.caption)}]({section.prefix}{plot.name}.png)", ""]
        lines += _markdown_table(section.groups)
    lines += [f"- {_escaped(note)}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(rows: List[Cells]) -> List[str]:
    if not rows:
        return []
    return ["| " + " | ".join(map(_escaped, rows[0])) + " |",
            "| " + " | ".join("---" if column in TEXT else "---:" for column in rows[0]) + " |",
            *("| " + " | ".join(map(_escaped, row.values())) + " |" for row in rows), ""]


def _escaped(text: str) -> str:
    """Escapes text for Markdown and HTML."""
    escaped = re.sub(r"([\\`*_{}\[\]<>|#&!$~])", r"\\\1", " ".join(text.split()))
    begins = r"^(\d*)([-+=.)])(?=[-+=\s]|$)"  # a list, or a line
    return re.sub(begins, r"\1\\\2", escaped)


# ---- CSV

def table_csv(rows: List[Cells]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(cell, columns))
    writer.writerows([cell(row.get(column, "")) for column in columns] for row in rows)
    return file.getvalue()
