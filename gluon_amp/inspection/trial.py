"""A converted network on arrays of its own: it runs, counts, and changes nothing of the user's.

A network is called as its user calls it. Meanwhile something stands in for the graphs of its
hybrid blocks (`State.stand_in`): the same graphs on copies of the parameters, under any policy.
"""
import itertools
from contextlib import ExitStack, contextmanager, suppress
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    FrozenSet,
    Hashable,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from .._mxnet import message, mx, np
from ..annotations import Array, Batch, Block, LossFunction, Network
from ..cpu.arrays import copy_into, dtype_name, to_float32
from ..cpu.finite import all_finite
from ..cpu.library import random_numbers_kept
from ..cpu.scales import Scales
from ..gluon.converted import ConvertedBlock, ConvertedHybridBlock
from ..gluon.state import Op, blocks_in
from ..graph.build import build, cached_op
from ..graph.casts import float32_variables, insert_casts
from ..graph.graph import Graph
from ..graph.refusals import check_device
from ..policy import Policy
from ..symbolic.binding import SCALE, with_loss_scale
from .heads import HeadLosses
from .modules import ModuleBlock
from .statistics import Counted, read

FIRST_SCALE = 2.0 ** 16  # loss scales: where looking for one that overflows nothing begins,
LEAST_SCALE = 2.0 ** -24  # and where it ends

Typed = Tuple[Graph, Dict[str, str]]  # a graph with its casts, and its variables' types


class Ran(NamedTuple):
    """A step that was run.

    Attributes:
        loss: the mean of its numbers.
        finite: whether the gradients are; of a step of which only samples are taken, nobody asks.
        counts: what was counted.
        total: the sum of the sizes of the loss's numbers, whose sum is what gradients are of.
    """
    loss: float
    finite: bool
    counts: Counted
    total: float = 0.0


class Call(NamedTuple):
    """A hybrid block's graph as it was called: the names of its data, their types and shapes."""
    block: Any
    clean: Graph
    numpy: bool
    names: List[str]
    dtypes: Tuple[str, ...]
    shapes: List[Tuple[int, ...]]

    @classmethod
    def from_block(cls, net: Network, block: Block, arrays: Sequence[Any]) -> "Call":
        """The call of a block within a network. Other blocks call their data by the same names, and
        tensors are told apart by names: they get the block's before them."""
        data, clean = block._cached_graph
        graph, names = Graph.read(clean), [d.name for d in data]
        if block is not net:
            for node in graph.nodes():
                if node.is_variable and node.name in names:
                    node.name = block.prefix + node.name
            names = [block.prefix + name for name in names]
        return cls(block, graph, isinstance(clean, mx.sym.numpy._Symbol), names,
                   tuple(dtype_name(a.dtype) for a in arrays), [a.shape for a in arrays])

    def typed(self, policy: Policy, types: Mapping[str, str], keep: Collection[str]) -> Typed:
        """The graph with its casts, for parameters of these types."""
        variables = {name: types[name] for name in self.clean.variables() if name in types}
        variables.update(zip(self.names, self.dtypes))
        return insert_casts(self.clean, variables, policy, set(types), keep), variables

    def op(self, typed: Typed, policy: Policy, watch: bool, parameters: Mapping[str, Any],
           samples: bool = False, flags: Sequence[Any] = (),
           scales: Optional[Scales] = None, place: Callable[[str], str] = str) -> Op:
        """A CachedOp of the graph with its casts, and where its inputs come from."""
        graph, types = typed
        if SCALE in parameters:
            graph, types = with_loss_scale(graph), {**types, SCALE: "float32"}
        check_device(graph, policy, on_gpu=False)
        symbol = build(graph, types, policy, watch, samples, scales, place).symbol()
        if self.numpy:
            symbol = symbol.as_np_ndarray()
        return cached_op(symbol, self.names, parameters, flags)


