"""Arrays of types other than float16 give the bits of MXNet alone, and GLUON_AMP_ENGINE=off does
not change MXNet."""
import pickle
import re

import pytest
from cases import cases
from mxnet_alone import MXNET_ALONE
from operator_calls import HERE, candidates
from processes import printed

pytestmark = pytest.mark.long

# Calls each operator forward and backward before and after the import of gluon_amp.
CALLS = """
import ctypes, pickle, sys
import numpy as np
import mxnet as mx
from mxnet import autograd, nd
from mxnet._ctypes.ndarray import _imperative_invoke

dtype = sys.argv[2]

def results(name, attributes, inputs):
    handle = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    mx.random.seed(1)
    arrays = [nd.array(x, dtype=dtype if x.dtype == np.float16 else x.dtype) for x in inputs]
    found = []
    try:
        with mx.util.np_shape(name.startswith("_np")):
            if dtype != "int32":
                for x in arrays:
                    x.attach_grad()
            with autograd.record():
                made = _imperative_invoke(handle.value, arrays, list(attributes),
                                          [str(v) for v in attributes.values()], None, False, False)
            made = made if isinstance(made, list) else [made]
            found += [o.asnumpy() for o in made]
            if dtype != "int32":
                autograd.backward(made)
                found += [x.grad.asnumpy() for x in arrays if x.grad is not None]
        nd.waitall()
    except mx.MXNetError as error:
        found.append(np.array(str(error)[-40:]))
    return [(a.dtype, a.shape, a.tobytes()) for a in found]

with open(sys.argv[1], "rb") as file:
    calls = pickle.load(file)
first, before = ([results(*call) for call in calls] for _ in range(2))
assert "gluon_amp" not in sys.modules
import gluon_amp
assert gluon_amp.cpu.library.load()
after = [results(*call) for call in calls]
same = [call[0] for call, a, b in zip(calls, first, before) if a == b]
print([call[0] for call, a, b, c in zip(calls, first, before, after) if a == b != c])
print(len(same))
"""


OF_INTEGERS = "(elemwise|broadcast)_(add|sub|mul)|_npi_(add|multiply)|_(plus|mul)_scalar|" \
    "sum|max|min|transpose|Concat|stack|take|slice|clip|where|Cast|one_hot|tile|reverse|argmax|sort"


@pytest.mark.parametrize("dtype", cases(["int32"], ["float32", "float64"]))
def test_other_types_match_mxnet_alone_bitwise(dtype, rng, tmp_path):
    calls = [(name, *case) for name in HERE for case in candidates(name, rng)
             if dtype != "int32" or re.fullmatch(OF_INTEGERS, name)]
    (tmp_path / "calls").write_bytes(pickle.dumps(calls))
    differ, ran = printed(MXNET_ALONE + CALLS, tmp_path / "calls", dtype,
                          MXNET_SAFE_ACCUMULATION="1").splitlines()[-2:]
    # MXNet refuses the gradient of Embedding's indices, which loops need (cpu/dispatch/loops.cc)
    assert differ == ("[]" if dtype == "int32" else "['Embedding']")
    assert int(ran) > 0.95 * len(calls)  # a few of MXNet's operators read uninitialized memory


OFF = """
import gluon_amp as amp, mxnet as mx
from mxnet import nd
halves = nd.ones((2, 2), dtype="float16")
try:
    nd.dot(halves, halves).asnumpy()
    raise AssertionError("MXNet alone refuses it")
except mx.MXNetError as error:
    assert "dot only supports" in str(error)
net = mx.gluon.nn.Dense(2, in_units=2)
net.initialize()
try:
    amp.convert(net)(nd.ones((2, 2)))
    raise AssertionError
except amp.cpu.library.KernelError as error:
    assert "GLUON_AMP_ENGINE=off" in str(error)
assert amp.data.Cast()(nd.ones(2)).dtype == halves.dtype
"""


def test_engine_off_does_not_change_mxnet():
    printed(OFF, GLUON_AMP_ENGINE="off")


FAILING = """
import os
import gluon_amp as amp, mxnet as mx
from gluon_amp.cpu import library
from gluon_amp.graph.operators import engine_columns
from mxnet import nd

half = nd.ones((2, 2), dtype="float16")

def mxnet_refuses_float16():
    try:
        nd.dot(half, half).asnumpy()
    except mx.MXNetError as error:
        return "dot only supports" in str(error)

def reason():
    try:
        library.load()
    except amp.cpu.library.KernelError as error:
        return str(error)

def planned():
    x = mx.sym.var("x")
    net = mx.sym.exp(mx.sym.sin(mx.sym.cos(x)))
    return net.simple_bind(mx.cpu(), x=(3, 4)).forward(x=nd.ones((3, 4)))[0].asnumpy().tolist()

assert "GLUON_AMP_ISA must be one of" in reason()
del os.environ["GLUON_AMP_ISA"]
names = library._operator_names
before = planned()
for lasts in (["no_such_operator"], ["Custom", "no_such_operator"]):
    library._operator_names = lambda: [*names(), *lasts]
    library.start(engine_columns())
    assert "no_such_operator" in reason()
    assert mxnet_refuses_float16()
    assert not library.table().operators(), library.table().operators()
    assert planned() == before
library._operator_names = names
library.start(engine_columns())
assert reason() is None
assert (nd.dot(half, half).asnumpy() == 2).all()
net = mx.gluon.nn.Dense(2)
net.initialize()
amp.convert(net)
with mx.autograd.record():
    loss = net(nd.ones((2, 2))).sum()
amp.Trainer(net.collect_params(), "sgd").backward(loss)
mx.nd.waitall()
print("trained")
"""


def test_start_that_fails_replaces_no_operator():
    assert printed(FAILING, GLUON_AMP_ISA="none") == "trained\n"
