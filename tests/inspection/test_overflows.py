"""A forward pass that overflows, with finite gradients, is logged with the line of its code."""
import inspect

import gluon_amp as amp
import mxnet as mx
import numpy as np
import processes
import pytest
from modules import prepared as bound
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready

pytestmark = pytest.mark.isa


def rms_norm(F, x):
    squares = x * x  # overflows
    return F.broadcast_div(x, F.sqrt(F.mean(squares, axis=-1, keepdims=True) + 1e-5))


def softmax(F, x):
    exponentials = F.exp(x / 100)
    total = F.sum(exponentials, axis=-1, keepdims=True)  # overflows
    return F.broadcast_div(exponentials, total)


def normalized(F, x):
    x = 2 * (x - 880)  # up to 280
    mean = F.mean(x, axis=-1, keepdims=True)
    variance = F.mean(x * x, axis=-1, keepdims=True) - mean * mean  # overflows
    return F.broadcast_div(F.broadcast_sub(x, mean), F.sqrt(variance + 1e-5))


def product(F, x):
    products = F.elemwise_mul(x, F.reverse(x, axis=1))  # overflows
    return 1 / (1 + F.abs(products))


def norm_np(np, x):
    squares = x * x  # overflows; means and sums of infinities are NaN, so these steps are skipped
    return x / np.sqrt(np.max(squares, axis=-1, keepdims=True) + 1e-5)


def softmax_np(np, x):
    exponentials = np.exp(x / 100)
    total = np.sum(exponentials, axis=-1, keepdims=True)  # overflows
    return exponentials / total


def normalized_np(np, x):
    x = 1.84 * (x - 880)  # up to 257.6: the last square alone, because two would make the mean NaN
    mean = np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(x * x, axis=-1, keepdims=True) - mean * mean  # overflows
    return (x - mean) / np.sqrt(variance + 1e-5)


def product_np(np, x):
    products = x * np.flip(x, axis=1)  # overflows
    return 1 / (1 + np.abs(products))


FAULTS = {"RMS norm": rms_norm, "softmax": softmax, "E[x^2]": normalized, "product": product}
NUMPY = {"norm": norm_np, "softmax": softmax_np, "E[x^2]": normalized_np, "product": product_np}
DATA = np.linspace(880, 1020, 64).reshape(2, 32)  # exp(8.8) to exp(10.2), of which 32 overflow


def line_of(function):
    """The number of the line with the comment in a function."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if "# overflows" in line)


def policy_for(fault):
    return "pure_float16" if fault == "softmax" else "mixed_float16"


class Layer(gluon.HybridBlock):
    """A function between dense layers, of which the first returns its input in float16."""

    def __init__(self, function):
        super().__init__()
        with self.name_scope():
            self.function = function
            self.first = nn.Dense(32, in_units=32, weight_initializer=mx.init.Constant(np.eye(32)))
            self.last = nn.Dense(2, in_units=32)

    def hybrid_forward(self, F, x, *args):
        return self.last(self.function(F, self.first(x), *args))


def network(function):
    return ready(Layer(function), mx.init.Normal(0.1))


def train(net, *data, steps=3, **kwargs):
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, **kwargs)
    for _ in range(steps):
        with autograd.record():
            loss = (net(*data).astype("float32") ** 2).mean()
        trainer.backward(loss)
        trainer.step(1)
    return trainer


def text_on(function, caplog):
    """The one warning, which has the line of a function."""
    (text,) = warnings(caplog)
    assert f"{__file__}, line {line_of(function)}:" in text
    assert "amp.xray" in text
    return text


def warnings(caplog):
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "forward pass overflows" in text]


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_network_is_named_once_with_its_line(fault, hybridized, caplog):
    net = amp.convert(network(FAULTS[fault]), policy_for(fault))
    if hybridized:
        net.hybridize(static_alloc=True, static_shape=True)
    trainer = train(net, nd.array(DATA))
    assert trainer.skipped == 0
    assert net.name in text_on(FAULTS[fault], caplog)


@mx.util.use_np
@pytest.mark.parametrize("fault", NUMPY)
def test_network_in_numpy_mode_is_named_once_with_its_line(fault, caplog):
    net = amp.convert(network(lambda F, x: NUMPY[fault](F.np, x)), policy_for(fault))
    train(net, mx.np.array(DATA))
    assert net.name in text_on(NUMPY[fault], caplog)


@pytest.mark.parametrize("fault", FAULTS)
def test_module_is_named_once(fault, caplog):
    x = FAULTS[fault](mx.sym, mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=32, name="one"))
    symbol = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(x, num_hidden=2), name="head")
    module = amp.Module(amp.convert_symbol(symbol, policy_for(fault)), label_names=["head_label"])
    initial = [mx.init.Constant(np.eye(32)), mx.init.Normal(0.1)]
    bound(module, (2, 32), (2, 2), mx.init.Mixed(["one_weight", ".*"], initial))
    batch = mx.io.DataBatch([nd.array(DATA)], [nd.zeros((2, 2))])
    for _ in range(3):
        module.forward_backward(batch)
        assert module.update()
    (text,) = warnings(caplog)
    assert any(f" {node} " in text or f" {node}:" in text
               for node in symbol.get_internals().list_outputs() for node in [node[:-7]])


class Imperative(gluon.Block):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.dense = nn.Dense(2, in_units=32)

    def forward(self, x):
        x = self.function(mx.np if mx.util.is_np_array() else nd, x.astype("float16"))
        return self.dense(x.astype("float32"))


@pytest.mark.parametrize("fault", FAULTS)
def test_imperative_code_is_named_once_with_its_line(fault, caplog):
    net = amp.convert(ready(Imperative(FAULTS[fault]), mx.init.Normal(0.1)))
    call = mx.base._LIB.MXImperativeInvokeEx
    train(net, nd.array(DATA), steps=4)
    text_on(FAULTS[fault], caplog)
    assert mx.base._LIB.MXImperativeInvokeEx is call


@mx.util.use_np
@pytest.mark.parametrize("fault", NUMPY)
def test_imperative_code_in_numpy_mode_is_named_once_with_its_line(fault, caplog):
    net = amp.convert(ready(Imperative(NUMPY[fault]), mx.init.Normal(0.1)))
    train(net, mx.np.array(DATA), steps=4)
    text_on(NUMPY[fault], caplog)


SCRIPT = """
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

