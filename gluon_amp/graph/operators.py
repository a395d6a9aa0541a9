"""The table of MXNet's operators: the format in which each runs, its family, and what else is true
of some. Every other file reads these facts here, and so does the engine (`engine_columns`).

An operator precedes its names in numpy's namespaces (`_np_*`, `_npi_*`, `_npx_*`).
Operators that are not in the table, such as a user's own, run in the type of their inputs (INPUTS),
or in float32 if they mutate an input.
If MXNet does not accept a mixture of types, they run in the widest type among the activations, to
which parameters are cast.
"""
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, FrozenSet, Iterable, List, Set, Tuple

from .._mxnet import np
from ..formats import FORMATS, Format
from .graph import Graph, Node, mutated_inputs

# The format in which an operator runs.
PRODUCT = "product"        # the policy's format for products
BATCHED = "batched product"  # the policy's format for batched products; the result as a product's
WITHIN = "float32 within"  # float32 under every policy; the result gets the type of the data
NORM = "norm"              # the policy's format for norms; the result gets the type of the data
BATCH_NORM = "batch norm"  # any data, float32 statistics, by MXNet's own operator
SENSITIVE = "sensitive"    # the policy's format for softmax, exponents, large sums
LOSS = "loss"              # float32 under every policy; its gradient ignores the incoming one
FLOAT32 = "float32"        # float32 under every policy
INDICES = "indices"        # the same, and so do operators that only read such results
CONSTANT = "constant"      # no inputs: created in the type of its consumer
INPUTS = "inputs"          # the type of its inputs


@dataclass(frozen=True)
class Rule:
    """The format in which an operator runs, the reason, and the kind of operator."""
    runs: str
    why: str
    family: str


