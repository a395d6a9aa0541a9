"""Every operator of MXNet dispatches on type on a CPU, or is listed here with the reason."""
import re
from ctypes import POINTER, byref, c_char_p, c_uint, c_void_p

import mxnet as mx
import pytest
from gluon_amp.cpu import library

pytestmark = pytest.mark.isa

LIB = mx.base._LIB


def own_name(name):
    """The primary name of an operator."""
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

NOT_DISPATCHED = {
    "they have no code for CPUs": "_NoGradient|_imdecode|_cvimdecode|_cvimread",
    "functions on NDArrays": "_set_value|_onehot_encode|fill_element_0index",
    "they hold graphs, whose nodes dispatch":
        "(_backward)?_(foreach|while_loop|cond|CachedOp|CachedOpThreadSafe)",
    "Python code, which is not done when it returns":
        "(_backward_?)?(_?Custom|_CustomFunction|_NDArray|_Native)",
    "they copy between devices": "_copyto|(_backward_)?_CrossDeviceCopy",
    "they find their outputs' shapes while they run; MXNet's code takes halves":
        "(_backward)?_contrib_boolean_mask|_npi_delete|_npi_unique|_npx_nonzero|_npi_bincount",
    "they compare pointers":
        "_npi_boolean_mask_assign_(scalar|tensor)|_scatter_set_nd|_npi_share_memory",
    "int8": "_contrib_.*quantize.*", "MXNet's oneDNN passes put it into float32 graphs": "_sg_.*",
}
OF_THE_ENGINE = {"widen", "narrow", "follow", "update", "squares", "norm_relu",
                 "backward_norm_relu"}


def test_every_operator_dispatches_or_has_a_reason():
    reasons = "|".join(NOT_DISPATCHED.values())
    left = set(THEIRS) - library.operators()
    assert not [name for name in left if not re.fullmatch(reasons, name)]
    for reason in NOT_DISPATCHED.values():
        assert any(re.fullmatch(reason, name) for name in left), reason
    assert len(library.operators()) > 750


def test_engine_registers_only_its_own_operators():
    assert OURS == OF_THE_ENGINE
    assert not OURS & set(ALL)


@pytest.mark.parametrize(("alias", "name"), [("sum_axis", "sum"), ("concat", "Concat"),
                                             ("_plus", "elemwise_add")])
def test_alias_dispatches_as_its_operator(alias, name):
    assert own_name(alias) == own_name(name) == name
    assert name in library.operators()
