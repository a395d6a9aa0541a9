"""`xray` and `explain` of a Module: its symbol, its batches, its losses."""

import gluon_amp as amp
import modules
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from gluon_amp.inspection.tensors import Key
from modules import body, dynamic
from mxnet import nd
from mxnet import symbol as S


def faulty(keep=()):
    x = body().get_internals()["relu_output"] * 3000
    x = S.elemwise_mul(x, x, name="squares") * 1e-7
    x = S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="fc"), name="head")
    return amp.convert_symbol(x, keep=keep)


def batch(seed=0, size=6):
    rng = np.random.default_rng(seed)
    return mx.io.DataBatch([nd.array(rng.standard_normal((size, 3, 6, 6)))],
                           [nd.array(rng.integers(0, 3, size))])


def ready(symbol, shape=(), **kwargs):
    mod = modules.bound(symbol, shape=shape, **kwargs)
    mx.random.seed(3)
    mod.init_params(mx.init.Xavier())
    return mod


def test_keep_of_module_xray_fixes_reported_fault():
    view = amp.xray(ready(faulty()), [batch(0), batch(1)])
    assert view.findings[0].node == "squares"
    assert view.first_overflow.tensor == "squares"
    assert view.keep_line == f"amp.convert_symbol(symbol, keep={view.keep!r})"
    after = amp.xray(ready(faulty(view.keep)), [batch(0), batch(1)])
    assert (after.findings, after.keep, after.first_overflow) == ([], [], None)
    np.testing.assert_allclose(after.losses, after.reference_losses, rtol=0.01)


def test_nodes_kept_in_symbol_stay_kept():
    view = amp.xray(ready(faulty(["bn"])), [batch()])
    types = {t.key: t.format.name for t in view.tensors}
    assert types[Key("conv", False, 0)] == types[Key("fc", False, 0)] == "float16"
    assert types[Key("bn", False, 0)] == types[Key("squares", False, 0)] == "float32"
    assert (view.findings, view.keep) == ([], [])
    view = amp.xray(ready(faulty(["fc"])), [batch()])
    assert {"fc", "squares"} <= set(view.keep)


def test_gradients_equal_those_of_module_step():
    mod = ready(modules.net(), shape=(3,), loss_scale=64)
    view = amp.xray(mod, [modules.batch()])
    scale, counts = view.steps[0]
    mod.forward(modules.batch(), is_train=True)
    mod.backward()
    for name, gradient in modules.grads(mod).items():
        node, _, part = name.rpartition("_")
        if node != "bn":
            found = counts[Key(node, True, 1 if part == "weight" else 2)].squares
            own = np.square(gradient.astype(np.float64)).sum() * (scale / 64) ** 2
            assert found == pytest.approx(own, rel=0.02, abs=1e-3 * found + 1), name


def test_module_and_random_state_are_unchanged():
    mod = modules.made(modules.net(), loss_scale=dynamic())
    modules.learn(mod, modules.batch())
    before = modules.everything(mod)
    mx.random.seed(1)
    amp.xray(mod, [modules.batch(1)])
    assert amp.explain(mod, modules.batch(1), loss_scale=2.0 ** 40).first_overflow.backward
    drawn = nd.random.uniform(shape=3).asnumpy()
    assert same(modules.everything(mod), before)
    mx.random.seed(1)
    np.testing.assert_array_equal(drawn, nd.random.uniform(shape=3).asnumpy())


def test_xray_of_symbol_with_its_own_casts():
    x = S.Cast(S.Convolution(S.Cast(S.var("data"), dtype="float16"), kernel=(3, 3), num_filter=4,
                             name="conv"), dtype="float32")
    x = S.SoftmaxOutput(S.FullyConnected(x * 1e5, num_hidden=3, name="fc"), name="head")
    view = amp.xray(ready(x), [batch()])
    types = {t.key.node: t.format.name for t in view.tensors}
    assert (types["conv"], types["fc"]) == ("float16", "float32")


def test_symbols_with_other_casts_are_refused():
    x = S.relu(S.Cast(S.FullyConnected(S.var("data"), num_hidden=3), dtype="float32"), name="relu")
    with pytest.raises(ValueError, match=r"other types in .*relu"):
        amp.xray(ready(amp.convert_symbol(S.SoftmaxOutput(x, name="head"))), [batch()])


