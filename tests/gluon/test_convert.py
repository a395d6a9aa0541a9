"""`convert` and `restore`: unchanged attributes, hybridization, copies, children."""
import abc
import copy
import json
import logging
import pickle
import threading
from collections import namedtuple
from typing import Generic, TypeVar

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from converting import Net, holding, make, saved_types, step, types, values
from gluon_amp.cpu.arrays import dtype_name, to_float32
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import recorded, with_trainer

pytestmark = pytest.mark.numpy

# What convert leaves unchanged


def test_converted_net_keeps_class_names_and_children():
    net = make(prefix="mine_")
    features, shown, names = net.features, repr(net), list(net.collect_params())
    symbol = net(mx.sym.var("data"))
    amp.convert(net)
    assert isinstance(net, Net)
    assert isinstance(net.features[0], nn.Conv2D)
    assert net(mx.sym.var("data")).list_arguments() == symbol.list_arguments()
    assert types(net) == {n: "float32" if "batchnorm" in n else "float16" for n in names}
    assert type(net).__name__ == "Net"
    assert (repr(net), net.name, list(net.collect_params())) == (shown, "mine", names)
    assert net.features is features
    assert net.features[1].gamma.name.endswith("gamma")


def test_converting_twice_changes_nothing(x):
    net = amp.convert(make())
    cls, kinds, first = type(net), types(net), net(x).asnumpy()
    amp.convert(net)
    assert type(net) is cls
    assert types(net) == kinds
    assert np.array_equal(net(x).asnumpy(), first)
    assert type(amp.restore(net)) is Net


def test_forward_hooks_still_fire(x):
    net, seen = make(), []
    net.register_forward_pre_hook(lambda block, inputs: seen.append("before"))
    net.register_forward_hook(lambda block, inputs, output: seen.append(output.shape))
    amp.convert(net)(x)
    assert seen == ["before", (4, 5)]


# Restore


@pytest.mark.parametrize("policy", ["float16", "float32"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_restore_undoes_convert(hybrid, policy, x):
    net = make()
    if hybrid:
        net.hybridize()
    amp.convert(net, policy)(x)
    assert amp.restore(net) is net
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


def test_symbols_of_parameters_declare_their_present_types():
    net = ready(sequence(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4)))

    def declared():
        executor = net(mx.sym.var("data")).simple_bind(mx.cpu(), data=(2, 3))
        return executor.arg_dict[net[0].weight.name].dtype

    assert declared() == np.float32
    amp.convert(net)
    net(mx.nd.ones((2, 3)))
    assert net[0].weight.var().attr("__dtype__") == "2"
    amp.restore(net)
    assert net[0].weight.var().attr("__dtype__") == "0"
    assert declared() == np.float32


def test_restore_of_unconverted_net_does_nothing(x):
    net = make()
    before = values(net)
    amp.restore(net)
    assert type(net) is Net
    assert all(np.array_equal(before[n], v) for n, v in values(net).items())


class Slotted:
    __slots__ = ()


class OfOneDense:
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=4)

    def hybrid_forward(self, F, x):
        return self.dense(x)


class Abstract(OfOneDense, nn.HybridBlock, abc.ABC):
    pass


class OfType(OfOneDense, nn.HybridBlock, Generic[TypeVar("T")]):
    pass


class WithSlots(OfOneDense, nn.HybridBlock, Slotted):
    pass


class Plain(OfOneDense, gluon.Block, Slotted):
    def forward(self, x):
        return self.hybrid_forward(nd, x)


class Registered(OfOneDense, nn.HybridBlock):
    def __init_subclass__(cls, name):
        cls.registered = name


class Named(Registered, name="mine"):
    pass


@pytest.mark.parametrize("cls", [Abstract, OfType, WithSlots, Plain, Named])
def test_convert_supports_mixins_slots_and_subclass_hooks(cls):
    net, x = cls(), nd.ones((2, 4))
    net.initialize()
    wanted = net(x).asnumpy()
    amp.convert(net)
    assert (type(net).__name__, isinstance(net, cls)) == (cls.__name__, True)
    for made in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert made.dense.weight.data().dtype == np.float16
        assert np.allclose(made(x).asnumpy(), wanted, atol=1e-3)
        assert type(amp.restore(made)) is cls


