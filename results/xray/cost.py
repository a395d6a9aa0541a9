"""What does an X-ray cost? Steps and memory under it, over plain ones, of networks of make bench.

Counted is the processors' time of this process, since machines are busy: that of three steps, in
turns: plain, watched, watched with a reference in float32. Setting up is left out: it is what a
look at one step takes, and of plain steps the first one after a look. Memory is the most that a
process of its own has, above what importing takes: one that trains, and one that trains and then
looks at four steps.

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

    def steps_of(count, reference):
        look(net, batch, loss_of, trainer, count, reference)

    found = {False: [], True: []}
    for _ in range(pairs):
        step()  # a look lets go of the network's own graphs, and this makes them anew
        plain = seconds(lambda: [step() for _ in range(STEPS)])
        for reference, ratios in found.items():
            once = seconds(lambda r=reference: steps_of(1, r))
            ratios.append((seconds(lambda r=reference: steps_of(1 + STEPS, r)) - once) / plain)
    return [statistics.median(ratios) for ratios in found.values()]


def look(net, batch, loss_of, trainer, steps, reference):
    amp.xray(net, [batch] * steps, loss_of, trainer, steps=steps, reference=reference)


def peak(name, kind):
    """The most memory of plain steps, or of these and a look at four: "watched", "reference"."""
    before = harness.high_water()
    net, trainer, batch, loss_of, step = prepared(name)
    for _ in range(4):
        step()
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
