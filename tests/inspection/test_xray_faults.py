"""Faults that an X-ray reports, and no false positives: masks, zeros, branches."""

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp.tools.types import types
from mxnet import nd
from mxnet.gluon import nn
from trainers import with_trainer
from xray_networks import LOSS, calling, check_mended, layers, named

pytestmark = pytest.mark.numpy


def batches(*shape):
    rng = np.random.default_rng(1)
    return [(nd.array(rng.standard_normal((8, *shape))), nd.arange(8) % 4) for _ in range(2)]


def additive_mask(F, scores, later):
    return F.broadcast_add(scores, later * -1e4)


def where_mask(F, scores, later):
    infinite = F.ones_like(scores) * -np.inf
    return F.where(F.broadcast_add(later, F.zeros_like(scores)), infinite, scores)


@pytest.mark.parametrize("mask", [additive_mask, where_mask])
def test_attention_mask_is_no_false_positive(mask):
    """Masked values have no gradients, and softmax maps minus infinity to 0."""
    def forward(F, x, qkv, out):
        q, k, v = F.split(qkv(x), num_outputs=3, axis=-1)
        place = F.arange(0, 12)
        later = F.broadcast_greater(F.reshape(place, (1, 1, -1)), F.reshape(place, (1, -1, 1)))
        scores = mask(F, F.batch_dot(q, k, transpose_b=True) * 0.25, later)
        return out(F.batch_dot(F.softmax(scores), v))
    net = calling(forward, *layers(48, flatten=False), nn.Dense(4))
    view = amp.xray(net, batches(12, 16), LOSS)
    assert (view.findings, view.keep, view.first_overflow) == ([], [], None)
    assert view.window.low <= view.window.high
    assert amp.explain(net, batches(12, 16)[0], LOSS).first_overflow is None


def test_overflow_of_fully_masked_rows_blames_mask():
    def forward(F, x, dense, out):
        h = dense(x)
        return out(F.softmax(F.where((h > 100).astype("float32"), h, F.ones_like(h) * -np.inf)))
    net = calling(forward, *layers(8, 4))
    blamed = amp.explain(net, batches(6)[0], LOSS).first_overflow.node
    assert "where" in blamed or "scalar" in blamed


def scaled(x, *factors, F=None):
    """x, multiplied by each factor, or its gradient with F."""
    for factor in factors:
        x = F.contrib.gradientmultiplier(x, scalar=factor) if F else x * factor
    return x


def log_of_a_cube(F, x, dense, out):
    p = F.sigmoid(dense(x)) * 1e-3
    return out(F.log(p * p * p) * 0.1)


