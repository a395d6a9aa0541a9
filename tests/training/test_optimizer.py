"""amp.optimizer: float32 master weights for every optimizer, also after writes; and adamw."""

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from halves import halves
from mxnet import autograd, gluon, nd
from networks import ready, sequence
from trainers import recorded

NAMES = sorted(mx.optimizer.Optimizer.opt_registry)
ALL = [*((name, {}) for name in NAMES),
       # not dcasgd, which in MXNet 1.9.1 fails with a momentum
       *((name, {"momentum": 0.9}) for name in ("ccsgd", "lbsgd", "nag", "sgd")),
       # whose correction for schedules MXNet applies in the first call of a step only
       ("lars", {"momentum": 0.9, "momentum_correction": False}), ("signum", {"momentum": 0}),
       ("rmsprop", {"centered": True}), ("lbsgd", {"batch_scale": 2, "warmup_strategy": "lars"})]
SHAPES = [(3, 7), (5, 1), (41, 1000), (2, 3)]  # 2-D for groupadagrad, and a large one for threads
MIXED = ["float16", "float32", "float16", "float32"]
MASTER_LAST = (mx.optimizer.SGD, mx.optimizer.NAG, mx.optimizer.LARS)


def arguments(name, kwargs=()):
    """Arguments of an optimizer that cover all its settings."""
    return {"learning_rate": 0.05, "wd": 0 if name == "groupadagrad" else 0.01,
            "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.05),
            "rescale_grad": 0.5, "clip_gradient": 1.5, **dict(kwargs)}


def values(rng, types, scale=1.0, grid="float16"):
    """Random arrays of these types, all rounded to `grid` first."""
    return [nd.array((rng.standard_normal(shape) * scale).astype(grid), dtype=t)
            for shape, t in zip(SHAPES, types)]


def update(updater, weights, rng, gradients="float16", steps=5):
    types = [w.dtype if gradients == "float16" else gradients for w in weights]
    for _ in range(steps):
        updater(list(range(len(weights))), values(rng, types, 4, gradients), weights)


def masters(updater, weights):
    """Float32 arrays are returned unchanged."""
    last = isinstance(updater.optimizer, MASTER_LAST)
    return [updater.states[i][1 if last else 0].asnumpy() if w.dtype is np.float16 else w.asnumpy()
            for i, w in enumerate(weights)]


def train(optimizer, types, in_lists=True, gradients="float16"):
    """Weights of these types before and after some steps, and their master weights."""
    mx.random.seed(3)  # sgld draws random numbers
    rng = np.random.default_rng(7)
    updater, weights = mx.optimizer.Updater(optimizer), values(rng, types)
    updater.aggregate_updates = in_lists and updater.aggregate_updates
    first = [w.asnumpy() for w in weights]
    update(updater, weights, rng, gradients)
    return first, [w.asnumpy() for w in weights], masters(updater, weights)


def assert_as_in_float32(name, kwargs, *args):
    _, weights, mine = train(amp.optimizer(name, **arguments(name, kwargs)), MIXED, *args)
    stock = mx.optimizer.create(name, **arguments(name, kwargs))
    first, wide, _ = train(stock, ["float32"] * 4, *args)
    assert [w.dtype.name for w in weights] == MIXED
    for before, exact, master, weight in zip(first, wide, mine, weights):
        assert (exact != before).any()
        np.testing.assert_array_equal(master, exact)
        np.testing.assert_array_equal(weight, exact.astype(weight.dtype))


# Float32 master weights


@pytest.mark.parametrize("in_lists", [False, True])
@pytest.mark.parametrize(("name", "kwargs"), ALL)
def test_float16_weights_match_rounded_float32_training(name, kwargs, in_lists):
    assert_as_in_float32(name, kwargs, in_lists)


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "lars", "nag", "sgd"])
def test_float32_gradients_of_float16_weights_are_accepted(name):
    assert_as_in_float32(name, {}, True, "float32")


@pytest.mark.parametrize("name", ["adamw", "lamb", "lars", "sgd"])
def test_weights_of_one_type_are_updated_in_one_call(name):
    optimizer, calls = amp.optimizer(name), []
    original = optimizer.update_multi_precision
    optimizer.update_multi_precision = lambda i, *rest: (calls.append(i), original(i, *rest))
    train(optimizer, MIXED)
    assert calls == [(0, 2), (1, 3)] * 5


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float16") for name in NAMES),
                                             ("adamw", "float32"), ("adadelta", "float32")])
