"""Every operator of MXNet dispatches on type on a CPU, or is listed here with the reason."""
import re

import pytest
from gluon_amp.cpu import library
from operator_calls import described

pytestmark = pytest.mark.isa

def own_name(name):
    return described(name)[0]


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
OF_THE_ENGINE = {"follow", "update", "squares", "norm_relu", "backward_norm_relu"}


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
