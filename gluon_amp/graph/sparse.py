"""Finds csr and row_sparse tensors of a graph.

They stay float32, without casts: MXNet casts dense arrays only, and MXNet's operators would make
dense copies, dense gradients and dense updates of the results of casts.
"""
from typing import Any, Collection, Dict, Iterable, Set

from .._mxnet import mx
from .graph import Graph, Node

_STORAGE = "__storage_type__"  # MXNet's attribute of variables
_SPARSE = {"row_sparse": "1", "csr": "2"}  # its values

# Operators whose results may be sparse if an input is.
_MAY_RETURN = frozenset("""
    relu negative abs sign round rint ceil floor trunc fix square sqrt cbrt log1p expm1
    sin tan arcsin arctan degrees radians sinh tanh arcsinh arctanh clip
    _mul_scalar _div_scalar _maximum_scalar _minimum_scalar _contrib_quadratic
    elemwise_add elemwise_sub elemwise_mul _grad_add add_n broadcast_mul broadcast_div
    _copy _identity_with_attr_like_rhs BlockGrad make_loss zeros_like _contrib_gradientmultiplier
    slice Concat _sparse_retain _square_sum
    _scatter_elemwise_div _scatter_plus_scalar _scatter_minus_scalar
""".split())


def storage_types(arrays: Iterable[Any]) -> Dict[int, str]:
    """Returns the storage types of sparse arrays, by their indices."""
    return {i: array.stype for i, array in enumerate(arrays)
            if isinstance(array, mx.nd.sparse.BaseSparseNDArray)}


def declared(storage: str) -> Dict[str, str]:
    """Returns the attribute that declares a variable row_sparse or csr."""
    return {_STORAGE: _SPARSE[storage]}


def sparse_nodes(graph: Graph, variables: Collection[str] = ()) -> Set[Node]:
    """Returns the variables that are sparse, and the operators whose results may be.

    Args:
        graph: the graph.
        variables: names of sparse variables besides those that are declared.
    """
    found: Set[Node] = set()
    for node in graph.nodes():
        if node.is_variable:
            sparse = node.name in variables or node.attrs.get(_STORAGE) in _SPARSE.values()
        else:
            sparse = node.op in _MAY_RETURN and any(e.node in found for e in node.inputs) \
                or any(node.attrs.get(key) in _SPARSE for key in ("stype", "forward_stype"))
        if sparse:
            found.add(node)
    return found


def touches_sparse(node: Node, sparse: Collection[Node]) -> bool:
    """Whether an operator reads or returns a sparse tensor, or gives a weight a sparse gradient."""
    return node in sparse or any(e.node in sparse for e in node.inputs) \
        or node.op == "_contrib_SparseEmbedding" or node.attrs.get("sparse_grad") in ("True", "1")