class Unsubclassed(type(nn.HybridBlock)):
    def __new__(mcs, name, bases, contents):
        if any(type(base) is Unsubclassed for base in bases):
            raise TypeError("final")
        return super().__new__(mcs, name, bases, contents)


@pytest.mark.parametrize(("bases", "metaclass", "cause"), [
    ([abc.ABC], abc.ABCMeta, ""), ([Generic[TypeVar("T")]], type, ""), ([Slotted], type, ""),
    ([], Unsubclassed, "final")])
def test_class_that_cannot_be_converted_is_refused_by_name(bases, metaclass, cause):
    class Unfit(*bases, OfOneDense, nn.HybridBlock, metaclass=metaclass):
        pass

    net = sequence(make(), Unfit())
    before = [type(block) for block in (net, *net, *net[0].features)]
    with pytest.raises(TypeError, match=f"Unfit does not allow.*Received: .*{cause}"):
        amp.convert(net)
    assert [type(block) for block in (net, *net, *net[0].features)] == before
    assert set(types(net).values()) == {"float32"}


class ReadsValues(nn.HybridBlock):
    """Accepts only arrays, as MXNet's example of embedding learning does."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4)

    def hybrid_forward(self, F, x):
        return self.dense(x) * x.shape[0] + float(x.asnumpy().std())


def around_one(inner):
    def forward(F, x, below, inner, above, factor):
        return above(F.broadcast_mul(inner(below(x)), factor))
    return networks.Calling(forward, nn.Dense(8), inner, nn.Dense(2),
                            parameters={"factor": {"shape": (1, 4), "init": "ones"}})


@pytest.mark.parametrize("build", [
    ReadsValues, lambda: around_one(ReadsValues()),
    lambda: sequence(nn.Flatten(), around_one(ReadsValues()))])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kept_block_that_cannot_be_traced_runs_imperatively(build, dtype):
    weights = []
    for converted in (False, True):
        mx.random.seed(1)
        net, x = build(), nd.random.normal(shape=(3, 5))
        net.initialize(mx.init.Xavier())
        if converted:
            amp.convert(net, keep=ReadsValues)
            x = x.astype(dtype)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        for _ in range(3):
            with autograd.record():
                loss = (net(x) ** 2).mean()
            trainer.backward(loss)
            assert trainer.step(1)
        weights.append([to_float32(p.data()).asnumpy() for p in net.collect_params().values()])
    for exact, found in zip(*weights):
        assert np.abs(found - exact).max() <= 4e-3 * np.abs(exact).max()
    kept = {name for name, kind in types(net).items() if kind == "float32"}
    assert {n for n in types(net) if "readsvalues" in n} <= kept
    assert len(kept) in (2, 3)  # and the factor of the outer block
    amp.restore(net)
    assert not net._active
    assert net(x.astype("float32")).dtype == np.float32


Pair = namedtuple("Pair", "first second")


class Adds(nn.HybridBlock):
    """Reads the values of two arrays, in any nesting, and mixes them with a child's result."""

    def __init__(self):
        super().__init__(prefix="adds_")
        with self.name_scope():
            self.dense = nn.Dense(4)
            self.factor = self.params.get("factor", shape=(1, 4), init="ones")

    def hybrid_forward(self, F, pair, factor):
        first, second = pair
        assert not isinstance(pair, Pair) or pair.second is second
        assert all(a.dtype == np.float32 for a in (first, second, factor))
        return self.dense(first) * factor + self.dense(second) * float(first.asnumpy().std())


class CallsAdds(gluon.Block):
    def __init__(self, nest):
        super().__init__(prefix="calls_")
        self.nest = nest
        with self.name_scope():
            self.below, self.adds, self.above = nn.Dense(5), Adds(), nn.Dense(2)

    def forward(self, x):
        x = self.below(x)
        return self.above(self.adds(self.nest(x, x + 1)))


