"""Notes of an X-ray on the cause of a fault: data, labels and sums."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn
from xray_networks import LOSS, calling, layers

pytestmark = pytest.mark.numpy


def batches(*shape, factor=1.0, shift=0.0):
    rng = np.random.default_rng(1)
    return [(nd.array(rng.standard_normal((8, *shape)) * factor + shift), nd.arange(8) % 4)
            for _ in range(2)]


def notes(view, word):
    return [line for line in [*view.notes, *(f.remedy for f in view.findings)] if word in line]


def test_data_that_a_square_makes_too_large_are_noted():
    def forward(F, x, dense, out):
        h = F.relu(dense(x))
        return out(h * h)
    pixels = [(nd.array(np.random.default_rng(0).uniform(0, 255, (8, 300))), y)
              for _, y in batches(1)]
    view = amp.xray(calling(forward, *layers(8, 4)), pixels, LOSS)
    assert view.findings
    assert notes(view, "is not normalized: mean 12")


def test_indices_are_not_normalized():
    net = nn.HybridSequential()
    net.add(nn.Embedding(5000, 8, weight_initializer=mx.init.Constant(7e4)), nn.Dense(4))
    net.initialize()
    ids = [(nd.array(np.random.default_rng(0).integers(0, 5000, (8, 6))), nd.arange(8) % 4)]
    net(ids[0][0])
    view = amp.xray(amp.convert(net), [*ids], LOSS)
    assert notes(view, "normaliz") == []


def test_sum_beyond_the_range_has_its_number_of_elements():
    def forward(F, x, dense, out):
        return out(F.sum(F.relu(dense(x)) * 900, axis=1) / 600)
    net = calling(forward, *layers(8, 4, flatten=False))
    bare = amp.Policy("bare", "float16", "float16", norm="float16", sensitive="float16")
    view = amp.xray(amp.convert(net, bare), batches(600, 6), LOSS)
    assert notes(view, "sum over 600 elements")
