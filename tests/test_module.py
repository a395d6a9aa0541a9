"""amp.Module: MXNet's own, with float16 on CPUs and loss scaling, which changes nothing else."""
import logging
import re

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.symbolic.module import Speedometer
from modules import (
    OPTIMIZERS,
    TWO,
    batch,
    body,
    bound,
    check_moved_alike,
    dynamic,
    everything,
    learn,
    made,
    net,
    same,
    settled,
    train,
    values,
)
from mxnet import nd
from mxnet import symbol as S

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


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_binding_writes_nothing_to_the_terminal(policy, capfd):
    learn(made(net(policy)), batch())
    assert capfd.readouterr() == ("", "")


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
            batch_end_callback=Speedometer(6, 3))
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


# ---- MXNet's ways to save memory

@pytest.mark.parametrize("asked", ["for all", "by marks"])
def test_what_runs_again_in_the_backward_pass_draws_no_mask_and_moves_no_statistics(
        asked, monkeypatch):
    """MXNet knows by their names which operators must not."""
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