_TABLE = (
    (PRODUCT, "product", "the work of matrix units", """
        Convolution Convolution_v1 Deconvolution FullyConnected RNN
        dot _np_dot  _npi_tensordot _npi_tensordot_int_axes _npi_einsum
        _contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution
        _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
        _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
    """),
    (BATCHED, "product", "GPU libraries accumulate batched float16 products in float16", """
        batch_dot _npi_matmul
    """),
    (BATCHED, "product", "MXNet has no float16 kernel for it on a GPU", """
        _linalg_gemm _linalg_gemm2
    """),
    (WITHIN, "rearrangement", "MXNet has no float16 kernel for it on a GPU", """
        _linalg_extractdiag _linalg_extracttrian _linalg_makediag _linalg_maketrian
        Crop sort topk _npi_unique
    """),
    (BATCH_NORM, "batch_norm", "float16 data beside float32 statistics", """
        BatchNorm CuDNNBatchNorm BatchNorm_v1 _contrib_BatchNormWithReLU _contrib_SyncBatchNorm
    """),
    (NORM, "norm", "squares, sums and divisions", """
        LayerNorm GroupNorm InstanceNorm L2Normalization LRN
    """),
    (LOSS, "loss", "it starts the backward pass, and float16 rounds class indices above 2048", """
        SoftmaxOutput LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput
        SVMOutput MakeLoss make_loss
    """),
    (SENSITIVE, "softmax", "exponents: softmax and losses", """
        softmax log_softmax softmin SoftmaxActivation softmax_cross_entropy smooth_l1 CTCLoss
    """),
    (SENSITIVE, "function", "exponents, poles and steep functions", """
        exp _npi_exp  expm1 _npi_expm1  degrees _npi_degrees  log _npi_log  log10 _npi_log10
        log2 _npi_log2  log1p _npi_log1p  sinh _npi_sinh  cosh _npi_cosh  tan _npi_tan
        arcsin _npi_arcsin  arccos _npi_arccos  arctanh _npi_arctanh  erfinv gamma gammaln
        _random_pdf_dirichlet _random_pdf_exponential _random_pdf_gamma _random_pdf_normal
        _random_pdf_generalized_negative_binomial _random_pdf_negative_binomial
        _random_pdf_poisson _random_pdf_uniform _contrib_hawkesll
    """),
    (SENSITIVE, "function", "powers and divisions by small numbers", """
        square _npi_square  reciprocal _npi_reciprocal  rsqrt rcbrt
        _rdiv_scalar _npi_rtrue_divide_scalar  _power broadcast_power _npi_power
        _power_scalar _npi_power_scalar  _rpower_scalar _npi_rpower_scalar
        _hypot broadcast_hypot _npi_hypot  _hypot_scalar
        _npi_ldexp _npi_ldexp_scalar _npi_rldexp_scalar _npi_polyval _contrib_quadratic
    """),
    (SENSITIVE, "sum", "sums of many terms", "sum _np_sum nansum"),
    (SENSITIVE, "reduction", "sums and products of many terms", """
        mean _npi_mean _npi_average  prod _np_prod  nanprod  norm _npi_norm
        moments _npi_std _npi_var  _np_cumsum _np_trace
        khatri_rao _square_sum multi_sum_sq Correlation _contrib_fft _contrib_ifft
        _contrib_count_sketch
    """),
    (SENSITIVE, "factorization", "factorizations and linear solvers", """
        _linalg_det _linalg_gelqf _linalg_inverse _linalg_potrf _linalg_potri _linalg_slogdet
        _linalg_sumlogdiag _linalg_syevd _linalg_syrk _linalg_trmm _linalg_trsm
        _npi_cholesky _npi_eig _npi_eigh _npi_eigvals _npi_eigvalsh _npi_pinv
        _npi_pinv_scalar_rcond _npi_solve _npi_svd _npi_tensorinv _npi_tensorsolve
    """),
    (INDICES, "indices", "indices or counts as floats, which float16 rounds above 2048", """
        argmax _npi_argmax  argmin _npi_argmin
        argmax_channel argsort _contrib_arange_like _contrib_bipartite_matching
        _ravel_multi_index _unravel_index _histogram _npi_bincount _npi_indices
        _random_poisson _random_poisson_like _sample_poisson _random_negative_binomial
        _random_negative_binomial_like _sample_negative_binomial
        _random_generalized_negative_binomial _random_generalized_negative_binomial_like
        _sample_generalized_negative_binomial
    """),
    (INDICES, "boxes", "image coordinates, to a fraction of a pixel", """
        _contrib_MultiBoxPrior _contrib_MultiBoxTarget _contrib_MultiBoxDetection
        _contrib_Proposal _contrib_MultiProposal _contrib_box_decode _contrib_box_encode
        _contrib_box_iou _contrib_box_nms
    """),
    (FLOAT32, "user_code", "the user's Python code", "Custom _NDArray _Native"),
    (FLOAT32, "loss", "float32 moving averages", "IdentityAttachKLSparseReg"),
    (FLOAT32, "function", "MXNet has no float16 kernel for it", "_npi_around"),
    (CONSTANT, "creation", "created in the type of its consumer", """
        _zeros _npi_zeros  _ones _npi_ones  _full _arange _npi_arange  _eye _npi_eye
        _linspace _npi_logspace _npi_identity _npi_blackman _npi_hamming
        _npi_hanning _zeros_without_dtype
    """),
    (INPUTS, "cast", "it converts values", "Cast amp_cast"),
    (INPUTS, "copy", "it copies values", """
        amp_multicast BlockGrad _copy _identity_with_attr_like_rhs _np_copy _npi_share_memory
        _copyto _CrossDeviceCopy cast_storage _contrib_gradientmultiplier _npx_constraint_check
        ones_like zeros_like _npi_full_like shape_array size_array reset_arrays
        _contrib_index_array _contrib_getnnz _npi_diag_indices_from _rnn_param_concat
    """),
    (INPUTS, "reshape", "it copies values, in the same order", """
        Reshape _np_reshape _npx_reshape reshape_like Flatten expand_dims squeeze _np_squeeze
    """),
    (INPUTS, "rearrangement", "it copies its first input's values, or a part of them", """
        Concat _npi_concatenate Pad _npi_pad SliceChannel _split_v2 SwapAxis
        broadcast_axis broadcast_like broadcast_to _npi_broadcast_to
        depth_to_space space_to_depth diag _np_diag _np_diagflat _np_diagonal
        repeat tile reverse _npi_flip _npi_rot90 _np_roll _shuffle _npi_tril
        slice slice_axis slice_like stack _npi_stack _npi_column_stack _npi_dstack _npi_hstack
        _npi_vstack _npi_dsplit _npi_hsplit transpose _np_transpose _np_moveaxis im2col
        _np_atleast_1d _np_atleast_2d _np_atleast_3d
    """),
    (INPUTS, "selection", "it selects values, by indices, lengths or conditions", """
        Embedding _contrib_SparseEmbedding SequenceLast SequenceMask SequenceReverse
        take batch_take pick one_hot gather_nd scatter_nd _scatter_set_nd
        where _npi_where _npi_where_lscalar _npi_where_rscalar _npi_where_scalar2
        _npi_boolean_mask_assign_scalar _npi_boolean_mask_assign_tensor
        _contrib_boolean_mask _contrib_index_copy _contrib_edge_id _sparse_retain
        _npi_delete _npx_nonzero _npi_insert_scalar _npi_insert_slice _npi_insert_tensor
        _slice_assign _slice_assign_scalar
    """),
    (INPUTS, "activation", "elementwise, with a result about as large as its input", """
        Activation LeakyReLU hard_sigmoid softsign erf Dropout
        relu _npx_relu  sigmoid _npx_sigmoid  tanh _npi_tanh
    """),
    (INPUTS, "reduction", "it selects values", "max _np_max min _np_min _npi_percentile"),
    (INPUTS, "function", "one rounding, and a result about as large as its inputs", """
        abs _npi_absolute  arccosh _npi_arccosh  arcsinh _npi_arcsinh  arctan _npi_arctan
        cbrt _npi_cbrt  sqrt _npi_sqrt  sin _npi_sin  cos _npi_cos  radians _npi_radians
        negative _npi_negative  sign _npi_sign  ceil _npi_ceil  floor _npi_floor  fix _npi_fix
        rint _npi_rint  trunc _npi_trunc  round
        clip _contrib_round_ste _contrib_sign_ste _contrib_div_sqrt_dim _npi_nan_to_num
        _mod broadcast_mod _npi_mod  _mod_scalar _npi_mod_scalar  _rmod_scalar _npi_rmod_scalar
        _maximum broadcast_maximum _maximum_scalar  _minimum broadcast_minimum _minimum_scalar
        _npi_arctan2 _npi_arctan2_scalar _npi_rarctan2_scalar
        _npi_copysign _npi_copysign_scalar _npi_rcopysign_scalar
        _npi_diff _npi_ediff1d
    """),
    (INPUTS, "addition", "arithmetic with one rounding", """
        elemwise_add broadcast_add _npi_add _grad_add add_n
        elemwise_sub broadcast_sub _npi_subtract
        _plus_scalar _npi_add_scalar _scatter_plus_scalar
        _minus_scalar _npi_subtract_scalar _scatter_minus_scalar
        _rminus_scalar _npi_rsubtract_scalar
    """),
    (INPUTS, "multiplication", "arithmetic with one rounding", """
        elemwise_mul broadcast_mul _npi_multiply
        elemwise_div broadcast_div _npi_true_divide _scatter_elemwise_div
        _mul_scalar _npi_multiply_scalar  _div_scalar _npi_true_divide_scalar
    """),
    (INPUTS, "comparison", "it returns true or false", """
        _equal broadcast_equal _npi_equal _equal_scalar _npi_equal_scalar
        _not_equal broadcast_not_equal _npi_not_equal _not_equal_scalar _npi_not_equal_scalar
        _greater broadcast_greater _npi_greater _greater_scalar _npi_greater_scalar
        _greater_equal broadcast_greater_equal _npi_greater_equal _greater_equal_scalar
        _npi_greater_equal_scalar
        _lesser broadcast_lesser _npi_less _lesser_scalar _npi_less_scalar
        _lesser_equal broadcast_lesser_equal _npi_less_equal _lesser_equal_scalar
        _npi_less_equal_scalar
        _logical_and broadcast_logical_and _logical_and_scalar
        _logical_or broadcast_logical_or _logical_or_scalar
        _logical_xor broadcast_logical_xor _logical_xor_scalar
        logical_not _npi_logical_not _np_all _np_any _npi_isfinite _npi_isinf _npi_isnan
        _npi_isneginf _npi_isposinf _contrib_allclose all_finite multi_all_finite
    """),
    (INPUTS, "resampling", "means of few values: pooling, image resampling", """
        Pooling Pooling_v1 ROIPooling BilinearSampler SpatialTransformer UpSampling
        col2im _contrib_AdaptiveAvgPooling2D _contrib_BilinearResize2D
        _contrib_DeformablePSROIPooling _contrib_PSROIPooling _contrib_ROIAlign
        _contrib_RROIAlign _cvcopyMakeBorder _cvimresize _image_adjust_lighting _image_crop
        _image_flip_left_right _image_flip_top_bottom _image_normalize _image_random_brightness
        _image_random_color_jitter _image_random_contrast _image_random_flip_left_right
        _image_random_flip_top_bottom _image_random_hue _image_random_lighting
        _image_random_saturation _image_resize _image_to_tensor
    """),
    (INPUTS, "resampling", "coordinates from -1 to 1, accurate to 1/4096 of an image", """
        GridGenerator
    """),
    (INPUTS, "random", "random numbers", """
        _npi_bernoulli _npi_choice _npi_exponential _npi_gamma _npi_gumbel _npi_logistic
        _npi_multinomial _npi_normal _npi_normal_n _npi_pareto _npi_powerd _npi_rayleigh
        _npi_uniform _npi_uniform_n _npi_weibull
        _random_exponential _random_exponential_like _random_gamma _random_gamma_like
        _random_normal _random_normal_like _random_randint _random_uniform _random_uniform_like
        _sample_exponential _sample_gamma _sample_multinomial _sample_normal _sample_uniform
        _sample_unique_zipfian
    """),
    (INPUTS, "integers", "integers", """
        _npi_bitwise_and _npi_bitwise_and_scalar _npi_bitwise_not _npi_bitwise_or
        _npi_bitwise_or_scalar _npi_bitwise_xor _npi_bitwise_xor_scalar _npi_lcm
        _npi_lcm_scalar _contrib_dgl_adjacency _contrib_dgl_csr_neighbor_non_uniform_sample
        _contrib_dgl_csr_neighbor_uniform_sample _contrib_dgl_graph_compact
        _contrib_dgl_subgraph
    """),
    (INPUTS, "control_flow", "nested graphs: each operator within has its own rule", """
        _foreach _while_loop _cond _CachedOp _CachedOpThreadSafe _CustomFunction
    """),
    (INPUTS, "quantization", "it is no part of a network in training", """
        _contrib_calibrate_entropy _contrib_dequantize _contrib_quantize _contrib_quantize_asym
        _contrib_quantize_v2 _contrib_quantized_act _contrib_quantized_batch_norm
        _contrib_quantized_concat _contrib_quantized_conv _contrib_quantized_elemwise_add
        _contrib_quantized_elemwise_mul _contrib_quantized_embedding _contrib_quantized_flatten
        _contrib_quantized_fully_connected _contrib_quantized_pooling _contrib_quantized_rnn
        _contrib_requantize _sg_mkldnn_conv _sg_mkldnn_fully_connected _sg_mkldnn_selfatt_qk
        _sg_mkldnn_selfatt_valatt
    """),
    (INPUTS, "update", "it is no part of a network, but an optimizer's", """
        _adamw_update _contrib_group_adagrad_update _mp_adamw_update _multi_adamw_update
        _multi_lamb_update _multi_mp_adamw_update _multi_mp_lamb_update _sparse_adagrad_update
        adam_update ftml_update ftrl_update lamb_update_phase1 lamb_update_phase2
        mp_lamb_update_phase1 mp_lamb_update_phase2 mp_nag_mom_update mp_sgd_mom_update
        mp_sgd_update multi_lars multi_mp_sgd_mom_update multi_mp_sgd_update
        multi_sgd_mom_update multi_sgd_update nag_mom_update preloaded_multi_mp_sgd_mom_update
        preloaded_multi_mp_sgd_update preloaded_multi_sgd_mom_update preloaded_multi_sgd_update
        rmsprop_update rmspropalex_update sgd_mom_update sgd_update signsgd_update signum_update
    """),
)

