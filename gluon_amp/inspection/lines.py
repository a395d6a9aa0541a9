"""The lines of a `Monitor`'s file: the Monitor writes them; pages, diff and profile read them."""
import json
import math
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from .._mxnet import mx, np
from ..annotations import Network, Trainer
from ..formats import FORMATS
from ..gluon.records import innermost, paths_in
from ..policy import POLICIES
from ..version import __version__
from .hooks import AfterRounding, Recorded, Timed
from .tensors import Counts, Key, as_pairs
from .watch import hybrid_blocks

Line = Dict[str, Any]

DIGITS = 9  # of numbers in sketches


def head(net: Network, trainer: Trainer, record: str) -> Line:
    """Returns the first line of a recording."""
    converted = hybrid_blocks(net)
    policy = converted[0]._amp.policy if converted else POLICIES["float32"]
    formats = (policy.parameter, policy.product, policy.activation)
    return {"record": record, "policy": policy.name,
            "formats": sorted({format_.name for format_ in formats} & FORMATS.keys()),
            "device": " ".join(map(str, trainer._contexts)), "gluon_amp": __version__,
            "mxnet": mx.__version__, "numpy": np.__version__}


def tensor_line(step: int, key: Key, inputs: List[str], dtype: str, scale: float,
                measured: Union[Counts, AfterRounding, Recorded]) -> Line:
    """Returns the line of an output or a gradient of a node with these inputs."""
    line = {"step": step, "node": key.node,
            "tensor": inputs[key.which] if key.backward else
            "output" if key.which == 0 else f"output {key.which}", "index": key.which,
            "kind": "gradient" if key.backward else "output", "format": dtype,
            **_measured(measured, dtype)}
    if key.backward:
        line["loss_scale"] = scale
    elif isinstance(measured, Recorded):
        line["inputs"] = inputs
    return line


def variable_line(step: int, name: str, is_parameter: bool, dtype: str,
                  measured: Recorded) -> Line:
    """Returns the line of data or of a parameter."""
    return {"step": step, "node": name, "tensor": "value",
            "kind": "parameter" if is_parameter else "data", "format": dtype,
            **_measured(measured, dtype)}


class Places:
    """The places of a network's nodes. They are equal in all processes, although MXNet numbers
    blocks differently."""

    def __init__(self, net: Network) -> None:
        self._net, self._paths = net, paths_in(net)
        self._found: Dict[str, Any] = {}  # the innermost block of each node

    def _innermost(self, node: str) -> Any:
        if node not in self._found:
            found = innermost(node, self._paths)
            self._found[node] = self._net if found is None else found
        return self._found[node]

    def block(self, node: str) -> str:
        """Returns the path of a node's innermost block."""
        return self._paths[self._innermost(node)].lstrip(".")

    def classes(self) -> Dict[str, str]:
        """Returns the class of the block at each path."""
        return {path.lstrip("."): type(block).__name__ for block, path in self._paths.items()}

    def place(self, node: str) -> str:
        """Returns the path of a node's innermost block, and the rest of the node's name."""
        prefix = self._innermost(node).prefix
        return f"{self.block(node)}/{node[len(prefix) if node.startswith(prefix) else 0:]}"


def _measured(measured: Union[Counts, AfterRounding, Recorded], dtype: str) -> Line:
    if isinstance(measured, Recorded):
        return {**_statistics(measured.counts), "checksum": f"{measured.checksum:08x}",
                "sketch": [float(f"{number:.{DIGITS}g}") for number in measured.sketch]}
    if isinstance(measured, Counts):  # of the engine, before rounding
        many = max(measured.numbers, 1)
        return {**_measured(AfterRounding.of_counts(measured, dtype), dtype),
                "underflow": measured.flushed / many,
                "overflow": (measured.overflowed + measured.infinite) / many}
    return {**_statistics(measured),
            "bins": None if measured.bins is None else as_pairs(measured.bins)}


def _statistics(counts: AfterRounding) -> Line:
    many = max(counts.numbers, 1)
    finite = max(many - counts.infinite - counts.nan, 1)
    mean = counts.squares / finite
    return {"numbers": counts.numbers, "rms": math.sqrt(mean) if math.isfinite(mean) else None,
            "least": counts.least, "largest": counts.largest, "zero": counts.zero / many,
            "underflow": None, "subnormal": counts.subnormal / many,
            "overflow": counts.infinite / many, "nan": counts.nan}


# ---- times --------------------------------------------------------------------------------------


def time_lines(step: int, places: Places, found: Mapping[Key, Tuple[float, Timed]],
               format_of: Callable[[Key], str]) -> List[Line]:
    """Returns a line for each node, forward and backward."""
    lines: Dict[Tuple[str, bool], Line] = {}
    for key, (_, timed) in found.items():
        line = lines.setdefault((key.node, key.backward), {
            "step": step, "node": key.node, "block": places.block(key.node),
            "kind": "backward" if key.backward else "forward", "format": format_of(key),
            "seconds": 0.0, "bytes": 0})
        line["seconds"] = round(line["seconds"] + timed.seconds, 7)
        line["bytes"] += timed.bytes
    return [*lines.values()]


class Clock:
    """The wall time of observed steps, and of those between them."""

    def __init__(self) -> None:
        self._began: Optional[float] = None  # the first step that is not observed
        self._steps = 0
        self._plain: Optional[float] = None  # the mean of the last such steps
        self._observed = 0.0

    def step(self) -> None:
        """Ends a step that is not observed. The first one, which traces the network, counts not."""
        if self._began is None:
            mx.nd.waitall()
            self._began = time.perf_counter()
        else:
            self._steps += 1

    def observe(self) -> None:
        """Begins an observed step."""
        mx.nd.waitall()
        now = time.perf_counter()
        self._plain = (now - self._began) / self._steps if self._began and self._steps else None
        self._observed = now

    def line(self, step: int) -> Line:
        """Ends an observed step, and returns its line."""
        mx.nd.waitall()
        return {"step": step, "observed_seconds": round(time.perf_counter() - self._observed, 7),
                "plain_seconds": None if self._plain is None else round(self._plain, 7)}

    def resume(self) -> None:
        """Begins steps that are not observed."""
        self._began, self._steps = time.perf_counter(), 0


# ---- files --------------------------------------------------------------------------------------


def lines_in(path: str, fits: Callable[[Line], bool]) -> Iterator[Line]:
    """Yields the lines of a file, without an incomplete last one.

    Args:
        path: the file.
        fits: returns whether a line that is not the first of a recording has all it needs.
    """
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
                is_known = isinstance(line, dict) and ("record" in line or fits(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                is_known = False
            if not is_known:
                raise ValueError(f"line {number} of {path} is no line of a recording: "
                                 f"{text[:60]!r}")
            yield line


def recording(path: str, record: str, fits: Callable[[Line], bool]) -> Tuple[Line, List[Line]]:
    """Returns the first line of a recording, and the others. `record` and `fits` are those of the
    `Monitor` and of `lines_in`."""
    lines = lines_in(path, fits)
    try:
        first = next(lines, {})
    except ValueError:
        first = {}
    if first.get("record") != record:
        raise ValueError(f"{path} is no recording of {record}. Valid: a file of gluon_amp.Monitor("
                         f"..., record={record!r})")
    others = list(lines)
    if any("record" in line for line in others):
        raise ValueError(f"{path} holds several recordings. Valid: a file for each run")
    return first, others
