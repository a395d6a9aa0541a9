"""The table of MXNet's operators in ONNX: one row for each.

Other operators are refused. `tests/onnx/test_onnx.py` runs every row in onnxruntime.
"""
import ast
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from ..annotations import Shape
from . import detection
from .recurrent import recurrent
from .writer import Operator, Row

ROWS: Dict[str, Row] = {}
Write = Callable[[Operator], Any]


def row(*names: str, wide: bool = False) -> Callable[[Write], Write]:
    def put(write: Write) -> Write:
        ROWS.update(dict.fromkeys(names, Row(write, wide)))
        return write
    return put


def _same(op: str) -> Write:
    """Returns a rule for an operator without attributes."""
    return lambda node: node.add(op, *node.x)


# ---- operators with one equivalent -------------------------------------------

for _names, _op in {
        "relu _npx_relu": "Relu",
        "elemwise_add broadcast_add _npi_add": "Add",
        "elemwise_sub broadcast_sub _npi_subtract": "Sub",
        "elemwise_mul broadcast_mul _npi_multiply": "Mul",
        "elemwise_div broadcast_div _npi_true_divide": "Div", "broadcast_maximum _maximum": "Max",
        "broadcast_minimum _minimum": "Min", "negative _npi_negative": "Neg",
        "abs _npi_absolute": "Abs", "_npi_matmul": "MatMul"}.items():
    row(*_names.split())(_same(_op))
for _names, _op in {
        "sigmoid _npx_sigmoid": "Sigmoid", "tanh _npi_tanh": "Tanh", "exp _npi_exp": "Exp",
        "log _npi_log": "Log", "sqrt _npi_sqrt": "Sqrt", "erf": "Erf", "sin _npi_sin": "Sin",
        "cos _npi_cos": "Cos", "softsign": "Softsign", "floor _npi_floor": "Floor",
        "ceil _npi_ceil": "Ceil", "reciprocal _npi_reciprocal": "Reciprocal",
        "add_n": "Sum", "broadcast_power _power _npi_power": "Pow"}.items():
    row(*_names.split(), wide=True)(_same(_op))


@row("_copy", "_np_copy", "BlockGrad", "Dropout", "LinearRegressionOutput", "MAERegressionOutput")
def _identity(node: Operator) -> str:
    node.ignore("p", "mode", "axes", "grad_scale")
    if node.node.op == "Dropout" and node.node.attrs.get("mode", "training") != "training":
        node.refuse("mode must be training. Received: " + node.node.attrs["mode"])
    return node.input(0)


@row("LogisticRegressionOutput", wide=True)
def _logistic(node: Operator) -> str:
    node.ignore("grad_scale")
    return node.add("Sigmoid", node.input(0))


@row("Cast", "amp_cast")
def _cast(node: Operator) -> str:
    return node.writer.cast(node.input(0), node.text("dtype"))


for _names, _op, _turned in (
        ("_plus_scalar _npi_add_scalar", "Add", False),
        ("_minus_scalar _npi_subtract_scalar", "Sub", False),
        ("_rminus_scalar _npi_rsubtract_scalar", "Sub", True),
        ("_mul_scalar _npi_multiply_scalar", "Mul", False),
        ("_div_scalar _npi_true_divide_scalar", "Div", False),
        ("_rdiv_scalar _npi_rtrue_divide_scalar", "Div", True),
        ("_power_scalar _npi_power_scalar", "Pow", False), ("_maximum_scalar", "Max", False),
        ("_minimum_scalar", "Min", False)):
    def _scalar(node: Operator, op: str = _op, turned: bool = _turned) -> str:
        node.ignore("is_int")
        both = [node.input(0), node.constant(node.number("scalar"))]
        return node.add(op, *(reversed(both) if turned else both))
    row(*_names.split(), wide=True)(_scalar)


@row("square", "_npi_square", wide=True)
def _square(node: Operator) -> str:
    x = node.input(0)
    return node.add("Mul", x, x)


