"""Builds the graph that a device runs: the network's graph with casts and settings on its nodes.

A CPU and a GPU run the same graph. On a CPU the engine runs all 16-bit nodes, and nodes of any type
that have a setting (`Node.settings`). cpu/dispatch/settings.h describes the settings.

Emulated formats (TF32, float8) run on CPUs only: MXNet has no arrays of them. Their tensors are
float32 arrays. A node's settings select the inputs and outputs that the engine rounds.
"""
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from .._mxnet import mx, np
from ..cpu import library
from ..cpu.arrays import TYPES_16BIT
from ..cpu.scales import Scales
from ..formats import BFLOAT16
from ..policy import POLICIES, Policy
from .blocks import blocked_entries, setting
from .graph import CASTS, TYPE_FLAG, Entry, Graph, Node
from .operators import BATCH_NORMS, factors, numbers
from .products import set_products

# Operators that draw a mask or update statistics: recomputation in the backward pass
# (__force_mirroring__) would change the result.
_RUN_ONCE = frozenset(["Dropout", *BATCH_NORMS])
# Products for which the engine supports one format only, and their names in MXNet's API.
_OF_ONE_FORMAT = {"_npi_einsum": "einsum", "Convolution_v1": "Convolution_v1",
                  "_contrib_DeformableConvolution": "DeformableConvolution",
                  "_contrib_ModulatedDeformableConvolution": "ModulatedDeformableConvolution"}


def build(graph: Graph, types: Mapping[str, str], policy: Policy = POLICIES["float16"],
          watch: bool = False, samples: bool = False, scales: Optional[Scales] = None,
          place: Callable[[str], str] = str, blocks: bool = False,
          chosen: Optional[Callable[[str], bool]] = None) -> Graph:
    """Returns the graph that a device runs. Variables and outputs keep their types.

    Args:
        graph: the result of `insert_casts`.
        types: the dtype of each variable.
        policy: defines the emulated formats.
        watch: whether the engine counts each node's values (inspection/watch.py).
        samples: whether it counts samples only.
        scales: the histories of the network's float8 tensors. By default new ones, which the
            engine keeps until the process ends.
        place: maps a node's name to the name of its histories.
        blocks: whether tensors within the graph may be blocked (blocks.py).
        chosen: returns whether `watch` counts the node of this name; None: all nodes.
    """
    if not library.started():
        return _with_repeatable_dropout(graph)
    counts = ("samples" if samples else "all") if watch else ""
    builder = _GraphBuilder(graph, types, policy, counts, scales or Scales(freed=False), place,
                            chosen)
    if blocks and not watch and policy.activation == BFLOAT16 and policy.one_format:
        builder.blocked = blocked_entries(graph, builder.types)
    built = builder.run()
    _check_loops(built, policy.name)
    return built


def cached_op(symbol: "mx.sym.Symbol", data: Sequence[str], parameters: Mapping[str, Any],
              flags: Iterable[Any] = ()) -> Tuple[Any, List[Any]]:
    """Returns MXNet's CachedOp of a symbol, and the source of each of its inputs.

    A source is (True, the index of a data input) or (False, a parameter).

    Args:
        data: the names of the data inputs, in order.
        parameters: the parameters of the other variables, by name.
        flags: MXNet's flags, such as ("static_alloc", True).
    """
    inputs = [(True, data.index(name)) if name in data else (False, parameters[name])
              for name in symbol.list_inputs()]
    places = [("data_indices", [i for i, (is_data, _) in enumerate(inputs) if is_data]),
              ("param_indices", [i for i, (is_data, _) in enumerate(inputs) if not is_data])]
    return mx.nd.CachedOp(symbol, [*places, *flags]), inputs


