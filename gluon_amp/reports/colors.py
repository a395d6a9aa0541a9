"""The colors of number types in reports, documentation and scripts.

`COLORS` are for a light background, `DARK` for a dark one. Both are distinguishable for the
color-blind.
"""
import re

INK = "#1f2329"  # of text and axes
COLORS = {"float32": INK, "float16": "#0072b2", "bfloat16": "#009e73",
          "tf32": "#cc79a7", "other": "#e69f00", "error": "#b85000"}
DARK = {"float32": "#e4e6ea", "float16": "#4ea8de", "bfloat16": "#2fc79b",
        "tf32": "#e0a3c4", "other": "#f0b840", "error": "#f08c4a"}
GREY = "#808080"  # of grids and leaders, on either paper


def number_type(dtype: str) -> str:
    """Returns the number type in the name of a type or of a policy: float16 in mixed_float16."""
    match = re.search(r"bfloat16|tf32|float16|float32", dtype)
    return match[0] if match else "other"


def color(dtype: str) -> str:
    return COLORS[number_type(dtype)]
