"""Updates of float16 and float32 weights in one pass on a CPU are bitwise identical to MXNet's
float32 optimizers for the same gradients, for every setting, size and instruction set."""

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import numbers
from gluon_amp.cpu import library
from gluon_amp.training.optimizer import ROWS
from halves import halves

pytestmark = pytest.mark.sanitize

SIZES = [1, 2, 7, 16, 33, 1003, 32769]  # the last one uses threads
OPTIMIZERS = [("sgd", {}), ("sgd", {"momentum": 0.9}), ("nag", {"momentum": 0.9}), ("nag", {}),
              ("adam", {}),
              ("adamw", {}), ("rmsprop", {}), ("rmsprop", {"centered": True}), ("lamb", {})]
SETTINGS = {
    "as it comes": {},
    "weight decay": {"wd": 0.013},
    "clipped": {"clip_gradient": 0.37, "wd": 0.01},
    "clipped at 0, which is no bound": {"clip_gradient": 0},
    "rescaled": {"rescale_grad": 1 / 192, "wd": 1e-4},
    "rates that MXNet reads a rounding off": {"learning_rate": 1.1e-05, "wd": 3.3e-07},
}
OF_ITS_OWN = [
    ("adam", {"beta1": 0.77, "beta2": 0.9, "epsilon": 1e-4}),
    ("adamw", {"beta1": 0.77, "beta2": 0.9, "epsilon": 1.7e-05}),
    ("nag", {"momentum": 0.3}),
    ("rmsprop", {"gamma1": 0.77, "clip_weights": 0.5}),
    ("rmsprop", {"centered": True, "gamma1": 0.95, "gamma2": 0.3, "clip_weights": 0.5}),
    ("lamb", {"bias_correction": False}), ("lamb", {"beta1": 0.77, "beta2": 0.9}),
    ("lamb", {"lower_bound": 20.0, "upper_bound": 100.0}), ("lamb", {"upper_bound": 0.5}),
]


@pytest.fixture
def in_one_pass(monkeypatch):
    """Calls of the engine's operator."""
    calls, original = [], library.call

    def call(name, inputs, out=None, **attrs):
        calls.append((name, attrs.get("num_weights")))
        return original(name, inputs, out, **attrs)

    monkeypatch.setattr(library, "call", call)
    return calls


def train(optimizer, dtype, steps=4):
    """Weights after some steps, and all float32 arrays of their states, master weights first."""
    rng = np.random.default_rng(5)
    updater = mx.optimizer.Updater(optimizer)
    weights = [mx.nd.array(halves(rng, size), dtype=dtype) for size in SIZES]
    for _ in range(steps):
        scale = rng.choice([0.01, 1, 100])
        gradients = [mx.nd.array(halves(rng, size, scale=scale), dtype=dtype) for size in SIZES]
        updater(list(range(len(SIZES))), gradients, weights)
    kept = []
    for i, weight in enumerate(weights):
        state = numbers(updater.states[i])
        if dtype == "float32":
            kept.append([weight.asnumpy(), *state])
        elif isinstance(optimizer, (mx.optimizer.SGD, mx.optimizer.NAG)):
            kept.append([state[-1], *state[:-1]])
        else:
            kept.append(state)
    return [weight.asnumpy() for weight in weights], kept


def assert_as_in_float32(name, settings, calls):
    settings = {"learning_rate": 0.05, **settings}
    weights, mine = train(amp.optimizer(name, **settings), "float16")
    assert calls == [("_gluon_amp_update", len(SIZES))] * 4
    _, stock = train(mx.optimizer.create(name, **settings), "float32")
    for weight, ours, theirs in zip(weights, mine, stock):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs):
            np.testing.assert_array_equal(our, their)
            assert np.isfinite(our).all()
        np.testing.assert_array_equal(weight, ours[0].astype(np.float16))
    calls.clear()
    _, of_floats = train(amp.optimizer(name, **settings), "float32")
    assert calls == [("_gluon_amp_update", len(SIZES))] * 4
    for ours, theirs in zip(of_floats, stock):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs):
            np.testing.assert_array_equal(our, their)


@pytest.mark.vectorized
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("name", "kwargs"), OPTIMIZERS)
def test_master_weights_and_states_match_float32_training(name, kwargs, settings, in_one_pass):
    assert_as_in_float32(name, {**kwargs, **settings}, in_one_pass)


@pytest.mark.vectorized
@pytest.mark.parametrize(("name", "kwargs"), OF_ITS_OWN)
def test_settings_of_one_optimizer(name, kwargs, in_one_pass):
    assert_as_in_float32(name, {"wd": 0.01, **kwargs}, in_one_pass)


