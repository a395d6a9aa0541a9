"""`amp.optimizer` updates as MXNet's own optimizers do with float32 masters."""
import pickle

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import nd


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
