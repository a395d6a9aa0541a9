"""`convert`: which parameters and operators become float16, and which stay."""
import copy
import re

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from converting import Net, holding, make, rounded, runs_in, step, types, values
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import imported, ready, sequence
from trainers import learn, recorded, with_trainer

pytestmark = pytest.mark.numpy

# Integers


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
def test_ids_are_never_rounded(policy, dtype):
    net = holding(nn.Embedding(3000, 1))
    net[0].weight.set_data(nd.arange(3000).reshape((3000, 1)) % 1000)
    amp.convert(net, policy)
    ids = np.array([1, 2047, 2049, 2051, 2999])
    out = net(nd.array(ids, dtype=dtype)).asnumpy().ravel()
    assert np.array_equal(out, ids % 1000)


def test_integer_input_can_be_an_output():
    net = ready(networks.Calling(lambda F, ids, embed: (embed(ids), ids + 1), nn.Embedding(10, 4)))
    amp.convert(net)
    vectors, ids = net(nd.array([1, 2], dtype="int32"))
    assert vectors.dtype == np.float32
    assert ids.dtype == np.int32


# float64 inside a network

WIDE = {  # of numbers that float32 rounds: 1 + 1e-12, and 1e8 + 0 to 3
    "log": lambda F, y: F.log(y * 0 + 1 + 1e-12) * 1e12,
    "softmax": lambda F, y: F.softmax(y + 1e8 * (y > 1)),
    "variance": lambda F, y: F.mean(F.square(F.broadcast_sub(
        y + 1e8, F.mean(y + 1e8, axis=1, keepdims=True))), axis=1),
    "LayerNorm": lambda F, y: F.LayerNorm(y + 1e8, F.ones(4, dtype="float64"),
                                          F.zeros(4, dtype="float64"))}


@pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16"])
@pytest.mark.parametrize("name", WIDE)
def test_float64_inside_a_network_is_not_narrowed(name, policy):
    def forward(F, x, dense):
        return WIDE[name](F, dense(x).astype("float64")).astype("float32")

    def made():
        dense = ready(nn.Dense(4, in_units=4, use_bias=False))
        dense.weight.set_data(nd.array(np.diag([0, 1, 2, 3])))
        return networks.Calling(forward, dense)

    ones = nd.ones((2, 4))
    found = amp.convert(made(), policy)(ones)
    np.testing.assert_allclose(found.asnumpy(), made()(ones).asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.mx_nd("numpy mode has no sparse gradients")
@pytest.mark.parametrize("policy", ["float16", "mixed_bfloat16"])
def test_float64_is_narrowed_for_operators_without_it(policy):
    def forward(F, x, labels, embed, norm):
        wide = F.log(x.astype("float64") + 2)
        F.CTCLoss(F.reshape(x, (4, 2, 3)), labels)
        boxes = F.contrib.MultiBoxPrior(F.reshape(wide, (1, 1, 4, 6)))
        return norm(wide), embed(labels), F.argmax(wide, axis=1), boxes

    net = networks.Calling(forward, nn.Embedding(8, 2, sparse_grad=True),
                           nn.BatchNorm(in_channels=6))
    net.initialize()
    amp.convert(net, policy)
    labels = nd.ones((2, 3), dtype="float64")
    assert {out.dtype for out in net(nd.ones((4, 6)), labels)} == {np.float32}


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_network_with_float64_inside_trains_as_in_float32(policy):
    def forward(F, x, first, second):
        return second(F.softmax(first(x).astype("float64")).astype("float32"))

    def trained(dtype):
        net = networks.Calling(forward, nn.Dense(4, in_units=3), nn.Dense(1, in_units=4))
        net, trainer = with_trainer(amp.convert(ready(net, mx.init.Constant(0.25)), dtype),
                                    "sgd", {"learning_rate": 0.5})
        for x in (1, 2, 3, 4):
            assert learn(lambda x: (net(x) - x.mean() + 1) ** 2, trainer, nd.full((2, 3), x))
        return [trainer.master(p).asnumpy() for p in net.collect_params().values()]

    for found, wanted in zip(trained(policy), trained("float32")):
        np.testing.assert_allclose(found, wanted, atol=0.02)


# Numbers outside the range of float16


def with_large_bias(largest):
    net = holding(nn.Dense(4, in_units=3), nn.Dense(2, in_units=4))
    net[0].bias.set_data(nd.array([0, 1, -largest, 2]))
    return net


@pytest.mark.parametrize("policy", ["float16", "pure_float16"])
def test_parameter_beyond_float16_stays_float32_and_is_logged(policy, caplog):
    net = amp.convert(with_large_bias(65520), policy)
    assert net[0].bias.data().asnumpy()[2] == -65520
    assert "dense0_bias (up to 65520)" in caplog.text.replace(net[0].prefix, "dense0_")
    assert [net[i].weight.dtype for i in (0, 1)] == ["float16"] * 2
    amp.convert(net, keep=[nn.Dense])
    assert np.isfinite(net(nd.ones((1, 3))).asnumpy()).all()


@pytest.mark.parametrize("largest", [65519, float("inf"), float("nan")])
def test_parameter_within_float16_or_nonfinite_becomes_float16(largest, caplog):
    net = amp.convert(with_large_bias(largest))
    assert net[0].bias.dtype == "float16"
    assert "stay float32" not in caplog.text


def test_loading_numbers_beyond_float16_is_refused(tmp_path):
    path = str(tmp_path / "net.params")
    with_large_bias(1e5).save_parameters(path)
    net = amp.convert(with_large_bias(3))
    for load in (lambda: net.load_parameters(path),
                 lambda: net[0].bias.set_data(nd.array([0, 1e5, 0, 0]))):
        with pytest.raises(ValueError, match=r"bias is float16.*Received: up to 100000"):
            load()
    assert net[0].bias.data().asnumpy()[2] == -3


# Norms


class MyNorm(nn.LayerNorm):
    """A norm defined by the user."""


NORMS = {"BatchNorm": nn.BatchNorm, "LayerNorm": nn.LayerNorm, "MyNorm": MyNorm}
OF_ND = {"SyncBatchNorm": lambda: gluon.contrib.nn.SyncBatchNorm(num_devices=1),
         "GroupNorm": lambda: nn.GroupNorm(2), "InstanceNorm": nn.InstanceNorm}


@pytest.mark.parametrize("cls", [nn.HybridSequential, nn.Sequential])
@pytest.mark.parametrize("name", [*NORMS, *(
    pytest.param(name, marks=pytest.mark.mx_nd("its operator takes mx.nd arrays alone"))
    for name in OF_ND)])
def test_norms_of_all_kinds_stay_float32(name, cls, x):
    norm = {**NORMS, **OF_ND}[name]()
    net = amp.convert(holding(nn.Conv2D(4, 3), norm, nn.Dense(3), cls=cls))
    for _ in range(2):  # before and after the deferred initialization
        assert {types(net[1])[n] for n in types(net[1])} == {"float32"}
        assert set(types(net[0]).values()) | set(types(net[2]).values()) == {"float16"}
        assert net(x).dtype == np.float32
    step(net, x)
    assert np.isfinite(net(x).asnumpy()).all()


def test_norms_in_symbol_block_stay_float32(tmp_path, x):
    more = [] if mx.util.is_np_array() else [nn.GroupNorm(2, prefix="three_"),
                                             nn.InstanceNorm(prefix="four_")]
    source = holding(nn.Conv2D(4, 3, prefix="c_"), nn.BatchNorm(prefix="one_"),
                     nn.LayerNorm(prefix="two_"), *more, nn.Dense(3, prefix="d_"))
    source.hybridize()
    wide = source(x).asnumpy()
    source.export(str(tmp_path / "net"))
    net = imported(tmp_path / "net")
    amp.convert(net)
    assert {n for n, t in types(net).items() if t == "float16"} \
        == {"c_weight", "c_bias", "d_weight", "d_bias"}
    np.testing.assert_allclose(net(x).asnumpy(), wide, atol=0.02 * np.abs(wide).max())


@pytest.mark.parametrize("kwargs", [{"differentiable": False}, {}])
def test_batch_norm_operator_called_by_user_works(kwargs):
    """Only grad_req distinguishes its statistics."""
    def forward(F, x, dense, gamma, beta, mean, var):
        return F.BatchNorm(dense(x), gamma, beta, mean, var, fix_gamma=False)

    statistics = {"shape": (4,), "grad_req": "null", **kwargs}
    net = ready(networks.Calling(forward, nn.Dense(4, in_units=6), parameters={
        "gamma": {"shape": (4,), "init": "ones"}, "beta": {"shape": (4,), "init": "zeros"},
        "mean": {**statistics, "init": "zeros"}, "var": {**statistics, "init": "ones"}}))
    x = nd.random.normal(shape=(8, 6))
    net.hybridize()
    wide = net(x).asnumpy()
    np.testing.assert_allclose(amp.convert(net)(x).asnumpy(), wide, atol=0.01)
    step(net, x)
    out = net(x).asnumpy()
    assert np.array_equal(amp.convert(net)(x).asnumpy(), out)


# Keep


@pytest.mark.parametrize("keep", [lambda net: net.output, lambda net: [net.output],
                                  lambda net: nn.Dense, lambda net: {nn.Dense},
                                  lambda net: ".*dense0", lambda net: [".*conv0", "net_dense0"]])
def test_kept_parts_stay_float32(keep, x):
    net = make(prefix="net_")
    keep = keep(net)
    amp.convert(net, keep=keep)
    assert set(types(net.output).values()) == {"float32"}
    net(x)
    assert runs_in(net, "dense0_fwd") == "float32"
    conv = "float32" if ".*conv0" in (keep if isinstance(keep, list) else []) else "float16"
    assert runs_in(net, "conv0_fwd") == conv
    assert types(net.features[0]) == dict.fromkeys(types(net.features[0]), conv)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
def test_kept_block_keeps_its_children(policy, x):
    net = make()
    amp.convert(net, policy, keep=net.features)
    net(x)
    assert set(types(net.features).values()) == {"float32"}
    assert runs_in(net, "conv0_fwd") == "float32"
    assert runs_in(net, "dense0_fwd") == "float16"


def test_kept_net_computes_as_in_float32(x):
    net = make()
    wide = net(x).asnumpy()
    np.testing.assert_allclose(amp.convert(net, keep=net)(x).asnumpy(), wide, rtol=1e-5, atol=1e-6)


def test_nodes_of_symbol_block_are_kept_by_name(tmp_path, rng):
    net = amp.convert(networks.exported(tmp_path), keep=".*dense0_fwd")
    net(networks.images(8)(rng)[0])
    kinds = types(net)
    assert {kinds["exported_dense0_weight"], kinds["exported_dense0_bias"]} == {"float32"}
    assert kinds["exported_conv0_weight"] == "float16"
    assert runs_in(net, "dense0_fwd") == "float32"
    assert runs_in(net, "conv0_fwd") == "float16"


def test_unknown_keep_in_symbol_block_names_similar_nodes(tmp_path):
    with pytest.raises(ValueError, match=r"matches nothing.*exported_dense0_fwd"):
        amp.convert(networks.exported(tmp_path), keep="exported_dense1_fwd")


# Shared parameters


@pytest.mark.parametrize("kept", ["embed", "out"])
def test_shared_parameter_is_float32_if_one_of_its_blocks_is(kept, rng):
    net = make(networks.Tied)
    amp.convert(net, keep=getattr(net, kept))
    assert net.embed.weight is net.out.weight
    assert set(types(net.embed).values()) == {"float32"}
    net(nd.array(rng.integers(0, 50, (4, 6))))
    assert runs_in(net, "embedding0_fwd") == "float32"
    assert runs_in(net, "dense1_fwd") == ("float32" if kept == "out" else "float16")


def test_parameter_shared_with_plain_block_stays_float32():
    class Shares(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.weight = self.params.get("weight", shape=(4, 4))
                self.dense = nn.Dense(4, in_units=4, use_bias=False, params=self.params)

        def forward(self, x):
            return nd.dot(self.dense(x), self.weight.data())

    net = amp.convert(make(Shares))
    assert net.dense.weight is net.weight
    assert net(nd.ones((2, 4))).dtype == np.float32


# Parameters of other kinds


@pytest.mark.mx_nd("no sparse arrays")
def test_embedding_with_sparse_gradients_stays_float32_and_trains():
    net = amp.convert(holding(nn.Embedding(50, 4, sparse_grad=True), nn.Dense(3)))
    assert set(types(net[0]).values()) == {"float32"}
    words = nd.array([[1, 2], [3, 1]])
    net(words)
    before = net[0].weight.data().asnumpy()
    step(net, words)
    changed = np.abs(net[0].weight.data().asnumpy() - before).sum(axis=1) > 0
    assert changed.nonzero()[0].tolist() == [1, 2, 3]
    assert net[0].weight.grad().stype == "row_sparse"


@pytest.mark.parametrize("when", ["before", "after"])
def test_constants_and_ids_among_them_are_not_rounded(when):
    table = nn.Embedding(3000, 1)
    net = networks.Calling(
        lambda F, x, table, constant: (F.broadcast_add(x, constant), table(constant)), table,
        parameters={"constant": nd.array([1, 2049, 2999])})
    if when == "before":
        amp.convert(net)
    net.initialize()
    if when == "after":
        amp.convert(net)
    table.weight.set_data(nd.arange(3000).reshape((3000, 1)) % 1000)
    for _ in range(2):
        total, rows = net(nd.ones((2, 3)))
        assert np.array_equal(total.asnumpy(), [[2, 2050, 3000]] * 2)
        assert np.array_equal(rows.asnumpy().ravel(), [1, 49, 999])
        amp.restore(net)


def test_constants_that_fit_have_the_type_of_what_they_meet():
    x = nd.full((1, 1), 1024, dtype="float16")
    for value, expected in ((0.5, 0), (2049, 2049)):  # which float16 and float32 compute
        net = ready(networks.Calling(lambda F, x, constant: F.broadcast_add(x, constant) - x,
                                     parameters={"constant": nd.array([value])}))
        assert amp.convert(net, "pure_float16")(x).asnumpy().item() == np.float16(expected), value


def test_integer_parameters_keep_their_type():
    net = amp.convert(ready(networks.Calling(
        lambda F, x, table, ids: F.broadcast_add(x, table(ids)), nn.Embedding(5, 3),
        parameters={"ids": nd.array([1, 2], dtype="int32")})))
    assert np.dtype(net.ids.dtype) == np.int32
    assert net(nd.ones((2, 3))).shape == (2, 3)
    assert np.dtype(amp.restore(net).ids.dtype) == np.int32


# Initial values


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("of", [lambda net: net, lambda net: net.collect_params()],
                         ids=["network", "parameters"])
def test_initial_values_match_float32_network(of, again):
    drawn = []
    for policy in ("float32", "float16"):
        net = sequence(nn.Dense(4, in_units=3), nn.LayerNorm(), nn.Dense(2))  # deferred size
        if again:
            net.initialize()
        amp.convert(net, policy)
        net.hybridize()
        np.random.seed(3)
        mx.random.seed(3)
        of(net).initialize(mx.init.Xavier(), force_reinit=again)
        net(nd.ones((2, 3)))
        assert np.dtype(net[2].weight.grad().dtype) == policy
        drawn.append(values(net))
    exact, half = drawn
    assert all(np.array_equal(half[name], value) for name, value in rounded(exact).items())


# Refused calls


@pytest.mark.parametrize("call", [amp.convert, amp.restore])
@pytest.mark.parametrize("thing", [3, None, "resnet18_v1", [nn.Dense(3)], mx.sym.var("x")])
def test_other_objects_are_refused(call, thing):
    with pytest.raises(TypeError, match="takes a gluon Block") as error:
        call(thing)
    assert f"Received: {type(thing).__name__}" in str(error.value)
    if call is amp.convert and isinstance(thing, mx.sym.Symbol):
        assert "gluon_amp.convert_symbol" in str(error.value)


@pytest.mark.parametrize(("forward", "message"), [
    (lambda F, x: x * x.shape[0], "no attribute 'shape'"),
    (lambda F, x: x if x.sum() > 0 else -x, "bool"),
    (lambda F, x: x * float(x.sum().asnumpy().item()), "asnumpy"),
    (lambda F, x: F.array([1, 2, 3, 4]) + x, "array")], ids=["shape", "bool", "value", "array"])
def test_network_that_cannot_be_traced_is_refused_with_remedy(forward, message):
    net, x = nn.HybridLambda(forward), mx.nd.ones((2, 4))
    net(x)
    amp.convert(net)
    with pytest.raises(RuntimeError, match=f"never hybridized, and cannot.*{message}.*plain"):
        net(x)


class Reads(networks.Calling):
    """Reads a shape, values, or compares a symbol."""


@pytest.mark.parametrize("prefix", ["reader_", ""])
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("read", [
    lambda F, x: x.reshape((x.shape[0], -1)), lambda F, x: x / x.size,
    lambda F, x: x if float(x.mean().asnumpy().item()) > 9 else x + 1])
def test_block_that_reads_shapes_is_named_and_can_be_kept(read, hybridized, prefix):
    net = nn.HybridSequential()
    with net.name_scope():
        inner = sequence(nn.Dense(8), Reads(read, prefix=prefix), nn.Dense(3))
        net.add(inner, nn.Dense(2))
    amp.convert(ready(net))
    if hybridized:
        net.hybridize()
    x = mx.nd.ones((2, 4))
    with pytest.raises(RuntimeError, match=r"The hybrid_forward of \w+ \(Reads\)") as error:
        net(x)
    assert ("without hybridize()" in str(error.value)) == hybridized
    keep = re.search(r"keep=\[(.*?)\]", str(error.value))[1]
    assert keep == (repr(inner[1].name) if prefix else "Reads")
    amp.convert(net, keep=eval(keep, {"Reads": Reads}))
    net.hybridize(active=False)
    assert net(x).shape == (2, 2)
    assert inner[0].weight.dtype == "float16"


def test_network_without_hybrid_block_logs_that_nothing_changes(caplog):
    class Plain(gluon.Block):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(4, 3))

        def forward(self, x):
            return mx.nd.dot(x, self.weight.data())
    for net in (Plain(), nn.Sequential()):
        net.initialize()
        amp.convert(net)
        text, = [r.getMessage() for r in caplog.records]
        assert "convert changed nothing" in text
        assert f"({type(net).__name__}) has no HybridBlock" in text
        caplog.clear()
    net.add(nn.Dense(3, in_units=4))  # converted when it is added
    net.initialize()
    assert net[0].weight.dtype == "float16"


@pytest.mark.parametrize("operation", [
    lambda a, b: a * b, lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a / b,
    lambda a, b: a > b])
def test_operation_of_symbols_that_broadcasts_names_its_replacement(operation):
    net = networks.Calling(lambda F, x: operation(x, F.slice_axis(x, axis=1, begin=0, end=1)))
    x = nd.ones((2, 4))
    expected = net(x)
    assert expected.shape == (2, 4)
    amp.convert(net)
    if mx.util.is_np_array():  # whose symbols broadcast
        assert net(x).dtype == expected.dtype
        assert np.array_equal(net(x).asnumpy(), expected.asnumpy())
        return
    with pytest.raises(mx.MXNetError, match=r"In hybrid_forward, use F\.broadcast_mul\(a, b\)"):
        net(x)
    with pytest.raises(mx.MXNetError, match=r"expected \[4\], got \[5\]$"):  # these never broadcast
        mx.nd.elemwise_add(mx.nd.ones(4), mx.nd.ones(5)).wait_to_read()


def mixed_by(what):
    """Own code that mixes a converted network's float16 arrays with float32 ones."""
    net = ready(nn.Dense(3, in_units=4, prefix="one_"))
    copies = {p: p.data().copy() for p in net.collect_params().values()}
    twin = nn.Dense(3, in_units=4, prefix="one_", params=net.collect_params())
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd")
    if what == "average":
        return [0.9 * copy + 0.1 * p.data() for p, copy in copies.items()]
    if what == "average in place":
        return [copy.__iadd__(p.data()) for p, copy in copies.items()]
    if what == "twin":
        return twin(mx.nd.ones((2, 4)))
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(mx.nd.ones((2, 4))), mx.nd.ones((2, 3))).mean()
        if what == "penalty":
            return loss + (net.weight.data() ** 2).sum()
    trainer.backward(loss)
    total = mx.nd.zeros(1)
    for p in net.collect_params().values():
        total = total + (p.grad() ** 2).sum()
    return total


