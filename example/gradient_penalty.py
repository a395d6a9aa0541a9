"""The penalty of a critic's gradients, of WGAN-GP and R1, without second-order gradients.

    from gradient_penalty import gradient_penalty

    with autograd.record():
        penalty = gradient_penalty(critic, share * real + (1 - share) * fake)
        loss = (critic(fake) - critic(real)).reshape(-1) + 10 * penalty

The penalty of a sample is (norm - 1) ** 2, where `norm` is that of the critic's gradient. Its own
gradient needs that of the norm. The norm is the slope of the critic along the direction of its
gradient, and a slope is a central difference of two outputs:

    norm = (critic(x + step * direction) - critic(x - step * direction)) / (2 * step)

So backward passes through two forward passes suffice. kinks.py, which this file needs, computes the
two passes such that the difference is also right if a ReLU has its kink between the two points.
"""
import json
import math

import gluon_amp  # noqa: F401  (before mxnet, so that numpy fits)
import mxnet as mx
import numpy as np
from kinks import outputs_at_both_ends
from mxnet import autograd, gluon

STEP = 2.0 ** -14  # of the central difference, relative to the length of the samples
MAX_RELATIVE_ERROR = 0.1  # of a central difference, relative to the norm
ROUNDING = 2.0 ** -20  # of float32 outputs: a few units in the last place


def gradient_penalty(critic, x, *args, target=1.0):
    """Returns `(norm - target) ** 2` for each sample, of the norm of the critic's gradient.

    The norm is that of the gradient with respect to the sample. A 16-bit critic's graph runs in
    float32, because a difference of float16 numbers has few correct digits.

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
    graph, names = trace(critic, (x, *args))
    if autograd.is_recording():
        check_samples_are_apart(graph)
    is_training, is_numpy = autograd.is_training(), isinstance(x, mx.np.ndarray)
    x, *args = (as_float32(array) for array in (x, *args))

    # The critic's gradient at the samples. This pass reads detached copies: a backward pass frees
    # its graph, and the critic's loss still needs the graph of the original arrays
    samples = x.detach()
    samples.attach_grad()
    arrays = {name: as_float32(array.detach()) for name, array in parameters.items()}
    arrays.update(zip(names, (samples, *(array.detach() for array in args))))
    symbol = mx.sym.load_json(json.dumps(graph))
    with autograd.record(train_mode=is_training):
        output = mx.nd.CachedOp(symbol)(*(arrays[name] for name in symbol.list_inputs()))
        output = sum_of_rows(output, len(x))
    gradient = autograd.grad(output, [samples], train_mode=is_training)[0]
    with autograd.pause(is_training):
        norm = sum_of_rows(gradient ** 2, len(x)) ** 0.5
        penalty = (norm - target) ** 2
        direction = gradient / one_for_zero(norm).reshape(-1, *(1,) * (x.ndim - 1))
        step = STEP * one_for_zero(sum_of_rows(samples ** 2, len(x)).mean() ** 0.5)
    if autograd.is_recording():
        # The value of the penalty, with the gradient of its first-order expansion:
        # (norm - target) ** 2 changes by 2 * (norm - target) times the change of the norm
        check_deconvolutions(graph, parameters, x)
        arrays = {name: as_float32(array) for name, array in parameters.items()}
        arrays.update(zip(names[1:], args))
        ends = x + step * direction, x - step * direction
        first, second = (sum_of_rows(end, len(x))
                         for end in outputs_at_both_ends(graph, arrays, names[0], ends))
        difference = (first - second) / (2 * step)
        check_difference(*(array.asnumpy() for array in (difference, norm, output, step)))
        change = 2 * (norm - target) * difference
        penalty = change - change.detach() + penalty
    return penalty.as_np_ndarray() if is_numpy else penalty


# ---- arrays

def is_16bit(array):
    return np.dtype(array.dtype).itemsize == 2


def as_float32(array):
    """Returns an array of mx.nd, in float32 if it has 16 bits."""
    array = array.as_nd_ndarray()
    return array.astype("float32") if is_16bit(array) else array


def parameters_of(critic, x, args):
    """Returns the critic's arrays by name, on the device of x."""
    parameters = critic.collect_params()
    try:
        return {name: parameter.data(x.context) for name, parameter in parameters.items()}
    except gluon.parameter.DeferredInitializationError:
        with autograd.pause():
            critic(x, *args)  # the first call allocates them
    return {name: parameter.data(x.context) for name, parameter in parameters.items()}


def sum_of_rows(array, count):
    """Returns the sum of each row of an array."""
    if array.shape[:1] != (count,):
        raise ValueError("gradient_penalty needs a critic that returns one array with a row for "
                         f"each of the {count} samples. Received: {array.shape}")
    return array.reshape((count, -1)).sum(axis=1)


def one_for_zero(array):
    """Returns an array with 1 in place of 0, to divide by it."""
    return array + (array == 0).astype(array.dtype)


# ---- the critic's graph, as MXNet's JSON

def trace(critic, arrays):
    """Returns the critic's graph, and the names of its inputs."""
    names = [f"gradient_penalty_input{i}" for i in range(len(arrays))]
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
        received = f"{len(output)} arrays" if hasattr(output, "__len__") else type(output).__name__
        raise ValueError("gradient_penalty needs a critic that returns one array with a row for "
                         f"each of the {len(arrays[0])} samples. Received: {received}")
    graph = json.loads(output.tojson(remove_amp_cast=False))
    for node in graph["nodes"]:
        if node["op"] == "null":
            node.get("attrs", {}).pop("__dtype__", None)  # 16-bit parameters are cast
    return graph, names


# ---- refusals

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
    """Refuses batch norms and dropout in training."""
    mixing = []
    for node in graph["nodes"]:
        attrs = node.get("attrs", {})
        if "BatchNorm" in node["op"] and attrs.get("use_global_stats") not in ("True", "1") \
                or node["op"] == "Dropout" and float(attrs.get("p", 0.5)) > 0:
            mixing.append(node["name"])
    if mixing:
        raise ValueError("gradient_penalty needs a critic that computes each sample by itself, and "
                         "in the same way again. Valid instead of batch norm and dropout: "
                         "LayerNorm, InstanceNorm, GroupNorm, or gluon_amp.freeze of the batch "
                         f"norms. Received: {', '.join(mixing)}")


def check_deconvolutions(graph, parameters, x):
    if x.context.device_type == "cpu" and any(map(is_16bit, parameters.values())) \
            and any(node["op"] == "Deconvolution" for node in graph["nodes"]):
        raise ValueError("MXNet cannot compute gradient_penalty on a CPU for a critic with "
                         "deconvolutions and 16-bit parameters. Valid: convert(critic, "
                         '"mixed_float16")')


def check_difference(difference, norm, output, step):
    """Refuses a critic whose central differences are not its slopes, in most of the samples."""
    bound = MAX_RELATIVE_ERROR * norm + ROUNDING * abs(output).max() / step
    if np.mean(abs(difference - norm) > bound) > 0.5:
        raise ValueError(
            "the critic's outputs on both sides of a sample do not differ by its gradient. Valid: "
            "a critic without random numbers, which is smooth within 1/16384 of the samples' "
            f"length, or has kinks. Received: a difference of {abs(difference).mean():.3g} for a "
            f"gradient of {norm.mean():.3g}")
