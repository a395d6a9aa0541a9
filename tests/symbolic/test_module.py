"""amp.Module: MXNet's Module with float16 on CPUs and loss scaling; all else is unchanged."""
import logging
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from gluon_amp.cpu import library
from gluon_amp.cpu.arrays import dtype_name
from gluon_amp.symbolic.module import Speedometer
from modules import (
    OPTIMIZERS,
    OVERFLOW,
    TWO,
    batch,
    body,
    bound,
    check_moved_alike,
    dynamic,
    everything,
    grads,
    learn,
    made,
    net,
    prepared,
    settled,
    train,
    values,
)
from mxnet import gluon, nd
from mxnet import symbol as S

# ---- scaling changes only gradients that underflow

@pytest.mark.parametrize("scale", ["auto", None, 1, 2.0 ** 20, 2.0 ** -6, "dynamic",
                                   dynamic(8, growth_interval=3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_float32_training_matches_mxnet_module_bitwise(scale, optimizer, context):
    mod = made(net(None), optimizer=optimizer, context=context, loss_scale=scale)
    stock = made(net(None), mx.mod.Module, optimizer, context=context)
    train(mod)
    train(stock)
    assert same(values(mod), values(stock))
    assert mod.skipped == 0


@pytest.mark.parametrize("scale", [None, 1024, 1000, dynamic()])
@pytest.mark.parametrize("head", [S.LinearRegressionOutput, S.LogisticRegressionOutput,
                                  S.MAERegressionOutput])
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_float16_training_matches_float32(scale, head, context):
    mod = made(net(head=head), context=context, loss_scale=scale)
    stock = made(net(None, head), mx.mod.Module, context=context)
    before = values(stock)
    mod.set_params(*stock.get_params())
    train(mod, 5)
    train(stock, 5)
    check_moved_alike(mod, stock, before)


def test_small_gradients_underflow_only_without_scale():
    def moved(policy, scale):
        sym = S.LinearRegressionOutput(body(), grad_scale=1e-9, name="head")
        mod = made(amp.convert_symbol(sym, policy), optimizer=("sgd", {"learning_rate": 1e8}),
                   loss_scale=scale)
        before = values(mod)
        train(mod, 1)
        return values(mod)["fc_bias"] - before["fc_bias"]

    assert not moved("float16", None).any()
    for scale in (2.0 ** 20, dynamic(2.0 ** 20)):
        assert moved("float16", scale) == pytest.approx(moved("float32", None), rel=0.01)


@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("train_mode", [True, False])
def test_softmax_of_logits_masked_with_minus_infinity(policy, train_mode):
    sym = S.SoftmaxOutput(S.broadcast_add(S.var("data"), S.var("mask", shape=(1, 3))), name="head")
    sym = amp.convert_symbol(sym, policy) if policy else sym
    mod = amp.Module(sym, label_names=["head_label"], loss_scale=64)
    mod.bind([("data", (2, 3))], [("head_label", (2,))])
    mod.set_params({"mask": nd.array([[0, 0, -np.inf]])}, {})
    mod.forward(mx.io.DataBatch([nd.zeros((2, 3))], [nd.zeros(2)]), is_train=train_mode)
    assert (mod.get_outputs()[0].asnumpy() == [0.5, 0.5, 0]).all()


# ---- which gradients are scaled

@pytest.mark.parametrize("policy", [None, "float16"])
def test_given_head_gradients_are_scaled(policy):
    sym = amp.convert_symbol(body(), policy) if policy else body()
    mods = [prepared(amp.Module(sym, label_names=None, loss_scale=scale), (6, 3, 6, 6),
                     init=mx.init.Xavier(), seed=3) for scale in (None, 64)]
    for mod in mods:
        learn(mod, batch(), [nd.ones((6, 3))])
    assert same(*map(values, mods))


def test_backward_of_a_graph_without_gradients_does_nothing():
    mod = amp.Module(mx.sym.Activation(mx.sym.Variable("data"), act_type="relu"),
                     label_names=None, loss_scale=64)
    mod.bind([("data", (2, 3))])
    mod.init_params()
    mod.forward(mx.io.DataBatch([nd.ones((2, 3))]), is_train=True)
    mod.backward([nd.ones((2, 3))])
    assert mod.get_outputs()[0].asnumpy().tolist() == [[1] * 3] * 2


REFUSED = {  # a call, and what its error says
    "nothing to scale": (lambda: prepared(
        amp.Module(amp.convert_symbol(body()), label_names=None, loss_scale=64), (6, 3, 6, 6),
        optimizer=None).forward_backward(batch()),
        r"needs a loss in .* out_grads.*Received outputs: fc"),
    "no optimizer": (lambda: prepared(amp.Module(net(), label_names=["head_label"]), (6, 3, 6, 6),
                                      (6, 3), optimizer=None).update(), "needs an optimizer"),
    **{f"symbol {name}": (lambda wrong=wrong: amp.Module(wrong),
                          rf"Module takes a symbol\. Received: {name}")
       for name, wrong in (("None", None), ("NDArray", nd.ones(2)), ("Dense", gluon.nn.Dense(1)))},
    **{f"clip_norm {wrong}": (lambda wrong=wrong: amp.Module(net(), clip_norm=wrong),
                              "clip_norm must be a positive, finite number")
       for wrong in (0, -1, float("nan"), "1")},
    "generator": (lambda: of_buckets(3), "sym_gen must be a function"),
    "generator of a symbol": (lambda: of_buckets(lambda key: net()), "for the bucket 9"),
    "generator of an array": (lambda: of_buckets(lambda key: (nd.ones(2), ("data",), None)),
                              r"BucketingModule takes a symbol\. Received: NDArray"),
    "no largest bucket": (lambda: of_buckets(lambda key: net(), None), "key of the largest bucket"),
    "no symbol file": (lambda: amp.Module.load("none", 3), r"none-symbol\.json does not exist"),
    "no file of parameters": (lambda: amp.BucketingModule.load("none", 3, lambda key: None, 10),
                              r"none-0003\.params does not exist"),
    **{f"beyond float16, missing={missing}": (
        lambda missing=missing: set_large_weight(1e5, missing),
        r"float16 ends at 65504.*fc_weight \(up to 100000\)") for missing in (False, True)},
}


def of_buckets(sym_gen, key=9):
    amp.BucketingModule(sym_gen, default_bucket_key=key).bind([("data", (2, 3))])


def set_large_weight(value, missing=True):
    mod = made(net(), context=TWO)
    args, averages = mod.get_params()
    mod.set_params({**({} if missing else args), "fc_weight": nd.full((3, 64), value)}, averages,
                   allow_missing=missing)
    return values(mod)["fc_weight"]


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_call_is_refused(case):
    call, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError, RuntimeError, FileNotFoundError), match=words):
        call()


def test_large_weights_of_two_devices_are_returned():
    assert (set_large_weight(40000) == 40000).all()


@pytest.mark.parametrize("scale", [64, "dynamic"])
def test_update_without_new_gradients_is_refused(scale, tmp_path):
    """The gradients would be divided by no scale, or again by that of an earlier step."""
    states, mod = str(tmp_path / "states"), made(net(), loss_scale=scale)
    mod.save_optimizer_states(states)
    buckets = bucketing(loss_scale=scale)

    def check_refused(module):
        before = values(module)
        with pytest.raises(RuntimeError, match=r"update\(\) needs new gradients"):
            module.update()
        assert same(values(module), before)

    for module, data in ((mod, batch()), (buckets, words(3))):
        module.forward_backward(data)
        module.update()
        check_refused(module)
    mod.forward_backward(batch())
    mod.load_optimizer_states(states)
    check_refused(mod)
    mod.forward_backward(batch())
    assert mod.update()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_states_of_a_float32_module_load_in_float16(context, optimizer, tmp_path):
    stock = made(net(None), mx.mod.Module, optimizer, context=context)
    train(stock, 3)
    stock.save_optimizer_states(str(tmp_path / "states"))
    mod = made(net(), optimizer=optimizer, context=context, loss_scale=64)
    mod.set_params(*stock.get_params())
    mod.load_optimizer_states(str(tmp_path / "states"))
    before = values(stock)
    train(mod, 3)
    train(stock, 3)
    check_moved_alike(mod, stock, before)
    states = mod._updater.states.values()
    assert any(isinstance(state, tuple) and state[1].dtype == np.float32 for state in states)


def test_states_that_are_saved_before_an_update_have_the_numbers_of_the_module(tmp_path):
    mod, other = made(net(), context=TWO), made(net())
    train(mod, 2)
    mod.save_optimizer_states(str(tmp_path / "states"))
    other.load_optimizer_states(str(tmp_path / "states"))
    assert sorted(other._updater.states) == [i // 2 for i in sorted(mod._updater.states)][::2]


def test_optimizer_object_gets_master_weights_as_name_does():
    settings = {"learning_rate": 0.01, "rescale_grad": 1 / 6}
    names = ["conv_weight", "conv_bias", "bn_gamma", "bn_beta", "fc_weight", "fc_bias"]
    optimizer = mx.optimizer.Adam(**settings, param_idx2name=dict(enumerate(names)))
    mods = [made(net(), optimizer=given, loss_scale=64)
            for given in ((optimizer, ()), ("adam", settings))]
    for mod in mods:
        train(mod, 5)
    assert same(*map(everything, mods))


# ---- other functions of MXNet's Module

def test_prediction_between_steps_changes_nothing(capfd):
    mod, other = made(net(), loss_scale=dynamic()), made(net(), loss_scale=dynamic())
    for seed in range(4):
        for size in (6, 4):
            mod.forward(batch(seed, size), is_train=False)
        assert learn(mod, batch(seed)) == learn(other, batch(seed))
    assert same(everything(mod), everything(other))
    assert capfd.readouterr() == ("", "")  # binding prints nothing


@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("scale", [None, 64])
def test_prediction_uses_current_parameters(policy, scale):
    mod = made(net(policy), loss_scale=scale)
    for _ in range(2):  # once more after an update
        train(mod, 3)
        stock = bound(net(None), mx.mod.Module)
        stock.set_params(*mod.get_params())
        for m in (mod, stock):
            m.forward(batch(9), is_train=False)
        mine, wanted = (m.get_outputs()[0].asnumpy() for m in (mod, stock))
        assert np.abs(mine - wanted).max() <= 0.005 * np.abs(wanted).max()


@pytest.mark.parametrize("policy", [None, "float16"])
def test_changing_batch_size_trains_as_before(policy):
    mod = made(net(policy), loss_scale=64)
    other = made(net(policy), cls=amp.Module if policy else mx.mod.Module)
    for size in (6, 4, 8, 6):
        learn(mod, batch(size, size))
        learn(other, batch(size, size))
        assert mod.get_outputs()[0].shape == (size, 3)
    assert same(values(mod), values(other))


def test_initial_values_are_rounded_float32_values():
    mod, stock = made(net()), made(net(None), mx.mod.Module)
    wanted = {k: v if k.startswith("bn") else v.astype("float16").astype("float32")
              for k, v in values(stock).items()}
    assert same(values(mod), wanted)


def test_input_gradients_and_fixed_parameters():
    mod = made(net(), bind={"inputs_need_grad": True}, fixed_param_names=["conv_weight"],
               loss_scale=64)
    stock = made(net(None), mx.mod.Module, bind={"inputs_need_grad": True})
    fixed = values(mod)["conv_weight"]
    for m in (mod, stock):
        learn(m, batch())
    mine, wanted = (m.get_input_grads()[0].asnumpy() for m in (mod, stock))
    assert np.abs(mine - wanted).max() <= 0.01 * np.abs(wanted).max()
    assert np.array_equal(values(mod)["conv_weight"], fixed)


def test_states_are_kept_between_steps():
    sym = S.LinearRegressionOutput(body() + S.var("state", shape=(6, 3)), name="head")
    sym = S.Cast(sym, dtype="float32", name="out")  # behind which the loss is still one
    mod = made(amp.convert_symbol(sym), state_names=["state"], loss_scale=64)
    mod.forward(batch(), is_train=True)
    before = mod.get_outputs()[0].asnumpy()
    mod.set_states(value=2)
    assert learn(mod, batch())
    assert mod.get_outputs()[0].asnumpy() == pytest.approx(before + 2, abs=2e-3)


def test_monitor_reports_layer_names_after_batch_size_changes():
    mod = made(net(), loss_scale=64)
    monitor = mx.mon.Monitor(1, pattern="(fc|conv).*_output|fc_weight")
    mod.install_monitor(monitor)
    for size in (6, 4, 6):
        monitor.tic()
        learn(mod, batch(size=size))
        assert {"conv_output", "fc_output", "fc_weight"} <= {name for _, name, _ in monitor.toc()}


def test_fit_logs_loss_scale_in_mxnet_format_and_scores(caplog):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 3, 6, 6))
    y = (x[:, :, 0, 0]).argmax(1)
    data = mx.io.NDArrayIter(x, y, 6, label_name="head_label")
    caplog.set_level(logging.INFO)
    mod = amp.Module(net(head=S.SoftmaxOutput), label_names=["head_label"],
                     loss_scale=settled(2.0 ** 40))
    mod.fit(data, data, num_epoch=12, initializer=mx.init.Xavier(), optimizer="adam",
            optimizer_params={"learning_rate": 0.01},
            batch_end_callback=Speedometer(6, 3))
    lines = [r.getMessage() for r in caplog.records if "Speed" in r.getMessage()]
    form = r"Epoch\[\d+\] Batch \[\d-\d\]\tSpeed: \S+ samples/sec\taccuracy=\d\.\d+" \
           r"\tloss-scale=(\d+)\.0+\tskipped=(\d+)\.0+"
    found = [re.fullmatch(form, line) for line in lines]
    assert len(found) == 36
    assert all(found)
    assert int(found[-1][1]) == mod.loss_scale < 2 ** 40
    assert int(found[-1][2]) == mod.skipped > 20
    assert mod.score(data, "acc")[0][1] > 0.9
    assert (mod.predict(data).asnumpy().argmax(1) == y).mean() == mod.score(data, "acc")[0][1]


