"""`python -m gluon_amp --dtype float16 train.py`: scripts in mixed precision without an edit."""
import runpy

import gluon_amp as amp
import mxnet as mx
import numpy as np
import processes
import pytest
from cases import cases
from gluon_amp.tools.switch import install
from modules import prepared
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready
from trainers import recorded, values

PLACES = [(mx.gluon, "Trainer"), (mx.gluon.trainer, "Trainer"), (mx.mod, "Module"),
          (mx.mod, "BucketingModule"),
          (mx.gluon.Parameter, "grad"), (mx.gluon.Parameter, "list_grad"), (mx.nd.NDArray, "grad"),
          (mx.np.ndarray, "grad"),
          (mx.autograd, "backward"), (mx.nd.NDArray, "backward"), (mx.gluon.Block, "hybridize"),
          (mx.gluon.HybridBlock, "hybridize")]
SCRIPT = """
import sys
import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.Dense(1)
net.initialize()
net.hybridize()
{trainer}
for _ in range(2):
    with autograd.record():
        loss = (net(mx.nd.ones((4, 3))) ** 2).mean()
    {step}
print(sys.argv[1:], net.weight.dtype, getattr(trainer, "loss_scale", None))
"""
TRAINER = 'trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})'


@pytest.fixture
def switched(monkeypatch):
    """Returns `install`, which is undone after the test."""
    for place in PLACES:
        monkeypatch.setattr(*place, getattr(*place))
    return install


def network(kind=nn.HybridSequential):
    net = kind()
    net.add(nn.Dense(8, in_units=6, activation="relu"), nn.Dense(4, in_units=8))
    return net


def data(numpy=False):
    x, y = nd.array(np.random.RandomState(0).randn(5, 6)), nd.arange(5) % 4
    return (x.as_np_ndarray(), y.as_np_ndarray()) if numpy else (x, y)


def loss_fn():
    return mx.gluon.loss.SoftmaxCrossEntropyLoss()


def edited(policy, kind=nn.HybridSequential, numpy=False):
    """What a script computes that is written for gluon_amp."""
    mx.random.seed(1)
    net = ready(network(kind), mx.init.Xavier())
    net.hybridize()
    amp.convert(net, policy)
    scale = "dynamic" if policy == "float16" else None
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1}, loss_scale=scale)
    x, y = data(numpy)
    for _ in range(3):
        trainer.backward(recorded(lambda: loss_fn()(net(x), y)))
        trainer.step(5)
    return values(net), trainer.loss_scale


def before(net):
    net.hybridize()
    return mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})


def after(net):
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
    net.hybridize()
    return trainer


def parts_first(net):
    net[0].hybridize()
    net.hybridize(static_alloc=True)
    return mx.gluon.Trainer(list(net.collect_params().values()), "adam", {"learning_rate": 0.1})


def each_loss(losses):
    losses.backward()


def all_losses(losses):
    autograd.backward([losses])


@pytest.mark.filterwarnings("ignore:All children of this Sequential")
@pytest.mark.parametrize(("policy", "prepare", "backward", "kind", "numpy"), [
    ("float16", before, each_loss, nn.HybridSequential, False),
    ("float16", after, all_losses, nn.HybridSequential, False),
    ("bfloat16", parts_first, each_loss, nn.HybridSequential, False),
    ("float16", before, all_losses, nn.Sequential, False),
    ("float16", after, each_loss, nn.HybridSequential, True),
])
def test_script_computes_what_an_edited_one_does(policy, prepare, backward, kind, numpy, switched,
                                                 capsys):
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        expected, scale = edited(policy, kind, numpy)
        switch = switched(policy)
        mx.random.seed(1)
        net = ready(network(kind), mx.init.Xavier())
        trainer = prepare(net)
        loss = loss_fn()
        loss.hybridize()
        x, y = data(numpy)
        for _ in range(3):
            losses = recorded(lambda: loss(net(x), y))
            backward(losses)
            trainer.step(5)
        assert all(np.array_equal(a, b) for a, b in zip(values(net), expected))
        assert trainer.loss_scale == scale
        assert switch.trains is trainer
        assert capsys.readouterr().err \
            == f"gluon-amp: {net.name} trains in {policy} (4 of 4 parameters)\n"


def module_of(symbol):
    x, y = data()
    module = prepared(mx.mod.Module(symbol), x.shape, y.shape, init=mx.init.Xavier(), seed=1,
                      optimizer={"learning_rate": 0.1})
    for _ in range(3):
        module.forward_backward(mx.io.DataBatch([x], [y]))
        module.update()
    return module


