"""Networks with the user's own Python operators: `CustomOp`, `autograd.Function`."""
import logging

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from gluon_amp.graph.build import build
from gluon_amp.tools.types import types
from modules import prepared
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, ready
from processes import printed
from trainers import recorded, with_trainer


class Squares(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * in_data[0] * out_grad[0])


@mx.operator.register("squares_without_keywords")
class SquaresProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=True)

    def create_operator(self, ctx, shapes, dtypes):
        return Squares()


class Net(nn.HybridBlock):
    def __init__(self, custom=True):
        super().__init__(prefix="net_")
        self.custom = custom
        with self.name_scope():
            self.below, self.above = nn.Conv2D(8, 3), nn.Conv2D(16, 3)
            self.last = nn.Dense(2)

    def hybrid_forward(self, F, x):
        x = self.below(x)
        x = F.Custom(x, op_type="squares_without_keywords") if self.custom else x * x
        return self.last(self.above(x))


def batch(rng):
    return nd.array(rng.standard_normal((4, 3, 8, 8))), nd.array([0, 1, 0, 1])


def loss_and_gradients(net, data, label, seed):
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    loss = recorded(lambda: gluon.loss.SoftmaxCrossEntropyLoss()(net(data), label))
    loss.backward()
    return [loss.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())]


@pytest.mark.parametrize("keep", [None, [], ".*conv.*"])
def test_custom_operator_between_convolutions_reads_plain_layout(keep, rng):
    data, label = batch(rng)
    plain, net = Net(custom=False), Net()
    for made in (plain, net):
        made.initialize()
        made.hybridize()
        made(data)
        if keep is not None:
            amp.convert(made, keep=keep)
    tolerance = 0.02 if keep == [] else 1e-5
    for seed in range(10):
        exact = loss_and_gradients(plain, data, label, seed)
        for found, wanted in zip(loss_and_gradients(net, data, label, seed), exact):
            assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def test_xray_accepts_custom_operator_without_keywords(rng):
    net, loss = Net(), gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    batches = [batch(rng), batch(rng)]
    assert not amp.xray(net, batches, loss).keep
    assert amp.explain(net, batches[0], loss).first_overflow is None