# ---- MXNet's recomputation (mirroring)

@pytest.mark.parametrize("asked", ["for all", "by marks"])
def test_recomputation_does_not_repeat_dropout_or_batch_norm_statistics(
        asked, monkeypatch):
    """MXNet excludes operators from recomputation by name."""
    if asked == "for all":
        monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    with mx.AttrScope(**({} if asked == "for all" else {"force_mirroring": "True"})):
        dropped, normed = (S.Cast(S.var(name), dtype="float16") for name in "xy")
        dropped = S.tanh(S.Dropout(S.sigmoid(dropped)))
        normed = S.tanh(S.BatchNorm(normed, fix_gamma=False))
        out = S.Group([S.MakeLoss(S.Cast(s, dtype="float32")) for s in (dropped, normed)])
    mod = amp.Module(out, ["x", "y"], None)
    mod.bind([("x", (50, 40)), ("y", (50, 4))], inputs_need_grad=True)
    mod.init_params()
    executor, = mod._exec_group.execs
    mod.forward(mx.io.DataBatch([nd.ones((50, 40)), nd.arange(200).reshape((50, 4))], None), True)
    kept = mod.get_outputs()[0].asnumpy() != 0
    statistics = [array.asnumpy() for array in executor.aux_arrays]
    mod.backward()
    assert np.array_equal(mod.get_input_grads()[0].asnumpy() != 0, kept)
    assert 0.4 < kept.mean() < 0.6
    for before, array in zip(statistics, executor.aux_arrays):
        assert np.array_equal(before, array.asnumpy())
    assert np.abs(statistics[0]).max() > 1


