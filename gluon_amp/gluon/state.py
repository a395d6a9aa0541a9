"""The state of a converted block, its traced graphs, and traversal of blocks."""
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Optional,
    Set,
    Tuple,
)

from ..annotations import Block, Network
from ..cpu.scales import Scales
from ..graph.graph import Graph
from ..policy import Policy

Op = Tuple[Any, List[Any]]  # a CachedOp, and the sources of its inputs


@dataclass
class Trace:
    """A graph that MXNet has traced, and its CachedOps."""
    graph: Any  # MXNet's _cached_graph: the symbols of inputs and outputs
    clean: Graph  # the same as a Graph
    in_format: Any
    out_format: Any
    # by (whether on a GPU, the inputs' types), with the reason why it cannot train, or ""
    ops: Dict[Any, Tuple[Op, str]] = field(default_factory=dict)
    kept: FrozenSet[str] = frozenset()  # nodes that blocks in keep= have created
    devices: int = 1  # devices that synchronize in training

    def is_alike(self, other: "Trace") -> bool:
        """Whether both graphs compute the same; names of operators may differ."""
        mine, theirs = (t.clean.structure(t.kept) for t in (self, other))
        return (self.in_format, self.out_format) == (other.in_format, other.out_format) \
            and mine == theirs


@dataclass
class State:
    """The state of a converted block."""
    policy: Policy
    active: bool  # whether the restored block is hybridized
    keep: bool  # whether keep= has this block or one around it
    keep_nodes: FrozenSet[str]  # nodes that stay float32
    convert_child: Callable[[Any, str], None]  # converts a new child at this path
    scales: Scales  # of the converted network
    path: str  # the block's path in that network, such as ".body.0"
    # by (whether MXNet records, whether it trains, the nesting of the arguments): a forward may
    # depend on each
    traces: Dict[Tuple[bool, bool, str], Trace] = field(default_factory=dict)
    # set by an X-ray: takes the block, the key of `ops` and the data, and returns the CachedOp
    stand_in: Optional[Callable[..., Op]] = None
    kept: FrozenSet[str] = frozenset()  # those of the block's current trace
    # called with the names of the nodes that the block creates
    recorders: Tuple[Callable[[str], object], ...] = ()


def blocks_in(net: Network) -> Iterator[Any]:
    """Yields the net and all its descendants, each once, parents first."""
    seen: Set[int] = set()
    stack = [net]
    while stack:
        block = stack.pop()
        if id(block) not in seen:
            seen.add(id(block))
            yield block
            stack.extend(reversed(list(block._children.values())))


@contextmanager
def recording_names(blocks: Iterable[Any], record: Callable[[str], object]) -> Iterator[None]:
    """Calls `record` with the name of each node that these converted blocks create."""
    before = [(block._amp, block._amp.recorders) for block in blocks]
    for state, recorders in before:
        state.recorders = (*recorders, record)
    try:
        yield
    finally:
        for state, recorders in before:
            state.recorders = recorders


def paths_in(net: Network, path: str = "") -> Dict[Any, str]:
    """Returns the path of each block in a net at `path`; the first path of a shared block."""
    made: Dict[Any, str] = {}

    def walk(block: Block, path: str) -> None:
        if block not in made:
            made[block] = path
            for name, child in block._children.items():
                walk(child, f"{path}.{name}")

    walk(net, path)
    return made


def parameters_in(net: Network) -> Dict[str, Any]:
    """Returns the parameters of all of a net's blocks by name, as `collect_params` does."""
    return {name: p for block in blocks_in(net) for name, p in block.params.items()}
