"""`xray` of other networks than hybrid blocks: plain Blocks, layers of an RNN, SymbolBlocks."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.inspection.tensors import Key
from gluon_amp.tools.types import types
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn
from networks import sequence
from xray_networks import (
    LOSS,
    Mean,
    calling,
    check_mended,
    layers,
    named,
    prepared,
    rows,
    training,
)

pytestmark = pytest.mark.numpy

sym = mx.sym


def symbol_block():
    data = sym.var("data")
    hidden = sym.FullyConnected(data, num_hidden=8, name="hidden")
    out = sym.FullyConnected(hidden * hidden * 1e5, num_hidden=4, name="out")
    return gluon.SymbolBlock(out, data)


class Loops(gluon.HybridBlock):
    """A loop or a condition with a fault in its body. In numpy mode, MXNet's take no bool."""

    def __init__(self, kind):
        super().__init__(prefix="loops_")
        self.kind = kind
        with self.name_scope():
            self.cell, self.out = nn.Dense(6, in_units=6), nn.Dense(4, in_units=6)

    def fault(self, F, x):
        large = self.cell(x) * 3e3
        return F.tanh(large * large * 1e-6)

    def hybrid_forward(self, F, x):
        if self.kind == "foreach":
            _, y = F.contrib.foreach(lambda row, state: (row, self.fault(F, state + row)),
                                     F.broadcast_axis(F.expand_dims(x, 0), axis=0, size=3), x * 1)
        elif self.kind == "while_loop":
            _, (_, y) = F.contrib.while_loop(
                lambda i, y: (i < 2).astype("float32"),
                lambda i, y: ([], [i + 1, self.fault(F, y)]), [F.zeros(1), x], max_iterations=3)
        else:
            y = F.contrib.cond((F.sum(x) < 1e6).astype("float32"), lambda: self.fault(F, x),
                               lambda: x * 1.0)
        return self.out(y)


@pytest.mark.parametrize(("make", "part"), [
    (lambda: Mean(lambda F, x: x * 3e4 * 3e2 * 1e-5), "fault"), (symbol_block, "scalar"),
    *((lambda kind=kind: Loops(kind), "loops__mul") for kind in ("foreach", "while_loop", "cond"))])
def test_xray_of_networks_other_than_hybrid_blocks(make, part):
    net = prepared(make())
    view = amp.xray(net, rows(), LOSS)
    assert named(part) in view.findings[0].node
    assert view.findings[0].reason.startswith("range above")
    assert view.keep
    assert part != "loops__mul" or named("loops__mul0") in {row.node for row in types(net)}
    assert check_mended(net, view, rows()).findings == []


def test_rounds_that_a_while_loop_does_not_run_are_zero():
    """Layers behind the loop read their rows, which MXNet does not write."""
    def loop(F, x, cell, out):
        rows, _ = F.contrib.while_loop(
            lambda i, y: (i < 2).astype("float32"),
            lambda i, y: (y, [i + 1, F.tanh(cell(y))]), [F.zeros(1), x], max_iterations=5)
        return F.mean(out(rows), axis=0)

    net = calling(loop, nn.Dense(6, in_units=6), nn.Dense(4, in_units=6, flatten=False))
    given = rows()
    uninitialized = [nd.full((5, len(given[0][0]), 6), np.nan, dtype=t)
                     for t in ("float32", "float16") for _ in range(50)]
    nd.waitall()
    del uninitialized
    view = amp.xray(net, given, LOSS)
    assert (view.findings, view.first_overflow) == ([], None)
    stacked = next(t for t in view.tensors if "while_loop" in t.name and not t.key.backward)
    assert stacked.counts.zero >= 3 / 5 * stacked.counts.numbers
    np.testing.assert_allclose(view.losses, view.reference_losses, rtol=0.01)


def test_xray_of_rnn_layer_alone():
    net = prepared(rnn.LSTM(4, input_size=6, prefix="lstm_"))
    given = [(nd.ones((5, 2, 6)), nd.ones((5, 2)))]
    view = amp.xray(net, given, LOSS)
    assert view.findings == []
    assert any(t.op == "RNN" for t in view.tensors)
    np.testing.assert_allclose(view.losses, view.reference_losses, rtol=0.01)


