"""Writes h200/README.md from the rows of its runs, and a table of benchmarks/README.md.

    python results/gpu/h200.py
"""
import json
import lzma
import statistics
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent / "h200"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks/README.md"
BOUNDS = {"float32": 4e-3, "float16": 1e-2}  # tests/device/operators.py
# Networks and their batches.
NAMES = {("resnet50", 128): "ResNet-50, 224 px, batch 128",
         ("resnet50", 64): "ResNet-50, 224 px, batch 64",
         ("mobilenet", 128): "MobileNetV2, 224 px, batch 128",
         ("bert", 32): "BERT-base, 128 tokens, batch 32",
         ("lstm", 64): "LSTM 2 x 1024, 64 steps, batch 64"}
BATCHES = {"resnet50": 128, "bert": 32, "lstm": 64}  # where a row has none
WAYS = {"float32 without TF32": "MXNet float32, without TF32", "float32": "MXNet float32",
        "mx.contrib.amp": "mx.contrib.amp", "before": "gluon_amp, as in the second run",
        "gluon_amp": "gluon_amp", "gluon_amp, CUDA graphs": "gluon_amp, with CUDA graphs",
        "PyTorch float32, channels-last": "PyTorch float32",
        "PyTorch float16, channels-last": "PyTorch float16 autocast"}
# a word of a kernel's name, and what it does
KINDS = [("MultiSGD", "update"), ("bn_", "batch norm"), ("batchnorm", "batch norm"),
         ("LayerNorm", "layer norm"), ("softmax", "softmax"), ("nchwToNhwc", "layout of images"),
         ("nhwcToNchw", "layout of images"), ("transpose_pseudo2D", "layout of images"),
         ("calc_bias_diff", "bias of convolutions"),
         ("op_generic_tensor", "bias of convolutions, activations"), ("fft2d", "FFT convolutions"),
         ("xmma_gemm_cf32", "FFT convolutions"), ("fprop", "convolutions"),
         ("wgrad", "convolutions"), ("dgrad", "convolutions"), ("convolve", "convolutions"),
         ("LSTM_", "cells"), ("elemWiseRNNcell", "cells"), ("GENERIC_elementWise", "cells"),
         ("gemm", "matrix products"), ("nvjet", "matrix products"),
         ("splitKreduce", "matrix products"), ("pooling", "pooling"),
         ("FusedKernel", "elementwise"), ("MapPlan", "elementwise, slices, transposes"),
         ("mxnet_generic_kernel", "elementwise"), ("add_bias", "elementwise")]


def rows(name):
    data = (HERE / name).read_bytes()
    text = lzma.decompress(data) if name.endswith(".xz") else data
    return [json.loads(line) for line in text.splitlines()]


def table(head, lines):
    return "\n".join(f"| {' | '.join(cells)} |"
                     for cells in [head, ["---"] * len(head), *lines]) + "\n"


def operators(first, second):
    lines = []
    for (dtype, bound), measured in zip(BOUNDS.items(), (first, second)):
        found = {row["operator"]: row["difference"] for row in measured
                 if "operator" in row and row["type"] == dtype and row["difference"] is not None}
        beyond = sorted((name for name in found if found[name] >= bound), key=found.get)
        lines.append([dtype, str(len(found) - len(beyond)), f"{bound:g}", ", ".join(
            f"`{name}` {found[name]:.2g}" for name in beyond) or "none"])
    return table(["type", "within", "the bound", "beyond it"], lines)


def recurrent(measured):
    kinds = [row for row in measured if "recurrent" in row]
    clipped = [row for row in kinds if "clip" in row["recurrent"]]
    largest = {dtype: max(row["difference"] for row in kinds
                          if row["type"] == dtype and row not in clipped) for dtype in BOUNDS}
    return len(kinds) - len(clipped), len(clipped), largest


