"""Files of converted networks: `save_parameters`, `load_parameters`, `export`."""
import json

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from cases import cases
from converting import Net, make, rounded, saved_types, step, types, values
from mxnet import gluon, nd
from mxnet_alone import MXNET_ALONE
from networks import imported
from processes import printed

pytestmark = pytest.mark.numpy


def test_loading_with_types_of_the_file_keeps_those_of_the_parameters(tmp_path):
    path = str(tmp_path / "net.params")
    net = amp.convert(make(networks.Tied))
    words = nd.array(np.arange(24).reshape(4, 6))
    before, kept = net(words).asnumpy(), types(net)
    net.save_parameters(path)
    net.load_parameters(path, cast_dtype=True, dtype_source="saved")
    assert types(net) == kept
    assert np.array_equal(net(words).asnumpy(), before)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_converted_net_saves_files_for_float32_net(deduplicate, tmp_path):
    net = make(networks.Tied)
    words = nd.array(np.arange(24).reshape(4, 6))
    net(words)
    wide = values(net)
    amp.convert(net)
    path = str(tmp_path / "net.params")
    net.save_parameters(path, deduplicate=deduplicate)
    assert saved_types(path) == {"float32"}
    assert len(nd.load(path)) == (4 if deduplicate else 5)
    other = networks.Tied()
    other.load_parameters(path)
    assert set(types(other).values()) == {"float32"}
    expected = rounded(wide)
    assert all(np.array_equal(expected[n], v) for n, v in values(other).items())


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("initialized", [False, True])
def test_converted_net_loads_files_of_float32_net(initialized, deduplicate, tmp_path):
    words = nd.array(np.arange(24).reshape(4, 6))
    source = make(networks.Tied)
    source(words)
    path = str(tmp_path / "net.params")
    source.save_parameters(path, deduplicate=deduplicate)
    net = amp.convert(networks.Tied())
    if initialized:
        net.initialize()
        net(words)
    net.load_parameters(path)
    assert set(types(net).values()) == {"float16"}
    assert {v.dtype for v in values(net).values()} == {np.dtype("float16")}
    assert all(np.array_equal(values(source)[n].astype(np.float16), v)
               for n, v in values(net).items())
    assert net(words).shape == (4, 6, 50)


def test_converted_net_loads_file_of_float16_net(tmp_path, x):
    source = make()
    source.cast("float16")
    source.save_parameters(str(tmp_path / "net.params"))
    net = amp.convert(Net())
    net.load_parameters(str(tmp_path / "net.params"))
    assert {n for n, t in types(net).items() if t == "float32"} \
        == {n for n in types(net) if "batchnorm" in n}
    assert net(x).dtype == np.float32


def test_plain_block_saves_float32(tmp_path, x):
    net = make(networks.Plain)
    amp.convert(net)(x)
    net.save_parameters(str(tmp_path / "net.params"))
    assert saved_types(tmp_path / "net.params") == {"float32"}
    networks.Plain().load_parameters(str(tmp_path / "net.params"))


def cut(path, *_):
    with open(path, "wb") as file:
        file.write(b"half of a file")
    raise OSError("no space left on device")


@pytest.mark.parametrize("write", [
    lambda net, folder: net.save_parameters(str(folder / "net.params")),
    lambda net, folder: net.export(str(folder / "net"))], ids=["save_parameters", "export"])