class Part(nn.HybridBlock):
    """A block whose nodes may have its parent's prefix."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):
        x = F.Custom(self.dense(x) + 1, op_type="squares_without_keywords")
        return F.relu(x, name="named")


class Parts(nn.HybridBlock):
    def __init__(self):
        super().__init__(prefix="parts_")
        with self.name_scope():
            self.first, self.second = Part(), Part(prefix="")
            data = mx.sym.var("data")
            inner = mx.sym.FullyConnected(data, num_hidden=4, no_bias=True,
                                          name="inner_fc")
            self.third = gluon.SymbolBlock(mx.sym.relu(inner, name="inner_relu"), data)
            self.last = nn.Dense(2, in_units=4)

    def hybrid_forward(self, F, x):
        return self.last(self.third(F.relu(self.second(F.relu(self.first(x))))))


@pytest.mark.parametrize(("part", "nodes"), [
    ("first", "parts_part0_dense0_fwd parts_part0__plusscalar0 parts_part0_custom0 "
              "parts_part0_named"),
    ("second", "parts_dense0_fwd parts__plusscalar0 parts_custom0 parts_named"),
    ("third", "parts_inner_fc parts_inner_relu")])
def test_kept_block_keeps_its_nodes_without_an_attribute(part, nodes, tmp_path, rng):
    net, x = Parts(), nd.array(rng.random((3, 4)))
    net.initialize(mx.init.Xavier())
    amp.convert(net, keep=[getattr(net, part)])
    net.infer_shape(x)  # MXNet traces the network, too
    net(x)
    kept = [row.node for row in types(net) if row.rule == "kept by keep="]
    assert kept == nodes.split()
    for row in types(net):
        if row.node in kept:
            assert {*row.inputs} == {row.output} == {"float32"}
    net.export(str(tmp_path / "net"))
    assert "__gluon_amp" not in (tmp_path / "net-symbol.json").read_text()
    assert "__gluon_amp" not in net(mx.sym.var("data")).tojson()


def test_converted_symbol_has_no_attribute_and_its_kept_nodes_are_found():
    x = mx.sym.var("data")
    for layer in range(3):
        x = mx.sym.FullyConnected(x, num_hidden=4, name=f"fc{layer}")
        x = mx.sym.Custom(x, op_type="squares_without_keywords", name=f"custom{layer}")
    out = mx.sym.SoftmaxOutput(mx.sym.relu(x, name="relu"), mx.sym.var("label"), name="softmax")
    symbol = amp.convert_symbol(out, keep=["custom.", "fc1", "relu"])
    assert "__gluon_amp" not in symbol.tojson()
    assert [r.node for r in types(symbol) if r.rule == "kept by keep="] \
        == ["custom0", "fc1", "custom1", "custom2", "relu"]


def test_explain_names_the_line_of_a_custom_operator_that_overflows():
    def forward(F, x, below, above):
        x = F.Custom(below(x), op_type="squares_without_keywords")
        return above(x)

    below = nn.Dense(4, in_units=4, weight_initializer=mx.init.Constant(100))
    net = amp.convert(ready(Calling(forward, below, nn.Dense(2, in_units=4))))
    found = str(amp.explain(net, (nd.ones((3, 4)), nd.array([0, 1, 0])),
                            gluon.loss.SoftmaxCrossEntropyLoss()).first_overflow)
    assert "x = F.Custom(below(x)" in found


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_bfloat16"])
def test_settings_are_on_nodes_of_the_engine_only(policy, rng):
    def forward(F, x, dense):
        x = F.contrib.boolean_mask(F.Dropout(dense(x), 0.1), F.ones(3))
        return dense(F.Custom(x, op_type="squares_without_keywords"))

    net = amp.convert(ready(Calling(forward, nn.Dense(4, in_units=4))), policy)
    net(nd.array(rng.random((3, 4)))).wait_to_read()
    graph, types = net.mixed_graph(["float32"])
    built = build(graph, types, net._amp.policy, watch=True)
    settings = {node.op for node in built.nodes() if node.settings}
    assert {"FullyConnected", "Dropout"} <= settings <= library.operators()


@mx.operator.register("pulls_to_zero")
class PullProp(mx.operator.CustomOpProp):
    """Its gradient is its input, regardless of the output gradient."""

    def __init__(self):
        super().__init__(need_top_grad=False)

    def create_operator(self, ctx, shapes, dtypes):
        class Pull(Squares):
            def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
                self.assign(in_grad[0], req[0], in_data[0])
        return Pull()


def module(head, loss_scale, cls=amp.Module, **kwargs):
    """A softmax, and a Custom operator on a layer below it."""
    shared = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="shared")
    custom = mx.sym.Custom(mx.sym.FullyConnected(shared, num_hidden=4, name="own"), op_type=head)
    out = mx.sym.FullyConnected(shared + custom, num_hidden=3, name="out")
    outputs = [mx.sym.SoftmaxOutput(out, name="softmax"),
               custom if head == "pulls_to_zero" else mx.sym.BlockGrad(custom)]
    mod = cls(mx.sym.Group(outputs), **({} if loss_scale is None else {"loss_scale": loss_scale}))
    return prepared(mod, (4, 5), (4,), init=mx.init.Xavier(), seed=1,
                    optimizer={"learning_rate": 0.1}, **kwargs)


BATCH = mx.io.DataBatch([nd.array(np.random.default_rng(0).standard_normal((4, 5)))],
                        [nd.array([0, 1, 2, 0])])


@pytest.mark.parametrize("scale", [1024, "dynamic"])
def test_module_refuses_custom_operator_that_starts_a_gradient(scale):
    mod = module("pulls_to_zero", scale)
    mod.forward(BATCH)
    with pytest.raises(ValueError, match=r"Custom.*loss_scale=None"):
        mod.backward()
    mod = module("pulls_to_zero", None)
    mod.forward_backward(BATCH)
    mod.update()


@pytest.mark.parametrize("scale", [1024, "dynamic"])
@pytest.mark.parametrize("request_", ["write", "add"])
def test_module_accepts_custom_operator_that_propagates_gradients(scale, request_):
    mods = [module("squares_without_keywords", scale, grad_req=request_),
            module("squares_without_keywords", None, mx.mod.Module, grad_req=request_)]
    for _ in range(3):
        for mod in mods:
            mod.forward_backward(BATCH)
            mod.update()
            for grads in mod._exec_group.grad_arrays:
                grads[0][:] = 0
    for found, wanted in zip(mods[0].get_params()[0].items(), mods[1].get_params()[0].items()):
        assert np.array_equal(found[1].asnumpy(), wanted[1].asnumpy()), found[0]


class Totals(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        assert {a.dtype for a in [*in_data, *out_data, *aux]} == {np.float32}
        if is_train:
            aux[0][:] = aux[0] + in_data[0].mean(axis=0)
        self.assign(out_data[0], req[0], in_data[0] + aux[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("totals")
class TotalsProp(mx.operator.CustomOpProp):
    """Mutates an auxiliary state, which is a parameter like others in Gluon."""

    def list_auxiliary_states(self):
        return ["total"]

    def infer_shape(self, shapes):
        return shapes, shapes, [shapes[0][1:]]

    def create_operator(self, ctx, shapes, dtypes):
        return Totals()


class WithState(nn.HybridBlock):
    def __init__(self, units=3):
        super().__init__(prefix="state_")
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=units)
            self.total = self.params.get("total", shape=(4 if units else 0,), grad_req="null",
                                         init=mx.init.Constant(1000.1), allow_deferred_init=True)

    def hybrid_forward(self, F, x, total):
        return F.Custom(self.dense(x), total, op_type="totals")


class OwnNorm(WithState):
    """A batch norm by MXNet's operator, whose moving averages are parameters like others."""

    def __init__(self, units=3):
        super().__init__(units)
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(4,), init="ones")
            self.variance = self.params.get("variance", shape=(4,), init=mx.init.Constant(0.3))

    def hybrid_forward(self, F, x, total, scale, variance):
        if mx.util.is_np_array():
            return F.npx.batch_norm(self.dense(x), scale, scale, total, variance)
        return F.BatchNorm(self.dense(x), scale, scale, total, variance)


