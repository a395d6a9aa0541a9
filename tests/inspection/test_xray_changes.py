"""Changes that an X-ray advises: each removes its finding when it is written into the network."""

import json
import re
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.inspection.render import page
from mxnet import gluon, nd
from mxnet.gluon import nn
from xray_networks import LOSS, calling, layers

BARE = amp.Policy("bare", "float16", "float16", norm="float16", sensitive="float16")
L2 = gluon.loss.L2Loss()


def batches(*shape, factor=1.0, shift=0.0):
    rng = np.random.default_rng(1)
    return [(nd.array(rng.standard_normal((8, *shape)) * factor + shift), nd.arange(8) % 4)
            for _ in range(2)]


def itself(output, label):
    return output


# ---- networks with a fault, and the same as the advice says

def attention(mended, after=1, size=150, masked=False):
    """Queries and keys are as large as in a network without norms."""
    def forward(F, x, qkv, out):
        q, k, v = F.split(qkv(x) * size, num_outputs=3, axis=-1)
        first, last = (after if mended else 1), (1 if mended else after)
        temperature = None
        if mended and after == 1:
            first = temperature = 64
        scores = F.batch_dot(q / first, k, transpose_b=True) / last
        if masked:
            scores = F.where(F.broadcast_greater(x[:, :, :12], F.ones((1, 1, 1)) * 3),
                             F.ones((8, 12, 12)) * -1e4, scores)
        weights = F.softmax(scores, temperature=temperature and 1 / temperature)
        return out(F.batch_dot(weights, v / size))
    return calling(forward, *layers(48, flatten=False), nn.Dense(4)), batches(12, 16), LOSS


def numpy_attention(mended):
    def forward(F, x, qkv, out):
        q, k, v = F.np.split(qkv(x) * 150, 3, axis=-1)
        by = 64 if mended else 1
        scores = F.np.matmul(q / by, F.np.transpose(k, (0, 2, 1)))
        return out(F.np.matmul(F.npx.softmax(scores, temperature=1 / by), v / 150))
    given = [tuple(a.as_np_ndarray() for a in batch) for batch in batches(12, 16)]
    return calling(forward, *layers(48, flatten=False), nn.Dense(4)), given, LOSS


def log_softmax(mended):
    def forward(F, x, dense, out):
        p = F.log_softmax(dense(x) * (3000 / 64 if mended else 3000) * 30,
                          temperature=1 / 64 if mended else None)
        return out(p * 1e-5)
    return calling(forward, *layers(8, 4)), batches(6), LOSS


def summed(mended, policy=BARE):
    def forward(F, x, dense, out):
        h = F.relu(dense(x)) * 900
        return out(F.mean(h, axis=1) if mended else F.sum(h, axis=1) / 600)
    net = calling(forward, *layers(8, 4, flatten=False))
    return amp.convert(net, policy), batches(600, 6), LOSS


def numpy_summed(mended):
    def forward(F, x, dense, out):
        h = F.npx.relu(dense(x)) * 900
        return out(F.np.mean(h, axis=1) if mended else F.np.sum(h, axis=1) / 600)
    net = calling(forward, *layers(8, 4, flatten=False))
    given = [tuple(a.as_np_ndarray() for a in batch) for batch in batches(600, 6)]
    return amp.convert(net, BARE), given, LOSS


def masked_mean(mended):
    def forward(F, x, dense, out):
        h, mask = F.relu(dense(x)) * 900, F.ones((8, 600, 1))
        total = F.mean if mended else F.sum
        return out(F.broadcast_div(total(F.broadcast_mul(h, mask), axis=1), total(mask, axis=1)))
    net = calling(forward, *layers(8, 4, flatten=False))
    return amp.convert(net, BARE), batches(600, 6), LOSS


def summed_loss(mended):
    """The loss is in the network: the squares of 4000 numbers of about 10."""
    def forward(F, x, dense):
        squares = F.square(dense(x) * 5)
        return F.mean(squares, axis=(1, 2)) if mended else F.sum(squares, axis=(1, 2))
    return amp.convert(calling(forward, nn.Dense(8, flatten=False)), BARE), batches(500, 6), itself


def up_and_down(mended):
    def forward(F, x, dense, out):
        h = dense(x) * 2.0 ** 12
        return out(h * 2.0 ** -6 if mended else (h * 2.0 ** 8) * 2.0 ** -14)
    return calling(forward, *layers(8, 4)), batches(6), LOSS