@pytest.mark.parametrize(("name", "kwargs"), OPTIMIZERS)
def test_learning_rates_follow_schedule(name, kwargs, in_one_pass):
    weights = []
    for make, dtype in ((amp.optimizer, "float16"), (mx.optimizer.create, "float32")):
        schedule = mx.lr_scheduler.PolyScheduler(8, base_lr=0.1, warmup_steps=3)
        optimizer = make(name, learning_rate=0.1, lr_scheduler=schedule, **kwargs)
        optimizer.set_lr_mult({1: 0.5, 2: 0.0})
        optimizer.set_wd_mult({3: 2.0})
        weights.append([kept[0] for kept in train(optimizer, dtype)[1]])
    for ours, theirs in zip(*weights):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "kwargs"), OPTIMIZERS[1:])
def test_nonfinite_gradient_propagates_as_in_float32(name, kwargs):
    ends = []
    for make, dtype in ((amp.optimizer, "float16"), (mx.optimizer.create, "float32")):
        optimizer = make(name, learning_rate=0.1, clip_gradient=1.0, **kwargs)
        updater = mx.optimizer.Updater(optimizer)
        weight = mx.nd.arange(9, dtype=dtype)
        gradient = mx.nd.array([1, np.nan, np.inf, -np.inf, 0, -0.0, 3, 65504, 2**-24], dtype=dtype)
        for _ in range(3):
            updater([0], [gradient], [weight])
        ends.append(weight.asnumpy())
    np.testing.assert_array_equal(ends[0], ends[1].astype(np.float16))


@pytest.mark.parametrize("name", ["nag", "sgd"])
@pytest.mark.parametrize(("first", "then"), [(0.9, 0), (0.9, 0.5), (0.5, -0.1)])
def test_momentum_can_be_changed(name, first, then):
    ends = []
    for make, dtype in ((amp.optimizer, "float16"), (mx.optimizer.create, "float32")):
        optimizer = make(name, learning_rate=0.125, momentum=first, wd=0.01)
        updater, weight = mx.optimizer.Updater(optimizer), mx.nd.arange(9, dtype=dtype)
        for momentum in (first, first, then, then):
            optimizer.momentum = momentum
            updater([0], [mx.nd.ones(9, dtype=dtype)], [weight])
        ends.append(weight.asnumpy())
    np.testing.assert_array_equal(ends[0], ends[1].astype(np.float16))


class MyAdam(mx.optimizer.Adam):
    """Updates at half the rate."""

    def _get_lr(self, index):
        return super()._get_lr(index) / 2


@pytest.mark.parametrize("optimizer", [
    MyAdam(), mx.optimizer.NAG(momentum=-0.5), mx.optimizer.SGD(momentum=-0.5),
    mx.optimizer.Adamax()], ids=["a user's", "negative nag", "negative sgd", "adamax"])
def test_other_optimizers_use_mxnet_updates(optimizer, in_one_pass):
    optimizer.multi_precision = True
    update = mx.optimizer.Updater(amp.training.optimizer.with_masters(optimizer))
    weights, gradients = ([mx.nd.ones((2, 3), dtype="float16") for _ in range(3)]
                          for _ in range(2))
    update([0, 1, 2], gradients, weights)
    assert "_gluon_amp_update" not in dict(in_one_pass)
    assert all((weight.asnumpy() < 1).all() for weight in weights)


@pytest.mark.parametrize("name", ["adam", "lamb", "sgd"])
@pytest.mark.parametrize(("size", "calls"), [("4", [4, 3]), ("1", [1] * 7)])
def test_mxnet_variable_sets_weights_per_call(name, size, calls, monkeypatch, in_one_pass):
    monkeypatch.setenv("MXNET_OPTIMIZER_AGGREGATION_SIZE", size)
    if name == "lamb" and size == "1":
        calls = []  # MXNet sums in another order then
    train(amp.optimizer(name), "float16", 1)
    assert [count for call, count in in_one_pass if call == "_gluon_amp_update"] == calls


def test_mismatched_arrays_are_refused():
    weight, gradient, master = (mx.nd.ones(3, dtype=t) for t in ("float16", "float16", "float32"))
    settings = {"rule": "sgd", "num_weights": 1, "wds": "0"}
    library.call("_gluon_amp_update", [weight, gradient, master], out=[weight], lrs="", **settings)
    with pytest.raises(mx.MXNetError, match="lrs needs a number for each weight"):
        mx.nd.waitall()
    with pytest.raises(mx.MXNetError, match="differ in shape"):
        library.call("_gluon_amp_update", [weight, gradient, mx.nd.ones(4)], out=[weight],
                     lrs="1", **settings)
    with pytest.raises(mx.MXNetError, match="of one 16-bit type, float32 masters"):
        library.call("_gluon_amp_update", [weight, master, master], out=[weight], lrs="1",
                     **settings)


def test_every_update_rule_is_tested():
    tested = {amp.training.optimizer.optimizer_class(name) for name, _ in OPTIMIZERS}
    assert tested == {cls for cls, row in ROWS.items() if row.rules}