def after_training(net, x, policy=None):
    """The states before and after three steps, as float32."""
    if policy is not None:
        amp.convert(net, policy)
    states = [p for name, p in net.collect_params().items() if name.endswith(("total", "variance"))]
    for p in states:
        p.grad_req = "null"
    before = [p.data().asnumpy() for p in states] if net.dense.weight.shape[1] else []
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(3):
        trainer.backward(recorded(lambda: net(x).astype("float32").mean()))
        assert trainer.step(1)
    nd.waitall()
    assert all(p.dtype in (np.float32, "float32") for p in states)
    return before, [p.data().asnumpy() for p in states]


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "pure_float16", "mixed_float16", "tf32"])
@pytest.mark.parametrize("cls", [WithState, OwnNorm])
@pytest.mark.parametrize("traced", ["before", "after", "after, of unknown shape"])
def test_inputs_that_operators_mutate_stay_float32(cls, policy, traced, rng):
    x = nd.array(rng.random((5, 3)))
    found = []
    for each in (None, policy):
        mx.random.seed(7)
        net = ready(cls(0 if "unknown" in traced else 3), mx.init.Xavier())
        if each is None or traced == "before":
            net.hybridize()
            with autograd.predict_mode():
                net(x).wait_to_read()
        found.append(after_training(net, x, each))
    for exact, close in zip(*(before for before, _ in found)):
        assert np.array_equal(exact, close)
    for wanted, got in zip(*(after for _, after in found)):
        assert np.allclose(got, wanted, rtol=1e-3 if policy != "bfloat16" else 1e-2)


