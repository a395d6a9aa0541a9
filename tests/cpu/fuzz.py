"""`make -C tests fuzz N=100000`: random calls of operators in float16 against MXNet's float32.

A seed determines a call: an operator, its attributes, shapes, types and values; imperative, by a
CachedOp (static or not) or an executor; with or without a backward pass; gradients written, added
or not requested; results in new arrays, given arrays, parts of arrays, or in-place; empty arrays.
The reference is MXNet's imperative float32 operator on the same numbers. Each float16 result must
be bitwise equal to the reference rounded once, unless EXPLAINED has a row.

`make -C tests fuzz SEED=123` repeats one call and prints it. Calls run in their own processes: some
attributes crash MXNet's float32 code; such calls, and those that MXNet refuses, do not count.
"""
import collections
import contextlib
import copy
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKERS, CHUNK = 2, 1000  # processes, and calls per process
LONGEST = 20  # seconds per call
F16, F32 = "float16", "float32"

# Not given infinities and NaN: they are cast to integers, or their sums depend on the order.
NO_SPECIALS = "ROI|CTC|_sample_|Norm|_contrib_Deform|_contrib_Modulated|box|Box|Proposal|GridGen" \
              "|Bilinear|Spatial|_npi_average"

NO_NAN = ("Activation", "LeakyReLU")  # oneDNN maps NaN to 0, or its gradient to 1
NO_MAXIMUM = re.compile("softm")  # oneDNN maps numbers beside an infinite maximum to 0, not NaN

# Operators that are not drawn, by a pattern of names.
NOT_DRAWN = {
    r"backward": "run by the backward passes of the others",
    r"dgl|_sparse_retain|cast_storage|getnnz|edge_id|square_sum|_scatter_": "of sparse arrays",
    r"_cv|calibrate|_npx_constraint_check|hawkesll": "of images in uint8, of quantization, of text",
    r"^_sg_": "made by executors, of others",
    r"shape_array|size_array|_npi_diag_indices_from": "read no numbers",
    r"^multi_(sum_sq|lars)$": "run MXNet's own float16 code; they dispatch for bfloat16",
}


# ---- drawing a call --------------------------------------------------------------------------


class Draw(random.Random):
    """Random shapes and attributes."""

    def maybe(self, chance):
        return self.random() < chance

    def shape(self, least=1, most=4, largest=6, empty=False):
        dims = [self.randint(1, largest) for _ in range(self.randint(least, most))]
        if empty and dims and self.maybe(.3):
            dims[self.randrange(len(dims))] = 0
        if dims and self.maybe(.03):
            dims[-1] = self.choice([17, 64, 300])
        return tuple(dims)

    def axis(self, ndim):
        return self.randint(-ndim, ndim - 1) if ndim else 0

    def axes(self, ndim):
        return tuple(self.sample(range(ndim), self.randint(min(1, ndim), ndim)))

    def number(self):
        return self.choice([0, 1, 2, -1, .5, .1, 3.7, -.3, round(self.gauss(0, 2), 3)])


def attribute(draw, name, kind, shape):
    """A value for an attribute by MXNet's description, or None to omit it."""
    ndim, choices = len(shape), re.findall(r"'([^']*)'", kind.split("}")[0])
    if name == "dtype" and F16 in choices:
        return draw.choice([F16, F16, F16, *choices])
    if "required" not in kind and draw.maybe(.5):
        return None
    if kind.startswith("{"):
        return draw.choice(choices)
    if "boolean" in kind:
        return draw.maybe(.5)
    if name in ("axis", "dim", "dim1", "dim2", "axis1", "axis2") and "int" in kind:
        return draw.axis(ndim)
    if "hape" in kind or "tuple" in kind:
        if name in ("axis", "axes"):
            return draw.axes(ndim)
        if "float" in kind:
            return tuple(abs(draw.number()) for _ in range(draw.randint(1, 3)))
        return draw.shape(1, 3, 4)
    if name in ("eps", "epsilon"):
        return draw.choice([1e-3, 1e-5, 1e-2])
    if name in ("p", "momentum", "lam", "alpha", "beta", "scale", "sigma", "mu", "k"):
        return draw.randint(1, 3) if "int" in kind else draw.choice([.1, .5, .9])
    if "int" in kind or "long" in kind:
        return draw.choice([0, 1, 1, 2, 3, 4, -1])
    if any(word in kind for word in ("float", "double", "real_t")):
        return abs(draw.number()) if name == "temperature" else draw.number()
    return None


def window(draw, **more):
    """Attributes of a convolution or pooling, and the shape of its data."""
    n = draw.choice([1, 2, 2, 2, 3])
    made = {"kernel": tuple(draw.randint(1, 3) for _ in range(n)), **more}
    for key, low, high in (("stride", 1, 2), ("pad", 0, 1), ("dilate", 1, 2)):
        if draw.maybe(.5) and (key != "dilate" or "num_filter" in more):
            made[key] = tuple(draw.randint(low, high) for _ in range(n))
    return made, n, [(draw.randint(1, 3), draw.choice([1, 2, 4, 16, 20]),
                      *(draw.randint(5, 8) for _ in range(n)))]


def convolution(draw):
    attrs, _, [shape] = window(draw, num_filter=draw.choice([1, 2, 4, 16]),
                               no_bias=draw.maybe(.5))
    groups = draw.choice([1, 1, 1, 2])
    if shape[1] % groups == attrs["num_filter"] % groups == 0:
        attrs["num_group"] = groups
    return attrs, [shape]


def pooling(draw):
    attrs, _, shapes = window(draw)
    attrs.update(pool_type=draw.choice(["max", "avg", "sum", "lp"]), global_pool=draw.maybe(.2),
                 pooling_convention=draw.choice(["valid", "valid", "full"]), p_value=2,
                 count_include_pad=draw.maybe(.5))
    return attrs, shapes


def dense(draw):
    return {"num_hidden": draw.choice([1, 3, 16, 33]), "no_bias": draw.maybe(.5),
            "flatten": draw.maybe(.5)}, [draw.shape(2, 4)]


def product(batch, transposes=True):
    def recipe(draw):
        lead = draw.shape(batch, batch) if batch else ()
        m, k, n = (draw.choice([1, 2, 3, 5, 17]) for _ in range(3))
        a, b = draw.maybe(.5) and transposes, draw.maybe(.5) and transposes
        return ({"transpose_a": a, "transpose_b": b} if transposes else {},
                [lead + ((k, m) if a else (m, k)), lead + ((n, k) if b else (k, n))])
    return recipe


