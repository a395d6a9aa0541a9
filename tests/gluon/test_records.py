"""The policy and `keep=` in files: `like=`, and refusals of a network that differs."""
import json
import os
import shutil

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from converting import Net, holding, make, step, types
from modules import prepared
from mxnet import nd
from mxnet.gluon import nn
from mxnet_alone import MXNET_ALONE
from networks import imported
from processes import printed

pytestmark = pytest.mark.numpy

MINE = amp.Policy("mine", compute="bfloat16", norm="bfloat16", batched="float32")


class Sharp(nn.Dense):
    """A layer, and operators whose nodes have names of their own."""

    def hybrid_forward(self, F, x, *args, **kwargs):
        return F.exp(super().hybrid_forward(F, x, *args, **kwargs)) * 100


def sharp():
    return Sharp(6, in_units=5)


def saved(net, tmp_path, name="net.params"):
    path = str(tmp_path / name)
    net.save_parameters(path)
    return path


def loaded(path, cls=Net):
    """A network that is converted like the file, with its parameters."""
    net = amp.convert(cls(), like=path)
    net.load_parameters(path)
    return net


def kept(net):
    """The paths of blocks that stay float32."""
    return {name for name, block in net._children.items() if block._amp.keep}


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "bfloat16", MINE])
def test_like_applies_policy_and_keep(policy, tmp_path, x):
    net = amp.convert(make(), policy, keep=".*dense.*")
    served = loaded(saved(net, tmp_path))
    assert [p.dtype for p in served.collect_params().values()] \
        == [p.dtype for p in net.collect_params().values()]
    assert kept(served) == {"output"}
    assert np.array_equal(served(x).asnumpy(), net(x).asnumpy())


def test_like_keeps_the_same_nodes(tmp_path):
    data = nd.array(np.arange(10).reshape(2, 5) / 10)
    net = amp.convert(make(sharp), keep=".*exp0")
    expected = net(data).asnumpy()
    path = saved(net, tmp_path)
    assert np.array_equal(loaded(path, sharp)(data).asnumpy(), expected)
    with pytest.raises(ValueError, match=r"does not keep .*exp0"):
        amp.convert(sharp()).load_parameters(path)


@pytest.mark.parametrize("order", ["convert first", "load first"])
@pytest.mark.parametrize(("policy", "keep", "message"), [
    (None, (), "the same policy, and does not keep net_dense0"),
    ("bfloat16", ".*dense0", r"policy bfloat16\."),
    ("bfloat16", (), "policy bfloat16, and does not keep net_dense0")])
def test_server_that_differs_is_refused(policy, keep, message, order, tmp_path):
    path = saved(amp.convert(make(), keep=".*dense.*"), tmp_path)
    served = Net(prefix="net_")
    first, second = (lambda: amp.convert(served, policy, keep)), \
        (lambda: served.load_parameters(path))
    if order == "load first":
        first, second = second, first
    first()
    with pytest.raises(ValueError, match=message) as refused:
        second()
    assert f"{path} records policy float16, keep=['.output']" in str(refused.value)
    assert f"gluon_amp.convert(net, like={path!r})" in str(refused.value)
    if order == "load first":
        assert set(types(served).values()) == {"float32"}
    else:
        assert all(p._data is None for p in served.collect_params().values())


@pytest.mark.parametrize("order", ["convert first", "load first"])
def test_like_false_computes_otherwise_on_purpose(order, tmp_path, x):
    path = saved(amp.convert(make(), keep=".*dense.*"), tmp_path)
    served = Net()
    if order == "load first":
        served.load_parameters(path)
    amp.convert(served, "bfloat16", like=False)
    if order == "convert first":
        served.load_parameters(path)
    assert served(x).shape[1] == 5


def test_more_in_float32_and_equal_formats_of_another_name_are_accepted(tmp_path):
    path = saved(amp.convert(make(), amp.Policy("mine", parameter="float16", compute="float16")),
                 tmp_path)
    for keep in ((), ".*dense.*", nn.Conv2D):
        amp.convert(Net(), keep=keep).load_parameters(path)


