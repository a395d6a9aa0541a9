"""amp.Module finds its first scale within the first step, which is not lost."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from modules import TWO, batch, body, dynamic, everything, grads, learn, made, net, same, values
from mxnet import nd
from mxnet import symbol as S
from test_module_checkpoints import bucketing, words

HIGH = 2.0 ** 24


@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
@pytest.mark.parametrize("head", [S.LinearRegressionOutput, S.MAERegressionOutput])
def test_the_step_is_bit_by_bit_one_that_began_with_that_scale(context, head, caplog):
    def module(scale):
        return made(net(head=head), optimizer=("sgd", {"learning_rate": 1e-5, "momentum": 0.9}),
                    context=context, loss_scale=dynamic(scale))

    mod = module(HIGH)
    assert learn(mod, batch(label=100))
    assert mod.skipped == 0
    assert mod.loss_scale < HIGH
    assert [r.getMessage()[:12] for r in caplog.records if r.name == "gluon_amp"] \
        == ["loss scale 2"]
    other = module(mod.loss_scale)
    assert learn(other, batch(label=100))
    assert same(everything(mod), everything(other))  # the moving averages, too
    for seed in range(3):
        assert learn(mod, batch(seed, label=100))
        assert learn(other, batch(seed, label=100))
    assert same(everything(mod), everything(other))


def test_dropout_draws_anew_and_its_gradient_is_that_of_what_it_drew():
    x = S.Dropout(S.FullyConnected(S.var("data"), num_hidden=64, name="fc"), p=0.5)
    sym = amp.convert_symbol(S.LinearRegressionOutput(x, name="head"))
    mod = amp.Module(sym, label_names=["head_label"], loss_scale=dynamic(HIGH))
    mod.bind([("data", (4, 8))], [("head_label", (4, 64))])
    mod.init_params(mx.init.One())
    mod.init_optimizer()
    mod.forward_backward(mx.io.DataBatch([nd.ones((4, 8))], [nd.full((4, 64), 1e3)]))
    out = mod.get_outputs()[0].asnumpy()
    assert mod.loss_scale < HIGH
    assert 0.3 < (out == 0).mean() < 0.7
    exact = np.where(out == 0, 0, 2 * (out - 1e3)).sum(axis=0) / 64 * mod.loss_scale
    np.testing.assert_allclose(grads(mod)["fc_bias"], exact, rtol=2e-3)
    assert mod.update()


def test_gradients_that_add_up_are_those_of_one_scale():
    mod = made(net(), loss_scale=dynamic(2.0 ** 15), bind={"grad_req": "add"})
    for label in (1, 1000, 2000):
        mod.forward_backward(batch(label=label))
    scale = mod.loss_scale
    assert scale < 2.0 ** 15
    found = {k: g / scale for k, g in grads(mod).items()}
    assert mod.update()
    assert mod.skipped == 0
    other = made(net(), loss_scale=dynamic(scale), bind={"grad_req": "add"})
    for label in (1, 1000, 2000):
        other.forward_backward(batch(label=label))
    for name, g in grads(other).items():
        np.testing.assert_allclose(g / scale, found[name], rtol=4e-3, atol=1e-3)


def test_gradients_that_add_up_over_a_change_of_scale_are_of_one_scale():
    def gradients(scale):
        mod = made(net(None), optimizer=("sgd", {"learning_rate": 0}), loss_scale=scale,
                   bind={"grad_req": "add"})
        for _ in range(3):
            assert learn(mod, batch())
        return {k: g / mod._used_scale for k, g in grads(mod).items()}

    grown, fixed = gradients(dynamic(64, growth_interval=1)), gradients(64)
    assert same(grown, fixed)


def test_head_gradients_and_input_gradients_follow_the_search():
    mod = amp.Module(amp.convert_symbol(body()), label_names=None, loss_scale=dynamic(HIGH))
    mod.bind([("data", (6, 3, 6, 6))], inputs_need_grad=True)
    mod.init_params(mx.init.Xavier())
    mod.init_optimizer(optimizer_params={"learning_rate": 0})
    inputs = []
    for _ in range(2):  # with a search, and without
        assert learn(mod, batch(), [nd.ones((6, 3))])
        inputs.append(mod.get_input_grads()[0].asnumpy())
    assert mod.loss_scale < HIGH
    assert np.array_equal(*inputs)
    assert np.abs(inputs[0]).max() < 10


def test_buckets_search_for_one_scale():
    mod, other = bucketing(loss_scale=dynamic(HIGH)), bucketing(loss_scale=dynamic(2.0 ** 14))
    for length in (5, 9, 7):
        assert learn(mod, words(length))
    assert mod.skipped == 0
    other = bucketing(loss_scale=dynamic(mod.loss_scale))
    for length in (5, 9, 7):
        assert learn(other, words(length))
    assert mod.loss_scale == other.loss_scale
    assert same(values(mod), values(other))


def test_where_no_scale_fits_it_is_as_ever():
    mod = made(net(), loss_scale=dynamic(2))
    assert learn(mod, batch(label=3e38)) is False
    assert (mod.loss_scale, mod.skipped) == (1, 1)
    with pytest.raises(amp.LossScaleError, match=r"fc_weight.* smallest loss scale, 1\.0"):
        learn(mod, batch(label=3e38))
