"""What has been done since the last step: the one value that holds it."""
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .._mxnet import mx, np

Place = Tuple[int, int]  # a parameter's number and a device's


@dataclass
class Gradient:
    """The gradient of one parameter on one device."""
    name: str
    place: Place
    weight: "mx.nd.NDArray"
    array: "mx.nd.NDArray"  # what the update uses: the gradient itself, or what stands for it
    own: "mx.nd.NDArray"  # the gradient itself, which is watched


@dataclass
class Pending:
    """What has been done since the last step.

    Attributes:
        scale: of the backward passes; None before the first.
        losses: what they began at, without graphs.
        written: the gradients that they wrote.
        stale: names of those that the last of them left alone, as all before it.
        unscaled: float32 gradients that the update is to use instead.
        summed: float32 sums over workers of float16 gradients, to be used instead of these.
        are_summed: whether gradients have been summed over devices and workers.
        moved: whether weights of any worker became rank 0's in between.
        max_norm: the norm that the next update is clipped to.
        watched: gradients that nobody is to write into, and how often they have been written.
        counts: of gradients that were watched: how often they have been written meanwhile.
        seen: gradients as `settle` has seen them, and their sums of squares.
    """
    scale: Optional[float] = None
    losses: List["mx.nd.NDArray"] = field(default_factory=list)
    written: Dict[Place, Gradient] = field(default_factory=dict)
    stale: List[str] = field(default_factory=list)
    unscaled: Optional[Dict[Place, "mx.nd.NDArray"]] = None
    summed: Dict[Place, "mx.nd.NDArray"] = field(default_factory=dict)
    are_summed: bool = False
    moved: bool = False
    max_norm: Optional[float] = None
    watched: Optional[Tuple[Sequence[Gradient], Optional["mx.nd.NDArray"]]] = None
    counts: List[Tuple[Sequence[Gradient], Any]] = field(default_factory=list)
    seen: Optional[Tuple[Sequence[Gradient], "np.ndarray[Any, Any]"]] = None
