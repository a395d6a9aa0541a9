"""What X-ray, Monitor and export_onnx use of a network beyond the public names of other files.

Other CachedOps run the graphs of its blocks, and the engine counts the values of nodes. The graphs
are those of a converted block's methods: `mixed_graph`, `with_casts` and `kept_nodes`.
"""
import ctypes
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, List, Optional, Tuple

from .._mxnet import mx, np
from ..annotations import Block, Network, Trainer
from ..cpu import library
from ..graph.graph import Graph
from ..policy import Policy
from .converted import ConvertedBlock, ConvertedHybridBlock, Op, blocks_in, traced_blocks


def hybrid_blocks(net: Network) -> List[Any]:
    """Returns the converted blocks that run graphs."""
    return [block for block in blocks_in(net) if isinstance(block, ConvertedHybridBlock)]


def policy_in_use(block: ConvertedBlock) -> Policy:
    """Returns the policy by which a converted block computes now."""
    return block._amp.policy


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


def is_observed(block: Block) -> bool:
    """Whether `observed` replaces the CachedOps of a converted block now."""
    return block._amp.stand_in is not None


@contextmanager
def cached_ops_freed(blocks: List[Any]) -> Iterator[None]:
    """Frees the CachedOps of a network's blocks, which may hold much memory. The network creates
    them again on demand. Those that replace them meanwhile leave nothing behind."""
    with ExitStack() as stack:
        for block in blocks:
            block._cached_op = None
            for trace in block._amp.traces.values():
                trace.ops.clear()
            stack.enter_context(replaced(block, _cached_op=None,
                                         _cached_op_args=block._cached_op_args))
        yield


@contextmanager
def traced_again(blocks: List[Any]) -> Iterator[None]:
    """Lets blocks trace their graphs again, and restores the graphs of before."""
    with ExitStack() as stack:
        for block in blocks:
            if not isinstance(block, mx.gluon.SymbolBlock):  # which is its graph
                stack.enter_context(replaced(block, _cached_graph=(), _in_format=None,
                                             _out_format=None))
                stack.enter_context(replaced(block._amp, traces={}))
        yield


def traced_graphs() -> List[Tuple[Any, Graph]]:
    """Returns the graphs without casts that converted blocks run, each with its block."""
    return [(block, trace.clean) for block in traced_blocks()
            for trace in block._amp.traces.values()]


def trace_again(block: Any) -> None:
    """Traces the graph of a block that has been traced, from symbols alone, and restores it."""
    placeholder = (mx.np if mx.util.is_np_array() else mx.nd).ones(1)

    def inputs(layout: Any) -> Any:  # of MXNet's _flatten
        if isinstance(layout, list):
            return [inputs(each) for each in layout]
        return None if layout < 0 else placeholder

    arguments = inputs(block._in_format)
    with traced_again([block]):
        block._get_graph(*arguments)


def read_counts() -> Tuple[bytes, Any]:
    """Returns the engine's counts since the last call, and resets them: the names of nodes, with
    zero bytes between them, and a row for each tensor, as `WatchedRow` in watch.cc."""
    mx.nd.waitall()
    table = library.table()
    count, row = table.watched(), library.WATCHED_ROW
    rows: Any = np.frombuffer((ctypes.c_char * (row.itemsize * count)).from_address(
        table.watched_rows()), row).copy() if count else np.zeros(0, row)
    length = ctypes.c_int64()
    names = ctypes.string_at(table.watched_names(ctypes.byref(length)), length.value)
    return names, rows


def counts_of(numbers: "np.ndarray[Any, Any]", half: bool = False) -> Any:
    """Returns the engine's counts of contiguous float32 numbers; with `half`, as if they were
    rounded to float16."""
    library.load()
    counts = np.zeros(1, library.COUNTS)
    library.table().count(numbers.ctypes.data, numbers.size, int(half), counts.ctypes.data)
    return counts