# ---- checkpoints

def resumed(prefix, optimizer, **kwargs):
    mod = amp.Module.load(prefix, 1, True, label_names=["head_label"],
                          **{"loss_scale": "dynamic", **kwargs})
    mod.bind([("data", (6, 3, 6, 6))], [("head_label", (6, 3))])
    mod.init_optimizer(optimizer=optimizer[0], optimizer_params=optimizer[1])
    return mod


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "scheduled"])
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("saves_before", [False, True])
def test_loaded_checkpoint_continues_bitwise(optimizer, policy, saves_before, tmp_path):
    prefix = str(tmp_path / "net")

    def maker():  # as in a new process
        schedule = mx.lr_scheduler.FactorScheduler(4, 0.5, base_lr=0.1)
        return OPTIMIZERS.get(optimizer, ("sgd", {"momentum": 0.9, "lr_scheduler": schedule}))

    overflow = batch(label=OVERFLOW)
    mod = made(net(policy), optimizer=maker(), loss_scale=dynamic(growth_interval=4))
    train(mod, 10)
    if saves_before:
        mod.save_checkpoint(prefix, 0, True)
    assert learn(mod, overflow) is False
    mod.save_checkpoint(prefix, 1, True)
    other = resumed(prefix, maker(), loss_scale=dynamic(growth_interval=4))
    assert same(everything(mod), everything(other))
    for m in (mod, other):
        assert learn(m, overflow) is False
        train(m, 10, first=10)
    assert same(everything(mod), everything(other))


