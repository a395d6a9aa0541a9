"""Every operator of MXNet has a float16 counterpart on CPUs, or stands here with its reason; every
attribute of MXNet's operators is accounted for."""
import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_uint, c_void_p

import pytest
from gluon_amp._mxnet import mx
from gluon_amp.cpu import library

LIB = mx.base._LIB


def own_name(name):
    """An operator's own name; others are its aliases."""
    handle = c_void_p()
    mx.base.check_call(LIB.NNGetOpHandle(c_char_p(name.encode()), byref(handle)))
    own, text, inputs, result = c_char_p(), c_char_p(), c_char_p(), c_char_p()
    count = c_uint()
    lists = [POINTER(c_char_p)() for _ in range(3)]
    mx.base.check_call(LIB.MXSymbolGetAtomicSymbolInfo(
        handle, byref(own), byref(text), byref(count), *map(byref, lists), byref(inputs),
        byref(result)))
    return own.value.decode()


ALL = library._operator_names()
THEIRS = sorted({own_name(n) for n in ALL if not n.startswith(library.PREFIX)})
OURS = {n[len(library.PREFIX):] for n in ALL if n.startswith(library.PREFIX)}

# ---- which have a counterpart ----------------------------------------------------------

NOT_OURS = {
    "they have no code for CPUs": "_NoGradient _imdecode _cvimdecode _cvimread",
    "functions on NDArrays": "_set_value _onehot_encode fill_element_0index",
    "they hold graphs, whose nodes are replaced": """
        _foreach _while_loop _cond _backward_foreach _backward_while_loop _backward_cond
        _CachedOp _CachedOpThreadSafe _backward_CachedOp""",
    "Python code, which is not done when it returns": """
        Custom _backward_Custom _CustomFunction _backward_CustomFunction
        _NDArray _backward__NDArray _Native _backward__Native""",
    "they copy between devices": "_copyto _CrossDeviceCopy _backward__CrossDeviceCopy",
    "they find their outputs' shapes while they run; MXNet's code takes halves": """
        _contrib_boolean_mask _backward_contrib_boolean_mask _npi_delete _npi_unique
        _npx_nonzero""",
}
TRAINING = {"widen", "narrow", "round_to_grid", "follow", "update", "squares",
            "tensor_core_dot"}  # not in MXNet


def test_every_operator_has_a_counterpart_or_a_reason():
    reasons = {name for names in NOT_OURS.values() for name in names.split()}
    assert set(THEIRS) - OURS == reasons
    assert OURS - set(THEIRS) == TRAINING
    assert len(OURS) > 850


@pytest.mark.parametrize(("alias", "name"), [("sum_axis", "sum"), ("concat", "Concat"),
                                             ("identity", "_copy"), ("_plus", "elemwise_add")])
def test_an_aliass_counterpart_is_that_of_its_operator(alias, name):
    """Graphs in MXNet's JSON hold operators' own names."""
    assert own_name(alias) == name
    assert name in OURS
    assert alias not in OURS


# ---- what the counterparts have --------------------------------------------------------

OTHER_BUILDS = set("""
    FCompute<gpu> FIsCUDAGraphsCompatible TIsGhost TIsFusion TIsFusionHelper
    FAccessSubgraphType FAccessSubgraphShape FAccessSubgraphStorageType
    FProvideSubgraphType FProvideSubgraphShape FProvideSubgraphStorageType""".split())


def attributes_in_the_registry():
    """The keys of nnvm::OpManager's map: a std::unordered_map as GCC 4.8 lays it out, behind a
    std::recursive_mutex and a counter. A node: the next one, then a string."""
    manager = ctypes.addressof(c_char.in_dll(LIB, "_ZZN4nnvm9OpManager6GlobalEvE4inst"))
    node = c_void_p.from_address(manager + 48 + 16).value
    while node:
        yield ctypes.string_at(c_void_p.from_address(node + 8).value).decode()
        node = c_void_p.from_address(node).value


def test_every_attribute_of_mxnets_operators_is_accounted_for():
    lines = library.table().attributes().decode().splitlines()
    listed = [line.rpartition(" ")[2] for line in lines]
    assert {line.rpartition(" ")[0] for line in lines} == {"copied", "replaced", "left out"}
    assert len(listed) == len(set(listed))
    found = set(attributes_in_the_registry())
    assert {"FCompute<cpu>", "FGradient"} <= found
    assert not found - set(listed)
    assert not set(listed) - found - OTHER_BUILDS
