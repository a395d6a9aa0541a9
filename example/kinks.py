"""Outputs of a network at two close points whose difference is a slope, also between kinks.

At a kink, such as that of a ReLU, the slope of a network jumps. If an operator's inputs at the two
points lie on different sides of it, the difference quotient of the outputs is not a slope. So both
points use the side on which the middle m of the inputs lies:

    relu, LeakyReLU, abs          f(x) becomes x * slope(m)
    clip, maximum with a number   f(m) + (x - m) where f(m) == m, else f(m)
    maximum of arrays             the array that is the larger one in the middle
    without a gradient, such as comparisons, floor and BlockGrad:   f(m)

Operators that do not depend on the point are computed once. Other kinks are errors.
"""
import json
import re

import gluon_amp  # noqa: F401  (before mxnet, so that numpy fits)
import mxnet as mx

VERSION = {"mxnet_version": ["int", 10901]}  # of the JSON: MXNet converts other versions
# Operators by their kinks: names without a namespace, with the attribute that selects the function
NAMESPACE = re.compile("^_(np|npi|npx|sparse)_")
SELECTORS = {"Activation": ("act_type", ""), "LeakyReLU": ("act_type", "leaky"),
             "Pooling": ("pool_type", "max"), "RNN": ("mode", ""), "norm": ("ord", "2")}
RELUS = re.compile("relu|Activation-relu|LeakyReLU-(leaky|prelu)")
ABS = re.compile("abs|absolute|fabs")
CLAMPS = re.compile("clip|_?(maximum|minimum)_scalar")
SELECTS = re.compile("(broadcast|)_?(maximum|minimum)")
PIECEWISE_CONSTANT = re.compile(
    "(broadcast|)_?(equal|not_equal|(greater|lesser|less)(_equal)?|logical_(and|or|xor|not))"
    "(_scalar)?|sign|round|rint|around|ceil|floor|trunc|fix|BlockGrad|(zeros|ones)_like|"
    "arg(max|min|max_channel|sort)")
OTHERS = re.compile(
    "Pooling-(max|lp)|(ROI|roi_)[Pp]ooling|RNN-rnn_relu|LeakyReLU-(selu|rrelu|elu)|hard_sigmoid|"
    "_contrib_BatchNormWithReLU|a?(max|min)|sort|topk|percentile|norm--?(1|inf)|"
    "(broadcast|)_?r?(mod|copysign)(_scalar)?|BilinearSampler|SpatialTransformer|"
    "_contrib_((Modulated)?DeformableConvolution|(sign|round)_ste)|Correlation")


def outputs_at_both_ends(graph, arrays, name, ends):
    """Returns the output of a graph at two points, as a pair.

    Args:
        graph: MXNet's JSON. An input of a node is the number of a node, and that of its output.
        arrays: the other variables by name.
        name: the variable that differs between the points.
        ends: its two arrays.

    Raises:
        ValueError: a node has a kink for which there is no rule.
    """
    nodes = graph["nodes"]
    entries = [*graph["heads"], *(entry for node in nodes for entry in node["inputs"])]
    counts = [1] * len(nodes)  # of each node's outputs that are used
    for i, output, *_ in entries:
        counts[i] = max(counts[i], output + 1)
    outputs = []  # of each node: a list at the first end, and one at the second

    def pair(entry):
        i, output, *_ = entry
        return tuple(outputs_at_end[output] for outputs_at_end in outputs[i])

    for node, count in zip(nodes, counts):
        inputs = [pair(entry) for entry in node["inputs"]]
        if node["op"] == "null" and node["name"] == name:
            outputs.append([[end] for end in ends])
        elif node["op"] == "null":
            outputs.append([[arrays[node["name"]]]] * 2)
        elif all(first is second for first, second in inputs):
            outputs.append([call(node, [first for first, _ in inputs] or [ends[0]], count)] * 2)
        else:
            outputs.append(call_at_both_ends(node, inputs, count))
    head, = graph["heads"]
    return pair(head)


