"""What a device runs for a graph: the one place that knows.

A GPU runs the graph as it is. A CPU runs the same graph; nodes with a float16 tensor have an
attribute that gives them the engine's in-place options (cpu/engine.h).

Formats that MXNet has no arrays of (bfloat16, float8) are for CPUs only. Their tensors are float32
arrays, and attributes of a node select which of its inputs and outputs are rounded, and to what.
"""
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from .._mxnet import mx, np
from ..cpu import library
from ..cpu.scales import Scales
from ..policy import POLICIES, Policy
from .accumulate import ENGINE, accumulate
from .casts import PRODUCT
from .graph import CASTS, TYPE_FLAG, Entry, Graph, Node, bindings
from .operators import BATCH_NORMS, PRODUCTS, factors, numbers
from .refusals import LOOP, check_formats, check_layout, check_loops

HALF = "float16"

# What a node says of formats to the engine: see cpu/engine.h.
_INPUTS, _OUTPUTS, _READS = (f"__gluon_amp_{word}__" for word in ("inputs", "outputs", "reads"))
_ORDERED, _SCALING = "__gluon_amp_ordered__", "__gluon_amp_scaling__"
_WATCH = "__gluon_amp_watch__"  # the node's name, where the engine counts what it computes
_SAMPLES = "?"  # before that name: samples only
_GRIDS = tuple(f"__gluon_amp_{word}_grid__" for word in ("output", "product", "gradient", "back"))

# They draw a mask or move statistics: MXNet shall not run them again in the backward pass, which it
# does with operators that a user marks, to save memory.
_RUN_ONCE = frozenset(["Dropout", *BATCH_NORMS])

# Float32 nodes that may read and write halves themselves: how many of their inputs are data.
_BETWEEN_CASTS = {"LayerNorm": 1, "batch_dot": 2, "_npi_matmul": 2}

# They make or move halves, MXNet's own code does that in no time, and their gradients only move
# them back: left as they are.
LEFT_ALONE = frozenset("""
    Reshape Flatten expand_dims squeeze reshape_like BlockGrad _copy _zeros _ones _full _eye
    zeros_like ones_like _npx_reshape _np_reshape _np_squeeze _foreach _while_loop _cond
""".split())


def build(graph: Graph, types: Mapping[str, str], on_gpu: bool = False,
          policy: Policy = POLICIES["float16"], watch: bool = False, samples: bool = False,
          scales: Optional[Scales] = None, place: Callable[[str], str] = str) -> Graph:
    """The graph that a device runs, with the same variables and outputs, of the same types.

    Args:
        graph: with its casts, as `insert_casts` makes it.
        types: the dtype of each variable.
        policy: tells what lies behind names of formats that are no types of arrays.
        watch: whether the engine counts what each node computes (inspection/statistics.py).
        samples: then only samples are taken of it.
        scales: what the network remembers of float8 tensors; if not given, it begins anew, and
            the engine remembers it for ever.
        place: gives for a node's name what its histories are called there.
    """
    if on_gpu:
        if policy.cpu_only:
            why = "a GPU adds in its own way" if policy.accumulate else \
                "on GPUs MXNet 1.9.1 has no arrays of its formats: use float16"
            raise ValueError(f"policy {policy.name} runs on CPUs only: {why}. Received: data on a "
                             "GPU")
        return _with_dropout_to_walk_back_twice(graph)
    library.load()
    said = (_SAMPLES if samples else "") if watch else None
    built = _Rewriting(graph, types, policy, said, scales or Scales(freed=False), place).run()
    if policy.accumulate is not None:
        accumulate(built, policy.accumulate, policy.split)
    check_loops(built, policy.name)
    return built


def cached_op(symbol: "mx.sym.Symbol", data: Sequence[str], parameters: Mapping[str, Any],
              flags: Iterable[Any] = ()) -> Tuple[Any, List[Any]]:
    """MXNet's CachedOp of what a device runs, and where each of its inputs comes from: True and a
    number among the data, or False and a parameter.

    Args:
        data: the names of the data, in the order in which it is given.
        parameters: of the other variables, by name.
        flags: of MXNet, such as ("static_alloc", True).
    """
    inputs = [(True, data.index(name)) if name in data else (False, parameters[name])
              for name in symbol.list_inputs()]
    places = [("data_indices", [i for i, (is_data, _) in enumerate(inputs) if is_data]),
              ("param_indices", [i for i, (is_data, _) in enumerate(inputs) if not is_data])]
    return mx.nd.CachedOp(symbol, [*places, *flags]), inputs