@pytest.mark.parametrize("keep", [(), "fc"])
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_xray_of_bfloat16_module(policy, keep):
    symbol = amp.convert_symbol(S.SoftmaxOutput(body(), name="head"), policy, keep=keep)
    view = amp.xray(ready(symbol), [batch()])
    formats = {t.key.node: t.format.name for t in view.tensors if not t.key.backward}
    assert (formats["conv"], formats["fc"]) == ("bfloat16", "float32" if keep else "bfloat16")
    assert (view.findings, view.keep) == ([], [])
    assert view.keep_line.startswith(f"amp.convert_symbol(symbol, {policy!r}, keep=")
    np.testing.assert_allclose(view.losses, view.reference_losses, rtol=0.01)


@pytest.mark.parametrize(("make", "given", "said"), [
    (lambda: amp.Module(faulty(), label_names=["head_label"]), batch(), "call bind and init_par"),
    (lambda: ready(modules.net(None), (3,)), modules.batch(), "gluon_amp.convert_symbol"),
    (lambda: ready(faulty()), (nd.ones((6, 3, 6, 6)), nd.ones(6)), "mx.io.DataBatch"),
    (lambda: ready(faulty()), mx.io.DataBatch([nd.ones((6, 3, 6, 6))]), "data and 1 labels"),
    (lambda: ready(faulty()), mx.io.DataBatch([nd.ones((6, 3))], [nd.ones(6)]),
     r"does not take this batch.*\(6, 3\)"),
])
def test_unsupported_modules_and_batches_are_refused(make, given, said):
    with pytest.raises((ValueError, TypeError), match=said):
        amp.xray(make(), [given])


def test_gluon_network_requires_loss_and_module_takes_no_trainer():
    with pytest.raises(TypeError, match="loss_fn is required, except for a Module"):
        amp.xray(amp.convert(mx.gluon.nn.Dense(2)), [(nd.ones((1, 2)), nd.ones(1))])
    mod = ready(faulty())
    with pytest.raises(TypeError, match="trainer= is for Gluon"):
        amp.xray(mod, [batch()], trainer=mod)


@pytest.mark.parametrize("keep", [(), "cell"])
def test_xray_of_loop_in_symbol_includes_casts_in_body(keep):
    def step(row, states):
        return row, [S.tanh(S.FullyConnected(
            states[0] + row, S.var("cell_weight", shape=(3, 3)), S.var("cell_bias", shape=(3,)),
            num_hidden=3, name="cell"), name="tanh")]

    rows = S.reshape(S.FullyConnected(S.var("data"), num_hidden=6, name="first"), (2, 6, 3))
    _, (state,) = S.contrib.foreach(step, rows, [S.zeros((6, 3))])
    symbol = amp.convert_symbol(S.SoftmaxOutput(state, name="head"), keep=keep)
    mod = ready(symbol)
    view = amp.xray(mod, [batch()])
    formats = {t.key.node: t.format.name for t in view.tensors if not t.key.backward}
    assert formats["first"] == "float16"
    assert formats["cell"] == ("float32" if keep else "float16")
    mod.forward(batch(), is_train=False)
    shown = mod.get_outputs()[0].asnumpy()
    wanted = -np.log(shown[np.arange(6), batch().label[0].asnumpy().astype(int)]).mean()
    assert view.losses == [pytest.approx(wanted, rel=1e-3)]


def test_head_with_own_gradient_is_not_blamed_for_gradient_scale():
    h = S.FullyConnected(S.var("data"), num_hidden=24, name="fc1")
    h = S.Activation(h, act_type="relu", name="relu")
    for i in range(3):
        h = S.contrib.gradientmultiplier(h, scalar=2.0 ** -13, name=f"small{i}")
    symbol = S.LinearRegressionOutput(S.FullyConnected(h, num_hidden=1, name="fc2"), name="head")
    mod = modules.prepared(amp.Module(amp.convert_symbol(symbol), label_names=["head_label"]),
                           (16, 12), (16,), init=mx.init.Xavier(), seed=1, optimizer=None)
    data = nd.array(np.random.default_rng(0).standard_normal((16, 12))) * 0.02
    view = amp.xray(mod, [mx.io.DataBatch([data], [data[:, 0]])])
    assert view.findings[0].node in ("small0", "small1", "small2")
    assert view.findings[0].reason == "gradients change their size"
    assert not any(name in ("head", "fc2") for name in view.keep)


