"""Faults that an X-ray reports, and no false positives: masks, zeros, branches."""
import json

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp.formats import FLOAT16
from gluon_amp.inspection.render import lines
from gluon_amp.inspection.saved import read
from mxnet import nd
from mxnet.gluon import nn
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
    assert amp.explain(net, batches(12, 16)[0], LOSS) is None


def test_overflow_of_fully_masked_rows_blames_mask():
    def forward(F, x, dense, out):
        h = dense(x)
        return out(F.softmax(F.where((h > 100).astype("float32"), h, F.ones_like(h) * -np.inf)))
    net = calling(forward, *layers(8, 4))
    blamed = amp.explain(net, batches(6)[0], LOSS).node
    assert "where" in blamed or "scalar" in blamed


def test_log_of_underflowed_input_blames_producer():
    def forward(F, x, dense, out):
        p = F.sigmoid(dense(x)) * 1e-3
        return out(F.log(p * p * p) * 0.1)
    net = calling(forward, *layers(8, 4))
    view = amp.xray(net, batches(6), LOSS)
    assert view.first_overflow.op == "log"
    assert view.findings[0].node == named("net__mul1")
    assert view.findings[0].reason == "range below"
    check_mended(net, view, batches(6))


def test_log_of_cancelled_difference_is_kept_with_its_operands():
    def forward(F, x, dense, out):
        return out(F.log(1 - F.sigmoid(F.relu(dense(x)) * 2 + 9)) * 0.1)
    net = calling(forward, *layers(8, 4))
    view = amp.xray(net, batches(6), LOSS)
    assert view.findings[0].reason == "cancellation"
    check_mended(net, view, batches(6))


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


def test_gradient_rounded_by_cast_blames_node_that_produced_it():
    def forward(F, x, dense, out, side):
        return out(dense(x)) + F.contrib.gradientmultiplier(side(x), scalar=1e-12)
    net = calling(forward, *layers(8, 4, 4))
    net(batches(6)[0][0])
    view = amp.xray(net, batches(6), LOSS)
    assert view.findings[0].node == "net_gradientmultiplier0"
    assert {finding.node for finding in view.findings} <= {row.node for row in amp.types(net)}


def test_nodes_after_infinity_behind_norm_are_not_blamed():
    def forward(F, x, dense, norm, out):
        return out(F.relu(norm(dense(x * F.ones_like(x) * 1e5))))
    dense, out = layers(8, 4)
    net = calling(forward, dense, nn.LayerNorm(in_channels=8, prefix="net_norm_"), out)
    assert [finding.node for finding in amp.xray(net, batches(6), LOSS).findings] == [
        named("net__mulscalar0")]


def test_all_layers_with_growing_values_are_kept():
    def forward(F, x, inner, out):
        x = inner(x)
        for _ in range(22):
            x = x * 4
        return out(x * 2.0 ** -44)
    net = calling(forward, *layers(8, 4))
    view = amp.xray(net, batches(8), LOSS)
    assert view.findings[0].reason == "range above, by a constant"
    assert not any("does not suit" in note for note in view.notes)
    check_mended(net, view, batches(8))


def test_all_layers_with_growing_gradients_are_kept():
    """They overflow at the smallest loss scale, and no other gradient needs a larger one."""
    def forward(F, x, inner, out):
        x = inner(x)
        for _ in range(4):
            x = F.contrib.gradientmultiplier(x, scalar=64)
        return out(x)

    def large(output, label):
        return LOSS(output, label) * 2.0 ** 36
    net = calling(forward, *layers(8, 4))
    view = amp.xray(net, batches(8), large)
    assert "range above, by a constant" in {finding.reason for finding in view.findings}
    check_mended(net, view, batches(8), large)


def test_advice_is_given_after_trainer_stops():
    def forward(F, x, dense, out):
        h = dense(x) * 2.0 ** 12
        return out(h * h * 2.0 ** -24)
    net = calling(forward, *layers(8, 4))
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale="dynamic")
    view = amp.xray(net, batches(6) * 10, LOSS, trainer)
    assert "because the trainer has stopped" in str(view)
    assert len(view.steps) < 20
    assert view.findings[0].node == named("net__mul0")


def test_none_as_batches_is_refused():
    net = calling(lambda F, x, dense, out: out(dense(x)), *layers(8, 4))
    with pytest.raises(TypeError, match=r"list of tuples \(data, label\).*Received: NoneType"):
        amp.xray(net, None, LOSS)


def test_saved_folder_keeps_lost_argument(tmp_path):
    net = calling(lambda F, x, dense, out: out(dense(x)), *layers(8, 4))
    view = amp.xray(net, batches(6), LOSS, steps=1, underflow=0.25)
    (tmp_path / "xray.jsonl").write_text("\n".join(map(json.dumps, lines(view))))
    assert read(str(tmp_path), FLOAT16).underflow == 0.25


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


def test_straight_through_quantizer_is_no_false_positive():
    def forward(F, x, dense, out):
        h = dense(x)
        return out(h + F.BlockGrad(F.round(h * 16) / 16 - h))
    assert amp.xray(calling(forward, *layers(8, 4)), batches(6), LOSS).findings == []


def test_zeros_are_not_counted_as_rounded_despite_large_gradients():
    """Gradients are large where a product is 0: the mean of a fully masked row."""
    def forward(F, x, mask, dense, out):
        h = F.batch_dot(F.expand_dims(mask, 1), dense(x))
        return out(F.broadcast_div(h, mask.sum(axis=1).reshape((-1, 1, 1)) + 1e-2))
    masks = nd.array(np.random.default_rng(0).random((8, 5)) < 0.5)
    masks[3] = 0
    given = [(data, masks, label) for data, label in batches(5, 6)]
    net = calling(forward, *layers(8, flatten=False), nn.Dense(4))
    assert amp.xray(net, given, LOSS).findings == []


# ---- tensors without counted gradients: the gradient of a summand is that of the sum


def test_operand_of_sum_moves_loss_as_sum_does():
    def forward(F, x, dense, out):
        h = dense(x)
        large = F.ones_like(h) * 300
        return out(F.exp(F.elemwise_add(F.elemwise_add(h, large), -large)))
    view = amp.xray(calling(forward, *layers(8, 4)), batches(6), LOSS, reference=False)
    assert view.findings[0].node == "net_elemwise_add0"
    assert view.findings[0].reason == "small errors move the loss"


def test_tensor_without_gradient_does_not_move_loss():
    def forward(F, x, dense, out):
        h = dense(x)
        return out(F.exp(h + F.BlockGrad(h * 1e-3 + 300) * 1e-4))
    assert amp.xray(calling(forward, *layers(8, 4)), batches(6), LOSS).findings == []


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
def test_kept_node_with_output_cast_back_keeps_consumer_too(
        make, node, block, is_kept):
    net = make()
    net(batches(6)[0][0])
    if is_kept:
        amp.convert(net, keep=block)
    view = amp.xray(net, batches(6), LOSS, reference=False)
    assert view.findings[0].keep == ["net_dense1_fwd" if is_kept else named(node)]
    assert view.keep == [block, "net_dense1"]
    assert not any("suit" in note for note in view.notes)
