"""Calls of each of MXNet's operators: attributes and inputs that it takes."""
import re
from ctypes import POINTER, byref, c_char_p, c_uint, c_void_p

import mxnet as mx
import numpy as np
from gluon_amp.cpu import library
from halves import halves

F16, F32, I32 = np.float16, np.float32, np.int32
LABELS, BOX = np.array([0, 2, 1], F16), np.array([[0, 0, 0, 4, 4]], F16)
IMAGES = (2, 4, 6, 6)
NORM = [(2, 3, 4, 4), *(np.array(v, F32) for v in ([1, 2, 3], [0, 1, 2], [0, 1, 2], [1, 2, 3]))]
KERNEL = {"kernel": (3, 3), "num_filter": 4}
ROI = {"pooled_size": (2, 2), "spatial_scale": 1}

# operator: attributes, inputs (a shape means random halves) unless simple ones work
CASES = {
    "Activation": ({"act_type": "softrelu"},), "Cast": ({"dtype": "float16"},),
    "Concat": ({"num_args": 2, "dim": 0},), "amp_cast": ({"dtype": "float32"},),
    "amp_multicast": ({"num_outputs": 2},), "add_n": ({"num_args": 3},),
    "stack": ({"num_args": 2},), "clip": ({"a_min": -0.5, "a_max": 0.5},),
    "Convolution": (KERNEL, [IMAGES, (4, 4, 3, 3), (4,)]),
    "Convolution_v1": (KERNEL, [IMAGES, (4, 4, 3, 3), (4,)]),
    "Deconvolution": (KERNEL, [IMAGES, (4, 4, 3, 3)]),
    "Embedding": ({"input_dim": 4, "output_dim": 5}, [np.array([0, 3, 1], I32), (4, 5)]),
    "_contrib_SparseEmbedding": ({"input_dim": 4, "output_dim": 5},
                                 [np.array([0, 3, 1], I32), (4, 5)]),
    "FullyConnected": ({"num_hidden": 4}, [(3, 5), (4, 5), (4,)]),
    "GridGenerator": ({"transform_type": "affine", "target_shape": (3, 4)}, [(2, 6)]),
    "LRN": ({"nsize": 3}, [IMAGES]), "SliceChannel": ({"num_outputs": 2},),
    "Pad": ({"mode": "edge", "pad_width": (0, 0, 0, 0, 1, 1, 2, 2)}, [IMAGES]),
    "Pooling": ({"kernel": (2, 2), "pool_type": "avg"}, [IMAGES]),
    "Pooling_v1": ({"kernel": (2, 2), "pool_type": "avg"}, [IMAGES]),
    "Reshape": ({"shape": (-1,)}, [(3, 4)]), "ROIPooling": (ROI, [(1, 3, 8, 8), BOX]),
    "_contrib_ROIAlign": (ROI, [(1, 3, 8, 8), BOX]),
    "_contrib_RROIAlign": (ROI, [(1, 3, 8, 8), np.array([[0, 3, 3, 4, 4, 30]], F16)]),
    "_contrib_PSROIPooling": ({"spatial_scale": 1, "output_dim": 3, "pooled_size": 2,
                               "group_size": 1}, [(1, 3, 8, 8), BOX]),
    "SpatialTransformer": ({"target_shape": (3, 4), "transform_type": "affine",
                            "sampler_type": "bilinear"}, [(2, 3, 4, 5), (2, 6)]),
    "UpSampling": ({"scale": 2, "sample_type": "nearest", "num_args": 1}, [IMAGES]),
    "BatchNorm": ({}, NORM), "_contrib_BatchNormWithReLU": ({}, NORM),
    "_contrib_SyncBatchNorm": ({"key": "k"}, NORM), "BilinearSampler": ({}, [(2, 3, 4, 5),
                                                                           (2, 2, 4, 5)]),
    "GroupNorm": ({}, [(2, 4, 3), (1,), (1,)]), "SequenceMask": ({}, [(4, 3, 2)]),
    "SequenceReverse": ({}, [(4, 3, 2)]), "SVMOutput": ({}, [(3, 4), LABELS]),
    "SequenceLast": ({"use_sequence_length": True}, [(4, 3, 2), np.array([1, 4, 2], F32)]),
    "Correlation": ({"kernel_size": 1, "max_displacement": 2, "pad_size": 2},
                    [(1, 3, 6, 6), (1, 3, 6, 6)]),
    "CTCLoss": ({}, [(5, 2, 4), np.array([[1, 2], [2, 3]], F16)]),
    "SoftmaxOutput": ({}, [(3, 4), LABELS]), "pick": ({}, [(3, 4), LABELS]),
    "softmax_cross_entropy": ({}, [(3, 4), LABELS]),
    "batch_take": ({}, [(3, 4), np.array([0, 2, 1], I32)]),
    "take": ({}, [(3, 4), np.array([0, 2], I32)]), "one_hot": ({"depth": 4, "dtype": "float32"},
                                                              [np.array([0, 2], F16)]),
    "gather_nd": ({}, [(3, 4), np.array([[0, 1], [1, 2]], I32)]),
    "scatter_nd": ({"shape": (4, 3)}, [(2,), np.array([[0, 1], [1, 2]], I32)]),
    "where": ({}, [np.array([[1, 0, 1, 0]] * 3, F16), (3, 4), (3, 4)]),
    "_npi_where": ({}, [np.array([[1, 0, 1, 0]] * 3, F16), (3, 4), (3, 4)]),
    "_contrib_DeformableConvolution": ({"kernel": (3, 3), "num_filter": 2, "pad": (1, 1),
                                        "no_bias": True},
                                       [(1, 2, 5, 5), (1, 18, 5, 5), (2, 2, 3, 3)]),
    "_image_normalize": ({"mean": (1, 2, 3), "std": (1, 2, 3)}, [(3, 4, 4)]),
    "_image_adjust_lighting": ({"alpha": (0.1, 0.2, 0.3)}, [(4, 4, 3)]),
    "_npi_diag_indices_from": ({}, [(4, 4)]), "_contrib_box_encode": (
        {}, [np.ones((2, 3), F16), np.zeros((2, 3), F16), (2, 3, 4), (2, 2, 4), (4,), (4,)]),
    "_npi_insert_tensor": ({"axis": 0}, [(3, 4), (2, 4), np.array([1, 2], np.int64)]),
    "_npi_polyval": ({}, [(4,), (3, 4)]),
    "_contrib_index_copy": ({}, [(5, 3), np.array([4, 1], I32), (2, 3)]),
    "_contrib_box_decode": ({}, [(2, 3, 4), (1, 3, 4)]),
    "_contrib_box_iou": ({}, [(3, 4), (2, 4)]), "_contrib_box_nms": ({}, [(2, 5, 6)]),
    "_contrib_bipartite_matching": ({"threshold": 0.1}, [(3, 4)]),
    "_contrib_interleaved_matmul_selfatt_qk": ({"heads": 2}, [(3, 2, 24)]),
    "_contrib_interleaved_matmul_selfatt_valatt": ({"heads": 2}, [(3, 2, 24), (4, 3, 3)]),
    "_contrib_interleaved_matmul_encdec_qk": ({"heads": 2}, [(3, 2, 8), (4, 2, 16)]),
    "_contrib_interleaved_matmul_encdec_valatt": ({"heads": 2}, [(4, 2, 16), (4, 3, 4)]),
    "_arange": ({"start": 1, "stop": 9},), "_npi_arange": ({"start": 1, "stop": 9},),
    "_eye": ({"N": 3},), "_npi_eye": ({"N": 3},), "_full": ({"value": 1.5, "shape": (3,)},),
    "_linspace": ({"start": 0, "stop": 1, "num": 7},), "_ones": ({"shape": (3,)},),
    "_npi_logspace": ({"start": 0, "stop": 1, "num": 7},), "_zeros": ({"shape": (3,)},),
    "_npi_identity": ({"shape": (3, 3)},), "_npi_indices": ({"dimensions": (2, 3)},),
    "_npi_blackman": ({"M": 5},), "_npi_hamming": ({"M": 5},), "_npi_hanning": ({"M": 5},),
    "_npi_full_like": ({"fill_value": 1.5},),
    "_np_moveaxis": ({"source": (0,), "destination": (1,)},), "_np_roll": ({"shift": 1},),
    "_np_reshape": ({"newshape": (-1,)},), "_npx_reshape": ({"newshape": (-1,)},),
    "_npi_broadcast_to": ({"shape": (2, 3, 4)},), "broadcast_to": ({"shape": (3, 4)}, [(1, 4)]),
    "_npi_dsplit": ({"indices": (0, 1), "axis": 2}, [(2, 3, 4)]),
    "_npi_hsplit": ({"indices": (0, 1), "axis": 1}, [(2, 3, 4)]),
    "_split_v2": ({"indices": (0, 1), "axis": 0},),
    "_npi_einsum": ({"num_args": 2, "subscripts": "ij,kj->ik"},), "_npi_flip": ({"axis": (0,)},),
    "_npi_pad": ({"pad_width": ((1, 1), (0, 2))}, [(3, 4)]),
    "_npi_rot90": ({"k": 1, "axes": (0, 1)},),
    "_npi_tensordot_int_axes": ({"axes": 2}, [(3, 4), (3, 4)]),
    "_npi_tensordot": ({"a_axes_summed": (1,), "b_axes_summed": (1,)}, [(3, 4), (2, 4)]),
    "_npi_insert_slice": ({"start": 0, "stop": 2, "step": 1, "axis": 0},),
    "_npi_insert_scalar": ({"int_ind": 1, "val": 1, "axis": 0},),
    "_ravel_multi_index": ({"shape": (3, 4)}, [np.array([[0, 1], [1, 2]], F16)]),
    "_unravel_index": ({"shape": (3, 4)}, [np.array([3, 7], F16)]),
    "_rnn_param_concat": ({"num_args": 2, "dim": 0}, [(5,), (6,)]),
    "_slice_assign": ({"begin": (0,), "end": (2,)}, [(3, 4), (2, 4)]),
    "_slice_assign_scalar": ({"begin": (0,), "end": (2,)},), "tile": ({"reps": (2, 1)},),
    "slice": ({"begin": (0,), "end": (2,)},), "slice_axis": ({"axis": 0, "begin": 1, "end": 3},),
    "cast_storage": ({"stype": "default"},), "expand_dims": ({"axis": 0},),
    "col2im": ({"output_size": (4, 4), "kernel": (2, 2)}, [(2, 8, 9)]),
    "im2col": ({"kernel": (2, 2)}, [(2, 2, 4, 4)]), "repeat": ({"repeats": 2},),
    "depth_to_space": ({"block_size": 2}, [(2, 4, 3, 3)]), "reverse": ({"axis": (0,)},),
    "space_to_depth": ({"block_size": 2}, [(2, 2, 4, 4)]), "moments": ({"axes": (0,)},),
    "_linalg_maketrian": ({}, [(2, 6)]), "_image_crop": (
        {"x": 0, "y": 0, "width": 2, "height": 2}, [(4, 4, 3)]),
    "_image_flip_left_right": ({}, [(4, 4, 3)]), "_image_flip_top_bottom": ({}, [(4, 4, 3)]),
    "_image_resize": ({"size": (2, 2)}, [(4, 4, 3)]), "_image_to_tensor": ({}, [(4, 4, 3)]),
}

