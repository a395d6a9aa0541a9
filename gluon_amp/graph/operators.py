"""Which operators run in what type. Names are those of MXNet's graphs.

What is in no list runs in the type of its inputs, and where MXNet does not take
a mixture, in the widest type among the activations (parameters follow them).
"""

# The work of matrix units: inputs are cast to the low type.
LOW = frozenset("""
    Convolution Deconvolution FullyConnected RNN dot batch_dot
    _contrib_DeformableConvolution _contrib_ModulatedDeformableConvolution
    _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
    _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
    _linalg_gemm _linalg_gemm2 linalg_gemm linalg_gemm2
    _np_dot _npi_matmul _npi_tensordot _npi_tensordot_int_axes
""".split())

# Normalizations. The batch norms take float16 data beside float32 statistics
# themselves; the others run in float32 and hand back the type of their data.
BATCH_NORM = frozenset("""
    BatchNorm BatchNorm_v1 _contrib_BatchNormWithReLU _contrib_SyncBatchNorm
""".split())
NORM = frozenset("LayerNorm GroupNorm InstanceNorm L2Normalization LRN".split())

# Sums of many terms, exponents and what divides by small numbers: float32.
FLOAT32 = frozenset("""
    softmax log_softmax softmin SoftmaxActivation
    SoftmaxOutput LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput SVMOutput
    softmax_cross_entropy smooth_l1 MakeLoss make_loss CTCLoss IdentityAttachKLSparseReg
    exp expm1 log log10 log2 log1p sinh cosh tan arcsin arccos arctanh erfinv gamma gammaln
    square reciprocal rsqrt rcbrt _rdiv_scalar _power _power_scalar _rpower_scalar broadcast_power
    _hypot _hypot_scalar broadcast_hypot _square_sum
    sum mean prod nansum nanprod norm moments khatri_rao cumsum _np_sum _np_cumsum _npi_mean
    _linalg_potrf _linalg_potri _linalg_sumlogdiag _linalg_syevd _linalg_syrk _linalg_trmm
    _linalg_trsm _linalg_gelqf _linalg_inverse _linalg_det _linalg_slogdet
    _contrib_MultiBoxPrior _contrib_MultiBoxTarget _contrib_MultiBoxDetection _contrib_fft
    _contrib_ifft _contrib_count_sketch _contrib_hawkesll Custom
""".split())

# Losses, whose backward starts gradients by itself, whatever comes from above: float32 under
# every policy, since class numbers above 2048 are no float16 numbers.
LOSS = frozenset("""
    SoftmaxOutput LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput SVMOutput
    MakeLoss make_loss
""".split())

# Float32 only for these values of an attribute.
FLOAT32_WHEN = {
    "Activation": ("act_type", frozenset(["softrelu"])),
    "LeakyReLU": ("act_type", frozenset(["elu", "selu"])),
}

# Have a type and no inputs.
CONSTANT = frozenset("_zeros _ones _full _arange _eye _linspace".split())