@pytest.mark.parametrize("nest", [Pair, lambda *pair: list(pair), lambda *pair: pair])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_imperative_kept_block_is_float32_if_others_return_halves(nest, dtype):
    mx.random.seed(1)
    net = ready(CallsAdds(nest), mx.init.Xavier())
    x = nd.random.normal(shape=(3, 5))
    exact = net(x).asnumpy()
    amp.convert(net, amp.Policy("halves", parameter=dtype, compute=dtype, output=dtype), keep=Adds)
    out = recorded(net, x)
    out.backward()
    assert dtype_name(out.dtype) == dtype
    assert np.abs(out.astype("float32").asnumpy() - exact).max() < 0.03 * np.abs(exact).max()
    assert net.adds.dense.weight.grad().dtype == np.float32
    assert net.below.weight.grad().astype("float32").asnumpy().any()


def test_named_tuple_in_shared_memory_keeps_its_class():
    net = amp.convert(ready(Adds()), keep=Adds)
    pair = Pair(*(nd.ones((2, 3), ctx=mx.Context("cpu_shared", 0)) for _ in range(2)))
    assert net(pair).shape == (2, 4)


class Round(autograd.Function):
    """The straight-through estimator, whose forward accepts symbols too."""

    def forward(self, x):
        return x.round()

    def backward(self, dy):
        return dy


class Quantizes(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return Round()(x)


class CallsArrays(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return nd.relu(x)


def with_one(inner):
    return ready(sequence(nn.Dense(8), inner, nn.Dense(2)), mx.init.Xavier())


@pytest.mark.parametrize("inner", [Quantizes, CallsArrays])
def test_kept_block_that_accepts_only_arrays_trains(inner):
    net, trainer = with_trainer(amp.convert(with_one(inner()), keep=inner), "sgd")
    trainer.backward(recorded(lambda: net(nd.ones((3, 5))).mean(axis=1)))
    assert trainer.step(3)
    assert net[0].weight.grad().asnumpy().any()


@pytest.mark.parametrize("hybridized", [False, True])
def test_autograd_function_in_graph_is_refused(hybridized):
    """It would crash the process."""
    net = with_one(Quantizes())
    if hybridized:
        net.hybridize()
    amp.convert(net)
    with pytest.raises((RuntimeError, TypeError), match="Round received: a Symbol"):
        net(nd.ones((3, 5)))


def test_name_that_matches_nothing_beside_a_kept_block_that_cannot_be_traced_is_refused():
    net = amp.convert(with_one(ReadsValues()), keep=ReadsValues)
    with pytest.raises(ValueError, match="'nothing' matches nothing yet"):
        amp.convert(net, keep=[ReadsValues, "nothing"])
    assert net(nd.ones((3, 5))).shape == (3, 2)


def test_kept_hybridized_block_that_cannot_be_traced_is_refused():
    net = ready(around_one(ReadsValues()))
    net.hybridize()
    amp.convert(net, keep=ReadsValues)
    with pytest.raises(RuntimeError, match=r"is hybridized, and cannot be traced.*\(ReadsValues\)"):
        net(nd.ones((3, 5)))


def test_deferred_parameters_are_drawn_in_order_of_hybridized_network():
    """Layers are created in another order than they run in."""
    drawn = []
    for converted in (False, True):
        mx.random.seed(1)
        layers = nn.Dense(5, prefix="last_"), nn.Dense(16, prefix="first_")
        net = ready(networks.Calling(lambda F, x, last, first: last(first(x)), *layers),
                    mx.init.Xavier())
        net.hybridize()
        if converted:
            amp.convert(net)
        net(nd.ones((2, 3)))
        drawn.append({name: to_float32(p.data()).asnumpy()
                      for name, p in net.collect_params().items()})
    for name, exact in drawn[0].items():
        assert np.allclose(drawn[1][name], exact, rtol=1e-3), name


def test_another_policy_can_replace_the_first(x):
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


# Hybridizing


def test_convert_logs_hybridization_once(caplog, x):
    caplog.set_level(logging.INFO, "gluon_amp")
    net = amp.convert(make(prefix="net_"))
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


def test_hybridize_false_is_ignored_with_log_message(caplog, x):
    net = amp.convert(make(prefix="net_"))
    before = net(x).asnumpy()
    caplog.set_level(logging.INFO, "gluon_amp")
    net.hybridize(False)
    assert ["net stays hybridized" in r.getMessage() for r in caplog.records] == [True]
    assert np.array_equal(net(x).asnumpy(), before)
    step(net, x)


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True},
                                   {"static_alloc": True, "static_shape": True}])