# Columns that few operators have. A word such as @reshape stands for a family.
_COLUMNS = {
    # elementwise: all inputs have the same shape, and no axis has a meaning
    "elementwise": """
        Activation LeakyReLU relu sigmoid tanh clip Dropout hard_sigmoid erf negative abs square
        sqrt _copy BlockGrad _mul_scalar _plus_scalar _minus_scalar _rminus_scalar _div_scalar
        _rdiv_scalar _power_scalar _maximum_scalar _minimum_scalar
        elemwise_add elemwise_sub elemwise_mul elemwise_div add_n _grad_add
        _npx_relu _npx_sigmoid _npi_tanh _npi_negative _npi_absolute _npi_square _npi_sqrt
        _npi_multiply_scalar _npi_add_scalar _npi_subtract_scalar _npi_rsubtract_scalar
        _npi_true_divide_scalar _npi_rtrue_divide_scalar
    """,
    # the same for inputs that broadcast, such as one number for each channel
    "broadcasting": """
        broadcast_add broadcast_sub broadcast_mul broadcast_div broadcast_maximum broadcast_minimum
        _npi_add _npi_subtract _npi_multiply _npi_true_divide
    """,
    # the result may be sparse if an input is
    "may_be_sparse": """
        relu negative abs sign round rint ceil floor trunc fix square sqrt cbrt log1p expm1
        sin tan arcsin arctan degrees radians sinh tanh arcsinh arctanh clip
        _mul_scalar _div_scalar _maximum_scalar _minimum_scalar _contrib_quadratic
        elemwise_add elemwise_sub elemwise_mul _grad_add add_n broadcast_mul broadcast_div
        _copy _identity_with_attr_like_rhs BlockGrad make_loss zeros_like
        _contrib_gradientmultiplier slice Concat _sparse_retain _square_sum
        _scatter_elemwise_div _scatter_plus_scalar _scatter_minus_scalar
    """,
    "no_float16_kernel": "BatchNorm_v1 _contrib_SyncBatchNorm _linalg_gemm _linalg_gemm2",
    "no_float64": "InstanceNorm LRN",
    # the gradient of each input is that of the output, without an operator
    "hands_on": "elemwise_add",
    "transpose": "transpose _np_transpose",
    "convolution": "Convolution Deconvolution",
}
# The same for the engine, which reads them at its start, with operators of backward passes
# (cpu/dispatch/traits.h).
_OF_ENGINE = {
    "runs_in_mxnet": """
        @control_flow _backward_foreach _backward_while_loop _backward_cond _backward_CachedOp
        @user_code _backward_Custom _backward_CustomFunction _backward__NDArray _backward__Native
        _copyto _CrossDeviceCopy _backward__CrossDeviceCopy
        _contrib_boolean_mask _backward_contrib_boolean_mask _npi_delete _npi_unique
        _npx_nonzero _npi_share_memory _npi_bincount _npi_boolean_mask_assign_scalar
        _npi_boolean_mask_assign_tensor _scatter_set_nd
    """,
    "moves": """
        @reshape BlockGrad _copy _zeros _zeros_without_dtype _ones _full _eye zeros_like ones_like
    """,
    "widens": "@update all_finite multi_all_finite multi_sum_sq",
    "leaves_outputs": """
        _backward_SoftmaxOutput _backward_SVMOutput _backward_linear_reg_out
        _backward_logistic_reg_out _backward_mae_reg_out _backward_ctc_loss
        _backward_SequenceMask _backward_SequenceLast _backward_SequenceReverse
        _backward_npi_einsum _backward__contrib_MultiBoxTarget _contrib_backward_index_copy
    """,
    "leaves_input": """
        _image_flip_left_right _image_flip_top_bottom _image_random_flip_left_right
        _image_random_flip_top_bottom _image_adjust_lighting _image_random_lighting
    """,
    "refuses_float16": """
        Crop IdentityAttachKLSparseReg _contrib_MultiBoxPrior _contrib_MultiBoxTarget
        _contrib_MultiBoxDetection _contrib_Proposal _contrib_MultiProposal _linalg_det
        _linalg_slogdet _npi_eig _npi_eigh _npi_eigvals _npi_eigvalsh _npi_solve
        _npi_pinv _npi_pinv_scalar_rcond _npi_tensorinv _npi_tensorsolve _npi_around
    """,
    "refuses_empty": """
        RNN _backward_RNN SequenceLast _backward_SequenceLast _backward_SequenceMask
        _backward_SequenceReverse take batch_take pick gather_nd _np_diagflat _npi_percentile
        _npi_pad _contrib_index_copy BatchNorm BatchNorm_v1 _contrib_BatchNormWithReLU
        _contrib_SyncBatchNorm _contrib_bipartite_matching _contrib_Proposal _contrib_MultiProposal
        _contrib_PSROIPooling _contrib_ModulatedDeformableConvolution
        _backward__contrib_ModulatedDeformableConvolution
    """,
    "refuses_empty transpose_a transpose_b": "dot",  # if one of these attributes is true
    "refuses_empty returned": "_npi_average",
    "refuses_empty_for_integers": "moments _npi_std _npi_var",
    "checks_indices": "take",
    "pushes_weight": "Convolution Deconvolution FullyConnected",
    "has_parameters": """
        Convolution FullyConnected
        _backward_Convolution _backward_FullyConnected _backward_backward_FullyConnected
    """,
    "forgets_bias": "_backward_FullyConnected",
    "casts": "@cast amp_multicast",
    "user_code": "@user_code",
    # the indices of the inputs that are moving averages, which it updates
    "moving_averages 3 4": "@batch_norm",
    "moving_averages 6 7": "_backward_BatchNorm _backward_contrib_BatchNormWithReLU",
    "moving_averages 5 6": "_backward__contrib_SyncBatchNorm _backward_BatchNorm_v1",
    "moving_averages 1": "IdentityAttachKLSparseReg",
    "moving_averages 2": "_backward_IdentityAttachKLSparseReg",
    # Attributes with constants, which float16 kernels round to float16 as on a GPU; and those of
    # single operators: in others "start" and "stop" are indices.
    "constants": """
        scalar value a_min a_max slope fill_value val constant_value on_value off_value nan posinf
        neginf to_begin_scalar to_end_scalar _arange.start _arange.stop _npi_arange.start
        _npi_arange.stop _linspace.start _linspace.stop _npi_logspace.start _npi_logspace.stop
    """,
}

