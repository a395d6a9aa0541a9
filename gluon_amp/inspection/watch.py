"""Observation of a network: other CachedOps run its graphs, and the engine counts their values.

Observers of a network are a stack: the innermost one replaces its CachedOps and is called after
each backward pass. The others continue when it ends.
"""
import ctypes
import functools
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from mxnet import autograd

from .._mxnet import mx, np
from ..annotations import Block, Network, Trainer
from ..cpu import library
from ..gluon.converted import ConvertedHybridBlock, Op, blocks_in, make_op, parameters_in
from ..graph.graph import Graph
from .tensors import Counts, Key

STATIC = ("static_alloc", "static_shape")  # left out: they would hold memory between steps


# ---- hooks --------------------------------------------------------------------------------------


@contextmanager
def replaced(of: object, **values: Any) -> Iterator[None]:
    """Sets attributes of an object, and restores them at the end."""
    before = {name: getattr(of, name) for name in values}
    for name, value in values.items():
        setattr(of, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(of, name, value)


def hybrid_blocks(net: Network) -> List[Any]:
    """Returns the converted blocks that run graphs."""
    return [block for block in blocks_in(net) if isinstance(block, ConvertedHybridBlock)]


@contextmanager
def observed(blocks: List[Any], make: Callable[..., Op], trainer: Optional[Trainer] = None,
             after_pass: Optional[Callable[[float], None]] = None) -> Iterator[None]:
    """Replaces the CachedOps of a network's blocks by the results of `make(block, key, arrays)`.

    A gluon_amp.Trainer calls `after_pass` with the loss scale of each backward pass.
    """
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced(block._amp, stand_in=make))
        if hasattr(trainer, "after_pass"):
            stack.enter_context(replaced(trainer, after_pass=after_pass))
        yield


@contextmanager
def cached_ops_freed(blocks: List[Any]) -> Iterator[None]:
    """Frees the CachedOps of a network's blocks, which may hold much memory. The network creates
    them again on demand. Those that replace them meanwhile leave nothing behind."""
    with ExitStack() as stack:
        for block in blocks:
            block.free_ops()
            stack.enter_context(replaced(block, _cached_op=None,
                                         _cached_op_args=block._cached_op_args))
        yield


# ---- counts of the engine -----------------------------------------------------------------------


def read() -> Dict[Key, Counts]:
    """Returns the engine's counts since the last call, and resets them."""
    mx.nd.waitall()
    table = library.table()
    count, row = table.watched(), library.structure("WatchedRow")
    taken: Any = np.frombuffer((ctypes.c_char * (row.itemsize * count)).from_address(
        table.watched_rows()), row) if count else np.zeros(0, row)
    length = ctypes.c_int64()
    names = ctypes.string_at(table.watched_names(ctypes.byref(length)), length.value)
    keys = _keys(names, *(tuple(taken[column].tolist()) for column in ("backward", "index")))
    found = dict(zip(keys, Counts.of_engine(taken["counts"])))
    for counts, sample, size in zip(found.values(), taken["sample"].copy(), taken["samples"]):
        counts.sample = sample[:size]
    return found


@functools.lru_cache(maxsize=4)
def _keys(names: bytes, backward: Tuple[int, ...], index: Tuple[int, ...]) -> List[Key]:
    """Returns the keys of the engine's rows, cached for all steps of a graph."""
    return list(map(Key, names.decode().split("\0"), map(bool, backward), index))


_watches: List["Watch"] = []  # the engine has one table of counts for all networks


@contextmanager
def counted_apart() -> Iterator[None]:
    """Gives the counts so far to the Monitors, while an X-ray reads its own."""
    waiting = _watches[:]
    if library.started():
        deliver_counts(1.0)
    _watches.clear()
    try:
        yield
    finally:
        if library.started():
            read()
        _watches[:] = waiting


def deliver_counts(scale: float) -> None:
    """Gives the counts of a backward pass to all that watch."""
    counts = read()
    for watch in _watches if counts else ():
        watch.passes.append((scale, counts))