def gemm(draw):
    attrs, (a, b) = product(draw.choice([0, 1]))(draw)
    m, n = a[-1 if attrs["transpose_a"] else -2], b[-2 if attrs["transpose_b"] else -1]
    return {**attrs, "alpha": draw.number(), "beta": draw.number()}, [a, b, (*a[:-2], m, n)]


def rnn(draw):
    return {"state_size": draw.choice([1, 3, 8]), "num_layers": draw.randint(1, 2),
            "mode": draw.choice(["rnn_relu", "rnn_tanh", "lstm", "gru"]),
            "bidirectional": draw.maybe(.3), "state_outputs": draw.maybe(.5)}, [draw.shape(3, 3)]


def square(draw):
    n = draw.randint(1, 4)
    return {}, [(*draw.shape(0, 1), n, n)]


def two_squares(draw):
    return {}, square(draw)[1] * 2


def joined(key, low, differ=True):
    def recipe(draw):
        shape, count = draw.shape(low), draw.randint(1, 4)
        axis = draw.randrange(len(shape))
        shapes = [(*shape[:axis], draw.randint(1, 4) if differ else shape[axis],
                   *shape[axis + 1:]) for _ in range(count)]
        return {"num_args": count, **({key: axis} if key else {})}, shapes
    return recipe


def split(draw):
    shape = list(draw.shape(1, 4))
    axis, parts = draw.randrange(len(shape)), draw.randint(1, 3)
    shape[axis] = parts * draw.choice([1, 1, 2])
    return {"num_outputs": parts, "axis": axis,
            "squeeze_axis": draw.maybe(.5) and shape[axis] == parts}, [tuple(shape)]


def split_v2(draw):
    attrs, shapes = split(draw)
    return {"indices": (), "sections": attrs["num_outputs"], "axis": attrs["axis"],
            "squeeze_axis": attrs["squeeze_axis"]}, shapes


def sliced(draw):
    shape = draw.shape()
    begin, end, step = [], [], []
    for n in shape:
        a, b = sorted(draw.sample(range(n + 1), 2))
        back = draw.maybe(.2)
        begin.append(b - 1 if back else a)
        end.append((a - 1 if a else None) if back else draw.choice([b, None]))
        step.append(-1 if back else draw.choice([1, 1, 2]))
    return {"begin": tuple(begin), "end": tuple(end), "step": tuple(step)}, [shape]


def slice_axis(draw):
    shape = draw.shape()
    axis = draw.randrange(len(shape))
    a, b = sorted(draw.sample(range(shape[axis] + 1), 2))
    return {"axis": axis, "begin": a, "end": draw.choice([b, None])}, [shape]


def padded(draw):
    shape = draw.shape(4, 5)
    pads = (0,) * 4 + tuple(draw.randint(0, min(2, n - 1)) for n in shape[2:] for _ in "ab")
    return {"mode": draw.choice(["constant", "edge", "reflect"]), "pad_width": pads,
            "constant_value": draw.number()}, [shape]


def broadcast_shapes(draw):
    shape = draw.shape()
    return {}, [tuple(draw.choice([1, n, n]) for n in shape), tuple(shape)][::draw.choice([1, -1])]


def broadcast_to(draw):
    shape = draw.shape()
    return {"shape": shape}, [tuple(draw.choice([1, n]) for n in shape)]


def broadcast_axis(draw):
    axis = draw.axis(3) % 3
    shape = list(draw.shape(3, 3))
    shape[axis] = 1
    return {"axis": (axis,), "size": (draw.randint(1, 4),)}, [tuple(shape)]


def reshaped(key):
    def recipe(draw):
        shape = draw.shape()
        new = draw.choice([(-1,), shape[::-1], (0, -1), (shape[0], -1), (-1, 1)])
        return {key: new}, [shape]
    return recipe


def moved(key):
    def recipe(draw):
        shape = draw.shape()
        return {key: tuple(draw.sample(range(len(shape)), len(shape)))}, [shape]
    return recipe


def taken(draw):
    shape = draw.shape()
    return {"axis": draw.randrange(len(shape)), "mode": draw.choice(["clip", "wrap"])}, \
        [shape, draw.shape(1, 2)]


def embedding(draw):
    n, m = draw.randint(4, 9), draw.randint(1, 17)
    return {"input_dim": n, "output_dim": m}, [draw.shape(1, 3), (n, m)]


def lengths(draw):
    shape = draw.shape(2, 4)
    return {"use_sequence_length": draw.maybe(.7), "axis": 0}, [shape]


def layer_norm(draw):  # less cancellation in its gradient
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
    axis = draw.axis(len(shape))
    shape[axis] = draw.randint(4, 40)
    return {"axis": axis}, [tuple(shape)]


def image(channels=None, **attrs):
    return lambda draw: (attrs, [(draw.randint(3, 6), draw.randint(3, 6),
                                  channels or draw.choice([1, 3]))])


def channels_first(attrs=lambda draw: {}):
    return lambda draw: (attrs(draw), [(draw.randint(1, 2), draw.choice([4, 4, 16]),
                                        *(draw.choice([4, 6, 8]) for _ in "hw"))])


def fixed(*shapes, **attrs):
    return lambda draw: (attrs, list(shapes))


def einsum(draw):
    i, j, k = (draw.randint(1, 4) for _ in range(3))
    text, shapes = draw.choice([
        ("ij,jk->ik", [(i, j), (j, k)]), ("ij->ji", [(i, j)]), ("ii->i", [(i, i)]),
        ("ij,ij->", [(i, j), (i, j)]), ("bij,bjk->bik", [(2, i, j), (2, j, k)]),
        ("i,j->ij", [(i,), (j,)])])
    return {"subscripts": text, "num_args": len(shapes), "optimize": draw.choice([0, 1])}, shapes


def update(states):
    def recipe(draw):
        attrs = {"lr": .1, "wd": draw.choice([0, .01]), "rescale_grad": draw.choice([1, .5]),
                 "clip_gradient": draw.choice([-1, .5])}
        return {**attrs, **({"momentum": .9} if states > 1 else {})}, [draw.shape(1, 3)]
    return recipe


def size(*more):
    return lambda draw: ({"shape": draw.shape(1, 3), **{k: draw.choice([.5, 1, 2]) for k in more}},
                         [])