OPERATORS: Dict[str, Rule] = {name: Rule(runs, why, family) for runs, family, why, names in _TABLE
                              for name in names.split()}


@lru_cache(maxsize=None)
def family(*families: str) -> FrozenSet[str]:
    """Returns the operators of these families."""
    return frozenset(name for name, rule in OPERATORS.items() if rule.family in families)


def _operators(text: str) -> FrozenSet[str]:
    return frozenset(name for word in text.split()
                     for name in (family(word[1:]) if word[0] == "@" else [word]))


def with_format(runs: str) -> FrozenSet[str]:
    """Returns the operators that run in this format."""
    return frozenset(name for name, rule in OPERATORS.items() if rule.runs == runs)


def engine_columns() -> str:
    """Returns the engine's columns: for each a line of its name, and a line of operators."""
    return "".join(f"{column}\n{' '.join(sorted(_operators(text)))}\n"
                   for column, text in _OF_ENGINE.items())


COLUMNS: Dict[str, FrozenSet[str]] = {
    column: _operators(text) for column, text in {**_COLUMNS, **_OF_ENGINE}.items()}
_AVERAGES = {op: tuple(map(int, column.split()[1:])) for column, names in COLUMNS.items()
             for op in names if column.startswith("moving_averages")}
AVERAGING = frozenset(OPERATORS) & frozenset(_AVERAGES)  # operators with moving averages

