"""A network's graph on arrays of its own: it runs, counts, and changes nothing of the user's."""
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from mxnet.gluon import HybridBlock

from .._mxnet import mx
from ..cpu.arrays import dtype_name, to_float32
from ..cpu.finite import all_finite
from ..gluon.converted import ConvertedHybridBlock
from ..graph.build import build
from ..graph.casts import float32_variables, insert_casts
from ..graph.graph import Graph
from ..policy import Policy
from .statistics import Counts, Key, read


class Ran(NamedTuple):
    """A step that was run: its loss, whether its gradients are finite, and what was counted."""
    loss: float
    finite: bool
    counts: Dict[Key, Counts]


def split(batch: Any) -> Tuple[List[Any], List[Any]]:
    """A batch as what the network takes, and what the loss takes besides its output."""
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if not parts or not all(isinstance(part, mx.nd.NDArray) and part.size for part in parts):
        raise ValueError("a batch is a tuple of arrays that are not empty: data, and label last. "
                         f"Received: {[getattr(p, 'shape', type(p).__name__) for p in parts]}")
    return (parts, []) if len(parts) == 1 else (parts[:-1], parts[-1:])


def check(net: Any, batch: Any) -> None:
    """Refuses what an X-ray cannot look into; traces the network if it has not run yet."""
    if not isinstance(net, ConvertedHybridBlock) or not isinstance(net, HybridBlock):
        raise TypeError("xray takes a HybridBlock that gluon_amp.convert has converted: its "
                        f"graph is what float16 runs in. Received: {type(net).__name__}")
    if net._amp.policy.is_float32:
        raise ValueError("the network has no float16 tensors: convert it with another policy")
    data, _ = split(batch)
    if any(array.context.device_type == "gpu" for array in data):
        raise ValueError("xray runs on CPUs, where each result is seen before it is rounded. "
                         "Received: data on a GPU")
    if not net._cached_graph:
        with mx.autograd.pause():
            net(*data)
    count = len(net._cached_graph[0])
    if count != len(data):
        raise ValueError(f"the graph of {net.name} takes {count} arrays of data (an RNN layer's "
                         "states are some: put it into a HybridBlock of yours). "
                         f"Received: batches with {len(data)}")


class Trial:
    """The graph of a converted network with copies of its parameters.

    Args:
        policy: of the numbers: the network's own, or float32 for the reference.
        keep: names of nodes that stay float32.
        watch: whether the engine counts what its nodes compute.
    """

    def __init__(self, net: Any, policy: Policy, keep: Collection[str] = (), watch: bool = True):
        inputs, clean = net._cached_graph
        self.net, self.policy, self.watch = net, policy, watch
        self.names = [d.name for d in inputs]
        self.parameters = net.collect_params()
        self.clean = Graph.read(clean)
        self.numpy = isinstance(clean, mx.sym.numpy._Symbol)
        states = [block._amp for block in _converted(net)]
        self.keep = frozenset(keep).union(*(state.keep_nodes for state in states))
        self.whole = float32_variables(self.clean, policy, self.keep)
        self.ops: Dict[Tuple[str, ...], Any] = {}
        self.arrays: Dict[str, Any] = {}
        self.copy()

    def copy(self, values: Optional[Mapping[str, Any]] = None) -> None:
        """Takes over the values that the network's parameters have now, or those given."""
        for parameter in self.parameters.values():
            value = parameter.data() if values is None else values[parameter.name]
            whole = self.policy.is_float32 or parameter.name in self.whole
            value = to_float32(value) if whole else value
            held = self.arrays.get(parameter.name)
            if held is not None:
                held[:] = value.astype(held.dtype, copy=False)
                continue
            held = self.arrays[parameter.name] = value.copy()
            if parameter.grad_req != "null":
                held.attach_grad()

    def graph(self, dtypes: Sequence[str]) -> Tuple[Graph, Dict[str, str]]:
        """The graph with its casts, and its variables' types."""
        types = {name: dtype_name(array.dtype) for name, array in self.arrays.items()}
        types.update(zip(self.names, dtypes))
        keep = () if self.policy.is_float32 else self.keep
        made = insert_casts(self.clean, types, self.policy, set(self.parameters), keep)
        return made, types

    def _op(self, dtypes: Tuple[str, ...]) -> Any:
        if dtypes not in self.ops:
            graph, types = self.graph(dtypes)
            symbol = build(graph, types, False, self.policy, self.watch).symbol()
            order = symbol.list_inputs()
            if self.numpy:
                symbol = symbol.as_np_ndarray()
            flags = [("data_indices", list(range(len(order)))), ("param_indices", [])]
            self.ops[dtypes] = mx.nd.CachedOp(symbol, flags), order
        return self.ops[dtypes]

    def run(self, batch: Any, loss_fn: Any, scale: float = 1.0) -> Ran:
        """One forward and one backward pass; no update."""
        data, label = split(batch)
        op, order = self._op(tuple(dtype_name(a.dtype) for a in data))
        inputs = dict(zip(self.names, data))
        arrays = [inputs.get(name, self.arrays.get(name)) for name in order]
        read()
        with mx.autograd.record():
            loss = loss_fn(op(*arrays), *label)
        if not isinstance(loss, mx.nd.NDArray):
            raise TypeError("loss_fn(output, label) is to return one array. Received: "
                            f"{type(loss).__name__}")
        mx.autograd.backward([loss], [mx.nd.ones_like(loss.as_nd_ndarray()) * scale])
        counts = read()
        mean = float(loss.astype("float32").mean().asscalar())
        return Ran(mean, all_finite(self.gradients()), counts)

    def gradients(self) -> List[Any]:
        """Of the parameters that train, as the last run left them."""
        return [array.grad for array in self.arrays.values() if array.grad is not None]


def _converted(net: Any) -> List[Any]:
    found, stack = [], [net]
    while stack:
        block = stack.pop()
        if hasattr(block, "_amp"):
            found.append(block)
        stack += block._children.values()
    return found

