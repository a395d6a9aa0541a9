"""`convert` and `restore`: what they keep, refuse, write and undo."""
import json
import logging
import pickle
import subprocess
import sys

import gluon_amp as amp
import networks
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn


class MyNorm(nn.LayerNorm):
    """A user's own norm."""


class Net(gluon.HybridBlock):
    """Features with a norm, and an output."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8),
                              nn.Activation("relu"), nn.GlobalAvgPool2D())
            self.output = nn.Dense(5, in_units=8)

    def hybrid_forward(self, F, x):
        return self.output(self.features(x))


def make(cls=Net, **kwargs):
    net = cls(**kwargs)
    net.initialize(mx.init.Xavier())
    return net


def holding(*children, cls=nn.HybridSequential):
    net = cls()
    net.add(*children)
    net.initialize(mx.init.Xavier())
    return net


@pytest.fixture()
def x(rng):
    return nd.array(rng.standard_normal((4, 3, 8, 8)))


def types(net):
    return {name: np.dtype(p.dtype).name for name, p in net.collect_params().items()}


def values(net):
    """Of the parameters, by name without the net's prefix."""
    return {name[len(net.prefix):]: p.data().asnumpy() for name, p in net.collect_params().items()}


def rounded(arrays):
    return {name: a.astype(np.float16).astype(np.float32) for name, a in arrays.items()}


def step(net, x):
    trainer = gluon.Trainer(net.collect_params(), amp.optimizer("sgd", learning_rate=0.1))
    with autograd.record():
        loss = (net(x) ** 2).mean()
    loss.backward()
    trainer.step(1)


def mixed(net):
    """The graph that a GPU would run, its node by name, and the types of its entries."""
    graph, variables = net.mixed_graph(["float32"])
    return {n.name: n for n in graph.nodes()}, graph.types(variables)


def runs_in(net, name):
    """The type of the first input of the only node whose name ends so."""
    nodes, entries = mixed(net)
    (node,) = [n for key, n in nodes.items() if key.endswith(name)]
    return entries[node.inputs[0]]


def run_python(code, *args):
    start = "import numpy as np\nif 'bool' not in vars(np):\n    np.bool = bool\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", start + code, *map(str, args)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


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


# What is refused


@pytest.mark.parametrize("thing", [3, None, "resnet18_v1", [nn.Dense(3)]])
def test_what_is_no_block_is_refused(thing):
    with pytest.raises(TypeError, match=f"takes a gluon Block.*{type(thing).__name__}"):
        amp.convert(thing)


def test_a_symbol_is_sent_to_convert_symbol():
    with pytest.raises(TypeError, match=r"gluon_amp\.convert_symbol"):
        amp.convert(mx.sym.var("x"))


@pytest.mark.parametrize("policy", ["fp16", "Float16", None, 16])
def test_an_unknown_policy_lists_the_valid_ones(policy):
    net = make()
    with pytest.raises(ValueError, match="unknown policy") as caught:
        amp.convert(net, policy)
    text = str(caught.value)
    for name in ("float32", "float16", "mixed_float16", "pure_float16", "mixed_bfloat16", "O0",
                 "O3", f"Received: {policy!r}"):
        assert name in text
    assert type(net) is Net


def test_keep_that_matches_nothing_lists_near_names():
    net = make(prefix="net_")
    with pytest.raises(ValueError, match=r"'net_dense9' matches nothing.*net_dense0"):
        amp.convert(net, keep="net_dense9")
    with pytest.raises(ValueError, match=r"block 'other_dense0' matches nothing.*net_dense0"):
        amp.convert(net, keep=[nn.Dense(3, prefix="other_dense0_")])
    with pytest.raises(ValueError, match=r"class Conv3D matches nothing.*Conv2D"):
        amp.convert(net, keep=[net.output, nn.Conv3D])
    assert type(net) is Net
    assert set(types(net).values()) == {"float32"}


def test_keep_that_matches_only_part_of_a_name_matches_nothing():
    with pytest.raises(ValueError, match="matches nothing"):
        amp.convert(make(), keep="dense")


