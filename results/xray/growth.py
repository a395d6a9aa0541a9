"""Measures by how much gradients grow in the first 50 steps.

It trains each network of `planted.py`, without a fault and with each one, with what X-ray keeps. A
row has the exponent of the highest loss scale that fits the first two steps, and of that which fits
all steps; none if most steps are not finite.

    python results/xray/growth.py [--networks NAME ...] [--output CSV]
"""
import math

import gluon_amp as amp
import planted
from common import tabulate

STEPS = 50


def examine(case):
    """Returns a row of the table."""
    name, fault = case.split(", ", 1)
    net, batches = planted.made(name, planted.FAULTS.get(fault))
    keep = amp.xray(net, batches, planted.LOSS, steps=2).keep
    net, batches = planted.made(name, planted.FAULTS.get(fault), keep=keep)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9},
                          loss_scale=amp.DynamicLossScale(2.0 ** 10, minimum=2.0 ** -24))
    view = amp.xray(net, batches * STEPS, planted.LOSS, trainer, STEPS, reference=False)
    highest = [math.log2(window.high) for window in view.windows if window]
    row = {"network": name, "fault": fault}
    if len(highest) > STEPS // 2:
        row.update({"first": min(highest[:2]), "all": min(highest),
                    "growth": min(highest[:2]) - min(highest)})
    return row


if __name__ == "__main__":
    tabulate(__doc__, "networks", [f"{name}, {fault}" for name in planted.NETWORKS
                                   for fault in ("none", *planted.FAULTS)],
             examine, ["network", "fault", "first", "all", "growth"])