for _old, _new, _op in (("greater", "greater", "Greater"), ("lesser", "less", "Less"),
                        ("greater_equal", "greater_equal", "GreaterOrEqual"),
                        ("lesser_equal", "less_equal", "LessOrEqual"),
                        ("equal", "equal", "Equal")):
    def _compared(node: Operator, op: str = _op) -> str:
        node.ignore("is_int")
        other = node.input(1) if len(node) > 1 else node.constant(node.number("scalar"))
        return node.writer.cast(node.add(op, node.input(0), other), node.made_type)
    row(f"_{_old}_scalar", f"broadcast_{_old}", f"_{_old}", f"_npi_{_new}_scalar", f"_npi_{_new}",
        wide=True)(_compared)


@row("where", "_npi_where", wide=True)
def _where(node: Operator) -> str:
    if node.node.op == "where" and node.shape(0) != node.shape(1):
        node.refuse("its condition must have the shape of its arrays")
    return node.add("Where", node.writer.cast(node.input(0), "bool"), node.input(1), node.input(2))


@row("zeros_like", "ones_like", wide=True)
def _filled_like(node: Operator) -> str:
    """Comparisons with itself are false for each number, NaN included."""
    x = node.input(0)
    name = node.add("Less", x, x)
    name = node.add("Not", name) if node.node.op == "ones_like" else name
    return node.writer.cast(name, str(node.dtype))


@row("_npi_full_like", wide=True)
def _full_like(node: Operator) -> str:
    node.only("dtype", "None", "float32")
    node.ignore("ctx")
    x, value = node.input(0), node.constant(node.number("fill_value"))
    return node.add("Where", node.add("Less", x, x), value, value)


@row("amp_multicast")
def _multicast(node: Operator) -> Any:
    node.ignore("num_outputs", "cast_narrow")
    return [name if node.input_type(i) == node.output_type(i) else
            node.writer.cast(name, node.output_type(i)) for i, name in enumerate(node.x)]


@row("clip", wide=True)
def _clip(node: Operator) -> str:
    return node.add("Clip", node.input(0), node.constant(node.number("a_min")),
                    node.constant(node.number("a_max")))


@row("_contrib_div_sqrt_dim", wide=True)
def _div_sqrt_dim(node: Operator) -> str:
    return node.add("Div", node.input(0), node.constant(np.sqrt(node.shape()[-1])))


# ---- activations -------------------------------------------------------------


@row("Activation", wide=True)
def _activation(node: Operator) -> str:
    kinds = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softrelu": "Softplus",
             "softsign": "Softsign"}
    return node.add(kinds[node.text("act_type")], node.input(0))


@row("LeakyReLU", wide=True)
def _leaky_relu(node: Operator) -> str:
    kind, slope = node.text("act_type", "leaky"), node.number("slope", 0.25)
    node.ignore("lower_bound", "upper_bound")
    x = node.input(0)
    if kind == "prelu":
        values = node.value(1).astype(node.dtype)
        shape = (-1, *(1,) * (len(node.shape()) - 2)) if values.size > 1 else (1,)
        return node.add("PRelu", x, node.constant(values.reshape(shape)))
    if kind == "gelu":
        grown = node.add("Erf", node.add("Div", x, node.constant(np.sqrt(2))))
        return node.add("Mul", node.add("Mul", x, node.constant(0.5)),
                        node.add("Add", grown, node.constant(1)))
    if kind == "selu":
        return node.add("Selu", x)
    if kind not in ("leaky", "elu"):
        node.refuse(f"act_type must be leaky, elu, selu, prelu or gelu. Received: {kind}")
    return node.add({"leaky": "LeakyRelu", "elu": "Elu"}[kind], x, alpha=slope)


@row("hard_sigmoid", wide=True)
def _hard_sigmoid(node: Operator) -> str:
    return node.add("HardSigmoid", node.input(0), alpha=node.number("alpha", 0.2),
                    beta=node.number("beta", 0.5))


@row("softmax", "log_softmax", wide=True)
def _softmax(node: Operator) -> str:
    node.unset("use_length")
    node.only("temperature", "None", "1", "1.0")
    node.ignore("dtype")
    if len(node) > 1:
        node.refuse("ONNX has no equivalent of lengths")
    op = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[node.node.op]
    return node.add(op, node.input(0), axis=node.axis())


