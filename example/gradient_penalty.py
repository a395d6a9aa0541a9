"""The penalty of a critic's gradients, of WGAN-GP and R1, without second-order gradients.

    from gradient_penalty import gradient_penalty

    with autograd.record():
        penalty = gradient_penalty(critic, share * real + (1 - share) * fake)
        loss = (critic(fake) - critic(real)).reshape(-1) + 10 * penalty

The gradient of the penalty is a central difference of the critic's outputs at two points along its
gradient. That is a derivative if both points are on one side of each kink, such as that of a ReLU.
So both use the side of m, the middle of the operator's inputs:

    relu, LeakyReLU, abs          f(x) becomes x * slope(m)
    clip, maximum with a number   f(m) + (x - m) where f(m) == m, else f(m)
    maximum of arrays             the array that is the larger one in the middle
    without a gradient, such as comparisons, floor and BlockGrad:   f(m)

Operators that do not depend on the point are computed once. Other kinks are errors.
"""
import json
import math
import re

import gluon_amp  # noqa: F401  (before mxnet, so that numpy fits)
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

STEP = 2.0 ** -14  # of a central difference, relative to the length of the samples
MOST_ERROR = 0.1  # of a central difference, relative to the slope
ROUNDING = 2.0 ** -20  # of float32 outputs: a few units in the last place


def gradient_penalty(critic, x, *args, target=1.0):
    """Returns `(norm - target) ** 2` for each sample, of the norm of the critic's gradient.

    The norm is that of the gradient with respect to the sample. The critic's graph runs in float32.

    Args:
        critic: a network, converted by gluon_amp or not, that can be hybridized, without batch
            norm, dropout and max pooling. Its output has a row for each sample.
        x: the samples, in 16 bits or in the type of the critic's parameters.
        args: further inputs of the critic, such as labels, with a row for each sample.
        target: the wanted norm: 1 for WGAN-GP; 0 for R1, the squared norm.

    Raises:
        TypeError: an argument has another type.
        ValueError: the critic has batch norm or dropout; its output has another number of rows, or
            depends on random numbers; it cannot be traced to a graph, or has a kink other than
            those of ReLU, LeakyReLU, PReLU, abs, clip, maximum and minimum of two.
    """
    check_arguments(critic, x, args, target)
    parameters = parameters_of(critic, x, args)
    check_types(x, parameters)
    x, args = wide(x), [wide(array) for array in args]
    names = [f"gradient_penalty_input{i}" for i in range(len(args) + 1)]
    graph = traced(critic, names, (x, *args))
    if autograd.is_recording():
        check_samples_are_apart(graph)
    trains = autograd.is_training()

    samples = x.detach()
    samples.attach_grad()
    # detached, because `grad` frees the graph, which would be that of the critic's loss, too
    fixed = {name: wide(array.detach()) for name, array in parameters.items()}
    fixed.update(zip(names[1:], (array.detach() for array in args)))
    with autograd.record(train_mode=trains):
        output, = call(graph, {**fixed, names[0]: samples}, x)
        output = sum_of_rows(output, len(x))
    slope = autograd.grad(output, [samples], train_mode=trains)[0]
    if isinstance(x, mx.np.ndarray):  # MXNet returns an array of mx.nd
        slope = slope.as_np_ndarray()
    with autograd.pause(trains):
        norm = sum_of_rows(slope ** 2, len(x)) ** 0.5
        penalty = (norm - target) ** 2
        direction = slope / not_zero(norm).reshape(-1, *(1,) * (x.ndim - 1))
        step = STEP * not_zero(sum_of_rows(samples ** 2, len(x)).mean() ** 0.5)
    if not autograd.is_recording():
        return penalty

    check_deconvolutions(graph, parameters, x)
    both = names[0], f"{names[0]}_other"
    cast = {name: wide(array) for name, array in parameters.items()}  # once for both ends
    ends = call(at_both_ends(graph, names[0], both), {
        **cast, **dict(zip(both, (x + step * direction, x - step * direction))),
        **dict(zip(names[1:], args))}, x)
    first, second = (sum_of_rows(end, len(x)) for end in ends)
    difference = (first - second) / (2 * step)
    check_difference(*(array.asnumpy() for array in (difference, norm, output, step)))
    moving = 2 * (norm - target) * difference
    return moving - moving.detach() + penalty


# ---- arrays

def is_16bit(array):
    return np.dtype(array.dtype).itemsize == 2


def wide(array):
    """Returns an array in float32, if it has 16 bits."""
    return array.astype("float32") if is_16bit(array) else array