@pytest.mark.parametrize("what", ["twin", *(
    pytest.param(what, marks=pytest.mark.mx_nd("mx.np functions take both types"))
    for what in ("average", "average in place", "penalty", "norm"))])
def test_mixture_of_float16_and_float32_names_the_cast(what):
    with pytest.raises(mx.MXNetError, match=r"parameter\.data\(\)\.astype\('float32'\)"):
        mixed_by(what)


@pytest.mark.parametrize("ask", [
    lambda net, x: net.hybridize(backend="MKLDNN"),
    lambda net, x: net.optimize_for(x, backend="MKLDNN")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_backend_graph_is_refused(ask, when, x):
    net = make()
    net(x)
    calls = [lambda: ask(net, x), lambda: amp.convert(net)]
    if when == "after":
        calls.reverse()
    calls[0]()
    with pytest.raises(ValueError, match=r"backends cannot.*hybridize\(\) without.*'MKLDNN'"):
        calls[1]()
    amp.restore(net)
    net.hybridize(clear=True)
    amp.convert(net)(x)


@pytest.mark.parametrize("policy", ["fp16", 16])
def test_unknown_policy_lists_valid_ones(policy):
    net = make()
    with pytest.raises(ValueError, match="unknown policy") as caught:
        amp.convert(net, policy)
    for words in ("float32", "mixed_float16", "mixed_bfloat16", "O0", f"Received: {policy!r}"):
        assert words in str(caught.value)
    assert type(net) is Net


@pytest.mark.parametrize(("keep", "said"), [
    ("net_dense9", "'net_dense9' matches nothing.*net_dense0"),
    ([nn.Dense(3, prefix="other_dense0_")], "block other_dense0 matches nothing.*net_dense0"),
    ([nn.Dense, nn.Conv3D], "class Conv3D matches nothing.*Conv2D"),
    ("dense", "matches nothing"),  # whole names only
    ("*dense", r"keep: '\*dense' is not a regular expression"),
    *((keep, "keep takes blocks, classes of blocks, regular")
      for keep in ([3], [None], [int], 3))])
def test_keep_that_matches_nothing_is_refused(keep, said):
    net = make(prefix="net_")
    with pytest.raises((ValueError, TypeError), match=said):
        amp.convert(net, keep=keep)
    assert type(net) is Net
    assert set(types(net).values()) == {"float32"}


class Products(gluon.HybridBlock):
    """A product of its inputs and of its own parameter."""

    def __init__(self):
        super().__init__(prefix="net_")
        self.factor = self.params.get("factor", shape=(1,), init="ones")

    def hybrid_forward(self, F, x, other, factor):
        return F.broadcast_mul(F.batch_dot(x, other), factor)


class Outside(gluon.Block):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner(*inputs)


@pytest.mark.parametrize("wrap", [lambda net: net, Outside])
def test_keep_matches_operators_before_first_call(wrap):
    x, other = nd.ones((1, 1, 70000)), nd.ones((1, 70000, 1))
    for keep, result in ((["net_batch_dot0", "net_broadcast_mul0"], 70000), ([], np.inf)):
        net = amp.convert(ready(wrap(Products())), keep=keep)
        assert net(x, other).asnumpy().item() == result
    with pytest.raises(ValueError, match=r"'net_batch_dot1' matches nothing.*net_batch_dot0"):
        amp.convert(wrap(Products()), keep=["net_batch_dot1"])


def test_name_of_a_node_that_only_a_call_shows_is_refused_before_it():
    net = ready(networks.Calling(lambda F, x: F.exp(x), prefix="net_"))  # takes *args
    with pytest.raises(ValueError, match=r"_exp0' matches nothing yet\. .*hybridize.*: net$"):
        amp.convert(net, keep="net_exp0")
    amp.convert(net, keep=amp.ops("exp"))
    amp.restore(net).hybridize()
    expected = net(nd.ones(3))
    assert np.array_equal(amp.convert(net, keep="net_exp0")(nd.ones(3)).asnumpy(),
                          expected.asnumpy())


class Sampler(nn.HybridBlock):
    """Draws by two tables in float64, as GluonNLP's UnigramCandidateSampler."""

    def __init__(self, count=4000):
        super().__init__()
        numbers = np.random.RandomState(3)
        with self.name_scope():
            self.prob = self.params.get_constant(
                "prob", nd.array(numbers.uniform(size=count), dtype="float64"))
            self.alias = self.params.get(
                "alias", shape=(count,), dtype="float64", differentiable=False,
                init=mx.init.Constant(nd.arange(count, dtype="float64")))
        self.count = count

    def hybrid_forward(self, F, like, prob, alias):
        place = F.floor(F.random.uniform(high=self.count, shape=64, dtype="float64"))
        accepted = F.random.uniform(shape=64, dtype="float64") \
            < F.gather_nd(prob, place.reshape((1, -1)))
        other = F.gather_nd(alias, place.reshape((1, -1)))
        return F.cast(place * accepted + other * (1 - accepted), "float32")


class SkipGram(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.sampler, self.table = Sampler(), nn.Embedding(4000, 8)

    def hybrid_forward(self, F, x):
        return F.broadcast_add(self.table(x).sum() * 0, self.sampler(x))


@pytest.mark.parametrize("keep", [[], [Sampler]])
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "float32"])
def test_float64_that_nothing_trains_keeps_its_type(policy, keep):
    net, x = SkipGram(), nd.ones((3, 5))
    net.initialize()
    mx.random.seed(5)
    expected = net(x).asnumpy()
    amp.convert(net, policy, keep=keep)
    tables = net.sampler.prob, net.sampler.alias
    assert {np.dtype(p.dtype).name for p in tables} == {"float64"}
    mx.random.seed(5)
    assert np.array_equal(net(x).asnumpy(), expected)
    amp.restore(net)
    assert {np.dtype(p.dtype).name for p in tables} == {"float64"}


def test_float64_in_a_kept_block_is_not_narrowed():
    def wide(F, x):
        return F.cast(F.cast(x, "float64") + 1e-9 - 1, "float32")

    net = ready(sequence(nn.Dense(3, in_units=4), nn.HybridLambda(wide)), mx.init.Constant(0.25))
    x = nd.ones((2, 4))
    expected = net(x).asnumpy()
    amp.convert(net, keep=[nn.HybridLambda])
    assert np.array_equal(net(x).asnumpy(), expected)
    assert (expected != 0).all()


def test_float64_parameters_are_refused_by_name():
    net = make()
    net.output.cast("float64")
    with pytest.raises(ValueError, match=r"float64: .*dense0_weight, .*dense0_bias"):
        amp.convert(net)
    assert type(net) is Net


def test_net_cast_to_float16_by_hand_is_corrected(x):
    net = make()
    net.cast("float16")
    net.features[1].gamma.cast("float16")
    amp.convert(net)
    assert {n for n, t in types(net).items() if t == "float32"} \
        == {n for n in types(net) if "batchnorm" in n}
    assert net(x).dtype == np.float32
    assert set(types(amp.restore(net)).values()) == {"float32"}
    step(amp.convert(net), x)


# Trainers


DEVICES = [[mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]]


def train_on(devices, net, trainer, x):
    autograd.backward(recorded(lambda: [(net(x.as_in_context(d)) ** 2).mean() for d in devices]))
    trainer.step(1)


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
def test_convert_after_step_of_trainer_is_refused(devices, x):
    net = ready(Net(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    train_on(devices, net, trainer, x)
    assert bool(trainer._update_on_kvstore) == (len(devices) == 2)
    with pytest.raises(ValueError, match=r"already stepped.*conv0_weight"):
        amp.convert(net)
    assert type(net) is Net
    assert set(types(net).values()) == {"float32"}
    amp.convert(net, "mixed_float16")  # no parameter changes its type
    train_on(devices, net, trainer, x)


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
def test_convert_before_first_step_of_trainer_is_allowed(devices, x):
    net = ready(Net(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.1, "multi_precision": True})
    amp.convert(net)
    before = values(net)["dense0_weight"]
    train_on(devices, net, trainer, x)
    assert (values(net)["dense0_weight"] != before).any()
    amp.convert(net)  # no type changes
    kinds = types(net)
    for undo in (amp.restore, lambda n: amp.convert(n, "mixed_float16"),
                 lambda n: amp.convert(n, keep=n.output)):
        with pytest.raises(ValueError, match=r"already stepped.*dense0_weight"):
            undo(net)
    assert types(net) == kinds
    train_on(devices, net, trainer, x)


def test_convert_is_allowed_after_a_trainer_that_failed(x):
    net = make()
    for kind in (gluon.Trainer, amp.Trainer):
        with pytest.raises(TypeError, match="'lr'"):
            kind(net.collect_params(), "sgd", {"lr": 0.1})
        amp.restore(amp.convert(net))


def test_restore_is_allowed_after_new_trainer(x):
    net = amp.convert(make())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    train_on([mx.cpu()], net, trainer, x)
    out = net(x).asnumpy()
    with pytest.raises(ValueError, match=r"already stepped.*make a new Trainer"):
        amp.restore(net)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.restore(net)
    np.testing.assert_allclose(net(x).asnumpy(), out, rtol=0.02, atol=0.01)
    train_on([mx.cpu()], net, trainer, x)
    assert np.isfinite(net(x).asnumpy()).all()


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "gluon_amp"]


@pytest.mark.parametrize(("arguments", "said"), [
    ({}, ["no float32 master weights", "no loss scale"]),
    ({"multi_precision": True}, ["no loss scale"]),
    ({"rescale_grad": 1 / 128}, ["no float32 master weights"]),
    ({"multi_precision": True, "rescale_grad": 1 / 128}, [])])
@pytest.mark.filterwarnings("ignore:Accumulating with float16:UserWarning")
def test_gluon_trainer_of_converted_network_warns_once(arguments, said, caplog):
    net = amp.convert(ready(nn.Dense(3, in_units=4)))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, **arguments})
    for _ in range(3):
        recorded(lambda: net(nd.ones((2, 4))).sum()).backward()
        trainer.step(2)
    texts = warnings(caplog)
    assert len(texts) == bool(said)
    for words in ("no float32 master weights", "no loss scale"):
        assert (words in "".join(texts)) == (words in said)


