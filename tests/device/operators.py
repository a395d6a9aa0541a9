"""Compares the operators of the table on GPU 0 with the CPU, forward and backward.

    python operators.py float16 ROWS [--small]

Each operator adds a row. After an error from which the GPU does not recover, another process
continues.
"""
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "software_gpu" / "computed")]

import test_computed_operators as table  # noqa: E402
from rows import add, rows  # noqa: E402

import mxnet as mx  # noqa: E402  isort: skip
import numpy as np  # noqa: E402

BOUNDS = {"float32": 4e-3, "float16": 1e-2}


def compare(name, dtype):
    """The largest difference of an operator; None if the CPU runs none of its cases."""
    with mx.util.np_shape(name.startswith("_np")):
        for case in table.cases(name):
            try:
                on_cpu = table.computed(name, case, mx.cpu(), dtype)
                mx.nd.waitall()
            except (mx.MXNetError, ValueError):
                continue
            on_gpu = table.computed(name, case, mx.gpu(0), dtype)
            mx.nd.waitall()
            pairs = zip(*(of[0] + (of[1] or []) for of in (on_cpu, on_gpu)))
            return max((float(table.distance(a, b)) for a, b in pairs if a.size), default=0.0)
    return None


def run(dtype, path, names):
    """Compares operators. It ends with an error if the GPU does not recover from one."""
    for name in names:
        try:
            add(path, operator=name, type=dtype, difference=compare(name, dtype))
        except (mx.MXNetError, ValueError) as error:
            lines = str(error).strip().splitlines()
            add(path, operator=name, type=dtype, error=lines[-1][:300] if lines else "")
            mx.nd.ones(1, ctx=mx.gpu(0)).asnumpy()  # fails for good after an invalid access


def wrong(dtype, path):
    unknown = table.listed() if "--small" in sys.argv else {}
    for row in rows(path, type=dtype):
        name, difference = row.get("operator"), row.get("difference")
        if name and name not in unknown and (
                "error" in row or difference is not None and not difference < BOUNDS[dtype]):
            yield f"{name}: {row.get('error', difference)}"


def main(dtype, path, *flags):
    names = table.NAMES[::10] if "--small" in flags else table.NAMES
    if "--child" in flags:
        done = {row["operator"] for row in rows(path, type=dtype) if "operator" in row}
        run(dtype, path, [name for name in names if name not in done])
        return
    done = -1
    while True:
        subprocess.run([sys.executable, "-W", "ignore", __file__, dtype, path, *flags, "--child"],
                       check=False)
        before, done = done, len([row for row in rows(path, type=dtype) if "operator" in row])
        if done == len(names):
            break
        if done == before:  # the process ended within an operator
            left = [name for name in names if not rows(path, type=dtype, operator=name)]
            add(path, operator=left[0], type=dtype, error="the process ends")
    found = list(wrong(dtype, path))
    print(f"{len(names)} operators, {len(found)} fail", *found, sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    np.random.seed(0)
    main(*sys.argv[1:])