@row("SoftmaxOutput", "SoftmaxActivation", wide=True)
def _softmax_output(node: Operator) -> str:
    """A loss head predicts the softmax; it reads its label in training only."""
    node.ignore("grad_scale", "ignore_label", "use_ignore", "normalization", "out_grad",
                "smooth_alpha")
    if node.node.op == "SoftmaxActivation":
        over_channels = node.text("mode", "instance") == "channel"
    else:
        over_channels = node.flag("multi_output")
        if node.flag("preserve_shape"):
            return node.add("Softmax", node.input(0), axis=len(node.shape()) - 1)
    if not over_channels and len(node.shape()) != 2:
        node.refuse("it flattens its data")
    return node.add("Softmax", node.input(0), axis=1)


# ---- products ----------------------------------------------------------------


def _window(node: Operator) -> Dict[str, Any]:
    """Returns the attributes that convolutions and pools share."""
    kernel = node.several("kernel")
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    node.only("layout", "None", {1: "NCW", 2: "NCHW", 3: "NCDHW"}[len(kernel)])
    pad = node.several("pad", zeros)
    return {"kernel_shape": kernel, "strides": node.several("stride", ones), "pads": pad + pad}


def _filtered(node: Operator, op: str, **attributes: Any) -> str:
    window = _window(node)
    node.ignore("no_bias")
    return node.add(op, *node.x, **window, group=node.whole("num_group", 1), **attributes,
                    dilations=node.several("dilate", (1,) * len(window["strides"])))


row("Convolution", "Convolution_v1")(lambda node: _filtered(node, "Conv"))


@row("Deconvolution")
def _deconvolution(node: Operator) -> str:
    node.only("target_shape", "None", "()", "[]")
    zeros = (0,) * len(node.several("kernel"))
    return _filtered(node, "ConvTranspose", output_padding=node.several("adj", zeros))


@row("FullyConnected")
def _dense(node: Operator) -> str:
    node.ignore("no_bias")
    shape, x = node.shape(), node.input(0)
    rows = shape[0] if node.flag("flatten", True) else int(np.prod(shape[:-1]))
    x = node.reshape(x, (rows, node.shape(1)[1])) if len(shape) != 2 else x
    name = node.add("Gemm", x, *node.x[1:], transB=1)
    return name if len(node.made_shape) == 2 else node.reshape(name, node.made_shape)


@row("dot", "batch_dot")
def _dot(node: Operator) -> str:
    node.only("forward_stype", "None")
    dims = {"dot": 2, "batch_dot": 3}[node.node.op]
    if len(node.shape(0)) != dims or len(node.shape(1)) != dims:
        node.refuse(f"its arrays must have {dims} axes")
    turned = (*range(dims - 2), dims - 1, dims - 2)
    a, b = (node.add("Transpose", name, perm=turned) if node.flag(f"transpose_{which}") else name
            for name, which in zip(node.x, "ab"))
    return node.add("MatMul", a, b)


@row("_np_dot")
def _np_dot(node: Operator) -> str:
    if len(node.shape(1)) > 2:
        node.refuse("its second array must have 1 or 2 axes")
    return node.add("MatMul", *node.x)


row("RNN", wide=True)(recurrent)
row("_contrib_MultiBoxPrior", wide=True)(detection.prior)
row("_contrib_MultiBoxDetection", wide=True)(detection.detection)
row("_contrib_box_decode", wide=True)(detection.decode)
row("_contrib_box_nms", wide=True)(detection.nms)
row("_contrib_ROIAlign", wide=True)(detection.roi_align)
row("ROIPooling", wide=True)(detection.roi_pooling)


@row("Embedding", "take")
def _embedding(node: Operator) -> str:
    """Indices beyond the table select its first or last row, as in MXNet."""
    node.ignore("input_dim", "output_dim", "dtype", "sparse_grad")
    node.only("mode", "clip")
    is_embedding = node.node.op == "Embedding"
    data, ids = (1, 0) if is_embedding else (0, 1)
    axis = 0 if is_embedding else node.axis(default=0)
    whole = node.writer.cast(node.input(ids), "int64")
    inside = node.add("Clip", whole, node.constant(0, "int64"),
                      node.constant(node.shape(data)[axis] - 1, "int64"))
    return node.add("Gather", node.input(data), inside, axis=axis)


# ---- norms and pools ---------------------------------------------------------