# Attributes and shapes of the first inputs for operators with code of their own for some shapes,
# and for those that operator_calls has not; MXNet infers the shapes of the rest. A name that ends
# with * is a prefix.
RECIPES = {
    "Convolution*": convolution, "Deconvolution": convolution, "Pooling*": pooling,
    "FullyConnected": dense, "dot": product(0), "_np_dot": product(0, False),
    "batch_dot": product(1), "_npi_matmul": product(1, False), "_linalg_gemm": gemm,
    "_linalg_gemm2": product(1), "RNN": rnn, "_linalg_*": square, "_npi_cholesky": square,
    "_linalg_trmm": two_squares, "_linalg_trsm": two_squares, "_npi_solve": two_squares,
    "_npi_eig*": square, "_npi_svd": square, "_npi_pinv*": square,
    "_npi_tensorinv": fixed((3, 3), ind=1), "_npi_tensorsolve": two_squares,
    "Concat": joined("dim", 1), "_npi_concatenate": joined("dim", 1),
    "_rnn_param_concat": joined("dim", 1),
    "stack": joined("axis", 1, False), "_npi_stack": joined("axis", 1, False),
    "_npi_vstack": joined("", 2, False), "_npi_hstack": joined("", 2, False),
    "_npi_dstack": joined("", 3, False), "_npi_column_stack": joined("", 2, False),
    "add_n": joined("", 1, False), "_np_atleast*": joined("", 1),
    "khatri_rao": fixed((2, 3), (4, 3), num_args=2), "_npi_einsum": einsum,
    "amp_multicast": lambda draw: ({"num_outputs": 2}, [draw.shape()] * 2),
    "SliceChannel": split, "_split_v2": split_v2, "slice": sliced, "slice_axis": slice_axis,
    "_slice_assign_scalar": sliced, "slice_like": fixed((5, 4), (3, 4)),
    "Crop": fixed((2, 3, 5, 6), num_args=1, h_w=(2, 3), offset=(1, 1)),
    "Pad": padded, "broadcast_to": broadcast_to, "broadcast_axis": broadcast_axis,
    "broadcast_like": fixed((1, 3), (4, 3)), "broadcast_*": broadcast_shapes,
    "_npi_true_divide": broadcast_shapes,
    **{f"_npi_{name}": broadcast_shapes for name in (
        "add subtract multiply mod power arctan2 hypot copysign ldexp equal not_equal less "
        "greater less_equal greater_equal").split()},
    "Reshape": reshaped("shape"), "_np_reshape": reshaped("newshape"),
    "_npx_reshape": reshaped("newshape"), "reshape_like": fixed((4, 3), (2, 6)),
    "transpose": moved("axes"), "_np_transpose": moved("axes"),
    "_np_moveaxis": lambda draw: ({"source": (0,), "destination": (-1,)}, [draw.shape(2)]),
    "take": taken, "Embedding": embedding, "gather_nd": fixed((4, 5, 3), (2, 6)),
    "Sequence*": lengths, "BatchNorm*": channels_first(lambda draw: {"fix_gamma": draw.maybe(.5)}),
    "LayerNorm": layer_norm, "_contrib_BatchNormWithReLU": channels_first(),
    "InstanceNorm": channels_first(),
    "L2Normalization": channels_first(),
    "UpSampling": channels_first(lambda draw: {
        "num_args": 1, "scale": draw.randint(1, 3), "sample_type": "nearest"}),
    "_contrib_BilinearResize2D": channels_first(lambda draw: {
        "height": draw.randint(1, 9), "width": draw.randint(1, 9), "mode": "size"}),
    "_contrib_AdaptiveAvgPooling2D": channels_first(lambda draw: {
        "output_size": (draw.randint(1, 4), draw.randint(1, 4))}),
    "depth_to_space": channels_first(lambda draw: {"block_size": 2}),
    "space_to_depth": channels_first(lambda draw: {"block_size": 2}),
    "_contrib_MultiBoxPrior": fixed((1, 3, 4, 4), sizes=(.5, .2), ratios=(1, 2)),
    "_contrib_MultiBoxTarget": fixed((1, 6, 4), (2, 3, 5), (2, 3, 6)),
    "_contrib_MultiBoxDetection": fixed((2, 3, 6), (2, 24), (1, 6, 4)),
    "_contrib_Proposal": fixed((1, 24, 4, 4), (1, 48, 4, 4), (1, 3), rpn_pre_nms_top_n=20,
                               rpn_post_nms_top_n=5),
    "_contrib_MultiProposal": fixed((2, 24, 4, 4), (2, 48, 4, 4), (2, 3), rpn_pre_nms_top_n=20,
                                    rpn_post_nms_top_n=5),
    "mp_sgd_update": update(1),
    "mp_sgd_mom_update": update(2), "mp_nag_mom_update": update(2),
    "_image_flip*": image(), "_image_random_flip*": image(), "_image_random_lighting": image(),
    "_image_random_*": image(3, min_factor=.5, max_factor=1.5),
    "_image_random_color_jitter": image(3, brightness=.2, contrast=.2, saturation=.2, hue=.2),
    "_random_uniform": size(),
    "_random_normal": size("scale"), "_random_gamma": size("alpha"),
    "_random_exponential": size("lam"), "_random_poisson": size("lam"),
    "_np_diagflat": lambda draw: ({"k": draw.randint(-1, 1)}, [draw.shape(1, 2, 4)]),
    "tile": lambda draw: ({"reps": draw.shape(1, 3, 3)}, [draw.shape(1, 3)]),
    "repeat": lambda draw: ({"repeats": draw.randint(1, 3), "axis": 0}, [draw.shape(1, 3)]),
    "expand_dims": lambda draw: ({"axis": draw.randint(0, 1)}, [draw.shape(1, 3)]),
    "diag": lambda draw: ({"k": draw.randint(-1, 1)}, [draw.shape(1, 2)]),
    "clip": lambda draw: (dict(zip(("a_min", "a_max"), sorted((draw.number(), draw.number())))),
                          [draw.shape()]),
    "topk": lambda draw: ({"k": draw.randint(1, 3), "axis": -1, "ret_typ": draw.choice(
        ["value", "indices", "mask", "both"])}, [(*draw.shape(0, 2), 5)]),
    "_histogram": fixed((20,), bin_cnt=5, range=(-2, 2)),
}
_PREFIXES = sorted((key[:-1] for key in RECIPES if key.endswith("*")), key=len, reverse=True)


def recipe_for(name):
    """A recipe, or the call in operator_calls: code for all operators does not depend on shapes."""
    from operator_calls import CASES
    if name in RECIPES:
        return RECIPES[name]
    attrs, *inputs = CASES.get(name, ({},))
    shapes = [given if isinstance(given, tuple) else given.shape for given in inputs[0]] \
        if inputs else []
    return next((RECIPES[f"{p}*"] for p in _PREFIXES if name.startswith(p)),
                fixed(*shapes, **attrs) if shapes else None)


