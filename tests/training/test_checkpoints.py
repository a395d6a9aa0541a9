"""`save_checkpoint` and `load_checkpoint`: a resumed training equals one without a stop."""
import itertools
import json
import random
import shutil

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from cases import cases
from gluon_amp.reports.log import Log
from mxnet import autograd, gluon
from ranks import EITHER

pytestmark = pytest.mark.numpy
EPOCHS, STEPS = 2, 4


class Noisy(gluon.data.Dataset):
    """Samples with random numbers of numpy and of Python."""

    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, i):
        values = np.random.RandomState(i).standard_normal(6) + np.random.standard_normal(6) / 10
        return (values + random.random()).astype("float32"), np.float32(i % 3)


def seed_all(number):
    for seed in (mx.random.seed, np.random.seed, random.seed):
        seed(number)


def created(dtype="float16", optimizer="adam"):
    """A network with dropout and moving averages, its Trainer, and averages of its weights."""
    seed_all(1)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(8, activation="relu"), gluon.nn.BatchNorm(), gluon.nn.Dropout(0.5),
                gluon.nn.Dense(3))
    net.initialize()
    amp.convert(net, dtype)
    net.hybridize()
    trainer = amp.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01})
    return net, trainer, amp.AveragedWeights(trainer, decay=None, every=2)


def batches():
    return gluon.data.DataLoader(Noisy(), 8, shuffle=True)


def train(folder, every=3, stop=None, dtype="float16"):
    """Trains with a checkpoint after each epoch and every few steps, from the folder's checkpoint.
    Returns all weights, their averages and the log; None if it stops before the end."""
    folder.mkdir(exist_ok=True)
    net, trainer, averaged = created(dtype)
    if (folder / "checkpoint.json").exists():  # a process that resumes begins with other states
        seed_all(2)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    position = amp.load_checkpoint(folder, net, trainer)
    log = Log(folder / "log.jsonl", interval=2, begin=position)
    steps = 0
    for _ in range(position.epoch, EPOCHS):
        for data, label in position.batches(batches()):
            with autograd.record():
                loss = loss_fn(net(data), label)
            trainer.backward(loss)
            trainer.step(len(label))
            log.step(trainer, loss, len(label))
            if position.batch % every == 0:
                amp.save_checkpoint(folder, net, trainer, position, log)
            steps += 1
            if steps == stop:
                return None
        log.epoch()
        amp.save_checkpoint(folder, net, trainer, position, log)
    parameters = list(net.collect_params().values())
    values = [p.data().asnumpy() for p in parameters]
    values += [averaged.value(p).asnumpy() for p in parameters]
    times = ("seconds", "samples_per_second")
    return values, [{k: v for k, v in line.items() if k not in times} for line in log.lines]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stop", cases([3, 4], [5, 7]))
def test_resumed_training_has_the_same_bits(tmp_path, dtype, stop):
    values, lines = train(tmp_path / "whole", dtype=dtype)
    train(tmp_path / "stopped", stop=stop, dtype=dtype)
    resumed, resumed_lines = train(tmp_path / "stopped", dtype=dtype)
    assert same(values, resumed)
    assert resumed_lines == lines


def test_checkpoint_replaces_the_last(tmp_path):
    train(tmp_path / "run")
    folders = [path for path in (tmp_path / "run").iterdir() if path.is_dir()]
    assert len(folders) == 1


