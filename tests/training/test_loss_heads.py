"""Loss heads that ignore the loss scale are found in graphs: in plain and hybridized blocks, in
loops and in symbols, with the user's operators, if their gradients reach what is trained."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from modules import prepared
from mxnet import autograd, nd
from mxnet.gluon import nn
from networks import Calling, ready
from trainers import recorded, with_trainer

SOFTMAX = "so the loss scale: SoftmaxOutput"
CUSTOM = "so the loss scale: Custom"
KINDS = "plain", "hybridized", "float16"


class HalfSquare(mx.operator.CustomOp):
    """Half of the square; `ignores` makes it a loss head."""

    def __init__(self, ignores):
        super().__init__()
        self.ignores = ignores

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * in_data[0] / 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        incoming = 1 if self.ignores else out_grad[0]
        self.assign(in_grad[0], req[0], in_data[0] * incoming)


class HalfSquareProp(mx.operator.CustomOpProp):
    ignores = False

    def __init__(self, **loops):  # MXNet gives an operator in a loop attributes of the loop
        super().__init__(need_top_grad=True)

    def create_operator(self, ctx, shapes, dtypes):
        return HalfSquare(self.ignores)


@mx.operator.register("half_square")
class Propagates(HalfSquareProp):
    pass


@mx.operator.register("half_square_that_reads_the_incoming_gradient")
class IgnoresWhatItReads(HalfSquareProp):
    ignores = True


@mx.operator.register("half_square_head")
class Ignores(HalfSquareProp):
    ignores = True

    def declare_backward_dependency(self, out_grad, in_data, out_data):
        return in_data


def custom(op_type):
    return lambda F, x: F.Custom(x, op_type=op_type)


def softmax(F, x):
    return F.SoftmaxOutput(x, F.zeros((4,)))


def dense(units=3):
    return nn.Dense(units, in_units=3, flatten=False)


def network(function, kind, *layers):
    net = ready(Calling(function, *layers), mx.init.Xavier())
    net(nd.ones((4, 3)))
    if kind == "float16":
        amp.convert(net)
    elif kind == "hybridized":
        net.hybridize()
    return net


def step(net, parameters=None, loss_scale=64, loss_fn=lambda out: out.astype("float32").sum()):
    """Makes one step, and returns whether it updated."""
    trainer = amp.Trainer(parameters or net.collect_params(), "sgd", loss_scale=loss_scale)
    trainer.backward(recorded(lambda: loss_fn(net(nd.ones((4, 3))))))
    return trainer.step(4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head", "error"), [
    (softmax, SOFTMAX), (custom("half_square_head"), CUSTOM)])
def test_head_is_refused(head, error, kind):
    net = network(lambda F, x, layer: head(F, layer(x)), kind, dense())
    with pytest.raises(ValueError, match=error):
        step(net)
    assert step(net, loss_scale=None)
    assert step(net, loss_scale=1)  # which no head can ignore


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op_type", [
    "half_square", "half_square_that_reads_the_incoming_gradient"])
def test_custom_operator_that_declares_its_incoming_gradient_is_trusted(op_type, kind):
    assert step(network(lambda F, x, layer: custom(op_type)(F, layer(x)), kind, dense()))


def check_second_is_refused(layer, first, second, error):
    """Of two losses of the layer's parameters, the first is accepted."""
    _, trainer = with_trainer(layer, "sgd", loss_scale=64)
    trainer.backward(recorded(first))
    assert trainer.step(4)
    with pytest.raises(ValueError, match=error):
        trainer.backward(recorded(second))


def test_another_custom_operator_is_checked_after_one_that_is_no_head():
    layer = ready(dense())
    check_second_is_refused(layer, *(
        lambda op_type=op_type: nd.Custom(layer(nd.ones((4, 3))), op_type=op_type)
        for op_type in ("half_square", "half_square_head")), CUSTOM)


