"""amp.Module skips what overflows, and clips the gradient that it unscaled."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from modules import (
    OVERFLOW,
    TWO,
    batch,
    dynamic,
    everything,
    grads,
    learn,
    made,
    net,
    train,
    values,
)
from mxnet import gluon, nd

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