def root_mean_square(mended):
    def forward(F, x, dense, out):
        h = dense(x) * (1000 / 64 if mended else 1000)
        square = F.mean(h * h, axis=1, keepdims=True)
        return out(F.broadcast_div(h, F.sqrt(square + (1e-6 / 64 ** 2 if mended else 1e-6))))
    return calling(forward, *layers(8, 4)), batches(6), LOSS


def pixels(mended):
    def forward(F, x, dense, out):
        h = F.relu(dense(x))
        return out(h * h)
    rng = np.random.default_rng(0)
    given = [(nd.array(rng.integers(0, 256, (8, 64))), nd.arange(8) % 4) for _ in range(2)]
    return calling(forward, *layers(32, 4)), [((x - 131.3) / 73.95 if mended else x, label)
                                              for x, label in given], LOSS


class Parts(gluon.Block):
    """A plain Block, of which an X-ray sees the parts."""

    def __init__(self):
        super().__init__(prefix="parts_")
        with self.name_scope():
            self.one, self.two = nn.Dense(8, in_units=6), nn.Dense(4, in_units=8)

    def forward(self, x):
        return self.two(self.one(x))


def large_data_of_a_block(mended):
    net = Parts()
    net.initialize(mx.init.Xavier())
    return amp.convert(net), batches(6, factor=1 if mended else 1e6), LOSS


def times(mended):
    """A column of seconds beside one of small numbers."""
    given = batches(2)
    for x, _ in given:
        x[:, 0] = (x[:, 0] if mended else x[:, 0] * 1e5 + 1.7e9)
    return calling(lambda F, x, dense, out: out(F.relu(dense(x))), *layers(8, 4)), given, LOSS


def unit_length(mended):
    """A row is 0: the gradient of its length is 1 over the root of epsilon."""
    def forward(F, x, dense, out):
        h = F.relu(dense(x))
        square = F.sum(h * h, axis=1, keepdims=True)
        return out(F.broadcast_div(h, F.sqrt(square + (1e-6 if mended else 1e-10))))
    given = [(nd.concat(x[:7], nd.zeros((1, 6)), dim=0), label) for x, label in batches(6)]
    return calling(forward, *layers(8, 4)), given, LOSS


def distant_labels(mended):
    rng = np.random.default_rng(2)
    given = [(x, nd.array(rng.normal(0, 1, (8, 1)) * (1 if mended else 1e3) + (
        0 if mended else 5e4))) for x, _ in batches(6)]
    return calling(lambda F, x, dense, out: out(F.relu(dense(x))), *layers(8, 1)), given, L2


def summed_pixels(mended):
    def loss_fn(output, label):
        loss = ((output - label) ** 2).sum(axis=(1, 2, 3))
        return loss / 128 if mended else loss
    rng = np.random.default_rng(3)
    given = [(nd.array(rng.normal(size=(2, 3, 200, 200))),
              nd.array(rng.integers(0, 2, (2, 1, 200, 200)) * 8)) for _ in range(2)]
    net = calling(lambda F, x, one, two: two(F.relu(one(x))), nn.Conv2D(4, 3, padding=1),
                  nn.Conv2D(1, 1))
    return net, given, loss_fn


NUMPY = ("numpy_attention", "numpy_summed", "healthy_numpy_attention")
CHANGES = {
    attention: ("divide earlier", "by 64 before net_batch_dot0, and pass temperature=2**-6"),
    numpy_attention: ("divide earlier", "by 64 before net_matmul0, and pass temperature=2**-6"),
    log_softmax: ("divide earlier", "temperature=2**-"),
    summed: ("mean", "take the mean instead of the sum in net_sum0, which divides by 600, and "
             "leave out the factor of net__divscalar0"),
    numpy_summed: ("mean", "in net_sum0, which divides by 600, and leave out the factor of "),
    masked_mean: ("mean", "which divides by 600, and multiply the divisor of net_broadcast_div0"),
    summed_loss: ("mean", "take the mean instead of the sum in net_sum0, which divides by 4000"),
    up_and_down: ("divide earlier", "and leave out the factor of net__mulscalar2"),
    root_mean_square: ("divide earlier", "divide net__mulscalar0 by 64 before net__mul0 and all"),
    pixels: ("normalize data", "normalize the input data: (data - 131.3) / 73.95"),
    large_data_of_a_block: ("normalize data", "normalize the input parts_dense0_data: (parts"),
    times: ("normalize data", "subtract the mean of each column"),
    unit_length: ("larger epsilon", "use the epsilon 1e-06 instead of 1e-10 in net__plusscalar0"),
    distant_labels: ("normalize labels", "normalize the labels: (label - 4.999e+04) / 938.1"),
    summed_pixels: ("divide the loss", "divide the loss by 128, as a mean instead of a sum does"),
}


