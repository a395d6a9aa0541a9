"""Compares recurrent layers on GPU 0 with the CPU, forward and backward: python recurrent.py ROWS

Each kind of layer adds a row for float32 and one for float16, with the largest difference of
outputs and gradients. Weights in another order than MXNet's would show in these.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "software_gpu" / "computed"))

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
from rnn_cases import CASES, difference
from rows import add

BOUNDS = {"float32": 4e-3, "float16": 2e-2}  # TF32 rounds the factors of float32 products


def main(path):
    failed = 0
    for case in CASES:
        for dtype, bound in BOUNDS.items():
            row = {"recurrent": str(case), "type": dtype}
            try:
                row["difference"] = float(difference(case, mx.gpu(0), dtype))
                failed += not row["difference"] < bound
            except mx.MXNetError as error:
                row["error"] = str(error).strip().splitlines()[-1][:300]
                failed += not (case.clip and "cuDNN 9 does not clip" in str(error))
            add(path, **row)
    print(f"{len(CASES) * len(BOUNDS)} layers, {failed} fail")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