@row("BatchNorm", "BatchNorm_v1", wide=True)
def _batch_norm(node: Operator) -> str:
    node.ignore("momentum", "use_global_stats", "min_calib_range", "max_calib_range")
    node.unset("output_mean_var")
    if node.axis(default=1) != 1:
        node.refuse(f"axis must be 1. Received: {node.text('axis')}")
    x, gamma, beta, mean, variance = node.x
    if node.flag("fix_gamma", True):  # MXNet uses 1 instead of gamma
        gamma = node.constant(np.ones(node.shape(1)))
    return node.add("BatchNormalization", x, gamma, beta, mean, variance,
                    epsilon=node.number("eps", 1e-3))


def _centered(node: Operator, x: str, axes: List[int], keepdims: bool = True) -> Tuple[str, str]:
    """Returns the differences from the mean over axes, and their variance."""
    off = node.add("Sub", x, node.add("ReduceMean", x, axes=axes))
    return off, node.add("ReduceMean", node.add("Mul", off, off), axes=axes, keepdims=int(keepdims))


@row("LayerNorm", wide=True)
def _layer_norm(node: Operator) -> str:
    node.unset("output_mean_var")
    if node.axis() != len(node.shape()) - 1:
        node.refuse("axis must be the last one")
    x, gamma, beta = node.x
    off, variance = _centered(node, x, [-1])
    deviation = node.add("Sqrt", node.add("Add", variance, node.constant(node.number("eps", 1e-5))))
    return node.add("Add", node.add("Mul", node.add("Div", off, deviation), gamma), beta)


@row("InstanceNorm", wide=True)
def _instance_norm(node: Operator) -> str:
    return node.add("InstanceNormalization", *node.x, epsilon=node.number("eps", 1e-3))


@row("LRN", wide=True)
def _lrn(node: Operator) -> str:
    return node.add("LRN", node.input(0), alpha=node.number("alpha", 1e-4),
                    beta=node.number("beta", 0.75), bias=node.number("knorm", 2.0),
                    size=node.whole("nsize"))


@row("Pooling", "Pooling_v1", wide=True)
def _pooling(node: Operator) -> str:
    node.ignore("p_value")
    node.only("pool_type", "max", "avg")
    kind = {"max": "MaxPool", "avg": "AveragePool"}[node.text("pool_type", "max")]
    if node.flag("global_pool"):
        node.ignore("kernel", "stride", "pad", "pooling_convention", "count_include_pad", "layout")
        if node.text("layout") not in ("None", "NCW", "NCHW", "NCDHW"):
            node.refuse(f"layout must be channels-first. Received: {node.text('layout')}")
        return node.add(f"Global{kind}", node.input(0))
    window = _window(node)
    node.only("pooling_convention", "valid", "full")
    if kind == "AveragePool":
        window["count_include_pad"] = int(node.flag("count_include_pad", True))
    node.ignore("count_include_pad")
    if node.made_shape[2:] != _valid(node.shape()[2:], window):
        if kind == "AveragePool":
            node.refuse("ONNX has no equivalent of an average over a partial window: "
                        "pooling_convention must be valid for this shape. Received: full")
        window["ceil_mode"] = 1
    return node.add(kind, node.input(0), **window)


def _valid(shape: Shape, window: Dict[str, Any]) -> object:
    """Returns the output shape without partial windows."""
    pads = [2 * pad for pad in window["pads"]]
    return tuple((n + pad - kernel) // stride + 1 for n, pad, kernel, stride in zip(
        shape, pads, window["kernel_shape"], window["strides"]))


@row("_contrib_AdaptiveAvgPooling2D", wide=True)
def _adaptive(node: Operator) -> str:
    if node.made_shape[2:] != (1, 1):
        node.refuse("output_size must be 1")
    node.ignore("output_size")
    return node.add("GlobalAveragePool", node.input(0))


def _reduced_axes(node: Operator) -> List[int]:
    """Returns the axes to reduce: all, if the node names none."""
    axes = range(len(node.shape()))
    return [axes[axis] for axis in node.several("axis", tuple(axes))]


@row("_npi_var", "_npi_std", wide=True)
def _spread(node: Operator) -> str:
    node.only("dtype", "None")
    node.only("ddof", "0")
    _, name = _centered(node, node.input(0), _reduced_axes(node), node.flag("keepdims"))
    return node.add("Sqrt", name) if node.node.op == "_npi_std" else name