# ---- a call ----------------------------------------------------------------------------------

# names of inputs with small integers
INDICES = re.compile("ind|label|length|rois|matches|samples|^h$")
KEEPS_RESULTS = {"RNN"}  # unrounded, for its backward pass
POSITIVE = re.compile("_sample_|multinomial|_random_pdf|potr|cholesky")


class Refused(Exception):
    """MXNet does not accept the call."""


class Call:
    """A random call, determined by its seed."""

    def __init__(self, seed, operators):
        self.seed, self.low, draw = seed, F16, Draw(seed)
        self.draw = draw
        self.name, self.arguments = draw.choice(operators)
        self.numpy = self.name.startswith("_np")
        self.np_shape = self.numpy or draw.maybe(.25)
        recipe = recipe_for(self.name)
        if recipe and draw.maybe(.95):
            attrs, self.given = recipe(draw)
            keys = {name for name, _ in self.arguments}
            attrs = {key: value for key, value in attrs.items() if key in keys or not keys}
        else:
            attrs, self.given = {}, None
        first = self.given[0] if self.given else draw.shape(
            0 if self.np_shape else 1, empty=self.np_shape and "percentile" not in self.name)
        for key, kind in self.arguments:
            if key not in attrs and not ("NDArray" in kind or "ymbol" in kind) and key not in (
                    "num_args", "ctx", "workspace", "cudnn_off", "cudnn_tune", "layout", "is_int"):
                required = "required" in kind
                if required or not recipe or draw.maybe(.15) or key == "dtype":
                    value = attribute(draw, key, kind, first)
                    if value is not None:
                        attrs[key] = value
        if any(key == "num_args" for key, _ in self.arguments):
            attrs.setdefault("num_args", draw.randint(1, 4))
        self.attrs = {key: str(value) for key, value in attrs.items()}
        self.first = first
        self.how = draw.choice(["imperative"] * 3 + ["cached", "static", "executor"])
        self.backward = draw.maybe(.6)
        self.training = self.backward or draw.maybe(.5)
        self.place = draw.choice(["new", "new", "given", "part", "input"])
        self.parts = draw.maybe(.3)       # the inputs are parts of larger arrays
        self.wraps = draw.maybe(.6)       # in graphs: inputs and outputs belong to other nodes
        self.shares = draw.maybe(.3)      # in graphs: the inputs have another reader
        self.scale = draw.choice([1, 1, 1, 3, .1, 50])
        self.special = draw.maybe(.15) and not re.search(NO_SPECIALS, self.name)

    def prepare(self, mx, np, reference_attrs):
        """Shapes, types and values of the inputs; raises if MXNet does not accept them."""
        draw, symbol = self.draw, self.symbol(mx, self.attrs)
        names = symbol.list_inputs()
        auxiliary = set(symbol.list_auxiliary_states())
        known = dict(zip(names, self.given if self.given is not None else [self.first]))
        if names and self.given is None and draw.maybe(.3):
            known = dict.fromkeys(names, self.first)
        arguments, _, states = symbol.infer_shape_partial(**known)
        shapes = dict(zip(symbol.list_arguments(), arguments or ()))
        shapes.update(zip(symbol.list_auxiliary_states(), states or ()))
        whole = (lambda s: s is not None and -1 not in s) if self.np_shape else \
            (lambda s: s and 0 not in s)
        self.names, self.auxiliary = names, auxiliary
        self.shapes = [shapes[n] if whole(shapes.get(n)) else draw.choice(
            [self.first, self.first, draw.shape(1, 2)]) for n in names]
        if sum(int(np.prod(s)) for s in self.shapes) > 1e5:
            raise Refused("large")
        self.types = [F16 for _ in names]
        if draw.maybe(.15):
            self.types = [draw.choice([F16, F32, "int32", "float64"]) for _ in names]
        self.types = self._inferred(symbol, np)
        values = np.random.RandomState(self.seed)
        self.arrays = [self._values(values, np, n, s, t)
                       for n, s, t in zip(names, self.shapes, self.types)]
        self.reference_attrs = reference_attrs(self)

    def _inferred(self, symbol, np):
        """Shapes that MXNet infers from the first input, if it does."""
        try:
            given = dict(zip(symbol.list_inputs()[:1], self.types))
            arguments, _, states = symbol.infer_type_partial(**given)
        except Exception:
            return self.types
        types = dict(zip(symbol.list_arguments(), arguments))
        types.update(zip(symbol.list_auxiliary_states(), states))
        return [np.dtype(types[n]).name if types.get(n) is not None and (
                    t == F16 or n in self.auxiliary) else t
                for n, t in zip(symbol.list_inputs(), self.types)]

    def _values(self, rng, np, name, shape, dtype):
        name = name[len("fuzz_"):]
        if INDICES.search(name) and self.name != "_contrib_index_array" or dtype not in (
                F16, F32, "float64"):
            low, high = (1, self.first[0] + 1) if "length" in name else (0, 3)
            return rng.randint(low, 2 if name == "rois" else max(high, 2), shape).astype(dtype)
        made = rng.standard_normal(shape) * self.scale
        if POSITIVE.search(self.name) or "var" in name:
            made = np.abs(made) + .1
        if self.name == "_sample_multinomial" and made.ndim:  # less than 1 reads past the end
            made *= 1.01 / made.sum(-1, keepdims=True)
        if "linalg_pot" in self.name or "cholesky" in self.name or self.name in (
                "_npi_eigh", "_npi_eigvalsh", "_linalg_syevd"):
            made = made @ np.swapaxes(made, -1, -2) + 4 * np.eye(shape[-1])
        if self.special and made.size and not (  # padding times infinity may be computed, or not
                "onvolution" in self.name and name == "weight"):
            special = [0, -0., -np.inf, 6e-8, 65504, -65504, 1, 2]
            special += [np.inf] * (not NO_MAXIMUM.search(self.name))
            special += [np.nan] * (not NO_MAXIMUM.search(self.name) and self.name not in NO_NAN)
            special = np.array(special)
            places = rng.randint(0, made.size, max(1, made.size // 5))
            made.ravel()[places] = special[rng.randint(0, special.size, places.size)]
        with np.errstate(over="ignore"):
            return np.asarray(made).astype(F16).astype(dtype)

    def symbol(self, mx, attrs):
        from mxnet._ctypes.symbol import _symbol_creator
        handle = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.NNGetOpHandle(self.name.encode(), ctypes.byref(handle)))
        self.handle = handle.value
        return _symbol_creator(handle.value, None, {}, list(attrs), list(attrs.values()), "fuzz",
                               False)

    def __str__(self):
        inputs = ", ".join(f"{n[5:]} {t}{list(s)}" for n, t, s in zip(
            self.names, self.types, self.shapes)) if hasattr(self, "types") else self.first
        said = [word for word in ("training", "backward", "np_shape", "special")
                if getattr(self, word)]
        said += [word for word in ("wraps", "shares") if getattr(self, word)
                 and self.how != "imperative"] + ["parts"] * self.parts
        return f"seed {self.seed}: {self.name}({inputs}) {self.attrs} {self.how}, " \
               f"{self.place}, {' '.join(said)}"


# ---- running it ------------------------------------------------------------------------------


class Runner:
    """Runs calls in this process."""

    def __init__(self):
        sys.path.insert(0, str(ROOT / "tests"))
        import gluon_amp  # noqa: F401
        import mxnet as mx
        import numpy as np
        from gluon_amp.cpu import library
        from gluon_amp.graph.operators import COLUMNS
        self.mx, self.np, self.library, self.constants = mx, np, library, COLUMNS["constants"]
        self.operators = sorted(self._operators())

    def _operators(self):
        """MXNet's operators that dispatch on type, and descriptions of their arguments."""
        for name in self.library.operators():
            if not any(re.search(pattern, name) for pattern in NOT_DRAWN):
                arguments = self.mx.operator.get_operator_arguments(name)
                yield name, [*zip(arguments.names, arguments.types)]

    def reference_attrs(self, call):
        """The attributes for float32: constants rounded to float16."""
        made = dict(call.attrs)
        for key, value in call.attrs.items():
            if {key, f"{call.name}.{key}"} & self.constants and value != "None":
                with self.np.errstate(over="ignore"):
                    made[key] = repr(float(self.np.float16(float(value))))
            if key in ("dtype", "out_dtype") and value == F16:
                made[key] = F32
        if call.name == "_npi_nan_to_num":
            for key, limit in (("posinf", 65504), ("neginf", -65504)):
                if made.get(key, "None") == "None":
                    made[key] = str(limit)
        return made

    def array(self, values, part=False):
        """`part`: the rows from 1 on of a larger array, whose other rows are 7."""
        mx, np = self.mx, self.np
        if not part or values.ndim == 0 or values.size == 0:
            return mx.nd.array(values, dtype=values.dtype), None
        whole = mx.nd.array(np.full((values.shape[0] + 3, *values.shape[1:]), 7),
                            dtype=values.dtype)
        whole[1:-2] = mx.nd.array(values, dtype=values.dtype)
        return whole[1:-2], whole

    def heads(self, call, outputs):
        rng = self.np.random.RandomState(call.seed + 1)
        return [rng.standard_normal(o.shape).astype(F16).astype(o.dtype) for o in outputs]

    def invoke(self, call, attrs, arrays, out=None):
        from mxnet._ctypes.ndarray import _imperative_invoke
        made = _imperative_invoke(call.handle, arrays, list(attrs), list(attrs.values()), out,
                                  False, True)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def reference(self, call, halves, fill, into=None):
        """The call in MXNet's float32.

        Args:
            halves: outputs that are float16 in the call; they are rounded before the backward pass
                reads them.
            fill: initial value of gradients.
            into: results whose like it writes into, also initialized with `fill`.
        """
        mx, np = self.mx, self.np
        arrays = [self.array(v.astype(F32) if v.dtype == F16 else v)[0] for v in call.arrays]
        for a, request in zip(arrays, call.requests):
            if request != "null":
                a.attach_grad()
                a.grad[:] = fill
        mx.random.seed(call.seed, ctx=mx.cpu())
        given = None
        if into is not None and not any(o.dtype == bool for o in into):
            given = [mx.nd.array(np.full(o.shape, fill), dtype=o.dtype) for o in into]
        with self._scope(call):
            outputs = self.invoke(call, call.reference_attrs, arrays, given)
        mx.nd.waitall()
        exact = [o.asnumpy() for o in outputs]
        gradients = {}
        if call.backward:
            for o, half in zip(outputs, halves):
                if half and o.dtype == np.float32:
                    with np.errstate(over="ignore"):
                        rounded = o.asnumpy().astype(F16)
                    with mx.autograd.pause():
                        o[:] = mx.nd.array(rounded, dtype=F32)
            mx.autograd.backward(outputs, [mx.nd.array(h, dtype=h.dtype)
                                           for h in self.heads(call, exact)])
            mx.nd.waitall()
            gradients = {i: a.grad.asnumpy() for i, a in enumerate(arrays)
                         if a.grad is not None}
        return exact, gradients, [a.asnumpy() for a in arrays]

    def call(self, call, exact):
        """The call in float16, in its drawn mode."""
        mx = self.mx
        before = [self.np.random.RandomState(call.seed + 2).standard_normal(a.shape).astype(a.dtype)
                  for a in call.arrays]
        held = [self.array(v, call.parts) for v in call.arrays]
        arrays = [a for a, _ in held]
        mx.random.seed(call.seed, ctx=mx.cpu())
        run = {"imperative": self._imperative, "executor": self._executor}.get(
            call.how, self._cached)
        outputs, gradients, shared = run(call, arrays, before, exact)
        mx.nd.waitall()
        for whole in [w for _, w in held if w is not None] + shared:
            rows = whole.asnumpy()
            if not (rows[0] == 7).all() or not (rows[-2:] == 7).all():
                raise AssertionError("it writes beside its arrays")
        return ([o.asnumpy() for o in outputs],
                {i: g.asnumpy() for i, g in gradients.items()}, before,
                [a.asnumpy() for a in arrays])

    def _scope(self, call):
        ag = self.mx.autograd
        return ag.record() if call.backward else ag.train_mode() if call.training \
            else ag.predict_mode()

    def _attach(self, call, arrays, before):
        for a, b, request in zip(arrays, before, call.requests):
            if request != "null":
                a.attach_grad(request)
                a.grad[:] = self.array(b)[0] if request == "add" else 5

    def _heads_of(self, call, outputs, exact):
        """The gradients of the call's outputs, and of those of other readers of its inputs."""
        heads = [self.array(h.astype(o.dtype))[0]
                 for h, o in zip(self.heads(call, exact), outputs)]
        return heads + [self.array(self.np.random.RandomState(call.seed + 2).standard_normal(
            o.shape).astype(F16).astype(call.low))[0] for o in outputs[len(exact):]]

    def _backward(self, call, arrays, outputs, exact):
        self.mx.autograd.backward(outputs, self._heads_of(call, outputs, exact))
        return {i: a.grad for i, a in enumerate(arrays) if a.grad is not None}

    def _imperative(self, call, arrays, before, exact):
        out, shared = None, []
        if call.place == "input" and not call.backward and len(exact) == 1:
            fits = [a for a, t, s in zip(arrays, call.types, call.shapes)
                    if [t] == (call.out_types or ())[:1] and s == exact[0].shape
                    and exact[0].size]
            out = [call.draw.choice(fits)] if fits else None
        elif call.place in ("given", "part") and all(e.dtype != bool for e in exact):
            made = [self.array(self.np.full(e.shape, 3, t), call.place == "part")
                    for e, t in zip(exact, call.out_types or [F16] * 99)]
            out, shared = [o for o, _ in made], [w for _, w in made if w is not None]
        if call.backward:
            self._attach(call, arrays, before)
        call.overwritten = out if call.place == "input" else None
        with self._scope(call):
            outputs = self.invoke(call, call.attrs, arrays, out)
        gradients = self._backward(call, arrays, outputs, exact) if call.backward else {}
        return outputs, gradients, shared

    def _graph(self, call):
        """The operator between multiplications by 1, so that arrays share memory."""
        sym = self.mx.sym
        node = call.symbol(self.mx, call.attrs)
        halves = [i for i, (n, t) in enumerate(zip(call.names, call.types))
                  if t == call.low and n not in call.auxiliary]
        call.shared = halves if call.shares and call.wraps else []
        if not call.wraps or not halves:
            return node
        wrapped = {call.names[i]: sym.var(call.names[i]) * 1 for i in halves}
        node = node(**wrapped)
        outputs = [o * 1 if t == call.low else o for o, t in zip(node, call.out_types)]
        others = [wrapped[call.names[i]] * 1 for i in call.shared]
        return sym.Group([*outputs, *others])

    def _cached(self, call, arrays, before, exact):
        graph = self._graph(call)
        order = [call.names.index(n) for n in graph.list_inputs()]
        flags = [("static_alloc", True), ("static_shape", True)] if call.how == "static" else []
        op = self.mx.nd.CachedOp(graph, [("data_indices", list(range(len(order)))),
                                         ("param_indices", []), *flags])
        if call.backward:
            self._attach(call, arrays, before)
        with self._scope(call):
            outputs = op(*(arrays[i] for i in order))
        outputs = outputs if isinstance(outputs, list) else [outputs]
        gradients = self._backward(call, arrays, outputs, exact) if call.backward else {}
        return outputs[:len(exact)], gradients, []

    def _executor(self, call, arrays, before, exact):
        mx, graph = self.mx, self._graph(call)
        by_name = dict(zip(call.names, arrays))
        requests = dict(zip(call.names, call.requests))
        gradients = {n: self.array(b if requests[n] == "add" else self.np.full_like(b, 5))[0]
                     for n, b in zip(call.names, before)
                     if call.backward and requests[n] != "null"}
        executor = graph.bind(
            mx.cpu(), {n: by_name[n] for n in graph.list_arguments()}, args_grad=gradients,
            grad_req={n: requests[n] if call.backward else "null" for n in graph.list_arguments()},
            aux_states={n: by_name[n] for n in graph.list_auxiliary_states()})
        outputs = executor.forward(is_train=call.training)
        if call.backward:
            executor.backward(self._heads_of(call, outputs, exact))
        return outputs[:len(exact)], {i: gradients[n] for i, n in enumerate(call.names)
                                      if n in gradients}, []

    # ---- comparing

    def wrong(self, found, exact, before, terms):
        """The largest difference from the exact array, rounded once, in units of the type; the
        largest difference of more than one unit (of one unit if there are no others), relative to
        the largest number of the array or of `terms`; and a text with both."""
        np = self.np
        with np.errstate(all="ignore"):
            expected = exact.astype(found.dtype)
            if before is not None:
                expected = (expected.astype(F32) + before.astype(F32)).astype(found.dtype)
            if found.shape != expected.shape:
                return np.inf, np.inf, f"shape {found.shape}, not {expected.shape}"
            kind = {"float16": np.int16, "float32": np.int32, "float64": np.int64}.get(
                found.dtype.name)
            if kind is None:
                steps = np.abs(found.astype(float) - expected.astype(float))
            else:
                def line(x):
                    bits = x.view(kind).astype(object if kind is np.int64 else np.int64)
                    return np.where(bits < 0, -(bits & np.iinfo(kind).max), bits)
                steps = np.abs(line(np.ascontiguousarray(found))
                               - line(np.ascontiguousarray(expected))).astype(float)
                steps = np.where(np.isnan(found) & np.isnan(expected), 0, steps)
                if before is not None:  # the sum may be small relative to its terms
                    own = np.abs(found.astype(float) - expected.astype(float)) \
                        / np.spacing(np.abs(exact.astype(found.dtype))).astype(float)
                    steps = np.where(own < steps, np.ceil(own), steps)
            if not steps.size or not steps.any():
                return 0, 0, ""
            found, expected, exact, steps = map(np.atleast_1d, (found, expected, exact, steps))
            where = np.unravel_index(steps.argmax(), steps.shape)
            finite = np.abs(exact.astype(float))[np.isfinite(exact)]
            gap = np.abs(found.astype(float) - expected.astype(float))
            gap = np.where(np.isnan(gap), np.inf, gap)[steps >= min(steps.max(), 2)]
            share = gap.max() / max(finite.max(initial=0), terms, 1e-30)
            return steps.max(), share, f"{int((steps > 0).sum())} of {steps.size}, as " \
                f"{found[where]!r}, not {expected[where]!r}, at {where}"

    def run(self, seed, phase):
        """The outcome of a call: refused, or a list of differences."""
        mx, np = self.mx, self.np
        call = Call(seed, self.operators)
        with mx.util.np_shape(call.np_shape):
            phase("reference", call.name)
            try:
                call.prepare(mx, np, self.reference_attrs)
                symbol = call.symbol(mx, call.attrs)
                draw = call.draw
                call.requests = [
                    draw.choice(["write", "write", "add", "null"]) if call.backward and
                    n not in call.auxiliary and t in (F16, F32, "float64") else "null"
                    for n, t in zip(call.names, call.types)]
                if call.shares and call.wraps and call.how != "imperative":
                    call.requests = ["write" if r == "add" else r for r in call.requests]
                call.backward = any(r != "null" for r in call.requests)
                if "BatchNorm" in call.name:  # MXNet updates averages backward
                    call.training = call.backward
                call.out_types = self._out_types(call, symbol)
                if F16 not in call.types and F16 not in (call.out_types or ()):
                    raise Refused("no float16")
                if call.out_types is None and len(set(call.types)) > 1:
                    raise Refused("mixed types")
                halves = [t == F16 and call.name not in KEEPS_RESULTS
                          for t in call.out_types or [F16] * 99]
                try:
                    wide = self.reference(call, halves, 5)
                except mx.MXNetError:
                    if not call.backward:
                        raise
                    mx.nd.waitall()
                    call.backward, call.requests = False, ["null"] * len(call.names)
                    wide = self.reference(call, halves, 5)
            except (mx.MXNetError, Refused, ValueError, TypeError, IndexError) as error:
                self._settle()
                return call, "refused", str(error).split("\n")[0][:100]
            phase("call", call.name)
            try:
                found = self.call(call, wide[0])
            except Exception as error:
                self._settle()
                if self._in_float32(call, wide[0])[1] is None:
                    return call, "refused", "in float32, too"
                said = [line for line in str(error).splitlines() if line.strip()] or [""]
                said = next((s for s in said if "rror" in s), said[0])
                return call, "different", [("call", np.inf, np.inf, f"{type(error).__name__}: "
                                            f"{said[:300]}")]
            differences = self._compare(call, found, wide)
            if differences:  # uninitialized memory is not compared
                phase("reference", call.name)
                again = self._again(call, halves, wide)
                differences = self._compare(call, found, wide, again)
            if differences:
                other, found = self._in_float32(call, wide[0])
                also = found and self._compare(other, found, wide, again) or ()
                differences = [d for d in differences if d[0] not in {what for what, *_ in also}]
            phase("done", call.name)
        return call, "different" if differences else "same", differences

    def _in_float32(self, call, exact):
        """The results of MXNet's float32 in the same mode."""
        wide = copy.copy(call)
        wide.low = F32
        wide.attrs = call.reference_attrs
        wide.arrays = [a.astype(F32) if a.dtype == F16 else a for a in call.arrays]
        wide.types = [F32 if t == F16 else t for t in call.types]
        wide.out_types = [F32 if t == F16 else t for t in call.out_types or
                          [e.dtype.name for e in exact]]
        try:
            return wide, self.call(wide, exact)
        except Exception:
            self._settle()
            return wide, None

    def _settle(self):
        with contextlib.suppress(self.mx.MXNetError):
            self.mx.nd.waitall()

    def _out_types(self, call, symbol):
        try:
            _, outputs, _ = symbol.infer_type(**{n: self.np.dtype(t) for n, t in
                                                 zip(call.names, call.types)})
        except self.mx.MXNetError as error:
            raise Refused("its types") from error
        return outputs and [self.np.dtype(t).name for t in outputs]

    def _again(self, call, halves, wide):
        """The reference once more, with other initial memory contents."""
        noise = [self.mx.nd.array(self.np.full(n, 1e30), dtype=F32) for n in range(1, 600)]
        self.mx.nd.waitall()
        del noise
        for into in (wide[0], None):
            try:
                return self.reference(call, halves, 3, into)
            except self.mx.MXNetError:
                self._settle()
        return wide

    def _compare(self, call, found, wide, again=None):
        np, made = self.np, []
        outputs, gradients, before, after = found
        exact, exact_gradients, exact_after = wide

        heads = max((np.abs(h.astype(float)).max() for h in self.heads(call, exact) if h.size),
                    default=0)

        def compare(what, a, b, other, added=None, terms=0):
            if other is not None and other.shape == a.shape == b.shape:
                undefined = ~((b == other) | (b != b) & (other != other))
                a, b = (np.where(undefined, x.dtype.type(0), x) for x in (a, b))
                if added is not None and undefined.any():
                    added = np.where(undefined, 0, added)
            steps, share, said = self.wrong(a, b, added, terms)
            if steps:
                made.append((what, float(steps), float(share), said))

        for i, (a, b) in enumerate(zip(outputs, exact)):
            compare(f"output {i}", a, b, again and again[0][i])
        for i, g in gradients.items():
            added = before[i] if call.requests[i] == "add" else None
            if call.how != "imperative" and i in getattr(call, "shared", ()):
                added = np.random.RandomState(call.seed + 2).standard_normal(g.shape).astype(F16)
            compare(f"gradient {i}", g, exact_gradients[i], again and again[1][i], added, heads)
        if getattr(call, "overwritten", None) is None:
            for i, (a, b) in enumerate(zip(after, exact_after)):
                compare(f"input {i}", a, b, again and again[2][i])
        return made


# ---- explained differences ------------------------------------------------------------------

# (operators, what, steps, share, reason): explains a difference of at most `steps` units, or of
# `share` of the largest number (of the array, or of the gradients of the outputs). For a "call"
# that raises, the error message.
EXPLAINED = [
    ("(_contrib_)?(Sync)?BatchNorm.*", "input 1", 1e99, 0,
     "MXNet's CPU code writes ones into gamma, which it only reads, where fix_gamma is set"),
    ("(_contrib_)?(Sync)?BatchNorm.*", "output|gradient|input [34]", 1, 1e-6,
     "batch norms have code of their own: sums in another order"),
    ("(Layer|Group)Norm|L2Normalization|GridGenerator|CTCLoss|_linalg_(slog)?det"
     "|_npi_average", "gradient", 1, 6e-3, "the backward pass reads a hidden output of the forward "
     "pass, which is float16, too, as on a GPU"),
    ("SpatialTransformer", "gradient", 1e99, 0,
     "it reads the grid, a hidden output, which is float16; the gradient jumps between pixels"),
    ("Activation", "gradient", 1, 1e-3,
     "the gradient reads the rounded result, as cuDNN's does; oneDNN's reads the input"),
    (".*[Cc]onvolution|FullyConnected|(batch_|_np_)?dot|_npi_matmul", "output|gradient", 1, 0,
     "oneDNN adds in another order where an array is a part of another"),
    ("Activation|(log_)?softmax|softmin", "output", 1, 0, "code of its own, right to 1e-7"),
    ("broadcast_.*|_npi_(add|subtract|multiply|true_divide)|softmax|softmin|log_softmax|take",
     "gradient", 1, 1e-6, "code of its own adds up in another order"),
    ("LayerNorm", "output", 1, 1e-6, "code of its own adds up in another order"),
    ("_image_to_tensor", "call", "expected float(16|32), got float", 0,
     "its result is float32, always: MXNet's type inference allows no other reader of its input"),
    ("amp_multicast", "output|gradient", 1e99, 0,
     "MXNet casts float16 arrays, not float32 ones, to the type of a first array of integers"),
    ("LeakyReLU", "output|gradient", 1, 1e-7,
     "gelu has code of its own; its tail is 1 + erf(x), which cancels in float32"),
    ("_contrib_index_copy|scatter_nd", "output", 1e99, 0,
     "several rows go to one place, in any order"),
]


def explanation(name, difference):
    what, steps, share, said = difference
    for row in EXPLAINED:
        names, parts, most, part, _ = row
        if re.fullmatch(names, name) and re.match(parts, what) and (
                re.search(most, said) if what == "call" else steps <= most or share <= part):
            return row
    return None


# ---- processes -------------------------------------------------------------------------------


def work(first, last, stand, outcomes):
    """Runs calls in this process; writes a line for each to a file, and the position to another."""
    runner = Runner()
    file = os.open(stand, os.O_WRONLY | os.O_CREAT)
    for seed in range(first, last):
        def phase(*words, seed=seed):
            os.pwrite(file, " ".join((str(seed), *words)).ljust(80).encode(), 0)

        signal.alarm(LONGEST)
        call, outcome, said = runner.run(seed, phase)
        text = ""
        if outcome == "different":
            rows = [explanation(call.name, d) for d in said]
            unexplained = [d for d, row in zip(said, rows) if row is None]
            outcome, text = ("different", str(call)) if unexplained else ("explained", "")
            said = unexplained or [row[-1] for row in rows]
        with open(outcomes, "a") as rows:
            rows.write(json.dumps([seed, call.name, outcome, call.backward, said, text]) + "\n")


CHECKED = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}  # abort on heap corruption


