"""Observation of a network's tensors by MXNet's hook on operators: on any device, in any type.

`watch.py` counts values before they are rounded, in the CPU engine. Here, MXNet calls back after
each operator of a training step, and `Statistics` reads the operator's outputs: those of a GPU by
operators that run there, those of a CPU in numpy.
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..annotations import Array, Block, Context, Network, Trainer
from ..cpu.arrays import dtype_name, to_float32
from ..formats import FORMATS
from ..gluon.converted import ConvertedHybridBlock, Op, parameters_in
from ..gluon.observe import observed, replaced
from ..graph.build import cached_op
from ..graph.graph import Entry, Graph, Node
from .tensors import Counts, Key
from .watch import Observer, flags_of

_MARK = "_gluon_amp_mark"  # ends the names of the identities behind a graph's outputs
OBSERVED = "this network is observed by another Monitor: close that one first, or use one " \
    "Monitor for all layers"


# ---- measures -----------------------------------------------------------------------------------


@dataclass
class AfterRounding:
    """A GPU's counts of a tensor's values as they are stored. `largest` is the binary exponent of
    the largest number; None if all are 0, or one is not finite."""
    numbers: int
    squares: float
    zero: int
    subnormal: int
    infinite: int
    nan: int
    largest: Optional[int]

    def __add__(self, other: "AfterRounding") -> "AfterRounding":
        largest = [e for e in (self.largest, other.largest) if e is not None]
        return AfterRounding(
            self.numbers + other.numbers, self.squares + other.squares, self.zero + other.zero,
            self.subnormal + other.subnormal, self.infinite + other.infinite, self.nan + other.nan,
            max(largest, default=None))


class Statistics:
    """Counts of each tensor: on a GPU `AfterRounding`, by at most `LAUNCHES` kernels for each, and
    by one copy to the host for 512 tensors."""

    LAUNCHES = 10  # abs, four comparisons, two for the sums of squares, two for the maximum, a cast

    def __init__(self) -> None:
        self._rows: Dict[Context, _Rows] = {}  # those with free rows

    def read(self, array: Array, dtype: str) -> Any:
        if array.ctx.device_type != "gpu":
            return Counts.of_array(to_float32(array))
        array, format_ = array.reshape(-1), FORMATS[dtype]  # numpy mode has arrays without axes
        size = abs(array)
        marks = [size == 0, size < format_.smallest_normal, size <= format_.largest,
                 size == size]  # False for NaN
        if array.ctx not in self._rows or self._rows[array.ctx].used == _Rows.COUNT:
            self._rows[array.ctx] = _Rows(array.ctx)
        rows = self._rows[array.ctx]
        row, sums, largest = rows.add()
        # multi_sum_sq adds in float32; a sum of float16 ones would end at 2048
        mx.nd.multi_sum_sq(array, *marks, num_arrays=1 + len(marks), out=sums)
        mx.nd.cast(mx.nd.max(size), dtype="float32", out=largest)
        return array.size, rows, row

    def results(self, read: Iterable[Any]) -> List[Union[Counts, AfterRounding]]:
        self._rows.clear()
        return [one if isinstance(one, Counts) else self._counts(*one) for one in read]

    @staticmethod
    def _counts(numbers: int, rows: "_Rows", row: int) -> AfterRounding:
        squares, zero, below, finite, not_nan, top = rows.values[row].tolist()
        most = math.frexp(top)[1] - 1 if finite == numbers and top > 0 else None
        return AfterRounding(numbers, squares, round(zero), round(below - zero),
                             round(not_nan - finite), round(numbers - not_nan), most)


class _Rows:
    """Rows of numbers on a GPU, which are copied to the host together."""

    COUNT, WIDTH = 512, 6

    def __init__(self, context: Context) -> None:
        self._array = mx.nd.zeros(self.COUNT * self.WIDTH, context)
        self.used = 0

    def add(self) -> Tuple[int, Array, Array]:
        """Returns the index of a new row, and views of its first numbers and of its last."""
        self.used += 1
        end = self.used * self.WIDTH
        return self.used - 1, self._array[end - self.WIDTH:end - 1], self._array[end - 1:end]

    @cached_property
    def values(self) -> "np.ndarray[Any, Any]":
        """All rows, read once, after the last one was written."""
        return self._array.asnumpy().reshape(self.COUNT, self.WIDTH)


# ---- the observer -------------------------------------------------------------------------------


class HookObserver(Observer):
    """Measures the tensors of a network while it trains, on its own parameters.

    The network is converted, or has hybridized blocks. `chosen` returns whether to measure the node
    of a name.
    """

    before_rounding = False

    def __init__(self, net: Network, trainer: Trainer, chosen: Callable[[str], bool]
                 ) -> None:
        super().__init__(net, trainer)
        self.plain, self.chosen, self.statistics = plain_graphs(net), chosen, Statistics()
        self._read: List[Tuple[Key, Any]] = []  # since the last pass ended
        self._error: Optional[Exception] = None  # of a callback, which cannot raise it

    def __enter__(self) -> "HookObserver":
        for block in [*self.blocks, *self.plain]:
            if block._callback:
                raise RuntimeError(f"{block.name} has a hook of register_op_hook, which Monitor "
                                   "would replace: use one of them")
        if any("_call_cached_op" in vars(block) for block in self.plain):
            raise RuntimeError(OBSERVED)
        self.passes, self._read = [], []
        self._hooks.enter_context(observed(self.blocks, self.make, self.trainer, self.deliver))
        for block in self.plain:
            self._hooks.enter_context(self._observed(block))
        return self

    def deliver(self, scale: float) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._read:
            return
        keys, read = zip(*self._read)
        self._read = []
        measured: Dict[Key, Any] = {}
        for key, result in zip(keys, self.statistics.results(read)):
            measured[key] = measured[key] + result if key in measured else result
        self.passes.append((scale, measured))

    # ---- operators that call back

    def _op(self, block: Block, on_gpu: bool, dtypes: Tuple[str, ...], trains: bool) -> Op:
        graph, types = block.mixed_graph(dtypes)
        op, inputs = self.op_of(block, self._marked(graph) if trains else graph, types,
                                on_gpu=on_gpu)
        return self._hooked(op, graph) if trains else op, inputs

    @contextmanager
    def _observed(self, block: Any) -> Iterator[None]:
        """Replaces the CachedOp of a hybridized block in training."""
        call = block._call_cached_op

        def observed_call(*args: Any) -> Any:
            if block._cached_op is None:
                block._build_cache(*args)
            if not autograd.is_training():
                return call(*args)
            traced = block._cached_graph[1]
            if id(traced) not in self.ops:
                self.ops[id(traced)] = traced, self._plain_op(block)
            op, inputs = self.ops[id(traced)][1]
            with replaced(block, _cached_op=op, _cached_op_args=inputs):
                return call(*args)

        vars(block)["_call_cached_op"] = observed_call
        try:
            yield
        finally:
            del vars(block)["_call_cached_op"]

    def _plain_op(self, block: Any) -> Op:
        data, traced = block._cached_graph
        graph = Graph.read(traced)
        symbol = self._marked(graph).symbol(like=traced)
        op, inputs = cached_op(symbol, [d.name for d in data], parameters_in(block),
                               flags_of(block))
        return self._hooked(op, graph), inputs

    def _marked(self, graph: Graph) -> Graph:
        """Returns the graph with an identity behind each output, whose gradient is the first that
        the backward pass computes. Adds the chosen nodes."""
        for node in graph.nodes():
            if not node.is_variable and self.chosen(node.name):
                self._choose(node)
        return Graph(Entry(Node("_copy", f"{entry.node.name}{i}{_MARK}", inputs=[entry]))
                     for i, entry in enumerate(graph.outputs))

    def _hooked(self, op: Any, graph: Graph) -> Any:
        keys = _keys(graph)

        def see(name: bytes, _: bytes, handle: Any) -> None:
            array = mx.nd.NDArray(mx.base.ctypes.cast(handle, mx.base.NDArrayHandle), False)
            if self._error is not None:
                return
            try:
                with autograd.pause():
                    self._see(name.decode(), array, keys)
            except Exception as error:  # ctypes would print and ignore it
                self._error = error

        op._register_op_hook(see)
        return op

    def _see(self, name: str, array: Array, keys: Mapping[str, Key]) -> None:
        key, dtype = keys.get(name), dtype_name(array.dtype)
        if key is not None and key.node in self.inputs and array.size and dtype in FORMATS \
                and array.stype == "default":
            self.formats[key] = dtype
            self._read.append((key, self.statistics.read(array, dtype)))


def plain_graphs(net: Network) -> List[Any]:
    """Returns the outermost hybridized blocks that are not converted."""
    blocks, left = [], [net] if isinstance(net, mx.gluon.Block) else []
    while left:
        block = left.pop()
        if isinstance(block, ConvertedHybridBlock):
            continue
        if isinstance(block, mx.gluon.HybridBlock) and block._active:
            blocks.append(block)
        else:
            left += block._children.values()
    return blocks


def _keys(graph: Graph) -> Dict[str, Key]:
    """Returns the tensors of a graph by the names that MXNet's hook gives to them: the node's name
    with the output's name or index; for a gradient with "backward" and the index of the input."""
    keys: Dict[str, Key] = {}
    internals = graph.symbol().get_internals()
    outputs: Dict[str, int] = {}  # so far, of each node
    for i, name in enumerate(internals.list_outputs()):
        node = internals[i].name
        which = outputs[node] = outputs.get(node, -1) + 1
        keys[name] = keys[f"{node}_{which}"] = Key(node, False, which)
    for one in graph.nodes():
        keys.update({f"{one.name}_backward_{i}": Key(one.name, True, i)
                      for i in range(len(one.inputs))})
    return keys
