"""The loss that an X-ray shows of a Module, and what roundings are worth in it: those of the same
network in Gluon, whose loss is written out."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import nd
from mxnet import symbol as S

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
    """From the scores of two classes each."""
    return CE(nd.transpose(out.reshape((6, 2, 2)), (0, 2, 1)).reshape((-1, 2)),
              label.reshape(-1)).reshape((6, 2))


# name: (the head, its label, the loss whose gradient it begins, and the one that is shown if that
# is another)
HEADS = {
    "softmax": (lambda x: S.SoftmaxOutput(x, name="head"), CLASSES, CE, None),
    "a share of it": (lambda x: S.SoftmaxOutput(x, name="head", grad_scale=0.25,
                                                normalization="batch"),
                      CLASSES, lambda out, label: CE(out, label) / 24, CE),
    "some ignored": (lambda x: S.SoftmaxOutput(x, name="head", use_ignore=True, ignore_label=2),
                     CLASSES, lambda out, label: CE(out, label) * (label != 2), None),
    "labels turned round": (
        lambda x: S.SoftmaxOutput(x, S.reverse(S.var("head_label"), axis=0), name="head"),
        CLASSES, lambda out, label: CE(out, label[::-1]), None),
    "shares as labels": (lambda x: S.SoftmaxOutput(x, name="head"), nd.softmax(NUMBERS),
                         mx.gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False), None),
    "places": (lambda x: S.SoftmaxOutput(x.reshape((6, 2, 2)), name="head", multi_output=True),
               nd.array(rng.integers(0, 2, (6, 2))),
               lambda out, label: of_two(out, label) / 2, of_two),
    "squares": (lambda x: S.LinearRegressionOutput(x, name="head"), NUMBERS,
                lambda out, label: off(out, label).square() / 8,
                lambda out, label: off(out, label).square() / 2),
    "distances": (lambda x: S.MAERegressionOutput(x, name="head"), NUMBERS,
                  lambda out, label: off(out, label).abs() / 4,
                  lambda out, label: off(out, label).abs()),
    "two classes": (lambda x: S.LogisticRegressionOutput(x, name="head"), NUMBERS > 0,
                    mx.gluon.loss.SigmoidBinaryCrossEntropyLoss(), None),
    "hinges": (lambda x: S.SVMOutput(x, name="head", use_linear=True), CLASSES, hinge, None),
    "squared hinges": (lambda x: S.SVMOutput(x, name="head", regularization_coefficient=0.5),
                       CLASSES, lambda out, label: hinge(out, label).square() / 2,
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


def worths(view):
    return {t.key.node: np.mean(t.worths) for t in view.tensors if t.key.node in ("fc1", "fc2")
            if t.worths}


@pytest.mark.parametrize("name", HEADS)
def test_a_heads_loss_is_that_whose_gradient_it_begins(name):
    head, label, loss_fn, shown = HEADS[name]
    view, mod = of_module(head(scores()), {"head_label": label})
    right = of_gluon(scores(), mod, label, loss_fn)
    assert worths(right)
    assert worths(view) == pytest.approx(worths(right), rel=0.02)
    wanted = (shown or loss_fn)(nd.array(output(mod)), label)
    if name == "two classes":
        wanted = wanted.mean(axis=0)
    assert view.losses == pytest.approx([float(wanted.mean().asscalar())], rel=0.01)


def output(mod):
    """What the head reads."""
    values, _ = mod.get_params()
    weights = {name: a.astype("float32").asnumpy() for name, a in values.items()}
    hidden = np.tanh(DATA.asnumpy() @ weights["fc1_weight"].T + weights["fc1_bias"])
    return hidden @ weights["fc2_weight"].T + weights["fc2_bias"]


def test_all_heads_of_a_module_count_each_with_its_own_label():
    x = scores()
    heads = S.Group([S.BlockGrad(S.slice_axis(x, axis=1, begin=0, end=2), name="to_look_at"),
                     S.LinearRegressionOutput(x, name="far", grad_scale=3),
                     S.MakeLoss(x.square(), name="small"),
                     S.SoftmaxOutput(x, name="near", normalization="batch")])
    view, mod = of_module(heads, {"near_label": CLASSES, "far_label": NUMBERS})

    def loss_fn(out, label):
        return CE(out, label).sum() / 6 + off(out, NUMBERS).square().sum() * 3 / 8 \
            + out.square().sum()

    assert worths(view) == pytest.approx(worths(of_gluon(x, mod, CLASSES, loss_fn)), rel=0.02)
    out = nd.array(output(mod))
    shown = CE(out, CLASSES).mean() + off(out, NUMBERS).square().mean() / 2 + out.square().mean()
    assert view.losses == pytest.approx([float(shown.asscalar())], rel=0.01)
