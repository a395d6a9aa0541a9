"""Compares a software GPU, on which MXNet's CUDA build runs, with the CPU: `make results-gpu`.

Writes networks.csv, digits.csv and README.md beside this file; what stands in a CSV file is not run
again.
"""
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import study  # noqa: E402  (behind its folder)
from distances import TABLE  # noqa: E402

SEEDS = 3
COMPUTE = [*study.PYTHON, "-m", "gluon_amp.gpu", "--compute"]
README = """# MXNet's CUDA build on a software GPU

`make results-gpu` writes this folder. The host code of `mxnet-cu112` 1.9.1 ran on a
[GPU that computes on the host](../../docs/gpu.md#a-gpu-that-computes).

## Digits

`example/image_classification.py --dataset digits --dtype float16 --gpus 0`, ten epochs, test
accuracy. On the CPU 30 seeds of float16 end between {least} and {most} % ([results](../README.md)).

| seed | software GPU | CPU |
| --- | --- | --- |
{digits}

## Networks

Outputs, then gradients of all weights as one vector: the length of the difference from the CPU's
float32, over the length of the CPU's. "Nudged" is the CPU's float32 with weights that are larger by
2^-21: how much the last bits of float32 matter. Dropout is off.

| network | GPU, float32 | CPU, nudged | CPU, float16 | GPU, float16 |
| --- | --- | --- | --- | --- |
{networks}
"""


def rows_of(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.reader(file))[1:]


def add(path, header, lines):
    """Adds lines to a CSV file."""
    with open(path, "a") as file:
        file.write("".join(f"{line}\n" for line in ([] if file.tell() else [header]) + lines))


def run_networks(path):
    done = [row[0] for row in rows_of(path)]
    for name in TABLE:
        if name not in done:
            made = subprocess.run([*COMPUTE, *study.PYTHON, str(HERE / "distances.py"), name],
                                  check=True, capture_output=True, text=True).stdout.splitlines()
            add(path, *made[-2:-1], made[-1:])


def accuracy(lines):
    return 100 * (1 - [line["err_top1"] for line in lines if "err_top1" in line][-1])


def run_digits(path):
    done = [row[0] for row in rows_of(path)]
    for seed in range(SEEDS):
        if str(seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            study.train("image_classification.py", f"--dtype float16 --gpus 0 --seed {seed} "
                        "--num-workers 0", folder, COMPUTE)
            lines = study.lines(Path(folder, "log.jsonl"))
        add(path, "seed,accuracy", [f"{seed},{accuracy(lines):.2f}"])


def write_readme(networks, digits):
    cpu = {int(name.rpartition("seed")[2]): accuracy(lines)
           for name, lines in study.runs(HERE.parent / "digits.jsonl").items()
           if name.startswith("float16-seed")}
    digits = [f"| {seed} | {float(value):.2f} % | {cpu[int(seed)]:.2f} % |"
              for seed, value in rows_of(digits)]
    rows = [f"| {name} | " + " | ".join(f"{a}, {b}" for a, b in zip(v[::2], v[1::2])) + " |"
            for name, *v in rows_of(networks)]
    (HERE / "README.md").write_text(README.format(
        least=f"{min(cpu.values()):.2f}", most=f"{max(cpu.values()):.2f}",
        digits="\n".join(digits), networks="\n".join(rows)))


def main():
    networks, digits = HERE / "networks.csv", HERE / "digits.csv"
    run_digits(digits)
    run_networks(networks)
    write_readme(networks, digits)


if __name__ == "__main__":
    main()
