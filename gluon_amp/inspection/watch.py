"""Observation of a network: other CachedOps run its graphs, and the engine counts their values.

Observers of a network are a stack: the innermost one replaces its CachedOps and is called after
each backward pass. The others continue when it ends.
"""
import functools
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from mxnet import autograd

from ..annotations import Block, Network, Trainer
from ..cpu import library
from ..gluon.converted import Op, make_op, parameters_in
from ..gluon.observe import hybrid_blocks, observed, policy_in_use, read_counts
from ..graph.graph import Graph, Node
from .tensors import Counts, Key

_STATIC = ("static_alloc", "static_shape")  # left out: they would hold memory between steps


def flags_of(block: Block) -> List[Any]:
    """Returns the flags of an observed block's CachedOps."""
    return [flag for flag in block._flags if flag[0] not in _STATIC]


# ---- counts of the engine -----------------------------------------------------------------------


def read() -> Dict[Key, Counts]:
    """Returns the engine's counts since the last call, and resets them."""
    names, rows = read_counts()
    keys = _keys(names, *(tuple(rows[column].tolist()) for column in ("backward", "index")))
    results = dict(zip(keys, Counts.of_engine(rows["counts"])))
    for counts, sample, size in zip(results.values(), rows["sample"], rows["samples"]):
        counts.sample = sample[:size]
    return results


@functools.lru_cache(maxsize=4)
def _keys(names: bytes, backward: Tuple[int, ...], index: Tuple[int, ...]) -> List[Key]:
    """Returns the keys of the engine's rows, cached for all steps of a graph."""
    return list(map(Key, names.decode().split("\0"), map(bool, backward), index))


_observers: List["EngineObserver"] = []  # the engine has one table of counts for all networks


@contextmanager
def counted_apart() -> Iterator[None]:
    """Gives the counts so far to the Monitors, while an X-ray reads its own."""
    waiting = _observers[:]
    if library.started():
        deliver_counts(1.0)
    _observers.clear()
    try:
        yield
    finally:
        if library.started():
            read()
            library.overflows()  # an X-ray has reported them
        _observers[:] = waiting


def deliver_counts(scale: float) -> None:
    """Gives the counts of a backward pass to all observers."""
    counts = read()
    for observer in _observers if counts else ():
        observer.passes.append((scale, counts))


class Observer:
    """An observer of a network and of its trainer, while it is entered.

    Attributes:
        blocks: the converted blocks that run graphs.
        passes: what was measured until the end of each backward pass, with its loss scale.
        inputs: for each chosen node that has run, the names of its inputs without casts.
        formats: the types of measured tensors by key, or those of nodes by name.
        ops: the CachedOps that replace those of the blocks.
        before_rounding: whether values are counted before they are rounded to their type.
    """

    before_rounding = True

    def __init__(self, net: Network, trainer: Trainer) -> None:
        self.blocks, self.trainer = hybrid_blocks(net), trainer
        self.passes: List[Tuple[float, Mapping[Key, Any]]] = []
        self.inputs: Dict[str, List[str]] = {}
        self.formats: Dict[Union[Key, str], str] = {}
        self.ops: Dict[Any, Tuple[Any, Op]] = {}  # each with its graph
        self._hooks = ExitStack()

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def make(self, block: Block, key: Tuple[bool, Tuple[str, ...]], arrays: List[Any]) -> Op:
        """Returns what replaces the CachedOp of a converted block."""
        traced, trains = block._cached_graph[1], autograd.is_training()
        where = id(traced), key, trains
        if where not in self.ops:
            self.ops[where] = traced, self._op(block, *key, trains)
        return self.ops[where][1]

    def _op(self, block: Block, on_gpu: bool, dtypes: Tuple[str, ...], trains: bool) -> Op:
        raise NotImplementedError

    @staticmethod
    def op_of(block: Block, graph: Graph, types: Mapping[str, str], **settings: Any) -> Op:
        """Returns the CachedOp of a block's graph with casts."""
        return make_op(block, graph, types, policy_in_use(block),
                       [d.name for d in block._cached_graph[0]], parameters_in(block),
                       flags_of(block), **settings)

    def _choose(self, node: Node) -> None:
        """Adds a node whose tensors are measured."""
        self.inputs[node.name] = [e.node.name.split("_amp_cast_")[0] for e in node.inputs]

    def deliver(self, scale: float) -> None:
        """Ends a backward pass with this loss scale."""
        deliver_counts(scale)

    def totals(self) -> Dict[Key, Tuple[float, Any]]:
        """Returns what was measured of each tensor in all passes, and the last loss scale."""
        totals: Dict[Key, Tuple[float, Any]] = {}
        for scale, measured in self.passes:
            for key, one in measured.items():
                totals[key] = scale, totals[key][1] + one if key in totals else one
        return totals


class EngineObserver(Observer):
    """Counts the values of selected tensors in the engine while a network trains, on its own
    parameters.

    `chosen` returns whether to count the node of a name. No node in a loop is chosen. None: all
    nodes, those in loops included.
    """

    def __init__(self, net: Network, trainer: Trainer,
                 chosen: Optional[Callable[[str], bool]] = None) -> None:
        super().__init__(net, trainer)
        self.chosen = chosen

    def __enter__(self) -> "EngineObserver":
        deliver_counts(1.0)  # earlier counts are not of this step
        self.passes = []
        self._hooks.enter_context(observed(self.blocks, self.make, self.trainer, deliver_counts))
        _observers.append(self)
        self._hooks.callback(_observers.remove, self)
        return self

    def _op(self, block: Block, on_gpu: bool, dtypes: Tuple[str, ...], trains: bool) -> Op:
        if on_gpu:
            raise ValueError("Monitor supports networks on CPUs only. Received: data on a GPU")
        (graph, types), chosen = block.mixed_graph(dtypes), self.chosen
        for entry, dtype in graph.types(types).items() if trains else ():
            node = entry.node
            if chosen and not node.is_variable and chosen(node.name) and dtype is not None:
                self._choose(node)
                self.formats[node.name] = dtype
        return self.op_of(block, graph, types, watch=trains,
                          chosen=self.inputs.__contains__ if chosen else None)