class _GraphBuilder:
    """The builder of one graph, or of the body of a loop."""

    def __init__(self, graph: Graph, types: Mapping[str, str], policy: Policy,
                 counts: str, scales: Scales, place: Callable[[str], str],
                 chosen: Optional[Callable[[str], bool]],
                 named: Optional[Dict[str, int]] = None):
        self.graph, self.policy, self.counts = graph, policy, counts
        self.scales, self.place, self.chosen = scales, place, chosen
        # whether the engine rounds gradients of 16-bit arrays to another format
        self.rounds_16bit = policy.gradient_everywhere and policy.gradient != policy.activation
        self.types = graph.types(types)
        self.count: Dict[Node, int] = {}  # outputs of each node
        for entry in self.types:
            self.count[entry.node] = self.count.get(entry.node, 0) + 1
        users = graph.consumers()
        self.without_casts = {node for node in graph.nodes()
                              if self._adds_in_float32(node, users.get(Entry(node), []))}
        # the number of products with each name so far, bodies of loops included
        self.named: Dict[str, int] = {} if named is None else named
        self.blocked: Set[Entry] = set()

    def run(self) -> Graph:
        def make(node: Node, inputs: List[Entry]) -> Union[Node, Sequence[Entry]]:
            if node.op in CASTS and node.inputs[0].node in self.without_casts:
                return inputs
            if node in self.without_casts:
                inputs = [e.node.inputs[0] for e in inputs]
            if not self._casts_parameters(node):
                return self._rewritten(node, inputs)
            made = self._rewritten(node, [inputs[0], *(e.node.inputs[0] for e in inputs[1:])])
            made.settings["parameters"] = "1"
            return made
        return self.graph.rewrite(make)

    def _adds_in_float32(self, node: Node, users: Sequence[Optional[Node]]) -> bool:
        """Whether a float32 batched product needs no casts.

        True if it reads only casts from float16, and only casts to float16 read it. With a
        setting, the same product of float16 data accumulates in float32 on both devices
        (cpu/gpu.cc), so the results are equal.
        """
        if node.op != "batch_dot" or node.rounds_inputs or self.rounds_16bit \
                or self.counts:  # an X-ray counts what the casts round
            return False
        return bool(users) \
            and all(self._is_cast(e.node, "float16", "float32") for e in node.inputs) \
            and all(u is not None and self._is_cast(u, "float32", "float16") for u in users)

    def _casts_parameters(self, node: Node) -> bool:
        """Whether a layer casts float32 parameters to bfloat16. It then reads the float32 arrays
        and rounds in its kernel, without bfloat16 copies of parameters and gradients."""
        return node.op in ("Convolution", "FullyConnected") and not self.counts \
            and self.policy.one_format and self.policy.accumulate is None \
            and self.types.get(node.inputs[0]) == "bfloat16" \
            and all(self._is_cast(e.node, "float32", "bfloat16") for e in node.inputs[1:])

    def _is_cast(self, node: Node, before: str, after: str) -> bool:
        return node.op in CASTS and self.types[node.inputs[0]] == before \
            and self.types[Entry(node)] == after

    def _is_16bit(self, entry: Entry) -> bool:
        return self.types.get(entry) in TYPES_16BIT

    def _is_rounded(self, entry: Entry) -> bool:
        """Whether the engine rounds the entry or its gradient to an emulated format."""
        dtype = self.types.get(entry)
        return dtype is not None and dtype not in TYPE_FLAG \
            or dtype in TYPES_16BIT and self.rounds_16bit

    def _outputs(self, node: Node) -> List[Entry]:
        return [Entry(node, i) for i in range(self.count[node])]

    def _rewritten(self, node: Node, inputs: List[Entry]) -> Node:
        """Returns the node with its settings and new inputs."""
        new = node.like(inputs)
        new.subgraphs = [
            _GraphBuilder(body.graph, body.types, self.policy, self.counts, self.scales, self.place,
                          self.chosen, self.named).run() for body in node.bodies(self.types)]
        entries = [*node.inputs, *self._outputs(node)]
        rounded = any(map(self._is_rounded, entries)) or node.rounds_inputs
        # the engine's kernel is faster on float32 arrays
        if node.op == "BatchNorm" and self.policy.is_emulated:
            rounded = True
        if rounded:
            self._set_formats(node, new)
        low = rounded or node in self.without_casts or any(map(self._is_16bit, entries))
        if low and node.op in _RUN_ONCE:
            new.attrs.pop("__force_mirroring__", None)
        if low and (self.policy.accumulate or self.policy.high_precision):
            set_products(new, self.policy)
        if _is_better_in_the_engine(node) or node in self.without_casts:
            new.settings["engine"] = "1"
        if self.blocked:
            new.settings.update(setting(node, self.count[node], self.blocked))
        if self.counts and _runs_engine(node) and (not self.chosen or self.chosen(node.name)) \
                and node.attrs.get("sparse_grad") not in ("True", "1"):
            new.settings.update(counts=self.counts, watch=node.name)
        return new

    def _set_formats(self, node: Node, new: Node) -> None:
        """Sets which inputs and outputs of a node the engine rounds, and to which formats."""
        policy = self.policy
        if new.attrs.get("dtype") == policy.activation.type_name not in TYPE_FLAG:
            new.attrs["dtype"] = "float32"
        if any(map(self._is_rounded, self._outputs(node))):
            for key, number in numbers(node):  # rounded to float32 first, as on a GPU
                new.attrs[key] = repr(float(policy.activation.nearest.round(np.float32(number))))
        if not _runs_engine(node):  # a parser may refuse settings, or pass them to the user's code
            return
        if node.rounds_inputs:
            _check_formats(node, policy.name)
        if node.op == "RNN" and not policy.one_format:
            new.settings["loop"] = "1"
        if policy.in_order:
            new.settings["ordered"] = "1"
        if node.rounds_inputs:
            new.settings["reads"] = factors(node).replace("1", "p")  # p: to the product's grid
            if policy.scaling is not None:
                new.settings.update(scaling=f"{policy.scaling} {policy.history} {policy.margin}",
                                    histories=f"{self.scales.id} {self._place(node)}")
        back = policy.gradient if policy.gradient_everywhere else policy.activation
        gradient = policy.gradient if node.rounds_inputs else back
        grids = {"output": policy.activation, "product": policy.product, "gradient": gradient,
                 "back": back}
        new.settings.update((f"{key}_grid", format_._for_engine) for key, format_ in grids.items())
        for key, entries in (("inputs", node.inputs), ("outputs", self._outputs(node))):
            new.settings[key] = "".join(str(int(self._is_rounded(e))) for e in entries)

    def _place(self, node: Node) -> str:
        """Returns the name of the histories of a product's float8 tensors.

        MXNet gives all calls of a layer one name, so later calls get a number.
        """
        self.named[node.name] = self.named.get(node.name, 0) + 1
        again = self.named[node.name]
        place = self.place(node.name)
        return place if again == 1 else f"{place} {again}"


