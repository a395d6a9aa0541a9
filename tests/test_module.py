"""amp.Module and amp.BucketingModule: MXNet's own, with float16 on CPUs and loss scaling."""
import logging
import re

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import gluon, nd
from mxnet import symbol as S

OPTIMIZERS = {"sgd": ("sgd", {"learning_rate": 0.1}),
              "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
              "adam": ("adam", {"learning_rate": 0.01})}
OVERFLOW = 3e38  # a label: the output stays finite, its gradient times the scale is not
TWO = [mx.cpu(0), mx.cpu(1)]


def dynamic(initial=1024, maximum=2.0 ** 24, **kwargs):
    return amp.DynamicLossScale(initial, maximum=maximum, **kwargs)


def settled(initial):
    """A dynamic scale that searches no more, but skips."""
    scale = dynamic(initial, maximum=2.0 ** 40)
    scale.settled = True
    return scale


def body():
    x = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    x = S.BatchNorm(x, fix_gamma=False, name="bn")
    x = S.Activation(x, act_type="relu", name="relu")
    return S.FullyConnected(x, num_hidden=3, name="fc")


def net(policy="float16", head=S.LinearRegressionOutput):
    sym = head(body(), name="head")
    return amp.convert_symbol(sym, policy) if policy else sym


def batch(seed=0, size=6, label=None):
    rng = np.random.default_rng(seed)
    labels = rng.standard_normal((size, 3)) if label is None else np.full((size, 3), label)
    return mx.io.DataBatch([nd.array(rng.standard_normal((size, 3, 6, 6)))], [nd.array(labels)])


def bound(symbol, cls=amp.Module, size=6, bind=None, shape=(3,), **kwargs):
    mod = cls(symbol, label_names=["head_label"], **kwargs)
    mod.bind([("data", (size, 3, 6, 6))], [("head_label", (size, *shape))], **(bind or {}))
    return mod


def made(symbol, cls=amp.Module, optimizer="momentum", **kwargs):
    mod = bound(symbol, cls, **kwargs)
    mx.random.seed(3)
    mod.init_params(mx.init.Xavier())
    name, params = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    mod.init_optimizer(optimizer=name, optimizer_params=params)
    return mod


def learn(mod, data, out_grads=None):
    mod.forward(data, is_train=True)
    mod.backward(out_grads)
    updated = mod.update()
    nd.waitall()  # MXNet's batch norm writes its averages late, and its Module reads too early
    return updated


def train(mod, steps=10, first=0):
    return [learn(mod, batch(seed)) for seed in range(first, first + steps)]


def values(mod):
    return {k: a.asnumpy().astype("float32") for part in mod.get_params() for k, a in part.items()}


def grads(mod):
    return {k: g.asnumpy() for k, g in mod._exec_group.execs[0].grad_dict.items() if g is not None}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def arrays(state):
    if isinstance(state, nd.NDArray):
        return [state.asnumpy()]
    parts = state.values() if isinstance(state, dict) else state or ()
    return [a for part in parts for a in arrays(part)]


def everything(mod):
    """All that a step depends on."""
    scale = mod._steps.loss_scale
    return {**values(mod), **dict(enumerate(arrays(mod._updater.states))),
            "scale": [mod.loss_scale, mod.skipped, getattr(scale, "finite_steps", 0),
                      mod._steps.skipped_in_a_row, mod._optimizer.num_update,
                      mod._optimizer.learning_rate]}


def check_moved_alike(mod, other, before, rel=0.03):
    mine, theirs = values(mod), values(other)
    for name, start in before.items():
        move = theirs[name] - start
        assert np.abs(mine[name] - theirs[name]).max() <= rel * np.abs(move).max() + 2e-3, name


# ---- scaling changes nothing but what underflows