# Operators that are not called here, by a pattern of names, with the reason.
NOT_HERE = {
    "a gradient: called through its operator": ".*backward.*",
    "draws random numbers: below": "(_random|_sample|_image_random)_.*|_shuffle|_npi_powerd|"
        "_npi_(normal|uniform)(_n)?|_npi_(choice|gumbel|logistic|rayleigh|weibull|pareto|"
        "exponential|gamma|bernoulli|multinomial)",
    "has states: in another file": "RNN|Dropout",
    "updates arrays in-place: in another file": ".*_update.*|multi_.*|reset_arrays",
    "is made by MXNet only": "_zeros_without_dtype|_sg_mkldnn_selfatt_.*",
    "takes no float16, as on a GPU":
        "BatchNorm_v1|IdentityAttachKLSparseReg|InstanceNorm|Crop|_contrib_MultiBox.*|"
        "_contrib_(Multi)?Proposal|_linalg_(slog)?det|_npi_(around|eigh?|eigvalsh?|solve)|"
        "_npi_(pinv(_scalar_rcond)?|tensorinv|tensorsolve)|_contrib_hawkesll",
    "takes integers": "_npi_(bitwise_.*|lcm.*|bincount)|_npx_constraint_check|_cv.*|"
        "_contrib_(de|re)?quanti.*|_contrib_calibrate_entropy",
    "takes sparse arrays": "_contrib_dgl_.*|_contrib_edge_id|_contrib_getnnz|_sparse_retain|"
        "_square_sum",
    "runs on GPUs only": "_contrib_(fft|ifft|count_sketch|ModulatedDeformableConvolution|"
        "DeformablePSROIPooling)",
}
# Operators without gradients here, in float32 either, with the reason.
NO_GRADIENT = {
    "reads no arrays": "_arange|_eye|_full|_linspace|_ones|_zeros|"
        "_npi_(arange|blackman|eye|hamming|hanning|identity|indices|logspace|ones|zeros)",
    "MXNet registers none": "_contrib_RROIAlign|_grad_add|_histogram|_npi_insert_.*|"
        "_slice_assign(_scalar)?|all_finite|argmax_channel|batch_take|khatri_rao",
    "MXNet's fails": "_contrib_(SparseEmbedding|allclose)|_image_(resize|to_tensor)|"
        "_npi_r?copysign_scalar|softmax_cross_entropy|sort",
}
OPERATORS = sorted(library.operators())
HERE = [name for name in OPERATORS if not any(re.fullmatch(p, name) for p in NOT_HERE.values())]
# Their backward passes read rounded hidden results: tolerance relative to the largest gradient.
HIDDEN = {"CTCLoss": 2e-3, "GridGenerator": 1e-3, "GroupNorm": 1e-2, "L2Normalization": 1e-3,
          "LayerNorm": 5e-3, "SpatialTransformer": 1e-2, "_npi_average": 5e-3, "_npi_norm": 1e-3}


