import json
import re

import gluon_amp as amp
import hypothesis
import mxnet as mx
import numpy as np
import pytest
from cases import cases
from gluon_amp import DynamicLossScale, LossScaleError, StaticLossScale
from gluon_amp.training.loss_scale import as_loss_scale
from hypothesis import strategies as st
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

L2Loss = gluon.loss.L2Loss
NOT_POSITIVE = [0, -1, float("inf"), float("nan"), 2.0 ** 128, "128", True, None, [128]]
NOT_COUNTS = [-1, 1.0, float("nan"), "1", True, None]


def message(start, value):
    """A regular expression for an error that shows the received value."""
    return f"^{start}.*" + re.escape(f" Received: {value!r}") + "$"


def loss_inputs(name, rng):
    pred, other, third = (rng.standard_normal((4, 5)) for _ in range(3))
    return [nd.array(x) for x in {
        "SigmoidBinaryCrossEntropyLoss": [pred, other > 0],
        "SoftmaxCrossEntropyLoss": [pred, [0, 4, 2, 2]],
        "KLDivLoss": [pred, np.exp(other)],
        "CTCLoss": [rng.standard_normal((2, 7, 4)), [[1, 0, -1], [2, 2, 1]]],
        "HingeLoss": [pred, np.sign(other)], "SquaredHingeLoss": [pred, np.sign(other)],
        "LogisticLoss": [pred, np.sign(other)], "PoissonNLLLoss": [pred, np.abs(other // 1)],
        "TripletLoss": [pred, other, third], "CosineEmbeddingLoss": [pred, other, [1, -1, 1, -1]],
    }.get(name, [pred, other])]


def value_and_gradient(loss, inputs):
    inputs[0].attach_grad()
    with autograd.record():
        value = loss(*inputs)
    value.backward()
    return value.asnumpy(), inputs[0].grad.asnumpy()


@pytest.mark.parametrize("weight", [{}, {"weight": 0.3}], ids=["default", "weight"])
@pytest.mark.parametrize("name", sorted({getattr(gluon.loss, name).__name__ for name in
                                         gluon.loss.__all__} - {"Loss", "SDMLLoss"}))
def test_scale_multiplies_values_and_gradients_of_every_loss(name, weight, rng):
    cls, inputs = getattr(gluon.loss, name), loss_inputs(name, rng)
    plain = value_and_gradient(cls(**weight), inputs)
    assert all(a.any() for a in plain)
    for scale, rtol in ((2.0 ** 10, 0), (100, 2e-6)):  # powers of two: without any rounding
        scaled = value_and_gradient(StaticLossScale(scale).loss(cls, **weight), inputs)
        for a, b in zip(plain, scaled):
            np.testing.assert_allclose(b, a * np.float32(scale), rtol=rtol)


def test_loss_arguments_are_passed_and_none_weight_uses_class_default():
    loss = StaticLossScale(8).loss(gluon.loss.HuberLoss, rho=3, batch_axis=1, weight=None)
    assert (loss._rho, loss._batch_axis, loss._weight) == (3, 1, 8)
    init = {"__init__": lambda self, weight=0.5: L2Loss.__init__(self, weight)}
    assert StaticLossScale(8).loss(type("Half", (L2Loss,), init))._weight == 4


def test_losses_without_weight_are_refused():
    unweighted = type("Unweighted", (L2Loss,), {"__init__": lambda self: None})
    for cls in (gluon.loss.SDMLLoss, unweighted):
        with pytest.raises(TypeError, match=rf"^{cls.__name__} .*: use gluon_amp\.Trainer, which"):
            StaticLossScale(8).loss(cls)
    for wrong in (L2Loss(), nn.Dense, "L2Loss", None):
        with pytest.raises(TypeError, match=message(r"scale\.loss takes a class", wrong)):
            StaticLossScale(8).loss(wrong)


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=repr)
def test_scale_and_batch_size_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match=message("scale must be a positive", value)):
        StaticLossScale(value)
    with pytest.raises(ValueError, match=message("batch_size must be a positive", value)):
        StaticLossScale(8).module_optimizer("sgd", batch_size=value)