@pytest.mark.parametrize(("policy", "said"), [
    ("mixed_float16", "with no loss scale: gradients below 3e-8 are 0. "), ("mixed_bfloat16", ""),
    ("tf32", ""), ("bfloat16", "with no float32 master weights: updates below 1/256 ")])
def test_gluon_trainer_warns_for_each_policy(policy, said, caplog):
    """Also if a later Trainer has the parameters, and after `allreduce_grads`."""
    for by_hand in (False, True):
        net = amp.convert(ready(nn.Dense(3, in_units=4)), policy)
        trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
        amp.Trainer(net.collect_params(), "sgd")
        for _ in range(2):
            with autograd.record():
                loss = net(nd.ones((2, 4))).sum()
            loss.backward()
            if by_hand:
                trainer.allreduce_grads()
            (trainer.update if by_hand else trainer.step)(2)
        texts = warnings(caplog)
        assert len(texts) == bool(said)
        assert said in "".join(texts)
        caplog.clear()


def test_gluon_trainer_of_restored_network_does_not_warn(caplog):
    net = ready(nn.Dense(3, in_units=4))
    amp.restore(amp.convert(net))
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    recorded(lambda: net(nd.ones((2, 4))).sum()).backward()
    trainer.step(2)
    assert not caplog.records