# Operators that run in another format if an attribute has one of these values; None: not given.
_WHEN = {
    "Activation": ("act_type", ("softrelu",), SENSITIVE),
    "LeakyReLU": ("act_type", ("elu", "selu"), SENSITIVE),
    "Pooling": ("pool_type", ("sum", "lp"), SENSITIVE),
    "topk": ("ret_typ", (None, "indices", "both"), INDICES),
}

# Operators and attributes whose numbers are rounded to the type in which the operator computes.
_COUNTING = ("_arange", "_npi_arange", "_linspace")
_DIVISIONS = ("_div_scalar", "_npi_true_divide_scalar")
_RANGE = ("low", "high", "loc", "scale")  # attributes of random operators

NORMS, BATCH_NORMS, LOSSES, CONSTANTS = map(with_format, (NORM, BATCH_NORM, LOSS, CONSTANT))
NOT_CREATED = {"bfloat16": frozenset(["_eye", "_npi_eye"])}  # MXNet refuses the type
PRODUCTS, CASTS, USER_CODE = map(family, ("product", "cast", "user_code"))
# Operators that ignore the incoming gradient, or add to it; and those through which none passes.
HEADS = family("loss")
STOPS = frozenset(["BlockGrad", "zeros_like", "ones_like"])
# Operators that draw a mask or update statistics, so that a second call has another result.
RUN_ONCE = BATCH_NORMS | {"Dropout"}
# The attribute with an operator's axis, and its default.
AXES = {"Concat": ("dim", "1"), "slice_axis": ("axis", ""), "SliceChannel": ("axis", "1"),
        "BatchNorm": ("axis", "1"), "_npi_concatenate": ("axis", "0")}