def parameters_of(critic, x, args):
    """Returns the critic's arrays by name, on the device of x."""
    parameters = critic.collect_params()
    try:
        return {name: parameter.data(x.context) for name, parameter in parameters.items()}
    except gluon.parameter.DeferredInitializationError:
        with autograd.pause():
            critic(x, *args)
    return {name: parameter.data(x.context) for name, parameter in parameters.items()}


def sum_of_rows(array, count):
    """Returns the sum of each row of an array."""
    if array.shape[:1] != (count,):
        raise ValueError("gradient_penalty needs a critic that returns one array with a row for "
                         f"each of the {count} samples. Received: {array.shape}")
    return array.reshape((count, -1)).sum(axis=1)


def not_zero(array):
    """Returns an array with 1 in place of 0."""
    return array + (array == 0).astype(array.dtype)


# ---- checks

def check_arguments(critic, x, args, target):
    if not isinstance(critic, gluon.Block):
        raise TypeError(f"gradient_penalty takes a gluon Block. Received: {type(critic).__name__}")
    for array in (x, *args):
        if not isinstance(array, mx.nd.NDArray):
            raise TypeError("gradient_penalty takes arrays of MXNet. Received: "
                            f"{type(array).__module__}.{type(array).__name__}")
        if array.shape[:1] != x.shape[:1]:
            raise TypeError("gradient_penalty takes arrays with a row for each sample. Received: "
                            f"{array.shape}")
    if not 0 <= target < math.inf:
        raise ValueError(f"target must be 0 or a positive number. Received: {target!r}")


def check_types(x, parameters):
    valid = {"float64" if np.dtype(array.dtype) == "float64" else "float32"
             for array in parameters.values()} or {"float32", "float64"}
    name = np.dtype(x.dtype).name
    if name not in valid and (not is_16bit(x) or name in ("int16", "uint16")):
        raise TypeError(f"x must be {' or '.join(sorted(valid))}, as the critic computes, or have "
                        f"16 bits. Received: {name}")


def check_samples_are_apart(graph):
    mixing = [node["name"] for node in graph["nodes"] if mixes_samples(node)]
    if mixing:
        raise ValueError("gradient_penalty needs a critic that computes each sample by itself, and "
                         "in the same way again. Valid instead of batch norm and dropout: "
                         "LayerNorm, InstanceNorm, GroupNorm, or gluon_amp.freeze of the batch "
                         f"norms. Received: {', '.join(mixing)}")


def mixes_samples(node):
    """Whether a node is a batch norm or dropout in training."""
    attrs = node.get("attrs", {})
    if "BatchNorm" in node["op"]:
        return attrs.get("use_global_stats", "False") not in ("True", "1")
    return node["op"] == "Dropout" and float(attrs.get("p", 0.5)) > 0


def check_deconvolutions(graph, parameters, x):
    if x.context.device_type == "cpu" and any(map(is_16bit, parameters.values())) \
            and any(node["op"] == "Deconvolution" for node in graph["nodes"]):
        raise ValueError("MXNet cannot compute gradient_penalty on a CPU for a critic with "
                         "deconvolutions and 16-bit parameters. Valid: convert(critic, "
                         '"mixed_float16")')


def check_difference(difference, norm, output, step):
    """Refuses a critic whose central differences are not its slopes, in most of the samples."""
    bound = MOST_ERROR * norm + ROUNDING * abs(output).max() / step
    if np.mean(abs(difference - norm) > bound) > 0.5:
        raise ValueError(
            "the critic's outputs on both sides of a sample do not differ by its gradient. Valid: "
            "a critic without random numbers, which is smooth within 1/16384 of the samples' "
            f"length, or has kinks. Received: a difference of {abs(difference).mean():.3g} for a "
            f"gradient of {norm.mean():.3g}")


# ---- graphs, as MXNet's JSON: an entry is the number of a node, and that of its output

def traced(critic, names, arrays):
    """Returns the critic's graph; its inputs have these names."""
    symbols = [mx.sym.var(name) for name in names]
    symbols = [symbol.as_np_ndarray() if isinstance(array, mx.np.ndarray) else symbol
               for symbol, array in zip(symbols, arrays)]
    try:
        output = critic(*symbols)
    except Exception as error:  # of the user's forward
        why = error.__cause__ or error
        raise ValueError(
            "gradient_penalty needs a critic that can be traced to a graph, in which it finds the "
            "kinks. Valid: a HybridBlock that hybridize() accepts, or a plain Block whose forward "
            f"only calls such blocks. Received: {type(critic).__name__} "
            f"{critic.name}, which raises {type(why).__name__}: {why}") from error
    if not isinstance(output, mx.sym.Symbol) or len(output.list_outputs()) != 1:
        returned = f"{len(output)} arrays" if hasattr(output, "__len__") else type(output).__name__
        raise ValueError("gradient_penalty needs a critic that returns one array with a row for "
                         f"each of the {len(arrays[0])} samples. Received: {returned}")
    graph = json.loads(output.tojson(remove_amp_cast=False))
    for node in graph["nodes"]:
        if node["op"] == "null":  # 16-bit parameters are cast
            node.get("attrs", {}).pop("__dtype__", None)
    return graph