def test_state_of_a_block_that_convert_cannot_trace_is_float32_with_a_warning(rng, caplog):
    class OfList(WithState):
        def hybrid_forward(self, F, pair, total):
            first, second = pair
            return F.Custom(self.dense(first + second), total, op_type="totals")

    net, x = OfList(), nd.array(rng.random((5, 3)))
    net.initialize()
    amp.convert(net)
    with autograd.record():
        net([x, x]).wait_to_read()
    assert net.total.data().dtype == np.float32
    assert "state_total is float32 from now on" in caplog.text


@mx.util.use_np
def test_moving_averages_of_a_numpy_block_stay_float32(rng):
    net, x = OwnNorm(), mx.np.array(rng.random((5, 3)))
    net.initialize(mx.init.Xavier())
    (total, variance), _ = after_training(net, x, "float16")
    assert np.array_equal(total, np.full(4, 1000.1, np.float32))
    assert np.array_equal(variance, np.full(4, 0.3, np.float32))


def test_states_of_a_symbol_stay_float32(rng):
    x, first = nd.array(rng.random((5, 3))), mx.init.Constant(0.1)
    own = mx.sym.Custom(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, no_bias=True),
                        mx.sym.var("total", init=first), op_type="totals")
    average = mx.sym.var("average", init=first)
    sparse = mx.sym.IdentityAttachKLSparseReg(mx.sym.sigmoid(own), moving_avg=average)
    block = amp.convert(ready(gluon.SymbolBlock(sparse, mx.sym.var("data")), first), "float16")
    out = recorded(block, x)
    out.backward(out)
    head = mx.sym.LinearRegressionOutput(sparse, mx.sym.var("label"))
    mod = prepared(amp.Module(amp.convert_symbol(head), label_names=["label"], loss_scale=None),
                   (5, 3), (5, 4), init=first, optimizer={"learning_rate": 0.1})
    mod.forward_backward(mx.io.DataBatch([x], [nd.zeros((5, 4))]))
    mod.update()
    nd.waitall()  # MXNet's Custom mutates states without a dependency
    parameters, states = block.collect_params(), mod.get_params()[1]
    assert set(states) == {"total", "average"}
    for name, value in states.items():
        assert parameters[name].data().dtype == value.dtype == np.float32
        assert np.array_equal(parameters[name].data().asnumpy(), value.asnumpy())
        assert (value.asnumpy() != np.float32(0.1)).all()


# ---- functions that free what they saved, as those of DGL ----------------------------------


class Square(autograd.Function):
    frees = True

    def forward(self, x):
        self.save_for_backward(x)
        return x * x

    def backward(self, gradient):
        x, = self.saved_tensors
        if self.frees:
            self.saved_tensors = None
        return 2 * x * gradient


class SquareThatKeeps(Square):
    frees = False


class FreeingSquares(Squares):
    saved = None

    def forward(self, is_train, req, in_data, out_data, aux):
        self.saved = in_data[0].copy()
        super().forward(is_train, req, in_data, out_data, aux)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * self.saved * out_grad[0])
        self.saved = None


@mx.operator.register("squares_that_free")
class FreeingProp(SquaresProp):
    def create_operator(self, ctx, shapes, dtypes):
        return FreeingSquares()


def graph(function):
    """Two layers, and a function between them."""
    net = nn.Sequential()
    net.add(nn.Dense(4, in_units=3), nn.Lambda(function), nn.Dense(2, in_units=4))
    return net


def custom(name):
    return lambda x: nd.Custom(x, op_type=name)


FREEING = {"function": (lambda x: Square()(x), lambda x: SquareThatKeeps()(x)),
           "custom": (custom("squares_that_free"), custom("squares_without_keywords"))}