@pytest.mark.parametrize("kind", ["hybridized", "float16"])
@pytest.mark.parametrize(("head", "error"), [
    (lambda F, x: F.MakeLoss(F.square(x)), "so the loss scale: MakeLoss"),
    (custom("half_square_head"), CUSTOM)])
def test_head_in_body_of_loop_is_refused(head, error, kind):
    def forward(F, x, layer):
        def body(x, state):  # MXNet's loops need an incoming gradient
            x = layer(x)
            return head(F, x) + x, state
        return F.contrib.foreach(body, F.stack(x, x), F.zeros((4, 3)))[0]

    net = network(forward, kind, dense())
    with pytest.raises(ValueError, match=error):
        step(net)
    assert step(net, loss_scale=None)


@pytest.mark.parametrize("kind", KINDS)
def test_head_of_frozen_layers_is_accepted(kind):
    net = network(lambda F, x, frozen, layer: layer(softmax(F, frozen(x))), kind, dense(), dense())
    frozen, _ = net._children.values()
    frozen.collect_params().setattr("grad_req", "null")
    assert step(net)
    frozen.collect_params().setattr("grad_req", "write")
    with pytest.raises(ValueError, match=SOFTMAX):
        step(net)


@pytest.mark.parametrize("kind", KINDS)
def test_head_behind_stop_of_gradients_is_accepted(kind):
    teacher = network(lambda F, x, layer: softmax(F, layer(x)), kind, dense())
    student = network(lambda F, x, layer: layer(x), kind, dense())
    for net, what in ((teacher, student), (student, student)):
        assert step(net if net is student else student, what.collect_params(),
                    loss_fn=lambda out: (out - nd.BlockGrad(teacher(nd.ones((4, 3))))).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_head_that_only_reaches_other_arrays_is_accepted(kind):
    other = network(lambda F, x, layer: softmax(F, layer(x)), kind, dense())
    net = network(lambda F, x, layer: layer(x), kind, dense())

    def loss_fn(out):
        return out.astype("float32").sum() + other(nd.ones((4, 3))).astype("float32").sum()

    assert step(net, loss_fn=loss_fn)
    with pytest.raises(ValueError, match=SOFTMAX):
        step(net, {**net.collect_params(), **other.collect_params()}, loss_fn=loss_fn)


def test_function_is_trusted():
    class Regularized(autograd.Function):
        def forward(self, x):
            self.save_for_backward(x)
            return x.copy()

        def backward(self, gradient):
            return self.saved_tensors[0]

    net = ready(nn.Dense(3, in_units=3))
    assert step(net, loss_fn=lambda out: Regularized()(out).sum())


def test_head_of_zeros_is_refused():
    net = ready(nn.Dense(3, in_units=3))
    with pytest.raises(ValueError, match="so the loss scale: MakeLoss"):
        step(net, loss_fn=lambda out: out.sum() + nd.MakeLoss(out * 0).sum())
    assert step(net, loss_fn=lambda out: out.sum() + nd.MakeLoss(nd.BlockGrad(out)).sum() * 0)


def test_head_whose_gradient_is_scaled_is_accepted():
    net = ready(nn.Dense(3, in_units=3))
    assert step(net, loss_fn=lambda out: nd.SoftmaxOutput(out, nd.zeros(4), out_grad=True))


def test_heads_of_plain_graphs_are_refused_without_engine(monkeypatch):
    monkeypatch.setattr(library, "_table", None)
    net = network(lambda F, x, layer: softmax(F, layer(x)), "plain", dense())
    with pytest.raises(ValueError, match=SOFTMAX):
        step(net)
    other = network(lambda F, x, layer: layer(x), "plain", dense())
    assert step(other, loss_fn=lambda out: out.sum() + nd.MakeLoss(nd.BlockGrad(out)).sum())


def module(symbol, loss_scale):
    return prepared(amp.Module(symbol, label_names=None, loss_scale=loss_scale), (4, 3),
                    init=mx.init.Xavier(), optimizer={"learning_rate": 0.1})


def in_loop(x):
    def body(x, state):
        x = mx.sym.FullyConnected(x, num_hidden=3, name="inner")
        return mx.sym.MakeLoss(x) + x, state
    return mx.sym.contrib.foreach(body, mx.sym.stack(x, x), mx.sym.zeros((4, 3)))[0]


@pytest.mark.parametrize(("head", "error"), [
    (lambda x: mx.sym.Custom(x, op_type="half_square_head"), CUSTOM),
    (lambda x: mx.sym.IdentityAttachKLSparseReg(x), "IdentityAttachKLSparseReg"),
    (in_loop, "so the loss scale: MakeLoss")])
def test_module_refuses_heads_that_it_does_not_scale(head, error):
    out = head(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3))
    symbol = mx.sym.Group([mx.sym.MakeLoss(out.sum()), mx.sym.BlockGrad(out)])
    batch = mx.io.DataBatch([nd.ones((4, 3))], [])
    mod = module(symbol, 64)
    mod.forward(batch)
    with pytest.raises(ValueError, match=error):
        mod.backward()
    for scale in (None, 1):
        mod = module(symbol, scale)
        mod.forward_backward(batch)
        assert mod.update()


