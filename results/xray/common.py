"""What the checks of this folder share: a policy without rules, training, comparison, a table."""
import argparse
import csv
import gc
import logging

import gluon_amp as amp
import numpy as np
from gluon_amp.files import replace_file
from mxnet import autograd, nd

BARE = amp.Policy("bare", parameter="float16", compute="float16", norm="float16",
                  sensitive="float16")
logging.getLogger("gluon_amp").setLevel(logging.ERROR)


def losses(trainer, batches, loss_of, steps):
    """Returns the mean loss of each step. `loss_of` takes the arrays of a batch.

    A step that was skipped, while the loss scale is too large, is repeated: so trainings have as
    many updates in all formats.
    """
    made = []
    while len(made) < steps:
        batch = batches[len(made) % len(batches)]
        with autograd.record():
            loss = loss_of(*batch)
        trainer.backward(loss)
        if trainer.step(len(batch[0])) is not False:  # MXNet's returns None
            made.append(float(loss.mean().asscalar()))
    return made


def change(net, seed):
    """Changes a network's weights by up to 2^-12 of their values."""
    rng = np.random.default_rng(seed)
    for parameter in net.collect_params().values():
        array = parameter.data()
        array *= nd.array(1 + rng.uniform(-1, 1, array.shape) * 2.0 ** -12)


def last(made):
    """Returns the mean of the last ten losses."""
    return float(np.mean(made[-10:]))


def agree(found, right):
    """Whether two losses are equal within 1 %, plus 0.005."""
    return bool(abs(found - right) <= 0.01 * abs(right) + 0.005)


def write_csv(path, columns, rows):
    def write(beside):
        with open(beside, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    replace_file(path, write)


def tabulate(doc, what, names, examine, columns):
    """Examines the cases that the command line names, by default all. It prints each row, and
    writes all after each case. Returns them."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument(f"--{what}", nargs="*", default=names, metavar="NAME", dest="names")
    parser.add_argument("--output", metavar="CSV")
    options = parser.parse_args()
    table = []
    for name in options.names:
        table.append(examine(name))
        print(", ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
        gc.collect()
        if options.output:
            write_csv(options.output, columns, table)
    return table