def test_keep_that_is_no_regular_expression_says_so():
    with pytest.raises(ValueError, match=r"keep: '\*dense' is no regular expression"):
        amp.convert(make(), keep="*dense")


@pytest.mark.parametrize("keep", [[3], [None], [int], 3])
def test_keep_of_a_wrong_type_says_what_it_takes(keep):
    with pytest.raises(TypeError, match=r"keep takes blocks, classes of blocks and regular"):
        amp.convert(make(), keep=keep)


def test_float64_parameters_are_named():
    net = make()
    net.output.cast("float64")
    with pytest.raises(ValueError, match=r"float64: .*dense0_weight, .*dense0_bias"):
        amp.convert(net)
    assert type(net) is Net


def test_a_net_cast_by_hand_to_float16_is_mended(x):
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
    with autograd.record():
        losses = [(net(x.as_in_context(d)) ** 2).mean() for d in devices]
    autograd.backward(losses)
    trainer.step(1)


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
def test_a_trainer_that_has_stepped_makes_convert_raise(devices, x):
    net = Net()
    net.initialize(ctx=devices)
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
def test_a_trainer_that_has_not_stepped_may_wait(devices, x):
    net = Net()
    net.initialize(ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.1, "multi_precision": True})
    amp.convert(net)
    before = values(net)["dense0_weight"]
    train_on(devices, net, trainer, x)
    assert (values(net)["dense0_weight"] != before).any()
    amp.convert(net)  # the same types
    kinds = types(net)
    for undo in (amp.restore, lambda n: amp.convert(n, "mixed_float16"),
                 lambda n: amp.convert(n, keep=n.output)):
        with pytest.raises(ValueError, match=r"already stepped.*dense0_weight"):
            undo(net)
    assert types(net) == kinds
    train_on(devices, net, trainer, x)


def test_a_new_trainer_lets_a_trained_net_be_restored(x):
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


def test_an_integer_input_may_be_an_output():
    class Both(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)

        def hybrid_forward(self, F, ids):
            return self.embed(ids), ids + 1

    net = amp.convert(make(Both))
    vectors, ids = net(nd.array([1, 2], dtype="int32"))
    assert vectors.dtype == np.float32
    assert ids.dtype == np.int32


# Norms


NORMS = {"BatchNorm": nn.BatchNorm, "SyncBatchNorm": lambda: gluon.contrib.nn.SyncBatchNorm(
    num_devices=1), "LayerNorm": nn.LayerNorm, "GroupNorm": lambda: nn.GroupNorm(2),
    "InstanceNorm": nn.InstanceNorm, "MyNorm": MyNorm}


@pytest.mark.parametrize("cls", [nn.HybridSequential, nn.Sequential])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_all_kinds_stay_float32(name, cls, x):
    net = holding(nn.Conv2D(4, 3), NORMS[name](), nn.Dense(3), cls=cls)
    amp.convert(net)
    for _ in range(2):  # before and after the deferred initialization
        assert {types(net[1])[n] for n in types(net[1])} == {"float32"}
        assert set(types(net[0]).values()) | set(types(net[2]).values()) == {"float16"}
        assert net(x).dtype == np.float32
    step(net, x)
    assert np.isfinite(net(x).asnumpy()).all()


def test_norms_in_a_symbol_block_stay_float32(tmp_path, x):
    source = holding(nn.Conv2D(4, 3, prefix="c_"), nn.BatchNorm(prefix="one_"),
                     nn.LayerNorm(prefix="two_"), nn.GroupNorm(2, prefix="three_"),
                     nn.InstanceNorm(prefix="four_"), nn.Dense(3, prefix="d_"))
    source.hybridize()
    wide = source(x).asnumpy()
    source.export(str(tmp_path / "net"))
    net = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"],
                                    str(tmp_path / "net-0000.params"))
    amp.convert(net)
    assert {n for n, t in types(net).items() if t == "float16"} \
        == {"c_weight", "c_bias", "d_weight", "d_bias"}
    np.testing.assert_allclose(net(x).asnumpy(), wide, atol=0.02 * np.abs(wide).max())