def speed(measured, part=None):
    lines = []
    for network, title in NAMES.items():
        of = defaultdict(list)
        for row in measured:
            if (row.get("network"), row.get("batch") or BATCHES.get(row.get("network")),
                    row.get("part")) == (*network, part):
                of[row["way"]].append(row)
        torch = [row["ms"] for row in of["PyTorch float16, channels-last"]]
        for way, name in WAYS.items():
            if not of[way]:
                continue
            ms = sorted(row["ms"] for row in of[way])
            samples = statistics.median(row["samples"] for row in of[way])
            mib = statistics.median(row["mib"] for row in of[way])
            share = f"{statistics.median(torch) / statistics.median(ms):.2f}" if torch else ""
            lines.append([title, name, f"{statistics.median(ms):.1f}",
                          f"{ms[0]:.1f} to {ms[-1]:.1f}" if len(ms) > 1 else "one run",
                          f"{samples:,.0f}", share, f"{mib:,.0f}"])
            title = ""
    return table(["network", "way", "ms a step", "range", "samples/s",
                  "PyTorch float16 = 1", "MiB"], lines)


def kernels(measured, batches):
    lines = []
    for network, batch in batches.items():
        shares = defaultdict(float)
        of = [row for row in measured if row["network"] == network and row.get("us")]
        for row in of:
            kind = next((kind for word, kind in KINDS if word in row["kernel"]), "other")
            shares[kind] += row["us"] / 3000
        total, title = sum(shares.values()), NAMES[network, batch]
        for kind in sorted(shares, key=shares.get, reverse=True)[:7]:
            lines.append([title, kind, f"{shares[kind]:.1f}", f"{shares[kind] / total:.0%}"])
            title = ""
        if of:
            lines.append(["", f"all of {sum(row['count'] for row in of) // 3:,} calls",
                          f"{total:.1f}", ""])
    return table(["network", "kernels", "ms a step", "share"], lines)


def main():
    measured, second, third = (rows(f"{run}/rows.jsonl") for run in ("first", "second", "third"))
    profile = rows("third/kernels.jsonl.xz")
    parts = {row["part"]: row["ms"] for row in profile if "part" in row}
    busy = sum(row.get("us", 0) for row in profile) / 3000
    recipes = [[f"`{row['recipe']}.py`", f"{row['float32']:.4f}", f"{row['float16']:.4f}"]
               for row in measured if "recipe" in row]
    layers, clipped, largest = recurrent(measured)
    text = (HERE / "template.md").read_text()
    for name, value in {
            "OPERATORS": operators(measured, second), "SPEED": speed(second),
            "FIRST_SPEED": speed(measured), "THIRD_SPEED": speed(third),
            "PREDICTIONS": speed(third, "prediction"),
            "KERNELS": kernels(rows("second/kernels.jsonl.xz"), BATCHES),
            "FIRST_KERNELS": kernels(rows("first/kernels.jsonl.xz"), BATCHES),
            "THIRD_KERNELS": kernels(profile, {"resnet50": 64}),
            "STEP": f"{parts['step']:.1f}", "PASSES": f"{parts['passes']:.1f}",
            "BUSY": f"{busy:.1f}", "CHECK": f"{parts['idle after the check']:.1f}",
            "RECIPES": table(["recipe", "float32: loss", "float16: loss"], recipes),
            "LAYERS": str(layers), "CLIPPED": str(clipped), "RNN32": f"{largest['float32']:.1g}",
            "RNN16": f"{largest['float16']:.1g}"}.items():
        text = text.replace(f"{{{name}}}", value.rstrip())
    (HERE / "README.md").write_text(text)
    if BENCHMARKS.exists():
        before, begin, rest = BENCHMARKS.read_text().partition("<!-- h200 -->\n")
        BENCHMARKS.write_text(before + begin + speed(second) + "\nLater, on another H200:\n\n"
                              + speed(third) + rest[rest.index("<!-- end -->"):])


if __name__ == "__main__":
    main()