def test_hybridize_accepts_flags(flags, x):
    net = amp.convert(make())
    before = net(x).asnumpy()
    net.hybridize(**flags)
    for _ in range(2):
        assert np.array_equal(net(x).asnumpy(), before)
        step(net, x)
        before = net(x).asnumpy()


# ---- copies and pickles

COPIES = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("used", [False, True])
def test_copy_computes_the_same_and_is_independent(used, make_copy, x):
    net = amp.convert(make(), keep=nn.Dense)
    if used:
        step(net, x)
    twin = make_copy(net)
    assert type(twin) is type(net)
    assert types(twin) == types(net)
    out = net(x).asnumpy()
    assert np.array_equal(twin(x).asnumpy(), out)
    twin.output.weight.set_data(twin.output.weight.data() * 2)
    assert not np.array_equal(twin(x).asnumpy(), out)
    assert np.array_equal(net(x).asnumpy(), out)
    step(net, x)
    step(twin, x)
    assert not np.array_equal(twin(x).asnumpy(), out)
    assert type(amp.restore(twin)) is Net
    assert type(net) is not Net


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
@mx.util.use_np
def test_copy_of_numpy_network_is_numpy_network(make_copy):
    net = ready(nn.Dense(3, in_units=2))
    x = mx.np.ones((1, 2))
    out = amp.convert(net)(x)
    found = make_copy(net)(x)
    assert isinstance(found, mx.np.ndarray)
    assert np.array_equal(found.asnumpy(), out.asnumpy())


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
def test_copy_has_same_devices_and_accumulated_gradients(make_copy):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = amp.convert(ready(nn.Dense(3, in_units=2), ctx=devices))
    net.weight.grad_req = "add"

    def backward(net):
        autograd.backward(recorded(lambda: [net(nd.ones((1, 2), ctx=d)).sum() for d in devices]))
        return [g.asnumpy() for g in net.weight.list_grad()]

    backward(net)
    twin = make_copy(net)
    assert [a.ctx for a in twin.weight.list_data()] == devices
    for mine, theirs in zip(backward(twin), backward(net)):
        assert np.array_equal(mine, np.full((3, 2), 2))
        assert np.array_equal(theirs, mine)


class WithLock(nn.Dense):
    """A block with an attribute that can be neither pickled nor copied."""

    def __init__(self):
        super().__init__(3, in_units=2)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "lock"}

    def __setstate__(self, state):
        self.__dict__.update(state, lock=threading.Lock())


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
def test_copy_uses_getstate_and_setstate_of_block(make_copy):
    net = ready(WithLock())
    twin = make_copy(amp.convert(net))
    assert twin.lock is not net.lock
    assert np.array_equal(twin(nd.ones((1, 2))).asnumpy(), net(nd.ones((1, 2))).asnumpy())


# Parameters shared with a new block


def tied(net):
    """Language models tie their output to their embedding."""
    with net.name_scope():
        net.tied = nn.Dense(5, in_units=8, params=net.output.params)
    return net.tied


@pytest.mark.parametrize("new", [
    lambda net: nn.Dense(5, in_units=8, params=net.output.params),
    lambda net: nn.Dense(5, in_units=8, params=net.output.collect_params()),
    lambda net: nn.Dense(5, in_units=8, params=net.output.params, dtype="float16"), tied])
def test_new_block_shares_parameters_of_converted_block(new, x):
    net = amp.convert(make())
    other = new(net)
    assert other.weight is net.output.weight
    assert types(net.output) == types(other) == dict.fromkeys(net.output.params, "float16")
    if new is not tied:  # which is converted when it is added
        amp.convert(other)
    features = nd.random.normal(shape=(2, 8))
    assert np.array_equal(other(features).asnumpy(), net.output(features).asnumpy())
    step(other, features)
    assert np.array_equal(other(features).asnumpy(), net.output(features).asnumpy())


def test_shared_parameters_with_another_type_are_refused_by_mxnet():
    net = amp.convert(make())
    with pytest.raises(AssertionError, match="desired 'float64' vs stored 'float16'"):
        nn.Dense(5, in_units=8, params=net.output.params, dtype="float64")