class OwnBatchNorm(gluon.HybridBlock):
    """Calls the operator itself; its statistics are only told apart by grad_req."""

    def __init__(self, **kwargs):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=6)
            for name, init in (("gamma", "ones"), ("beta", "zeros")):
                setattr(self, name, self.params.get(name, shape=(4,), init=init))
            for name, init in (("mean", "zeros"), ("var", "ones")):
                setattr(self, name, self.params.get(name, shape=(4,), init=init, grad_req="null",
                                                    **kwargs))

    def hybrid_forward(self, F, x, gamma, beta, mean, var):
        return F.BatchNorm(self.dense(x), gamma, beta, mean, var, fix_gamma=False)


@pytest.mark.parametrize("kwargs", [{"differentiable": False}, {}])
def test_a_batch_norm_that_the_user_calls_works(kwargs, rng):
    x = nd.array(rng.standard_normal((8, 6)))
    net = make(OwnBatchNorm, **kwargs)
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
def test_what_is_kept_stays_float32(keep, x):
    net = make(prefix="net_")
    keep = keep(net)
    amp.convert(net, keep=keep)
    assert set(types(net.output).values()) == {"float32"}
    net(x)
    assert runs_in(net, "dense0_fwd") == "float32"
    conv = "float32" if ".*conv0" in (keep if isinstance(keep, list) else []) else "float16"
    assert runs_in(net, "conv0_fwd") == conv
    assert types(net.features[0]) == dict.fromkeys(types(net.features[0]), conv)


def test_a_kept_block_keeps_what_is_in_it(x):
    net = make()
    amp.convert(net, keep=net.features)
    net(x)
    assert set(types(net.features).values()) == {"float32"}
    assert runs_in(net, "conv0_fwd") == "float32"
    assert runs_in(net, "dense0_fwd") == "float16"


def test_a_kept_net_computes_as_in_float32(x):
    net = make()
    wide = net(x).asnumpy()
    np.testing.assert_allclose(amp.convert(net, keep=net)(x).asnumpy(), wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "pure_float16"])
def test_keep_holds_under_other_policies(policy, x):
    net = make()
    amp.convert(net, policy, keep=net.output)
    net(x)
    assert runs_in(net, "dense0_fwd") == "float32"
    assert set(types(net.output).values()) == {"float32"}


def test_nodes_of_a_symbol_block_are_kept_by_name(tmp_path, rng):
    net = amp.convert(networks.exported(tmp_path), keep=".*dense0_fwd")
    net(networks.images(8)(rng)[0])
    kinds = types(net)
    assert {kinds["exported_dense0_weight"], kinds["exported_dense0_bias"]} == {"float32"}
    assert kinds["exported_conv0_weight"] == "float16"
    assert runs_in(net, "dense0_fwd") == "float32"
    assert runs_in(net, "conv0_fwd") == "float16"


def test_keep_in_a_symbol_block_names_near_nodes(tmp_path):
    with pytest.raises(ValueError, match=r"matches nothing.*exported_dense0_fwd"):
        amp.convert(networks.exported(tmp_path), keep="exported_dense1_fwd")


# Shared parameters


@pytest.mark.parametrize("kept", ["embed", "out"])
def test_a_shared_parameter_is_float32_if_one_of_its_blocks_is(kept, rng):
    net = make(networks.Tied)
    amp.convert(net, keep=getattr(net, kept))
    assert net.embed.weight is net.out.weight
    assert set(types(net.embed).values()) == {"float32"}
    net(nd.array(rng.integers(0, 50, (4, 6))))
    assert runs_in(net, "embedding0_fwd") == "float32"
    assert runs_in(net, "dense1_fwd") == ("float32" if kept == "out" else "float16")


def test_a_parameter_shared_with_a_plain_block_stays_float32():
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


# Files


