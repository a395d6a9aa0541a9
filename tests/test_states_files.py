"""Files of states: what one may hold, and damaged ones."""
import os
import pickle
import re
from pathlib import Path

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import gluon
from test_states import check_refused, everything, fit, make, of, same


@pytest.fixture()
def path(tmp_path):
    return str(tmp_path / "trainer.states")


# ---- what a file may hold

def saved(path, **kwargs):
    net = make()
    trainer = of(net, **kwargs)
    fit(net, trainer)
    trainer.save_states(path)
    with open(path, "rb") as file:
        return file.read()


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_files_of_0_1_0_load(name):
    """Its optimizers were in other modules, and it wrote no checksum."""
    net = make()
    trainer = of(net, name, loss_scale=amp.DynamicLossScale())
    trainer.load_states(str(Path(__file__).parent / "files" / f"trainer-0.1.0-{name}.states"))
    assert type(trainer.optimizer) is type(of(net, name).optimizer)
    assert trainer.optimizer.num_update == 3
    assert trainer.optimizer.lr_scheduler.step == 3
    assert trainer.loss_scale == 1024
    fit(net, trainer)


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("where", ["states", "optimizer"])
def test_a_file_that_names_other_functions_is_refused_before_they_run(where, path, tmp_path,
                                                                       monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = mx.optimizer.SGD()
    made.param_dict = {}
    if where == "optimizer":
        made.evil = Evil()
    with open(path, "wb") as file:
        pickle.dump(({0: Evil()} if where == "states" else {}, made), file)
    net = make()
    check_refused(of(net), net, path, r"trainer\.states .* names posix.system, which was not c")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_files_load_whether_numpy_1_or_numpy_2_has_written_them(core, path):
    """They name numpy's own modules, which numpy 2 has moved."""
    net = make()
    trainer = of(net)
    fit(net, trainer)
    states, optimizer = pickle.loads(trainer._updaters[0].get_states(dump_optimizer=True))
    optimizer.param_dict, optimizer.trainer_state = {}, {}
    optimizer.lr, optimizer.table = np.float64(0.25), np.arange(3)
    written = pickle.dumps((states, optimizer), protocol=3)  # names modules in plain letters
    both = re.sub(rb"cnumpy\._?core\.", f"c{core}.".encode(), written)
    with open(path, "wb") as file:
        file.write(both)
    trainer.load_states(path)
    assert trainer.optimizer.lr == 0.25
    assert trainer.optimizer.table.tolist() == [0, 1, 2]


class Halving(mx.lr_scheduler.LRScheduler):
    def __call__(self, num_update):
        return self.base_lr / 2 ** num_update


def test_a_scheduler_of_ones_own_loads_where_the_trainer_has_one_of_its_class(path):
    def trainer(**kwargs):
        net = make()
        return net, amp.Trainer(net.collect_params(), "sgd", kwargs, loss_scale=8)

    net, first = trainer(lr_scheduler=Halving(base_lr=1.0))
    fit(net, first)
    first.save_states(path)
    _, second = trainer(lr_scheduler=Halving(base_lr=1.0))
    second.load_states(path)
    assert second.learning_rate == first.learning_rate == 0.125
    net, other = trainer(learning_rate=1.0)
    check_refused(other, net, path, "names test_states_files.Halving, which was not called")


def test_an_optimizer_of_ones_own_loads_where_the_trainer_has_one_of_its_class(path):
    net = make()
    trainer = amp.Trainer(net.collect_params(), Slow(learning_rate=0.5), loss_scale=8)
    fit(net, trainer)
    trainer.save_states(path)
    again = amp.Trainer(net.collect_params(), Slow(learning_rate=0.5), loss_scale=8)
    again.load_states(path)
    assert type(again.optimizer).__name__ == "Slow"
    assert again.optimizer.num_update == 3
    fit(net, again)


class Slow(mx.optimizer.SGD):
    pass


# ---- damaged files

def test_a_single_flipped_bit_is_told(path):
    data = saved(path)
    net = make()
    trainer = of(net)
    fit(net, trainer, 2)
    before = everything(net, trainer)
    for i in range(len(data)):
        with open(path, "wb") as file:
            file.write(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1:])
        with pytest.raises(ValueError, match=r"trainer\.states holds no .* or damaged"):
            trainer.load_states(path)
    assert same(before, everything(net, trainer))


@pytest.mark.filterwarnings("ignore:Exception ignored")  # MXNet's, where an array is half made
def test_flipped_bits_of_a_file_without_a_checksum_are_one_error_or_load(path):
    def load():
        try:
            trainer.load_states(path)
        except ValueError as error:
            return str(error)
        return None

    net = make()
    trainer = of(net)
    fit(net, trainer)
    gluon.Trainer.save_states(trainer, path)
    with open(path, "rb") as file:
        data = file.read()
    for i in range(0, len(data), 17):
        with open(path, "wb") as file:
            file.write(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1:])
        before = everything(net, trainer)
        said = load()
        if said is None:
            net = make()
            trainer = of(net)
            fit(net, trainer)
        else:
            assert path in said
            assert same(before, everything(net, trainer))


@pytest.mark.parametrize("change", [
    lambda o: setattr(o, "trainer_state", 3), lambda o: delattr(o, "lr"),
    lambda o: setattr(o, "trainer_state", {"skipped": "many"}),
    lambda o: setattr(o, "trainer_state", {"names": 3}),
    lambda o: setattr(o, "trainer_state", {"loss_scale": 5})])
def test_contents_that_make_no_sense_are_one_error_that_names_the_file(change, path):
    net = make()
    trainer = of(net)
    fit(net, trainer)
    with open(path, "wb") as file:
        trainer.optimizer.trainer_state = {}
        states, optimizer = pickle.loads(trainer._updaters[0].get_states(dump_optimizer=True))
        optimizer.param_dict = {}
        change(optimizer)
        pickle.dump((states, optimizer), file)
    check_refused(trainer, net, path, r"trainer\.states")
