"""The recipes on two ranks of MXNet's parameter server, as a user starts them."""
import os
import subprocess
import sys

import gluon_amp
import model_zoo
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from scripts import EXAMPLES, logged

pytestmark = pytest.mark.long

# Runs the script, and saves the data and weights of each rank, and the run folder after epoch 0.
PROGRAM = """
import shutil, sys
sys.path.insert(0, sys.argv[1])
import gluon_amp
import image_classification as recipe
import recipes
from mxnet import nd

folder, seen, nets = sys.argv[2], [], []
make, order, save = recipe.make_network, recipes.WorkerSampler.__iter__, recipes.save

def network(*args):
    nets.append(make(*args))
    return nets[-1]

def indices(part):
    found = list(order(part))
    seen.append((part.workers.rank, part.epoch, found))
    return iter(found)

def save_and_copy(args, net, trainer, position, record):
    save(args, net, trainer, position, record)
    if position.epoch == 1 and trainer.rank == 0:
        shutil.copytree(args.save_dir, folder + "/cut")

recipe.make_network, recipes.WorkerSampler.__iter__, recipes.save = network, indices, save_and_copy
recipe.main(sys.argv[3:])
rank = seen[-1][0]
nets[0].save_parameters(f"{folder}/rank{rank}.params")
nd.save(f"{folder}/rank{rank}.seen", {f"{epoch}": nd.array(found) for _, epoch, found in seen})
nets.clear()  # and with them the store: MXNet wants it freed before the interpreter is
"""
OPTIONS = ["--kvstore", "dist_sync", "--dtype", "float16", "--epochs", "2", "--examples", "256",
           "--batch-size", "32", "--log-interval", "1", "--mixup"]


def launch(folder, save_dir, *arguments):
    (folder / "program.py").write_text(PROGRAM)
    python = [sys.executable, "-W", "ignore"]
    done = subprocess.run(
        [*python, "-m", "gluon_amp", "launch", "-n", "2", *python,
         str(folder / "program.py"), str(EXAMPLES), str(folder), "--save-dir", str(save_dir),
         *OPTIONS, *arguments], stderr=subprocess.PIPE, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stderr


def arrays(path):
    return {name: array.asnumpy() for name, array in mx.nd.load(str(path)).items()}


@pytest.mark.thorough
def test_two_ranks_train_on_parts_and_resume_bitwise(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    log = launch(tmp_path, whole)
    weights = arrays(tmp_path / "rank0.params")
    assert same(weights, arrays(tmp_path / "rank1.params"))
    parts = [arrays(tmp_path / f"rank{rank}.seen") for rank in "01"]
    for epoch in "01":
        seen = np.concatenate([part[epoch] for part in parts]).astype(int)
        assert sorted(seen) == list(range(256))
    assert log.count("[Epoch 1] validation") == 1  # rank 1 prints and saves nothing
    assert {path.name for path in whole.iterdir()} == {
        "best.params", "best.params.json", "epoch-1.params", "epoch-1.params.json",
        "epoch-1.states", "checkpoint.json", "checkpoint-2", "log.jsonl"}
    assert len([line for line in logged(whole) if "batch" in line]) == 2 * 4
    err = logged(whole)[-1]["err_top1"]
    assert err == 1 - right(whole / "epoch-1.params") / 450  # each image once

    launch(tmp_path, cut, "--resume")
    assert same(weights, arrays(tmp_path / "rank0.params"))
    assert same(weights, arrays(tmp_path / "rank1.params"))
    assert logged(cut) == logged(whole)


@pytest.mark.thorough
def test_two_ranks_train_in_float32(tmp_path):
    log = launch(tmp_path, tmp_path / "run", "--dtype", "float32", "--epochs", "1",
                 "--examples", "128")
    assert same(*(arrays(tmp_path / f"rank{rank}.params") for rank in "01"))
    assert "skipped=0" in log.splitlines()[-1]


def right(params):
    """The number of digits that one process classifies correctly with these parameters."""
    net = model_zoo.small_network(10)
    net.load_parameters(str(params))
    gluon_amp.convert(net)
    from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))[:450]
    found = net(mx.nd.array((pixels[order] / 8 - 1).reshape(-1, 1, 8, 8)))
    return int((found.asnumpy().argmax(1) == labels[order]).sum())
