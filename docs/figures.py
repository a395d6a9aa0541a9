"""Draws the documentation's figures, from runs of small networks. Sphinx calls `draw`.

    python docs/figures.py FOLDER
"""
import json
import math
import sys
import tempfile
from pathlib import Path

import gluon_amp as amp
import matplotlib
import mxnet as mx
import numpy as np
import packages
from gluon_amp.reports.colors import color
from gluon_amp.tools.demo import digits, network
from matplotlib.figure import Figure
from mxnet import autograd, gluon

BLUE, SKY, RED = "#0072b2", "#56b4e9", "#d55e00"  # for other lines than types
WIDTH = 5.4  # inches: legible on a phone
LEAST, LEAST_NORMAL = 2.0 ** -24, 2.0 ** -14  # the smallest subnormal and normal numbers of float16
STEPS, STEPS_OF_SCALE = 600, 300  # of training


def draw(folder):
    """Writes all figures as PNG files. The build derives those for dark pages."""
    matplotlib.rcdefaults()  # independent of the caller's style
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in (("float16", what_float16_holds()), ("gradients", gradients()),
                         ("loss_scale", life_of_a_loss_scale()), ("overflow", overflow())):
        figure.savefig(folder / f"{name}.png", dpi=150)
    packages.draw(folder / "packages.png")


# ---- the precision of float16

def what_float16_holds():
    """Draws the rounding error of numbers from 1e-9 to 1e7 in three types."""
    numbers = np.logspace(-9, 7, 6001)
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(1e-9, LEAST / 2, color="0.82")
    axes.axvspan(LEAST / 2, LEAST_NORMAL, color="0.92")
    axes.axvspan(65520, 1e7, color="0.82")
    for name, bits, least in (("bfloat16", 8, 2.0 ** -126), ("float16", 11, LEAST_NORMAL),
                              ("float32", 24, 2.0 ** -126)):
        inside = numbers[numbers < 65520] if name == "float16" else numbers
        _, exponents = np.frexp(np.maximum(inside, least))
        error = np.exp2(exponents - bits - 1) / inside
        axes.plot(inside, np.minimum(error, 1), color=color(name), linewidth=1.2, label=name)
    for x, text in ((4e-9, "0"), (1.4e-6, "fewer bits"), (2, "all bits"), (9e5, "infinite")):
        axes.text(x, 3, text, ha="center", va="center", color="0.2")
    axes.set(xscale="log", yscale="log", xlim=(1e-9, 1e7), ylim=(1e-8, 10),
             xlabel="a number", ylabel="largest relative error\nwhen it is rounded")
    axes.legend(loc="center", bbox_to_anchor=(0.62, 0.3))
    axes.grid(alpha=0.3)
    return figure


# ---- a network that overflows in float16

class Bilinear(gluon.HybridBlock):
    """A classifier with bilinear pooling: products of channels, summed over the image."""

    def __init__(self, **names):
        super().__init__(**names)
        with self.name_scope():
            self.body = gluon.nn.HybridSequential()
            self.body.add(*(gluon.nn.Conv2D(32, 3, padding=1, activation="relu") for _ in "12"))
            self.head = gluon.nn.Dense(10)

    def hybrid_forward(self, F, x):
        x = F.reshape(self.body(x), (0, 0, -1))
        pairs = F.flatten(F.batch_dot(x, x, transpose_b=True))
        return self.head(8 * F.L2Normalization(F.sqrt(pairs + 1e-3)))


def large_digits(size, seed=0):
    """Returns batches of digits of 16 x 16 pixels from 0 to 255."""
    for data, label in batches(size, seed):
        yield 127.5 * (data.repeat(2, axis=2).repeat(2, axis=3) + 1), label


def bilinear():
    """Returns a network whose products of features overflow in float16."""
    mx.random.seed(1)
    net = Bilinear(prefix="net_")
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def xray_of_overflow():
    """Returns the X-ray of three batches."""
    source = large_digits(64)
    return amp.xray(amp.convert(bilinear()), [next(source) for _ in range(3)],
                    gluon.loss.SoftmaxCrossEntropyLoss())