def test_plain_files_and_networks_work_as_before(tmp_path, x):
    net = amp.convert(make(), keep=".*dense.*")
    path = saved(net, tmp_path)
    plain = Net()
    plain.load_parameters(path)
    assert np.isfinite(plain(x).asnumpy()).all()
    alone = str(tmp_path / "alone.params")
    shutil.copy(path, alone)
    amp.convert(Net()).load_parameters(alone)
    with pytest.raises(ValueError, match=r"alone\.params\.json, which does not exist"):
        amp.convert(Net(), like=alone)
    with pytest.raises(FileNotFoundError):
        amp.convert(Net(), like=str(tmp_path / "none.params"))


def check_refused(path, message):
    for use in (lambda: amp.convert(Net(), like=path),
                lambda: amp.convert(Net()).load_parameters(path)):
        with pytest.raises(ValueError, match=message):
            use()


def test_record_of_another_file_is_refused(tmp_path):
    path = saved(amp.convert(make()), tmp_path)
    nd.save(path, {name: array * 2 for name, array in nd.load(path).items()})
    check_refused(path, r"its checksum differs.*delete net\.params\.json")
    plain = Net()
    plain.load_parameters(path)  # needs no record
    with pytest.raises(ValueError, match="its checksum differs"):
        amp.convert(plain)


def test_files_of_a_float32_network_load_into_every_policy(tmp_path):
    path = saved(amp.convert(make()), tmp_path)
    assert saved(amp.convert(make(), "float32", keep=".*dense.*"), tmp_path) == path
    plain = Net()
    plain.load_parameters(path)
    amp.convert(plain, "bfloat16")
    amp.convert(Net(), "bfloat16").load_parameters(path)
    assert set(types(loaded(path)).values()) == {"float32"}


def test_network_that_was_never_converted_writes_and_removes_no_record(tmp_path):
    path = saved(amp.convert(make()), tmp_path)
    other = tmp_path / "other.params.json"
    other.write_text('{"mine": 1}')
    saved(make(), tmp_path, "other.params")
    saved(make(), tmp_path, "new.params")
    assert other.read_text() == '{"mine": 1}'
    assert not (tmp_path / "new.params.json").exists()
    amp.convert(Net(), "bfloat16").load_parameters(str(tmp_path / "other.params"))
    saved(make(), tmp_path)
    with pytest.raises(ValueError, match=r"its checksum differs.*delete net\.params\.json"):
        amp.convert(Net(), "bfloat16").load_parameters(path)


def test_file_that_was_replaced_after_loading_says_nothing_of_the_parameters(tmp_path):
    path = saved(make(), tmp_path)
    net = Net()
    net.load_parameters(path)
    saved(amp.convert(net), tmp_path)
    amp.convert(amp.restore(net), "bfloat16")


def test_relative_path_of_a_loaded_file_is_found_from_elsewhere(tmp_path, monkeypatch):
    saved(amp.convert(make(), keep=".*dense.*"), tmp_path)
    net = Net()
    monkeypatch.chdir(tmp_path)
    net.load_parameters("net.params")
    monkeypatch.chdir("/")
    with pytest.raises(ValueError, match="does not keep"):
        amp.convert(net)


def killed_save(net, path, monkeypatch):
    """Saves the parameters in a process that is killed between the record and the parameters."""
    def killed(*names):
        if str(names[1]) == path:
            raise KeyboardInterrupt
        replace(*names)

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            net.save_parameters(path)


def test_process_killed_between_record_and_parameters_leaves_both_readable(tmp_path, monkeypatch):
    net = amp.convert(make(), keep=".*dense.*")
    path = saved(net, tmp_path)
    before = nd.load(path)
    for _ in range(3):
        net.output.bias.set_data(net.output.bias.data() + 1)
        killed_save(net, path, monkeypatch)
    for _ in range(2):
        assert kept(loaded(path)) == {"output"}
        saved(net, tmp_path)
    after = nd.load(path)
    assert not np.array_equal(before["output.bias"].asnumpy(), after["output.bias"].asnumpy())


