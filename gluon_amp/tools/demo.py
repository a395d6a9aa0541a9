"""`gluon-amp demo`: what 16 bits save in a step of MobileNetV2, and their accuracy on digits.

Networks of different types have the same initial weights and batches. Their steps alternate, so
that other load on the machine slows down all.
"""
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Callable, List, Optional, Tuple

import mxnet as mx
import numpy as np

from ..annotations import Array, Block, Context
from ..checks import imports_of
from ..gluon.convert import convert
from ..training.trainer import Trainer

TYPES = ("float32", "float16", "bfloat16")
IMAGES, PIXELS = 8, 128  # of MobileNetV2
PAIRS = 5  # of its timed steps


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


class Run:
    """A training: its network, its trainer, and the seconds of its steps. With a seed, networks of
    all types and on all devices have the same initial weights."""

    def __init__(self, make: Callable[[], Block], dtype: str, seed: int,
                 device: Optional[Context] = None):
        mx.random.seed(seed)
        np.random.seed(seed)
        self.net = make()
        self.net.initialize(mx.init.Xavier(), ctx=device)
        if dtype != "float32":
            convert(self.net, dtype)
        self.net.hybridize(static_alloc=True, static_shape=True)
        self.trainer = Trainer(self.net.collect_params(), "sgd",
                               {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4})
        self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.seconds: List[float] = []

    def step(self, images: Array, labels: Array) -> Array:
        """Trains on a batch, and returns its losses."""
        start = time.perf_counter()
        with mx.autograd.record():
            loss = self.loss(self.net(images), labels)
        self.trainer.backward(loss)
        self.trainer.step(len(labels))
        mx.nd.waitall()
        self.seconds.append(time.perf_counter() - start)
        return loss

    def accuracy(self, images: Array, labels: Array) -> float:
        predicted = self.net(mx.nd.array(images)).argmax(axis=1).asnumpy()
        return float((predicted == labels).mean())


def demo(epochs: int = 4, seed: int = 1) -> None:
    """Prints the savings of a step, then trains on the digits and prints a table."""
    data = digits()
    savings(seed)
    accuracy(data, epochs, seed)


def savings(seed: int) -> None:
    """Prints time and memory of a step of MobileNetV2 in float32 and float16."""
    print(f"a step of MobileNetV2, {IMAGES} images of {PIXELS}x{PIXELS} pixels; in parentheses: "
          "relative to float32", flush=True)
    images = mx.nd.random.uniform(shape=(IMAGES, 3, PIXELS, PIXELS))
    labels = mx.nd.arange(IMAGES)
    runs, peaks = {}, {}
    # Float16 comes first: its peak includes what both share, such as compiled code.
    for dtype in ("float16", "float32"):
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _memory("VmRSS")
        runs[dtype] = Run(mx.gluon.model_zoo.vision.mobilenet_v2_1_0, dtype, seed)
        for _ in range(2):  # compile
            runs[dtype].step(images, labels)
        peaks[dtype] = _memory("VmHWM") - before
    for _ in range(PAIRS):
        for run in runs.values():
            run.step(images, labels)
    seconds = {dtype: median(run.seconds[2:]) for dtype, run in runs.items()}
    for dtype in ("float32", "float16"):
        print(f"{dtype} {1e3 * seconds[dtype]:7.0f} ms ({seconds[dtype] / seconds['float32']:.2f}) "
              f"{peaks[dtype] / 1e6:7.0f} MB ({peaks[dtype] / peaks['float32']:.2f})")
    time_, memory = ("less" if of["float16"] < of["float32"] else "more" for of in (seconds, peaks))
    print(f"On this processor, float16 takes {time_} time and {memory} memory than float32.\n",
          flush=True)


def _memory(name: str) -> int:
    """Returns bytes of this process: VmRSS, which it occupies now, or VmHWM, their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def accuracy(data: Tuple[Any, Any, Any, Any], epochs: int, seed: int, batch: int = 64) -> None:
    """Trains float32, float16 and bfloat16 side by side on the digits, and prints a table."""
    images, labels, test_images, test_labels = data
    runs = {dtype: Run(network, dtype, seed) for dtype in TYPES}
    steps = len(labels) // batch
    order = np.random.RandomState(seed)
    for _ in range(epochs):
        for part in np.split(order.permutation(len(labels))[:steps * batch], steps):
            data, target = mx.nd.array(images[part]), mx.nd.array(labels[part])
            for run in runs.values():
                run.step(data, target)
    print("dtype     test accuracy")
    for dtype, run in runs.items():
        print(f"{dtype:8} {run.accuracy(test_images, test_labels):14.2%}")
    has_bfloat16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    print("\nThis processor has AVX512_BF16: in large networks, bfloat16 saves more time."
          if has_bfloat16 else
          "\nThis processor lacks AVX512_BF16: products run in float32. 16 bits save memory, and "
          "the time\nof passes over it.")