def split(batch: Batch) -> Tuple[List[Any], List[Any]]:
    """A batch as what the network takes, and what the loss takes besides its output."""
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if not parts or not all(isinstance(array, mx.nd.NDArray) and array.size
                            for array in arrays_of(parts)):
        raise ValueError("a batch is a tuple of arrays that are not empty: data, and label last, "
                         "which may be a list of arrays. "
                         f"Received: {[getattr(p, 'shape', type(p).__name__) for p in parts]}")
    return (parts, []) if len(parts) == 1 else (parts[:-1], parts[-1:])


def first_of(batches: Iterable[Batch], count: int, who: str) -> List[Any]:
    """The first batches, so many at most."""
    try:
        given = iter(batches)
    except TypeError:
        raise TypeError("batches is a list of tuples (data, label), or anything that gives such. "
                        f"Received: {type(batches).__name__}") from None
    found = list(itertools.islice(given, count))
    if not found:
        raise ValueError(f"{who} needs at least one batch. Received: none")
    return found


def arrays_of(parts: Sequence[Any]) -> List[Any]:
    """What is in a batch; several labels are a list at its end."""
    *first, last = parts
    several = bool(first) and isinstance(last, (list, tuple)) and len(last) > 0
    return [*first, *(last if several else [last])]


def check(net: Network, batch: Batch) -> None:
    """Refuses what an X-ray cannot look into; runs the network once if it has not run yet."""
    blocks = list(blocks_in(net)) if isinstance(net, ConvertedBlock) else []
    hybrid = [b for b in blocks if isinstance(b, ConvertedHybridBlock)]
    if not hybrid:
        raise TypeError("xray takes a network that gluon_amp.convert has converted, with a "
                        "HybridBlock in it: its graph is what float16 runs in. "
                        f"Received: {type(net).__name__}")
    if net._amp.policy.is_float32:
        raise ValueError("the network has no float16 tensors: convert it with another policy")
    own = [name for b in blocks if not isinstance(b, mx.gluon.HybridBlock) for name in b.params]
    if own:
        raise ValueError("xray looks into graphs, and a plain Block has parameters of its own: "
                         f"move them into a HybridBlock. Received: {', '.join(own[:5])}")
    data, _ = split(batch)
    if any(array.context.device_type == "gpu" for array in data):
        raise ValueError("xray runs on CPUs, where each result is seen before it is rounded. "
                         "Received: data on a GPU")
    waiting = any(p._deferred_init for p in net.collect_params().values())
    if waiting or not any(block._cached_graph for block in hybrid):
        _call_first(net, data, waiting)


def _call_first(net: Network, data: Sequence[Any], waiting: bool) -> None:
    """Makes what the user's first call would make: graphs, and the parameters where some wait for
    the data's shapes. No operator of a hybrid network runs: it might draw random numbers."""
    def stop(block: Block, key: Hashable, arrays: Sequence[Array]) -> Op:
        raise _Traced

    with ExitStack() as stack:
        stack.enter_context(mx.autograd.pause())
        if isinstance(net, ConvertedHybridBlock):
            stack.enter_context(suppress(_Traced))
            stack.enter_context(standing_in(net, stop))
        elif not waiting:
            stack.enter_context(random_numbers_kept())
        call(net, data)


class _Traced(Exception):
    """Ends a call of a network that has its graph."""


def call(net: Network, data: Sequence[Any]) -> object:
    try:
        return net(*data)
    except (mx.MXNetError, TypeError, ValueError) as error:
        shapes = ", ".join(str(a.shape) for a in data)
        raise ValueError(f"{net.name} does not take this batch: {message(error)}. "
                         f"Received: data of {shapes}") from None


@contextmanager
def standing_in(net: Network, make: Callable[..., Any]) -> Iterator[None]:
    """Calls `make(block, key, arrays)` for the CachedOp of each graph that a network runs. The
    network's own, which may hold as much memory, go; it makes them anew when they are wanted."""
    blocks = [b for b in blocks_in(net) if isinstance(b, ConvertedHybridBlock)]
    before = [b._cached_op_args for b in blocks]
    for block in blocks:
        block._amp.stand_in = make
        block.free_ops()
    try:
        yield
    finally:
        for block, args in zip(blocks, before):
            block._amp.stand_in = None
            if block._cached_op is not None:  # MXNet's blocks look long at what they are given
                block._cached_op, block._cached_op_args = None, args


