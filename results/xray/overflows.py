"""Counts warnings of a forward pass that overflows, in trainings of the fifty networks of zoo.py.

None of these networks has a fault, so each warning is a false alarm. A training ends after 100
steps, or after 600 seconds of CPU time.

    python results/xray/overflows.py [--networks NAME ...] [--output CSV]
"""
import logging
import sys
import time

import gluon_amp as amp
from common import last, losses, tabulate
from zoo import LOSS, NETWORKS, made

STEPS, PART, SECONDS = 100, 10, 600


class Warnings(logging.Handler):
    """The warnings of overflows that gluon_amp logs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        text = record.getMessage()
        if "forward pass overflows" in text:
            self.texts.append(text)


def examine(name):
    """Returns a row of the table."""
    net, batches = made(name, "float16")
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, clip_norm=1.0)
    log, warnings = logging.getLogger("gluon_amp"), Warnings()
    log.addHandler(warnings)
    log.setLevel(logging.WARNING)
    found, begin = [], time.process_time()
    while len(found) < STEPS and time.process_time() < begin + SECONDS:
        found += losses(trainer, batches, lambda data, label: LOSS(net(data), label), PART)
    log.removeHandler(warnings)
    return {"network": name, "steps": len(found), "skipped": trainer.skipped,
            "warnings": len(warnings.texts), "first loss": f"{found[0]:.4g}",
            "last losses": f"{last(found):.4g}", "warning": " ".join(warnings.texts),
            "seconds": round(time.process_time() - begin, 1)}


def main():
    table = tabulate(__doc__, "networks", NETWORKS, examine, [
        "network", "steps", "skipped", "warnings", "first loss", "last losses", "warning",
        "seconds"])
    print(f"{len(table)} networks: {sum(bool(row['warnings']) for row in table)} with warnings, "
          f"{sum(row['skipped'] for row in table)} skipped steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