def axis_of(node: Node) -> int:
    """Returns the axis of an operator in AXES."""
    key, default = AXES[node.op]
    return int(node.attrs.get(key, default))


def is_relu(node: Node) -> bool:
    return node.op in ("relu", "_npx_relu") or node.attrs.get("act_type") == "relu"


def norm_variables(graph: Graph) -> Set[str]:
    """Returns the variables that batch norms read besides data."""
    return graph.mutated(lambda node: range(1, 5) if node.op in BATCH_NORMS else ())


def moving_averages(graph: Graph) -> Set[str]:
    """Returns the variables that are moving averages of MXNet's operators."""
    return graph.mutated(lambda node: _AVERAGES.get(node.op, ()))


def runs_in(node: Node) -> str:
    """Returns a node's rule: one of the constants above."""
    key, values, runs = _WHEN.get(node.op, ("", (), ""))
    if node.attrs.get(key) in values:
        return runs
    runs = OPERATORS[node.op].runs if node.op in OPERATORS else INPUTS
    return FLOAT32 if runs == INPUTS and mutated_inputs(node) else runs  # its states are float32


def gives_back(node: Node) -> bool:
    """Whether a node's result is cast back to the type of its data."""
    runs = runs_in(node)
    return runs in (NORM, WITHIN) or runs == BATCH_NORM and node.op in COLUMNS["no_float16_kernel"]