def _which(block: Block, key: Hashable) -> Tuple[Any, Any, str]:
    """Tells a graph from others: those of other blocks, which may have the same name (such as all
    whose prefix is ""), and those of calls with other arguments."""
    return block, key, str(block._in_format)


class Watched:
    """The network itself, with the engine counting."""

    def __init__(self, net: Network) -> None:
        self.net, self.parameters, self.keep = net, net.collect_params(), _kept(net)
        self.ops: Dict[Any, Any] = {}

    def make(self, block: Block, key: Hashable, arrays: Sequence[Any]) -> Op:
        """Stands in for a block's graph."""
        where = _which(block, key)
        if where not in self.ops:
            call, policy = Call.from_block(self.net, block, arrays), block._amp.policy
            types = {name: dtype_name(p.dtype) for name, p in self.parameters.items()}
            typed = call.typed(policy, types, self.keep)
            self.ops[where] = call.op(typed, policy, True, self.parameters, flags=block._flags,
                                      scales=block._amp.scales, place=block.place)
        return self.ops[where]


def _kept(net: Network) -> FrozenSet[str]:
    """The nodes that `convert` was told to keep."""
    return frozenset().union(*(block._amp.keep_nodes for block in blocks_in(net)
                               if isinstance(block, ConvertedBlock)))


