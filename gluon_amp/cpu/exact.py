"""Operators whose results lie on the float16 grid whenever their inputs do.

They choose, move or negate values, or return small integers; no rounding has to
follow them. What is not listed is rounded, which is never wrong, only slower.
"""
from .._mxnet import np
from ..graph import Node

_ALWAYS = frozenset("""
    BlockGrad Concat Crop Embedding Flatten MakeLoss Reshape SequenceLast SequenceReverse
    SliceChannel SwapAxis abs batch_take broadcast_axis broadcast_like broadcast_maximum
    broadcast_minimum broadcast_to ceil depth_to_space diag expand_dims fix floor
    gather_nd make_loss max min negative ones_like pick relu repeat reshape_like reverse rint round
    sign slice slice_axis slice_like space_to_depth squeeze stack take tile transpose trunc where
    zeros_like _copy _identity_with_attr_like_rhs _maximum _minimum _ones _rnn_param_concat
    _slice_assign _split_v2 _zeros _contrib_boolean_mask _contrib_index_copy
    _equal _not_equal _greater _greater_equal _lesser _lesser_equal
    _equal_scalar _not_equal_scalar _greater_scalar _greater_equal_scalar _lesser_scalar
    _lesser_equal_scalar broadcast_equal broadcast_not_equal broadcast_greater
    broadcast_greater_equal broadcast_lesser broadcast_lesser_equal logical_not
    broadcast_logical_and broadcast_logical_or broadcast_logical_xor
""".split())

# Exact because their constants are put on the grid first.
_WITH_CONSTANTS = frozenset("clip _full _maximum_scalar _minimum_scalar".split())

# Exact when the attribute has one of these values (its default first).
_WHEN = {
    "Activation": ("act_type", ("relu",)),
    "Pooling": ("pool_type", ("max",)),
    "SequenceMask": ("value", ("0", "0.0")),
    "UpSampling": ("sample_type", ("nearest",)),
}


def is_exact(node: Node) -> bool:
    if node.op in _WHEN:
        key, values = _WHEN[node.op]
        return node.attrs.get(key, values[0]) in values
    return node.op in _ALWAYS or node.op in _WITH_CONSTANTS


def on_grid(number: str, grid: str) -> str:
    """A number from a node's attributes, rounded to the grid."""
    if grid == "float32":
        return number
    with np.errstate(over="ignore"):
        if grid == "float16":
            return repr(float(np.float16(float(number))))
        bits = np.float32(float(number)).view(np.uint32)
        bits += np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return repr(float((bits & np.uint32(0xFFFF0000)).view(np.float32)))
