"""Shows where loss scaling matters: digits in float16, with a loss of tiny weight.

In a sum of losses, one often has a small weight. Here the loss is multiplied by WEIGHT and the
learning rate is divided by it, which has no effect in exact arithmetic. It writes
results/scaling.csv.
"""
import csv
import logging
from pathlib import Path
from statistics import mean

import gluon_amp as amp
import mxnet as mx
import numpy as np
from gluon_amp.tools.demo import digits, network
from mxnet import autograd, gluon

WEIGHTS = (1.0, 2.0 ** -12, 2.0 ** -18, 2.0 ** -24)
SCALINGS = (("float32", None), ("float16", None), ("float16", 128), ("float16", "dynamic"))


def accuracy(dtype, scale, weight, seed, epochs=5, batch=64):
    mx.random.seed(seed)
    images, labels, test_images, test_labels = digits()
    net = network()
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(images[:1]))
    amp.convert(net, dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = amp.Trainer(net.collect_params(), "sgd",
                          {"learning_rate": 0.05 / weight, "momentum": 0.9}, loss_scale=scale)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss(weight=weight)
    order = np.random.RandomState(seed)
    for _ in range(epochs):
        for part in np.array_split(order.permutation(len(labels)), len(labels) // batch):
            with autograd.record():
                loss = loss_fn(net(mx.nd.array(images[part])), mx.nd.array(labels[part]))
            trainer.backward(loss)
            trainer.step(len(part))
    predicted = net(mx.nd.array(test_images)).argmax(axis=1).asnumpy()
    return 100 * float((predicted == test_labels).mean()), trainer.skipped


def main():
    logging.getLogger("gluon_amp").setLevel(logging.WARNING)
    rows = []
    print("| loss weight | " + " | ".join(f"{d}, {s or 'no scale'}" for d, s in SCALINGS) + " |")
    print("| --- " * (len(SCALINGS) + 1) + "|")
    for weight in WEIGHTS:
        cells = []
        for dtype, scale in SCALINGS:
            results = [accuracy(dtype, scale, weight, seed) for seed in range(3)]
            rows += [[weight, dtype, scale, seed, f"{a:.2f}", skipped]
                     for seed, (a, skipped) in enumerate(results)]
            cells.append(f"{mean(a for a, _ in results):.2f}")
        print(f"| 2^{np.log2(weight):.0f} | {' | '.join(cells)} |", flush=True)
    with open(Path(__file__).with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["loss_weight", "dtype", "loss_scale", "seed", "test_accuracy", "skipped"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
