"""One row of an X-ray's table: what its files and its page say of a tensor."""
import math
from typing import Any, Dict, Optional

from ..formats import FLOAT16, Format
from .statistics import Counts


def row(view: Any, tensor: Any, format_: Optional[Format] = None) -> Dict[str, Any]:
    """What the table says of a tensor. `format_`: as if it had that format."""
    counts: Counts = tensor.counts
    asked = format_ or (tensor.format if tensor.is_low else FLOAT16)
    shares, headroom = counts.shares(asked), counts.headroom(asked)
    return {"place": tensor.place, "tensor": tensor.name, "kind": tensor.kind,
            "operator": tensor.op, "format": tensor.format.name, "numbers": counts.numbers,
            **shares,
            "not_finite": counts.infinite + counts.nan,
            "smallest": counts.range and counts.range[0],
            "largest": counts.range and counts.range[1],
            "bits_below": headroom and headroom[0], "bits_above": headroom and headroom[1],
            "own_snr": as_number(counts.own_snr if tensor.is_low else None),
            "snr": as_number(tensor.snr), "inherited_snr": as_number(view.inherited(tensor))}


def as_number(value: Optional[float]) -> Optional[float]:
    """For tables: infinities and NaN are left out."""
    return None if value is None or not math.isfinite(value) else round(value, 1)
