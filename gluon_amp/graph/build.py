"""Builds the graph that a device runs: the network's graph with casts and settings on its nodes.

A CPU and a GPU run the same graph. On a CPU the engine runs all 16-bit nodes, and nodes of any type
that have a setting (`Node.settings`). cpu/dispatch/settings.h describes the settings.
"""
from collections import Counter
from typing import Any, Callable, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

from .._mxnet import mx
from ..cpu import library
from ..cpu.arrays import TYPES_16BIT
from ..formats import BFLOAT16
from ..policy import POLICIES, Policy
from .graph import Entry, Graph, Node
from .onednn_layouts import entries_in_layout, setting
from .operators import AVERAGING, CASTS, COLUMNS, RUN_ONCE

FINITE_AVERAGES = {"finite_averages": "1"}  # the setting of operators with moving averages


def build(graph: Graph, types: Mapping[str, str], policy: Policy = POLICIES["float16"],
          watch: bool = False, samples: bool = False, layouts: bool = False,
          chosen: Optional[Callable[[str], bool]] = None) -> Graph:
    """Returns the graph that a device runs. Variables and outputs keep their types.

    Args:
        graph: the result of `insert_casts`.
        types: the dtype of each variable.
        policy: the policy of the casts.
        watch: whether the engine counts each node's values (inspection/watch.py).
        samples: whether it counts samples only.
        layouts: whether tensors within the graph may have oneDNN's layout (onednn_layouts.py).
        chosen: returns whether `watch` counts the node of this name; None: all nodes.
    """
    if not library.started():
        return graph
    counts = ("samples" if samples else "all") if watch else ""
    builder = _GraphBuilder(graph, types, counts, chosen)
    if layouts and not watch and policy.compute == BFLOAT16:
        builder.in_layout = entries_in_layout(graph, builder.types)
    return builder.run()


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


def keep_averages_finite(graph: Graph) -> bool:
    """Gives the operators with moving averages their setting, in place; returns whether there are
    any. Without the engine, does nothing."""
    nodes = graph.nodes_within() if library.started() else ()
    averaging = [node for node in nodes if node.op in AVERAGING]
    for node in averaging:
        node.settings.update(FINITE_AVERAGES)
    return bool(averaging)


class _GraphBuilder:
    """The builder of one graph, or of the body of a loop."""

    def __init__(self, graph: Graph, types: Mapping[str, str], counts: str,
                 chosen: Optional[Callable[[str], bool]]):
        self.graph, self.counts, self.chosen = graph, counts, chosen
        self.types = graph.types(types)
        self.count = Counter(entry.node for entry in self.types)  # outputs of each node
        users = graph.consumers()
        self.without_casts = {node for node in graph.nodes()
                              if self._adds_in_float32(node, users.get(Entry(node), []))}
        self.in_layout: Set[Entry] = set()

    def run(self) -> Graph:
        def make(node: Node, inputs: List[Entry]) -> Union[Node, Sequence[Entry]]:
            if node.op in CASTS and node.inputs[0].node in self.without_casts:
                return inputs
            if node in self.without_casts:
                inputs = [e.node.inputs[0] for e in inputs]
            if not self._casts_parameters(node):
                return self._rewritten(node, inputs)
            layer = self._rewritten(node, [inputs[0], *(e.node.inputs[0] for e in inputs[1:])])
            layer.settings["float32_parameters"] = "1"
            return layer
        return self.graph.rewrite(make)

    def _adds_in_float32(self, node: Node, users: Sequence[Optional[Node]]) -> bool:
        """Whether a float32 batched product needs no casts.

        True if it reads only casts from float16, and only casts to float16 read it. With a
        setting, the same product of float16 data accumulates in float32 on both devices
        (cpu/gpu.cc), so the results are equal.
        """
        if node.op != "batch_dot" or self.counts:  # an X-ray counts what the casts round
            return False
        return bool(users) \
            and all(self._is_cast(e.node, "float16", "float32") for e in node.inputs) \
            and all(u is not None and self._is_cast(u, "float32", "float16") for u in users)

    def _casts_parameters(self, node: Node) -> bool:
        """Whether a layer casts float32 parameters to bfloat16. It then reads the float32 arrays
        and rounds in its kernel, without bfloat16 copies of parameters and gradients."""
        return node.op in COLUMNS["has_parameters"] and not self.counts \
            and self.types.get(node.inputs[0]) == "bfloat16" \
            and all(self._is_cast(e.node, "float32", "bfloat16") for e in node.inputs[1:])

    def _is_cast(self, node: Node, before: str, after: str) -> bool:
        return node.op in CASTS and self.types[node.inputs[0]] == before \
            and self.types[Entry(node)] == after

    def _rewritten(self, node: Node, inputs: List[Entry]) -> Node:
        """Returns the node with its settings and new inputs."""
        new = node.like(inputs)
        new.subgraphs = [
            _GraphBuilder(body.graph, body.types, self.counts, self.chosen).run()
            for body in node.bodies(self.types)]
        entries = [*node.inputs, *(Entry(node, i) for i in range(self.count[node]))]
        if node.op in RUN_ONCE and any(self.types.get(e) in TYPES_16BIT for e in entries):
            new.attrs.pop("__force_mirroring__", None)
        if _is_better_in_the_engine(node):
            new.settings["in_engine"] = "1"
        if node in self.without_casts:
            new.settings["float32_sums"] = "1"
        if node.op in AVERAGING:
            new.settings.update(FINITE_AVERAGES)
        if self.in_layout:
            new.settings.update(setting(node, self.count[node], self.in_layout))
        if self.counts and node.op in library.operators() and node.op not in COLUMNS["moves"] \
                and (not self.chosen or self.chosen(node.name)) and not node.is_set("sparse_grad"):
            new.settings.update(counts=self.counts, watch=node.name)
        return new


def _is_better_in_the_engine(node: Node) -> bool:
    """Whether the engine runs a node in float32 too, because MXNet's CPU code is wrong or slow.

    MXNet's Dropout mask is valid for one backward pass only, although a user retains the graph.
    PReLU's backward pass overwrites the head gradient before it computes the slope's gradient.
    hard_sigmoid's backward pass overwrites a gradient that other nodes read. LayerNorm of cast
    data, or of a sum of such data, is several times slower; any other float32 LayerNorm keeps
    MXNet's bits.
    """
    if node.op == "LayerNorm":
        data = node.inputs[0].node
        return any(each.op in CASTS for each in (data, *(e.node for e in data.inputs)))
    return node.op in ("Dropout", "hard_sigmoid") or node.attrs.get("act_type") == "prelu"


# ---- graphs that a device refuses, before MXNet executes them asynchronously


def check_device(graph: Graph, policy: Policy, on_gpu: bool) -> None:
    """Refuses a graph or a policy that this kind of device does not support."""
    if on_gpu and policy.cpu_only:
        raise ValueError(f"policy {policy.name} runs on CPUs only: on GPUs MXNet 1.9.1 has no "
                         "arrays of bfloat16: use float16. Received: data on a GPU")
    if not on_gpu:
        library.load()
        for node in graph.nodes_within():
            layout = node.attrs.get("layout", "None")
            if node.op in COLUMNS["convolution"] and layout.endswith("C"):
                raise ValueError(f"{node.name}: a CPU has no channels-last {node.op}. "
                                 f"Valid: layout NCW, NCHW, NCDHW. Received: {layout}")


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