def test_gradients_are_not_modified(name, dtype):
    updater = mx.optimizer.Updater(amp.optimizer(name, rescale_grad=0.5, clip_gradient=0.1))
    weight, grad = nd.ones((2, 3), dtype=dtype), nd.full((2, 3), 2, dtype=dtype)
    updater(0, grad, weight)
    mx.nd.waitall()  # MXNet does not wait for a write without a dependency
    assert (grad.asnumpy() == 2).all()


@pytest.mark.parametrize(("name", "kwargs"), ALL)
def test_saved_states_and_optimizer_continue_bitwise(name, kwargs):
    rng = np.random.default_rng(7)
    updater, revived = (mx.optimizer.Updater(amp.optimizer(name, **arguments(name, kwargs)))
                        for _ in range(2))
    weights = values(rng, MIXED)
    update(updater, weights, rng, steps=3)
    revived.set_states(updater.get_states(dump_optimizer=True))
    ends = []
    for one, arrays in ((updater, weights), (revived, [w.copy() for w in weights])):
        mx.random.seed(5)
        update(one, arrays, np.random.default_rng(9), steps=3)
        ends.append([*(w.asnumpy() for w in arrays), *masters(one, arrays)])
    for mine, its in zip(*ends):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("name", "kwargs"), [one for one in ALL if one[0] != "lbsgd"])
def test_scaling_by_a_power_of_two_changes_no_bit(name, kwargs, dtype):
    """MXNet parses the text of small numbers, such as this one, with an error."""
    small = 3.1946839157732266e-06
    def train(power):
        mx.random.seed(3)
        rng = np.random.default_rng(7)
        updater = mx.optimizer.Updater(amp.optimizer(name, **{
            **arguments(name, kwargs), "rescale_grad": small * 2.0 ** 18 / power}))
        weights = values(rng, [dtype] * 4)
        for _ in range(3):
            gradients = values(rng, [dtype] * 4, 2.0 ** -6)
            updater([0, 1, 2, 3], [gradient * power for gradient in gradients], weights)
        return masters(updater, weights)

    for scaled, plain in zip(train(2.0 ** 18 if dtype == "float32" else 2.0 ** 14), train(1)):
        np.testing.assert_array_equal(scaled, plain)


# Optimizers of the user


def half_rate(base):
    """A subclass with an update of its own: descent at half the rate."""
    class Half(base):
        def update(self, index, weight, grad, state):
            assert isinstance(index, int)
            weight -= grad * (self.lr / 2 * self.rescale_grad)
    return Half


@pytest.mark.numpy
@pytest.mark.parametrize("base", [mx.optimizer.SGD, mx.optimizer.LARS, mx.optimizer.LAMB,
                                  mx.optimizer.NAG, mx.optimizer.Adam])
@pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16"])
def test_subclass_with_its_own_update_gets_one_weight_at_a_time(policy, base):
    ends = []
    for optimizer in (half_rate(base)(learning_rate=0.5), amp.optimizer("sgd", learning_rate=0.25)):
        mx.random.seed(3)
        net = ready(sequence(gluon.nn.Dense(3, in_units=3), gluon.nn.Dense(2, in_units=3)),
                    mx.init.Normal(1))
        trainer = amp.Trainer(amp.convert(net, policy).collect_params(), optimizer, loss_scale=64)
        for _ in range(3):
            with autograd.record():
                loss = net(nd.ones((2, 3))).sum()
            trainer.backward(loss)
            assert trainer.step(2)
        ends.append([trainer.master(p).asnumpy() for p in net.collect_params().values()])
    for mine, expected in zip(*ends):
        np.testing.assert_array_equal(mine, expected)


# Epsilon

EPSILON = ["adam", "adamw", "ftml", "nadam", "rmsprop"]


def one_step(name, dtype="float16", **kwargs):
    weight = nd.ones((2, 3), dtype=dtype)
    mx.optimizer.Updater(amp.optimizer(name, learning_rate=0.1, **kwargs))(0, weight * 0.5, weight)
    return weight.asnumpy()


@pytest.mark.parametrize(("names", "message"), [
    ("adam ftml nadam",
     r"epsilon=1e-08 is 0. .* such as 1e-4. Leave multi_precision at True"),
    ("adamw rmsprop ftrl adagrad adadelta groupadagrad",
     "updates float16 weights with master weights only")])
def test_optimizers_without_master_weights_are_refused_if_unsafe(names, message):
    for name in names.split():
        with pytest.raises(ValueError, match=message):
            one_step(name, multi_precision=False)


@pytest.mark.parametrize("name", ["adam", "ftml", "nadam"])
def test_epsilon_representable_in_float16_is_accepted(name):
    with pytest.warns(UserWarning, match="Accumulating with float16"):
        weight = one_step(name, multi_precision=False, epsilon=1e-4)
    assert ((weight < 1) & (weight > 0.5)).all()