def test_static_scale_accepts_any_positive_number():
    for value in (128, 128.0, np.float32(128), np.int64(128)):
        scale = StaticLossScale(value)
        assert repr(scale) == "StaticLossScale(scale=128.0)"
    with pytest.raises(AttributeError):
        scale.scale = 2.0


def test_optimizer_divides_by_scale_and_has_master_weights():
    scale = StaticLossScale(128)
    assert scale.optimizer("sgd").rescale_grad == 1 / 128
    adam = scale.optimizer("Adam", rescale_grad=0.5, learning_rate=0.25)
    assert (adam.rescale_grad, adam.lr, adam.multi_precision) == (0.5 / 128, 0.25, True)
    nag = scale.module_optimizer("nag", batch_size=32, rescale_grad=0.5, momentum=0.9)
    assert (nag.rescale_grad, nag.momentum, nag.multi_precision) == (0.5 / (128 * 32), 0.9, True)


def test_lbsgd_is_refused():
    scale = StaticLossScale(8)
    for make, more in ((scale.optimizer, {}), (scale.module_optimizer, {"batch_size": 4})):
        with pytest.raises(ValueError, match=r"no loss scale fits it\. Use lars or lamb"):
            make("LBSGD", **more)


def train(scale, name, policy="float32", weight=1.0, **settings):
    """20 steps: the change of each parameter, and the final parameters and losses."""
    mx.random.seed(7)
    rng = np.random.default_rng(7)
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(16, in_units=10, activation="tanh", prefix="one_"),
            nn.BatchNorm(in_channels=16, prefix="norm_"), nn.Dense(4, in_units=16, prefix="two_"))
    net.initialize(mx.init.Xavier())
    amp.convert(net, policy)
    loss = scale.loss(L2Loss, weight=weight) if scale else L2Loss(weight)
    matrices_only = ".*weight" if name == "groupadagrad" else None
    trainer = gluon.Trainer(net.collect_params(matrices_only),
                            (scale or amp).optimizer(name, **settings))
    before = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
    losses = []
    for _ in range(20):
        data, label = (nd.array(rng.standard_normal((6, n))) for n in (10, 4))
        with autograd.record():
            value = loss(net(data), label)
        value.backward()
        trainer.step(6)
        losses.append((scale.unscaled(value) if scale else value).asnumpy())
    after = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
    way = {n: np.abs(after[n].astype("float32") - before[n]).max() for n in after}
    return way, {**after, "losses": np.array(losses)}


def assert_same(plain, pair):
    assert plain[0]["one_weight"] > 0
    for name, value in plain[1].items():
        assert value.dtype == pair[1][name].dtype
        assert np.isfinite(value).all()
        assert np.array_equal(value, pair[1][name]), name


def assert_close(plain, pair, rtol):
    """Differences within this fraction of the change, and one unit of the type."""
    for name, way in plain[0].items():
        a, b = plain[1][name], pair[1][name]
        assert (np.abs(a.astype("float32") - b) <= rtol * way + np.spacing(np.abs(a))).all(), name


# All but lbsgd, which is refused, and "test", which increases the loss to infinity.
NAMES = sorted(set(mx.optimizer.Optimizer.opt_registry) - {"lbsgd", "test"})
CLIPPED = {"clip_gradient": 0.02, "rescale_grad": 0.3}
DISTINCT = [*((name, CLIPPED) for name in ("sgd", "adamw", "adadelta")), ("adamax", {}),
            ("lars", {"eta": 0.5, "momentum": 0.9, "wd": 0.01}), ("signum", {"momentum": 0}),
            *((name, {"wd": 0.01}) for name in ("adam", "lamb")), ("rmsprop", {"centered": True}),
            ("nag", {"momentum": 0.9, "wd": 0.01})]