def test_module_trains_in_float16(switched):
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(
        mx.sym.var("data"), num_hidden=4, name="fc"), name="softmax")
    plain = module_of(symbol)
    switched("float16")
    module = module_of(symbol)
    assert isinstance(module, amp.Module)
    pairs = [(module.get_params()[0][name].asnumpy(), array.asnumpy())
             for name, array in plain.get_params()[0].items()]
    assert not all(np.array_equal(a, b) for a, b in pairs)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


def test_bucketing_module_trains_in_float16(switched):
    switched("float16")

    def symbol(key):
        out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, flatten=False, name="fc")
        return mx.sym.SoftmaxOutput(out, name="softmax"), ["data"], ["softmax_label"]

    x, y = data()
    module = mx.mod.BucketingModule(symbol, 6)
    module.bind([("data", x.shape)], [("softmax_label", y.shape)])
    module.init_params()
    module.init_optimizer()
    module.forward_backward(mx.io.DataBatch(
        [x], [y], bucket_key=6, provide_data=[("data", x.shape)],
        provide_label=[("softmax_label", y.shape)]))
    module.update()
    assert module._curr_module._exec_group.execs[0].arg_dict["fc_weight"].dtype == np.float16


def trained(net=None, hybridized=True):
    net = net or network()
    net.initialize()
    if hybridized:
        net.hybridize()
    return net, mx.gluon.Trainer(net.collect_params(), "sgd")


def loss_of(net):
    x, y = data()
    return recorded(lambda: loss_fn()(net(x), y))


def test_second_trainer_and_second_backward_before_a_step_are_refused(switched):
    switched("float16")
    net, trainer = trained()
    assert type(trainer) is mx.gluon.Trainer is mx.gluon.trainer.Trainer
    assert isinstance(trainer, amp.Trainer)
    with pytest.raises(RuntimeError, match=r"second Trainer .*amp\.backward\(loss, \[trainer"):
        trained()
    loss_of(net).backward()
    trainer.step(5)
    loss_of(net).backward()
    with pytest.raises(RuntimeError, match=r"second backward pass .*trainer\.backward\(losses\)"):
        autograd.backward(loss_of(net))


@pytest.mark.parametrize("kwargs", [{"out_grad": nd.ones(5)}, {"train_mode": False}])
def test_other_backward_passes_are_refused(kwargs, switched):
    switched("float16")
    net, _ = trained()
    with pytest.raises(RuntimeError, match="head gradients or train_mode=False"):
        loss_of(net).backward(**kwargs)


READS = {
    "norm": lambda net, x: net[0].weight.grad().asnumpy(),
    "list": lambda net, x: net[0].weight.list_grad(),
    "weight": lambda net, x: net[0].weight.data().grad,
    "input": lambda net, x: x.grad,
    "clip_global_norm": lambda net, x: gluon.utils.clip_global_norm(
        [p.grad() for p in net.collect_params().values()], 1.0),
}


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("read", READS)
def test_reads_of_scaled_gradients_are_refused(read, numpy, switched):
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        switched("float16")
        net, trainer = trained()
        x, y = data(numpy)
        x.attach_grad()
        READS["norm"](net, x)  # before a backward pass
        recorded(lambda: loss_fn()(net(x), y)).backward()
        refused = pytest.raises(RuntimeError, match=r"gradients.*--loss-scale none.*clip_norm=")
        with refused:
            READS[read](net, x)
        trainer.step(5)
        with refused:  # they are still scaled
            READS[read](net, x)


@pytest.mark.parametrize(("policy", "loss_scale"), [("float16", "none"), ("bfloat16", "auto")])
def test_gradients_without_loss_scale_are_read(policy, loss_scale, switched):
    expected = network()
    mx.random.seed(3)
    expected.initialize(mx.init.Xavier())
    loss_of(expected).backward()
    gradient = expected[0].weight.grad().asnumpy()
    switched(policy, loss_scale)
    net, trainer = trained()
    for parameter, other in zip(net.collect_params().values(), expected.collect_params().values()):
        parameter.set_data(other.data())
    loss_of(net).backward()
    found = net[0].weight.grad().astype("float32").asnumpy()
    np.testing.assert_allclose(found, gradient, rtol=0.1, atol=0.02 * abs(gradient).max())
    assert trainer.step(5)


class Square(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * in_data[0])


@mx.operator.register("square_loss_of_a_script")
class SquareProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=False)

    def create_operator(self, ctx, shapes, dtypes):
        return Square()