@pytest.mark.parametrize("untrained", [False, True])
def test_loss_moved_by_all_products_or_all_untrained_layers_blames_none(untrained):
    """The norms at the end of the network have 16 numbers, or the images are smooth."""
    mx.random.seed(1)
    net = gluon.model_zoo.vision.mobilenet0_25(classes=4)
    net.initialize(mx.init.Xavier())
    rng = np.random.default_rng(0)
    images = rng.standard_normal((4, 3, 2, 2)).repeat(32, axis=2).repeat(32, axis=3) \
        if untrained else rng.standard_normal((16, 3, 32, 32))
    batch = nd.array(images), nd.array(rng.integers(0, 4, len(images)))
    net(batch[0])
    view = amp.xray(amp.convert(net), [batch], LOSS, reference=False)
    assert (view.findings, view.keep) == ([], [])
    if untrained:
        assert "as in an untrained network" in str(view)
    else:
        assert max(value for t in view.tensors for value in t.loss_sensitivities) > 2.0 ** -11


def test_block_and_operator_with_same_name_are_both_kept():
    """Both are named relu0, and their gradients underflow."""
    def forward(F, x, relu, first, last):
        y = F.relu(relu(first(x)) + 1)
        return last(F.contrib.gradientmultiplier(y, scalar=1e-13))
    net = calling(forward, nn.Activation("relu", prefix="net_relu0_"), *layers(8, 4))
    view = amp.xray(net, rows(), LOSS)
    assert "net_relu0" in view.keep
    assert not any("still" in note for note in view.notes)
    check_mended(net, view, rows())


def test_block_called_twice_is_counted_twice():
    view = amp.xray(prepared(Mean()), rows(1), LOSS)
    numbers = {t.key: t.counts.numbers for t in view.tensors}
    assert numbers[Key("mean_dense1_fwd", False, 0)] == 8 * 4
    assert numbers[Key("mean_dense0_fwd", False, 0)] == 2 * 8 * 8
    assert numbers[Key("mean_dense0_fwd", True, 1)] == 2 * 8 * 6


class TwoParts(gluon.Block):
    """Parts with an empty prefix, which share one name, as in most of Gluon's networks."""

    def __init__(self):
        super().__init__(prefix="parts_")
        with self.name_scope():
            self.features = sequence(nn.Dense(6, in_units=6, activation="relu"), prefix="")
            self.output = sequence(nn.Dense(6, in_units=6), prefix="")

    def forward(self, x):
        return self.output(self.features(x))


def test_xray_of_parts_with_same_name():
    net = prepared(TwoParts())
    view = amp.xray(net, rows(1), LOSS)
    assert {"parts_dense0_fwd", "parts_dense1_fwd"} <= {t.key.node for t in view.tensors}
    data, label = rows(1)[0]
    assert view.losses == [float(LOSS(net(data), label).mean().asnumpy().item())]


def test_cancellation_is_traced_through_casts_to_rounded_operands():
    """Squared distances of rows far from 0, as sums and products: one term comes from a product
    in float16, by a cast."""
    def forward(F, x, first, out):
        rows = first(x) + 30
        lengths = F.sum(rows * rows, axis=1, keepdims=True)
        apart = F.broadcast_add(lengths, F.transpose(lengths)) \
            - 2 * F.dot(rows, rows, transpose_b=True)
        return out(F.exp(F.relu(apart) * -0.05))
    net = calling(forward, *layers(12, 4))
    view = amp.xray(net, rows(), LOSS)
    assert view.findings[0].node == named("net__minus0")
    assert view.findings[0].reason == "cancellation"
    assert {"net_dot0", named("net__mul0")} <= set(view.keep)
    assert not any("still does not suit" in note for note in view.notes)
    check_mended(net, view, rows(), rtol=1e-3)


class MayBeLeftOut(nn.HybridBlock):
    """Its second argument may be left out."""

    def __init__(self):
        super().__init__(prefix="part_")
        with self.name_scope():
            self.cell = nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, x, y=None):
        return self.cell(x) if y is None else F.tanh(self.cell(x)) * 3e4 * 30 * y


class InTwoWays(gluon.Block):
    def __init__(self):
        super().__init__(prefix="ways_")
        with self.name_scope():
            self.part, self.out = MayBeLeftOut(), nn.Dense(4, in_units=6)

    def forward(self, x):
        return self.out(self.part(x, x) * 1e-5 + self.part(x))


def test_xray_of_all_graphs_of_block_blames_only_first_cause():
    net = prepared(InTwoWays())
    view = amp.xray(net, rows(), LOSS)
    assert [f.node for f in view.findings] == [named("ways_part__mulscalar1")]
    check_mended(net, view, rows())


