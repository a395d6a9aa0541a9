"""The graph that a device runs: the network's graph with its casts, and settings on its nodes.

A CPU and a GPU run the same graph. A setting is an attribute `__gluon_amp_*__`, which MXNet's
parsers skip; cpu/engine.h lists them. On a CPU the engine runs float16 nodes by their types, and
nodes with a setting whatever their types are.

Formats that MXNet has no arrays of (TF32, float8) run on CPUs only. Their tensors are float32
arrays, and attributes of a node select which of its inputs and outputs are rounded, and to what.
"""
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from .._mxnet import mx, np
from ..cpu import library
from ..cpu.arrays import HALVES
from ..cpu.scales import Scales
from ..policy import POLICIES, Policy
from .accumulate import ATTRIBUTE as ACCUMULATE
from .accumulate import accumulate
from .casts import PRODUCT
from .graph import CASTS, TYPE_FLAG, Entry, Graph, Node
from .high_precision import in_high_precision
from .operators import BATCH_NORMS, factors, numbers
from .refusals import LOOP, check_formats, check_loops

# The engine runs the node on a CPU even where all its arrays are float32.
_ENGINE = "__gluon_amp_engine__"
# Formats: see cpu/engine.h.
_INPUTS, _OUTPUTS, _READS = (f"__gluon_amp_{word}__" for word in ("inputs", "outputs", "reads"))
_ORDERED, _SCALING = "__gluon_amp_ordered__", "__gluon_amp_scaling__"
# Of a product of bfloat16 data: its parameters are float32 arrays, which it rounds itself.
_PARAMETERS = "__gluon_amp_float32_parameters__"
WATCH = "__gluon_amp_watch__"  # the node's name, where the engine counts what it computes
_SAMPLES = "?"  # before that name: samples only
_GRIDS = tuple(f"__gluon_amp_{word}_grid__" for word in ("output", "product", "gradient", "back"))

# They draw a mask or update statistics, so recomputation in the backward pass
# (__force_mirroring__) would change the result.
_RUN_ONCE = frozenset(["Dropout", *BATCH_NORMS])

# They get no settings, so that MXNet's code runs them. Most create or move values, as their
# gradients do, and MXNet's code is as fast for halves: they are kMoves of cpu/dispatch.cc. The last
# three run graphs, which are built by themselves.
LEFT_ALONE = frozenset("""
    Reshape Flatten expand_dims squeeze reshape_like BlockGrad _copy _zeros _zeros_without_dtype
    _ones _full _eye zeros_like ones_like _npx_reshape _np_reshape _np_squeeze
    _foreach _while_loop _cond
""".split())