OPTIMIZERS = [*((name, settings) for name in NAMES for settings in ({}, CLIPPED)),
              *((name, {"momentum": 0.9, "wd": 0.01}) for name in ("sgd", "signum")),
              ("adamw", {"wd": 0.01})]


# Every one of these optimizers first multiplies by rescale_grad, in float32 (lars the norms of
# gradients, too), and multiplying and dividing a float32 by a power of two is exact.
@pytest.mark.parametrize(("name", "settings"), cases(
    DISTINCT, [case for case in OPTIMIZERS if case not in DISTINCT]))
def test_float32_with_power_of_two_scale_is_bitwise_identical(name, settings):
    plain = train(None, name, **settings)
    assert_same(plain, train(StaticLossScale(2.0 ** 16), name, **settings))
    assert_close(plain, train(StaticLossScale(100), name, **settings), rtol=5e-5)


# These gradients are normal float16 numbers without the scale, too.
@pytest.mark.parametrize(("name", "settings"), [
    *((name, {}) for name in ("sgd", "adam", "adamw", "lamb", "rmsprop", "adagrad")),
    ("sgd", {"momentum": 0.9}), ("nag", {"momentum": 0.9}), ("lars", {"eta": 0.5})])
def test_float16_with_scale_matches_training_without(name, settings):
    plain = train(None, name, "float16", **settings)
    assert plain[1]["one_weight"].dtype == np.float16
    assert_same(plain, train(StaticLossScale(2.0 ** 8), name, "float16", **settings))
    assert_close(plain, train(StaticLossScale(100), name, "float16", **settings), rtol=2e-2)


@pytest.mark.parametrize("cls", [DynamicLossScale, StaticLossScale])
def test_scales_are_values(cls):
    assert len({cls(8.0), cls(8.0), cls(16.0)}) == 2
    with pytest.raises(AttributeError):
        cls(8.0).initial = 16.0


def test_tiny_gradients_train_only_with_scale():
    tiny, fast = 2.0 ** -30, {"learning_rate": 0.01 * 2.0 ** 30}
    usual = train(None, "sgd", "float16", learning_rate=0.01)
    plain = train(None, "sgd", "float16", weight=tiny, **fast)
    assert plain[0]["one_weight"] == plain[0]["two_weight"] == plain[0]["two_bias"] == 0
    usual[1]["losses"] *= tiny
    assert_same(usual, train(StaticLossScale(1 / tiny), "sgd", "float16", weight=tiny, **fast))


