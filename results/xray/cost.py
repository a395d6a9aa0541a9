"""What does an X-ray cost? Steps under it over plain steps, on the networks of make bench.

Counted is the processors' time of this process, since machines are busy: that of three steps, in
turns: plain, watched, watched with a reference in float32. Setting up is left out: it is what a
look at one step takes.

    python results/xray/cost.py [--networks NAME ...] [--pairs N]
"""
import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gluon_amp as amp
import harness
from mxnet import autograd, nd

STEPS = 3


def prepared(name):
    """A network that trains, its Trainer, a batch and the loss."""
    net, data, target = harness.build(name, "float16")
    trainer = amp.Trainer(net.collect_params(), "sgd", harness.SGD)
    loss_of = harness.NETWORKS[name].loss

    def step():
        with autograd.record():
            loss = loss_of(net(data), target)
        trainer.backward(loss)
        trainer.step(len(data))
        nd.waitall()

    step()
    step()
    return net, trainer, (data, target), loss_of, step


def seconds(function):
    begun = time.process_time()
    function()
    return time.process_time() - begun


def costs(name, pairs):
    """The medians of pairs: watched, and watched with a reference, over plain."""
    net, trainer, batch, loss_of, step = prepared(name)

    def look(steps, reference):
        amp.xray(net, [batch] * steps, loss_of, trainer, steps=steps, reference=reference)

    found = {False: [], True: []}
    for _ in range(pairs):
        plain = seconds(lambda: [step() for _ in range(STEPS)])
        for reference, ratios in found.items():
            once = seconds(lambda r=reference: look(1, r))
            ratios.append((seconds(lambda r=reference: look(1 + STEPS, r)) - once) / plain)
    return [statistics.median(ratios) for ratios in found.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="*", default=list(harness.NETWORKS), metavar="NAME")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    for name in options.networks:
        watched, reference = costs(name, options.pairs)
        print(f"{name}: {watched:.2f} steps, {reference:.2f} with a reference", flush=True)


if __name__ == "__main__":
    main()
