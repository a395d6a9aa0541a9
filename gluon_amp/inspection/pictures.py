"""PNGs of an X-ray, for papers."""
import math
import os
from typing import Any, List

from matplotlib.figure import Figure

from .._mxnet import np
from ..formats import FLOAT16
from ..report.colors import COLORS, GREY, INK
from .tensors import Tensor

_LOW, _HIGH = -40, 24


def draw(view: Any, folder: str) -> None:
    """Writes forward.png and backward.png."""
    for name, backward in (("forward", False), ("backward", True)):
        tensors = [t for t in view.tensors if t.key.backward == backward and t.counts]
        if tensors:
            figure = _heat(sorted(tensors, key=lambda t: t.place))
            figure.savefig(os.path.join(folder, f"{name}.png"), dpi=200)


def _heat(tensors: List[Tensor]) -> Figure:
    shares = np.array([t.counts.bins[_LOW + 127:_HIGH + 128] / max(t.counts.numbers, 1)
                       for t in tensors if t.counts])
    rows = len(tensors)
    figure = Figure(figsize=(7.5, 0.8 + min(0.16 * rows, 12)), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(np.sqrt(shares), aspect="auto", cmap="Blues", vmin=0, vmax=0.6,
                interpolation="nearest", extent=(_LOW, _HIGH + 1, rows - 0.5, -0.5))
    format_ = next((t.format for t in tensors if t.is_low), FLOAT16)
    for edge in (math.log2(format_.smallest), math.log2(format_.smallest_normal),
                 math.floor(math.log2(format_.largest)) + 1):
        axes.axvline(edge, color=COLORS["float8"], linewidth=0.8)
    if rows <= 75:
        axes.set_yticks(range(rows), [t.name for t in tensors], fontsize=5.5)
        for label, tensor in zip(axes.get_yticklabels(), tensors):
            label.set_color(INK if tensor.is_low else GREY)
    else:
        axes.set_ylabel("tensors, in order of computation")
    axes.set_xlabel("exponent, base 2")
    return figure