class _Rewriting:
    """One graph, or the body of a loop, from its inputs to its outputs."""

    def __init__(self, graph: Graph, types: Mapping[str, str], policy: Policy,
                 watch: Optional[str], scales: Scales, place: Callable[[str], str],
                 named: Optional[Dict[str, int]] = None):
        self.graph, self.policy, self.watch = graph, policy, watch
        self.scales, self.place = scales, place
        self.rounds_halves = policy.gradient_everywhere and policy.gradient != policy.between
        self.types = graph.types(types)
        self.count: Dict[Node, int] = {}  # of outputs
        for entry in self.types:
            self.count[entry.node] = self.count.get(entry.node, 0) + 1
        self.users = graph.consumers()
        self.done: Dict[Entry, Entry] = {}
        self.norms: Set[Node] = set()  # layer norms that read and write halves
        # how many products have each name, in bodies of loops too
        self.named: Dict[str, int] = {} if named is None else named

    def run(self) -> Graph:
        for node in self.graph.nodes():
            for i, entry in enumerate(self._rewritten(node)):
                self.done[Entry(node, i)] = entry
            if self.watch is not None and not node.is_variable:
                self._watch(node, self.done[Entry(node)].node)
        return Graph(self.done[e] for e in self.graph.outputs)

    def _watch(self, node: Node, new: Node) -> None:
        """Counts what a node computes, but for those with sparse gradients, which the engine does
        not have."""
        if new.name == node.name and _runs_engine(node) \
                and node.attrs.get("sparse_grad") not in ("True", "1"):
            new.attrs[_WATCH] = f"{self.watch}{node.name}"

    def _is_half(self, entry: Entry) -> bool:
        return self.types.get(entry) == HALF

    def _is_rounded(self, entry: Entry) -> bool:
        """Whether the engine is told to round it, or its gradient: then its format has no arrays of
        its own, or that of gradients has none."""
        dtype = self.types.get(entry)
        return dtype is not None and dtype not in TYPE_FLAG or dtype == HALF and self.rounds_halves

    def _outputs(self, node: Node) -> List[Entry]:
        return [Entry(node, i) for i in range(self.count[node])]

    def _rewritten(self, node: Node) -> List[Entry]:
        """What stands for the node's outputs."""
        outputs = self._outputs(node)
        if node.is_variable:
            return outputs
        if node.op in CASTS and node.inputs[0].node in self.norms:
            return [self.done[node.inputs[0]]]
        if self._stands_between_casts(node):
            self.norms.add(node)
            read = _BETWEEN_CASTS[node.op]
            new = node.like([*(self.done[e.node.inputs[0]] for e in node.inputs[:read]),
                             *(self.done[e] for e in node.inputs[read:])])
            new.attrs[ENGINE] = "1"
            return [Entry(new, e.output) for e in outputs]
        new = node.like(self.done[e] for e in node.inputs)
        if node.subgraphs:
            new.subgraphs = [self._body(node, i) for i in range(len(node.subgraphs))]
        entries = [*node.inputs, *outputs]
        rounded = any(map(self._is_rounded, entries)) or PRODUCT in node.attrs
        if node.op == "BatchNorm" and self.policy.cpu_only:  # ours is the faster on plain arrays
            rounded = True
        if rounded:
            self._say_formats(node, new)
        if rounded or any(map(self._is_half, entries)) or _goes_wrong_in_float32(node):
            self._run_engine(node, new)
        return [Entry(new, e.output) for e in outputs]

    def _run_engine(self, node: Node, new: Node) -> None:
        """Gives a node of low type the engine's in-place options, and constants in its format."""
        check_layout(node)
        if any(map(self._is_rounded, self._outputs(node))):
            for key, number in numbers(node):  # made float32 first, as a GPU does
                new.attrs[key] = repr(float(self.policy.between.nearest.round(np.float32(number))))
        if _runs_engine(node):
            new.attrs[ENGINE] = "1"
        if node.op in _RUN_ONCE:
            new.attrs.pop("__force_mirroring__", None)

    def _say_formats(self, node: Node, new: Node) -> None:
        """Tells the engine which inputs and outputs of a node it rounds, and to what."""
        policy = self.policy
        if new.attrs.get("dtype") == policy.between.type_name not in TYPE_FLAG:
            new.attrs["dtype"] = "float32"
        if node.op in LEFT_ALONE:
            return
        if PRODUCT in node.attrs:
            check_formats(node, policy.name)
        if node.op == "RNN" and not policy.one_format:
            new.attrs[LOOP] = "True"
        if policy.in_order:
            new.attrs[_ORDERED] = "True"
        product = PRODUCT in node.attrs
        if product:
            del new.attrs[PRODUCT]
            new.attrs[_READS] = factors(node).replace("1", "p")
            if policy.scaling is not None:
                new.attrs[_SCALING] = f"{policy.scaling} {self.scales.id} {policy.history} " \
                                      f"{policy.margin} {self._place(node)}"
        back = policy.gradient if policy.gradient_everywhere else policy.between
        gradient = policy.gradient if product else back
        for key, format_ in zip(_GRIDS, (policy.between, policy.product, gradient, back)):
            new.attrs[key] = format_.for_engine
        for key, entries in ((_INPUTS, node.inputs), (_OUTPUTS, self._outputs(node))):
            new.attrs[key] = "".join(str(int(self._is_rounded(e))) for e in entries)

    def _place(self, node: Node) -> str:
        """What the histories of a product's float8 tensors are called: as it is, and with a number
        where a layer is called again, since MXNet gives all its calls one name."""
        self.named[node.name] = self.named.get(node.name, 0) + 1
        again = self.named[node.name]
        place = self.place(node.name)
        return place if again == 1 else f"{place} {again}"

    def _stands_between_casts(self, node: Node) -> bool:
        """Whether a float32 layer norm or batched product reads what was cast from float16, and all
        that read it cast it back: then it reads and writes halves itself, which gives the same
        numbers."""
        read = _BETWEEN_CASTS.get(node.op, 0)
        if not read or self.rounds_halves or PRODUCT in node.attrs \
                or not all(map(self._is_cast_from_half, node.inputs[:read])):
            return False
        if self.watch is not None and node.op in PRODUCTS:  # its casts are to be counted
            return False
        users = self.users.get(Entry(node), [])
        return bool(users) \
            and not any(Entry(node, i) in self.users for i in (1, 2)) \
            and all(user is not None and user.op in CASTS and self._is_half(Entry(user))
                    for user in users)

    def _is_cast_from_half(self, entry: Entry) -> bool:
        return entry.node.op in CASTS and not self._is_half(entry) \
            and self._is_half(entry.node.inputs[0])

    def _body(self, node: Node, which: int) -> Graph:
        body, inputs = node.subgraphs[which], bindings(node)[which]
        names = body.variables()
        types = {name: self.types[node.inputs[i]] or "float32" for name, i in zip(names, inputs)}
        rewritten = _Rewriting(body, types, self.policy, self.watch, self.scales, self.place,
                               self.named).run()
        assert rewritten.variables() == names, (node, names, rewritten.variables())
        return rewritten