@pytest.mark.parametrize("deduplicate", [False, True])
def test_files_go_from_a_converted_net_to_a_float32_net(deduplicate, tmp_path):
    net = make(networks.Tied)
    words = nd.array(np.arange(24).reshape(4, 6))
    net(words)
    wide = values(net)
    amp.convert(net)
    path = str(tmp_path / "net.params")
    net.save_parameters(path, deduplicate=deduplicate)
    assert {a.dtype for a in nd.load(path).values()} == {np.float32}
    assert len(nd.load(path)) == (4 if deduplicate else 5)
    other = networks.Tied()
    other.load_parameters(path)
    assert set(types(other).values()) == {"float32"}
    expected = rounded(wide)
    assert all(np.array_equal(expected[n], v) for n, v in values(other).items())


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("initialized", [False, True])
def test_files_go_from_a_float32_net_to_a_converted_net(initialized, deduplicate, tmp_path):
    words = nd.array(np.arange(24).reshape(4, 6))
    source = make(networks.Tied)
    source(words)
    path = str(tmp_path / "net.params")
    source.save_parameters(path, deduplicate=deduplicate)
    net = amp.convert(networks.Tied())
    if initialized:
        net.initialize()
        net(words)
    net.load_parameters(path)
    assert set(types(net).values()) == {"float16"}
    assert {v.dtype for v in values(net).values()} == {np.dtype("float16")}
    assert all(np.array_equal(values(source)[n].astype(np.float16), v)
               for n, v in values(net).items())
    assert net(words).shape == (4, 6, 50)


def test_a_file_of_a_float16_net_loads_too(tmp_path, x):
    source = make()
    source.cast("float16")
    source.save_parameters(str(tmp_path / "net.params"))
    net = amp.convert(Net())
    net.load_parameters(str(tmp_path / "net.params"))
    assert {n for n, t in types(net).items() if t == "float32"} \
        == {n for n in types(net) if "batchnorm" in n}
    assert net(x).dtype == np.float32


def test_a_plain_block_saves_float32(tmp_path, x):
    net = make(networks.Plain)
    amp.convert(net)(x)
    net.save_parameters(str(tmp_path / "net.params"))
    assert {a.dtype for a in nd.load(str(tmp_path / "net.params")).values()} == {np.float32}
    networks.Plain().load_parameters(str(tmp_path / "net.params"))


def cut(path, *_):
    with open(path, "wb") as file:
        file.write(b"half of a file")
    raise OSError("no space left on device")


@pytest.mark.parametrize("write", [
    lambda net, folder: net.save_parameters(str(folder / "net.params")),
    lambda net, folder: net.export(str(folder / "net"))], ids=["save_parameters", "export"])