def test_custom_loss_of_a_module_needs_no_loss_scale(switched):
    symbol = mx.sym.Custom(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc"),
                           op_type="square_loss_of_a_script")

    def module():
        module = prepared(mx.mod.Module(symbol, label_names=None), (5, 6), init=mx.init.One())
        module.forward_backward(mx.io.DataBatch([data()[0]]))
        return module

    switch = switched("float16")
    with pytest.raises(ValueError, match=r"loss_scale=None.*--loss-scale none"):
        module()
    switch.loss_scale, switch.trains = None, None
    trained = module()
    before = trained.get_params()[0]["fc_weight"].asnumpy()
    trained.update()
    assert abs(trained.get_params()[0]["fc_weight"].asnumpy() - before).max() > 0


def test_network_that_is_not_hybridized_is_refused(switched):
    switched("float16")
    net, _ = trained(hybridized=False)
    with pytest.raises(RuntimeError, match=r"hybridizes no network .*dense.*net\.hybridize\(\)"):
        loss_of(net).backward()


def test_part_of_a_network_is_named(switched, capsys):
    switched("float16")
    net = nn.Sequential()
    net.add(network(), nn.Dense(3, in_units=4, activation="relu"))
    net[0].hybridize()
    net, trainer = trained(net, hybridized=False)
    loss_of(net).backward()
    trainer.step(5)
    assert f"{net[0].name} trains in float16 (4 of 6 parameters)" in capsys.readouterr().err
    assert net[1].weight.data().dtype == np.float32


def test_other_networks_stay_float32(switched):
    switched("float16")
    teacher = ready(network())
    teacher.hybridize()
    net, trainer = trained()
    teacher(data()[0])
    loss_of(net).backward()
    trainer.step(5)
    assert [one[0].weight.data().dtype for one in (teacher, net)] == [np.float32, np.float16]


def test_backward_without_trainer_is_mxnets(switched):
    switched("float16")
    x = nd.ones(3)
    x.attach_grad()
    y = recorded(lambda: (x * x).sum())
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.asnumpy().tolist() == [2, 2, 2]


# ---- the command


def run(tmp_path, text, *arguments):
    path = tmp_path / "train.py"
    path.write_text(text)
    return processes.run("-m", "gluon_amp", *arguments[:2], path, *arguments[2:])


@pytest.mark.parametrize(("arguments", "step", "printed"), [
    (["--dtype", "float16"], "loss.backward()", "['--dtype', 'mine'] float16 1024"),
    (["--dtype=float16", "--loss-scale=none"], "loss.backward(); print(net.weight.grad().norm())",
     "['--dtype', 'mine'] float16 1.0\n")])
def test_command_runs_a_script_with_its_arguments(arguments, step, printed, tmp_path):
    script = SCRIPT.format(trainer=TRAINER, step=f"{step}; trainer.step(1)")
    done = run(tmp_path, script, *arguments, "--dtype", "mine")
    assert done.stdout.splitlines()[-1].startswith(printed.strip()), done.stderr
    assert "gluon-amp: dense0 trains in float16 (2 of 2 parameters)\n" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("end", cases(["", "sys.exit(0)"], ["sys.exit()"]))
def test_script_without_trainer_fails(end, tmp_path):
    script = SCRIPT.format(trainer="trainer = None", step="loss.backward()") + end + "\n"
    done = run(tmp_path, script, "--dtype", "float16")
    assert done.returncode == 1
    assert "--dtype float16 changed nothing: the script created no gluon.Trainer" in done.stderr
    assert "float32" in done.stdout


def test_help_of_a_script_succeeds(tmp_path):
    done = run(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n", "--dtype",
               "float16", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "show this help message" in done.stdout


@pytest.mark.parametrize(("arguments", "error"), [
    (["--dtype", "float15", "x.py"], "gluon-amp: --dtype: "),
    (["--dtype", "float16", "--loss-scale", "much", "x.py"], "--loss-scale is auto, none"),
    (["--loss-scale", "none", "x.py"], "--dtype takes a policy and a script"),
    (["--dtype", "float16"], "--dtype takes a policy and a script"),
    (["--dtype=float16", "report"], "--dtype takes a policy and a script"),
    (["--dtype", "float16", "nosuch.py"], "there is no script nosuch.py"),
])
def test_wrong_arguments_are_one_line(arguments, error, switched, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gluon_amp", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gluon_amp", run_name="__main__", alter_sys=True)
    assert error in ended.value.code
    assert "\n" not in ended.value.code
