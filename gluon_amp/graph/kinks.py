"""A graph at two points near each other, for a central difference.

The difference is a derivative if both ends are on one side of each kink, such as that of a ReLU. So
both use the side of m, the middle of the operator's inputs:

    relu, LeakyReLU, abs          f(x) becomes x * slope(m)
    clip, maximum with a number   f(m) + (x - m) where f(m) == m, else f(m)
    maximum of arrays             the array that is the larger one in the middle
    without a gradient, such as comparisons, floor and BlockGrad:   f(m)

Operators that do not depend on the point are computed once. Other kinks are errors.
"""
import re
from typing import Dict, Iterable, Mapping, Sequence, Tuple

from ..checks import listed
from .graph import CASTS, Entry, Graph, Node

_NAMESPACE = re.compile("^_(np|npi|npx|sparse)_")
_RELUS = re.compile("relu|Activation-relu|LeakyReLU-(leaky|prelu)")
_ABS = re.compile("abs|absolute|fabs")
_CLAMPS = re.compile("clip|_?(maximum|minimum)_scalar")
_SELECTS = re.compile("(broadcast|)_?(maximum|minimum)")
_STEPS = re.compile(
    "(broadcast|)_?(equal|not_equal|(greater|lesser|less)(_equal)?|logical_(and|or|xor|not))"
    "(_scalar)?|sign|round|rint|around|ceil|floor|trunc|fix|BlockGrad|(zeros|ones)_like|"
    "arg(max|min|max_channel|sort)")
_OTHERS = re.compile(
    "Pooling-(max|lp)|(ROI|roi_)[Pp]ooling|RNN-rnn_relu|LeakyReLU-(selu|rrelu|elu)|hard_sigmoid|"
    "_contrib_BatchNormWithReLU|a?(max|min)|sort|topk|percentile|norm--?(1|inf)|"
    "(broadcast|)_?r?(mod|copysign)(_scalar)?|BilinearSampler|SpatialTransformer|"
    "_contrib_((Modulated)?DeformableConvolution|(sign|round)_ste)|Correlation")

Ends = Tuple[Entry, Entry]


def at_both_ends(graph: Graph, ends: Mapping[str, Tuple[str, str]]) -> Graph:
    """Returns a graph with the outputs at one end, followed by those at the other.

    Args:
        ends: for each variable that differs, the names of its variables at both ends.

    Raises:
        ValueError: a node has a kink, and no rule for it.
    """
    made: Dict[Node, Tuple[Node, Node]] = {}
    for node in graph.nodes():
        inputs = [(Entry(made[e.node][0], e.output), Entry(made[e.node][1], e.output))
                  for e in node.inputs]
        if node.is_variable and node.name in ends:
            first, second = ends[node.name]
            made[node] = Node(node.op, first), Node(node.op, second)
        elif any(one != other for one, other in inputs):
            made[node] = _both(node, inputs)
        else:
            made[node] = _same(node, (one for one, _ in inputs))
    return Graph(Entry(made[e.node][end], e.output) for end in (0, 1) for e in graph.outputs)


def _same(node: Node, inputs: Iterable[Entry]) -> Tuple[Node, Node]:
    """Returns one node for both ends."""
    made = node.like(inputs)
    return made, made


def _both(node: Node, inputs: Sequence[Ends]) -> Tuple[Node, Node]:
    """Returns a node at both ends."""
    kind = _kind(node)
    if _STEPS.fullmatch(kind):
        return _same(node, (_middle(node, e) for e in inputs))
    if _RELUS.fullmatch(kind):
        return _relus(node, inputs)
    if _ABS.fullmatch(kind):
        sign = _add(node, "sign", [_middle(node, inputs[0])])
        return _each(node, "elemwise_mul", inputs[0], (sign, sign))
    if _CLAMPS.fullmatch(kind):
        return _clamps(node, inputs[0])
    if _SELECTS.fullmatch(kind):
        return _selects(node, inputs)
    within = [n for body in node.subgraphs for n in body.nodes_within() if _has_kink(n)]
    if _OTHERS.fullmatch(kind) or within:
        raise ValueError(
            "gradient_penalty has no gradient for this kink. Valid: ReLU, LeakyReLU, PReLU, abs, "
            "clip, maximum and minimum of two, outside of loops; average pooling or strides in "
            f"place of max pooling. Received: {node.op} {node.name}"
            + (f", with {listed([n.name for n in within])}" if within else ""))
    if node.op == "Deconvolution":
        return _one_call(node, inputs)
    first, second = (node.like(e[end] for e in inputs) for end in (0, 1))
    return first, second


