"""Compares `tensor_core_dot` with measured results in a checkout of MATLAB-tensor-core.

    make test-tensor-cores SOURCES=FOLDER

The folder `model_validation` of the repository north-numerical-computing/MATLAB-tensor-core has
5,000 results of one instruction for each GPU and format. H100 and H200 made those of float8 without
an accumulator. Float16 sums of float8 products are not compared: `tensor_core_dot` refuses them.
"""
import os
import sys
from pathlib import Path

import gluon_amp as amp
import numpy as np

FORMATS = {"fp16": "float16", "bf16": "bfloat16", "tf32": "tf32", "E4M3": "float8_e4m3",
           "E5M2": "float8_e5m2"}
GPUS = {"L40S": "Ada"}  # others have their own name


def numbers(path, base):
    """Rows of float32 numbers, written as hexadecimal or binary bits."""
    rows = [[int(bits, base) for bits in line.split()] for line in path.read_text().splitlines()]
    return np.array(rows, "uint32").view("float32")


def main(sources):
    wrong = compared = 0
    for file in sorted(Path(sources, "model_validation").glob("*/*/d_*.txt")):
        folder, (_, gpu, sums) = file.parent, file.stem.split("_")
        format_, sums = FORMATS[folder.name], {"fp16": "float16", "fp32": "float32"}[sums]
        if sums == "float16" != format_:
            print(f"{gpu:5} {format_:12} -> {sums}: not compared")
            continue
        a, b = (numbers(folder / f"{x}_{gpu}_{folder.name}.txt", 16) for x in "ab")
        c, d = numbers(folder / f"c_{gpu}_fp32.txt", 2), numbers(file, 2)[:, 0]
        if format_ == "float16":
            a, b = a.astype("float16"), b.astype("float16")
        if format_.startswith("float8") and gpu in ("H100", "H200"):
            c = np.zeros_like(c)
        made = amp.tensor_core_dot(a[:, None], b[:, :, None], c[:, None].astype(sums),
                                   GPUS.get(gpu, gpu), format=format_, sums=sums).ravel()
        same = int((made.astype("float32").view("uint32") == d.view("uint32")).sum())
        print(f"{gpu:5} {format_:12} -> {sums}: {same} of {len(d)} alike")
        wrong, compared = wrong + len(d) - same, compared + 1
    print(f"{compared} files, {wrong} results differ")
    return wrong > 0 or not compared


if __name__ == "__main__":
    sys.exit(main(os.environ["SOURCES"] or sys.exit("SOURCES=FOLDER: a checkout")))