def train_module(optimizer, grad_scale, devices):
    mx.random.seed(7)
    rng = np.random.default_rng(7)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="one")
    net = mx.sym.FullyConnected(mx.sym.tanh(net), num_hidden=4, name="two")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, grad_scale=grad_scale, name="softmax"),
                           context=devices)
    module.bind([("data", (8, 10))], [("softmax_label", (8,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer=optimizer)
    for _ in range(20):
        data, label = rng.standard_normal((8, 10)), rng.integers(0, 4, 8)
        module.forward_backward(mx.io.DataBatch([nd.array(data)], [nd.array(label)]))
        module.update()
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


# Without weight decay, which a Module with an optimizer object applies to biases, too.
@pytest.mark.parametrize("devices", [[mx.cpu()], [mx.cpu(0), mx.cpu(1)]], ids=["one", "two"])
@pytest.mark.parametrize(("name", "settings"), [("sgd", {"momentum": 0.9}), ("adam", {})])
def test_module_with_static_pair_is_bitwise_identical(name, settings, devices):
    plain = train_module(mx.optimizer.create(name, rescale_grad=1 / 8, **settings), 1, devices)
    optimizer = StaticLossScale(128).module_optimizer(name, batch_size=8, **settings)
    with pytest.warns(UserWarning, match="rescale_grad is not normalized to 1.0/batch_size"):
        pair = train_module(optimizer, 128, devices)
    assert all(np.array_equal(plain[n], pair[n]) for n in plain)


LARGEST = 65504.0


@st.composite
def settings_and_norms(draw):
    minimum = draw(st.floats(2.0 ** -20, 2.0 ** 20))
    maximum = minimum * draw(st.floats(1, 2.0 ** 20))
    norms = st.one_of(st.floats(0, 1e9), st.sampled_from([np.inf, np.nan]))
    return {"initial": draw(st.floats(minimum, maximum)), "minimum": minimum, "maximum": maximum,
            "growth_interval": draw(st.integers(1, 60))}, draw(st.lists(norms, max_size=80))


@hypothesis.settings(deadline=None)
@hypothesis.given(settings_and_norms())
def test_scale_stays_between_its_limits_and_leaves_headroom(drawn):
    settings, norms = drawn
    scale = DynamicLossScale(**settings)
    for norm in norms:
        before, saved = scale, json.dumps(scale.state_dict())
        if not np.isfinite(norm) and scale.scale == scale.minimum:
            with pytest.raises(LossScaleError):
                scale.update(norm)
            continue
        scale = scale.update(norm)
        assert DynamicLossScale(**settings).load_state_dict(json.loads(saved)).update(norm) == scale
        assert json.dumps(before.state_dict()) == saved  # a value, which does not change
        assert scale.minimum <= scale.scale <= scale.maximum
        if not np.isfinite(norm):
            assert scale.scale < before.scale
        elif scale.scale > before.scale:
            assert norm * scale.scale <= LARGEST / 16
        elif scale.scale > scale.minimum:
            assert norm * scale.scale <= LARGEST / 4
        assert scale.settled or not before.settled


@pytest.mark.parametrize("norm", [1e-6, 0.03, 1.0, 300.0, 4000.0, 1e6])
def test_first_steps_reach_largest_power_of_two_that_leaves_headroom(norm):
    scale, seen = DynamicLossScale(), []
    for _ in range(10):
        assert not scale.settled
        seen.append(scale.scale)
        scale = scale.update(norm)
    assert scale.settled
    fits = 2.0 ** np.floor(np.log2(LARGEST / 16 / norm))
    assert scale.scale == min(max(fits, scale.minimum), scale.maximum)
    assert seen[0] == 4
    assert all(b <= 16 * a for a, b in zip(seen, seen[1:]))


SMALL = LARGEST / 2 ** 10 / 8


def settled(scale, **kwargs):
    return DynamicLossScale(scale, settled=True, **kwargs)


@pytest.mark.parametrize(("scale", "norms", "expected"), [
    # the first is the nearest to 4 within limits, and without gradients they end at 2^16
    (DynamicLossScale(), [], 4), (DynamicLossScale(minimum=32), [], 32),
    (DynamicLossScale(maximum=0.5), [], 0.5), (DynamicLossScale(), [0.0] * 10, 2.0 ** 16),
    # an overflow divides by 16 in the first steps, then by 2; its norm is no guide
    (DynamicLossScale(), [np.inf], 4 / 16), (DynamicLossScale(), [np.inf, 1.0, np.inf], 4 / 16),
    (DynamicLossScale(), [np.inf, 1.0, np.inf, np.nan], 4 / 32),
    # doubles after growth_interval if that fits: 16 * 300 is above 65504 / 16
    (settled(8, growth_interval=5), [300.0] * 4, 8),
    (settled(8, growth_interval=5), [300.0] * 5, 8),
    (settled(8, growth_interval=5), [200.0] * 5, 16),
    (settled(8, growth_interval=5), [*[200.0] * 4, np.inf, *[200.0] * 4], 4),
    # grows sooner while headroom is large, until norm * scale is 65504 / 64
    (settled(8), [SMALL] * 99, 8), (settled(8), [SMALL] * 400, 128),
    (settled(8), [SMALL] * 2399, 128), (settled(8), [SMALL] * 2400, 256),
    (settled(8), [np.inf, *[SMALL] * 1999], 4), (settled(8), [np.inf, *[SMALL] * 2100], 16),
    # is lowered before an overflow
    (settled(64), [LARGEST / 4 / 64], 64), (settled(64), [1.01 * LARGEST / 4 / 64], 8)])
def test_scale_after_norms(scale, norms, expected):
    for norm in norms:
        scale = scale.update(norm)
    assert scale.scale == expected


@pytest.mark.parametrize(("scale", "norm", "expected"), [
    (DynamicLossScale(64), 1.0, 32), (DynamicLossScale(64), np.inf, 2 / 16),
    (settled(64), 1.0, 64), (settled(64), np.inf, 1)])
def test_smaller_scale_of_another_trainer_was_used(scale, norm, expected):
    assert scale.update(norm, 2.0).scale == expected


def test_overflow_in_first_steps_after_a_finite_step_settles():
    scale = DynamicLossScale().update(np.inf)
    assert not scale.settled
    assert scale.update(1.0).update(np.inf).settled


def test_bad_batches_at_the_start_raise_no_error_at_once():
    scale = DynamicLossScale()
    for _ in range(4):
        scale = scale.update(np.inf)
    assert scale.scale == scale.minimum == 2.0 ** -14
    with pytest.raises(LossScaleError):
        scale.update(np.inf)


def test_error_at_minimum_names_parameters_and_remedy():
    scale, names = DynamicLossScale(0.3, minimum=0.3), list("abcdef")
    for count, named in ((0, "finite at"), (5, "in a, b, c, d, e at"), (6, "d, e and 1 more at")):
        with pytest.raises(LossScaleError, match=rf"{named} .*, 0\.3: .*convert\(keep=\.\.\.\)"):
            scale.update(np.nan, parameters=names[:count])


@pytest.mark.parametrize(("name", "value"), [
    *((name, value) for value in NOT_POSITIVE for name in ("initial", "minimum", "maximum")
      if (name, value) != ("initial", None)),
    *(("growth_interval", value) for value in [0, *NOT_COUNTS]),
    ("initial", 2.0 ** -15), ("initial", 2.0 ** 25)])
def test_each_argument_is_checked(name, value):
    with pytest.raises(ValueError, match=message(f"{name} must", value)):
        DynamicLossScale(**{name: value})
    with pytest.raises(ValueError, match=r"above maximum\. Received: minimum=8, maximum=4$"):
        DynamicLossScale(4, minimum=8, maximum=4)


@pytest.mark.parametrize("state", [
    None, [8.0, 1], {}, {"scale": 8.0}, {"scale": 8.0, "finite_steps": 1, "step": 1},
    {"scale": 8.0, "finite_steps": 1, "settled": 1},
    {"scale": 8.0, "finite_steps": 1, "overflows": -1},
    *({"scale": 8.0, "finite_steps": value} for value in NOT_COUNTS),
    *({"scale": value, "finite_steps": 3} for value in [*NOT_POSITIVE, 3.9, 64.1])], ids=repr)
def test_unfit_state_is_refused(state):
    scale = DynamicLossScale(16, minimum=4, maximum=64)
    with pytest.raises(ValueError, match="Received: "):
        scale.load_state_dict(state)
    assert repr(scale) == "DynamicLossScale(scale=16.0, finite_steps=0)"


def test_state_of_earlier_versions_is_settled():
    scale = DynamicLossScale().load_state_dict({"scale": 8.0, "finite_steps": 3})
    assert scale.state_dict() == {"scale": 8.0, "finite_steps": 3, "overflows": 0,
                                  "settled": True}


def test_valid_values_of_loss_scale():
    for scale in (StaticLossScale(8), DynamicLossScale()):
        assert as_loss_scale(scale) is scale
    assert as_loss_scale(None).scale == 1
    assert as_loss_scale(8) == as_loss_scale(np.float32(8)) == StaticLossScale(8)
    assert as_loss_scale("dynamic").state_dict() == DynamicLossScale().state_dict()
    for wrong in (0.0, "static", "128", True, [8], DynamicLossScale):
        with pytest.raises(ValueError, match=message("loss_scale (must be|takes) ", wrong)):
            as_loss_scale(wrong)
