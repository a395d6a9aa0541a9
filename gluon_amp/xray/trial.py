"""A converted network on arrays of its own: it runs, counts, and changes nothing of the user's.

A network is called as its user calls it. Meanwhile something stands in for the graphs of its
hybrid blocks (`State.stand_in`): the same graphs on copies of the parameters, under any policy.
"""
from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from .._mxnet import message, mx
from ..cpu.arrays import dtype_name, to_float32
from ..cpu.finite import all_finite
from ..gluon.converted import ConvertedBlock, ConvertedHybridBlock, blocks_in
from ..graph.build import build
from ..graph.casts import float32_variables, insert_casts
from ..graph.graph import Graph
from ..policy import Policy
from .statistics import Counts, Key, read

Typed = Tuple[Graph, Dict[str, str]]  # a graph with its casts, and its variables' types


class Ran(NamedTuple):
    """A step that was run: its loss, whether its gradients are finite, and what was counted."""
    loss: float
    finite: bool
    counts: Dict[Key, Counts]


class Call(NamedTuple):
    """A hybrid block's graph as it was called: the names of its data, their types and shapes."""
    block: Any
    clean: Graph
    numpy: bool
    names: List[str]
    dtypes: Tuple[str, ...]
    shapes: List[Tuple[int, ...]]

    @classmethod
    def of(cls, block: Any, arrays: Sequence[Any]) -> "Call":
        data, clean = block._cached_graph
        return cls(block, Graph.read(clean), isinstance(clean, mx.sym.numpy._Symbol),
                   [d.name for d in data], tuple(dtype_name(a.dtype) for a in arrays),
                   [a.shape for a in arrays])


def split(batch: Any) -> Tuple[List[Any], List[Any]]:
    """A batch as what the network takes, and what the loss takes besides its output."""
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if not parts or not all(isinstance(part, mx.nd.NDArray) and part.size for part in parts):
        raise ValueError("a batch is a tuple of arrays that are not empty: data, and label last. "
                         f"Received: {[getattr(p, 'shape', type(p).__name__) for p in parts]}")
    return (parts, []) if len(parts) == 1 else (parts[:-1], parts[-1:])


def check(net: Any, batch: Any) -> None:
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
    if not any(block._cached_graph for block in hybrid):
        with mx.autograd.pause():
            _call(net, data)


def _call(net: Any, data: Sequence[Any]) -> Any:
    try:
        return net(*data)
    except (mx.MXNetError, TypeError) as error:
        shapes = ", ".join(str(a.shape) for a in data)
        raise ValueError(f"{net.name} does not take this batch: {message(error)}. "
                         f"Received: data of {shapes}") from None


@contextmanager
def standing_in(net: Any, make: Callable[..., Any]) -> Iterator[None]:
    """Calls `make(block, key, arrays)` for the CachedOp of each graph that a network runs."""
    blocks = [b for b in blocks_in(net) if isinstance(b, ConvertedHybridBlock)]
    before = [(b._cached_op, b._cached_op_args) for b in blocks]
    for block in blocks:
        block._amp.stand_in = make
    try:
        yield
    finally:
        for block, ran in zip(blocks, before):
            block._amp.stand_in = None
            block._cached_op, block._cached_op_args = ran


class Watched:
    """The user's own step, with the engine counting. `calls` has the graphs that ran."""

    def __init__(self) -> None:
        self.ops: Dict[Any, Any] = {}

    def make(self, block: Any, key: Any, arrays: Sequence[Any]) -> Any:
        where = (block.name, key)
        if where not in self.ops:
            self.ops[where] = block._make_op(*key, watch=True)
        return self.ops[where]


