"""`convert` and `restore`: what stays as it was, what is undone, how it hybridizes."""
import logging

import gluon_amp as amp
import numpy as np
import pytest
from converting import Net, make, run_python, step, types, values
from gluon_amp._mxnet import mx
from mxnet.gluon import nn

# What stays as it was


def test_convert_returns_the_same_object():
    net = make()
    assert amp.convert(net) is net
    assert amp.restore(net) is net


def test_a_converted_net_is_still_what_it_was():
    net = make(prefix="mine_")
    features, shown, names = net.features, repr(net), list(net.collect_params())
    amp.convert(net)
    assert isinstance(net, Net)
    assert isinstance(net.features[0], nn.Conv2D)
    assert type(net).__name__ == "Net"
    assert (repr(net), net.name, list(net.collect_params())) == (shown, "mine", names)
    assert net.features is features
    assert net.features[1].gamma.name.endswith("gamma")


def test_parameters_become_float16_and_those_of_norms_stay_float32():
    net = amp.convert(make())
    assert types(net) == {n: "float32" if "batchnorm" in n else "float16"
                          for n in net.collect_params()}


def test_converting_twice_changes_nothing(x):
    net = amp.convert(make())
    cls, kinds, first = type(net), types(net), net(x).asnumpy()
    amp.convert(net)
    assert type(net) is cls
    assert types(net) == kinds
    assert np.array_equal(net(x).asnumpy(), first)
    assert type(amp.restore(net)) is Net


def test_outputs_are_float32_unless_the_policy_is_pure(x):
    assert amp.convert(make())(x).dtype == np.float32
    assert amp.convert(make(), "pure_float16")(x).dtype == np.float16


def test_forward_hooks_still_fire(x):
    net, seen = make(), []
    net.register_forward_pre_hook(lambda block, inputs: seen.append("before"))
    net.register_forward_hook(lambda block, inputs, output: seen.append(output.shape))
    amp.convert(net)(x)
    assert seen == ["before", (4, 5)]


def test_nothing_outside_the_net_is_patched():
    run_python("""
import numpy as np
import mxnet as mx
from mxnet import gluon
nn = gluon.nn
def snapshot():
    places = [mx.nd, mx.sym, mx.nd.contrib, mx.sym.contrib, nn.Dense, nn.Conv2D, nn.BatchNorm,
              gluon.Block, gluon.HybridBlock, gluon.SymbolBlock, gluon.Parameter, gluon.Trainer,
              mx.optimizer.SGD, mx.optimizer.Optimizer, mx.nd.NDArray, mx.sym.Symbol]
    return [dict(vars(place)) for place in places], dict(mx.optimizer.Optimizer.opt_registry)
before, registry = snapshot()
import gluon_amp
net = nn.HybridSequential()
net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4))
net.initialize()
stock = nn.Dense(4, in_units=3)
gluon_amp.convert(net)(mx.nd.ones((2, 3))).wait_to_read()
gluon_amp.optimizer("sgd")
after, registry_after = snapshot()
assert {n: c for n, c in registry_after.items() if n != "adamw"} == registry  # which it adds
for old, new in zip(before, after):
    changed = [name for name in old if new.get(name) is not old[name]]
    changed = [n for n in changed if n not in ("__doc__", "__all__")]
    assert not changed, changed
assert type(stock) is nn.Dense and np.dtype(stock.weight.dtype) == np.float32
""")


# Restore


@pytest.mark.parametrize("undo", [amp.restore, lambda net: amp.convert(net, "float32")])
@pytest.mark.parametrize("hybrid", [False, True])
def test_restore_leaves_nothing_behind(hybrid, undo, x):
    net = make()
    if hybrid:
        net.hybridize()
    amp.convert(net)(x)
    assert undo(net) is net
    blocks = [net, net.features, net.output, *net.features]
    assert [type(b) for b in blocks[:4]] == [Net, nn.HybridSequential, nn.Dense, nn.Conv2D]
    assert not any(hasattr(b, "_amp") for b in blocks)
    assert all(b._active is hybrid for b in blocks)
    assert set(types(net).values()) == {"float32"}
    twin = make()
    for mine, its in zip(net.collect_params().values(), twin.collect_params().values()):
        its.set_data(mine.data())
    if hybrid:
        twin.hybridize()
    assert np.array_equal(net(x).asnumpy(), twin(x).asnumpy())
    step(net, x)


def test_restore_of_a_net_that_was_never_converted_does_nothing(x):
    net = make()
    before = values(net)
    amp.restore(net)
    assert type(net) is Net
    assert all(np.array_equal(before[n], v) for n, v in values(net).items())


def test_restore_takes_only_blocks():
    with pytest.raises(TypeError, match=r"gluon Block.*Received: int"):
        amp.restore(3)


def test_another_policy_may_follow_the_first(x):
    net = amp.convert(make())
    net(x)
    amp.convert(net, "mixed_float16")
    assert set(types(net).values()) == {"float32"}
    assert net(x).dtype == np.float32
    amp.convert(net, "pure_float16")
    assert {n: t for n, t in types(net).items() if "batchnorm" not in n and t != "float16"} == {}
    assert net(x).dtype == np.float16
    amp.convert(net, "float16", keep=net.output)
    assert types(net.output) == dict.fromkeys(types(net.output), "float32")
    amp.convert(net)
    assert types(net.output) == dict.fromkeys(types(net.output), "float16")
    assert type(amp.restore(net)) is Net


@pytest.mark.parametrize(("level", "name"), [("O0", "float32"), ("O1", "mixed_float16"),
                                             ("O2", "float16"), ("O3", "pure_float16")])
def test_apex_levels_name_policies(level, name, x):
    mx.random.seed(1)
    one = amp.convert(make(prefix="n_"), level)
    mx.random.seed(1)
    other = amp.convert(make(prefix="n_"), name)
    assert types(one) == types(other)
    assert np.array_equal(one(x).asnumpy(), other(x).asnumpy())


def test_a_policy_of_ones_own_is_taken(x):
    net = amp.convert(make(), amp.Policy("mine", parameter="float16", compute="float16",
                                         output="float16"))
    assert net(x).dtype == np.float16


# Hybridizing


def test_convert_logs_once_that_it_hybridized(caplog, x):
    caplog.set_level(logging.INFO, "gluon_amp")
    net = make(prefix="net_")
    amp.convert(net)
    assert [r.getMessage() for r in caplog.records if "hybridized" in r.getMessage()] \
        == [caplog.records[0].getMessage()]
    assert caplog.records[0].name == "gluon_amp"
    assert "net" in caplog.text
    assert "restore" in caplog.text
    caplog.clear()
    net(x)
    amp.convert(net)
    hybrid = make()
    hybrid.hybridize()
    amp.convert(hybrid)
    assert not caplog.records


def test_hybridize_false_keeps_a_converted_net_working_and_says_so(caplog, x):
    net = amp.convert(make(prefix="net_"))
    before = net(x).asnumpy()
    caplog.set_level(logging.INFO, "gluon_amp")
    net.hybridize(False)
    assert ["net stays hybridized" in r.getMessage() for r in caplog.records] == [True]
    assert np.array_equal(net(x).asnumpy(), before)
    step(net, x)


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True},
                                   {"static_alloc": True, "static_shape": True}])
def test_hybridize_takes_its_flags(flags, x):
    net = amp.convert(make())
    before = net(x).asnumpy()
    net.hybridize(**flags)
    for _ in range(2):
        assert np.array_equal(net(x).asnumpy(), before)
        step(net, x)
        before = net(x).asnumpy()