def numbers(node: Node) -> Iterable[Tuple[str, float]]:
    """Yields the constants in a node's attributes: the attribute's name, and the number."""
    for key, value in node.attrs.items():
        if key in COLUMNS["constants"] or f"{node.op}.{key}" in COLUMNS["constants"]:
            try:
                yield key, float(value)
            except ValueError:  # such as "None"
                continue


# Attributes with the values that nan_to_num and clip write.
BOUNDS = {"clip": ("a_min", "a_max"), "_npi_nan_to_num": ("neginf", "posinf", "nan")}


def bounded(node: Node, format_: Format) -> Dict[str, str]:
    """Returns the attributes of a node in BOUNDS, clipped to the finite range of the format."""
    attrs, largest = dict(node.attrs), FORMATS["float32"].largest
    unsaid = {"neginf": -largest, "posinf": largest}
    for key in BOUNDS[node.op]:
        given = attrs.get(key, "None")
        number = unsaid.get(key, 0.0) if given == "None" else float(given)
        if format_.largest < abs(number) < math.inf:
            attrs[key] = repr(math.copysign(format_.largest, number))
    return attrs


def _made_of_numbers(node: Node) -> List[float]:
    """Returns the numbers that a node computes from its constants alone: the reciprocal of a
    divisor, the ends of a logarithmic range, those of random numbers."""
    constants = [number for _, number in numbers(node)]
    if node.op in _DIVISIONS:
        return [1 / number for number in constants if number]
    if node.op == "_npi_logspace":
        return [float(np.power(float(node.attrs.get("base", 10)), number)) for number in constants]
    if node.op.startswith("_random_") or not node.inputs:
        return [float(node.attrs[key]) for key in _RANGE if node.attrs.get(key, "None") != "None"]
    return []


def holds_numbers(node: Node, format_: Format) -> bool:
    """Whether the format holds the node's constants.

    No finite constant becomes infinite, no other constant becomes 0, and ranges such as
    arange stay within the integers that the format represents exactly.
    """
    constants = [number for _, number in numbers(node)] + _made_of_numbers(node)
    if node.op in _COUNTING and max(map(abs, constants), default=0) > format_.counts_to:
        return False
    return not constants or format_.keeps(constants)