def test_first_save_that_is_killed_can_be_repeated(tmp_path, monkeypatch):
    net, path = amp.convert(make()), str(tmp_path / "net.params")
    killed_save(net, path, monkeypatch)
    net.save_parameters(path)
    loaded(path)


@pytest.mark.parametrize("damage", [
    lambda text: text[:40], lambda text: text.replace('"keep": []', '"keep": [3]'),
    lambda text: text.replace('"float16"', "16"),
    lambda text: text.replace('"policies": {"": "float16"}', '"policies": {"": {"a": {}}}')])
def test_damaged_record_is_refused(damage, tmp_path):
    path = saved(amp.convert(make()), tmp_path)
    record = tmp_path / "net.params.json"
    record.write_text(damage(record.read_text()))
    check_refused(path, r"net\.params\.json is no record")


def test_symbolic_link_has_the_record_of_its_target(tmp_path):
    saved(amp.convert(make(), keep=".*dense.*"), tmp_path)
    (tmp_path / "latest.params").symlink_to("net.params")
    with pytest.raises(ValueError, match="does not keep"):
        amp.convert(Net()).load_parameters(str(tmp_path / "latest.params"))


@pytest.mark.parametrize(("like", "policy", "keep", "error"), [
    (3, None, (), TypeError), (True, None, (), TypeError),
    ("net.params", "float16", (), ValueError), ("net.params", None, ".*dense.*", ValueError)])
def test_like_with_other_arguments_is_refused(like, policy, keep, error):
    with pytest.raises(error, match="like"):
        amp.convert(Net(), policy, keep, like)


def test_parts_of_a_network_have_their_own_policies(tmp_path, x):
    net = amp.convert(make(), "float32")
    amp.convert(net.features, "bfloat16", keep=nn.Conv2D)
    path = saved(net, tmp_path)
    served = loaded(path)
    assert served.features[0]._amp.keep
    assert np.array_equal(served(x).asnumpy(), net(x).asnumpy())
    whole = Net()
    whole.load_parameters(path)
    with pytest.raises(ValueError, match="does not keep"):
        amp.convert(whole, "bfloat16")


def test_parameters_of_a_part_are_compared(tmp_path):
    net = amp.convert(make(), keep=".*conv.*")
    path = saved(net.features, tmp_path)
    other = Net()
    other.features.load_parameters(path)
    with pytest.raises(ValueError, match="does not keep"):
        amp.convert(other)
    with pytest.raises(ValueError, match="does not keep"):
        amp.convert(other.features)
    amp.convert(other, keep=".*conv.*")


def test_like_of_another_network_is_refused(tmp_path):
    path = saved(amp.convert(make(), keep=".*dense.*"), tmp_path)
    with pytest.raises(ValueError, match="of a network with other blocks"):
        amp.convert(nn.Dense(3, in_units=2), like=path)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "mixed_bfloat16"])
def test_exported_network_is_converted_like_its_file(policy, tmp_path, x):
    net = make()
    amp.convert(net, policy, keep=net.output)
    step(net, x)
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    served = amp.convert(imported(tmp_path / "net"), like=str(tmp_path / "net-0000.params"))
    assert np.array_equal(served(x).asnumpy(), expected)
    served.export(str(tmp_path / "again"))
    again = imported(tmp_path / "again")
    with pytest.raises(ValueError, match=f"the symbol of .* records policy {policy}, keep=.*does "
                       r"not keep.*convert\(net, like=FILE\), with the file of its parameters"):
        amp.convert(again, policy)
    assert np.array_equal(amp.convert(again, policy, keep=".*dense0.*")(x).asnumpy(), expected)
    plain = Net()
    plain.load_parameters(saved(net, tmp_path))


