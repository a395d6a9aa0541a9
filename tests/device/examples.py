"""Runs a script of example/ on GPU 0 in float32 and float16, and compares their losses.

    python examples.py NAME ROWS [--small]
"""
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "example"
sys.path[:0] = [str(HERE), str(EXAMPLE)]

import gluon_amp  # noqa: E402, F401  (before mxnet)
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from object_detection import draw  # noqa: E402
from PIL import Image  # noqa: E402
from rows import add  # noqa: E402

BOUND = 0.1  # of the loss of float32
SIZE = 32


def records(path, count, seed):
    """Writes images of one shape each, with its class."""
    images, labels = draw(np.random.RandomState(seed), count, SIZE)
    writer = mx.recordio.MXIndexedRecordIO(str(path.with_suffix(".idx")), str(path), "w")
    for i, (image, label) in enumerate(zip(images, labels)):
        pixels = np.clip(128 + 40 * image.transpose(1, 2, 0), 0, 255).astype(np.uint8)
        made = io.BytesIO()
        Image.fromarray(pixels).save(made, "JPEG")
        writer.write_idx(i, mx.recordio.pack(mx.recordio.IRHeader(0, label[0, 0], i, 0),
                                             made.getvalue()))
    writer.close()


def flags_of(name, folder, small):
    """The flags of each script, without --dtype."""
    train, val, pretrained = folder / "train.rec", folder / "val.rec", folder / "zoo.params"
    count = 32 if small else 1024
    if name in ("fine_tune", "train_imagenet"):
        records(train, count, 0)
        records(val, 32, 1)
    model = "mobilenet0.25" if small else "resnet18_v1"
    if name == "fine_tune":
        net = mx.gluon.model_zoo.vision.get_model(model)
        net.initialize(mx.init.Xavier())
        net(mx.nd.zeros((1, 3, SIZE, SIZE)))
        net.save_parameters(str(pretrained))
    epochs, steps = (1, 2) if small else (3, 200)
    return {
        "image_classification": f"--epochs {epochs} --save-dir {folder}/saved-TYPE"
                                f"{' --examples 64 --batch-size 16' if small else ''}",
        "fine_tune": f"--dataset {train} --val {val} --classes 3 --pretrained {model} "
                     f"--pretrained-params {pretrained} --image-size {SIZE} --epochs {epochs} "
                     f"--batch-size 16 --save-dir {folder}/saved-TYPE",
        "train_imagenet": f"--data-train {train} --data-val {val} --num-classes 3 --network resnet "
                          f"--num-layers 20 --image-shape 3,{SIZE},{SIZE} --batch-size 16 "
                          f"--num-examples {count} --num-epochs {epochs} --lr 0.05 "
                          f"--save-dir {folder}/saved-TYPE",
        "language_model": f"--steps {steps} --layers 2 --width 64 --characters 0 "
                          f"--batch-size {4 if small else 32} --log-interval {steps}",
        "object_detection": f"--steps {steps} --batch-size {4 if small else 32} "
                            f"--log-interval {steps} --validation-images 16",
    }[name].split()


def last_loss(saved, text):
    """The last loss in a log.jsonl, or printed by a script without it."""
    log = saved / "log.jsonl"
    found = re.findall(r"step \d+: loss=(\S+)", text) if not log.exists() else [
        line["loss"] for line in map(json.loads, log.read_text().splitlines()) if "loss" in line]
    if not found:
        raise ValueError(f"no loss in {log}, nor in: {text[-500:]}")
    return float(found[-1])


def main(name, path, *small):
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = flags_of(name, Path(folder), small)
        for dtype in ("float32", "float16"):
            words = [word.replace("TYPE", dtype) for word in flags]
            done = subprocess.run([sys.executable, "-W", "ignore", EXAMPLE / f"{name}.py",
                                   "--dtype", dtype, "--gpus", "0", *words], text=True,
                                  capture_output=True, check=False)
            text = done.stdout + done.stderr
            print(text[-1500:])
            if done.returncode:
                sys.exit(f"{name} in {dtype} fails")
            losses[dtype] = last_loss(Path(folder, f"saved-{dtype}"), text)
    difference = abs(losses["float16"] - losses["float32"])
    add(path, recipe=name, **losses)
    sys.exit(not difference <= BOUND * max(losses["float32"], 0.5))


if __name__ == "__main__":
    main(*sys.argv[1:])