@pytest.fixture()
def mode(request):
    make = request.node.callspec.params["make"]
    if make.__name__ in NUMPY:
        mx.npx.set_np()
    return make


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_change_is_advised_and_helps_as_written(make, mode):
    kind, text = CHANGES[make]
    net, given, loss_fn = make(mended=False)
    view = amp.xray(net, given, loss_fn)
    change = next(change for change in view.changes if change.kind == kind)
    assert text in change.text
    assert change.snr > 20
    assert change.kept_snr is None or change.snr > min(change.kept_snr - 6, 40)
    assert change.said in str(view)
    written = page(view)
    for style in re.findall(r'<p class="(\w+)"><span class=tag', written):
        assert re.search(rf"\.{style}\b[^{{}}]*{{[^}}]* --mark:", written), style
    assert json.loads(json.dumps(change.saved(), allow_nan=False))["text"] == change.text
    net, given, loss_fn = make(mended=True)
    after = amp.xray(net, given, loss_fn)
    assert after.changes == []
    assert not any(finding.remedy or not finding.backward for finding in after.findings)
    assert after.goes_forward
    if change.factor is not None:
        np.testing.assert_allclose(
            after.reference_losses, np.multiply(view.reference_losses, change.factor), rtol=2e-3)


# ---- faults that no change removes, and networks without faults

def exponent(F, x, dense, out):
    return out(F.exp(dense(x) * 2 + 11))


def before_a_sigmoid(F, x, dense, out):
    """Nothing takes a factor back."""
    return out(F.sigmoid(dense(x) * 3e4 * 10))


def logarithm(F, x, dense, out):
    """A larger epsilon would change what the logarithm of 1e-9 is."""
    return out(F.log(1 - F.sigmoid(F.relu(dense(x)) * 2 + 9) + 1e-12) * 0.1)


def words(F, x, table, dense, out):
    h = dense(F.mean(table(x), axis=1)) * 3e4
    return out(F.sigmoid(h * 3e4))


def offset(F, x, dense, out):
    """Normalized data would cancel as well."""
    return out((dense(x) + 3e3) - 3e3)


NOT_HELPED = {
    "an exponent": (lambda: calling(exponent, *layers(8, 4)), lambda: batches(6)),
    "a sigmoid": (lambda: calling(before_a_sigmoid, *layers(8, 4)), lambda: batches(6)),
    "an epsilon that matters": (lambda: calling(logarithm, *layers(8, 4)), lambda: batches(6)),
    "cancellation": (lambda: calling(offset, *layers(8, 4)), lambda: batches(6, factor=30)),
    "words as data": (
        lambda: calling(words, nn.Embedding(200, 6), *layers(8, 4)),
        lambda: [(nd.array(np.random.default_rng(0).integers(0, 200, (8, 5))), nd.arange(8) % 4)]),
}


@pytest.mark.parametrize("name", NOT_HELPED)
def test_fault_whose_cause_stays_has_keep_alone(name):
    make, give = NOT_HELPED[name]
    view = amp.xray(make(), give(), LOSS)
    assert view.findings
    assert view.keep
    assert view.changes == []
    assert not any(finding.change for finding in view.findings)


def healthy_attention():
    net, given, loss_fn = attention(False, after=4, size=1)
    return net, given, loss_fn


def healthy_pixels():
    net = calling(lambda F, x, dense, out: out(F.relu(dense(x))), *layers(8, 4))
    return net, batches(6, factor=70, shift=128), LOSS


def healthy_length():
    def forward(F, x, dense, out):
        h = F.relu(dense(x)) + 0.1
        return out(F.broadcast_div(h, F.sqrt(F.sum(h * h, axis=1, keepdims=True) + 1e-10)))
    return calling(forward, *layers(8, 4)), batches(6), LOSS


def healthy_sum():
    return summed(False, "float16")