def overflow():
    """Draws losses in float32, float16, and float16 with X-ray's keep=; and X-ray's counts."""
    loss_fn, kept = gluon.loss.SoftmaxCrossEntropyLoss(), "float16, X-ray's keep="
    view = xray_of_overflow()
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(3, 2))
    for name, policy, keep, style in (("float32", "float32", (), "-"),
                                      ("float16", "float16", (), "-"),
                                      (kept, "float16", view.keep, "--")):
        net = amp.convert(bilinear(), policy, keep=keep)
        trainer = amp.Trainer(net.collect_params(), "sgd",
                              {"learning_rate": 0.03, "momentum": 0.9})
        losses, source = [], large_digits(64)
        for data, label in (next(source) for _ in range(STEPS // 5)):
            with autograd.record():
                loss = loss_fn(net(data), label)
            losses.append(float(loss.mean().asscalar()))
            if not math.isfinite(losses[-1]):
                top.plot(0, 2.36, "x", color=RED, markersize=9, label="float16: NaN at step 0")
                break
            trainer.backward(loss)
            trainer.step(len(label))
        else:
            top.plot(losses, style, label=name, linewidth=1.2, color=color(name.split(",")[0]))
    top.set(xlabel="step", ylabel="training loss", ylim=(0, 2.6))
    top.legend()
    _draw_counts(bottom, view)
    return figure


def _draw_counts(axes, view):
    """Draws the histograms of exponents of four operators."""
    with tempfile.TemporaryDirectory() as folder:
        view.save(Path(folder, "view"))
        text = Path(folder, "view", "xray.jsonl").read_text()
    names = "net_conv0_fwd", "net_conv1_fwd", "net_batch_dot0", "net_sqrt0"
    shares = np.zeros((len(names), 34))  # exponents from -14 to 19
    for line in map(json.loads, text.splitlines()):
        if line.get("node") in names and line["kind"] == "output":
            for exponent, count in line["bins"]:
                if exponent >= -14:
                    shares[names.index(line["node"]), exponent + 14] += count
    shares /= shares.sum(1, keepdims=True)
    axes.imshow(np.where(shares > 0, shares ** 0.5, np.nan), aspect="auto", cmap="Blues", vmin=-0.1,
                extent=(-14, 20, len(names) - 0.5, -0.5))
    axes.axvline(16, color=RED)
    axes.text(16.2, -0.65, "65504", color=RED, va="bottom", ha="center")
    axes.set_yticks(range(len(names)), ["conv0", "conv1", "batch_dot0", "sqrt0"])
    axes.set_xlabel("exponent, base 2; stronger: more numbers")


# ---- gradients of a small network

def batches(size, seed=0):
    """Yields batches of digits endlessly."""
    images, labels, _, _ = digits()
    order = np.random.RandomState(seed)
    while True:
        for part in np.array_split(order.permutation(len(labels)), len(labels) // size):
            yield mx.nd.array(images[part]), mx.nd.array(labels[part])


def new_network():
    mx.random.seed(1)
    np.random.seed(1)
    net = network()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def activation_gradients(steps):
    """Returns the gradients of all activations in float32, after some steps."""
    net, loss_fn = new_network(), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    source = batches(64)
    for _ in range(steps):
        data, label = next(source)
        with autograd.record():
            loss = loss_fn(net(data), label)
        loss.backward()
        trainer.step(len(label))
    x, label = next(source)
    zeros = []  # added to activations, so their gradients are those of the activations
    with autograd.record():
        for layer in net:
            x = layer(x)
            zeros.append(mx.nd.zeros_like(x.detach()))
            zeros[-1].attach_grad()
            x = x + zeros[-1]
        loss = loss_fn(x, label)
    loss.backward()
    return np.abs(np.concatenate([zero.grad.asnumpy().ravel() for zero in zeros]))


def gradients():
    """Draws the histogram of gradients and float16's range, without and with a loss scale."""
    found = activation_gradients(STEPS)
    found = found[found > 0]  # after a ReLU many are 0 in any type
    bins = np.arange(-38, 18)
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, scale in zip(panels, (1, 2.0 ** 13)):
        scaled = found * scale
        lost, whole = scaled <= LEAST / 2, scaled >= LEAST_NORMAL
        for which, label, shade, hatch in (
                (lost, "0 in float16", RED, "xxxx"), (~lost & ~whole, "fewer bits", SKY, "////"),
                (whole, "all bits", BLUE, None)):
            axes.hist(np.log2(scaled[which]), bins, color=shade, hatch=hatch, edgecolor="white",
                      weights=np.full(which.sum(), 100 / len(found)), linewidth=0.4, label=label)
        for edge in (-25, -14, 16):
            axes.axvline(edge, color="0.2", linestyle="--", linewidth=1)
        axes.set(xlim=(-38, 17), ylabel="% of gradients")
        title = "no loss scale" if scale == 1 else f"loss scale {scale:,.0f}"
        axes.set_title(f"{title}: {100 * lost.mean():.1f} % become 0, "
                       f"{100 * (~lost & ~whole).mean():.1f} % have fewer bits",
                       fontsize=10, loc="left")
        axes.grid(alpha=0.3)
    panels[0].legend(loc="upper right", bbox_to_anchor=(0.97, 1))
    ticks = np.arange(-32, 17, 8)
    panels[1].set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks])
    panels[1].set_xlabel("gradient times scale")
    return figure


# ---- a dynamic loss scale over time

def scale_over_steps(steps):
    """Draws the loss scale and the skipped steps of a float16 training."""
    net = amp.convert(new_network())
    loss_fn, source = gluon.loss.SoftmaxCrossEntropyLoss(), batches(64)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9},
                          loss_scale=amp.DynamicLossScale(growth_interval=50))
    scales, limits, updated = [], [], []
    for _ in range(steps):
        data, label = next(source)
        with autograd.record():
            loss = loss_fn(net(data), label)
        scales.append(trainer.loss_scale)
        trainer.backward(loss)
        updated.append(trainer.step(len(label)))
        limits.append(65504 / (trainer.gradient_norm * len(label)))  # it is divided by the batch
    return scales, limits, updated


def life_of_a_loss_scale():
    scales, limits, updated = scale_over_steps(STEPS_OF_SCALE)
    exponents = [math.log2(s) for s in scales]
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.step(range(len(scales)), exponents, where="post", color=BLUE, linewidth=2,
              label="loss scale")
    skipped = [i for i, good in enumerate(updated) if not good]
    if skipped:
        axes.plot(skipped, [exponents[i] for i in skipped], "x", color=RED, markersize=8,
                  markeredgewidth=2, label="step skipped")
    limits = [math.log2(limit) for limit in limits]
    axes.plot(range(len(limits)), limits, color=SKY, linewidth=1, label="65504 / norm")
    low, high = math.floor(min(exponents)), math.ceil(max(limits))
    ticks = range(high, low - 1, -3)
    axes.set_yticks(list(ticks), [f"$2^{{{t}}}$" for t in ticks])
    axes.set(xlabel="step", ylabel="loss scale", ylim=(low - 0.5, high + 0.5), xlim=(-6, 304))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    draw(*sys.argv[1:])