def build(graph: Graph, types: Mapping[str, str], policy: Policy = POLICIES["float16"],
          watch: bool = False, samples: bool = False, scales: Optional[Scales] = None,
          place: Callable[[str], str] = str) -> Graph:
    """The graph that a device runs, with the same variables and outputs, of the same types.

    Args:
        graph: with its casts, as `insert_casts` makes it.
        types: the dtype of each variable.
        policy: defines the formats that are no types of arrays.
        watch: whether the engine counts what each node computes (inspection/statistics.py).
        samples: then it takes samples only.
        scales: the histories of the network's float8 tensors; if not given, new ones, which the
            engine keeps as long as the process.
        place: gives for a node's name the name of its histories.
    """
    if not library.started():
        return _with_repeatable_dropout(graph)
    prefix = (_SAMPLES if samples else "") if watch else None
    built = _Rewriting(graph, types, policy, prefix, scales or Scales(freed=False), place).run()
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
        # whether gradients of float16 arrays have another format, which the engine rounds them to
        self.rounds_halves = policy.gradient_everywhere and policy.gradient != policy.between
        self.types = graph.types(types)
        self.count: Dict[Node, int] = {}  # of outputs
        for entry in self.types:
            self.count[entry.node] = self.count.get(entry.node, 0) + 1
        users = graph.consumers()
        self.without_casts = {node for node in graph.nodes()
                              if self._adds_in_float32(node, users.get(Entry(node), []))}
        # how many products have each name, in bodies of loops too
        self.named: Dict[str, int] = {} if named is None else named

    def run(self) -> Graph:
        def make(node: Node, inputs: List[Entry]) -> Union[Node, Sequence[Entry]]:
            if node.op in CASTS and node.inputs[0].node in self.without_casts:
                return inputs
            if node in self.without_casts:
                inputs = [e.node.inputs[0] for e in inputs]
            if not self._casts_parameters(node):
                return self._rewritten(node, inputs)
            made = self._rewritten(node, [inputs[0], *(e.node.inputs[0] for e in inputs[1:])])
            made.attrs[_PARAMETERS] = "1"
            return made
        return self.graph.rewrite(make)

    def _adds_in_float32(self, node: Node, users: Sequence[Optional[Node]]) -> bool:
        """Whether a batched product in float32 reads casts of halves only, and is read by casts to
        halves only. On a node with a setting, a batched product of halves adds in float32 on both
        devices (cpu/gpu.cc), which gives the same numbers without the casts."""
        if node.op != "batch_dot" or PRODUCT in node.attrs or self.rounds_halves \
                or self.watch is not None:  # an X-ray counts what the casts round
            return False
        return bool(users) \
            and all(self._is_cast(e.node, "float16", "float32") for e in node.inputs) \
            and all(u is not None and self._is_cast(u, "float32", "float16") for u in users)

    def _casts_parameters(self, node: Node) -> bool:
        """Whether a layer's parameters are bfloat16 only for it. It then reads the float32 ones: no
        array holds the rounded ones, or their gradients before they are cast."""
        return node.op in ("Convolution", "FullyConnected") and self.watch is None \
            and self.policy.one_format and self.policy.accumulate is None \
            and self.types.get(node.inputs[0]) == "bfloat16" \
            and all(self._is_cast(e.node, "float32", "bfloat16") for e in node.inputs[1:])

    def _is_cast(self, node: Node, before: str, after: str) -> bool:
        return node.op in CASTS and self.types[node.inputs[0]] == before \
            and self.types[Entry(node)] == after

    def _is_half(self, entry: Entry) -> bool:
        return self.types.get(entry) in HALVES

    def _is_rounded(self, entry: Entry) -> bool:
        """Whether the engine is told to round it, or its gradient: then its format has no arrays of
        its own, or that of gradients has none."""
        dtype = self.types.get(entry)
        return dtype is not None and dtype not in TYPE_FLAG \
            or dtype in HALVES and self.rounds_halves

    def _outputs(self, node: Node) -> List[Entry]:
        return [Entry(node, i) for i in range(self.count[node])]

    def _rewritten(self, node: Node, inputs: List[Entry]) -> Node:
        """The same operator with its settings."""
        new = node.like(inputs)
        new.subgraphs = [
            _Rewriting(body.graph, body.types, self.policy, self.watch, self.scales, self.place,
                       self.named).run() for body in node.bodies(self.types)]
        entries = [*node.inputs, *self._outputs(node)]
        rounded = any(map(self._is_rounded, entries)) or PRODUCT in node.attrs
        # ours is the faster on plain arrays
        if node.op == "BatchNorm" and self.policy.is_emulated:
            rounded = True
        if rounded:
            self._say_formats(node, new)
        low = rounded or node in self.without_casts or any(map(self._is_half, entries))
        if low and node.op in _RUN_ONCE:
            new.attrs.pop("__force_mirroring__", None)
        if low and self.policy.accumulate is not None:
            accumulate(new, self.policy.accumulate, self.policy.split)
        if self.policy.high_precision and (PRODUCT in node.attrs or ACCUMULATE in new.attrs):
            in_high_precision(new, self.policy.high_precision, self.policy.name)
        if _is_better_in_the_engine(node) or node in self.without_casts:
            new.attrs[_ENGINE] = "1"
        if self.watch is not None and _runs_engine(node) \
                and node.attrs.get("sparse_grad") not in ("True", "1"):
            new.attrs[WATCH] = f"{self.watch}{node.name}"
        return new

    def _say_formats(self, node: Node, new: Node) -> None:
        """Tells the engine which inputs and outputs of a node it rounds, and to what."""
        policy = self.policy
        if new.attrs.get("dtype") == policy.between.type_name not in TYPE_FLAG:
            new.attrs["dtype"] = "float32"
        if any(map(self._is_rounded, self._outputs(node))):
            for key, number in numbers(node):  # made float32 first, as a GPU does
                new.attrs[key] = repr(float(policy.between.nearest.round(np.float32(number))))
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
            new.attrs[_READS] = factors(node).replace("1", "p")  # p: rounded to the product's grid
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


def _runs_engine(node: Node) -> bool:
    return node.op in library.dispatched() and node.op not in LEFT_ALONE


def _is_better_in_the_engine(node: Node) -> bool:
    """Whether the engine runs a node in float32, too, since MXNet's CPU code is wrong or slow.

    Dropout's mask serves one backward pass only; PReLU writes the data's gradient over the gradient
    that the slope's still reads; hard_sigmoid's gradient overwrites one that others read. A layer
    norm of cast data, or of what an operator makes of such data (a residual sum), is several times
    slower; another float32 one has MXNet's bits.
    """
    if node.op == "LayerNorm":
        data = node.inputs[0].node
        return any(each.op in CASTS for each in (data, *(e.node for e in data.inputs)))
    return node.op in ("Dropout", "hard_sigmoid") or node.attrs.get("act_type") == "prelu"


def _with_repeatable_dropout(graph: Graph) -> Graph:
    """The graph with x * Dropout(1) for each Dropout(x), which gives the same numbers. Without the
    engine, the mask of MXNet's Dropout serves one backward pass only; ones need no gradient."""
    def make(node: Node, inputs: List[Entry]) -> Node:
        made = node.like(inputs)
        made.subgraphs = [_with_repeatable_dropout(body) for body in node.subgraphs]
        if node.op != "Dropout":
            return made
        made.inputs = [Entry(Node("ones_like", f"{node.name}_ones", {}, inputs))]
        return Node("elemwise_mul", f"{node.name}_masked", {}, [*inputs, Entry(made)])
    return graph.rewrite(make)