# ---- calls of operators ---------------------------------------------------------------


def handle(name):
    found = c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(c_char_p(name.encode()), byref(found)))
    return found


def described(name):
    """The primary name of an operator, and the attribute with the number of its inputs, if any."""
    texts, lists, count = [c_char_p() for _ in range(4)], [POINTER(c_char_p)() for _ in "123"], \
        c_uint()
    mx.base.check_call(mx.base._LIB.MXSymbolGetAtomicSymbolInfo(
        handle(name), byref(texts[0]), byref(texts[1]), byref(count), *map(byref, lists),
        byref(texts[2]), byref(texts[3])))
    return texts[0].value.decode(), (texts[2].value or b"").decode()


def number_of_inputs(name, attributes):
    keys, values = ((c_char_p * len(attributes))(*(str(word).encode() for word in words))
                    for words in (attributes, attributes.values()))
    found = c_void_p()
    mx.base.check_call(mx.base._LIB.MXSymbolCreateAtomicSymbol(
        handle(name), len(attributes), keys, values, byref(found)))
    symbol = mx.sym.Symbol(mx.base.SymbolHandle(found.value))
    symbol._compose(name="op")
    return len(symbol.list_inputs())


def candidates(name, rng):
    """Attributes and inputs to try."""
    attributes, *inputs = CASES.get(name, ({},))
    if inputs:
        yield attributes, [halves(rng, *i) if isinstance(i, tuple) else i for i in inputs[0]]
        return
    _, key = described(name)
    if key:
        attributes = {key: 2, **attributes}
    count = attributes[key] if key else number_of_inputs(name, attributes)
    positive = rng.standard_normal((2, 4, 4))
    positive = (positive @ positive.transpose(0, 2, 1) + 2 * np.eye(4)).astype(F16)
    yield attributes, [halves(rng, 3, 4) for _ in range(count)]
    yield attributes, [rng.uniform(0.1, 0.9, (2, 3, 4, 4)).astype(F16) for _ in range(count)]
    yield attributes, [positive for _ in range(count)]
    yield attributes, [rng.uniform(0.1, 0.9, 5).astype(F16) for _ in range(count)]