class _Held:
    """A copy of a parameter, as MXNet's blocks ask for it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def data(self) -> Any:
        return self.array


class Trial:
    """A converted network's graphs with copies of its parameters.

    Attributes:
        calls: the graphs that have run, by their blocks' names.
        arrays: the copies, of what these graphs read.

    Args:
        policy: of the numbers: the network's own, or float32 for the reference.
        keep: names of nodes that stay float32.
        watch: whether the engine counts what its nodes compute.
        calls: of another trial, so that nothing has to run to know the graphs.
    """

    def __init__(self, net: Any, policy: Policy, keep: Collection[str] = (), watch: bool = True,
                 calls: Optional[Mapping[str, Call]] = None):
        self.net, self.policy, self.watch = net, policy, watch
        self.parameters = net.collect_params()
        states = [block._amp for block in blocks_in(net) if isinstance(block, ConvertedBlock)]
        self.keep = frozenset(keep).union(*(state.keep_nodes for state in states))
        self.values: Optional[Mapping[str, Any]] = None
        self.calls: Dict[str, Call] = {}
        self.arrays: Dict[str, Any] = {}
        self.whole: Dict[str, bool] = {}  # whether a parameter is float32 here
        self.ops: Dict[Any, Any] = {}
        for call in (calls or {}).values():
            self._take(call)

    # ---- parameters

    def copy(self, values: Optional[Mapping[str, Any]] = None) -> None:
        """Takes over the values that the network's parameters have now, or those given."""
        self.values = values
        for name, held in self.arrays.items():
            held[:] = self._value(name).astype(held.dtype, copy=False)

    def _value(self, name: str) -> Any:
        value = self.parameters[name].data() if self.values is None else self.values[name]
        return to_float32(value) if self.whole[name] else value

    def _take(self, call: Call) -> None:
        """Gets to know a graph, and copies the parameters that it reads."""
        self.calls[call.block.name] = call
        wide = float32_variables(call.clean, self.policy, self.keep)
        for name in call.clean.variables():
            if name in self.parameters and name not in self.arrays:
                self.whole[name] = self.policy.is_float32 or name in wide
                held = self.arrays[name] = self._value(name).copy()
                if self.parameters[name].grad_req != "null":
                    held.attach_grad()

    # ---- graphs

    def graphs(self) -> List[Typed]:
        """Those that have run, with their casts."""
        return [self._typed(call) for call in self.calls.values()]

    def _typed(self, call: Call) -> Typed:
        variables = set(call.clean.variables())
        types = {name: dtype_name(array.dtype) for name, array in self.arrays.items()
                 if name in variables}
        types.update(zip(call.names, call.dtypes))
        keep = () if self.policy.is_float32 else self.keep
        return insert_casts(call.clean, types, self.policy, set(self.parameters), keep), types

    def make(self, block: Any, key: Any, arrays: Sequence[Any]) -> Any:
        """Stands in for a block's graph."""
        where = (block.name, key)
        if where not in self.ops:
            call = Call.of(block, arrays)
            self._take(call)
            graph, types = self._typed(call)
            symbol = build(graph, types, False, self.policy, self.watch).symbol()
            order = symbol.list_inputs()
            if call.numpy:
                symbol = symbol.as_np_ndarray()
            flags = [("data_indices", list(range(len(order)))), ("param_indices", [])]
            inputs = [(True, call.names.index(n)) if n in call.names
                      else (False, _Held(self.arrays[n])) for n in order]
            self.ops[where] = mx.nd.CachedOp(symbol, flags), inputs
        return self.ops[where]

    # ---- a step

    def run(self, batch: Any, loss_fn: Any, scale: float = 1.0) -> Ran:
        """One forward and one backward pass; no update."""
        read()
        with mx.autograd.record(), standing_in(self.net, self.make):
            loss = loss_of(self.net, batch, loss_fn)
        mx.autograd.backward([loss], [mx.nd.ones_like(loss.as_nd_ndarray()) * scale])
        counts = read()
        return Ran(mean_of(loss), all_finite(self.gradients()), counts)

    def look(self, batch: Any) -> None:
        """One forward pass, as training makes it, to know the graphs."""
        with mx.autograd.record(), standing_in(self.net, self.make):
            _call(self.net, split(batch)[0])
        mx.nd.waitall()

    def gradients(self) -> List[Any]:
        """Of the parameters that train, as the last run left them."""
        return [array.grad for array in self.arrays.values() if array.grad is not None]


def loss_of(net: Any, batch: Any, loss_fn: Any) -> Any:
    """The loss of a batch."""
    data, label = split(batch)
    loss = loss_fn(_call(net, data), *label)
    if not isinstance(loss, mx.nd.NDArray):
        raise TypeError("loss_fn(output, label) is to return one array. Received: "
                        f"{type(loss).__name__}")
    return loss


def mean_of(loss: Any) -> float:
    return float(loss.astype("float32").mean().asscalar())