def _runs_engine(node: Node) -> bool:
    return node.op in library.operators() and node.op not in library.operators("moves")


def _is_better_in_the_engine(node: Node) -> bool:
    """Whether the engine runs a node in float32 too, because MXNet's CPU code is wrong or slow.

    MXNet's Dropout mask is valid for one backward pass only. PReLU's backward pass overwrites the
    head gradient before it computes the slope's gradient. hard_sigmoid's backward pass overwrites
    a gradient that other nodes read. LayerNorm of cast data, or of a sum of such data, is several
    times slower; any other float32 LayerNorm keeps MXNet's bits.
    """
    if node.op == "LayerNorm":
        data = node.inputs[0].node
        return any(each.op in CASTS for each in (data, *(e.node for e in data.inputs)))
    return node.op in ("Dropout", "hard_sigmoid") or node.attrs.get("act_type") == "prelu"


def _with_repeatable_dropout(graph: Graph) -> Graph:
    """Replaces each Dropout(x) by x * Dropout(1), which is equal.

    Without the engine, the mask of MXNet's Dropout is valid for one backward pass only. The
    gradient of the ones is not computed.
    """
    def make(node: Node, inputs: List[Entry]) -> Node:
        made = node.like(inputs)
        made.subgraphs = [_with_repeatable_dropout(body) for body in node.subgraphs]
        if node.op != "Dropout":
            return made
        made.inputs = [Entry(Node("ones_like", f"{node.name}_ones", {}, inputs))]
        return Node("elemwise_mul", f"{node.name}_masked", {}, [*inputs, Entry(made)])
    return graph.rewrite(make)


