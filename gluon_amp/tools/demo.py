"""`gluon-amp demo`: trains float32, float16 and bfloat16 side by side, on scikit-learn's digits.

The networks have the same initial weights and batches. Their steps alternate, so that other load
on the machine slows down all.
"""
import time
from pathlib import Path
from statistics import median
from typing import Any, List, Tuple

from .._mxnet import mx, np
from ..annotations import Array, Block
from ..checks import imports_of
from ..gluon.convert import convert
from ..training.trainer import Trainer
from .footprint import footprint

TYPES = ("float32", "float16", "bfloat16")


def digits() -> Tuple[Any, Any, Any, Any]:
    """Returns 1,797 scanned digits of 8x8 pixels: training images and labels, then for the test."""
    with imports_of("demo", "the demo"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype("float32")
    train, test, train_labels, test_labels = train_test_split(
        images, labels.astype("float32"), test_size=0.25, random_state=0, stratify=labels)
    return train, train_labels, test, test_labels


def network() -> Block:
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    for channels, stride in ((32, 1), (64, 2), (128, 2)):
        net.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"),
                nn.Conv2D(channels, 3, 1, 1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


class _Run:
    """One of the runs: its network, its trainer, and the seconds of its steps."""

    def __init__(self, dtype: str, seed: int):
        mx.random.seed(seed)
        np.random.seed(seed)
        self.net = network()
        self.net.initialize(mx.init.Xavier())
        if dtype != "float32":
            convert(self.net, dtype)
        self.net.hybridize(static_alloc=True, static_shape=True)
        self.trainer = Trainer(self.net.collect_params(), "sgd",
                               {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4},
                               loss_scale="dynamic" if dtype == "float16" else None)
        self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.seconds: List[float] = []

    def step(self, images: Array, labels: Array) -> None:
        start = time.perf_counter()
        with mx.autograd.record():
            loss = self.loss(self.net(images), labels)
        self.trainer.backward(loss)
        self.trainer.step(len(labels))
        mx.nd.waitall()
        self.seconds.append(time.perf_counter() - start)

    def accuracy(self, images: Array, labels: Array) -> float:
        predicted = self.net(mx.nd.array(images)).argmax(axis=1).asnumpy()
        return float((predicted == labels).mean())


def demo(epochs: int = 8, batch: int = 64, seed: int = 1) -> None:
    """Trains the networks and prints a table."""
    with imports_of("demo", "the demo"):
        from tqdm import tqdm
    images, labels, test_images, test_labels = digits()
    runs = {dtype: _Run(dtype, seed) for dtype in TYPES}
    steps = len(labels) // batch
    order = np.random.RandomState(seed)
    with tqdm(total=epochs * steps, unit="step", disable=None) as bar:
        for epoch in range(epochs):
            bar.set_description(f"epoch {epoch + 1}/{epochs}")
            for part in np.split(order.permutation(len(labels))[:steps * batch], steps):
                data, target = mx.nd.array(images[part]), mx.nd.array(labels[part])
                for run in runs.values():
                    run.step(data, target)
                bar.update()
    warm = steps // 2  # the first steps compile
    pairs = list(zip(*(run.seconds[warm:] for run in runs.values())))
    used = footprint(network()(mx.sym.var("data")), (batch, *images.shape[1:]))["bytes"]
    print(f"{'dtype':8} {'test accuracy':>14} {'activations':>14} {'memory of a step':>19} "
          f"{'ms per step':>17}")
    for i, (dtype, run) in enumerate(runs.items()):
        ratio = median(pair[i] / pair[0] for pair in pairs)
        milliseconds = f"{1e3 * median(pair[i] for pair in pairs):.1f} ({ratio:.2f})"
        print(f"{dtype:8} {run.accuracy(test_images, test_labels):14.2%} "
              f"{_of_float32(used, dtype, 'activations'):>14} "
              f"{_of_float32(used, dtype, 'total'):>19} {milliseconds:>17}")
    print("\nIn brackets: over float32. Memory: parameters, gradients, master weights, activations."
          f"\n{_expected()}")


def _of_float32(used: Any, dtype: str, what: str) -> str:
    """Returns megabytes, and their ratio to float32's."""
    ratio = used[dtype][what] / used["float32"][what]
    return f"{used[dtype][what] / 1e6:.1f} MB ({ratio:.2f})"


def _expected() -> str:
    """What to expect of larger networks on this processor."""
    try:
        fast = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        fast = False
    if fast:
        return "This processor has AVX512_BF16: in larger networks, bfloat16 saves time, too."
    return "This processor lacks AVX512_BF16: products run in float32, so that memory is what 16 " \
           "bits save."