class _Held:
    """A copy of a parameter, as MXNet's blocks ask for it."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def data(self) -> Array:
        return self.array


class Trial:
    """A converted network's graphs with copies of its parameters.

    Attributes:
        calls: the graphs that have run, by what `_which` says.
        arrays: the copies, of what these graphs read.

    Args:
        policy: of the numbers: the network's own, or float32 for the reference.
        keep: names of nodes that stay float32.
        watch: whether the engine counts what its nodes compute.
        calls: of another trial, so that nothing has to run to know the graphs.
        samples: of what is watched, the engine takes samples, and counts nothing.
    """

    def __init__(self, net: Network, policy: Policy, keep: Collection[str] = (), watch: bool = True,
                 calls: Optional[Mapping[Any, Call]] = None, samples: bool = False):
        self.net, self.policy, self.watch, self.samples = net, policy, watch, samples
        self.parameters = net.collect_params()
        self.keep = frozenset(keep) | _kept(net)
        self.values: Optional[Mapping[str, Any]] = None
        self.calls: Dict[Any, Call] = {}
        self.arrays: Dict[str, Any] = {}
        self.whole: Dict[str, bool] = {}  # whether a parameter is float32 here
        self.ops: Dict[Any, Any] = {}
        self.runs = False  # whether the copies have gradients
        # a module's heads begin gradients by themselves: this reaches them as in its own graph
        self.scale = mx.nd.ones(1) if isinstance(net, ModuleBlock) else None
        for which, call in (calls or {}).items():
            self._take(which, call)

    # ---- parameters

    def copy(self, values: Optional[Mapping[str, Any]] = None) -> None:
        """Takes over the values that the network's parameters have now, or those given."""
        self.values = values
        copy_into([held.as_nd_ndarray() for held in self.arrays.values()],
                  [self._given(name).as_nd_ndarray() for name in self.arrays])

    def _given(self, name: str) -> Any:
        return self.parameters[name].data() if self.values is None else self.values[name]

    def _take(self, which: Hashable, call: Call) -> None:
        """Gets to know a graph, and copies the parameters that it reads."""
        self.calls[which] = call
        wide = float32_variables(call.clean, self.policy, self.keep)
        for name in call.clean.variables():
            if name in self.parameters and name not in self.arrays:
                self.whole[name] = self.policy.is_float32 or name in wide
                value = self._given(name)
                self.arrays[name] = (to_float32(value) if self.whole[name] else value).copy()
                if self.runs:
                    self._attach(name)

    def _attach(self, name: str) -> None:
        """Gives a copy a gradient, if its parameter trains."""
        if self.parameters[name].grad_req != "null":
            self.arrays[name].attach_grad()

    # ---- graphs

    def graphs(self) -> List[Typed]:
        """The graphs that have run, with their casts."""
        return [self._typed(call) for call in self.calls.values()]

    def _typed(self, call: Call) -> Typed:
        types = {name: dtype_name(array.dtype) for name, array in self.arrays.items()}
        return call.typed(self.policy, types, () if self.policy.is_float32 else self.keep)

    def make(self, block: Block, key: Hashable, arrays: Sequence[Any]) -> Op:
        """Stands in for a block's graph."""
        where = _which(block, key)
        if where not in self.ops:
            call = Call.from_block(self.net, block, arrays)
            for node in call.clean.nodes_within():
                node.attrs.pop("sparse_grad", None)  # the copies have dense gradients
            self._take(where, call)
            held = {name: _Held(array) for name, array in self.arrays.items()}
            if self.scale is not None:
                held[SCALE] = _Held(self.scale)
            self.ops[where] = call.op(self._typed(call), self.policy, self.watch, held,
                                      self.samples, block._flags if self.samples else ())
        return self.ops[where]

    def given(self, batch: Batch, arrays: Mapping[str, Any]) -> Dict[str, Any]:
        """These arrays, and the data that the network's own graph reads, by name."""
        own = next((call for call in self.calls.values() if call.block is self.net), None)
        return {**arrays, **(dict(zip(own.names, split(batch)[0])) if own else {})}

    # ---- a step

    def run(self, batch: Batch, loss_fn: LossFunction, scale: float = 1.0) -> Ran:
        """One forward and one backward pass; no update."""
        read()
        if not self.runs:
            self.runs = True
            for name in self.arrays:
                self._attach(name)
        if self.scale is not None:
            self.scale[:] = scale
        with mx.autograd.record(), standing_in(self.net, self.make):
            loss = loss_of(self.net, batch, loss_fn)
        begins_with = 1.0 if isinstance(loss_fn, HeadLosses) else scale
        try:
            mx.autograd.backward([loss], [mx.nd.ones_like(loss.as_nd_ndarray()) * begins_with])
        except mx.MXNetError as error:
            if "graph" not in str(error):
                raise
            raise ValueError("no gradients come from the loss that loss_fn returned: "
                             f"{message(error)}") from error
        counts = read()
        mean, total = mean_and_total(loss)
        if isinstance(loss_fn, HeadLosses):
            total = loss_fn.total(counts)
        return Ran(mean, self.samples or all_finite(self.gradients()), counts, total)

    def look(self, batch: Batch) -> None:
        """One forward pass, as training makes it, to know the graphs."""
        with mx.autograd.record(), standing_in(self.net, self.make):
            call(self.net, split(batch)[0])
        mx.nd.waitall()

    def gradients(self) -> List[Any]:
        """The gradients of the parameters that train, as the last run left them."""
        return [array.grad for array in self.arrays.values() if array.grad is not None]


def loss_of(net: Network, batch: Batch, loss_fn: LossFunction) -> Array:
    """The loss of a batch."""
    data, label = split(batch)
    output = call(net, data)
    try:
        loss = loss_fn(output, *label)
    except (mx.MXNetError, TypeError) as error:
        shapes = [getattr(a, "shape", type(a).__name__) for a in [output, *label]]
        raise ValueError(f"loss_fn does not take this output and label: {message(error)}. batches "
                         f"is a list of tuples (data, label). Received: {shapes}") from error
    if not isinstance(loss, mx.nd.NDArray):
        raise TypeError("loss_fn(output, label) is to return one array. Received: "
                        f"{type(loss).__name__}")
    return loss


def mean_and_total(loss: Array) -> Tuple[float, float]:
    """Of a loss's numbers: their mean, and the sum of their sizes."""
    loss = loss.as_nd_ndarray().astype("float32", copy=False)
    return float(loss.mean().asscalar()), float(np.abs(loss.asnumpy()).sum(dtype=np.float64))
