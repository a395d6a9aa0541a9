"""What a GPU would run for an X-ray: the network's own graph, with all that is watched as outputs.

On a CPU the engine counts inside its operators. A GPU runs MXNet's, so there a tensor has to leave
the graph to be counted: forward tensors as outputs that no gradient flows into, and the gradient of
a node's input as the gradient of a variable that is added to this input:

    node(x)  ->  node(x + z)      with z = -0, which changes no bit of x, not even a 0's sign

Nothing here has run on a GPU yet; on a CPU the same graph gives what the engine counts.
"""
from dataclasses import dataclass
from typing import Any, Collection, Dict, List, Mapping, Tuple

from .._mxnet import mx
from ..annotations import Network
from ..graph.build import LEFT_ALONE, build
from ..graph.graph import TYPE_FLAG, VARIABLE, Entry, Graph, Node
from ..graph.operators import BATCH_NORMS
from ..policy import Policy
from .statistics import Key
from .tensors import Layout

_ZERO = "gluon_amp_gradient"  # begins the names of the variables


@dataclass
class WatchedGraph:
    """A graph with the tensors that are watched.

    Attributes:
        graph: its first outputs are those of the network; then come the tensors.
        types: of its variables.
        outputs: the tensors, in the order of those outputs.
        gradients: by the name of a variable, the tensor that its gradient is. It has the shape of
            the node's input, and is to hold -0.0.
    """
    graph: Graph
    types: Dict[str, str]
    outputs: List[Key]
    gradients: Dict[str, Key]


def watched_on_gpu(net: Network) -> "mx.sym.Symbol":
    """The symbol that a GPU would run for an X-ray of a converted HybridBlock that has run once."""
    data, _ = net._cached_graph
    graph, types = net.mixed_graph(["float32"] * len(data))
    made = with_outputs(graph, types, net._amp.policy, net.collect_params())
    return build(made.graph, made.types, net._amp.policy).symbol()


def with_outputs(graph: Graph, types: Mapping[str, str], policy: Policy,
                 parameters: Collection[str]) -> WatchedGraph:
    """A graph with its casts, and with all that an X-ray watches in it as outputs; the inside of
    loops, which no output can show, is left out.

    Args:
        types: of the graph's variables.
        parameters: the names of those that are no data.
    """
    layout = Layout([(graph, types)], policy, parameters)
    found = graph.types(types)
    top = {node.name: node for node in graph.nodes()}
    keys = [tensor.key for tensor in layout.tensors() if tensor.key.node in top
            and top[tensor.key.node].op not in LEFT_ALONE]
    forward = {key for key in keys if not key.backward}
    backward = {key for key in keys if key.backward  # a batch norm writes into its averages
                and not (top[key.node].op in BATCH_NORMS and key.which >= 3)}
    made = WatchedGraph(Graph([]), dict(types), [], {})
    new: Dict[Node, Node] = {}
    shown: List[Tuple[Key, Entry]] = []
    for node in graph.nodes():
        new[node] = node if node.is_variable else node.like(
            _watched(made, Key(node.name, True, i), Entry(new[e.node], e.output), found[e])
            if Key(node.name, True, i) in backward else Entry(new[e.node], e.output)
            for i, e in enumerate(node.inputs))
        shown += [(key, Entry(new[node], key.which)) for key in sorted(forward)
                  if key.node == node.name]
    made.outputs = [key for key, _ in shown]
    made.graph = Graph([*(Entry(new[e.node], e.output) for e in graph.outputs),
                        *(Entry(Node("BlockGrad", _name(key, "shown"), {}, [entry]))
                          for key, entry in shown)])
    return made


def _watched(made: WatchedGraph, key: Key, entry: Entry, dtype: Any) -> Entry:
    """The input of a node with the variable added to it whose gradient shows its own."""
    name = f"{_ZERO}_{_name(key, 'input')}"
    zero = Node(VARIABLE, name, {"__dtype__": str(TYPE_FLAG[dtype])})
    made.types[name], made.gradients[name] = dtype, key
    return Entry(Node("elemwise_add", f"{name}_added", {}, [entry, Entry(zero)]))


def _name(key: Key, what: str) -> str:
    return f"{key.node}_{what}{key.which}"