def trained(function, policy, loss_scale, size=1.0, steps=3):
    """Trains a `graph`. Returns the weights, the gradients of the data, and the Trainer."""
    mx.random.seed(3)
    net, trainer = with_trainer(amp.convert(ready(graph(function), mx.init.Xavier()), policy),
                                "sgd", {"learning_rate": 0.1 / size}, loss_scale=loss_scale)
    gradients = []
    for i in range(steps):
        x = nd.arange(i, i + 6).reshape((2, 3)) / 8
        x.attach_grad()
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), nd.ones((2, 2))) * size
        trainer.backward(loss)
        gradients.append(x.grad.asnumpy() / trainer.loss_scale)
        trainer.step(2)
    return [p.data().asnumpy() for p in net.collect_params().values()], gradients, trainer


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", FREEING)
@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("loss_scale", [1024, "dynamic"])
def test_functions_that_free_what_they_saved_train(kind, policy, loss_scale, caplog, capfd):
    freeing, keeping = FREEING[kind]
    if loss_scale == "dynamic":
        loss_scale = amp.DynamicLossScale(1024)
    weights, gradients, _ = trained(freeing, policy, loss_scale)
    assert "Error in" not in "".join(capfd.readouterr())
    expected, expected_gradients, _ = trained(keeping, policy, 1024)
    assert warnings(caplog) == []
    for found, wanted in zip(weights + gradients, expected + expected_gradients):
        assert np.array_equal(found, wanted)
        assert found.any()


def test_one_backward_pass_for_several_trainers_warns_of_nothing(caplog):
    net = ready(graph(FREEING["function"][0]))
    trainers = [amp.Trainer(layer.collect_params(), "sgd", loss_scale=scale)
                for layer, scale in ((net[0], 64), (net[2], amp.DynamicLossScale(256)))]
    for _ in range(2):
        amp.backward(recorded(lambda: net(nd.ones((2, 3))).sum()), trainers)
        assert all(trainer.step(2) for trainer in trainers)
    assert warnings(caplog) == []


@pytest.mark.parametrize("loss_scale", [1024, "dynamic"])
def test_module_trains_custom_operator_that_frees(loss_scale, caplog):
    found, expected = (module(head, loss_scale) for head in
                       ("squares_that_free", "squares_without_keywords"))
    for _ in range(3):
        for mod in (found, expected):
            mod.forward_backward(BATCH)
            assert mod.update()
    for name, weight in found.get_params()[0].items():
        assert np.array_equal(weight.asnumpy(), expected.get_params()[0][name].asnumpy()), name
    assert not warnings(caplog)


class Failing(Square):
    def backward(self, gradient):
        raise ValueError("on purpose")


def test_error_of_backward_pass_is_raised_before_the_update():
    net = ready(nn.Dense(2, in_units=3))
    before = net.weight.data().asnumpy()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    loss = recorded(lambda: Failing()(net(nd.ones((4, 3)))).sum())

    with pytest.raises(mx.MXNetError, match="CustomFunction"):  # noqa: PT012
        trainer.backward(loss)
        trainer.step(1)
    assert np.array_equal(net.weight.data().asnumpy(), before)


END = """
import atexit, threading
import gluon_amp as amp, mxnet as mx
from mxnet import autograd, nd
from mxnet.gluon import nn

ending = threading.Event()

class Slow(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        assert ending.wait(60)
        found = in_data[0].asnumpy() + sum(range(3_000_000)) % 2
        self.assign(out_data[0], req[0], nd.array(found))
        if in_data[0].shape[0] == 2:
            print("ran")

@mx.operator.register("slow")
class SlowProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Slow()

class Function(autograd.Function):
    def forward(self, x):
        return x * 2

    def backward(self, gradient):
        assert ending.wait(60)
        sum(range(3_000_000))
        return gradient * 2

class Net(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.Custom(F.exp(x), op_type="slow") + 1

net = Net()
amp.convert(net)
y = net(nd.ones((2, 3)))
x = nd.ones(3)
x.attach_grad()
with autograd.record():
    z = Function()(x)
z.backward()
atexit.register(ending.set)
"""


@pytest.mark.parametrize("hybrid", [True, False])
def test_process_exits_after_its_custom_operators(hybrid):
    code = END if hybrid else END.replace("amp.convert(net)", "")
    assert printed(code).split() == ["ran"]