class Node(NamedTuple):
    """A chosen node: the names of its inputs without casts, and the type of its output."""
    inputs: List[str]
    dtype: str


class Observer:
    """An observer of a network and of its trainer, while it is entered.

    Attributes:
        blocks: the converted blocks that run graphs.
        passes: what was measured until the end of each backward pass, with its loss scale.
        nodes: the chosen nodes that have run.
        ops: the CachedOps that replace those of the blocks.
    """

    def __init__(self, net: Network, trainer: Trainer) -> None:
        self.blocks, self.trainer = hybrid_blocks(net), trainer
        self.passes: List[Tuple[float, Mapping[Key, Any]]] = []
        self.nodes: Dict[str, Node] = {}
        self.ops: Dict[Any, Tuple[Any, Op]] = {}  # each with its graph
        self._hooks = ExitStack()

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def format_of(self, key: Key) -> str:
        """Returns the type of a tensor."""
        return self.nodes[key.node].dtype

    def deliver(self, scale: float) -> None:
        """Ends a backward pass with this loss scale."""
        deliver_counts(scale)

    def found(self) -> Dict[Key, Tuple[float, Any]]:
        """Returns what was measured of each tensor, and the loss scale. A repeated backward pass,
        at another loss scale, replaces the previous one; several forward passes add up."""
        found: Dict[Key, Tuple[float, Any]] = {}
        before: Dict[Key, Tuple[float, Any]] = {}  # before the last forward pass
        for scale, measured in self.passes:
            if any(not key.backward for key in measured):
                before = dict(found)
            for key, one in measured.items():
                if key.backward and scale == 0:  # the check of loss heads
                    continue
                found[key] = scale, before[key][1] + one if key in before else one
        return found


class Watch(Observer):
    """Counts the values of selected tensors in the engine while a network trains, on its own
    parameters.

    Args:
        net: the network.
        trainer: its trainer.
        chosen: returns whether to count the node of this name. No node in a loop is chosen. None:
            all nodes, those in loops included.
    """

    def __init__(self, net: Network, trainer: Trainer,
                 chosen: Optional[Callable[[str], bool]] = None) -> None:
        super().__init__(net, trainer)
        self.chosen = chosen

    def __enter__(self) -> "Watch":
        deliver_counts(1.0)  # earlier counts are not of this step
        self.passes = []
        self._hooks.enter_context(observed(self.blocks, self._make, self.trainer, deliver_counts))
        _watches.append(self)
        self._hooks.callback(_watches.remove, self)
        return self

    def _make(self, block: Block, key: Tuple[bool, Tuple[str, ...]], arrays: List[Any]) -> Op:
        """Returns the CachedOp of a block's graph in which the engine counts during training."""
        on_gpu, dtypes = key
        if on_gpu:
            raise ValueError("Monitor supports networks on CPUs only. Received: data on a GPU")
        trains, traced = autograd.is_training(), block._cached_graph[1]
        where = id(traced), dtypes, trains
        if where not in self.ops:
            self.ops[where] = traced, self._op(block, dtypes, trains)
        return self.ops[where][1]

    def _op(self, block: Block, dtypes: Tuple[str, ...], watch: bool) -> Op:
        graph, types = block.mixed_graph(dtypes)
        if watch and self.chosen is not None:
            self._choose(self.chosen, graph, types)
        state, data = block._amp, [d.name for d in block._cached_graph[0]]
        flags = [flag for flag in block._flags if flag[0] not in STATIC]
        op, _ = make_op(block, graph, types, state.policy, data, parameters_in(block), flags,
                        watch=watch, scales=state.scales, place=block.place,
                        chosen=None if self.chosen is None else self.nodes.__contains__)
        return op

    def _choose(self, chosen: Callable[[str], bool], graph: Graph,
                types: Mapping[str, str]) -> None:
        for entry, dtype in graph.types(types).items():
            node = entry.node
            if not node.is_variable and chosen(node.name) and dtype is not None:
                self.nodes[node.name] = Node(
                    [e.node.name.split("_amp_cast_")[0] for e in node.inputs], dtype)