def healthy_numpy_attention():
    def forward(F, x, qkv, out):
        q, k, v = F.np.split(qkv(x), 3, axis=-1)
        scores = F.np.matmul(q, F.np.transpose(k, (0, 2, 1))) / 4
        return out(F.np.matmul(F.npx.softmax(scores), v))
    given = [tuple(a.as_np_ndarray() for a in batch) for batch in batches(12, 16)]
    return calling(forward, *layers(48, flatten=False), nn.Dense(4)), given, LOSS


@pytest.mark.parametrize("make", [healthy_attention, healthy_pixels, healthy_length, healthy_sum,
                                  healthy_numpy_attention], ids=lambda make: make.__name__)
def test_healthy_network_has_no_changes(make, mode):
    view = amp.xray(*make())
    assert (view.findings, view.changes) == ([], [])


def test_labels_that_are_classes_are_not_normalized():
    net = calling(lambda F, x, dense, out: out(dense(x)), *layers(8, 4000))
    given = [(x, nd.array(np.random.default_rng(0).integers(0, 4000, 8))) for x, _ in batches(6)]
    view = amp.xray(net, given, lambda output, label: LOSS(output, label) * 2e6)
    assert [change.kind for change in view.changes] == ["divide the loss", "loss scale"]


# ---- loss scales

def regression(factor, loss_scale, trainer=amp.Trainer):
    net = calling(lambda F, x, dense, out: out(F.relu(dense(x))), *layers(32, 1))
    given = [(x, x[:, :1]) for x, _ in batches(10)]
    net(given[0][0])
    options = {} if trainer is gluon.Trainer else {"loss_scale": loss_scale}
    trained = trainer(net.collect_params(), "sgd", {"learning_rate": 1e-9,
                                                    "multi_precision": True}, **options)
    return amp.xray(net, given, lambda output, label: L2(output, label) * factor, trained)


@pytest.mark.parametrize(("factor", "loss_scale", "trainer", "text"), [
    (2e-7, None, amp.Trainer, 'use loss_scale="dynamic", or a static one such as 2**'),
    (2e-7, 2.0, amp.Trainer, 'use loss_scale="dynamic", or a static one such as 2**'),
    (2e-7, None, gluon.Trainer, 'use loss_scale="dynamic", or a static one such as 2**'),
    (1.0, 2.0 ** 19, amp.Trainer, 'use loss_scale="dynamic", or a static one such as 2**'),
    (2e-14, "dynamic", amp.Trainer, "use amp.DynamicLossScale(2**"),
    (2e6, "dynamic", amp.Trainer, "use amp.DynamicLossScale(2**-")])
def test_loss_scale_that_suffices_is_advised(factor, loss_scale, trainer, text):
    view = regression(factor, loss_scale, trainer)
    change = next(change for change in view.changes if change.kind == "loss scale")
    assert change.text.startswith(text)
    assert change.snr > 40
    made = change.text.rsplit(" ", 1)[1] if "static" in text else \
        change.text.replace("use ", "")
    again = regression(factor, eval(made, {"amp": amp}))
    assert (again.changes, again.severity in ("good", "warning")) == ([], True)


@pytest.mark.parametrize(("factor", "loss_scale"), [
    (1.0, None), (1.0, 2.0 ** 8), (1.0, "dynamic"), (2e-7, 2.0 ** 15), (2e-7, "dynamic")])
def test_loss_scale_that_fits_has_no_change(factor, loss_scale):
    view = regression(factor, loss_scale)
    assert (view.findings, view.changes) == ([], [])


# ---- where it appears

def test_change_is_in_the_files(tmp_path):
    view = amp.xray(*attention(False))
    finding, (change,) = view.findings[0], view.changes
    assert finding.change == change.text
    page = Path(view.save(tmp_path / "xray")).read_text(encoding="utf-8")
    assert f"<span class=tag>Change</span> <b>{change.node}:</b> {change.text} (tried: " \
        in re.sub("</?a[^>]*>", "", page)
    first = json.loads((tmp_path / "xray" / "xray.jsonl").read_text().split("\n")[0])
    assert first["changes"] == [{"kind": "divide earlier", "node": "net_batch_dot0",
                                 "text": change.text, "factor": 1.0, "together": False,
                                 "snr": change.snr, "kept_snr": change.kept_snr}]
    assert first["findings"][0]["change"] == change.text
