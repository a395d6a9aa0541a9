"""`amp.backward`: one backward pass for several Trainers."""
import gluon_amp as amp
import pytest
from mxnet import autograd, gluon, nd
from trainers import LOSS, make, ones, recorded, same, some_batches, values

pytestmark = pytest.mark.numpy

WEIGHTS = "a b".split()


class Pair(gluon.Block):
    """Two parameters whose gradients are the data, each with its own Trainer."""

    def __init__(self):
        super().__init__()
        for name in WEIGHTS:
            self.params.get(name, shape=(4,), dtype="float16", init="ones")
        self.initialize()

    def forward(self, x, y):  # "* 1": MXNet's cast alone does not accumulate gradients
        a, b = ((self.params.get(name).data() * 1).astype("float32") for name in WEIGHTS)
        return (a * x + b * y).sum().reshape(1)

    def trainers(self, *scales):
        return [amp.Trainer({p.name: p}, "sgd", {"learning_rate": 0.5}, loss_scale=scale)
                for p, scale in zip(self.params.values(), scales)]


def trainers_of(net, cls, *scales):
    parameters = list(net.collect_params().values())
    given = [{"loss_scale": scale} for scale in scales] or [{}, {}]
    return [cls(parameters[:2], "sgd", {"learning_rate": 0.1, "momentum": 0.9}, **given[0]),
            cls(parameters[2:], "adam", {"learning_rate": 0.01}, **given[1])]


@pytest.mark.parametrize("scales", [(None, None), (1024, 1024), ("dynamic", "dynamic"),
                                    (16, "dynamic")])
def test_float32_training_matches_gluon_trainers_bitwise(scales, rng):
    net, stock = make(), make()
    ours = trainers_of(net, amp.Trainer, *scales)
    theirs = trainers_of(stock, gluon.Trainer)
    for data, label in some_batches(rng):
        with autograd.record():
            loss = LOSS(net(data), label)
        amp.backward(loss, ours)
        with autograd.record():
            loss = LOSS(stock(data), label)
        loss.backward()
        for trainer in (*ours, *theirs):
            trainer.step(6)
    assert same(net, stock)
    assert [trainer.skipped for trainer in ours] == [0, 0]


def test_trainers_with_gradients_of_different_scales_are_refused():
    net = Pair()
    trainers = net.trainers(8, 16)
    for trainer in trainers:
        trainer.backward(recorded(net, ones(), ones()))
    with pytest.raises(RuntimeError, match=r"different loss scales .*Received: 8.0, 16.0"):
        amp.backward(recorded(net, ones(), ones()), trainers)


@pytest.mark.parametrize("large", WEIGHTS)
def test_trainers_share_the_smallest_scale(large):
    net = Pair()
    trainers = net.trainers("dynamic", "dynamic")
    data = {name: ones(100.0 if name == large else 1e-3) for name in WEIGHTS}
    for scale in (4, 16, 16, 16):  # 16 * norm 200 is below 65504 / 16
        amp.backward(recorded(net, data["a"], data["b"]), trainers)
        assert min(trainer.loss_scale for trainer in trainers) == scale
        for name, x in data.items():
            assert net.params.get(name).grad()[0] == (x[0] * scale).astype("float16")
        assert [trainer.step(1) for trainer in trainers] == [True, True]
    assert max(trainer.loss_scale for trainer in trainers) == 256
    moved = {name: 1 - value[0] for name, value in zip(WEIGHTS, values(net))}
    assert moved == pytest.approx({name: 2 * x[0].asnumpy().item() for name, x in data.items()},
                                  abs=5e-3)


def test_overflow_in_one_trainer_skips_its_step_only():
    net = Pair()
    scales = [amp.DynamicLossScale(2.0 ** power, settled=True) for power in (16, 14)]
    trainers = net.trainers(*scales)
    amp.backward(recorded(net, ones(100.0), ones(0.25)), trainers)
    assert [trainer.step(1) for trainer in trainers] == [False, True]
    assert [trainer.loss_scale for trainer in trainers] == [2.0 ** 13, 2.0 ** 14]
    assert values(net)[1].tolist() == [0.875] * 4


def test_gradients_of_two_passes_accumulate():
    net = Pair()
    net.collect_params().setattr("grad_req", "add")
    trainers = net.trainers(1024, 16)
    for _ in range(2):
        amp.backward(recorded(net, ones(0.25), ones(0.5)), trainers)
    for trainer in trainers:
        assert trainer.step(2)
    assert [v[0] for v in values(net)] == [0.875, 0.75]


def test_operator_that_starts_gradients_is_refused():
    net = Pair()
    trainers = net.trainers(1024, 1024)
    with autograd.record():
        loss = net(ones(), ones()) + nd.MakeLoss(net.params.get("a").data().astype("float32")).sum()
    with pytest.raises(ValueError, match="ignores the incoming gradient"):
        amp.backward(loss, trainers)


def test_invalid_arguments_are_refused():
    net = Pair()
    one, other = net.trainers(1024, 16)
    loss = recorded(net, ones(), ones())
    for wrong in ([], None, [one, gluon.Trainer(net.collect_params(), "sgd")]):
        with pytest.raises(TypeError, match=r"a list of gluon_amp\.Trainers\. Received: "):
            amp.backward(loss, wrong)
    with pytest.raises(ValueError, match=r"parameters of its own\. Received in several: "):
        amp.backward(loss, [one, one])
    without = net.trainers(None, None)[1]
    with pytest.raises(ValueError, match="Valid: all Trainers with a loss scale, or all"):
        amp.backward(loss, [one, without])
    one, other = net.trainers(1024, 16)
    one.backward(recorded(net, ones(), ones()), retain_graph=True)
    other.backward(recorded(net, ones(), ones()))
    with pytest.raises(RuntimeError, match=r"gluon_amp\.backward\(loss, \[trainer, other\]\)"):
        one.step(1)