@pytest.mark.parametrize("scale", [None, 1, 2.0 ** 20, 2.0 ** -6, "dynamic",
                                   dynamic(8, growth_interval=3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_a_float32_symbol_trains_bit_by_bit_as_with_mxnets_module(scale, optimizer, context):
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
def test_float16_learns_what_float32_learns(scale, head, context):
    mod = made(net(head=head), context=context, loss_scale=scale)
    stock = made(net(None, head), mx.mod.Module, context=context)
    before = values(stock)
    mod.set_params(*stock.get_params())
    train(mod, 5)
    train(stock, 5)
    check_moved_alike(mod, stock, before)


def test_small_gradients_underflow_without_a_scale_and_not_with_one():
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
def test_masked_logits_of_minus_infinity_stay_a_softmax(policy, train_mode):
    sym = S.SoftmaxOutput(S.broadcast_add(S.var("data"), S.var("mask", shape=(1, 3))), name="head")
    sym = amp.convert_symbol(sym, policy) if policy else sym
    mod = amp.Module(sym, label_names=["head_label"], loss_scale=64)
    mod.bind([("data", (2, 3))], [("head_label", (2,))])
    mod.set_params({"mask": nd.array([[0, 0, -np.inf]])}, {})
    mod.forward(mx.io.DataBatch([nd.zeros((2, 3))], [nd.zeros(2)]), is_train=train_mode)
    assert (mod.get_outputs()[0].asnumpy() == [0.5, 0.5, 0]).all()


# ---- overflow

def test_an_overflow_is_skipped_and_the_scale_backs_off():
    mod = made(net(), loss_scale=dynamic())
    train(mod, 2)
    before = everything(mod)
    assert learn(mod, batch(label=OVERFLOW)) is False
    assert (mod.loss_scale, mod.skipped) == (512, 1)
    assert "fc_bias" in mod.overflowed
    after = everything(mod)
    for name in before.keys() - {"scale", "bn_moving_mean", "bn_moving_var"}:
        assert np.array_equal(after[name], before[name])
    assert learn(mod, batch()) is True


def test_an_overflow_on_one_device_is_one_skipped_step_on_all():
    mod = made(net(), context=TWO, loss_scale=dynamic())
    data = batch()
    data.label[0][0] = OVERFLOW
    assert [learn(mod, data), *train(mod, 3)] == [False, True, True, True]
    for first, second in mod._exec_group.param_arrays:
        assert np.array_equal(first.asnumpy(), second.asnumpy())


def test_moving_averages_of_a_skipped_step_are_seen():
    mod = made(net(), loss_scale=dynamic())
    train(mod, 1)
    mod.get_params()
    learn(mod, batch(1, label=OVERFLOW))
    inside = mod._exec_group.execs[0].aux_dict["bn_moving_mean"].asnumpy()
    assert np.array_equal(values(mod)["bn_moving_mean"], inside)


def test_a_skipped_step_leaves_clean_gradients_to_add_to():
    mod = made(net(), loss_scale=dynamic(), bind={"grad_req": "add"})
    assert learn(mod, batch(label=OVERFLOW)) is False
    assert not any(g.any() for g in grads(mod).values())
    mod.forward_backward(batch())
    once = grads(mod)
    mod.forward_backward(batch())
    for name, twice in grads(mod).items():
        assert np.array_equal(twice, 2 * once[name])


def test_an_overflow_at_the_floor_names_parameters():
    mod = made(net(), loss_scale=dynamic(2))
    learn(mod, batch(label=OVERFLOW))
    with pytest.raises(amp.LossScaleError, match=r"fc_weight.* smallest loss scale, 1\.0"):
        learn(mod, batch(label=OVERFLOW))


@pytest.mark.parametrize("scale", [64, dynamic()])
def test_nan_outputs_are_no_overflow(scale, caplog):
    mod = made(net(), loss_scale=scale)
    first = mod.loss_scale
    bad = mx.io.DataBatch([nd.full((6, 3, 6, 6), np.nan)], batch().label)
    for _ in range(15):
        assert learn(mod, bad) is False
    assert (mod.loss_scale, mod.skipped) == (first, 15)
    assert [r.levelname for r in caplog.records if r.name == "gluon_amp"] == ["WARNING"] * 15
    with pytest.raises(amp.LossScaleError, match=r"16 steps.*the loss itself is not finite"):
        learn(mod, bad)


@pytest.mark.parametrize("scale", [64, dynamic()])
def test_overflowed_names_the_newest_gradients_before_and_after_the_step(scale):
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

def test_clipping_is_float32s_whatever_the_scale():
    """The update moves weights by the rate times the norm, at most."""
    def moved(policy, optimizer=("sgd", {"learning_rate": 1}), **kwargs):
        mod = made(net(policy), optimizer=optimizer, **kwargs)
        before = values(mod)
        assert learn(mod, batch(label=100))
        return {k: v - before[k] for k, v in values(mod).items() if "moving" not in k}

    def norm(move):
        return np.sqrt(sum((m.astype("f8") ** 2).sum() for m in move.values()))

    free = moved(None)
    assert norm(free) > 10
    for context in (mx.cpu(), TWO):
        for scale in (None, 64, "dynamic"):
            clipped = moved(None, loss_scale=scale, clip_norm=0.5, context=context)
            assert norm(clipped) == pytest.approx(0.5, rel=1e-4)
            loose = moved(None, loss_scale=scale, clip_norm=1e9, context=context)
            assert norm(loose) > 10
    for name, move in moved(None, clip_norm=0.5).items():
        np.testing.assert_allclose(move, free[name] * 0.5 / norm(free), rtol=1e-3, atol=1e-6)
    assert norm(moved("float16", loss_scale=64, clip_norm=0.5)) == pytest.approx(0.5, rel=0.01)


def test_without_a_scale_too_clipping_looks_first_and_skips_what_is_not_finite():
    mod = made(net(None), clip_norm=1)
    bad = mx.io.DataBatch([nd.full((6, 3, 6, 6), np.nan)], batch().label)
    before = values(mod)["fc_weight"]
    assert learn(mod, bad) is False
    assert mod.skipped == 1
    assert np.array_equal(before, values(mod)["fc_weight"])


@pytest.mark.parametrize("clip_norm", [0, -1, float("nan"), "1"])
def test_a_bad_norm_is_refused(clip_norm):
    with pytest.raises(ValueError, match="clip_norm must be a positive, finite number"):
        amp.Module(net(), label_names=["head_label"], clip_norm=clip_norm)


def test_scaled_gradients_that_somebody_writes_into_are_an_error():
    mod = made(net(), loss_scale=64)
    mod.forward_backward(batch())
    before = values(mod)["fc_weight"]
    gluon.utils.clip_global_norm([mod._exec_group.execs[0].grad_dict["bn_beta"]], 1e-3)
    with pytest.raises(RuntimeError, match=r"in bn_beta were written between .* clip_norm="):
        mod.update()
    assert np.array_equal(before, values(mod)["fc_weight"])
    assert learn(mod, batch())


# ---- what scales, and what does not

@pytest.mark.parametrize("policy", [None, "float16"])
def test_head_gradients_that_are_given_are_scaled(policy):
    sym = amp.convert_symbol(body(), policy) if policy else body()
    moves = []
    for scale in (None, 64):
        mod = amp.Module(sym, label_names=None, loss_scale=scale)
        mod.bind([("data", (6, 3, 6, 6))])
        mx.random.seed(3)
        mod.init_params(mx.init.Xavier())
        mod.init_optimizer()
        learn(mod, batch(), [nd.ones((6, 3))])
        moves.append(values(mod))
    assert same(*moves)


def test_without_a_loss_and_head_gradients_a_scale_is_an_error():
    mod = amp.Module(amp.convert_symbol(body()), label_names=None, loss_scale=64)
    mod.bind([("data", (6, 3, 6, 6))])
    mod.init_params()
    mod.forward(batch(), is_train=True)
    with pytest.raises(ValueError, match=r"needs a loss in .* out_grads.*Received outputs: fc"):
        mod.backward()


def test_a_cast_behind_the_loss_is_still_a_loss():
    sym = S.Cast(net(), dtype="float32", name="out")
    assert learn(made(sym, loss_scale=64), batch())


def test_an_optimizer_object_gets_masters_as_a_name_does():
    def trained(optimizer, params=()):
        mod = made(net(), optimizer=(optimizer, params), loss_scale=64)
        train(mod, 5)
        return mod

    settings = {"learning_rate": 0.01, "rescale_grad": 1 / 6}
    mod = trained(mx.optimizer.Adam(**settings, param_idx2name=dict(
        enumerate(["conv_weight", "conv_bias", "bn_gamma", "bn_beta", "fc_weight", "fc_bias"]))))
    assert same(everything(mod), everything(trained("adam", settings)))


# ---- MXNet's Module otherwise

def test_predicting_between_steps_changes_nothing():
    mod, other = made(net(), loss_scale=dynamic()), made(net(), loss_scale=dynamic())
    for seed in range(4):
        for size in (6, 4):
            mod.forward(batch(seed, size), is_train=False)
        assert learn(mod, batch(seed)) == learn(other, batch(seed))
    assert same(everything(mod), everything(other))


@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("scale", [None, 64])
def test_prediction_uses_the_parameters_of_now(policy, scale):
    mod = made(net(policy), loss_scale=scale)
    for _ in range(2):  # a second time, too
        train(mod, 3)
        stock = bound(net(None), mx.mod.Module)
        stock.set_params(*mod.get_params())
        for m in (mod, stock):
            m.forward(batch(9), is_train=False)
        mine, wanted = (m.get_outputs()[0].asnumpy() for m in (mod, stock))
        assert np.abs(mine - wanted).max() <= 0.005 * np.abs(wanted).max()


@pytest.mark.parametrize("policy", [None, "float16"])
def test_other_batch_sizes_train_and_go_back(policy):
    mod = made(net(policy), loss_scale=64)
    other = made(net(policy), cls=amp.Module if policy else mx.mod.Module)
    for size in (6, 4, 8, 6):
        learn(mod, batch(size, size))
        learn(other, batch(size, size))
        assert mod.get_outputs()[0].shape == (size, 3)
    assert same(values(mod), values(other))


def test_initial_values_are_those_of_float32_rounded():
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
    wanted = stock.get_input_grads()[0].asnumpy()
    assert np.abs(mod.get_input_grads()[0].asnumpy() - wanted).max() \
        <= 0.01 * np.abs(wanted).max()
    assert np.array_equal(values(mod)["conv_weight"], fixed)


def test_states_are_kept_from_step_to_step():
    sym = S.LinearRegressionOutput(body() + S.var("state", shape=(6, 3)), name="head")
    mod = made(amp.convert_symbol(sym), state_names=["state"], loss_scale=64)
    mod.forward(batch(), is_train=True)
    before = mod.get_outputs()[0].asnumpy()
    mod.set_states(value=2)
    assert learn(mod, batch())
    assert mod.get_outputs()[0].asnumpy() == pytest.approx(before + 2, abs=2e-3)


def test_a_monitor_sees_layers_by_their_names_also_after_another_batch_size():
    mod = made(net(), loss_scale=64)
    monitor = mx.mon.Monitor(1, pattern="(fc|conv).*_output|fc_weight")
    mod.install_monitor(monitor)
    for size in (6, 4, 6):
        monitor.tic()
        learn(mod, batch(size=size))
        assert {"conv_output", "fc_output", "fc_weight"} <= {name for _, name, _ in monitor.toc()}


def test_fit_scores_predicts_and_names_the_scale_in_mxnets_log_line(caplog):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 3, 6, 6))
    y = (x[:, :, 0, 0]).argmax(1)
    data = mx.io.NDArrayIter(x, y, 6, label_name="head_label")
    caplog.set_level(logging.INFO)
    mod = amp.Module(net(head=S.SoftmaxOutput), label_names=["head_label"],
                     loss_scale=settled(2.0 ** 40))
    mod.fit(data, data, num_epoch=12, initializer=mx.init.Xavier(), optimizer="adam",
            optimizer_params={"learning_rate": 0.01},
            batch_end_callback=amp.Speedometer(6, 3))
    lines = [r.getMessage() for r in caplog.records if "Speed" in r.getMessage()]
    form = r"Epoch\[\d+\] Batch \[\d-\d\]\tSpeed: \S+ samples/sec\taccuracy=\d\.\d+" \
           r"\tloss-scale=(\d+)\.0+\tskipped=(\d+)\.0+"
    found = [re.fullmatch(form, line) for line in lines]
    assert len(found) == 36
    assert all(found)
    assert int(found[-1][1]) == mod.loss_scale < 2 ** 40
    assert int(found[-1][2]) == mod.skipped == 40 - np.log2(mod.loss_scale)
    assert mod.score(data, "acc")[0][1] > 0.9
    assert (mod.predict(data).asnumpy().argmax(1) == y).mean() == mod.score(data, "acc")[0][1]