def test_module_accepts_heads_of_frozen_layers_and_operators_that_propagate():
    frozen = mx.sym.Custom(mx.sym.var("data"), op_type="half_square_head")
    out = mx.sym.Custom(mx.sym.FullyConnected(frozen, num_hidden=3), op_type="half_square")
    mod = module(mx.sym.MakeLoss(out.sum()), 64)
    mod.forward_backward(mx.io.DataBatch([nd.ones((4, 3))], []))
    assert mod.update()
    assert all(np.isfinite(a.asnumpy()).all() for a in mod.get_params()[0].values())


def test_block_freed_and_created_again_is_checked():
    net = network(lambda F, x, layer: layer(x), "hybridized", dense())

    def loss(head):
        loss_fn = Calling(head)
        loss_fn.hybridize()
        return loss_fn(net(nd.ones((4, 3))))

    check_second_is_refused(net, lambda: loss(lambda F, x: F.square(x)), lambda: loss(softmax),
                            SOFTMAX)


@pytest.mark.parametrize("hybridized", [False, True])
def test_head_that_first_reached_nothing_is_refused_when_it_does(hybridized):
    """The second graph has no operators but those of the first."""
    layer, head = ready(dense()), Calling(softmax)
    head(nd.ones((4, 3)))
    head.hybridize(hybridized)

    def loss(arrange):
        out = layer(nd.ones((4, 3)))
        return (arrange(head(out)) * out).sum()

    check_second_is_refused(layer, lambda: loss(nd.BlockGrad), lambda: loss(lambda out: out),
                            SOFTMAX)


@mx.operator.register("half_square_by_argument")
class ByArgument(HalfSquareProp):
    def __init__(self, head):
        super().__init__()
        self.ignores = head == "yes"

    def declare_backward_dependency(self, out_grad, in_data, out_data):
        return in_data if self.ignores else [*out_grad, *in_data]


def test_custom_operator_is_checked_for_each_argument():
    layer = ready(dense())
    check_second_is_refused(layer, *(
        lambda head=head: nd.Custom(layer(nd.ones((4, 3))), op_type="half_square_by_argument",
                                    head=head) for head in ("no", "yes")), CUSTOM)


def test_operators_of_a_freed_graph_have_other_numbers():
    """MXNet's allocator may reuse the address of a freed CachedOp."""
    x = nd.ones(3)
    x.attach_grad()
    numbers = set()
    for _ in range(50):
        op = mx.nd.CachedOp(mx.sym.exp(mx.sym.exp(mx.sym.square(mx.sym.var("x")))))
        y = recorded(op, x)
        numbers.add(library.graph_operators([y]))
        with autograd.record():
            assert library.graph_operators([op(x)]) in numbers
        del op, y
    assert len(numbers) == 50
