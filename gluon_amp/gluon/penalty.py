"""`gradient_penalty`: the penalty of a critic's gradients, by first-order gradients."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Sequence, Tuple

from mxnet import autograd
from mxnet.gluon import nn

from .._mxnet import GRAPH_LOCK, mx, np
from ..annotations import Array, Block
from ..checks import listed, positive_number
from ..cpu.arrays import dtype_name, is_16bit
from ..graph.graph import Graph
from ..graph.kinks import at_both_ends
from .converted import ConvertedBlock, ConvertedHybridBlock, blocks_in, parameters_in

_STEP = 2.0 ** -12  # of a central difference, relative to the length of the samples
_MOST_ERROR = 0.1  # of a central difference, relative to the slope
_ROUNDING = 2.0 ** -20  # of float32 outputs: a few units in the last place


def gradient_penalty(critic: Block, x: Array, *args: Array, target: float = 1.0) -> Array:
    """Returns `(norm - target) ** 2` for each sample, of the norm of the critic's gradient.

    The norm is that of the gradient with respect to the sample. The gradient of the penalty is
    computed by a central difference along the critic's gradient, so the critic needs no
    second-order gradients. Both ends have the same slopes of ReLUs. The critic runs in float32.

    Args:
        critic: a network, converted or not, that can be hybridized, without batch norm, dropout
            and max pooling. Its output has a row for each sample.
        x: the samples, in 16 bits or in the type of the critic's parameters.
        args: further inputs of the critic, such as labels, with a row for each sample.
        target: the wanted norm: 1 for WGAN-GP; 0 for R1, the squared norm.

    Raises:
        TypeError: an argument has another type.
        ValueError: the critic has batch norm or dropout, or 16-bit parameters without `convert`;
            its output has another number of rows, or depends on random numbers; it cannot be
            traced to a graph, or has a kink other than those of ReLU, LeakyReLU, PReLU, abs,
            clip, maximum and minimum of two.
    """
    _check(critic, x, args)
    if target != 0:
        positive_number(target, "target other than 0")
    if is_16bit(x.dtype):
        x = x.astype("float32")
    trains = autograd.is_training()
    with _in_float32(critic):
        samples = x.detach()
        samples.attach_grad()
        with autograd.record(train_mode=trains):
            output = _sum_of_rows(critic(samples, *args), len(x))
        slope = autograd.grad(output, [samples], train_mode=trains)[0]
        if isinstance(x, mx.np.ndarray):  # MXNet returns an array of mx.nd
            slope = slope.as_np_ndarray()
        with autograd.pause(trains):
            norm = _sum_of_rows(slope ** 2, len(x)) ** 0.5
            penalty = (norm - target) ** 2
            direction = slope / _not_zero(norm).reshape(-1, *(1,) * (x.ndim - 1))
            step = _STEP * _not_zero(_sum_of_rows(samples ** 2, len(x)).mean() ** 0.5)
        if not autograd.is_recording():
            return penalty
        ends = _at_both_ends(critic, (x + step * direction, x - step * direction), args)
        first, second = (_sum_of_rows(end, len(x)) for end in ends)
        difference = (first - second) / (2 * step)
    _check_difference(*(array.asnumpy() for array in (difference, norm, output, step)))
    moving = 2 * (norm - target) * difference
    return moving - moving.detach() + penalty


def _check(critic: Block, x: Array, args: Sequence[Array]) -> None:
    if not isinstance(critic, mx.gluon.Block):
        raise TypeError(f"gradient_penalty takes a gluon Block. Received: {type(critic).__name__}")
    for array in (x, *args):
        if not isinstance(array, mx.nd.NDArray):
            raise TypeError("gradient_penalty takes arrays of MXNet. Received: "
                            f"{type(array).__module__}.{type(array).__name__}")
        if array.shape[:1] != x.shape[:1]:
            raise TypeError("gradient_penalty takes arrays with a row for each sample. Received: "
                            f"{array.shape}")
    blocks = list(blocks_in(critic))
    low = [p.name for block in blocks if not isinstance(block, ConvertedBlock)
           for p in block.params.values() if is_16bit(p.dtype)]
    if low:
        raise ValueError("gradient_penalty computes in float32. Valid: a float32 network, or one "
                         "that gluon_amp.convert has converted. Received: 16-bit parameters "
                         f"{listed(low)}")
    types = {"float64" if dtype_name(p.dtype) == "float64" else "float32"
             for block in blocks for p in block.params.values()} or {"float32", "float64"}
    if not is_16bit(x.dtype) and dtype_name(x.dtype) not in types:
        raise TypeError(f"x must be {' or '.join(sorted(types))}, as the critic computes, or have "
                        f"16 bits. Received: {dtype_name(x.dtype)}")
    mixing = [block.name for block in blocks if _mixes_samples(block)]
    if mixing and autograd.is_recording():
        raise ValueError("gradient_penalty needs a critic that computes each sample by itself, and "
                         "in the same way again. Valid instead of batch norm and dropout: "
                         "LayerNorm, InstanceNorm, GroupNorm, or gluon_amp.freeze of the batch "
                         f"norms. Received: {listed(mixing)}")


def _mixes_samples(block: Block) -> bool:
    """Whether a block has batch norm or dropout in training."""
    if isinstance(block, nn.Dropout):
        return bool(block._rate)
    return isinstance(block, nn.basic_layers._BatchNorm) and not block._kwargs["use_global_stats"]


@contextmanager
def _in_float32(net: Block) -> Iterator[None]:
    """Runs a network's converted blocks in float32."""
    states = [block._amp for block in blocks_in(net) if isinstance(block, ConvertedHybridBlock)]
    before = [state.in_float32 for state in states]
    for state in states:
        state.in_float32 = True
    try:
        yield
    finally:
        for state, value in zip(states, before):
            state.in_float32 = value