@row("mean", "sum", "max", "min", "_npi_mean", "_np_sum", "_np_max", "_np_min", wide=True)
def _reduce(node: Operator) -> str:
    node.unset("exclude")
    node.only("initial", "None")
    node.only("dtype", "None")
    axes, x, keep = _reduced_axes(node), node.input(0), int(node.flag("keepdims"))
    op = {"mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin"}.get(
        node.node.op.split("_")[-1])
    if op is None:
        name = node.add("ReduceSum", x, node.constant(axes, "int64"), keepdims=keep)
    else:
        name = node.add(op, x, axes=axes, keepdims=keep)
    if len(axes) == len(node.shape()) and not keep:  # mx.nd has no 0-d arrays
        return node.reshape(name, node.made_shape)
    return name


# ---- operators that copy values ----------------------------------------------


@row("Reshape", "Flatten", "expand_dims", "squeeze", "reshape_like", "_np_reshape",
     "_npx_reshape", "_np_squeeze")
def _reshape(node: Operator) -> str:
    """Writes operators that change the shape only, with the shape that MXNet infers."""
    node.unread.clear()
    return node.reshape(node.input(0), node.made_shape)


@row("transpose", "_np_transpose")
def _transpose(node: Operator) -> str:
    axes = node.several("axes", tuple(reversed(range(len(node.shape())))))
    return node.add("Transpose", node.input(0), perm=axes)


@row("SwapAxis")
def _swap(node: Operator) -> str:
    axes = list(range(len(node.shape())))
    a, b = node.axis("dim1", 0), node.axis("dim2", 0)
    axes[a], axes[b] = axes[b], axes[a]
    return node.add("Transpose", node.input(0), perm=axes)


@row("Concat")
def _concat(node: Operator) -> str:
    return node.add("Concat", *node.x, axis=node.axis("dim", 1))


@row("_npi_concatenate")
def _concatenate(node: Operator) -> str:
    if node.text("axis", "0") == "None":
        node.refuse("ONNX has no equivalent of axis=None")
    return node.add("Concat", *node.x, axis=node.axis(default=0))


@row("_npi_vstack")
def _vstack(node: Operator) -> str:
    if len(node.shape()) < 2:
        node.refuse("its arrays must have 2 axes or more")
    return node.add("Concat", *node.x, axis=0)


@row("_npi_broadcast_to", "broadcast_to")
def _broadcast_to(node: Operator) -> str:
    node.ignore("shape")
    return node.add("Expand", node.input(0), node.constant(node.made_shape, "int64"))


@row("_np_moveaxis")
def _moveaxis(node: Operator) -> str:
    order = len(node.shape())
    sources, targets = ([axis % order for axis in node.several(name)]
                        for name in ("source", "destination"))
    axes = [axis for axis in range(order) if axis not in sources]
    for target, source in sorted(zip(targets, sources)):
        axes.insert(target, source)
    return node.add("Transpose", node.input(0), perm=axes)


@row("stack", "_npi_stack")
def _stack(node: Operator) -> str:
    dims = len(node.shape()) + 1
    axis = node.axis(default=0, dims=dims)
    shape = (*node.shape()[:axis], 1, *node.shape()[axis:])
    return node.add("Concat", *(node.reshape(x, shape) for x in node.x), axis=axis)


@row("slice_axis")
def _slice_axis(node: Operator) -> str:
    axis, end = node.axis(), node.text("end")
    last = node.shape()[axis] if end == "None" else int(end)
    return node.slice(node.input(0), [node.whole("begin")], [last], [axis])


@row("slice_like")
def _slice_like(node: Operator) -> str:
    several = node.several("axes", tuple(range(len(node.shape()))))
    axes = [axis for axis in (each % len(node.shape()) for each in several)
            if node.shape()[axis] != node.shape(1)[axis]]
    if not axes:
        return node.input(0)
    return node.slice(node.input(0), [0] * len(axes), [node.shape(1)[axis] for axis in axes], axes)


@row("tile")
def _tile(node: Operator) -> str:
    reps, shape, x = node.several("reps"), node.shape(), node.input(0)
    if len(reps) > len(shape):
        shape = (*(1,) * (len(reps) - len(shape)), *shape)
        x = node.reshape(x, shape)
    return node.add("Tile", x, node.constant((*(1,) * (len(shape) - len(reps)), *reps), "int64"))