# Parts of a network


def new_output(net, cls=nn.Dense):
    net.output = ready(cls(3, in_units=8, prefix="new_"))
    return net


@pytest.fixture()
def layers():
    return amp.convert(holding(nn.Dense(4, in_units=5), nn.LayerNorm(in_channels=4),
                               nn.Dense(3, in_units=4)))


def test_slice_is_converted_network_of_same_layers(layers):
    x = nd.ones((2, 5))
    whole = layers(x)
    part = layers[:2]
    part.hybridize()
    assert [part[0], part[1]] == [layers[0], layers[1]]
    assert part(x).shape == (2, 4)
    assert np.array_equal(layers[2](part(x)).asnumpy(), whole.asnumpy())
    assert np.array_equal(layers(x).asnumpy(), whole.asnumpy())
    assert type(amp.restore(part)) is nn.HybridSequential


def test_slice_of_kept_network_stays_float32():
    net = holding(nn.Dense(4, in_units=5), nn.Dense(3, in_units=4))
    x = nd.random.normal(shape=(2, 5))
    expected = net[:1](x).asnumpy()
    amp.convert(net, keep=net)
    np.testing.assert_allclose(net[:1](x).asnumpy(), expected, rtol=1e-6)


def test_slices_inside_network_are_traced_with_it():
    def forward(F, x, stages):
        for stage in stages[:1]:
            x = F.relu(stage(x))
        return stages[1:](x)

    net = networks.Calling(forward, holding(nn.Dense(4, in_units=5), nn.Dense(3, in_units=4)))
    x = nd.random.normal(shape=(2, 5))
    wide = net(x).asnumpy()
    np.testing.assert_allclose(amp.convert(net)(x).asnumpy(), wide, atol=0.01)


def test_type_of_converted_network_creates_unconverted_networks(layers):
    made = type(layers)(prefix="made_")
    assert type(made) is nn.HybridSequential
    made.add(nn.Dense(2, in_units=5))
    made.initialize()
    assert made(nd.ones((2, 5))).shape == (2, 2)
    assert set(types(made).values()) == {"float32"}


# New children


class Wider(nn.Dense):
    pass


@pytest.mark.parametrize("cls", [nn.Dense, Wider])
def test_replaced_child_is_converted(cls, x):
    net = amp.convert(make())
    assert net(x).shape == (4, 5)
    new_output(net, cls)
    assert types(net.output) == {"new_weight": "float16", "new_bias": "float16"}
    assert (net(x).shape, net(x).dtype) == ((4, 3), np.float32)
    step(net, x)
    amp.restore(net)
    assert type(net.output) is cls
    assert set(types(net).values()) == {"float32"}


def test_replaced_grandchild_takes_effect(x):
    inner = make()
    net = amp.convert(networks.Calling(lambda F, x, inner: inner(x), inner))
    assert net(x).shape == (4, 5)
    new_output(inner)
    assert net(x).shape == (4, 3)


@pytest.mark.parametrize("keep", [lambda net: nn.Dense, lambda net: "new|.*dense0",
                                  lambda net: net], ids=["class", "name", "the whole network"])
def test_keep_applies_to_new_children(keep, x):
    net = make()
    amp.convert(net, keep=keep(net))
    new_output(net)
    assert set(types(net.output).values()) == {"float32"}
    assert net(x).shape == (4, 3)


def test_added_child_is_converted(layers):
    before = layers(nd.ones((2, 5)))
    layers.add(nn.Dense(7, in_units=3))
    layers[3].initialize()
    assert before.shape == (2, 3)
    assert layers(nd.ones((2, 5))).shape == (2, 7)
    assert set(types(layers[3]).values()) == {"float16"}


@pytest.mark.parametrize("part", [lambda net: net, lambda net: net.output])
def test_child_of_another_class_is_refused_as_in_mxnet(part, x):
    net = make()
    amp.convert(part(net))
    assert new_output(net)(x).shape == (4, 3)
    with pytest.raises(TypeError, match=r"Changing attribute type for output .*Dense.*Conv2D"):
        net.output = nn.Conv2D(3, 1)


# A part converted alone