def _at_both_ends(critic: Block, ends: Tuple[Array, Array], args: Sequence[Array]) -> List[Array]:
    """Returns the critic's outputs at two points, with the same slopes of kinks.

    The graph casts nothing: 16-bit parameters are cast here, once for both ends, so that they
    round the gradient of the difference.
    """
    names = [f"gradient_penalty_input{i}" for i in range(len(args) + 1)]
    both = names[0], f"{names[0]}_other"
    graph = at_both_ends(_traced(critic, names, (ends[0], *args)), {names[0]: both})
    symbol = graph.symbol()
    if isinstance(ends[0], mx.np.ndarray):
        symbol = symbol.as_np_ndarray()
    arrays = {**dict(zip(both, ends)), **dict(zip(names[1:], args))}
    parameters = parameters_in(critic)
    converted = any(is_16bit(p.dtype) for p in parameters.values())
    if converted and ends[0].context.device_type == "cpu" \
            and any(node.op == "Deconvolution" for node in graph.nodes()):
        raise ValueError("MXNet cannot compute gradient_penalty on a CPU for a critic with "
                         "deconvolutions and 16-bit parameters. Valid: convert(critic, "
                         f'"mixed_float16"). Received: {type(critic).__name__} {critic.name}')
    inputs = [arrays[name] if name in arrays else parameters[name].data(ends[0].context)
              for name in symbol.list_inputs()]
    wide = [a.astype("float32") if is_16bit(a.dtype) else a for a in inputs]
    with GRAPH_LOCK:
        found: List[Array] = mx.nd.CachedOp(symbol)(*wide)
    return found


def _traced(critic: Block, names: Sequence[str], arrays: Sequence[Array]) -> Graph:
    """Returns the critic's graph; its inputs have these names."""
    symbols = [mx.sym.var(name) for name in names]
    symbols = [symbol.as_np_ndarray() if isinstance(array, mx.np.ndarray) else symbol
               for symbol, array in zip(symbols, arrays)]
    try:
        graph = Graph.read(critic(*symbols))
    except Exception as error:  # of the user's forward
        why = error.__cause__ or error
        raise ValueError(
            "gradient_penalty needs a critic that can be traced to a graph, in which it finds the "
            "kinks. Valid: a HybridBlock that hybridize() accepts, or a plain Block whose forward "
            f"only calls such blocks. Received: {type(critic).__name__} "
            f"{critic.name}, which raises {type(why).__name__}: {why}") from error
    for node in graph.nodes():
        if node.is_variable:  # 16-bit parameters are cast
            node.attrs.pop("__dtype__", None)
    return graph


def _sum_of_rows(array: Array, count: int) -> Array:
    """Returns the sum of each row of an array."""
    if not isinstance(array, mx.nd.NDArray) or array.shape[:1] != (count,):
        raise ValueError("gradient_penalty needs a critic that returns one array with a row for "
                         f"each of the {count} samples. Received: "
                         f"{getattr(array, 'shape', type(array).__name__)}")
    return array.reshape((count, -1)).sum(axis=1)


def _not_zero(array: Array) -> Array:
    """Returns an array with 1 in place of 0."""
    return array + (array == 0).astype(array.dtype)


def _check_difference(difference: Any, norm: Any, output: Any, step: Any) -> None:
    """Refuses a critic whose central differences are not its slopes, in most of the samples."""
    bound = _MOST_ERROR * norm + _ROUNDING * abs(output).max() / step
    if np.mean(abs(difference - norm) > bound) > 0.5:
        raise ValueError(
            "the critic's outputs on both sides of a sample do not differ by its gradient. Valid: "
            "a critic without random numbers, which is smooth within 1/4096 of the samples' "
            f"length, or has kinks. Received: a difference of {abs(difference).mean():.3g} for a "
            f"gradient of {norm.mean():.3g}")
