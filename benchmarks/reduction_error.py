"""Simulates the error of float16 gradient sums over 8 to 4,096 workers.

    python benchmarks/reduction_error.py

The gradients are those of example/image_classification.py on digits after 0 and 3 epochs, one batch
per worker; with more workers than batches, batches repeat. They are scaled by the largest power of
two without overflow, and summed in five ways:

    float16 ring   each worker adds its gradient to the received sum, and rounds
    float16 tree   in pairs, then pairs of pairs, with each sum rounded
    float32 sum    rounded once at the end, as in MXNet's server
    float32 wire   never rounded, as with amp.parallel.Horovod(wire="float32")
    divided ring   the float16 ring of gradients divided by the number of workers, at the scale of
                   one worker

Error: |sum - exact sum| / |exact sum| of the whole gradient, for float16 gradients of the workers.
Lost: elements that are 0 in the sum, but not in the exact sum. Scale: the power of two.
"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "example"))
import gluon_amp as amp
import numpy as np
from gluon_amp._mxnet import mx
from model_zoo import small_network
from mxnet import autograd, gluon, nd

NUMBERS, BATCHES, BATCH = 5000, 64, 16
WORKERS = [8, 32, 128, 512, 1024, 4096]


def gradients(epochs):
    """Returns a sample of the gradients of each batch, from all layers: (BATCHES, NUMBERS)."""
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8).astype("float32")
    net = small_network(10)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9},
                          loss_scale=None)

    def back(start):
        with autograd.record():
            loss = loss_fn(net(nd.array(images[start:start + BATCH])),
                           nd.array(labels[start:start + BATCH]))
        trainer.backward(loss)

    back(0)
    for _ in range(epochs):
        for start in range(0, len(images) - BATCH, BATCH):
            back(start)
            trainer.step(BATCH)
    rows = []
    for i in range(BATCHES):
        back(i * BATCH)
        rows.append(np.concatenate([p.grad().asnumpy().ravel()
                                    for p in net.collect_params().values()
                                    if p.grad_req != "null"]))
    chosen = np.random.RandomState(0).choice(len(rows[0]), NUMBERS, replace=False)
    return np.array(rows)[:, chosen].astype("float64")


def ring(rows):
    total = np.zeros(rows.shape[1], "float16")
    for row in rows:
        total = total + row
    return total


def tree(rows):
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def float32_sum(rows):
    total = np.zeros(rows.shape[1], "float32")
    for row in rows:
        total += row
    return total


WAYS = {"float16 ring": ring, "float16 tree": tree,
        "float32 sum": lambda rows: float32_sum(rows).astype("float16"),
        "float32 wire": float32_sum}


def largest_scale(rows, way):
    """Returns the largest power of two at which neither gradients nor sums overflow."""
    scale = 2.0 ** math.floor(math.log2(65504 / np.abs(rows).max()))
    while not np.isfinite(way((rows * scale).astype("float16"))).all():
        scale /= 2
    return scale


def judge(total, exact):
    total = total.astype("float64")
    error = np.linalg.norm(total - exact) / np.linalg.norm(exact)
    lost = ((total == 0) & (exact != 0)).sum() / (exact != 0).sum()
    return error, lost


def results(found):
    """Yields rows of workers, kind of sum, scale, error and lost elements."""
    random = np.random.RandomState(1)
    for workers in WORKERS:
        rows = found[random.randint(len(found), size=workers)]
        for name, way in WAYS.items():
            scale = largest_scale(rows, way)
            sent = (rows * scale).astype("float16")
            yield (workers, name, scale, *judge(way(sent), sent.astype("float64").sum(0)))
        scale = largest_scale(rows, lambda sent: np.zeros(1))
        sent = (rows * scale).astype("float16")
        total = ring((sent / np.float16(workers)).astype("float16"))
        yield (workers, "divided ring", scale, *judge(total, sent.astype("float64").sum(0)
                                                      / workers))


def main():
    np.seterr(over="ignore")
    for epochs in (0, 3):
        print(f"\n{epochs} epochs\n\n| workers | sum | scale | error | lost |\n"
              "| --- | --- | --- | --- | --- |")
        for workers, name, scale, error, lost in results(gradients(epochs)):
            print(f"| {workers:,} | {name} | 2^{math.log2(scale):.0f} | {error:.1e} | "
                  f"{100 * lost:.2f} % |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