@pytest.mark.parametrize("name", EPSILON)
def test_any_epsilon_is_accepted_with_float32_state(name):
    for weight in (one_step(name), one_step(name, "float32", multi_precision=False)):
        assert ((weight < 1) & (weight > 0.5)).all()


# Master weights follow writes into weights

WRITTEN = [("sgd", {}), ("sgd", {"momentum": 0.9}), ("nag", {"momentum": 0.9}), ("adam", {}),
           ("adamw", {"wd": 0.1}), ("lamb", {}), ("lars", {"momentum": 0.9})]
WRITES = {
    "a slice": lambda p: p.data().__setitem__(slice(None), 3),
    "some elements": lambda p: p.data().__setitem__((slice(1, 3), 2), -2),
    "set_data": lambda p: p.set_data(nd.arange(24).reshape((4, 6))),
    "what was there": lambda p: p.set_data(p.data().copy()),
}


def parameter(value, dtype, **kwargs):
    made = ready(gluon.Parameter("weight", shape=value.shape, dtype=dtype, **kwargs))
    made.set_data(nd.array(value, dtype=dtype))
    return made


def step(trainer, grad):
    """One step of a Trainer with one parameter and this gradient."""
    (param,) = trainer._params
    recorded(lambda: (param.data() * nd.array(grad, dtype=param.dtype)).sum()).backward()
    trainer.step(1)


def assert_continues_from(name, kwargs, value, write):
    """Matches float32 training bitwise in which only written elements are replaced."""
    half, wide = (parameter(value, dtype) for dtype in ("float16", "float32"))
    kwargs = {"learning_rate": 0.1, **kwargs}
    trainers = [gluon.Trainer([half], amp.optimizer(name, **kwargs)),
                gluon.Trainer([wide], mx.optimizer.create(name, **kwargs))]
    rng = np.random.default_rng(9)
    for moment in range(6):
        if moment == 3:
            before = half.data().asnumpy()
            write(half)
            after = half.data().asnumpy()
            replaced = np.where(after != before, after.astype(np.float32), wide.data().asnumpy())
            wide.set_data(nd.array(replaced))
        grad = halves(rng, *value.shape)
        for trainer in trainers:
            step(trainer, grad)
    exact = wide.data().asnumpy()
    (master,) = masters(trainers[0]._updaters[0], [half.data()])
    np.testing.assert_array_equal(master, exact)
    np.testing.assert_array_equal(half.data().asnumpy(), exact.astype(np.float16))
    return exact


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("name", "kwargs"), WRITTEN)
def test_step_continues_from_written_weights(name, kwargs, write, rng):
    assert_continues_from(name, kwargs, halves(rng, 4, 6), WRITES[write])


@pytest.mark.parametrize(("name", "kwargs"), WRITTEN[:5])  # norms of the others mix elements
def test_any_float16_value_can_be_written(name, kwargs):
    new = nd.array([np.nan, np.inf, -np.inf, -0.0, 0, 2**-24, -3 * 2**-24, 2**-14, 65504],
                   dtype="float16")
    end = assert_continues_from(name, kwargs, np.full(9, 2.0), lambda p: p.set_data(new))
    assert np.array_equal(np.isfinite(end), np.isfinite(new.asnumpy()))


