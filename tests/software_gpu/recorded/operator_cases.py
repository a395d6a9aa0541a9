"""Attributes and inputs for each operator of the table, or the reason why it is not called."""
import re

import mxnet as mx
import numpy as np
from gluon_amp.cpu import library
from gluon_amp.graph.build import build, cached_op
from gluon_amp.graph.casts import insert_casts
from gluon_amp.graph.graph import Entry, Graph, Node
from gluon_amp.graph.operators import OPERATORS
from gluon_amp.policy import get_policy
from mxnet._ctypes.ndarray import _imperative_invoke
from operator_calls import NORM, candidates, handle

F16, F32 = np.float16, np.float32

# Weights of an RNN. With positive ones its gates are nearly 1, and gradients have few digits.
CENTERED = np.random.default_rng(0).uniform(-0.5, 0.5, 576).astype(F16)
# In addition to test_engine_operators.py: (attributes, inputs); a shape means random numbers.
CASES = {
    "RNN": ({"mode": "lstm", "state_size": 8, "num_layers": 1},
            [(3, 2, 8), CENTERED, (1, 2, 8), (1, 2, 8)]),
    "Dropout": ({"p": 0.5}, [(3, 4)]),
    "BatchNorm_v1": ({}, NORM),
    "InstanceNorm": ({}, [(2, 3, 4), (3,), (3,)]),
    "Crop": ({"num_args": 1, "h_w": (2, 2)}, [(1, 2, 4, 4)]),
    "Correlation": ({"kernel_size": 1, "max_displacement": 1}, [(1, 2, 6, 6), (1, 2, 6, 6)]),
    "_contrib_MultiBoxPrior": ({}, [(1, 2, 4, 4)]),
    "_contrib_MultiBoxTarget": ({}, [(1, 4, 4), np.array([[[0, .1, .1, .5, .5]]], F32), (1, 2, 4)]),
    "_contrib_MultiBoxDetection": ({}, [(1, 2, 4), (1, 16), (1, 4, 4)]),
    **dict.fromkeys(("_contrib_Proposal", "_contrib_MultiProposal"), (
        {"rpn_pre_nms_top_n": 12, "rpn_post_nms_top_n": 4, "feature_stride": 16, "scales": (8,),
         "ratios": (1,), "rpn_min_size": 1},
        [(1, 2, 4, 4), (1, 4, 4, 4), np.array([[64, 64, 1]], F32)])),
    "_contrib_fft": ({"compute_size": 128}, [(2, 8)]),
    "_contrib_ifft": ({"compute_size": 128}, [(2, 16)]),
    "_contrib_count_sketch": ({"out_dim": 4}, [(2, 6), (1, 6), np.ones((1, 6), F32)]),
    "_contrib_ModulatedDeformableConvolution": (
        {"kernel": (3, 3), "num_filter": 2, "pad": (1, 1), "no_bias": True},
        [(1, 2, 5, 5), (1, 18, 5, 5), (1, 9, 5, 5), (2, 2, 3, 3)]),
    "_contrib_DeformablePSROIPooling": (
        {"spatial_scale": 1, "output_dim": 3, "group_size": 1, "pooled_size": 2, "no_trans": True},
        [(1, 3, 8, 8), np.array([[0, 0, 0, 4, 4]], F32)]),
    "_contrib_AdaptiveAvgPooling2D": ({"output_size": (2, 2)}, [(1, 2, 4, 4)]),
    "_contrib_BilinearResize2D": ({"height": 6, "width": 6}, [(1, 2, 4, 4)]),
    "_linalg_gemm": ({}, [(2, 3, 4), (2, 4, 5), (2, 3, 5)]),
    "_linalg_gemm2": ({}, [(2, 3, 4), (2, 4, 5)]),
    "_linalg_extractdiag": ({}, [(2, 3, 3)]), "_linalg_makediag": ({}, [(2, 3)]),
    "_linalg_extracttrian": ({}, [(2, 3, 3)]), "_linalg_maketrian": ({}, [(2, 6)]),
    **dict.fromkeys(("batch_dot", "_npi_matmul"), ({}, [(2, 3, 4), (2, 4, 5)])),
    "broadcast_axis": ({"axis": 0, "size": 3}, [(1, 4)]),
    "broadcast_like": ({}, [(1, 4), (3, 4)]),
    **dict.fromkeys(
        [*(f"broadcast_{name}" for name in "add sub mul div mod maximum minimum".split()),
         *(f"_npi_{name}" for name in "add subtract multiply true_divide mod arctan2 copysign"
           .split())], ({}, [(3, 4), (1, 4)])),
    "_npi_where": ({}, [np.array([[1, 0, 1, 0]] * 3, F16), (3, 4), (1, 4)]),
    "multi_sum_sq": ({"num_arrays": 2}, [(3, 4), (3, 4)]),
    "topk": ({"ret_typ": "value"}, [(3, 4)]),
    "_npi_around": ({}, [(3, 4)]), "_npi_solve": ({}, [np.eye(3, dtype=F16), (3, 2)]),
    "_linalg_det": ({}, [(2, 3, 3)]), "_linalg_slogdet": ({}, [(2, 3, 3)]),
    "_random_uniform_like": ({}, [(3, 4)]), "_random_normal_like": ({}, [(3, 4)]),
    "_shuffle": ({}, [(3, 4)]),
    "UpSampling": ({"scale": 2, "sample_type": "nearest", "num_args": 1}, [(1, 2, 4, 4)]),
}

