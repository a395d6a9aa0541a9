"""The statistics of Monitor on a GPU are those of the same tensors in host memory, and a CPU and a
GPU are compared by `gluon-amp diff`."""
import json
import math

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.formats import FORMATS
from gluon_amp.inspection.hooks import Statistics
from gluon_amp.inspection.tensors import Counts
from mxnet import autograd
from mxnet.gluon import nn

GPU = mx.gpu(0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("what", ["normal", "subnormal", "infinite", "nan", "zero", "one"])
def test_statistics_match_those_in_host_memory(dtype, what, rng):
    values = rng.standard_normal((5, 700)).astype("float32")
    tiny = 3e-6 if dtype == "float16" else 1e-39
    values[:2] = {"subnormal": tiny, "zero": 0}.get(what, values[:2])
    values[0, :7] = {"infinite": math.inf, "nan": math.nan}.get(what, values[0, :7])
    values[0, 7] = {"infinite": -math.inf}.get(what, values[0, 7])
    values = values[:1, :1] if what == "one" else values
    array = mx.nd.array(values, dtype=dtype, ctx=GPU)
    measure = Statistics()
    found, = measure.results([measure.read(array, dtype)])
    expected = Counts.of_array(array.asnumpy())
    subnormal = expected.shares(FORMATS[dtype])["subnormal"] * expected.numbers
    assert (found.numbers, found.zero, found.subnormal, found.infinite, found.nan) == (
        expected.numbers, expected.zero, round(subnormal), expected.infinite, expected.nan)
    if what in ("infinite", "nan"):
        assert found.largest is None
        assert not math.isfinite(found.squares)
    else:
        assert found.largest == (expected.range[1] if expected.range else None)
        assert found.squares == pytest.approx(expected.squares, rel=1e-5)


def test_statistics_in_numpy_mode():
    with mx.util.np_shape(), mx.util.np_array():
        for shape in ((), (2, 3)):
            array = mx.np.full(shape, 3.0, ctx=GPU).as_nd_ndarray()
            measure = Statistics()
            found, = measure.results([measure.read(array, "float32")])
            assert (found.squares, found.largest) == (9.0 * found.numbers, 1)


def test_more_tensors_than_rows_are_read(rng):
    arrays = [mx.nd.full((3,), i, ctx=GPU) for i in range(1, 1030)]
    measure = Statistics()
    found = measure.results([measure.read(array, "float32") for array in arrays])
    assert [one.squares for one in found] == [3.0 * i * i for i in range(1, 1030)]
    assert [one.largest for one in found] == [int(np.log2(i)) for i in range(1, 1030)]


def train(path, policy, context, **monitor):
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=6, activation="relu"), nn.Dense(4, in_units=8))
    net.initialize(mx.init.Xavier())
    net.collect_params().reset_ctx(context)
    amp.convert(net, policy)
    net.hybridize()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=8.0)
    data = mx.nd.array(np.random.RandomState(0).randn(5, 6), ctx=context)
    with amp.Monitor(net, trainer, path, 1, **monitor) as monitor:
        for _ in range(2):
            with autograd.record():
                loss = (net(data) ** 2).mean()
            trainer.backward(loss)
            trainer.step(1)
            monitor.step()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_a_gpu_have_the_fields_of_a_cpu(tmp_path):
    cpu, gpu = (train(tmp_path / name, "float16", context, layers=".*fwd")
                for name, context in (("cpu", mx.cpu()), ("gpu", GPU)))
    on_cpu = {(line["step"], line["node"], line["tensor"]): line for line in cpu}
    assert len(on_cpu) == len(gpu) > 10
    for line in gpu:
        other = on_cpu[line["step"], line["node"], line["tensor"]]
        assert line.keys() == other.keys()
        assert line["rms"] == pytest.approx(other["rms"], rel=2e-2)
        assert line["largest"] == other["largest"]
        assert line["least"] is line["underflow"] is line["bins"] is None
        for key in ("kind", "format", "numbers", "nan", "overflow"):
            assert line[key] == other[key], key
