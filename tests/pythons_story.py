"""`make -C tests pythons` runs this file in an environment with only the wheel and MXNet.

A float16 network from its data to its report in a minute. Warnings are errors, except those of
MXNet and matplotlib.
"""
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module=r"(.*/)?(mxnet|matplotlib)\b")
warnings.filterwarnings("ignore", message="distutils Version classes")

import numpy as np  # noqa: E402

BEFORE = set(vars(np))

import gluon_amp as amp  # noqa: E402
import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402

SCRIPT = """
import numpy as np
import mxnet as mx
import beside
print(beside.ones(np.int(3)), mx.nd.zeros(2, dtype=np.float32).dtype is np.float32)
"""


def network():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, in_channels=1), nn.BatchNorm(in_channels=8), nn.Activation("relu"),
                nn.MaxPool2D(), nn.Dense(4, in_units=72))
    net.initialize(mx.init.Xavier())
    return net


class Images(gluon.data.Dataset):
    """8x8 images of four classes: the bright quarter."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        image = np.random.default_rng(i).random((1, 8, 8), dtype=np.float32)
        row, column = divmod(i % 4, 2)
        image[:, 4 * row:4 * row + 4, 4 * column:4 * column + 4] += 1
        return image, np.float32(i % 4)


def train(net, trainer, loader, loss_fn, epochs):
    losses = []
    for _ in range(epochs):
        for data, label in loader:
            with autograd.record():
                loss = loss_fn(net(data), label)
            trainer.backward(loss)
            trainer.step(len(label))
            losses.append(float(loss.mean().asscalar()))
    return losses


def main(folder):
    added = {name for name in set(vars(np)) - BEFORE if not isinstance(getattr(np, name), type(np))}
    assert not added, added  # numpy's own modules may have been loaded
    mx.random.seed(7)
    np.random.seed(7)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    print("data loader with workers, convert, train")
    net = amp.convert(network())
    net.hybridize(static_alloc=True, static_shape=True)
    loader = gluon.data.DataLoader(Images(), 16, num_workers=2)
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    losses = train(net, trainer, loader, loss_fn, 5)
    assert net[0].weight.data().dtype == np.float16
    assert losses[-1] < 0.5 * losses[0], losses

    print("states")
    net.save_parameters(str(folder / "net.params"))
    trainer.save_states(str(folder / "trainer.states"))
    again = amp.convert(network())
    again.load_parameters(str(folder / "net.params"))
    after = amp.Trainer(again.collect_params(), "adam", {"learning_rate": 0.01})
    after.load_states(str(folder / "trainer.states"))
    threads = gluon.data.DataLoader(Images(), 16, num_workers=2, thread_pool=True)
    assert train(net, trainer, threads, loss_fn, 1) == train(again, after, threads, loss_fn, 1)

    print("export")
    images = nd.array(np.stack([Images()[i][0] for i in range(8)]))
    net.export(str(folder / "net"))
    exported = gluon.SymbolBlock.imports(str(folder / "net-symbol.json"), ["data"],
                                         str(folder / "net-0000.params"))
    assert np.allclose(exported(images).asnumpy(), net(images).asnumpy(), rtol=1e-2, atol=1e-2)
    amp.restore(net)
    assert net(images).dtype == np.float32

    print("Module, estimator")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4),
                                  name="softmax")
    module = amp.Module(amp.convert_symbol(symbol), loss_scale="dynamic")
    batches = mx.io.NDArrayIter(images.reshape((8, -1)), nd.arange(8) % 4, 4)
    module.fit(batches, num_epoch=2, optimizer_params={"learning_rate": 0.1})
    assert np.isfinite(module.get_params()[0]["fullyconnected0_weight"].asnumpy()).all()
    from mxnet.gluon.contrib.estimator import CheckpointHandler  # reads np.Inf
    CheckpointHandler(str(folder), monitor=mx.metric.Loss(), save_best=True)

    print("X-ray")
    seen = [(data, label) for data, label in threads][:2]
    view = amp.xray(amp.convert(network()), seen, loss_fn)
    view.save(str(folder / "xray"))
    assert (folder / "xray" / "xray.html").stat().st_size > 1000

    print("report")
    for dtype in ("float32", "float16"):
        lines = [{"arguments": {"model": "net", "dtype": dtype, "num_epochs": 3}}]
        lines += [{"epoch": epoch, "err_top1": 0.5 / (epoch + 1), "seconds": 1.0}
                  for epoch in range(3)]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / f"{dtype}.jsonl").write_text(text)
    amp.report([str(path) for path in folder.glob("*.jsonl")], str(folder / "report"))
    assert (folder / "report" / "report.html").stat().st_size > 1000

    print("a script of MXNet's time, unchanged")
    (folder / "beside.py").write_text("import numpy\nones = lambda n: [numpy.float(1)] * n\n")
    (folder / "script.py").write_text(SCRIPT)
    said = subprocess.check_output([sys.executable, "-W", "ignore", "-m", "gluon_amp",
                                    str(folder / "script.py")], text=True)
    assert said == "[1.0, 1.0, 1.0] True\n", said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
    print("all of it works: Python", sys.version.split()[0], "numpy", np.__version__, "MXNet",
          mx.__version__)