NOT_CALLED = {
    "it updates weights, outside of graphs": r".*_update(_phase[12])?|reset_arrays|multi_lars",
    "it takes sparse arrays": r"_contrib_dgl_.*|_contrib_edge_id|_contrib_getnnz|_sparse_retain|"
        r"_square_sum|cast_storage|_scatter_(elemwise_div|plus_scalar|minus_scalar)",
    "it takes integers": r"_npi_(bitwise_.*|lcm.*|bincount)|_npx_constraint_check|_cv.*|_histogram",
    "the host reads values, which no kernel computes here":
        r"_npi_eig|_npi_eigvals|_npi_unique|_npx_nonzero|_contrib_boolean_mask",
    "MXNet's own does not bind: its gradient has 1 input of 11": "CuDNNBatchNorm",
    "quantized": r"_contrib_(de|re)?quanti.*|_contrib_calibrate_entropy|_sg_.*",
    "the user's own code, or a graph in a graph": r"Custom|_NDArray|_Native|_CachedOp.*|"
        r"_CustomFunction|_foreach|_while_loop|_cond|IdentityAttachKLSparseReg",
    "it writes into its input, or copies between devices": r"_npi_boolean_mask_assign_.*|"
        r"_scatter_set_nd|_zeros_without_dtype|_copyto|_CrossDeviceCopy|_identity_with_attr_like_rhs",
    "it draws random numbers by shapes that are given": r"(_random|_sample|_image_random)_.*|"
        r"_npi_(normal|uniform)(_n)?|_npi_(choice|gumbel|logistic|rayleigh|weibull|pareto|powerd|"
        r"exponential|gamma|bernoulli|multinomial)|_sample_unique_zipfian",
}
CALLED = [name for name in OPERATORS if name in CASES
          or not any(re.fullmatch(p, name) for p in NOT_CALLED.values())]


def cases(name):
    """Attributes and inputs to try."""
    rng = np.random.default_rng(0)
    if name in CASES:
        attributes, inputs = CASES[name]
        yield attributes, [rng.uniform(0.1, 0.9, i).astype(F16) if isinstance(i, tuple) else i
                           for i in inputs]
    else:
        yield from candidates(name, rng)


class Alone:
    """A graph of one operator as a GPU runs it.

    Args:
        policy: None for float32.
    """

    def __init__(self, name, attributes, inputs, policy, context):
        self.context = context
        names = [f"x{i}" for i in range(len(inputs))]
        node = Node(name, "op", {k: str(v) for k, v in attributes.items()},
                    [Entry(Node("null", n)) for n in names])
        wide = policy is None
        self.arrays = {n: mx.nd.array(x, dtype=F32 if wide and x.dtype == F16 else x.dtype,
                                      ctx=context) for n, x in zip(names, inputs)}
        graph = Graph([Entry(node, 0)])
        if policy:
            types = {n: np.dtype(a.dtype).name for n, a in self.arrays.items()}
            policy = get_policy(policy)
            graph = build(insert_casts(graph, types, policy, []), types, policy)
        self.graph, self.symbol = graph, graph.symbol()

    def forward(self):
        made = {}
        for node in self.graph.nodes():
            if node.is_variable:
                made[Entry(node)] = self.arrays[node.name]
                continue
            attributes = {k: v for k, v in node.attrs.items() if not k.startswith("__")}
            if node.settings:
                attributes[library.SETTINGS] = library.settings_attribute(node.settings)
            outputs = _imperative_invoke(
                handle(node.op).value, [made[e] for e in node.inputs], list(attributes),
                list(attributes.values()), None, False, False)
            outputs = outputs if isinstance(outputs, list) else [outputs]
            made.update({Entry(node, i): output for i, output in enumerate(outputs)})
        mx.nd.waitall()

    def backward(self):
        auxiliary = set(self.symbol.list_auxiliary_states())
        for name, array in self.arrays.items():
            if name not in auxiliary and array.dtype in (F16, F32):
                array.attach_grad()
        op, _ = cached_op(self.symbol, self.symbol.list_inputs(), {})
        with mx.autograd.record():
            made = op(*(self.arrays[n] for n in self.symbol.list_inputs()))
        mx.autograd.backward(made)
        mx.nd.waitall()
