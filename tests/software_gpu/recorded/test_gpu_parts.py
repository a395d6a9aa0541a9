"""Two GPUs, kvstores, SyncBatchNorm, Module, files, scripts."""
import subprocess
import sys
from pathlib import Path

import modules
import mxnet as mx
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from steps import GPU, Training, calls_of, counted, layers, numbers, own_log

TWO = [mx.gpu(0), mx.gpu(1)]
DATA = (4, 8, 6, 6)
EXAMPLES = Path(__file__).parents[3] / "example"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kvstore", ["device", "local", "nccl", None])
def test_two_gpus_train(kvstore, optimizer):
    def last_step(count):
        training = Training(layers(count), "float16", optimizer, TWO, kvstore=kvstore)
        for _ in range(3):
            training.step(numbers(*DATA))
        training.backward(numbers(*DATA))
        return counted(calls_of(lambda: training.trainer.step(8)))

    steps = {}
    for count in (2, 8):
        steps[count] = last_step(count)
        assert steps[count]["casts"] == 0
        if optimizer == "sgd" and kvstore is None:
            # on each GPU: float16 and float32 updates, two sums of squares for each type, and a
            # copy of moving averages
            assert steps[count]["launches"] <= 14
    if kvstore != "local":  # it sums on the host
        assert steps[2]["copies"] == steps[8]["copies"]


@pytest.mark.parametrize("context", [[GPU], TWO])
@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
def test_sync_batch_norm_runs_in_float32_between_casts(policy, context):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=8),
            gluon.contrib.nn.SyncBatchNorm(in_channels=8, num_devices=len(context)),
            nn.GlobalAvgPool2D(), nn.Dense(8, in_units=8))
    training = Training(net, policy, context=context)
    for _ in range(2):
        training.step(numbers(*DATA))
    with mx.autograd.predict_mode():
        net(numbers(*DATA).as_in_context(context[0])).wait_to_read()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("context", [[GPU], TWO])
def test_module_trains_and_updates_in_few_launches(context, optimizer):
    made = modules.made(modules.net(), optimizer=optimizer, context=context, loss_scale="dynamic")
    for i in range(3):
        modules.learn(made, modules.batch(i))
    made.forward_backward(modules.batch())
    update = calls_of(made.update)
    assert counted(update)["casts"] == 0
    if optimizer != "adam" and len(context) == 1:
        assert counted(update)["launches"] <= 7  # with the norm of the gradients
    made.forward(modules.batch(), is_train=False)
    made.get_outputs()[0].asnumpy()
    made.get_params()


def test_files_round_trip_and_networks_move_between_devices(tmp_path):
    training = Training(layers(2), optimizer="adam")
    training.step(numbers(*DATA))
    training.trainer.save_states(str(tmp_path / "states"))
    training.trainer.load_states(str(tmp_path / "states"))
    training.net.save_parameters(str(tmp_path / "net.params"))
    training.net.load_parameters(str(tmp_path / "net.params"), ctx=GPU)
    training.step(numbers(*DATA))
    training.net.export(str(tmp_path / "net"))
    read = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"],
                                     str(tmp_path / "net-0000.params"), ctx=GPU)
    read(numbers(*DATA).as_in_context(GPU)).wait_to_read()
    for context in (mx.cpu(), GPU):
        training.net.collect_params().reset_ctx(context)
        training.net(numbers(*DATA).as_in_context(context)).wait_to_read()


@pytest.mark.parametrize("gpus", ["0", "0,1"])
@pytest.mark.parametrize("script", [
    ["image_classification.py", "--dataset", "digits", "--dtype", "float16"],
    ["train_imagenet.py", "--benchmark", "1", "--dtype", "float16", "--num-layers", "20",
     "--image-shape", "3,32,32", "--num-classes", "10", "--num-examples", "64",
     "--batch-size", "16"]])
def test_recipes_train(script, gpus, tmp_path):
    name, *flags = script
    folder = ["--save-dir", tmp_path / "run"] if name == "image_classification.py" else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / name, *flags, "--num-epochs", "1",
         "--gpus", gpus, *folder], capture_output=True, text=True, cwd=tmp_path,
        env=own_log())
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", sorted(
    set(mx.optimizer.Optimizer.opt_registry) - {"lbsgd", "test", "ccsgd", "groupadagrad"}))
def test_every_optimizer_updates_with_master_weights(name):
    training = Training(layers(2), optimizer=name)
    for _ in range(2):
        training.step(numbers(*DATA))
