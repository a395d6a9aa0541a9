"""`gpu_trace`: reports of GPU calls."""
import json

import gluon_amp as amp
import networks
import numpy as np
import pytest
from gluon_amp.tools import cli
from mxnet import gluon


def net_and_data(name):
    make, inputs = networks.OTHERS[name]
    net = make()
    net.initialize()
    data = inputs(np.random.default_rng(0))
    net(*data)
    return net, data


def test_trace_reports_products_casts_and_copies():
    net, data = net_and_data("encoder")
    trace = amp.gpu_trace(net, data)
    facts = trace.facts()
    assert facts["step"]["all"]["copies to the host"] == 1
    assert facts["step"]["all"]["sums in float16"] == facts["step"]["update"]["casts"] == 0
    assert facts["float32"]["all"]["on Tensor Cores"] == 0 < facts["step"]["all"]["on Tensor Cores"]
    assert {(p["call"], p["not on Tensor Cores"]) for p in facts["products"]} == {
        ("cublasGemmEx", ""), ("cublasGemmStridedBatchedEx", ""),
        ("cublasSgemmStridedBatched", "its factors are float")}
    assert facts["refused"] == []
    assert not net._active  # it is not modified


def test_trace_of_converted_network_has_its_policy_and_kept_blocks():
    net, data = net_and_data("encoder")
    amp.convert(net, "mixed_float16", keep=[net.ffn1])
    net(*data)
    trace = amp.gpu_trace(net, data)
    assert trace.policy.name == "mixed_float16"
    kept = [p for p in trace.products() if p["call"] == "cublasSgemmEx"]
    assert {p["part"] for p in kept} == {"forward", "backward"}


def test_recurrent_layers_are_reported_off_tensor_cores():
    text = str(amp.gpu_trace(*net_and_data("lstm")))
    assert "no: MXNet requests cuDNN's default math" in text


def test_sums_in_float16_are_reported():
    class Biased(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.bias = self.params.get("bias", shape=(1, 8))
            self.dense = gluon.nn.Dense(8, in_units=8)

        def hybrid_forward(self, F, x, bias):
            return F.broadcast_add(self.dense(x), bias)

    net = Biased()
    net.initialize()
    trace = amp.gpu_trace(net, networks.floats(4, 8)(np.random.default_rng(0)))
    assert trace.step.counts()["sums in float16"] == 1
    assert "Sums in float16" in str(trace)


def test_doctor_prints_trace_of_zoo_network(capsys):
    assert cli.main(["doctor", "--gpu-trace", "squeezenet1.1", "--batch-size", "2"]) == 0
    assert "on Tensor Cores" in capsys.readouterr().out
    assert cli.main(["doctor", "--gpu-trace", "squeezenet1.1", "--batch-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compute capability"] == 7.0


def test_cpu_only_policy_is_refused():
    with pytest.raises(ValueError, match="mixed_bfloat16 runs on CPUs only"):
        amp.gpu_trace(*net_and_data("lstm"), policy="mixed_bfloat16")