@row("repeat")
def _repeat(node: Operator) -> str:
    if node.text("axis") == "None":
        node.refuse("ONNX has no equivalent of axis=None")
    axis, shape = node.axis(), node.shape()
    apart = node.unsqueeze(node.input(0), axis + 1)
    reps = [1] * (len(shape) + 1)
    reps[axis + 1] = node.whole("repeats")
    return node.reshape(node.add("Tile", apart, node.constant(reps, "int64")), node.made_shape)


@row("slice")
def _slice(node: Operator) -> str:
    parts = [ast.literal_eval(node.text(name, "()")) or () for name in ("begin", "end", "step")]
    slices = []
    for axis, size in zip(range(len(parts[0])), node.shape()):
        begin, end, step = slice(*(part[axis] if axis < len(part) else None
                                   for part in parts)).indices(size)
        if step < 0:
            node.refuse("its steps must be positive")
        if (begin, end, step) != (0, size, 1):  # of an axis that may have any size
            slices.append((begin, end, axis, step))
    if not slices:
        return node.input(0)
    return node.slice(node.input(0), *zip(*slices))


@row("_split_v2")
def _split_v2(node: Operator) -> Any:
    """`mx.np.split`: `indices` are where parts begin, the first one at 0."""
    begins, axis = node.several("indices"), node.axis(default=0)
    count = node.whole("sections") or len(begins)
    size = node.shape()[axis]
    sizes = np.diff([*begins, size]) if begins else [size // count] * count
    return _squeezed(node, axis, node.outputs("Split", count, node.input(0),
                                             node.constant(sizes, "int64"), axis=axis))


@row("SliceChannel")
def _split(node: Operator) -> Any:
    count, axis = node.whole("num_outputs"), node.axis(default=1)
    return _squeezed(node, axis, node.outputs("Split", count, node.input(0), axis=axis))


def _squeezed(node: Operator, axis: int, parts: List[str]) -> List[str]:
    """Returns the parts of a split without its axis, if `squeeze_axis` is set."""
    if not node.flag("squeeze_axis"):
        return parts
    return [node.add("Squeeze", part, node.constant([axis], "int64")) for part in parts]


@row("Pad")
def _pad(node: Operator) -> str:
    node.only("mode", "constant", "edge", "reflect")
    widths = node.several("pad_width")
    pads = node.constant([*widths[::2], *widths[1::2]], "int64")
    return node.add("Pad", node.input(0), pads, node.constant(node.number("constant_value")),
                    mode=node.text("mode"))


@row("UpSampling")
def _upsampling(node: Operator) -> str:
    node.only("sample_type", "nearest")
    node.ignore("multi_input_mode")
    if len(node) > 1:
        node.refuse("ONNX has no equivalent of several inputs")
    scale = node.number("scale")
    return node.add("Resize", node.input(0), "", node.constant([1, 1, scale, scale], "float32"),
                    mode="nearest", coordinate_transformation_mode="asymmetric",
                    nearest_mode="floor")


def _scale(before: int, after: int) -> Any:
    """Returns the scale between two sizes. ONNX rounds their product down, in float32."""
    scale = np.float32(after / before)
    return scale if int(before * scale) == after else np.nextafter(scale, np.float32(np.inf))


@row("_contrib_BilinearResize2D", wide=True)
def _bilinear_resize(node: Operator) -> str:
    node.ignore("height", "width", "scale_height", "scale_width", "mode")  # of the output's shape
    scales = [1, 1, *map(_scale, node.shape()[2:], node.made_shape[2:])]
    aligned = node.flag("align_corners", True)
    return node.add("Resize", node.input(0), "", node.constant(scales, "float32"), mode="linear",
                    coordinate_transformation_mode="align_corners" if aligned else "half_pixel")


@row("Crop", wide=True)
def _crop(node: Operator) -> str:
    node.ignore("num_args", "h_w")
    before, after = node.shape()[2:], node.made_shape[2:]
    begins = [(size - part) // 2 for size, part in zip(before, after)] \
        if node.flag("center_crop") else node.several("offset", (0, 0))
    node.ignore("offset")
    ends = [begin + part for begin, part in zip(begins, after)]
    return node.slice(node.input(0), begins, ends, (2, 3))