def call(graph, arrays, x):
    """Returns the outputs of a graph for these arrays by name, of the kind of x."""
    symbol = mx.sym.load_json(json.dumps(graph))
    if isinstance(x, mx.np.ndarray):
        symbol = symbol.as_np_ndarray()
    outputs = mx.nd.CachedOp(symbol)(*(arrays[name] for name in symbol.list_inputs()))
    return outputs if isinstance(outputs, list) else [outputs]


def at_both_ends(graph, name, ends):
    """Returns a graph with the outputs at one end, followed by those at the other.

    Args:
        name: that of the variable which differs.
        ends: the names of its variables at both ends.

    Raises:
        ValueError: a node has a kink, and no rule for it.
    """
    build = Ends()
    numbers = []  # of each node's copies at both ends
    for node in graph["nodes"]:
        inputs = [tuple((numbers[number][end], output) for end in (0, 1))
                  for number, output, *_ in node["inputs"]]
        if node["op"] == "null" and node["name"] == name:
            numbers.append(tuple(build.copy({**node, "name": end}, []) for end in ends))
        elif any(first != second for first, second in inputs):
            numbers.append(build.both(node, inputs))
        else:
            numbers.append(build.same(node, [first for first, _ in inputs]))
    nodes = build.nodes
    return {"nodes": nodes, "attrs": graph["attrs"], "node_row_ptr": [*range(len(nodes) + 1)],
            "arg_nodes": [i for i, node in enumerate(nodes) if node["op"] == "null"],
            "heads": [[numbers[number][end], output, 0]
                      for end in (0, 1) for number, output, *_ in graph["heads"]]}


# ---- kinks

NAMESPACE = re.compile("^_(np|npi|npx|sparse)_")
RELUS = re.compile("relu|Activation-relu|LeakyReLU-(leaky|prelu)")
ABS = re.compile("abs|absolute|fabs")
CLAMPS = re.compile("clip|_?(maximum|minimum)_scalar")
SELECTS = re.compile("(broadcast|)_?(maximum|minimum)")
STEPS = re.compile(
    "(broadcast|)_?(equal|not_equal|(greater|lesser|less)(_equal)?|logical_(and|or|xor|not))"
    "(_scalar)?|sign|round|rint|around|ceil|floor|trunc|fix|BlockGrad|(zeros|ones)_like|"
    "arg(max|min|max_channel|sort)")
OTHERS = re.compile(
    "Pooling-(max|lp)|(ROI|roi_)[Pp]ooling|RNN-rnn_relu|LeakyReLU-(selu|rrelu|elu)|hard_sigmoid|"
    "_contrib_BatchNormWithReLU|a?(max|min)|sort|topk|percentile|norm--?(1|inf)|"
    "(broadcast|)_?r?(mod|copysign)(_scalar)?|BilinearSampler|SpatialTransformer|"
    "_contrib_((Modulated)?DeformableConvolution|(sign|round)_ste)|Correlation")


def kind(node):
    """Returns an operator without its namespace, and the attribute that selects its function."""
    op, attrs = NAMESPACE.sub("", node["op"]).replace("_v1", ""), node.get("attrs", {})
    if op in ("Cast", "amp_cast") and re.search("int|bool", attrs["dtype"]):
        return "trunc"
    if attrs.get("act_type") == "elu" and float(attrs.get("slope", 0.25)) == 1:
        return "smooth"
    key, default = {"Activation": ("act_type", ""), "LeakyReLU": ("act_type", "leaky"),
                    "Pooling": ("pool_type", "max"), "RNN": ("mode", ""),
                    "norm": ("ord", "2")}.get(op, ("", ""))
    return f"{op}-{attrs.get(key, default)}" if key else op


def kinks_within(node):
    """Returns the names of nodes with kinks in the body of a loop or condition."""
    bodies = [inner for body in node.get("subgraphs", ()) for inner in body["nodes"]]
    return [name for inner in bodies for name in (
        *([inner["name"]] if any(kinks.fullmatch(kind(inner)) for kinks in (
            STEPS, RELUS, ABS, CLAMPS, SELECTS, OTHERS)) else ()), *kinks_within(inner))]