def test_interrupted_save_leaves_no_truncated_file(write, tmp_path, monkeypatch, x):
    net = amp.convert(make())
    net(x)
    monkeypatch.setattr("mxnet.nd.save", cut)
    with pytest.raises(OSError, match="no space"):
        write(net, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    write(net, tmp_path)
    whole = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr("mxnet.nd.save", cut)
    with pytest.raises(OSError, match="no space"):
        write(net, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == whole


def without_record(path):
    """The text of a symbol's file without the record of the policy, which MXNet ignores."""
    found = json.loads(path.read_text())
    for node in found["nodes"]:
        node.get("attrs", {}).pop("__mixed_precision__", None)
    return json.dumps(found)


LOAD = """
import numpy as np
import sys
import mxnet as mx
folder, numpy_mode = sys.argv[1:]
if numpy_mode == "True":
    mx.npx.set_np()
array = mx.np.array if numpy_mode == "True" else mx.nd.array
net = mx.gluon.SymbolBlock.imports(folder + "/net-symbol.json", ["data"],
                                   folder + "/net-0003.params")
assert {np.dtype(p.dtype).name for p in net.collect_params().values()} == {"float32"}
np.save(folder + "/out.npy", net(array(np.load(folder + "/x.npy"))).asnumpy())
assert "gluon_amp" not in sys.modules
"""


@pytest.mark.parametrize("policy", cases(["float16", "pure_float16"], ["mixed_float16"]))
def test_export_runs_without_gluon_amp(policy, tmp_path, x):
    net = make()
    amp.convert(net, policy, keep=net.output)
    step(net, x)
    out = net(x).asnumpy().astype(np.float32)
    net.export(str(tmp_path / "net"), epoch=3)
    text = without_record(tmp_path / "net-symbol.json")
    assert "gluon_amp" not in text
    assert "amp_cast" not in text
    assert saved_types(tmp_path / "net-0003.params") == {"float32"}
    np.save(str(tmp_path / "x.npy"), x.asnumpy())
    printed(MXNET_ALONE + LOAD, tmp_path, mx.util.is_np_array())
    np.testing.assert_allclose(np.load(str(tmp_path / "out.npy")), out, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("kept", [True, False])
def test_export_of_loop_contains_no_trace_of_gluon_amp(kept, tmp_path, rng):
    net = make(networks.Loop)
    amp.convert(net, keep=[net.cell] * kept)
    net(*networks.OTHERS["loop"][1](rng))
    for remove in (False, True):
        net.export(str(tmp_path / "net"), remove_amp_cast=remove)
        text = without_record(tmp_path / "net-symbol.json")
        assert "gluon_amp" not in text
        assert ("amp_cast" in text) is not (remove or kept)
    inputs = networks.OTHERS["loop"][1](rng)
    wide = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data0", "data1"],
                                     str(tmp_path / "net-0000.params"))
    assert set(types(wide).values()) == {"float32"}
    np.testing.assert_allclose(wide(*inputs)[0].asnumpy(), net(*inputs)[0].asnumpy(),
                               rtol=0.02, atol=0.01)


def test_export_for_gpus_keeps_casts(tmp_path, x):
    net = amp.convert(make())
    net(x)
    net.export(str(tmp_path / "net"), remove_amp_cast=False)
    nodes = json.loads(without_record(tmp_path / "net-symbol.json"))["nodes"]
    assert [n["op"] for n in nodes].count("amp_cast") == 2
    assert not [n for n in nodes if "gluon_amp" in json.dumps(n)]
    kinds = {n: a.dtype for n, a in nd.load(str(tmp_path / "net-0000.params")).items()}
    assert {n for n, t in kinds.items() if t == np.float32} == {n for n in kinds if "norm" in n}


def test_export_before_forward_pass_is_refused_with_remedy(tmp_path):
    with pytest.raises(RuntimeError, match="run net on data once"):
        amp.convert(make(prefix="net_")).export(str(tmp_path / "net"))
    assert not list(tmp_path.iterdir())


def test_convert_refuses_a_symbol_in_mixed_precision_and_takes_its_parameters(tmp_path):
    net = make(lambda: gluon.nn.Dense(3, in_units=4, prefix="fc_"))
    x = nd.ones((2, 4))
    net.hybridize()
    net(x)
    path = str(tmp_path / "wide")
    net.export(path)
    amp.convert(net)
    expected = net(x).asnumpy()
    low = str(tmp_path / "low")
    net.export(low, remove_amp_cast=False)
    block = imported(low)
    with pytest.raises(ValueError, match=r"in mixed precision already\. Valid: its float32 symbol"):
        amp.convert(block)
    assert np.array_equal(block(x).asnumpy(), expected)
    block = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{low}-0000.params")
    amp.convert(block)
    assert np.array_equal(block(x).asnumpy(), expected)
    block.export(str(tmp_path / "again"))
    again = imported(tmp_path / "again")
    assert again(x).dtype == np.float32