def test_trainer_with_scaled_loss_does_not_warn(caplog):
    net = amp.convert(ready(nn.Dense(3, in_units=4)))
    scale = amp.StaticLossScale(128)
    loss_fn = scale.loss(gluon.loss.L2Loss)
    trainer = gluon.Trainer(net.collect_params(), scale.optimizer("sgd", learning_rate=0.1))
    recorded(lambda: loss_fn(net(nd.ones((2, 4))), nd.ones((2, 3)))).backward()
    trainer.step(2)
    assert not caplog.records


@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16", "mixed_float16"])
@pytest.mark.parametrize("runs_first", [False, True])
def test_initializer_with_an_array_serves_all_types(runs_first, policy):
    array = np.array([[0.1, 2, 3], [4, 5, 6]], "float32")
    for value in (nd.array(array), array):
        init = mx.init.Constant(value)
        one = nn.Dense(2, in_units=3, weight_initializer=init)
        net = ready(networks.Calling(lambda F, x, one, other: one(x) + other(x), one,
                                     nn.Dense(2, weight_initializer=init)), mx.init.Xavier())
        if runs_first:
            net(nd.ones((1, 3)))
        amp.convert(net, policy)
        if policy == "float32":
            net.hybridize()
        expected = 2 * array.sum(1)
        np.testing.assert_allclose(net(nd.ones((1, 3))).asnumpy()[0], expected, rtol=0.01)
        copied = copy.deepcopy(net)
        np.testing.assert_allclose(copied(nd.ones((1, 3))).asnumpy()[0], expected, rtol=0.01)
        amp.restore(net).hybridize()
        net.initialize(force_reinit=True)
        assert np.array_equal(one.weight.data().asnumpy(), array)
        net(nd.ones((1, 3)))


