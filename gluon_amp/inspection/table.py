"""Rows of an X-ray's table: what its files and its page say of a tensor, of a
parameter, and of its updates."""
import math
from typing import Any, Dict, Iterable, Optional

from ..formats import FLOAT16, FLOAT32, Format
from .statistics import Counts


def row(view: Any, tensor: Any, format_: Optional[Format] = None) -> Dict[str, Any]:
    """What the table says of a tensor. `format_`: as if it had that format."""
    asked = format_ or (tensor.format if tensor.is_low else FLOAT16)
    return {"place": tensor.place, "tensor": tensor.name, "kind": tensor.kind,
            "operator": tensor.op, "format": tensor.format.name, **_numbers(tensor.counts, asked),
            "own_snr": as_number(tensor.counts.own_snr if tensor.is_low else None),
            "snr": as_number(tensor.snr), "inherited_snr": as_number(view.inherited(tensor))}


def rows_of_weights(view: Any) -> Iterable[Dict[str, Any]]:
    """What it says of the parameters, and of what the steps added to them."""
    for weight in view.weights:
        yield {"tensor": weight.name, "kind": "weight", "format": weight.format.name,
               **_numbers(weight.counts, FLOAT16)}
        if weight.updates is not None:
            yield {"tensor": weight.name, "kind": "update", "format": FLOAT32.name,
                   **_numbers(weight.updates, FLOAT16), "without_master": weight.without_master}


def _numbers(counts: Counts, asked: Format) -> Dict[str, Any]:
    headroom = counts.headroom(asked)
    return {"numbers": counts.numbers, **counts.shares(asked),
            "not_finite": counts.infinite + counts.nan,
            "smallest": counts.range and counts.range[0],
            "largest": counts.range and counts.range[1],
            "bits_below": headroom and headroom[0], "bits_above": headroom and headroom[1]}


def as_number(value: Optional[float]) -> Optional[float]:
    """For tables: infinities and NaN are left out."""
    return None if value is None or not math.isfinite(value) else round(value, 1)