def test_checkpoint_symbol_loads_in_mxnet_module(tmp_path):
    mod = made(net(), loss_scale=64)
    train(mod, 1)
    mod.save_checkpoint(str(tmp_path / "net"), 1)
    text = (tmp_path / "net-symbol.json").read_text()
    assert "_gluon_amp" not in text
    assert "gluon_amp_loss_scale" not in text
    stock = mx.mod.Module.load(str(tmp_path / "net"), 1, label_names=["head_label"])
    assert stock.symbol.tojson() == mod.symbol.tojson() == net().tojson()


@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_float32_checkpoint_trains_under_float16_symbol(context, tmp_path):
    prefix = str(tmp_path / "net")
    made(net(None), mx.mod.Module).save_checkpoint(prefix, 1)
    net().save(f"{prefix}-symbol.json")
    mod = amp.Module.load(prefix, 1, label_names=["head_label"], context=context, loss_scale=64)
    mod.bind([("data", (6, 3, 6, 6))], [("head_label", (6, 3))])
    mod.init_optimizer()
    assert learn(mod, batch())


@pytest.mark.parametrize("kind", ["cut", "foreign", "adam", "network"])
def test_unfit_states_are_refused_and_change_nothing(kind, tmp_path):
    path = tmp_path / "m.states"
    mod = made(net(), loss_scale=dynamic())
    train(mod, 3)
    dense = S.LinearRegressionOutput(S.FullyConnected(S.var("data"), num_hidden=3), name="head")
    donor = made(dense if kind == "network" else net(), loss_scale=dynamic(4),
                 optimizer="adam" if kind == "adam" else "momentum")
    train(donor, 2)
    donor.save_optimizer_states(str(path))
    if kind in ("cut", "foreign"):
        path.write_bytes(path.read_bytes()[:-20] if kind == "cut" else b"no states")
    before = everything(mod)
    with pytest.raises(ValueError, match=r"m\.states"):
        mod.load_optimizer_states(str(path))
    assert same(everything(mod), before)