class Scaled(gluon.HybridBlock):
    """A layer with a factor for each output, as LayerScale."""

    def __init__(self, factor):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(4, in_units=3, weight_initializer="ones",
                                 bias_initializer=mx.init.Constant(1e-6))
            self.factor = self.params.get("factor", shape=(4,), init=mx.init.Constant(factor))

    def hybrid_forward(self, F, x, factor):
        return F.broadcast_mul(self.body(x), factor)


@pytest.mark.parametrize("when", ["converted", "initialized", "loaded"])
@pytest.mark.parametrize(("policy", "factor", "is_named"), [
    ("float16", 1e-6, True), ("float16", -2e-8, True), ("pure_float16", 5e-5, True),
    ("float16", 1e-4, False), ("float16", 0, False), ("bfloat16", 1e-6, False),
    ("float32", 1e-6, False)])
def test_parameter_of_small_numbers_is_named(policy, factor, is_named, when, caplog, tmp_path):
    path = str(tmp_path / "net.params")
    net = Scaled(factor)
    if when == "initialized":
        amp.convert(net, policy)
    net.initialize()
    if when == "loaded":
        net.save_parameters(path)
        net = amp.convert(make(Scaled, factor=1), policy)
        assert not caplog.text
        net.load_parameters(path)
    if when == "converted":
        amp.convert(net, policy)
    assert (net.factor.name in caplog.text) == is_named
    assert net.body.bias.name not in caplog.text