# ---- graphs that a device refuses, before MXNet executes them asynchronously


def check_device(graph: Graph, policy: Policy, on_gpu: bool) -> None:
    """Refuses a graph or a policy that this kind of device does not support."""
    if on_gpu and policy.cpu_only:
        why = "a GPU accumulates in its own order" if policy.accumulate else \
            "on GPUs MXNet 1.9.1 has no arrays of its formats: use float16"
        raise ValueError(f"policy {policy.name} runs on CPUs only: {why}. Received: data on a GPU")
    if not on_gpu:
        library.load()
        for node in graph.nodes_within():
            layout = node.attrs.get("layout", "None")
            if node.op in ("Convolution", "Deconvolution") and layout.endswith("C"):
                raise ValueError(f"{node.name}: a CPU has no channels-last {node.op}. "
                                 f"Valid: layout NCW, NCHW, NCDHW. Received: {layout}")


def _check_formats(node: Node, policy: str) -> None:
    """Refuses a product for which the engine supports one format only."""
    if node.op in _OF_ONE_FORMAT:
        raise ValueError(f"policy {policy}: {_OF_ONE_FORMAT[node.op]} requires one format for "
                         f"product, activation and gradient. Keep {node.name} in float32 "
                         "(keep=), or set the three to one format")


def _check_loops(built: Graph, policy: str) -> None:
    """Refuses options of RNNs that our loop over time (cpu/operators) does not support."""
    for node in _in_loops(built):
        for option in ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max",
                       "use_sequence_length"):
            value = node.attrs.get(option, "None")
            if value not in ("None", "False", "0"):
                raise ValueError(f"policy {policy} has no code for RNNs with {option}. Valid: RNNs "
                                 f"without, or keep=, which leaves {node.name} in float32. "
                                 f"Received: {option}={value}")


def dropout_in_loops(built: Graph, policy: str) -> str:
    """Returns why a CPU cannot train this graph, if our loop runs an RNN with dropout; else ""."""
    for node in _in_loops(built):
        if int(node.attrs.get("num_layers", 1)) > 1 and float(node.attrs.get("p", 0)) > 0:
            return f"policy {policy} has no code for the training of RNNs with dropout between " \
                   f"their layers. Valid: RNNs without, or keep=, which leaves {node.name} in " \
                   f"float32. Received: dropout={node.attrs['p']}"
    return ""


def _in_loops(built: Graph) -> Iterator[Node]:
    return (node for node in built.nodes_within()
            if node.op == "RNN" and ("loop" in node.settings or "accumulate" in node.settings))


def devices_that_wait(graph: Graph) -> int:
    """Returns the number of devices that synchronize in the graph's norms during training."""
    return max((int(node.attrs.get("ndev", 1)) for node in graph.nodes()
                if node.op == "_contrib_SyncBatchNorm"), default=1)


def check_trains_on_cpus(devices: int) -> None:
    """Refuses SyncBatchNorm over several CPU devices, which would deadlock.

    MXNet's norm blocks until the other devices reach it. All CPU devices share four scratch arrays,
    which MXNet assigns in the order in which operators are called. Operators after the norm on the
    first device get them before operators that precede the norm on the second.
    """
    if devices > 1:
        raise ValueError("SyncBatchNorm over several devices waits for ever on CPUs, which share "
                         "scratch memory in MXNet. Valid: num_devices=1, or GPUs. Received: "
                         f"num_devices={devices}")