def _kind(node: Node) -> str:
    """Returns an operator without its namespace, and the attribute that selects its function."""
    op = _NAMESPACE.sub("", node.op).replace("_v1", "")
    if op in CASTS and re.search("int|bool", node.attrs["dtype"]):
        return "trunc"
    if node.attrs.get("act_type") == "elu" and float(node.attrs.get("slope", 0.25)) == 1:
        return "smooth"
    key, default = {"Activation": ("act_type", ""), "LeakyReLU": ("act_type", "leaky"),
                    "Pooling": ("pool_type", "max"), "RNN": ("mode", ""),
                    "norm": ("ord", "2")}.get(op, ("", ""))
    return f"{op}-{node.attrs.get(key, default)}" if key else op


def _has_kink(node: Node) -> bool:
    return any(kinks.fullmatch(_kind(node))
               for kinks in (_STEPS, _RELUS, _ABS, _CLAMPS, _SELECTS, _OTHERS))


def _relus(node: Node, inputs: Sequence[Ends]) -> Tuple[Node, Node]:
    """f(x) = x * s * f(s) with the sign s of the middle, -1 for 0 as in MXNet's gradients."""
    positive = _add(node, "_greater_scalar", [_middle(node, inputs[0])], scalar=0)
    sign = _add(node, "_minus_scalar", [_add(node, "_mul_scalar", [positive], scalar=2)], scalar=1)
    first, second = (
        _add(node, "elemwise_mul", [sign, Entry(node.like([sign, *(e[end] for e in inputs[1:])]))])
        for end in (0, 1))
    return _each(node, "elemwise_mul", inputs[0], (first, second))


def _clamps(node: Node, ends: Ends) -> Tuple[Node, Node]:
    middle = _middle(node, ends)
    there = Entry(node.like([middle]))
    within = _add(node, "_equal", [there, middle])
    beyond = _each(node, "elemwise_sub", ends, (middle, middle))
    moved = _each(node, "elemwise_mul", _entries(beyond), (within, within))
    return _each(node, "elemwise_add", _entries(moved), (there, there))


def _selects(node: Node, inputs: Sequence[Ends]) -> Tuple[Node, Node]:
    compare = "greater" if "maximum" in node.op else "lesser"
    first = _add(node, f"broadcast_{compare}_equal", [_middle(node, e) for e in inputs])
    second = _add(node, "_rminus_scalar", [first], scalar=1)
    parts = [_entries(_each(node, "broadcast_mul", ends, (chosen, chosen)))
             for ends, chosen in zip(inputs, (first, second))]
    return _each(node, "elemwise_add", *parts)


def _one_call(node: Node, inputs: Sequence[Ends]) -> Tuple[Node, Node]:
    """A layer on the rows of both ends. MXNet's CPU code crashes in a backward pass through two
    deconvolutions of the same shapes."""
    rows = _add(node, "Concat", inputs[0], dim=0, num_args=2)
    made = Entry(node.like([rows, *(one for one, _ in inputs[1:])]))
    halves = _add(node, "SliceChannel", [made], num_outputs=2, axis=0).node
    first, second = (_add(node, "_copy", [Entry(halves, end)]).node for end in (0, 1))
    return first, second


def _middle(node: Node, ends: Ends) -> Entry:
    if ends[0] == ends[1]:
        return ends[0]
    return _add(node, "_mul_scalar", [_add(node, "elemwise_add", ends)], scalar=0.5)


def _add(node: Node, op: str, inputs: Iterable[Entry], **attrs: float) -> Entry:
    """Returns the output of a new node, named after `node`."""
    return Entry(Node(op, f"{node.name}_{op}", {k: str(v) for k, v in attrs.items()}, inputs))


def _each(node: Node, op: str, left: Ends, right: Ends) -> Tuple[Node, Node]:
    """Returns an operator at each end."""
    first, second = (_add(node, op, pair).node for pair in zip(left, right))
    return first, second


def _entries(nodes: Tuple[Node, Node]) -> Ends:
    return Entry(nodes[0]), Entry(nodes[1])
