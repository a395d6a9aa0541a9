"""Compares results/tensor_cores/rule.py with measured results in a checkout of MATLAB-tensor-core.

    make -C tests tensor-cores SOURCES=FOLDER

The folder `model_validation` of the repository north-numerical-computing/MATLAB-tensor-core has
5,000 results of one instruction for each GPU and format. H100 and H200 made those of float8 without
an accumulator. Float16 sums of float8 products are not compared: the rule is not known.
"""
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "results" / "tensor_cores"))
from rule import dot

FORMATS = {"fp16": "float16", "bf16": "bfloat16", "tf32": "tf32", "E4M3": "float8_e4m3",
           "E5M2": "float8_e5m2"}
GPUS = {"L40S": "Ada"}  # others have the name of their rule


def numbers(path, base):
    """Returns rows of float32 numbers, written as hexadecimal or binary bits."""
    rows = [[int(bits, base) for bits in line.split()] for line in path.read_text().splitlines()]
    return np.array(rows, "uint32").view("float32")


def main(sources):
    different = compared = 0
    for file in sorted(Path(sources, "model_validation").glob("*/*/d_*.txt")):
        folder, (_, gpu, sums) = file.parent, file.stem.split("_")
        factors, sums = FORMATS[folder.name], {"fp16": "float16", "fp32": "float32"}[sums]
        if sums == "float16" != factors:
            print(f"{gpu:5} {factors:12} -> {sums}: not compared")
            continue
        a, b = (numbers(folder / f"{x}_{gpu}_{folder.name}.txt", 16) for x in "ab")
        c, d = numbers(folder / f"c_{gpu}_fp32.txt", 2), numbers(file, 2)[:, 0]
        if factors.startswith("float8") and gpu in ("H100", "H200"):
            c = np.zeros_like(c)
        result = dot(a[:, None], b[:, :, None], c[:, None].astype(sums), GPUS.get(gpu, gpu),
                     factors, sums).ravel().astype("float32")
        same = int((result.view("uint32") == d.view("uint32")).sum())
        print(f"{gpu:5} {factors:12} -> {sums}: {same} of {len(d)} alike")
        different, compared = different + len(d) - same, compared + 1
    print(f"{compared} files, {different} results differ")
    return different > 0 or not compared


if __name__ == "__main__":
    sys.exit(main(os.environ["SOURCES"] or sys.exit("SOURCES=FOLDER: a checkout")))
