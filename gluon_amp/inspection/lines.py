"""The lines of a `Monitor`'s file: the Monitor writes them, and pages read them."""
import json
import math
from typing import Any, Callable, Dict, Iterator, List, Union

from .hooks import AfterRounding
from .tensors import Counts, Key, as_pairs

Line = Dict[str, Any]


def tensor_line(step: int, key: Key, inputs: List[str], dtype: str, scale: float,
                measured: Union[Counts, AfterRounding]) -> Line:
    """Returns the line of an output or a gradient of a node with these inputs."""
    line = {"step": step, "node": key.node,
            "tensor": inputs[key.which] if key.backward else
            "output" if key.which == 0 else f"output {key.which}", "index": key.which,
            "kind": "gradient" if key.backward else "output", "format": dtype,
            **_measured(measured, dtype)}
    if key.backward:
        line["loss_scale"] = scale
    return line


def _measured(measured: Union[Counts, AfterRounding], dtype: str) -> Line:
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


# ---- files --------------------------------------------------------------------------------------


def lines_in(path: str, fits: Callable[[Line], bool]) -> Iterator[Line]:
    """Yields the lines of a file, without an incomplete last one.

    Args:
        path: the file.
        fits: returns whether a line has all it needs.
    """
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
                is_known = isinstance(line, dict) and fits(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                is_known = False
            if not is_known:
                raise ValueError(f"line {number} of {path} is no line of statistics: "
                                 f"{text[:60]!r}")
            yield line