@pytest.mark.parametrize(("old", "new"), [("float16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_cast_between_steps_requires_new_trainer(name, old, new):
    net = gluon.Block(prefix="net_")
    weight = net.params.get("weight", shape=(3,), dtype=old, init="ones")
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), amp.optimizer(name))
    step(trainer, np.ones(3))
    net.cast(new)
    with pytest.raises(ValueError, match=rf"net_weight was {old} when .* and is {new} now: "
                                         r"make a new Trainer"):
        step(trainer, np.ones(3))
    before = weight.data().asnumpy()
    step(gluon.Trainer(net.collect_params(), amp.optimizer(name)), np.ones(3))
    assert (weight.data().asnumpy() < before).all()


# adamw

# MXNet's operator computes v as beta2 * (v - g * g) + g * g, whose rounding error is that of the
# formula times 1 / (1 - beta2): with these betas, it is small.
BETAS = {"beta1": 0.5, "beta2": 0.75}


def adamw(weight, grads, rates, wd=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8, rescale_grad=1.0,
          clip_gradient=np.inf):
    """The formula of the docstring in float64."""
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(grads, rates), 1):
        g = np.clip(rescale_grad * g.astype(float), -clip_gradient, clip_gradient)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        rate = (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        weight = weight - lr * (rate * m / (np.sqrt(v) + epsilon) + wd * weight)
    return weight


def steps_of(name, kwargs, **mults):
    """A float32 weight, 20 gradients, and the weight after 20 steps of a gluon.Trainer."""
    rng = np.random.default_rng(3)
    weight = rng.uniform(-1, 1, 1003).astype(np.float32)
    grads = rng.standard_normal((20, 1003)).astype(np.float32)
    param = parameter(weight, "float32", **mults)
    trainer = gluon.Trainer([param], name, kwargs)
    for grad in grads:
        step(trainer, grad)
    return weight, grads, param.data().asnumpy()


def assert_float32(actual, expected):
    """Equal up to two roundings of the weight, which is below 2, in each of 20 steps."""
    assert np.abs(expected).max() < 2
    np.testing.assert_allclose(actual, expected, rtol=0, atol=20 * 2 * 2**-24)


@pytest.mark.parametrize("kwargs", [
    {}, {"wd": 0.5}, {"clip_gradient": 0.5}, {"rescale_grad": 1 / 128}, {"epsilon": 0.1},
    {"beta1": 0.75, "beta2": 0.625},
    {"wd": 0.5, "clip_gradient": 0.01, "rescale_grad": 1 / 128, "epsilon": 1e-4}])
def test_adamw_matches_its_formula(kwargs):
    kwargs = {**BETAS, **kwargs}
    weight, grads, actual = steps_of("adamw", {"learning_rate": 0.03, **kwargs})
    assert_float32(actual, adamw(weight, grads, [0.03] * 20, **kwargs))


@pytest.mark.parametrize("mults", [{"lr_mult": 0.5, "wd_mult": 2.0}, {"lr_mult": 0.0},
                                   {"wd_mult": 0.0}])
def test_adamw_follows_schedules_and_multipliers(mults):
    mine, its = (mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.04, warmup_steps=4)
                 for _ in range(2))
    weight, grads, actual = steps_of(
        "adamw", {"learning_rate": 0.04, "lr_scheduler": its, "wd": 0.5, **BETAS}, **mults)
    rates = [mine(t) * mults.get("lr_mult", 1) for t in range(1, 21)]
    assert_float32(actual, adamw(weight, grads, rates, 0.5 * mults.get("wd_mult", 1), **BETAS))


@pytest.mark.parametrize("kwargs", [
    {}, {"clip_gradient": 0.5, "rescale_grad": 0.25}, {"clip_gradient": 0},
    {"learning_rate": 0.03, "beta2": 0.75, "epsilon": 1e-3}])
def test_adamw_without_weight_decay_matches_mxnet_adam(kwargs):
    assert_float32(*(steps_of(name, kwargs)[-1] for name in ("adamw", "adam")))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_adamw_treats_row_sparse_gradients_as_dense(dtype, rng):
    """Every row is decayed and updated, including rows without a gradient."""
    value, ends = halves(rng, 5, 3), []
    for stype in ("row_sparse", "default"):
        updater = mx.optimizer.Updater(amp.optimizer("adamw", learning_rate=0.1, wd=0.1))
        weights = [nd.array(value, dtype=dtype) for _ in range(2)]
        for rows in ([1, 3], [0, 3]):
            grad = nd.sparse.row_sparse_array((value[rows], rows), shape=(5, 3), dtype=dtype)
            updater([0, 1], [grad.tostype(stype), grad.tostype("default")], weights)
        ends.append([w.asnumpy() for w in weights])
        assert (ends[-1][0] != value).all()
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("name", ["sgdd", None, 3])
def test_unknown_optimizer_lists_valid_ones(name):
    with pytest.raises(ValueError, match=r"Valid: .*adam, .*sgd") as caught:
        amp.optimizer(name)
    assert f"Received: {name!r}" in str(caught.value)


def test_optimizer_keeps_its_class():
    optimizer = amp.optimizer("SGD", learning_rate=0.1)
    assert isinstance(optimizer, mx.optimizer.SGD)
    assert (type(optimizer).__name__, optimizer.multi_precision) == ("SGD", True)


@pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16"])
def test_adamax_keeps_weights_whose_gradients_are_zero(policy):
    """MXNet's divides 0 by 0."""
    net = ready(gluon.nn.Dense(1, in_units=3, use_bias=False), mx.init.One())
    amp.convert(net, policy)
    trainer = amp.Trainer(net.collect_params(), "adamax", {"learning_rate": 0.125})
    for expected in ([1, 0.875, 1], [1, 0.75, 1]):
        trainer.backward(recorded(lambda: net(mx.nd.array([[0, 1, 0]]))))
        assert trainer.step(1)
        np.testing.assert_allclose(net.weight.data().asnumpy()[0].astype("float32"), expected,
                                   rtol=0.01)