class Ends:
    """The nodes of a graph at both ends. A pair has a node or an entry at each end."""

    def __init__(self):
        self.nodes = []

    def copy(self, node, inputs):
        """Adds a copy of a node with other inputs. Returns its number."""
        self.nodes.append({**node, "inputs": [[number, output, 0] for number, output in inputs]})
        return len(self.nodes) - 1

    def add(self, node, op, inputs, **attrs):
        """Adds an operator, named after `node`. Returns its output."""
        attrs = {key: str(value) for key, value in attrs.items()}
        return self.copy({"op": op, "name": f"{node['name']}_{op}", "attrs": attrs}, inputs), 0

    def each(self, node, op, left, right):
        """Adds an operator at each end. Returns its outputs."""
        return tuple(self.add(node, op, pair) for pair in zip(left, right))

    def same(self, node, inputs):
        """Adds a node for both ends."""
        number = self.copy(node, inputs)
        return number, number

    def middle(self, node, ends):
        if ends[0] == ends[1]:
            return ends[0]
        return self.add(node, "_mul_scalar", [self.add(node, "elemwise_add", ends)], scalar=0.5)

    def both(self, node, inputs):
        """Adds a node at both ends."""
        named = kind(node)
        if STEPS.fullmatch(named):
            return self.same(node, [self.middle(node, ends) for ends in inputs])
        for kinks, rule in ((RELUS, self.relu), (ABS, self.abs), (CLAMPS, self.clamp),
                            (SELECTS, self.select)):
            if kinks.fullmatch(named):
                return tuple(number for number, _ in rule(node, inputs))
        within = kinks_within(node)
        if OTHERS.fullmatch(named) or within:
            raise ValueError(
                "gradient_penalty has no gradient for this kink. Valid: ReLU, LeakyReLU, PReLU, "
                "abs, clip, maximum and minimum of two, outside of loops; average pooling or "
                f"strides in place of max pooling. Received: {node['op']} {node['name']}"
                + (f", with {', '.join(within)}" if within else ""))
        if node["op"] == "Deconvolution":
            return tuple(number for number, _ in self.one_call(node, inputs))
        return tuple(self.copy(node, [ends[end] for ends in inputs]) for end in (0, 1))

    def relu(self, node, inputs):
        """f(x) = x * s * f(s) with the sign s of the middle, -1 for 0 as in MXNet's gradients."""
        positive = self.add(node, "_greater_scalar", [self.middle(node, inputs[0])], scalar=0)
        sign = self.add(node, "_minus_scalar", [
            self.add(node, "_mul_scalar", [positive], scalar=2)], scalar=1)
        slopes = tuple(self.add(node, "elemwise_mul", [sign, (self.copy(
            node, [sign, *(ends[end] for ends in inputs[1:])]), 0)]) for end in (0, 1))
        return self.each(node, "elemwise_mul", inputs[0], slopes)

    def abs(self, node, inputs):
        sign = self.add(node, "sign", [self.middle(node, inputs[0])])
        return self.each(node, "elemwise_mul", inputs[0], (sign, sign))

    def clamp(self, node, inputs):
        middle = self.middle(node, inputs[0])
        there = self.copy(node, [middle]), 0
        within = self.add(node, "_equal", [there, middle])
        beyond = self.each(node, "elemwise_sub", inputs[0], (middle, middle))
        moved = self.each(node, "elemwise_mul", beyond, (within, within))
        return self.each(node, "elemwise_add", moved, (there, there))

    def select(self, node, inputs):
        compare = "greater" if "maximum" in node["op"] else "lesser"
        first = self.add(node, f"broadcast_{compare}_equal",
                         [self.middle(node, ends) for ends in inputs])
        second = self.add(node, "_rminus_scalar", [first], scalar=1)
        parts = [self.each(node, "broadcast_mul", ends, (chosen, chosen))
                 for ends, chosen in zip(inputs, (first, second))]
        return self.each(node, "elemwise_add", *parts)

    def one_call(self, node, inputs):
        """A layer on the rows of both ends. MXNet's CPU code crashes in a backward pass through two
        deconvolutions of the same shapes."""
        rows = self.add(node, "Concat", inputs[0], dim=0, num_args=2)
        result = self.copy(node, [rows, *(first for first, _ in inputs[1:])]), 0
        halves, _ = self.add(node, "SliceChannel", [result], num_outputs=2, axis=0)
        return tuple(self.add(node, "_copy", [(halves, end)]) for end in (0, 1))