def process(*words, output=subprocess.DEVNULL, **environment):
    """The exit status of this script in a new process."""
    try:
        return subprocess.run(
            [sys.executable, "-W", "ignore", __file__, *map(str, words)], stdout=output,
            stderr=output, timeout=None if words[0] == "work" else 3 * LONGEST,
            env={**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
                 "MXNET_USE_SIGNAL_HANDLER": "0", "PYTHONPATH": str(ROOT),
                 **environment}).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGALRM


def culprit(first, seed, folder):
    """The call that corrupted the heap of a process, and whether MXNet's float32 code did it."""
    if process("reference", seed, **CHECKED):
        return seed, True
    stand = Path(folder, "checked")
    stand.write_text(f"{seed} call")
    process("work", first, seed + 1, stand, Path(folder, "again"), **CHECKED)
    found, phase, *_ = stand.read_text().split()
    return int(found), phase == "reference" or process("reference", found, **CHECKED) != 0


def run_all(first, last):
    """Outcomes of calls first to last - 1, run in a process, and in another after a crash.

    The call at which a process ends runs again if an earlier one corrupted the heap.
    """
    made = []
    with tempfile.TemporaryDirectory() as folder:
        stand, errors, outcomes = (Path(folder, n) for n in ("stand", "errors", "outcomes"))
        outcomes.touch()
        while first < last:
            stand.write_text(f"{first} start")
            with open(errors, "w") as file:
                status = process("work", first, last, stand, outcomes, output=file)
            if status == 0:
                break
            seed, phase, *name = stand.read_text().split()
            if phase == "start":
                sys.exit(f"no calls ran:\n{errors.read_text()}")
            by, theirs = (seed, True) if phase == "reference" and status != 1 else \
                (seed, False) if status == 1 else culprit(first, int(seed), folder)
            if theirs and int(by) != int(seed):
                first = int(seed)
                continue
            if theirs:
                made.append([int(seed), *name, "refused", False, "MXNet crashes", ""])
            else:
                said = f"signal {-status} in {phase}: {errors.read_text()[-500:]}"
                made.append([int(seed), *name, "different", False, [["call", 0, 0, said]],
                             f"seed {seed}: {name}, damaged by seed {by}"])
            first = int(seed) + 1
        return made + list(map(json.loads, outcomes.read_text().splitlines()))


