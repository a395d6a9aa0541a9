"""`gluon-amp profile`: time and memory of a step by block, from recordings of `Monitor`.

In an observed step, each operator ends before the next one starts. Times are medians over the
observed steps. Bytes are those of the arrays that operators write: MXNet reuses memory, so a block
may hold less.
"""
from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence

from ..checks import aligned, counted, imports_of, listed
from ..files import new_folder
from ..inspection.lines import Line, recording

ROWS = 30  # blocks are joined until there are no more
KINDS = ("forward", "backward")
_MEGABYTE = 2.0 ** 20


@dataclass
class Cost:
    """Seconds and bytes of a block in a step, forward and backward."""
    seconds: Dict[str, float]
    bytes: Dict[str, int]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Steps(NamedTuple):
    """A recording.

    Attributes:
        head: its first line.
        observed: the median seconds of observed steps, in which each operator is waited for.
        plain: the median seconds of the steps between them; None if there were none.
        costs: the costs of each block in each step, by the block's path.
        classes: the class of the block at each path.
    """
    head: Line
    observed: float
    plain: Optional[float]
    costs: List[Dict[str, Cost]]
    classes: Dict[str, str]

    @property
    def paths(self) -> List[str]:
        return list(dict.fromkeys(path for costs in self.costs for path in costs))

    def at_depth(self, depth: int) -> Dict[str, Cost]:
        """Returns the medians over the steps, with blocks joined from this depth on."""
        steps: List[Dict[str, Cost]] = []
        for costs in self.costs:
            joined: Dict[str, Cost] = {}
            for path, cost in costs.items():
                into = joined.setdefault(_cut(path, depth), Cost(dict.fromkeys(KINDS, 0.0),
                                                                 dict.fromkeys(KINDS, 0)))
                for kind in KINDS:
                    into.seconds[kind] += cost.seconds[kind]
                    into.bytes[kind] += cost.bytes[kind]
            steps.append(joined)
        paths = dict.fromkeys(path for joined in steps for path in joined)
        return {path: _median([joined[path] for joined in steps if path in joined])
                for path in paths}


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost({kind: median(cost.seconds[kind] for cost in costs) for kind in KINDS},
                {kind: int(median(cost.bytes[kind] for cost in costs)) for kind in KINDS})


# ---- files --------------------------------------------------------------------------------------


def read(path: str) -> Steps:
    """Reads a recording."""
    head, rest = recording(path, "times", lambda line: any(
        line.keys() >= needed for needed in _NEEDED))
    steps: Dict[int, Dict[str, Cost]] = {}
    for line in (line for line in rest if "node" in line):
        costs = steps.setdefault(line["step"], {})
        cost = costs.setdefault(line["block"], Cost(dict.fromkeys(KINDS, 0.0),
                                                    dict.fromkeys(KINDS, 0)))
        cost.seconds[line["kind"]] += line["seconds"]
        cost.bytes[line["kind"]] += line["bytes"]
    if not steps:
        raise ValueError(f"{path} has no observed step: the interval of its Monitor is longer than "
                         "the training")
    walls = [line for line in rest if "observed_seconds" in line and line["step"] in steps]
    plain = [line["plain_seconds"] for line in walls if line["plain_seconds"] is not None]
    return Steps(head, median(line["observed_seconds"] for line in walls),
                 median(plain) if plain else None, list(steps.values()), head["blocks"])


_NEEDED = ({"step", "observed_seconds", "plain_seconds"},
           {"step", "node", "block", "kind", "seconds", "bytes"})


# ---- rows ---------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A block, and its cost in each recording; None where it is missing."""
    path: str
    name: str
    costs: List[Optional[Cost]]


def rows(recordings: Sequence[Steps], depth: Optional[int] = None) -> List[Row]:
    """Returns the blocks in order of computation.

    Args:
        depth: the length of paths; None: the largest with at most `ROWS` blocks.
    """
    if depth is None:
        paths = {path for steps in recordings for path in steps.paths}
        deepest = max(len(path.split(".")) for path in paths)
        depth = next((d for d in range(deepest, 1, -1)
                      if len({_cut(path, d) for path in paths}) <= ROWS), 1)
    found = [steps.at_depth(depth) for steps in recordings]
    classes = {path: name for steps in recordings for path, name in steps.classes.items()}
    paths_in_order = dict.fromkeys(path for costs in found for path in costs)
    return [Row(path, f"{path} {classes.get(path, '')}".strip(),
                [costs.get(path) for costs in found]) for path in paths_in_order]


def attributed(steps: Steps) -> float:
    """Returns the median seconds of an observed step that operators of the network take."""
    return median(sum(cost.total for cost in costs.values()) for costs in steps.costs)


def facts(recordings: Sequence[Steps], found: Sequence[Row]) -> List[Dict[str, Any]]:
    """Returns the profile as JSON-serializable values."""
    return [{"run": {key: value for key, value in steps.head.items() if key != "blocks"},
             "steps": len(steps.costs), "plain_seconds": steps.plain,
             "observed_seconds": steps.observed, "attributed_seconds": attributed(steps),
             "blocks": [{"block": row.path, "class": steps.classes.get(row.path, ""),
                         **{f"{kind}_seconds": cost.seconds[kind] for kind in KINDS},
                         **{f"{kind}_bytes": cost.bytes[kind] for kind in KINDS}}
                        for row in found for cost in [row.costs[i]] if cost is not None]}
            for i, steps in enumerate(recordings)]


