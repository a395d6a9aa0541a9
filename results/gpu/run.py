"""Compares MXNet's CUDA build on a software GPU with the CPU: `make -C tests results-gpu`.

It writes networks.csv, digits.csv, recipes.csv and README.md to this folder, and skips runs that
are in a CSV file already.
"""
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import study  # noqa: E402  (after its folder)
from distances import TABLE  # noqa: E402
from mxnet import recordio  # noqa: E402

SEEDS = 3
RECORDS = 192
RECIPES = {
    "fine_tune.py": ("caltech10_128", "--dataset {train} --val {test} --classes 10 --epochs 2 "
                     "--pretrained cifar_resnet20_v1 --image-size 32 --bn-momentum 0.8 "
                     "--pretrained-params SHARED/models/cifar_resnet20_v1-0000.params "
                     "--num-workers 0"),
    "train_imagenet.py": ("cifar10", "--data-train {train} --data-val {test} --num-classes 10 "
                          "--network resnet --num-layers 20 --image-shape 3,32,32 --num-epochs 10 "
                          f"--batch-size 32 --num-examples {RECORDS} --lr 0.05 --lr-step-epochs 8")}
COMPUTE = [*study.PYTHON, str(HERE.parents[1] / "tests" / "software_gpu"), "--compute"]
README = """# MXNet's CUDA build on a software GPU

MXNet's CUDA build on a [software GPU](../../docs/gpu_design.md#what-was-tested) trains to about the
CPU's accuracy. `make -C tests results-gpu` writes this folder with `mxnet-cu112` 1.9.1.

## Digits

Test accuracy of `example/image_classification.py --dataset digits --dtype float16 --gpus 0` after
ten epochs. On the CPU, 30 seeds end between {least} and {most} % ([results](../README.md)).

| seed | software GPU | CPU |
| --- | --- | --- |
{digits}

## Recipes

`fine_tune.py` and `train_imagenet.py` (the Symbolic API) in float16 on {records} photos, with the
same seed on both.

| recipe | software GPU: accuracy, loss | CPU: accuracy, loss |
| --- | --- | --- |
{recipes}

## Networks

Relative error of the outputs, and of the gradients of all weights as one vector, compared with
float32 on the CPU. "Perturbed" is float32 on the CPU with weights that are larger by 2^-21, which
shows the effect of float32's last bits. Dropout is off.

The networks are untrained, and the loss has random head gradients. Large distances such as 0.95
(inceptionv3) and 0.71 (resnet50_v1) are those of float16 on the CPU, too. These networks have many
batch norms, and their gradients are sensitive to rounding: "perturbed" changes weights by 5e-7, and
inceptionv3's gradients by 0.03. Float16's rounding is a thousand times larger than that change. The
table does not show what such distances do to training.

"plain" is a `Block` with hybrid blocks in it. "tied" is a language model whose output layer has the
weights of its embedding. "arithmetic" computes with operators on arrays, such as `h * 2 - 0.5`.
"loop", "while" and "nested" have `foreach`, `while_loop`, and nested inputs and outputs.

| network | GPU, float32 | CPU, perturbed | CPU, float16 | GPU, float16 |
| --- | --- | --- | --- | --- |
{networks}
"""


def rows_of(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.reader(file))[1:]


def add(path, header, lines):
    """Appends lines to a CSV file."""
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
            study.train("example/image_classification.py",
                        f"--dtype float16 --gpus 0 --seed {seed} --num-workers 0", folder, COMPUTE)
            lines = study.lines(Path(folder, "log.jsonl"))
        add(path, "seed,accuracy", [f"{seed},{accuracy(lines):.2f}"])


def first_records(source, target):
    """Writes the first records of a .rec file to a new one, with an index."""
    reader = recordio.MXRecordIO(str(source), "r")
    writer = recordio.MXIndexedRecordIO(str(target.with_suffix(".idx")), str(target), "w")
    for i in range(RECORDS):
        writer.write_idx(i, reader.read())
    writer.close()


def run_recipes(path):
    done = {tuple(row[:2]) for row in rows_of(path)}
    for script, (data, flags) in RECIPES.items():
        for device, launcher, more in (("GPU", COMPUTE, " --gpus 0"), ("CPU", (), "")):
            if (script, device) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                files = {part: Path(folder, f"{part}.rec") for part in ("train", "test")}
                for part, file in files.items():
                    first_records(study.SHARED / "data" / f"{data}_{part}.rec", file)
                study.train(f"example/{script}",
                            f"{flags.format(**files)} --dtype float16 --seed 0{more}",
                            Path(folder, "saved"), launcher)
                lines = study.lines(Path(folder, "saved", "log.jsonl"))
            loss = [line["loss"] for line in lines if "loss" in line and "epoch" in line][-1]
            add(path, "recipe,device,accuracy,loss",
                [f"{script},{device},{accuracy(lines):.2f},{loss:.4f}"])


def write_readme(networks, digits, recipes):
    of_recipe = {tuple(row[:2]): f"{row[2]} %, {row[3]}" for row in rows_of(recipes)}
    recipes = [f"| {script} | {of_recipe[script, 'GPU']} | {of_recipe[script, 'CPU']} |"
               for script in RECIPES]
    cpu = {int(name.rpartition("seed")[2]): accuracy(lines)
           for name, lines in study.runs(HERE.parent / "digits.jsonl").items()
           if name.startswith("float16-seed")}
    digits = [f"| {seed} | {float(value):.2f} % | {cpu[int(seed)]:.2f} % |"
              for seed, value in rows_of(digits)]
    rows = [f"| {name} | " + " | ".join(f"{a}, {b}" for a, b in zip(v[::2], v[1::2])) + " |"
            for name, *v in rows_of(networks)]
    (HERE / "README.md").write_text(README.format(
        least=f"{min(cpu.values()):.2f}", most=f"{max(cpu.values()):.2f}",
        digits="\n".join(digits), networks="\n".join(rows), records=RECORDS,
        recipes="\n".join(recipes)))


def main():
    networks, digits, recipes = (HERE / f"{n}.csv" for n in ("networks", "digits", "recipes"))
    run_digits(digits)
    run_recipes(recipes)
    run_networks(networks)
    write_readme(networks, digits, recipes)


if __name__ == "__main__":
    main()