def test_a_file_cut_in_the_middle_is_never_left(write, tmp_path, monkeypatch, x):
    net = amp.convert(make())
    net(x)
    monkeypatch.setattr(mx.nd, "save", cut)
    with pytest.raises(OSError, match="no space"):
        write(net, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    write(net, tmp_path)
    whole = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(mx.nd, "save", cut)
    with pytest.raises(OSError, match="no space"):
        write(net, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == whole


LOAD = """
import sys
import mxnet as mx
from mxnet import nd
folder = sys.argv[1]
net = mx.gluon.SymbolBlock.imports(folder + "/net-symbol.json", ["data"],
                                   folder + "/net-0003.params")
assert {np.dtype(p.dtype).name for p in net.collect_params().values()} == {"float32"}
np.save(folder + "/out.npy", net(nd.array(np.load(folder + "/x.npy"))).asnumpy())
assert "gluon_amp" not in sys.modules
"""


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
def test_an_export_runs_where_gluon_amp_is_not(policy, tmp_path, x):
    net = make()
    amp.convert(net, policy, keep=net.output)
    step(net, x)
    out = net(x).asnumpy().astype(np.float32)
    net.export(str(tmp_path / "net"), epoch=3)
    text = (tmp_path / "net-symbol.json").read_text()
    assert "gluon_amp" not in text
    assert "amp_cast" not in text
    assert {a.dtype for a in nd.load(str(tmp_path / "net-0003.params")).values()} == {np.float32}
    np.save(str(tmp_path / "x.npy"), x.asnumpy())
    run_python(LOAD, tmp_path)
    np.testing.assert_allclose(np.load(str(tmp_path / "out.npy")), out, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("kept", [True, False])
def test_an_export_of_a_loop_bears_no_trace_of_gluon_amp(kept, tmp_path, rng):
    net = make(networks.Loop)
    amp.convert(net, keep=[net.cell] * kept)
    net(*networks.OTHERS["loop"][1](rng))
    for remove in (False, True):
        net.export(str(tmp_path / "net"), remove_amp_cast=remove)
        text = (tmp_path / "net-symbol.json").read_text()
        assert "gluon_amp" not in text
        assert ("amp_cast" in text) is not (remove or kept)
    inputs = networks.OTHERS["loop"][1](rng)
    wide = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data0", "data1"],
                                     str(tmp_path / "net-0000.params"))
    assert set(types(wide).values()) == {"float32"}
    np.testing.assert_allclose(wide(*inputs)[0].asnumpy(), net(*inputs)[0].asnumpy(),
                               rtol=0.02, atol=0.01)


def test_an_export_for_gpus_keeps_the_casts(tmp_path, x):
    net = amp.convert(make())
    net(x)
    net.export(str(tmp_path / "net"), remove_amp_cast=False)
    nodes = json.loads((tmp_path / "net-symbol.json").read_text())["nodes"]
    assert [n["op"] for n in nodes].count("amp_cast") == 2
    assert not [n for n in nodes if "gluon_amp" in json.dumps(n)]
    kinds = {n: a.dtype for n, a in nd.load(str(tmp_path / "net-0000.params")).items()}
    assert {n for n, t in kinds.items() if t == np.float32} == {n for n in kinds if "norm" in n}


def test_export_before_a_forward_pass_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match="run net on data once"):
        amp.convert(make(prefix="net_")).export(str(tmp_path / "net"))
    assert not list(tmp_path.iterdir())


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


# Parameters of other kinds


def test_an_embedding_of_sparse_gradients_stays_float32_and_trains():
    net = holding(nn.Embedding(50, 4, sparse_grad=True), nn.Dense(3))
    amp.convert(net)
    assert set(types(net[0]).values()) == {"float32"}
    words = nd.array([[1, 2], [3, 1]])
    net(words)
    before = net[0].weight.data().asnumpy()
    step(net, words)
    changed = np.abs(net[0].weight.data().asnumpy() - before).sum(axis=1) > 0
    assert changed.nonzero()[0].tolist() == [1, 2, 3]
    assert net[0].weight.grad().stype == "row_sparse"


class WithConstant(gluon.HybridBlock):
    def __init__(self, value):
        super().__init__()
        with self.name_scope():
            self.constant = self.params.get_constant("constant", nd.array(value))
            self.embed = nn.Embedding(3000, 1)

    def hybrid_forward(self, F, x, constant):
        return F.broadcast_add(x, constant), self.embed(constant)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_constant_parameter_works(when):
    net = WithConstant([1, 2, 3])
    if when == "before":
        amp.convert(net)
    net.initialize()
    if when == "after":
        amp.convert(net)
    total, _ = net(nd.ones((2, 3)))
    assert np.array_equal(total.asnumpy(), [[2, 3, 4]] * 2)
    amp.restore(net)
    assert np.array_equal(net(nd.ones((2, 3)))[0].asnumpy(), [[2, 3, 4]] * 2)


def test_a_constant_of_ids_is_never_rounded():
    net = WithConstant([1, 2049, 2999])
    net.initialize()
    net.embed.weight.set_data(nd.arange(3000).reshape((3000, 1)) % 1000)
    _, rows = amp.convert(net)(nd.ones((2, 3)))
    assert np.array_equal(rows.asnumpy().ravel(), [1, 49, 999])


def test_integer_parameters_keep_their_type():
    class Looks(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.ids = self.params.get_constant("ids", nd.array([1, 2], dtype="int32"))
                self.embed = nn.Embedding(5, 3)

        def hybrid_forward(self, F, x, ids):
            return F.broadcast_add(x, self.embed(ids))

    net = amp.convert(make(Looks))
    assert np.dtype(net.ids.dtype) == np.int32
    assert net(nd.ones((2, 3))).shape == (2, 3)
    assert np.dtype(amp.restore(net).ids.dtype) == np.int32


# Optimizers


def updates(optimizer, weights, grads):
    """Float16 weights after some steps, and their float32 masters."""
    updater = mx.optimizer.get_updater(optimizer)
    weights = [nd.array(w, dtype="float16") for w in weights]
    for step_grads in grads:
        pairs = list(enumerate(zip(step_grads, weights)))
        if optimizer.aggregate_num > 0:
            updater([i for i, _ in pairs], [nd.array(g, dtype="float16") for _, (g, _) in pairs],
                    [w for _, (_, w) in pairs])
        else:
            for i, (grad, weight) in pairs:
                updater(i, nd.array(grad, dtype="float16"), weight)
    return [w.asnumpy() for w in weights]


@pytest.mark.parametrize(("name", "kwargs"), [
    ("sgd", {"momentum": 0.9}), ("adam", {}), ("nag", {"momentum": 0.9}), ("nag", {}),
    ("lamb", {}), ("rmsprop", {}), ("rmsprop", {"centered": True}), ("adagrad", {}),
    ("adadelta", {}), ("ftrl", {}), ("signum", {}), ("nadam", {}), ("ftml", {}), ("adamax", {}),
    ("lars", {"momentum": 0.9})])
def test_optimizers_do_as_mxnets_with_float32_masters(name, kwargs, rng):
    kwargs = {"wd": 0.01, "rescale_grad": 0.5,
              **({} if name == "adadelta" else {"learning_rate": 0.05}), **kwargs}
    weights = [rng.standard_normal(s).astype(np.float16) for s in ((3, 4), (5,))]
    grads = [[rng.standard_normal(w.shape).astype(np.float16) for w in weights] for _ in range(4)]
    ours = updates(amp.optimizer(name, **kwargs), weights, grads)
    stock = updates(mx.optimizer.create(name, multi_precision=True, **kwargs), weights, grads)
    for mine, its, first in zip(ours, stock, weights):
        assert mine.dtype == np.float16
        assert (mine != first).any()
        np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-3)


def test_small_updates_add_up_in_the_masters():
    weight, grad = np.ones((4,)), np.full((4,), 1e-4)
    (out,) = updates(amp.optimizer("sgd", learning_rate=1), [weight], [[grad]] * 50)
    np.testing.assert_allclose(out, 0.995, atol=5e-4)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_optimizer_is_pickled_and_still_updates(name, rng):
    optimizer = amp.optimizer(name, learning_rate=0.1)
    revived = pickle.loads(pickle.dumps(optimizer))
    assert type(revived) is type(optimizer)
    assert revived.lr == 0.1
    weights, grads = [rng.standard_normal((3,))], [[rng.standard_normal((3,))]]
    (mine,), (other,) = (updates(o, weights, grads) for o in (optimizer, revived))
    assert np.array_equal(mine, other)
    assert (mine != weights[0].astype(np.float16)).any()


@pytest.mark.parametrize("name", ["sgdd", None, 3])
def test_an_unknown_optimizer_lists_the_valid_ones(name):
    with pytest.raises(ValueError, match=r"Valid: .*adam, .*sgd") as caught:
        amp.optimizer(name)
    assert f"Received: {name!r}" in str(caught.value)


def test_an_optimizer_is_still_what_it_was():
    optimizer = amp.optimizer("SGD", learning_rate=0.1)
    assert isinstance(optimizer, mx.optimizer.SGD)
    assert optimizer.multi_precision
    assert type(optimizer).__name__ == "SGD"
