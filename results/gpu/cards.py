"""Writes h100/README.md and h200/README.md from the rows of runs on these GPUs, and what
benchmarks/README.md and README.md have of them.

    python results/gpu/cards.py
"""
import json
import lzma
import re
import statistics
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BOUNDS = {"float32": 4e-3, "float16": 1e-2}  # tests/device/operators.py
# Networks and their batches.
NAMES = {("resnet50", 128): "ResNet-50, 224 px, batch 128",
         ("resnet50", 64): "ResNet-50, 224 px, batch 64",
         ("mobilenet", 128): "MobileNetV2, 224 px, batch 128",
         ("bert", 32): "BERT-base, 128 tokens, batch 32",
         ("lstm", 64): "LSTM 2 x 1024, 64 steps, batch 64",
         ("unet", 16): "U-Net, 224 px, batch 16", ("ssd", 32): "SSD, MobileNet, 256 px, batch 32",
         ("transformer", 32): "a transformer's layer of 256, 64 tokens, batch 32"}
BATCHES = {"resnet50": 128, "bert": 32, "lstm": 64}  # where a row has none
SHOWN = {"resnet50": 128, "mobilenet": 128, "bert": 32, "lstm": 64}  # in README.md
# "before" is another version: see the page.
WAYS = {"float32 without TF32": "MXNet float32, without TF32", "float32": "MXNet float32",
        "mx.contrib.amp": "mx.contrib.amp", "before": "gluon_amp, {before}",
        "gluon_amp": "gluon_amp", "gluon_amp, CUDA graphs": "gluon_amp, with CUDA graphs",
        "PyTorch float32, channels-last": "PyTorch float32",
        "PyTorch float16, channels-last": "PyTorch float16 autocast"}