# the network, the node of the first finding, its reason, the factor of the loss
FAULTS = {
    "log of an input that vanishes": (log_of_a_cube, "net__mul1", "range below", 1),
    "log of a difference that cancels": (
        lambda F, x, dense, out: out(F.log(1 - F.sigmoid(F.relu(dense(x)) * 2 + 9)) * 0.1),
        None, "cancellation", 1),
    "growing values": (lambda F, x, dense, out: out(scaled(dense(x), *[4] * 22, 2.0 ** -44)),
                       None, "range above, by a constant", 1),
    # they overflow at the smallest loss scale, and no other gradient needs a larger one
    "growing gradients": (lambda F, x, dense, out: out(scaled(dense(x), *[64] * 4, F=F)),
                          None, "range above, by a constant", 2.0 ** 36),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_keep_mends_it(fault):
    forward, node, reason, factor = FAULTS[fault]

    def loss_fn(output, label):
        return LOSS(output, label) * factor
    net = calling(forward, *layers(8, 4))
    view = amp.xray(net, batches(6), loss_fn)
    assert reason in {finding.reason for finding in view.findings}
    assert node is None or view.findings[0].node == named(node)
    assert not any("suit" in note for note in view.notes)
    check_mended(net, view, batches(6), loss_fn)


def quantized(F, x, dense, out):
    h = dense(x)
    return out(h + F.BlockGrad(F.round(h * 16) / 16 - h))


def without_gradient(F, x, dense, out):
    h = dense(x)
    return out(F.exp(h + F.BlockGrad(h * 1e-3 + 300) * 1e-4))


def masked_in_one_batch(F, x, dense, out):
    return out(F.softmax(dense(x) + (x > 3) * -3e4))


def masked_near_the_limit(F, x, dense, out):
    return out(F.softmax(dense(x) + (x > 0) * -5e4))


@pytest.mark.parametrize("forward", [quantized, without_gradient, masked_in_one_batch,
                                     masked_near_the_limit])
def test_network_without_a_fault_has_no_finding(forward):
    given = batches(6)
    given[0][0][2, 3] = 9.0  # the other batch is below 3
    assert given[1][0].max().asnumpy() < 3
    view = amp.xray(calling(forward, *layers(6, 4)), given, LOSS)
    assert view.findings == []
    assert not any("largest number" in note for note in view.notes)


def test_zeros_with_large_gradients_are_not_counted_as_rounded():
    """The mean of a fully masked row."""
    def forward(F, x, mask, dense, out):
        h = F.batch_dot(F.expand_dims(mask, 1), dense(x))
        return out(F.broadcast_div(h, mask.sum(axis=1).reshape((-1, 1, 1)) + 1e-2))
    masks = nd.array(np.random.default_rng(0).random((8, 5)) < 0.5)
    masks[3] = 0
    given = [(data, masks, label) for data, label in batches(5, 6)]
    net = calling(forward, *layers(8, flatten=False), nn.Dense(4))
    assert amp.xray(net, given, LOSS).findings == []


def test_only_the_first_cause_is_blamed():
    """Not nodes after an infinity behind a norm, nor the cast that rounds a gradient."""
    def infinite(F, x, dense, norm, out):
        return out(F.relu(norm(dense(x * F.ones_like(x) * 1e5))))

    def rounded(F, x, dense, out, side):
        return out(dense(x)) + F.contrib.gradientmultiplier(side(x), scalar=1e-12)
    dense, out = layers(8, 4)
    net = calling(infinite, dense, nn.LayerNorm(in_channels=8, prefix="net_norm_"), out)
    assert [finding.node for finding in amp.xray(net, batches(6), LOSS).findings] == [
        named("net__mulscalar0")]
    net = calling(rounded, *layers(8, 4, 4))
    view = amp.xray(net, batches(6), LOSS)
    assert view.findings[0].node == "net_gradientmultiplier0"
    assert {finding.node for finding in view.findings} <= {row.node for row in types(net)}


def test_operand_of_a_sum_moves_the_loss_as_the_sum_does():
    """Its gradient, which is not counted, is that of the sum."""
    def forward(F, x, dense, out):
        h = dense(x)
        large = F.ones_like(h) * 300
        return out(F.exp(F.elemwise_add(F.elemwise_add(h, large), -large)))
    view = amp.xray(calling(forward, *layers(8, 4)), batches(6), LOSS, reference=False)
    assert view.findings[0].node == "net_elemwise_add0"
    assert view.findings[0].reason == "small errors move the loss"


def test_advice_is_given_after_the_trainer_stops():
    def forward(F, x, dense, out):
        h = dense(x) * 2.0 ** 12
        return out(h * h * 2.0 ** -24)
    net, trainer = with_trainer(calling(forward, *layers(8, 4)), "sgd", loss_scale="dynamic")
    view = amp.xray(net, batches(6) * 10, LOSS, trainer)
    assert "because the trainer has stopped" in str(view)
    assert len(view.steps) < 20
    assert view.findings[0].node == named("net__mul0")


@pytest.mark.parametrize("trained", [False, True])
def test_gradient_infinite_at_any_scale_blames_rounded_cosine(trained):
    """The cosine is 0.9999. In float16 it is 1, where the derivative of the root is infinite."""
    def forward(F, x, dense, out):
        cosine = dense(x)
        return out(F.sqrt(1 - cosine ** 2))
    net = calling(forward, *layers(1, 4))
    net(nd.ones((4, 2)))
    net.collect_params()["net_dense0_weight"].set_data(nd.array([[0.8, 0.5999]]))
    given = [(nd.array([[0.8, 0.5999]] * 4), nd.array([0, 1, 2, 3]))]
    trainer = amp.Trainer(net.collect_params(), "sgd") if trained else None
    view = amp.xray(net, given, LOSS, trainer)
    finding = view.findings[0]
    assert finding.node == named("net_sqrt0")
    assert (finding.reason, finding.severity) == ("cancellation", "error")
    assert "net_dense0" in view.keep
    assert view.verdict.startswith("Training raises LossScaleError, because gradients are not "
                                   "finite at any loss scale")
    assert "the loss scales are those of the network after keep=" in view.notes
    check_mended(net, view, given)


def test_gradients_that_fit_no_loss_scale_are_reported():
    """A row of zeros: epsilon keeps its norm finite in the forward pass, not its gradient."""
    def forward(F, x, dense, out):
        h = F.relu(dense(x))
        return out(F.broadcast_div(h, F.sqrt(F.sum(h * h, axis=1, keepdims=True) + 1e-10)))

    def large(output, label):
        return LOSS(output, label) * 2.0 ** 14
    given = [(nd.concat(data[:7], nd.zeros((1, 6)), dim=0), label) for data, label in batches(6)]
    view = amp.xray(calling(forward, *layers(8, 4)), given, large)
    assert view.findings[0].node == "net_broadcast_div0"
    assert "that of the training ends at 2^-14" in view.findings[0].detail
    assert view.window.high > 100 / 2 ** 14  # of the network with what is kept
    assert "alternatively, without keep=: gradients need a loss scale of " in str(view)
    again = calling(forward, *layers(8, 4))
    again(given[0][0])
    assert not amp.xray(amp.convert(again, keep=view.keep), given, large).findings


# ---- float32 nodes whose output is cast back to float16


def with_a_large_norm():
    dense, out = layers(8, 4)
    norm = nn.LayerNorm(in_channels=8, prefix="net_norm_")
    net = calling(lambda F, x, dense, norm, out: out(norm(dense(x))), dense, norm, out)
    norm.gamma.set_data(nd.ones(8) * 1e5)
    return net


def with_a_large_product():
    def forward(F, x, dense, out):
        h = F.expand_dims(dense(x) * 1000, 1)
        return out(F.reshape(F.batch_dot(h, h, transpose_a=True), (0, -1)))
    return calling(forward, *layers(8, 4))


@pytest.mark.parametrize(("make", "node", "block"), [
    (with_a_large_norm, "net_norm_layernorm0", "net_norm"),
    (with_a_large_product, "net_batch_dot0", "net_batch_dot0")])
@pytest.mark.parametrize("is_kept", [False, True])
def test_kept_node_with_output_cast_back_keeps_consumer_too(make, node, block, is_kept):
    net = make()
    net(batches(6)[0][0])
    if is_kept:
        amp.convert(net, keep=block)
    view = amp.xray(net, batches(6), LOSS, reference=False)
    assert view.findings[0].keep == ["net_dense1_fwd" if is_kept else named(node)]
    assert view.keep == [block, "net_dense1"]
    assert not any("suit" in note for note in view.notes)