def test_failed_save_leaves_checkpoint(tmp_path, monkeypatch):
    net, trainer, _ = created()
    net(mx.nd.ones((2, 6)).as_np_ndarray() if mx.util.is_np_array() else mx.nd.ones((2, 6)))
    position = amp.load_checkpoint(tmp_path, net, trainer)
    assert (position.epoch, position.batch) == (0, 0)
    assert len(list(itertools.islice(position.batches(batches()), 2))) == 2
    amp.save_checkpoint(tmp_path, net, trainer, position)
    position = amp.load_checkpoint(tmp_path, net, trainer)
    next(position.batches(batches()))

    def full(path):
        raise OSError("no space left")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_states", full)
        with pytest.raises(OSError, match="no space"):
            amp.save_checkpoint(tmp_path, net, trainer, position)
    assert amp.load_checkpoint(tmp_path, net, trainer).batch == 2
    amp.save_checkpoint(tmp_path, net, trainer, position)
    assert amp.load_checkpoint(tmp_path, net, trainer).batch == 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a checkpoint after the first batch, and its network and Trainer."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, every=1, stop=1)
    net, trainer, _ = created()
    return net, trainer, folder


@pytest.fixture
def saved(checkpoint, tmp_path):
    """The same with a folder of its own, and its index."""
    net, trainer, folder = checkpoint
    shutil.copytree(folder, tmp_path / "copy")
    return net, trainer, tmp_path / "copy" / "checkpoint.json"


@pytest.mark.parametrize("change", [
    {"version": 2}, {"epoch": -1}, {"batch": "1"}, {"folder": "../other"},
    {"folder": "checkpoint-0"}, {"sha256": []}, {"sha256": None}, {"random": []},
    {"random": ["!"]}, {"random": ["AAAA"]}, {"random": 3}, {"log": []}, None])
def test_damaged_index_is_named(saved, change):
    net, trainer, index = saved
    text = index.read_text()
    index.write_text(text[:99] if change is None else json.dumps({**json.loads(text), **change}))
    with pytest.raises(ValueError, match=r"checkpoint\.json is damaged"):
        amp.load_checkpoint(index.parent, net, trainer)


@pytest.mark.parametrize("name", ["network.params", "trainer.states"])
def test_damaged_and_missing_files_are_named(saved, name):
    net, trainer, index = saved
    path, = index.parent.glob(f"checkpoint-*/{name}")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        amp.load_checkpoint(index.parent, net, trainer)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        amp.load_checkpoint(index.parent, net, trainer)


def test_checkpoint_of_other_trainings_is_refused(saved):
    _, _, index = saved
    net, trainer, _ = created(optimizer="sgd")
    with pytest.raises(ValueError, match="Adam"):
        amp.load_checkpoint(index.parent, net, trainer)
    contents = json.loads(index.read_text())
    index.write_text(json.dumps({**contents, "random": 2 * contents["random"]}))
    net, trainer, _ = created()
    with pytest.raises(ValueError, match=r"2 workers.*Received: 1"):
        amp.load_checkpoint(index.parent, net, trainer)


def test_epoch_with_fewer_batches_is_refused(tmp_path):
    train(tmp_path, stop=3)
    net, trainer, _ = created()
    position = amp.load_checkpoint(tmp_path, net, trainer)
    with pytest.raises(ValueError, match=r"3 batches.*Received: 2"):
        next(position.batches(itertools.islice(batches(), 2)))


def test_log_without_the_lines_of_the_checkpoint_is_refused(tmp_path):
    train(tmp_path, stop=3)
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    net, trainer, _ = created()
    position = amp.load_checkpoint(tmp_path, net, trainer)
    with pytest.raises(ValueError, match=r"log\.jsonl"):
        Log(path, begin=position)


@pytest.mark.parametrize("store", EITHER)
def test_ranks_resume_with_the_same_bits(ranks, tmp_path, store):
    whole = ranks.run("checkpoints", 2, store, folder=str(tmp_path / "whole"), stop=None)
    ranks.run("checkpoints", 2, store, folder=str(tmp_path / "stopped"), stop=3)
    resumed = ranks.run("checkpoints", 2, store, folder=str(tmp_path / "stopped"), stop=None)
    for (mine, drawn), (mine_resumed, drawn_resumed) in zip(whole, resumed):
        assert same(mine, mine_resumed)
        assert drawn == drawn_resumed
    assert whole[0][1] != whole[1][1]  # random numbers of each rank
