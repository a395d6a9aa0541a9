"""Appends rows to the file of results, and measures what they have."""
import json
import time


def add(path, **row):
    print(row, flush=True)
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def rows(path, **wanted):
    """The rows that have these values."""
    with open(path) as file:
        return [row for row in map(json.loads, file) if wanted.items() <= row.items()]


def milliseconds(run, count):
    """The time of one of several runs on the GPU, after all that came before."""
    import mxnet as mx
    mx.nd.waitall()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    mx.nd.waitall()
    return 1e3 * (time.perf_counter() - begin) / count