# a word of a kernel's name, and what it does
KINDS = [("wgrad_alg0", "convolutions without Tensor Cores"),
         ("implicit_convolve_sgemm", "convolutions without Tensor Cores"),
         ("depthwise", "depthwise convolutions"), ("grouped_direct", "depthwise convolutions"),
         ("clip", "ReLU6"), ("MultiSGD", "update"), ("bn_", "batch norm"),
         ("batchnorm", "batch norm"),
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


def in_blocks(rows):
    """The milliseconds of a step in all blocks of a way's rows, of runs before blocks in rows."""
    return sorted(ms for row in rows for ms in row.get("blocks", [row["ms"]]))


def speed(measured, part=None, before="as in the second run"):
    lines = []
    for network, title in NAMES.items():
        of = defaultdict(list)
        for row in measured:
            if (row.get("network"), row.get("batch") or BATCHES.get(row.get("network")),
                    row.get("part")) == (*network, part):
                of[row["way"]].append(row)
        torch = in_blocks(of["PyTorch float16, channels-last"])
        for way, name in WAYS.items():
            if not of[way]:
                continue
            ms = in_blocks(of[way])
            samples = statistics.median(row["samples"] for row in of[way])
            mib = statistics.median(row["mib"] for row in of[way])
            share = f"{statistics.median(torch) / statistics.median(ms):.2f}" if torch else ""
            lines.append([title, name.format(before=before), f"{statistics.median(ms):.1f}",
                          f"{ms[0]:.1f} to {ms[-1]:.1f}" if len(ms) > 1 else "one run",
                          f"{samples:,.0f}", share, f"{mib:,.0f}"])
            title = ""
    return table(["network", "implementation", "ms a step", "range", "samples/s",
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


def fill(card, values):
    """Writes a card's page: its template with {NAMES} replaced."""
    text = (HERE / card / "template.md").read_text()
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value.rstrip())
    (HERE / card / "README.md").write_text(text)


def of_profile(profile):
    """The milliseconds of a step, of its kernels and other parts, for a page."""
    parts = {row["part"]: row["ms"] for row in profile if "part" in row}
    return {name: f"{ms:.1f}" for name, ms in (
        ("STEP", parts["step"]), ("PASSES", parts["passes"]),
        ("BUSY", sum(row.get("us", 0) for row in profile) / 3000),
        ("CHECK", parts["idle after the check"]))}


def h200():
    """Writes the H200's page; returns its last table of speed, and the rows."""
    first, second, third, fourth = (rows(f"h200/{run}/rows.jsonl")
                                    for run in ("first", "second", "third", "fourth"))
    profile = rows("h200/fourth/kernels.jsonl.xz")
    recipes = [[f"`{row['recipe']}.py`", f"{row['float32']:.4f}", f"{row['float16']:.4f}"]
               for row in first if "recipe" in row]
    layers, clipped, largest = recurrent(first)
    torch, without = "PyTorch float16, channels-last", "float32 without TF32"
    fill("h200", {
        **{f"{network.upper()}_TORCH": f"{share(fourth, network, torch):.2f}" for network in SHOWN},
        "TF32": f"{1 / share(fourth, 'resnet50', 'float32'):.2f}",
        "PLAIN": f"{1 / share(fourth, 'resnet50', without):.2f}",
        "MEMORY": f"{share(fourth, 'resnet50', 'float32', memory):.3f}",
        "OPERATORS": operators(first, second), "SPEED": speed(fourth),
        "PREDICTIONS": speed(fourth, "prediction", "channels-last"),
        "KERNELS": kernels(profile, {"resnet50": 64, "mobilenet": 128}),
        **of_profile([row for row in profile if row["network"] == "resnet50"]),
        "FIRST_SPEED": speed(first), "SECOND_SPEED": speed(second), "THIRD_SPEED": speed(third),
        "FIRST_KERNELS": kernels(rows("h200/first/kernels.jsonl.xz"), BATCHES),
        "SECOND_KERNELS": kernels(rows("h200/second/kernels.jsonl.xz"), BATCHES),
        "THIRD_KERNELS": kernels(rows("h200/third/kernels.jsonl.xz"), {"resnet50": 64}),
        "RECIPES": table(["recipe", "float32: loss", "float16: loss"], recipes),
        "LAYERS": str(layers), "CLIPPED": str(clipped), "RNN32": f"{largest['float32']:.1g}",
        "RNN16": f"{largest['float16']:.1g}"})
    return speed(fourth), fourth


def memory(rows):
    return [row["mib"] for row in rows]


def share(measured, network, other, figures=in_blocks):
    """gluon_amp's time of a step, or its memory, over that of another way."""
    ours, theirs = (statistics.median(figures(
        [row for row in measured if row.get("network") == network and row["way"] == way
         and row["batch"] == SHOWN[network] and "part" not in row]))
        for way in ("gluon_amp", other))
    return ours / theirs


def h100():
    """Writes the H100's page."""
    first, second = (rows(f"h100/{run}/rows.jsonl") for run in ("first", "second"))
    profile = rows("h100/second/kernels.jsonl.xz")
    torch, without = "PyTorch float16, channels-last", "float32 without TF32"
    fill("h100", {
        **{f"{network.upper()}_TORCH": f"{1 / share(second, network, torch):.2f}"
           for network in BATCHES},
        "TF32": f"{1 / share(second, 'resnet50', 'float32'):.2f}",
        "PLAIN": f"{1 / share(second, 'resnet50', without):.2f}",
        "MEMORY": f"{share(second, 'resnet50', 'float32', memory):.3f}",
        "SPEED": speed(second, before="ten plans"), "FIRST_SPEED": speed(first, before="ten plans"),
        "KERNELS": kernels(profile, {"resnet50": 64}),
        "FIRST_KERNELS": kernels(rows("h100/first/kernels.jsonl.xz"), {"mobilenet": 128}),
        **of_profile(profile)})


def main():
    h100()
    text, measured = h200()
    path = ROOT / "benchmarks/README.md"
    before, begin, rest = path.read_text().partition("<!-- h200 -->\n")
    path.write_text(before + begin + text + rest[rest.index("<!-- end -->"):])
    path = ROOT / "README.md"
    shares = ", ".join(f"{share(measured, network, 'float32'):.2f}" for network in SHOWN)
    path.write_text(re.sub(r"(\| \[step on an H200\].*?\| )[^|]*", rf"\g<1>{shares} ",
                           path.read_text()))


if __name__ == "__main__":
    main()