def table(recordings: Sequence[Steps], found: Sequence[Row]) -> List[Dict[str, str]]:
    """Returns the rows' cells: milliseconds and megabytes of each recording, and the ratio of the
    second to the first."""
    labels = names(recordings)
    total = Row("", "all blocks", [_sum(row.costs[i] for row in found)
                                   for i in range(len(recordings))])
    made = []
    for row in [*found, total]:
        cells = {"block": row.name}
        for kind in KINDS:
            cells.update({f"{kind} ms{label}": "" if cost is None else
                          f"{1e3 * cost.seconds[kind]:.2f}"
                          for label, cost in zip(labels, row.costs)})
        if len(recordings) == 1:
            all_ = total.costs[0].total if total.costs[0] else 0.0
            cells["share"] = f"{row.costs[0].total / (all_ or 1):.0%}" if row.costs[0] else ""
        else:
            first, second = row.costs[:2]
            cells["time"] = f"{second.total / first.total:.2f}" \
                if first and second and first.total else ""
        cells.update({f"MB{label}": "" if cost is None else
                      f"{sum(cost.bytes.values()) / _MEGABYTE:.1f}"
                      for label, cost in zip(labels, row.costs)})
        made.append(cells)
    return made


def _sum(costs: Iterable[Optional[Cost]]) -> Cost:
    known = [cost for cost in costs if cost is not None]
    return Cost({kind: sum(cost.seconds[kind] for cost in known) for kind in KINDS},
                {kind: sum(cost.bytes[kind] for cost in known) for kind in KINDS})


def names(recordings: Sequence[Steps]) -> List[str]:
    """Returns what tells the recordings apart: the policy, the device or a number."""
    if len(recordings) == 1:
        return [""]
    for key in ("policy", "device", "gluon_amp"):
        found = [steps.head[key] for steps in recordings]
        if len({*found}) == len(found):
            return [f" {name}" for name in found]
    return [f" {i}" for i in range(1, 1 + len(recordings))]


# ---- text and files -----------------------------------------------------------------------------


def describe(recordings: Sequence[Steps], found: Sequence[Row]) -> str:
    """Returns the profile as text."""
    cells = table(recordings, found)
    return "\n".join([*map(headline, recordings), "",
                      *aligned([list(cells[0]), *(list(row.values()) for row in cells)]), "",
                      *notes(recordings)])


def headline(steps: Steps) -> str:
    """Returns a recording's step time, and the share that no block has."""
    share = attributed(steps) / steps.observed
    plain = "" if steps.plain is None else f"a step takes {1e3 * steps.plain:.2f} ms; "
    return f"{steps.head['policy']} on {steps.head['device']}: {plain}an observed one " \
           f"{1e3 * steps.observed:.2f} ms, {share:.0%} in blocks, {1 - share:.0%} in the loss, " \
           "the update, data and observation (medians of " \
           f"{counted(len(steps.costs), 'step')})"


def notes(recordings: Sequence[Steps]) -> List[str]:
    made = ["Each operator was waited for, so the times of blocks do not overlap. MB: of the "
            "arrays that operators write, of which MXNet reuses some."]
    if any(len(steps.costs) < 3 for steps in recordings):
        made.append("Fewer than 3 observed steps: the first one may include allocations and "
                    "searches for algorithms.")
    missing = listed(sorted({*recordings[0].paths} ^ {*recordings[-1].paths}))
    return [*made, *([f"Blocks of one recording only: {missing}."] if missing else [])]


def save(recordings: Sequence[Steps], found: Sequence[Row], folder: str) -> Path:
    """Writes profile.html and the picture to a new folder."""
    with imports_of("tools", "a picture"):  # matplotlib
        from ..reports.bars import bars
    from ..reports.page import page
    from ..reports.page import table as html_table
    from ..reports.write import figure, table_csv
    labels = names(recordings) if len(recordings) > 1 else [recordings[0].head["policy"]]
    picture = bars("profile", "Time of a step by block", "ms", [row.name for row in found], {
        label.strip(): (steps.head["policy"],
                        [[1e3 * cost.seconds[kind] if cost else 0.0 for kind in KINDS]
                         for cost in (row.costs[i] for row in found)])
        for i, (label, steps) in enumerate(zip(labels, recordings))}, KINDS)
    cells = table(recordings, found)
    said = [*map(headline, recordings), *notes(recordings)]
    body = "\n".join([*(f"<p>{escape(line)}</p>" for line in said), "<div class=plots>",
                      figure(picture, ""), "</div>", html_table(cells, ("block",), len(cells))])
    with new_folder(folder) as made:
        for name, content in (("profile.html", page("Profile of a step", body, "").encode()),
                              ("profile.csv", table_csv(cells).encode()),
                              ("profile.png", picture.png), ("profile.svg", picture.svg.encode())):
            Path(made, name).write_bytes(content)
    return Path(folder, "profile.html")