# ---- the reported loss, and the effect of rounding on it, as for a Gluon network

rng = np.random.default_rng(3)
DATA = nd.array(rng.standard_normal((6, 5)))
CLASSES = nd.array(rng.integers(0, 4, 6))
NUMBERS = nd.array(rng.standard_normal((6, 4)))
CE = mx.gluon.loss.SoftmaxCrossEntropyLoss()


def scores():
    hidden = S.Activation(S.FullyConnected(S.var("data"), num_hidden=8, name="fc1"),
                          act_type="tanh", name="tanh")
    return S.FullyConnected(hidden, num_hidden=4, name="fc2")


def off(out, label):
    return out - label.reshape(out.shape)


def hinge(out, label):
    sides = 2 * nd.one_hot(label, 4) - 1
    return (1 - sides * out).relu()


def of_two(out, label):
    """Cross-entropy of two classes for each label."""
    return CE(nd.transpose(out.reshape((6, 2, 2)), (0, 2, 1)).reshape((-1, 2)),
              label.reshape(-1)).reshape((6, 2))


def softmax(x, label=None, **settings):
    return S.SoftmaxOutput(x, *([label] if label is not None else []), name="head", **settings)


# name: (the head, its label, the loss whose gradient it starts, and the reported loss if it
# differs)
HEADS = {
    "softmax": (softmax, CLASSES, CE, None),
    "scaled softmax": (lambda x: softmax(x, grad_scale=0.25, normalization="batch"), CLASSES,
                       lambda out, label: CE(out, label) / 24, CE),
    "ignored label": (lambda x: softmax(x, use_ignore=True, ignore_label=2), CLASSES,
                      lambda out, label: CE(out, label) * (label != 2), None),
    "reversed labels": (lambda x: softmax(x, S.reverse(S.var("head_label"), axis=0)), CLASSES,
                        lambda out, label: CE(out, label[::-1]), None),
    "probabilities as labels": (softmax, nd.softmax(NUMBERS),
                                mx.gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False), None),
    "multi_output softmax": (
        lambda x: softmax(x.reshape((6, 2, 2)), multi_output=True),
        nd.array(rng.integers(0, 2, (6, 2))), lambda out, label: of_two(out, label) / 2, of_two),
    "linear regression": (
        lambda x: S.LinearRegressionOutput(x, name="head"), NUMBERS,
        lambda out, label: off(out, label).square() / 8,
        lambda out, label: off(out, label).square() / 2),
    "MAE regression": (
        lambda x: S.MAERegressionOutput(x, name="head"), NUMBERS,
        lambda out, label: off(out, label).abs() / 4, lambda out, label: off(out, label).abs()),
    "logistic regression": (
        lambda x: S.LogisticRegressionOutput(x, name="head"), NUMBERS > 0,
        mx.gluon.loss.SigmoidBinaryCrossEntropyLoss(), None),
    "linear SVM": (
        lambda x: S.SVMOutput(x, name="head", use_linear=True), CLASSES, hinge, None),
    "squared SVM": (
        lambda x: S.SVMOutput(x, name="head", regularization_coefficient=0.5), CLASSES,
        lambda out, label: hinge(out, label).square() / 2,
        lambda out, label: hinge(out, label).square()),
}


def of_module(symbol, labels, data=DATA):
    mod = amp.Module(amp.convert_symbol(symbol), label_names=list(labels))
    mod.bind([("data", data.shape)], [(name, label.shape) for name, label in labels.items()])
    mx.random.seed(1)
    mod.init_params(mx.init.Normal(0.5))
    return amp.xray(mod, [mx.io.DataBatch([data], list(labels.values()))]), mod


