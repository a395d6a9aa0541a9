"""The largest error of each unary operator over all 65,536 numbers of a 16-bit type.

    make -C tests numbers      writes the table of docs/numbers.md

The reference is numpy's float64, rounded once. An error counts the numbers of the type from the
reference to the result; one NaN for another counts 0, and NaN for a number is reported.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gluon_amp  # noqa: F401  (before mxnet)
import numpy as np
from gluon_amp.cpu import library
from halves import as_bfloat16, bfloat16_ulps, ulps
from mxnet import nd
from scipy import special

PAGE = Path(__file__).parents[2] / "docs" / "numbers.md"
TYPES = ("float16", "bfloat16")
BITS = np.arange(65536, dtype=np.uint16)
ALL = {"float16": BITS.view(np.float16).astype(np.float32),
       "bfloat16": (BITS.astype(np.uint32) << 16).view(np.float32)}

# names of operators in mx.nd, and their references
REFERENCES = {
    **{name: getattr(np, name) for name in (
        "abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh degrees exp expm1 "
        "floor log log10 log1p log2 negative radians reciprocal sin sinh sqrt square tan tanh "
        "trunc").split()},
    **{name: getattr(special, name) for name in ("erf", "erfinv", "gamma")},
    "gammaln": lambda x: np.where(np.isinf(x), np.inf, special.gammaln(x)),
    "rint": lambda x: np.ceil(x - 0.5),  # MXNet's: down from the middle
    "sign": lambda x: np.where(np.isnan(x), 0, np.sign(x)),
    "fix": np.trunc, "rcbrt": lambda x: 1 / np.cbrt(x), "rsqrt": lambda x: 1 / np.sqrt(x),
    "relu": lambda x: np.where(x > 0, x, np.where(np.isnan(x), x, 0)), "sigmoid": special.expit,
    "softsign": lambda x: np.where(np.isinf(x), np.nan, x / (1 + np.abs(x))),
}


def rounded(values, dtype):
    """Rounds float64 numbers once, to nearest even; returns bfloat16 in float32."""
    if dtype == "float16":
        return values.astype(np.float16)
    near = values.astype(np.float32)
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    toward_0 = np.where(away, np.nextafter(near, np.float32(0)), near)
    bits = toward_0.view(np.uint32) | (near.astype(np.float64) != values)  # rounds to odd
    return as_bfloat16(np.where(np.isfinite(values), bits.view(np.float32), near))


def errors(name, dtype):
    """Returns the errors of an operator for all numbers of a type; -1 for NaN in one result."""
    with np.errstate(all="ignore"):
        expected = rounded(REFERENCES[name](ALL[dtype].astype(np.float64)), dtype)
    result = getattr(nd, name)(nd.array(ALL[dtype], dtype=dtype)).asnumpy()
    distance = (ulps if dtype == "float16" else bfloat16_ulps)(result, expected)
    return np.where(np.isnan(result) != np.isnan(expected), -1, distance)


def described(name, dtype):
    """Describes the errors: the largest one, and how many numbers are not the nearest."""
    distances = errors(name, dtype)
    nan = f", {(distances < 0).sum()} NaN" if (distances < 0).any() else ""
    return f"{distances.max()} ({(distances != 0).sum()})" + nan if distances.any() else "0"


def main():
    """Runs each compilation in a process, and writes the table."""
    if sys.argv[1:] == ["rows"]:
        for name in sorted(REFERENCES):
            print(*(described(name, dtype) for dtype in TYPES), sep="|")
        return
    outputs = {}
    for name in library.VARIANTS:
        done = subprocess.run([sys.executable, "-W", "ignore", __file__, "rows"], text=True,
                              capture_output=True, env={**os.environ, "GLUON_AMP_ISA": name})
        if "must be one of" in done.stderr:  # this processor does not run it
            continue
        if done.returncode:
            sys.exit(done.stderr)
        outputs[name] = [line.split("|") for line in done.stdout.splitlines()]
    alike = {}  # operators by their cells
    for i, operator in enumerate(sorted(REFERENCES)):
        cells = []
        for j in range(len(TYPES)):
            of_sets = {name: rows[i][j] for name, rows in outputs.items()}
            cells.append(min(of_sets.values()) if len(set(of_sets.values())) == 1 else
                         "; ".join(f"{name}: {text}" for name, text in of_sets.items()))
        alike.setdefault(" | ".join(cells), []).append(f"`{operator}`")
    rows = [f"| {', '.join(operators)} | {cells} |" for cells, operators in sorted(alike.items())]
    table = "\n".join(["| operators | float16 | bfloat16 |", "| --- | --- | --- |", *rows])
    print(f"compilations: {', '.join(outputs)}", table, sep="\n")
    PAGE.write_text(re.sub(r"(?s)(<!-- numbers -->\n).*(\n<!-- end -->)",
                           lambda match: match[1] + table + match[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
