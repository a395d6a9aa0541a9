"""Measures updates of float16 weights with float32 master weights relative to float32 updates.

Weights and gradients have ResNet-50's shapes; updates of the two types alternate.
"""
import argparse

import harness
from gluon_amp._mxnet import mx
from harness import amp
from mxnet import gluon, nd

OPTIMIZERS = {"sgd": {"momentum": 0.9}, "nag": {"momentum": 0.9}, "adam": {}, "adamw": {},
              "lamb": {}, "rmsprop": {},
              "rmsprop centered": {"centered": True}}


def shapes():
    net = gluon.model_zoo.vision.resnet50_v1()
    net.initialize()
    net(nd.zeros((1, 3, 32, 32)))
    return [p.shape for p in net.collect_params().values() if p.grad_req != "null"]


def updater(name, dtype):
    """Returns a function that updates all weights once and waits for it."""
    make = amp.optimizer if dtype == "float16" or name == "adamw" else mx.optimizer.create
    update = mx.optimizer.get_updater(make(name.split()[0], learning_rate=1e-4, **OPTIMIZERS[name]))
    weights, gradients = ([nd.random.normal(scale=0.01, shape=shape).astype(dtype)
                           for shape in shapes()] for _ in range(2))

    def once():
        update(list(range(len(weights))), gradients, weights)
        nd.waitall()

    return once


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="optimizer", default=list(OPTIMIZERS),
                        help=f"default: all of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--seconds", type=float, default=10,
                        help="time for the pairs of an optimizer (10)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = harness.Table("optimizer", "float32 ms", "lowest", "float16 / float32", "highest",
                          "pairs", "busy", as_json=args.json)
    for name in args.names:
        found = harness.ratios(updater(name, "float32"), updater(name, "float16"),
                               budget=args.seconds)
        table.row(name, 1e3 * found.seconds, *found[1:])


if __name__ == "__main__":
    main()