def main(count, first):
    """Runs this number of calls from a seed on."""
    outcomes, reasons, refused = (collections.Counter() for _ in range(3))
    ran, different, backwards, at, start = set(), [], 0, first, time.time()
    with ThreadPoolExecutor(WORKERS) as pool:
        pending = set()
        while sum(n for o, n in outcomes.items() if o != "refused") < count:
            while len(pending) < WORKERS:
                pending.add(pool.submit(run_all, at, at + CHUNK))
                at += CHUNK
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for seed, name, outcome, backward, said, text in (
                    row for future in done for row in future.result()):
                outcomes[outcome] += 1
                if outcome == "refused":
                    refused[said, name] += 1
                if outcome != "refused":
                    ran.add(name)
                    backwards += backward
                if outcome == "explained":
                    reasons.update(set(said))
                if outcome == "different":
                    different.append(seed)
                    print(text, *(f"\n    {what}: {steps:g} steps, {share:.2g} of the largest: {t}"
                                  for what, steps, share, t in said), flush=True)
        for future in pending:
            future.cancel()
    total = sum(outcomes.values()) - outcomes["refused"]
    print(f"{total:,} calls of {len(ran)} operators, {backwards:,} with a backward pass, in "
          f"{time.time() - start:.0f} s: seeds {first} to {at - 1}, of which MXNet refused "
          f"{outcomes['refused']:,}")
    print(f"{outcomes['same']:,} give float32's results rounded once; {outcomes['explained']:,} "
          f"differ with a reason:")
    for reason, n in reasons.most_common():
        print(f"    {n:6,} {reason}")
    names = {name for name, _ in Runner().operators}
    for what, said in (("MXNet's float32 code crashes in", "MXNet crashes"),
                       ("MXNet's type inference refuses some float16 in", "its types")):
        counts = sorted((n, name) for (s, name), n in refused.items() if s == said)
        print(f"{what}: {', '.join(f'{name} ({n})' for n, name in reversed(counts))}")
    print(f"never run: {', '.join(sorted(names - ran)) or 'none'}")
    sys.exit(f"{len(different)} differ without a reason: seeds {different[:50]}"
             if different else 0)


def reference(seed):
    """Exits at the start of the call."""
    Runner().run(seed, lambda phase, name: phase == "call" and sys.exit())


def one(seed):
    runner = Runner()
    call, outcome, said = runner.run(seed, lambda *phase: None)
    print(call)
    print(outcome, *([said] if outcome == "refused" else
                     [f"\n    {what}: {steps:g} steps, {share:.2g} of the largest: {text}"
                      for what, steps, share, text in said]))
    sys.exit(outcome == "different")


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    elif sys.argv[1] == "reference":
        reference(int(sys.argv[2]))
    elif sys.argv[1] == "one":
        one(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