class WithConstant(nn.HybridBlock):
    """Multiplies by a constant that float16 makes 0."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.one, self.two = nn.Dense(6, in_units=6), nn.Dense(4, in_units=6)
            self.small = self.params.get_constant("small", np.full((1, 6), 1e-9, np.float32))

    def hybrid_forward(self, F, x, small):
        return self.two(F.broadcast_mul(self.one(x), small) * 1e9)


def sparse():
    return calling(lambda F, x, table, out: out(table(x.abs()).mean(axis=1)),
                   nn.Embedding(9, 6, sparse_grad=True), nn.Dense(4, in_units=6))


@pytest.mark.parametrize("make", [
    lambda: prepared(Mean()), lambda: prepared(Loops("foreach")), lambda: prepared(WithConstant()),
    pytest.param(sparse, marks=pytest.mark.mx_nd("no sparse arrays"))])
def test_training_of_other_networks_under_xray_is_bitwise_identical(make):
    assert training(True, make, rows) == training(False, make, rows)


def test_constant_beyond_float16_stays_float32_under_xray():
    assert amp.xray(prepared(WithConstant()), rows(), LOSS).findings == []


@pytest.mark.mx_nd("no sparse arrays")
def test_sparse_gradients_are_counted():
    assert any(t.op == "Embedding" and t.kind == "weight gradient"
               for t in amp.xray(sparse(), rows(1), LOSS).tensors)


# ---- names of nodes for `keep=`


def test_child_with_empty_prefix_is_kept_by_node_name():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8), nn.HybridLambda(lambda F, x: x * 2.0 ** 12 * 32 * 2.0 ** -17,
                                             prefix=""), nn.Dense(4))
    net = prepared(net)
    view = amp.xray(net, rows(), LOSS)
    assert view.keep == [named("net__mulscalar1")]
    check_mended(net, view, rows())


class WithOwnWeight(gluon.HybridBlock):
    """An outermost block with a weight, which `keep=` does not keep with the node."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(4, 6))

    def hybrid_forward(self, F, x, weight):
        return F.FullyConnected(x, weight, num_hidden=4, no_bias=True, name="product") * 1e-4


def test_xray_of_float16_weight_read_by_kept_node():
    def large(output, label):
        return LOSS(output, label) * 1e5
    given = [(data * 25, label) for data, label in rows()]
    net = prepared(WithOwnWeight())
    net.weight.set_data(net.weight.data().astype("float32") * 2400)
    view = amp.xray(net, given, large)
    assert view.keep[0] == "net_product"
    amp.convert(net, keep=view.keep)
    after = amp.xray(net, given, large)
    assert "weight" in after.window.high_tensor
    assert view.loss_scale == after.loss_scale
    assert any(amp.explain(net, batch, large, 2 * after.loss_scale[1]).first_overflow
               for batch in given)


def detector(F, x, body, classes, boxes):
    """A detector of which a loss reads the classes and the boxes, not the detections."""
    h = body(x)
    anchors = F.contrib.MultiBoxPrior(h, sizes=(0.2, 0.4), ratios=(1,))
    scores = F.transpose(classes(h), (0, 2, 3, 1)).reshape((0, -1, 3))
    moved = F.transpose(boxes(h), (0, 2, 3, 1)).reshape((0, -1))
    found = F.contrib.MultiBoxDetection(F.softmax(F.transpose(scores, (0, 2, 1)), axis=1), moved,
                                        anchors, nms_threshold=0.45)
    return scores, moved, found


@pytest.mark.mx_nd("mx.np reads the numbers of reshape otherwise")
def test_detections_are_no_false_positive():
    """One other choice of a row moves all rows."""
    net = calling(detector, *(nn.Conv2D(count, 3, padding=1, prefix=f"net_{name}_") for name, count
                              in {"body": 16, "classes": 6, "boxes": 8}.items()))
    rng = np.random.default_rng(0)
    given = [(nd.array(rng.standard_normal((2, 3, 16, 16))), nd.zeros(1)) for _ in range(2)]
    view = amp.xray(net, given, lambda out, _: out[0].square().mean() + out[1].square().mean())
    assert (view.findings, view.keep) == ([], [])
    assert any(t.snr < 20 for t in view.tensors if "multibox" in t.name)
