"""What does an X-ray cost? Steps and memory under it, over plain ones, of networks of make bench.

Counted is the processors' time of this process, since machines are busy: that of some steps in
turns: plain, watched, watched with a reference in float32. A step is timed from one call of the
loss to the next. What is set up is left out: the first step of each kind, and what is before and
after. Memory is the most that a process of its own has, above what importing takes: one that
trains, and one that trains and then looks at four steps.

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
    """A network that trains, its Trainer, a batch and the loss."""
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
    """The medians of pairs: watched, and watched with a reference, over plain."""
    net, trainer, batch, loss_of = prepared(name)
    calls = []

    def timed_loss(*given):
        calls.append(time.process_time())
        return loss_of(*given)

    def plain():
        for _ in range(STEPS + 2):
            step(net, trainer, batch, timed_loss)

    def seconds(function, passes):
        """Of a step, the median; it has so many passes."""
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
    """The most memory of plain steps, or of these and a look at four: "watched", "reference"."""
    before = harness.high_water()
    net, trainer, batch, loss_of = prepared(name)
    for _ in range(4):
        step(net, trainer, batch, loss_of)
    if kind != "plain":
        look(net, batch, loss_of, trainer, 4, kind == "reference")
    return harness.high_water() - before


def memory(name):
    """The memory of both looks over that of plain steps, each in a process of its own."""
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
                        help="only print a network's peak in bytes, for one kind of steps")
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
