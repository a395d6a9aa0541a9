"""What a converted block remembers, and what of it is traced; a walk through blocks."""
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Dict, FrozenSet, Iterator, List, Optional, Set, Tuple

from ..annotations import Block, Network
from ..cpu.scales import Scales
from ..graph.graph import Graph
from ..policy import Policy

Op = Tuple[Any, List[Any]]  # a CachedOp, and where its inputs come from


@dataclass
class Trace:
    """A graph that MXNet has traced, and the CachedOps that were made of it."""
    graph: Any  # what MXNet keeps in _cached_graph: the inputs' symbols, and the outputs'
    clean: Graph  # the same, read
    in_format: Any
    out_format: Any
    ops: Dict[Any, Op] = field(default_factory=dict)  # by whether on a GPU, and the inputs' types
    untrainable: Dict[Any, str] = field(default_factory=dict)  # likewise, why; "" if it trains
    devices: int = 1  # that wait for each other when it trains

    def is_alike(self, other: "Trace") -> bool:
        """Whether both compute the same; names of operators may differ."""
        return (self.in_format, self.out_format) == (other.in_format, other.out_format) \
            and self.clean.structure() == other.clean.structure()


@dataclass
class State:
    """What a converted block remembers."""
    policy: Policy
    active: bool  # whether it is hybridized once it is restored
    keep: bool  # stays float32, as one that is named or in such a one
    keep_nodes: FrozenSet[str]  # of a SymbolBlock: nodes that stay float32
    convert_child: Callable[[Any, str], None]  # converts a block that becomes a child at this place
    scales: Scales  # of the network that it is part of, where that was converted as a whole
    path: str  # where it is in that network, such as ".body.0"
    # by whether MXNet records, whether it trains, and how the arguments are nested: a block may
    # ask for any of them
    traces: Dict[Tuple[bool, bool, str], Trace] = field(default_factory=dict)
    changes_when_traced: int = 0
    # an X-ray's: called with the block, what a CachedOp depends on, and its data, it gives the
    # CachedOp that runs meanwhile
    stand_in: Optional[Callable[..., Op]] = None

    # How often a converted block got a new child, or a block was converted or restored: all
    # traced graphs from before are old.
    changes: ClassVar[int] = 0


def blocks_in(net: Network) -> Iterator[Any]:
    """The net's blocks, itself among them, each once, parents first."""
    seen: Set[int] = set()
    stack = [net]
    while stack:
        block = stack.pop()
        if id(block) not in seen:
            seen.add(id(block))
            yield block
            stack.extend(reversed(list(block._children.values())))


def paths_in(net: Network, path: str = "") -> Dict[Any, str]:
    """Where each block in a net is, which is at this place itself; the first place, if several."""
    made: Dict[Any, str] = {}

    def walk(block: Block, path: str) -> None:
        if block not in made:
            made[block] = path
            for name, child in block._children.items():
                walk(child, f"{path}.{name}")

    walk(net, path)
    return made


def parameters_in(net: Network) -> Dict[str, Any]:
    """The parameters of all of a net's blocks by their names, as `collect_params` gives them."""
    return {name: p for block in blocks_in(net) for name, p in block.params.items()}
