"""Measures the cost of X-rays of `make bench`'s networks: time and memory over plain steps.

Time is the CPU time of this process, because machines are busy. Plain steps, X-rayed steps and
X-rayed steps with a float32 reference alternate. A step lasts from one call of the loss to the
next, without set-up: the first step of each kind is excluded. Memory is the peak of a separate
process above that of imports: one that trains, and one that trains and then X-rays four steps.

    python results/xray/cost.py [--networks NAME ...] [--pairs N]
"""
import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gluon_amp as amp
import harness
from mxnet import autograd, nd

STEPS = 4


def prepared(name):
    """Returns a network, its Trainer, a batch and the loss."""
    net, data, target = harness.build(name, "float16")
    trainer = amp.Trainer(net.collect_params(), "sgd", harness.SGD)
    loss_of = harness.NETWORKS[name].loss

    for _ in range(2):
        step(net, trainer, (data, target), loss_of)
    return net, trainer, (data, target), loss_of


def step(net, trainer, batch, loss_of):
    data, target = batch
    with autograd.record():
        loss = loss_of(net(data), target)
    trainer.backward(loss)
    trainer.step(len(data))
    nd.waitall()


def costs(name, pairs):
    """Returns median ratios to plain steps: X-rayed, and X-rayed with a reference."""
    net, trainer, batch, loss_of = prepared(name)
    calls = []

    def timed_loss(*given):
        calls.append(time.process_time())
        return loss_of(*given)

    def plain():
        for _ in range(STEPS + 2):
            step(net, trainer, batch, timed_loss)

    def seconds(function, passes):
        """Returns the median time of a step with some number of passes."""
        calls.clear()
        function()
        begun = calls[passes::passes][:STEPS + 1]
        return statistics.median(b - a for a, b in zip(begun, begun[1:]))

    found = {False: [], True: []}
    for _ in range(pairs):
        alone = seconds(plain, 1)
        for reference, ratios in found.items():
            ratios.append(seconds(lambda r=reference: look(net, batch, timed_loss, trainer,
                                                           STEPS + 2, r), 1 + reference) / alone)
    return [statistics.median(ratios) for ratios in found.values()]


def look(net, batch, loss_of, trainer, steps, reference):
    amp.xray(net, [batch] * steps, loss_of, trainer, steps=steps, reference=reference)


def peak(name, kind):
    """Returns the peak memory of plain steps, or with an X-ray: "watched", "reference"."""
    before = harness.high_water()
    net, trainer, batch, loss_of = prepared(name)
    for _ in range(4):
        step(net, trainer, batch, loss_of)
    if kind != "plain":
        look(net, batch, loss_of, trainer, 4, kind == "reference")
    return harness.high_water() - before


def memory(name):
    """Returns the memory of both X-rays over plain steps, each in a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, "--networks", name, "--memory-of"]
    bytes_of = {kind: int(subprocess.run([*command, kind], check=True, stdout=subprocess.PIPE,
                                         text=True).stdout.split()[-1])
                for kind in ("plain", "watched", "reference")}
    return [bytes_of[kind] / bytes_of["plain"] for kind in ("watched", "reference")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="*", default=list(harness.NETWORKS), metavar="NAME")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--memory-of", choices=["plain", "watched", "reference"],
                        help="only print a network's peak memory in bytes, for one kind of steps")
    options = parser.parse_args()
    if options.memory_of:
        return print(peak(options.networks[0], options.memory_of))
    for name in options.networks:
        watched, reference = costs(name, options.pairs) if options.pairs else (0, 0)
        of_watched, of_reference = memory(name)
        print(f"{name}: {watched:.2f} steps and {of_watched:.2f} of the memory; with a reference "
              f"{reference:.2f} and {of_reference:.2f}", flush=True)


if __name__ == "__main__":
    main()