def test_exported_symbol_converted_for_the_symbolic_api_is_compared(tmp_path, x):
    net = make()
    amp.convert(net, keep=net.output)
    net(x)
    net.export(str(tmp_path / "net"))
    loaded = mx.model.load_checkpoint(str(tmp_path / "net"), 0)
    for convert in (lambda **how: amp.convert_symbol(loaded[0], **how),
                    lambda **how: amp.convert_model(*loaded, **how)[0]):
        with pytest.raises(ValueError, match=r"the symbol records policy float16, keep=.*_fwd"):
            convert()
        found = convert(like=str(tmp_path / "net-0000.params"))
        assert found.tojson() == convert(keep=".*dense0_fwd").tojson()
        convert(like=False)


def module_of(sym):
    return prepared(amp.Module(sym, context=mx.cpu(), loss_scale="dynamic"), (4, 5), (4,),
                    optimizer=None)


def symbol(**how):
    hidden = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=6, name="one")
    out = mx.sym.FullyConnected(hidden, num_hidden=3, name="two")
    return amp.convert_symbol(mx.sym.SoftmaxOutput(out, name="softmax"), **how)


@pytest.mark.mx_nd("MXNet's Module has no numpy mode")
def test_checkpoints_of_modules_have_the_policy(tmp_path):
    prefix = str(tmp_path / "net")
    params = f"{prefix}-0003.params"
    module_of(symbol(keep="two")).save_checkpoint(prefix, 3)
    amp.Module.load(prefix, 3, loss_scale="dynamic")
    module_of(symbol(like=params)).load_params(params)
    with pytest.raises(ValueError, match=r"records policy float16, keep=\['two'\].*not keep two"):
        module_of(symbol()).load_params(params)
    module_of(symbol()).save_checkpoint(str(tmp_path / "other"), 3)
    shutil.copy(tmp_path / "other-symbol.json", f"{prefix}-symbol.json")
    with pytest.raises(ValueError, match="does not keep two"):
        amp.Module.load(prefix, 3)
    mx.model.load_checkpoint(prefix, 3)


@pytest.mark.mx_nd("MXNet's Module has no numpy mode")
def test_buckets_are_compared_with_their_checkpoint(tmp_path):
    def bucket(keep):
        return lambda key: (symbol(keep=keep), ("data",), ("softmax_label",))

    module = amp.BucketingModule(bucket("two"), 1, context=mx.cpu())
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    module.init_params()
    module.save_checkpoint(str(tmp_path / "net"), 1)
    amp.BucketingModule.load(str(tmp_path / "net"), 1, bucket("two"), 1)
    with pytest.raises(ValueError, match="does not keep two"):
        amp.BucketingModule.load(str(tmp_path / "net"), 1, bucket(()), 1)


PLAIN = """
import sys
import mxnet as mx
folder, numpy_mode = sys.argv[1:]
if numpy_mode == "True":
    mx.npx.set_np()
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Dense(3, in_units=2))
net.load_parameters(folder + "/net.params")
mx.gluon.SymbolBlock.imports(folder + "/net-symbol.json", ["data"], folder + "/net-0000.params")
assert "gluon_amp" not in sys.modules
"""


def test_mxnet_alone_reads_the_files(tmp_path):
    net = holding(nn.Dense(3, in_units=2))
    amp.convert(net, keep=net[0])
    net(mx.nd.ones((1, 2)) if not mx.util.is_np_array() else mx.np.ones((1, 2)))
    saved(net, tmp_path)
    net.export(str(tmp_path / "net"))
    printed(MXNET_ALONE + PLAIN, tmp_path, mx.util.is_np_array())


def test_record_does_not_depend_on_names_or_on_what_has_run(tmp_path, x):
    records = []
    for run in (False, True):
        net = amp.convert(make(networks.Plain), "pure_float16", keep=".*dense.*")
        net(x)  # creates the parameters
        if run:
            step(net, x)
        saved(net, tmp_path)
        records.append(json.loads((tmp_path / "net.params.json").read_text()))
    assert {**records[0], "sha256": 0} == {**records[1], "sha256": 0}
    amp.convert(networks.Plain(), like=str(tmp_path / "net.params"))