def of_gluon(symbol, mod, label, loss_fn, data=DATA):
    net = mx.gluon.SymbolBlock(symbol, [S.var("data")])
    net.initialize()
    for name, parameter in net.collect_params().items():
        parameter.shape = mod.get_params()[0][name].shape
        parameter.set_data(mod.get_params()[0][name].astype("float32"))
    return amp.xray(amp.convert(net), [(data, label)], loss_fn)


def sensitivities(view):
    return {t.key.node: np.mean(t.loss_sensitivities) for t in view.tensors
            if t.key.node in ("fc1", "fc2") and t.loss_sensitivities}


@pytest.mark.parametrize("name", HEADS)
def test_head_loss_matches_the_gradient_it_starts(name):
    head, label, loss_fn, shown = HEADS[name]
    view, mod = of_module(head(scores()), {"head_label": label})
    right = of_gluon(scores(), mod, label, loss_fn)
    assert sensitivities(right)
    assert sensitivities(view) == pytest.approx(sensitivities(right), rel=0.02)
    wanted = (shown or loss_fn)(nd.array(output(mod)), label)
    if name == "logistic regression":
        wanted = wanted.mean(axis=0)
    assert view.losses == pytest.approx([float(wanted.mean().asscalar())], rel=0.01)


def output(mod):
    """The input of the head."""
    values, _ = mod.get_params()
    weights = {name: a.astype("float32").asnumpy() for name, a in values.items()}
    hidden = np.tanh(DATA.asnumpy() @ weights["fc1_weight"].T + weights["fc1_bias"])
    return hidden @ weights["fc2_weight"].T + weights["fc2_bias"]


class Passes(mx.operator.CustomOp):
    """Its output is its input, and so is the gradient."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("passes_in_xray")
class PassesProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Passes()


@pytest.mark.parametrize("end", [
    lambda x: x.reshape((-1,)), lambda x: S.Custom(x, op_type="passes_in_xray"),
    lambda x: S.Group([S.BlockGrad(x), x * 2])])
def test_loss_behind_an_output_is_that_of_its_head(end):
    head = S.SoftmaxOutput(scores(), name="head")
    view, mod = of_module(end(head), {"head_label": CLASSES})
    right, _ = of_module(head, {"head_label": CLASSES})
    assert view.losses == pytest.approx(right.losses)
    assert sensitivities(view) == pytest.approx(sensitivities(right), rel=1e-3)
    assert amp.explain(mod, mx.io.DataBatch([DATA], [CLASSES])).first_overflow is None


def test_each_head_of_module_uses_its_own_label():
    x = scores()
    heads = S.Group([S.BlockGrad(S.slice_axis(x, axis=1, begin=0, end=2), name="to_look_at"),
                     S.LinearRegressionOutput(x, name="far", grad_scale=3),
                     S.MakeLoss(x.square(), name="small"),
                     S.SoftmaxOutput(x, name="near", normalization="batch")])
    view, mod = of_module(heads, {"near_label": CLASSES, "far_label": NUMBERS})

    def loss_fn(out, label):
        return CE(out, label).sum() / 6 + off(out, NUMBERS).square().sum() * 3 / 8 \
            + out.square().sum()

    same = of_gluon(x, mod, CLASSES, loss_fn)
    assert sensitivities(view) == pytest.approx(sensitivities(same), rel=0.02)
    out = nd.array(output(mod))
    shown = CE(out, CLASSES).mean() + off(out, NUMBERS).square().mean() / 2 + out.square().mean()
    assert view.losses == pytest.approx([float(shown.asscalar())], rel=0.01)


def test_xray_reports_labels_that_the_module_does_not_name(tmp_path):
    x, path = scores(), str(tmp_path / "net")
    heads = S.Group([S.SoftmaxOutput(x, name="near"), S.LinearRegressionOutput(x, name="far")])
    labels = {"near_label": CLASSES, "far_label": NUMBERS}
    of_module(heads, labels)[1].save_checkpoint(path, 0)
    mod = amp.Module.load(path, 0, label_names=["near_label"])
    with pytest.warns(UserWarning, match="far_label"):
        mod.bind([("data", DATA.shape)], [(name, label.shape) for name, label in labels.items()])
    with pytest.raises(ValueError, match=r"label_names= to Module\. Missing: far_label"):
        amp.xray(mod, [mx.io.DataBatch([DATA], [CLASSES])])