def call(node, inputs, count=1):
    """Returns the first outputs of an operator, as a graph of one node. A node without inputs gets
    one that it does not read, on the device of the network: MXNet runs no graph without inputs."""
    numbers = range(len(inputs))
    nodes = [{"op": "null", "name": f"input{i}", "inputs": []} for i in numbers]
    nodes.append({**node, "inputs": [[i, 0, 0] for i in numbers if node["inputs"]]})
    heads = [[len(inputs), i, 0] for i in range(count)]
    if not node["inputs"]:
        nodes.append({"op": "_copy", "name": "copy", "inputs": [[0, 0, 0]]})
        heads.append([2, 0, 0])
    symbol = mx.sym.load_json(json.dumps({
        "nodes": nodes, "heads": heads, "arg_nodes": [*numbers], "attrs": VERSION}))
    outputs = mx.nd.CachedOp(symbol)(*inputs)
    return outputs[:count] if isinstance(outputs, list) else [outputs]


def middle(pair):
    first, second = pair
    return first if first is second else (first + second) * 0.5


def call_at_both_ends(node, inputs, count):
    """Returns the outputs of an operator at the first end and at the second, of inputs that are
    pairs of arrays."""
    function, ends = function_of(node), inputs[0]
    if PIECEWISE_CONSTANT.fullmatch(function):
        return [call(node, [middle(pair) for pair in inputs], count)] * 2
    if RELUS.fullmatch(function):
        sign = 2 * (middle(ends) > 0) - 1  # -1 for 0, as in MXNet's gradients
        slopes = [sign * call(node, [sign, *parameters])[0] for parameters in (
            [pair[end] for pair in inputs[1:]] for end in (0, 1))]
        return [[x * slope] for x, slope in zip(ends, slopes)]
    if ABS.fullmatch(function):
        sign = middle(ends).sign()
        return [[x * sign] for x in ends]
    if CLAMPS.fullmatch(function):
        m = middle(ends)
        clamped, = call(node, [m])
        return [[clamped + (x - m) * (clamped == m)] for x in ends]
    if SELECTS.fullmatch(function):
        first, second = map(middle, inputs)
        selected = first >= second if "maximum" in function else first <= second
        return [[x * selected + y * (1 - selected)] for x, y in zip(*inputs)]
    names = kinks_within(node)
    if OTHERS.fullmatch(function) or names:
        raise ValueError(
            "gradient_penalty has no gradient for this kink. Valid: ReLU, LeakyReLU, PReLU, "
            "abs, clip, maximum and minimum of two, outside of loops; average pooling or "
            f"strides in place of max pooling. Received: {node['op']} {node['name']}"
            + (f", with {', '.join(names)}" if names else ""))
    if node["op"] == "Deconvolution":
        # One call for both: MXNet's CPU code crashes in a backward pass through two of them
        rows = mx.nd.concat(*ends, dim=0)
        output, = call(node, [rows, *(first for first, _ in inputs[1:])])
        return [[half] for half in output.split(num_outputs=2, axis=0)]
    return [call(node, [pair[end] for pair in inputs], count) for end in (0, 1)]


def function_of(node):
    """Returns an operator without its namespace, and the attribute that selects its function."""
    op, attrs = NAMESPACE.sub("", node["op"]).replace("_v1", ""), node.get("attrs", {})
    if op in ("Cast", "amp_cast") and re.search("int|bool", attrs["dtype"]):
        return "trunc"
    if attrs.get("act_type") == "elu" and float(attrs.get("slope", 0.25)) == 1:
        return "smooth"
    if op in SELECTORS:
        attribute, default = SELECTORS[op]
        return f"{op}-{attrs.get(attribute, default)}"
    return op


def kinks_within(node):
    """Returns the names of nodes with kinks in the body of a loop or condition."""
    names = []
    for body in node.get("subgraphs", ()):
        for inner in body["nodes"]:
            function = function_of(inner)
            if any(kinks.fullmatch(function)
                   for kinks in (PIECEWISE_CONSTANT, RELUS, ABS, CLAMPS, SELECTS, OTHERS)):
                names.append(inner["name"])
            names += kinks_within(inner)
    return names