def test_failed_save_leaves_old_files_intact(tmp_path, monkeypatch):
    mod = made(net(), loss_scale=dynamic())
    mod.save_checkpoint(str(tmp_path / "net"), 1, True)
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    train(mod, 1)

    def full(path, *args):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(nd, "save", full)
    with pytest.raises(OSError, match="No space"):
        mod.save_checkpoint(str(tmp_path / "net"), 1, True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old


# ---- several devices

def test_float64_weights_of_two_devices_are_returned_in_float64():
    data, weight = (S.var(name, dtype="float64") for name in ("data", "fc_weight"))
    x = S.FullyConnected(data, weight, no_bias=True, num_hidden=3, name="fc")
    mod = amp.Module(x, label_names=[], context=TWO)
    mod.bind([mx.io.DataDesc("data", (4, 5), "float64")])
    mod.init_params(mx.init.Normal(1 / 3))
    weight = nd.arange(15, dtype="float64").reshape((3, 5)) / 7
    mod.set_params({"fc_weight": weight}, {}, allow_missing=True)
    assert np.array_equal(mod.get_params()[0]["fc_weight"].asnumpy(), weight.asnumpy())


@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16"])
def test_epochs_at_rate_0_change_no_weight(policy):
    mod = made(net(policy), context=[mx.cpu(i) for i in range(3)],
               optimizer=("sgd", {"learning_rate": 0.0}))
    before = values(mod)
    for seed in range(3):
        learn(mod, batch(seed))
        mod.set_params(*mod.get_params())  # as `fit` does after each epoch
    assert all(np.array_equal(before[name], value) for name, value in values(mod).items()
               if "moving" not in name)


@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_bfloat16_sums_over_devices_are_rounded_not_truncated(kvstore):
    mods = [bound(net("bfloat16"), context=TWO, loss_scale=scale) for scale in (None, 1.0)]
    for mod in mods:
        mx.random.seed(3)
        mod.init_params(mx.init.Xavier())
        mod.init_optimizer(kvstore, "sgd", {"learning_rate": 0.1})
        train(mod, 3)
    assert same(*map(values, mods))


# ---- buckets

@pytest.mark.parametrize("scale", [None, 128])
@pytest.mark.parametrize("context", [mx.cpu(), TWO])
def test_bucket_without_a_layer_keeps_states_of_others(context, scale):
    """MXNet's module on one device numbers the states of each bucket by itself."""
    def symbol(key):
        x = S.var("data")
        for i in (1, 2, 3) if key == 2 else (1, 3):
            x = S.FullyConnected(x, num_hidden=4, no_bias=True, name=f"fc{i}")
        return S.SoftmaxOutput(x, name="softmax"), ("data",), ("softmax_label",)

    def train_on(cls, context, **kwargs):
        mod = cls(symbol, default_bucket_key=2, context=context, **kwargs)
        shapes = {"provide_data": [("data", (4, 4))], "provide_label": [("softmax_label", (4,))]}
        mod.bind(shapes["provide_data"], shapes["provide_label"])
        mx.random.seed(1)
        mod.init_params(mx.init.Xavier())
        if cls is amp.BucketingModule:
            mod.switch_bucket(1, **{f"{name[8:]}_shapes": one for name, one in shapes.items()})
        mod.init_optimizer("device", "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1})
        data = mx.nd.random.normal(shape=(4, 4))
        for key in (2, 2, 1, 2):
            learn(mod, mx.io.DataBatch([data], [nd.arange(4)], bucket_key=key, **shapes))
        return values(mod)

    theirs = train_on(mx.mod.BucketingModule, TWO)  # which numbers by name
    mine = train_on(amp.BucketingModule, context, loss_scale=scale)
    for name, value in mine.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-5, atol=1e-6)


def words(length, seed=0):
    rng = np.random.default_rng(seed)
    return mx.io.DataBatch([nd.array(rng.integers(0, 20, (4, length)))],
                           [nd.array(rng.integers(0, 3, 4))], bucket_key=length,
                           provide_data=[("data", (4, length))],
                           provide_label=[("softmax_label", (4,))])


def sentences(length, policy):
    x = S.Embedding(S.var("data"), input_dim=20, output_dim=6, name="embed")
    x = S.FullyConnected(S.sum(x, axis=1), num_hidden=3, name="fc")
    return amp.convert_symbol(S.SoftmaxOutput(x, name="softmax"), policy), ["data"], \
        ["softmax_label"]


def bucketing(policy="float16", cls=amp.BucketingModule, **kwargs):
    mod = cls(lambda length: sentences(length, policy), default_bucket_key=9, **kwargs)
    mod.bind(words(9).provide_data, words(9).provide_label)
    mx.random.seed(3)
    mod.init_params(mx.init.Xavier())
    mod.init_optimizer(optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    return mod


@pytest.mark.parametrize("scale", [None, 1024, "dynamic"])
def test_float32_buckets_match_mxnet_module_bitwise(scale):
    mods = bucketing("float32", loss_scale=scale), bucketing("float32", mx.mod.BucketingModule)
    for mod in mods:
        for seed, length in enumerate((9, 5, 7, 5, 9)):
            learn(mod, words(length, seed))
    assert same(*map(values, mods))


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_buckets_share_parameters_scale_and_loaded_states(policy, tmp_path):
    mod, other = (bucketing(policy, loss_scale=dynamic(growth_interval=2)) for _ in range(2))
    for length in (9, 5, 9):
        learn(mod, words(length))
    mod.save_optimizer_states(str(tmp_path / "m.states"))
    other.switch_bucket(5, words(5).provide_data, words(5).provide_label)
    other.set_params(*mod.get_params())
    other.load_optimizer_states(str(tmp_path / "m.states"))
    for length in (5, 9, 7):
        learn(mod, words(length))
        learn(other, words(length))
        assert same(values(mod), values(other)), length
    assert mod.loss_scale == other.loss_scale


def test_all_buckets_are_clipped():
    mod = bucketing("float32", clip_norm=1e-3)
    for length in (9, 5):
        before = values(mod)
        learn(mod, words(length))
        moved = sum(((v - before[k]) ** 2).sum() for k, v in values(mod).items())
        assert moved ** 0.5 < 2e-4  # learning rate 0.1, and some momentum


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_every_bucket_returns_parameters_that_were_set(policy):
    mod = bucketing(policy)
    learn(mod, words(5))
    args, aux = mod.get_params()
    mod.set_params({k: nd.full(a.shape, 7) for k, a in args.items()}, aux)
    mod.forward(words(9), is_train=False)
    assert all((v == 7).all() for v in values(mod).values())


def test_bucketing_checkpoint_loads_with_loss_scale(tmp_path):
    mod, prefix = bucketing(loss_scale=64), str(tmp_path / "net")
    learn(mod, words(5))
    mod.save_checkpoint(prefix, 1)
    loaded = amp.BucketingModule.load(prefix, 1, lambda n: sentences(n, "float16"), 9,
                                      loss_scale=64)
    loaded.bind(words(9).provide_data, words(9).provide_label)
    loaded.init_optimizer()
    assert learn(loaded, words(9))


def test_ignored_saved_scale_is_logged(caplog, tmp_path):
    prefix = str(tmp_path / "net")
    mod = made(net(), loss_scale="dynamic")
    train(mod, 3)
    mod.save_checkpoint(prefix, 1, True)
    resumed(prefix, OPTIMIZERS["momentum"], loss_scale=None)
    assert f"dynamic loss scale, {mod.loss_scale:g}, is ignored: here loss_scale is None" \
        in caplog.text


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("mxnets", [False, True])
def test_states_continue_on_another_number_of_devices(mxnets, first, then, tmp_path):
    """MXNet's kvstore indexes states by name, gluon_amp's by parameter and device. MXNet's Module
    does not save update counts, which Adam needs."""
    prefix, optimizer = str(tmp_path / "net"), "momentum" if mxnets else "adam"
    symbol = S.LinearRegressionOutput(S.FullyConnected(S.var("data"), num_hidden=3, name="fc"),
                                      name="head")  # no batch norm: each device has its own
    kwargs = {} if mxnets else {"loss_scale": 64}
    mod = made(symbol, mx.mod.Module if mxnets else amp.Module, optimizer, context=TWO[:first],
               **kwargs)
    train(mod, 3)
    mod.save_checkpoint(prefix, 1, True)
    other = resumed(prefix, OPTIMIZERS[optimizer], loss_scale=64, context=TWO[:then])
    for one in (mod, other):
        train(one, 1, first=3)
    expected = values(mod)
    for group in other._exec_group.param_arrays:
        assert all(np.array_equal(group[0].asnumpy(), one.asnumpy()) for one in group)
    for name, value in values(other).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


# ---- overflow

def test_overflow_skips_step_and_backs_off_scale():
    mod = made(net(), loss_scale=settled(16))
    train(mod, 2)
    before = everything(mod)
    assert learn(mod, batch(label=OVERFLOW)) is False
    assert (mod.loss_scale, mod.skipped) == (8, 1)
    assert "fc_bias" in mod.overflowed
    after = everything(mod)
    for name in before.keys() - {"scale", "bn_moving_mean", "bn_moving_var"}:
        assert np.array_equal(after[name], before[name])
    assert learn(mod, batch()) is True


def test_overflow_on_one_device_skips_step_on_all():
    mod = made(net(), context=TWO, loss_scale=dynamic())
    data = batch()
    data.label[0][0] = OVERFLOW
    assert [learn(mod, data), *train(mod, 3)] == [False, True, True, True]
    assert all(np.array_equal(*(array.asnumpy() for array in pair))
               for pair in mod._exec_group.param_arrays)


def test_moving_averages_after_skipped_step_are_returned():
    mod = made(net(), loss_scale=dynamic())
    train(mod, 1)
    mod.get_params()
    learn(mod, batch(1, label=OVERFLOW))
    inside = mod._exec_group.execs[0].aux_dict["bn_moving_mean"].asnumpy()
    assert np.array_equal(values(mod)["bn_moving_mean"], inside)


def test_skipped_step_zeroes_accumulated_gradients():
    mod = made(net(), loss_scale=dynamic(), bind={"grad_req": "add"})
    assert learn(mod, batch(label=OVERFLOW)) is False
    assert not any(g.any() for g in grads(mod).values())
    mod.forward_backward(batch())
    once = grads(mod)
    mod.forward_backward(batch())
    for name, twice in grads(mod).items():
        assert np.array_equal(twice, 2 * once[name])


def test_overflow_at_minimum_scale_raises_with_parameter_names():
    mod = made(net(), loss_scale=dynamic(2, minimum=1))
    learn(mod, batch(label=OVERFLOW))
    with pytest.raises(amp.LossScaleError, match=r"fc_weight.* smallest loss scale, 1:"):
        learn(mod, batch(label=OVERFLOW))


@pytest.mark.parametrize(("scale", "clip_norm", "reason"), [
    (64, None, "the loss itself is not finite"), (dynamic(), None, "the loss itself is not finite"),
    (None, 1, "without a loss scale")])
def test_nan_outputs_skip_steps_and_do_not_lower_scale(scale, clip_norm, reason, caplog):
    mod = made(net(None if clip_norm else "float16"), loss_scale=scale, clip_norm=clip_norm)
    first, weight = mod.loss_scale, values(mod)["fc_weight"]
    bad = mx.io.DataBatch([nd.full((6, 3, 6, 6), np.nan)], batch().label)
    for _ in range(15):
        assert learn(mod, bad) is False
    assert (mod.loss_scale, mod.skipped) == (first, 15)
    assert np.array_equal(weight, values(mod)["fc_weight"])
    assert [r.levelname for r in caplog.records if r.name == "gluon_amp"] == ["WARNING"]
    with pytest.raises(amp.LossScaleError, match=f"16 steps.*{reason}"):
        learn(mod, bad)


@pytest.mark.parametrize("scale", [64, dynamic()])
def test_overflowed_names_parameters_of_newest_gradients(scale):
    mod = made(net(), loss_scale=scale)
    mod.forward_backward(batch(label=OVERFLOW))
    before = mod.overflowed
    assert "fc_bias" in before
    assert mod.update() is False
    assert mod.overflowed == before
    mod.forward_backward(batch())
    assert mod.overflowed == ()
    assert mod.update() is True
    assert mod.overflowed == ()


# ---- clipping

def test_clipping_matches_float32_with_any_scale():
    """An update changes weights by at most the learning rate times the norm."""
    def moved(policy, **kwargs):
        mod = made(net(policy), optimizer=("sgd", {"learning_rate": 1}), **kwargs)
        before = values(mod)
        assert learn(mod, batch(label=100))
        return {k: v - before[k] for k, v in values(mod).items() if "moving" not in k}

    def norm(move):
        return np.sqrt(sum((m.astype("f8") ** 2).sum() for m in move.values()))

    free = moved(None)
    assert norm(free) > 10
    for context in (mx.cpu(), TWO):
        for scale in (None, 64, "dynamic"):
            clipped, loose = (moved(None, loss_scale=scale, clip_norm=limit, context=context)
                              for limit in (0.5, 1e9))
            assert norm(clipped) == pytest.approx(0.5, rel=1e-4)
            assert norm(loose) > 10
    for name, move in moved(None, clip_norm=0.5).items():
        np.testing.assert_allclose(move, free[name] * 0.5 / norm(free), rtol=1e-3, atol=1e-6)
    assert norm(moved("float16", loss_scale=64, clip_norm=0.5)) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("write", "name"), [
    (lambda mod: gluon.utils.clip_global_norm(
        [mod._exec_group.execs[0].grad_dict["bn_beta"]], 1e-3), "bn_beta"),
    (lambda mod: mod._exec_group.grad_arrays[0][0].__setitem__(slice(None), 0), "conv_weight")])
def test_writes_into_scaled_gradients_are_refused_with_advice_for_modules(write, name):
    mod = made(net(), loss_scale=64)
    mod.forward_backward(batch())
    before = values(mod)["fc_weight"]
    write(mod)
    with pytest.raises(RuntimeError, match=f"in {name} were written between .* clip_norm=$"):
        mod.update()
    assert np.array_equal(before, values(mod)["fc_weight"])
    assert learn(mod, batch())


# ---- the scale follows the gradients

@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_first_steps_find_scale_without_skipping_a_step(context):
    mod = made(net(head=S.LinearRegressionOutput), optimizer=("sgd", {"learning_rate": 1e-5}),
               context=context, loss_scale="dynamic")
    scales = []
    for seed in range(12):
        scales.append(mod.loss_scale)
        assert learn(mod, batch(seed, label=100))
    assert mod.skipped == 0
    assert scales[0] == 4
    assert len(set(scales)) > 1
    norm = mod.gradient_norm / mod._optimizer.rescale_grad
    assert 65504 / 256 < norm * mod.loss_scale < 65504 / 4


def test_accumulated_gradients_share_one_scale():
    mods = [made(net(), loss_scale=scale, bind={"grad_req": "add"}) for scale in (dynamic(4), 8)]
    for mod in mods:
        for label in (1, 1000, 2000):
            mod.forward_backward(batch(label=label))
    for name, g in grads(mods[0]).items():
        np.testing.assert_allclose(g / 4, grads(mods[1])[name] / 8, rtol=4e-3, atol=1e-3)
    assert mods[0].update()
    assert mods[0].skipped == 0


def test_accumulated_gradients_are_rescaled_if_scale_changes():
    def gradients(scale):
        mod = made(net(None), optimizer=("sgd", {"learning_rate": 0}), loss_scale=scale,
                   bind={"grad_req": "add"})
        for _ in range(3):
            used = mod.loss_scale
            assert learn(mod, batch())
        return {k: g / used for k, g in grads(mod).items()}

    grown, fixed = gradients(dynamic(64, growth_interval=1)), gradients(64)
    assert same(grown, fixed)


def test_head_and_input_gradients_follow_the_scale():
    mod = prepared(amp.Module(amp.convert_symbol(body()), label_names=None, loss_scale="dynamic"),
                   (6, 3, 6, 6), init=mx.init.Xavier(), optimizer={"learning_rate": 0},
                   inputs_need_grad=True)
    scales, inputs = [], []
    for _ in range(3):
        scales.append(mod.loss_scale)
        assert learn(mod, batch(), [nd.ones((6, 3))])
        inputs.append(mod.get_input_grads()[0].asnumpy())
    assert scales[0] < scales[1]
    np.testing.assert_allclose(inputs[1], inputs[2], rtol=1e-2)
    assert np.abs(inputs[0]).max() < 10


def test_buckets_share_one_scale():
    mod = bucketing(loss_scale="dynamic")
    scales = []
    for length in (5, 9, 7):
        scales.append(mod.loss_scale)
        assert learn(mod, words(length))
    assert mod.skipped == 0
    assert scales == sorted(scales)
    assert scales[0] < scales[1]


@pytest.mark.parametrize("scale", [1024, 1000.0, dynamic()])
@pytest.mark.parametrize("engine", [True, False])
def test_scale_adds_one_operator_before_and_after_loss(scale, engine, monkeypatch):
    """Without the engine, several operators give the same results."""
    policy = "float16" if engine else None
    if not engine:
        monkeypatch.setattr(library, "_table", None)
    mod, without = made(net(policy), loss_scale=scale), made(net(policy), loss_scale=None)
    operators, others = (m._exec_group.execs[0].debug_str().count("Op:") for m in (mod, without))
    assert operators == others + 2 if engine else operators > others + 2
    stock = made(net(None), mx.mod.Module)
    stock.set_params(*mod.get_params())
    assert learn(mod, batch())
    learn(stock, batch())
    for name, value in values(stock).items():
        assert np.allclose(values(mod)[name], value, rtol=2e-3, atol=1e-4), name


@pytest.mark.parametrize("scale", [512, "dynamic"])
def test_scale_applies_to_gradient_of_float16_loss(scale):
    """The loss stays float16, and its gradient is scaled in float32."""
    data = S.Cast(S.var("data"), dtype="float16")
    label = S.Cast(S.var("label"), dtype="float16")
    sym = S.LinearRegressionOutput(S.FullyConnected(data, num_hidden=2, name="fc"), label)

    def moved(loss_scale):
        mod = prepared(amp.Module(sym, label_names=["label"], loss_scale=loss_scale), (4, 3),
                       (4, 2), init=mx.init.One(),
                       optimizer={"learning_rate": 0.25, "rescale_grad": 1})
        mod.forward_backward(mx.io.DataBatch([nd.ones((4, 3)) / 64], [nd.ones((4, 2))]))
        mod.update()
        assert mod.get_outputs()[0].dtype == np.float16
        return values(mod)["fc_weight"] - 1

    assert moved(None).any()
    assert np.allclose(moved(None), moved(scale), rtol=1e-2)


def test_other_outputs_sharing_loss_input_are_not_scaled():
    """An array is both an output and the input of a loss: its head gradient is not scaled."""
    x = S.FullyConnected(S.var("data"), num_hidden=2, name="fc")
    sym = S.Group([S.LinearRegressionOutput(x, S.var("label"), name="head"), S.BlockGrad(x)])
    for scale in (None, 8, "dynamic"):
        mod = prepared(amp.Module(sym, label_names=["label"], loss_scale=scale), (4, 3), (4, 2),
                       init=mx.init.One())
        mod.forward_backward(mx.io.DataBatch([nd.ones((4, 3))], [nd.zeros((4, 2))]))
        outputs = [out.asnumpy() for out in mod.get_outputs()]
        assert same(outputs[0], outputs[1])
        assert (outputs[0] == 3).all()


@pytest.mark.parametrize("scale", [None, 8, dynamic(8)])
def test_infinite_value_before_loss_keeps_its_gradient(scale):
    mod = amp.Module(S.MAERegressionOutput(S.var("data"), S.var("label")), label_names=["label"],
                     loss_scale=scale)
    mod.bind([("data", (1, 3))], [("label", (1, 3))], inputs_need_grad=True)
    mod.init_params()
    mod.init_optimizer()
    mod.forward_backward(mx.io.DataBatch([nd.array([[np.inf, -np.inf, 1]])], [nd.zeros((1, 3))]))
    assert np.allclose(mod.get_input_grads()[0].asnumpy(), np.array([[1, -1, 1]]) / 3)


def test_parameters_have_averages_of_last_batch(tmp_path):
    """MXNet's executors do not order a read of moving averages after the batch norm."""
    x = S.var("data")
    for i in range(4):  # long enough to be read meanwhile
        x = S.FullyConnected(x, num_hidden=1024, no_bias=True, name=f"slow{i}")
    symbol = S.LinearRegressionOutput(S.BatchNorm(x, name="norm"), name="out")
    mod = prepared(amp.Module(symbol, label_names=["out_label"]), (512, 1024), (512, 1024),
                   init=mx.init.One(), optimizer={"learning_rate": 0.0})
    data = mx.io.DataBatch([nd.full((512, 1024), 2.0 ** -40)], [nd.zeros((512, 1024))])

    def saved():
        mod.save_params(str(tmp_path / "a.params"))
        return nd.load(str(tmp_path / "a.params"))["aux:norm_moving_mean"]

    for read, average in ((lambda: mod.get_params()[1]["norm_moving_mean"], 0.1), (saved, 0.19)):
        mod.forward_backward(data)
        mod.update()
        np.testing.assert_allclose(read().asnumpy(), average, rtol=1e-5)


# ---- devices of parts of a network (group2ctx)

def net_in_groups(policy):
    with mx.AttrScope(ctx_group="first"):
        x = S.Activation(S.FullyConnected(S.var("data"), num_hidden=8, name="one"), "relu")
    with mx.AttrScope(ctx_group="second"):
        symbol = S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="two"), name="head")
    return amp.convert_symbol(symbol, policy)


@pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16",
                                    "mixed_bfloat16"])
def test_network_on_devices_of_its_groups_trains_as_on_one(policy):
    outputs, parameters = [], None
    for groups in (None, {"first": mx.cpu(0), "second": mx.cpu(1)}):
        mod = amp.Module(net_in_groups(policy), label_names=["head_label"], group2ctxs=groups,
                         loss_scale=128)
        mod.bind([("data", (4, 5))], [("head_label", (4,))])
        mod.init_params(mx.init.Xavier(), arg_params=parameters)
        parameters = {name: array.copy() for name, array in mod.get_params()[0].items()}
        mod.init_optimizer(optimizer_params={"learning_rate": 0.1})
        data = mx.io.DataBatch([nd.arange(20).reshape((4, 5)) / 10], [nd.array([0, 1, 2, 0])])
        for _ in range(3):
            learn(mod, data)
        for _ in range(2):  # weights that change between predictions
            mod.forward(data, is_train=False)
            outputs.append(mod.get_outputs()[0].asnumpy())
            learn(mod, data)
    np.testing.assert_array_equal(outputs[:2], outputs[2:])
    assert not np.array_equal(outputs[0], outputs[1])


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_casts_are_in_the_group_of_what_they_cast(policy):
    attributes = net_in_groups(policy).attr_dict()
    casts = {name: attrs for name, attrs in attributes.items() if "_cast_" in name}
    assert [attrs["ctx_group"] for name, attrs in casts.items() if name.startswith("two")]
    assert all("ctx_group" in attrs for name, attrs in casts.items()
               if not name.startswith(("data", "head_label")))


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_bfloat16"])
def test_checkpoint_loads_as_a_symbol_block(policy, tmp_path):
    out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="dense")
    module = prepared(amp.Module(amp.convert_symbol(out, policy), label_names=None), (4, 5),
                      init=mx.init.Xavier(), optimizer=None, for_training=False)
    data = mx.nd.random.normal(shape=(4, 5))
    module.forward(mx.io.DataBatch([data]))
    expected = module.get_outputs()[0].asnumpy()
    module.save_checkpoint(str(tmp_path / "net"), 1)
    block = mx.gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"],
                                         str(tmp_path / "net-0001.params"))
    np.testing.assert_array_equal(block(data).asnumpy(), expected)
    (weight,) = [p for name, p in block.collect_params().items() if name.endswith("weight")]
    assert dtype_name(weight.data().dtype) == policy.replace("mixed_bfloat16", "float32")


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_feed_forward_of_a_converted_symbol_is_refused(policy):
    out = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3),
                               name="softmax")
    data = mx.io.NDArrayIter(np.ones((8, 5), "float32"), np.zeros(8, "float32"), 4)
    with pytest.raises(ValueError, match=f"gluon_amp.Module.*{policy}"):
        mx.model.FeedForward(amp.convert_symbol(out, policy), num_epoch=1).fit(data)
    data.reset()
    mx.model.FeedForward(out, num_epoch=1).fit(data)