def test_unconverted_parent_loads_files_into_converted_children(tmp_path, x):
    path = str(tmp_path / "net.params")
    source = make()
    source.save_parameters(path)
    net = make()
    amp.convert(net.features)
    amp.convert(net.output)
    net.load_parameters(path)
    assert types(net.output) == dict.fromkeys(types(net.output), "float16")
    np.testing.assert_allclose(net(x).asnumpy(), source(x).asnumpy(), atol=0.01)
    for name, value in values(source).items():
        assert np.array_equal(values(net)[name], value.astype(values(net)[name].dtype))


@pytest.mark.parametrize(("save", "load"), [
    (Net.save_parameters, Net.load_parameters),
    pytest.param(lambda net, path: net.collect_params().save(path),
                 lambda net, path: net.collect_params().load(path),
                 marks=pytest.mark.mx_nd("MXNet's ParameterDict.save refuses mx.np arrays"))],
    ids=["of network", "of parameters"])
def test_files_of_unconverted_parent_are_float32(save, load, tmp_path, x):
    path = str(tmp_path / "net.params")
    net = make(prefix="net_")
    amp.convert(net.features)
    amp.convert(net.output)
    save(net, path)
    assert saved_types(path) == {"float32"}
    stock = Net(prefix="net_")
    load(stock, path)
    np.testing.assert_allclose(stock(x).asnumpy(), net(x).asnumpy(), atol=0.01)


def test_saved_weights_of_three_devices_are_exact(tmp_path):
    net = ready(nn.Dense(50, in_units=50), ctx=[mx.cpu(i) for i in range(3)])
    amp.convert(net).save_parameters(str(tmp_path / "net.params"))
    saved = nd.load(str(tmp_path / "net.params"))["weight"].asnumpy()
    assert np.array_equal(saved, net.weight.data(mx.cpu(0)).asnumpy())


@pytest.mark.parametrize("change", [amp.restore, lambda b: amp.convert(b, "mixed_float16")])
def test_converting_or_restoring_part_takes_effect_after_first_call(change, x):
    net = amp.convert(make())
    before = net(x).asnumpy()
    change(net.output)
    assert set(types(net.output).values()) == {"float32"}
    np.testing.assert_allclose(net(x).asnumpy(), before, atol=0.01)


@pytest.mark.parametrize("order", ["convert first", "hybridize first", "run first"])
def test_hybridized_parent_of_converted_child_is_refused_with_remedy(order, x):
    net = make(prefix="net_")
    if order != "convert first":
        net.hybridize()
    if order == "run first":
        net(x)
    amp.convert(net.output)
    net.hybridize()
    with pytest.raises(RuntimeError, match=r"net_dense0 is converted, but its caller net is "
                                           r"hybridized and not converted\. Convert the outermost"):
        net(x)
    amp.convert(net)
    assert net(x).shape == (4, 5)


# Arguments of hybridize


@pytest.mark.parametrize("before", [[], [True], [True, False]])
@pytest.mark.parametrize("after", [[], [False], [True], [True, False], [False, True]])
def test_restore_follows_last_call_of_hybridize(before, after, x):
    net, plain = make(), make()
    for active in before:
        net.hybridize(active)
    amp.convert(net)
    net(x)
    for active in after:
        net.hybridize(active)
    amp.restore(net)
    for active in before + after:
        plain.hybridize(active)
    assert [b._active for b in (net, net.features, net.output)] \
        == [b._active for b in (plain, plain.features, plain.output)]
    assert net(x).shape == (4, 5)


def branches():
    """A network with other outputs in prediction than in training, as of detectors."""
    def forward(F, x, dense):
        y = dense(x)
        return (y, y * 2) if autograd.is_training() else y * 4
    return networks.Calling(forward, nn.Dense(3, in_units=2))


@pytest.mark.parametrize("first", ["training", "predicting"])
def test_network_can_branch_on_is_training(first):
    net = amp.convert(make(branches))
    x = nd.ones((1, 2))
    for training in (first == "training", first != "training", True, False):
        with autograd.record() if training else autograd.pause():
            out = net(x)
        if training:
            one, two = out
            assert np.array_equal(two.asnumpy(), one.asnumpy() * 2)
            two.backward()
        else:
            assert np.array_equal(out.asnumpy(), one.asnumpy() * 4) if first == "training" \
                else out.shape == (1, 3)