def _runs_engine(node: Node) -> bool:
    return node.op in library.dispatched() and node.op not in LEFT_ALONE


def _goes_wrong_in_float32(node: Node) -> bool:
    """Whether MXNet's own float32 code on a CPU is wrong, so that ours runs in its place: Dropout
    forgets its mask on the way back; PReLU writes the data's gradient over the gradient that it
    still has to read for the slope's; hard_sigmoid writes its own over one that others read."""
    return node.op in ("Dropout", "hard_sigmoid") or node.attrs.get("act_type") == "prelu"


def _with_dropout_to_walk_back_twice(graph: Graph) -> Graph:
    """The graph with x * Dropout(1) for each Dropout(x), which gives the same numbers: MXNet's own
    forgets its mask once it has been walked back, and of ones no gradient is needed."""
    new: Dict[Node, Node] = {}
    for node in graph.nodes():
        inputs = [Entry(new[e.node], e.output) for e in node.inputs]
        new[node] = made = node if node.is_variable else node.like(inputs)
        made.subgraphs = [_with_dropout_to_walk_back_twice(body) for body in node.subgraphs]
        if node.op == "Dropout":
            ones = Node("ones_like", f"{node.name}_ones", {}, inputs)
            made.inputs = [Entry(ones)]
            new[node] = Node("elemwise_mul", f"{node.name}_masked", {}, [*inputs, Entry(made)])
    return Graph(Entry(new[e.node], e.output) for e in graph.outputs)