{layer}
{function}
net = Layer({name})
net.initialize(mx.init.Normal(0.1))
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {{"learning_rate": 0.01}})
data = mx.nd.array(np.linspace(880, 1020, 64).reshape(2, 32))
for _ in range(3):
    with mx.autograd.record():
        loss = (net(data).astype("float32") ** 2).mean()
    loss.backward()
    trainer.step(1)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_script_without_an_edit_is_named_once_with_its_line(fault, tmp_path):
    function = FAULTS[fault]
    text = SCRIPT.format(layer=inspect.getsource(Layer), function=inspect.getsource(function),
                         name=function.__name__)
    line = next(i for i, line in enumerate(text.split("\n"), 1) if "# overflows" in line)
    script = tmp_path / "script.py"
    script.write_text(text)
    done = processes.run("-m", "gluon_amp", "--dtype", policy_for(fault), script)
    assert done.returncode == 0, done.stderr
    assert f"{script}, line {line}:" in done.stderr
    assert done.stderr.count("forward pass overflows") == 1


def test_imperative_code_that_overflows_in_one_step_is_watched_in_one_step(caplog):
    net = amp.convert(ready(Imperative(rms_norm), mx.init.Normal(0.1)))
    call = mx.base._LIB.MXImperativeInvokeEx
    for data in DATA, DATA / 100, DATA / 100:
        train(net, nd.array(data), steps=1)
    assert mx.base._LIB.MXImperativeInvokeEx is call
    assert warnings(caplog) == []


# ---- no alarm ------------------------------------------------------------------------------------


def constant(F, scores, lengths):
    mask = F.broadcast_lesser(F.arange(0, 32).reshape((1, -1)), lengths.reshape((-1, 1)))
    return F.softmax(F.broadcast_add(scores, (1 - mask) * -1e9))


def where(F, scores, lengths):
    mask = F.broadcast_lesser(F.zeros_like(scores), lengths.reshape((-1, 1)))
    return F.softmax(F.where(mask, scores, F.ones_like(scores) * -1e30))


def sequence_mask(F, scores, lengths):
    return F.softmax(F.SequenceMask(scores.transpose(), lengths, use_sequence_length=True,
                                    value=-1e18).transpose())


def array(F, scores, lengths):
    return F.softmax(F.broadcast_add(scores, lengths.reshape((-1, 1)) * -1e4 * 10))


MASKS = {mask.__name__: mask for mask in (constant, where, sequence_mask, array)}


@pytest.mark.parametrize("policy", ["mixed_float16", "pure_float16"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_no_alarm(mask, policy, caplog):
    net = amp.convert(network(MASKS[mask]), policy)
    train(net, nd.array(DATA / 1000), nd.array([20, 32]))
    assert warnings(caplog) == []


def test_masks_in_arrays_are_no_alarm(caplog):
    def masked(F, scores, mask):
        return F.softmax(scores + mask)
    hidden = nd.array(np.where(np.arange(32) < 20, 0, -1e9) * np.ones((2, 1)))
    train(amp.convert(network(masked)), nd.array(DATA / 1000), hidden)
    assert warnings(caplog) == []


def test_scales_that_are_too_high_are_no_alarm(caplog):
    net = amp.convert(network(lambda F, x: x / 1000))
    trainer = train(net, nd.array(DATA), steps=2, loss_scale=2.0 ** 40)
    assert trainer.skipped == 2
    assert warnings(caplog) == []


def test_predictions_are_no_alarm(caplog):
    net, small = amp.convert(network(rms_norm)), nd.array(DATA / 100)
    trainer = train(net, small, steps=1)
    net(nd.array(DATA)).wait_to_read()
    with autograd.record(train_mode=False):
        net(nd.array(DATA)).wait_to_read()
    with autograd.record():
        loss = net(small).mean()
    trainer.backward(loss)
    trainer.step(1)
    assert warnings(caplog) == []


def test_passes_before_the_trainer_are_no_alarm(caplog):
    net = amp.convert(network(rms_norm))
    with autograd.record():
        net(nd.array(DATA)).wait_to_read()
    train(net, nd.array(DATA / 100))
    assert warnings(caplog) == []


def test_losses_that_are_not_finite_are_no_alarm(caplog):
    """A skipped step is logged with its reason."""
    net = amp.convert(network(lambda F, x: x * x))
    trainer = train(net, nd.array(DATA), steps=2)
    assert trainer.skipped == 2
    assert warnings(caplog) == []


def test_xray_is_no_alarm(caplog):
    net = amp.convert(network(rms_norm))
    batch, loss_fn = (nd.array(DATA), nd.zeros((2, 2))), gluon.loss.L2Loss()
    assert amp.xray(net, [batch], loss_fn).findings
    train(net, nd.array(DATA / 100))
    assert warnings(caplog) == []
