"""Numbers that go round: in a loop, and in a block that is called several times."""
import gluon_amp as amp
import pytest
from gluon_amp._mxnet import mx
from mxnet import gluon
from mxnet.gluon import nn
from xray_networks import LOSS, rows


class Step(gluon.HybridBlock):
    def __init__(self, fault):
        super().__init__(prefix="net_step_")
        self.fault = fault
        with self.name_scope():
            self.inner = nn.Dense(6, in_units=6, activation="tanh")

    def hybrid_forward(self, F, x):
        return self.fault(F, x, self.inner)


class Rounds(gluon.HybridBlock):
    """The same step six times: in a loop, or by calling the block so often."""

    def __init__(self, fault, kind):
        super().__init__(prefix="net_")
        self.kind = kind
        with self.name_scope():
            self.step, self.out = Step(fault), nn.Dense(4, in_units=6)

    def hybrid_forward(self, F, x):
        if self.kind == "calls":
            for _ in range(6):
                x = self.step(x)
        else:
            rounds = F.broadcast_axis(x.expand_dims(0), axis=0, size=6)
            _, x = F.contrib.foreach(lambda row, state: (row, self.step(state)), rounds, x * 1)
        return self.out(F.log(F.abs(x) + 1))


def grows(F, x, inner):
    return x * 16 + inner(x)


def grows_behind_a_reshape(F, x, inner):
    wide = F.batch_dot(x.expand_dims(1), F.ones((8, 6, 6)) * 8)
    return wide.reshape((8, 6)) + inner(x)


def made(fault, kind, keep=()):
    mx.random.seed(1)
    net = Rounds(fault, kind)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(rows()[0][0])
    return amp.convert(net, keep=keep)


@pytest.mark.parametrize("kind", ["calls", "foreach"])
@pytest.mark.parametrize(("fault", "named"), [(grows, "mulscalar"),
                                              (grows_behind_a_reshape, "batch_dot")])
def test_what_grows_from_round_to_round_is_named_with_its_line(fault, kind, named):
    view = amp.xray(made(fault, kind), rows(), LOSS)
    assert named in view.findings[0].node
    assert view.findings[0].reason.startswith("range above")
    line = fault.__code__.co_firstlineno + 1
    assert f"test_xray_rounds.py, line {line}" in view.first_overflow.where
    after = amp.xray(made(fault, kind, view.keep), rows(), LOSS)
    assert (after.findings, after.first_overflow) == ([], None)


def test_what_follows_an_infinity_in_a_loop_is_not_blamed():
    class Net(Rounds):
        def hybrid_forward(self, F, x):
            return super().hybrid_forward(F, (x * F.ones_like(x) * 4e5).reshape((8, 6)))
    mx.random.seed(1)
    net = Net(lambda F, x, inner: x * 2 + inner(x), "foreach")
    net.initialize(mx.init.Xavier())
    view = amp.xray(amp.convert(net), rows(), LOSS)
    assert [finding.node for finding in view.findings] == ["net__mulscalar0"]


def test_a_gradient_that_a_cast_rounds_is_told_with_the_line_that_makes_it():
    class Net(gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.inner, self.out = nn.Dense(6, in_units=6), nn.Dense(4, in_units=6)

        def hybrid_forward(self, F, x):
            y = self.inner(x)
            return self.out(F.log(y * y + 1e-10) * 50)
    mx.random.seed(1)
    net = Net()
    net.initialize(mx.init.Xavier())
    found = amp.explain(amp.convert(net), rows()[0], LOSS, loss_scale=2.0 ** 20)
    assert found.backward
    assert "self.out(F.log(y * y + 1e-10) * 50)" in found.where