def test_network_can_be_called_with_and_without_mask():
    class Masked(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.dense = nn.Dense(3, in_units=5)

        def hybrid_forward(self, F, x, mask=None, states=None):
            y = self.dense(x)
            y = y if mask is None else F.broadcast_mul(y, mask)
            return y if states is None else (y, [y + state for state in states])

    x, net = nd.random.normal(shape=(4, 5)), amp.convert(make(Masked))
    plain, mask, state = net(x), nd.array([[1, 0, 2]]), nd.ones((4, 3))
    for _ in range(2):
        np.testing.assert_allclose(net(x, mask).asnumpy(), (plain * mask).asnumpy(), rtol=1e-3)
        assert np.array_equal(net(x).asnumpy(), plain.asnumpy())
        assert np.array_equal(net(x, None).asnumpy(), plain.asnumpy())
        out, (one, two) = net(x, None, [state, state * 2])
        np.testing.assert_allclose((two - one).asnumpy(), state.asnumpy(), atol=4e-3)
        np.testing.assert_allclose(out.asnumpy(), plain.asnumpy())


def test_infer_shape_and_infer_type_are_optional(x):
    net = amp.convert(make())
    before = types(net)
    net.infer_shape(x)
    net.infer_type(x)
    net(x)
    net.infer_type(x)
    assert types(net) == before
    assert set(before.values()) == {"float16", "float32"}


def test_network_without_branches_is_one_cached_op(x, monkeypatch):
    made = []
    operator = mx.nd.CachedOp
    monkeypatch.setattr("mxnet.nd.CachedOp", lambda *args: made.append(operator(*args)) or made[-1])
    net = amp.convert(make())
    for scope in (autograd.pause, autograd.record, autograd.train_mode):
        with scope():
            net(x)
    assert len(made) == 1


# Copies


def test_symbol_block_trains_predicts_and_is_copied(tmp_path, x):
    net = amp.convert(networks.exported(tmp_path))
    step(net, x)
    out = net(x).asnumpy()
    assert np.array_equal(copy.deepcopy(net)(x).asnumpy(), out)
    assert np.array_equal(pickle.loads(pickle.dumps(net))(x).asnumpy(), out)


def test_summary_is_that_of_float32_network(capsys, x):
    net = make()
    net.summary(x)
    expected = capsys.readouterr().out
    amp.convert(net)
    before = net(x).asnumpy()
    net.summary(x)
    assert capsys.readouterr().out == expected
    assert np.array_equal(net(x).asnumpy(), before)


# Arrays of other kinds


@pytest.mark.parametrize("kind", ["cpu_shared", "cpu_pinned"])
def test_cpu_shared_and_cpu_pinned_arrays_are_accepted(kind, x):
    net = amp.convert(make())
    there = nd.array(x.asnumpy(), ctx=mx.Context(kind, 0))
    assert np.array_equal(net(there).asnumpy(), net(x).asnumpy())
    half = there.astype("float16")
    assert np.array_equal(net(half).asnumpy(), net(x.astype("float16")).asnumpy())
    assert np.array_equal(to_float32(half).asnumpy(), half.asnumpy().astype(np.float32))
    step(net, there)


def test_export_writes_the_mode_that_ran_last(tmp_path):
    net = amp.convert(make(branches))
    with autograd.record():
        net(nd.ones((1, 2)))
    net(nd.ones((1, 2)))
    net.export(str(tmp_path / "net"))
    assert len(json.loads((tmp_path / "net-symbol.json").read_text())["heads"]) == 1


class Unnamed(nn.HybridSequential):
    def __init__(self):
        super().__init__(prefix="")

    def hybrid_forward(self, F, x):
        return x * x.shape[0]


def test_errors_name_the_class_of_a_block_without_a_name():
    net = amp.convert(Unnamed())
    with pytest.raises(RuntimeError, match=r"^a Unnamed without a name was never hybridized"):
        net(nd.ones((2, 5)))
    with pytest.raises(ValueError, match="a Unnamed without a name matches nothing"):
        amp.convert(net, keep=[Unnamed()])
