"""Trainer.save_states and load_states: contents of files, and refusal of unfit files."""
import json
import os
import pickle
import re
import struct
import tracemalloc
from pathlib import Path

import fuzz_states
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import numbers, same
from cases import cases
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import recorded, values, with_trainer

pytestmark = pytest.mark.numpy

NAMES = ["sgd", "nag", "adam", "adamw", "lamb", "lars", "rmsprop", "ftml", "nadam", "adagrad"]


def make(policy="float16", width=4, **kwargs):
    mx.random.seed(5)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(width, in_units=3, activation="relu"), nn.BatchNorm(in_channels=width),
                nn.Dense(2, in_units=width))
    net.initialize(mx.init.Xavier(), **kwargs)
    return amp.convert(net, policy)


def fit(net, trainer, steps=3, overflow=False):
    for _ in range(steps):
        x = nd.random.normal(shape=(4, 3))
        with autograd.record():
            loss = nd.square(net(x)).sum() * (1e30 if overflow else 1)
        getattr(trainer, "backward", autograd.backward)(loss)
        trainer.step(4)


def everything(net, trainer):
    """The complete state that a step depends on."""
    return [*values(net), *numbers(trainer._updaters[0].states), trainer.loss_scale,
            trainer.skipped, trainer.optimizer.num_update]


def of(net, name="sgd", **kwargs):
    params = {"learning_rate": 0.01, **({"momentum": 0.9} if name in ("sgd", "nag") else {})}
    return amp.Trainer(net.collect_params(), name, params,
                       **{"loss_scale": amp.DynamicLossScale(growth_interval=4), **kwargs})


@pytest.fixture()
def path(tmp_path):
    return str(tmp_path / "trainer.states")


@pytest.fixture()
def saved(path):
    """A network and its Trainer after three steps, whose states are saved."""
    net = make()
    trainer = of(net)
    fit(net, trainer)
    trainer.save_states(path)
    return net, trainer


@pytest.mark.parametrize("name", NAMES)
def test_loaded_trainer_continues_bitwise(name, path, tmp_path):
    (net, trainer), (other, resumed) = ((net, of(net, name)) for net in (make(), make()))
    fit(net, trainer, 10)
    fit(net, trainer, 1, overflow=True)
    trainer.save_states(path)
    net.save_parameters(str(tmp_path / "net.params"))
    other.load_parameters(str(tmp_path / "net.params"))
    resumed.load_states(path)
    for one, its_trainer in ((net, trainer), (other, resumed)):
        mx.random.seed(1)
        fit(one, its_trainer, 1, overflow=True)
        fit(one, its_trainer, 10)
    assert same(everything(net, trainer), everything(other, resumed))


def test_optimizer_of_the_script_stays_that_of_its_trainer(path):
    net = make()
    optimizer = mx.optimizer.Adam(learning_rate=0.01)
    trainer = amp.Trainer(net.collect_params(), optimizer)
    fit(net, trainer)
    trainer.save_states(path)
    fit(net, trainer)
    trainer.load_states(path)
    optimizer.set_learning_rate(0.5)
    assert (trainer.learning_rate, optimizer.num_update) == (0.5, 3)
    assert optimizer.param_dict[0] is trainer._params[0]


def test_an_optimizer_for_which_there_is_no_loss_scale_loads_without_one(path):
    net = make("float32")
    trainer = of(net, "lbsgd", loss_scale=None)
    fit(net, trainer)
    trainer.save_states(path)
    trainer.load_states(path)
    assert trainer.optimizer.num_update == 3


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("policy", ["float16", "float32"])
def test_file_of_gluon_trainer_loads(name, policy, path):
    net, other = make(policy), make(policy)
    stock = gluon.Trainer(net.collect_params(), name,
                          {"learning_rate": 0.01, "multi_precision": True})
    fit(net, stock, 4)
    stock.save_states(path)
    trainer = of(other, name)
    trainer.load_states(path)
    assert same(numbers(stock._updaters[0].states), numbers(trainer._updaters[0].states))
    assert (trainer.optimizer.num_update, trainer.loss_scale) == (4, 4)
    fit(other, trainer, 4)
    other[0].weight.set_data(nd.zeros((4, 3)))  # master weights follow writes there, too
    fit(other, trainer, 1)
    assert np.abs(other[0].weight.data().asnumpy()).max() < 0.05


@pytest.mark.parametrize("name", [*NAMES, "plain"])
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_float32_training_continues_in_16_bits(name, policy, path, tmp_path):
    settings = {"learning_rate": 0.01, **({"momentum": 0.9} if name in ("sgd", "nag") else {})}
    optimizer = "sgd" if name == "plain" else name
    net = make("float32")
    stock = gluon.Trainer(net.collect_params(), optimizer, settings)
    fit(net, stock, 4)
    stock.save_states(path)
    net.save_parameters(str(tmp_path / "net.params"))
    other, trainer = with_trainer(make(policy), optimizer, settings)
    trainer.load_states(path)
    other.load_parameters(str(tmp_path / "net.params"), masters=trainer)
    pairs = [(mine, theirs.data()) for mine, theirs in zip(
        other.collect_params().values(), net.collect_params().values()) if mine.grad_req != "null"]
    for mine, theirs in pairs:
        assert (trainer.master(mine) == theirs).asnumpy().all()
    for i, state in stock._updaters[0].states.items():
        master = numbers(trainer.master(trainer._params[i]))
        assert same(numbers(state), [array for array in numbers(trainer._updaters[0].states[i])
                                     if not same([array], master)])
    x = nd.random.normal(shape=(4, 3))
    for one, its_trainer in ((net, stock), (other, trainer)):
        with autograd.record():
            loss = nd.square(one(x)).sum()
        getattr(its_trainer, "backward", autograd.backward)(loss)
        its_trainer.step(4)
    assert trainer.optimizer.num_update == stock.optimizer.num_update == 5
    for mine, theirs in pairs:
        np.testing.assert_allclose(trainer.master(mine).asnumpy(), theirs.asnumpy(), atol=5e-3)


def test_gluon_trainer_loads_what_its_own_method_saves(path):
    net = make("float32")
    trainer = of(net, "adam")
    fit(net, trainer, 4)
    gluon.Trainer.save_states(trainer, path)
    stock = gluon.Trainer(make("float32").collect_params(), "adam")
    stock.load_states(path)
    assert same(numbers(stock._updaters[0].states), numbers(trainer._updaters[0].states))


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore:Exception ignored")  # MXNet's kvstore
def test_states_on_kvstore_are_saved(path):
    devices = [mx.cpu(0), mx.cpu(1)]

    def trained(load=None):
        net, trainer = with_trainer(make("float32", ctx=devices), "adam", loss_scale=None,
                                    update_on_kvstore=True)
        if load:
            trainer.load_states(load)
        trainer.backward(recorded(
            lambda: [nd.square(net(nd.ones((4, 3), ctx=d))).sum() for d in devices]))
        trainer.step(8)
        return trainer

    trained().save_states(path)
    assert trained(path).optimizer.num_update == 2


@pytest.mark.parametrize("content", [
    lambda data: b"", lambda data: data[:1], lambda data: data[:100],
    lambda data: data[:len(data) // 2], lambda data: data[:-1],
    lambda data: b"these are no states", lambda data: b"\x80\x04]\x94.",
    lambda data: pickle.dumps(({}, {})), lambda data: pickle.dumps([1, 2])])
def test_truncated_or_foreign_file_is_refused_and_changes_nothing(content, saved, path):
    net, trainer = saved
    Path(path).write_bytes(content(Path(path).read_bytes()))
    check_refused(trainer, net, path, "holds no optimizer states, or is cut short")


def check_refused(trainer, net, path, message):
    fit(net, trainer, 2)
    before = everything(net, trainer)
    with pytest.raises(ValueError, match=message):
        trainer.load_states(path)
    assert same(before, everything(net, trainer))
    fit(net, trainer, 2)


@pytest.mark.parametrize(("saved", "loading", "message"), [
    ({"name": "adam"}, {}, "holds the states of Adam, not of SGD"),
    ({"width": 5}, {}, r"does not fit .*_weight, \(4, 3\), float16"),
    ({}, {"policy": "float32"}, "does not fit .*_weight, .* float32"),
    ({}, {"count": 2}, r"holds a state of parameter number \d; here are 2"),
    ({}, {"loss_scale": amp.DynamicLossScale(4, maximum=8)},
     r"scale must lie between minimum=\S+ and maximum=8"),
], ids=["optimizer", "shape", "to float32", "more parameters", "scale"])
def test_unfit_file_is_refused_and_changes_nothing(saved, loading, message, path):
    def build(name="sgd", policy="float16", width=4, count=None, loss_scale="dynamic"):
        net = make(policy, width)
        params = [p for p in net.collect_params().values() if p.grad_req != "null"]
        return net, amp.Trainer(params[:count], name, loss_scale=loss_scale)

    net, trainer = build(**saved)
    fit(net, trainer, 2)
    trainer.save_states(path)
    net, trainer = build(**loading)
    check_refused(trainer, net, path, message)


@pytest.mark.parametrize("names", [["dense9_", "dense10_"], ["dense99_", "dense100_"]])
def test_changed_sort_order_of_layers_is_refused(names, path):
    """dense9 sorts behind dense10, and dense10 before dense11."""
    def trained(names):
        net = ready(sequence(*(nn.Dense(3, in_units=3, prefix=name) for name in names)))
        trainer = of(net)
        fit(net, trainer, 1)
        return net, trainer

    trained(names)[1].save_states(path)
    net, trainer = trained(["dense11_", "dense12_"])
    check_refused(trainer, net, path, "in another order")
    net, trainer = trained(names)
    trainer.load_states(path)


def test_missing_file_raises_file_not_found_error(path):
    with pytest.raises(FileNotFoundError):
        of(make()).load_states(path)


def test_failed_save_leaves_old_file_intact(saved, path, tmp_path, monkeypatch):
    net, trainer = saved
    old = Path(path).read_bytes()

    def full(descriptor):
        raise OSError("No space left on device")

    fit(net, trainer)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save_states(path)
    assert Path(path).read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["trainer.states"]


@pytest.mark.parametrize("before", [[mx.cpu(0)], [mx.cpu(1)], [mx.cpu(0), mx.cpu(1)]])
@pytest.mark.parametrize("after", [[mx.cpu(0)], [mx.cpu(1)], [mx.cpu(0), mx.cpu(1)]])
def test_states_continue_on_other_devices(before, after, path):
    def step(net, trainer):
        devices = net[0].weight.list_ctx()
        trainer.backward(recorded(lambda: [
            nd.square(net(nd.array([[1, -2, 3]], ctx=d))).sum() / len(devices) for d in devices]))
        assert trainer.step(1)

    (net, trainer), (other, resumed) = (
        (net, of(net, "adam", loss_scale=64)) for net in (make(ctx=before), make(ctx=after)))
    for _ in range(3):
        step(net, trainer)
    trainer.save_states(path)
    for mine, theirs in zip(other.collect_params().values(), net.collect_params().values()):
        mine.set_data(theirs.data())
    resumed.load_states(path)
    step(net, trainer)
    step(other, resumed)
    expected = net[2].weight.data().asnumpy()
    assert all(np.array_equal(weight.asnumpy(), expected) for weight in other[2].weight.list_data())


def sparse_step(trainer):
    weight, = trainer._params
    trainer.backward(recorded(lambda: weight.row_sparse_data(nd.arange(4)).sum()))
    trainer.step(1)


def sparse_trainer():
    """A Trainer whose only state has four rows."""
    weight = gluon.Parameter("weight", shape=(4, 1), stype="row_sparse", grad_stype="row_sparse")
    weight.initialize(init="ones")
    trainer = amp.Trainer([weight], "sgd", {"learning_rate": 0.1, "momentum": 0.5},
                          loss_scale=None)
    sparse_step(trainer)
    return trainer


@pytest.mark.mx_nd("no sparse arrays")
def test_states_of_row_sparse_weights_are_loaded(path):
    trainer = sparse_trainer()
    trainer.save_states(path)
    trainer.load_states(path)
    sparse_step(trainer)
    found = trainer._params[0].row_sparse_data(nd.arange(4)).asnumpy()
    np.testing.assert_allclose(found, 1 - 0.1 - 0.15, rtol=1e-6)


# ---- contents of files

FILES = Path(__file__).parent / "files"  # that earlier versions have written


def check_old_file(trainer, name):
    """Loads a file; in numpy mode MXNet refuses its arrays."""
    file = str(FILES / name)
    if mx.util.is_np_array():
        with pytest.raises(ValueError, match=r"not written in the present mode of npx\.set_np\(\)"):
            trainer.load_states(file)
        return False
    trainer.load_states(file)
    assert trainer.optimizer.num_update == 3
    return True


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_files_of_version_0_1_0_load(name):
    """Version 0.1.0 had optimizers in other modules and no checksum."""
    net = make()
    trainer = of(net, name, loss_scale=amp.DynamicLossScale())
    if check_old_file(trainer, f"trainer-0.1.0-{name}.states"):
        assert type(trainer.optimizer) is type(of(net, name).optimizer)
        assert trainer.optimizer.lr_scheduler.step == 3
        assert trainer.loss_scale == 1024
        fit(net, trainer)


def test_a_file_of_version_0_2_0_loads_with_averages_and_scheduler():
    net = make()
    trainer = of(net)
    averaged = amp.AveragedWeights(trainer, decay=0.9)
    if check_old_file(trainer, "trainer-0.2.0-sgd.states"):
        assert (averaged.updates, averaged.count) == (3, 3)
        assert not same([averaged.value(net[0].weight).asnumpy()], [net[0].weight.data().asnumpy()])
        assert trainer.optimizer.lr_scheduler.step == [2, 40]
        assert (trainer.learning_rate, trainer.loss_scale, trainer.skipped) == (0.005, 512, 1)
        fit(net, trainer)


def test_a_file_of_version_0_2_0_with_a_number_of_numpy_loads():
    net = make("bfloat16")
    trainer = of(net, "adamw", loss_scale=8)
    if check_old_file(trainer, "trainer-0.2.0-adamw.states"):
        assert trainer.learning_rate == 0.01
        assert isinstance(trainer.learning_rate, np.float64)
        fit(net, trainer)


def test_a_damaged_file_of_version_0_2_0_is_refused(path):
    data = (FILES / "trainer-0.2.0-sgd.states").read_bytes()
    net = make()
    trainer = of(net)
    for i in range(0, len(data), 97):
        Path(path).write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1:])
        with pytest.raises(ValueError, match=r"trainer\.states holds no .* or damaged"):
            trainer.load_states(path)


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("where", ["states", "optimizer"])
def test_file_that_names_other_functions_is_refused_before_execution(where, path, tmp_path,
                                                                       monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = mx.optimizer.SGD()
    made.param_dict = {}
    if where == "optimizer":
        made.evil = Evil()
    Path(path).write_bytes(pickle.dumps(({0: Evil()} if where == "states" else {}, made)))
    net = make()
    check_refused(of(net), net, path, r"trainer\.states .* names posix.system, which was not c")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_files_written_with_numpy_1_or_2_load(core, saved, path):
    """They name internal modules of numpy, which numpy 2 moved."""
    _, trainer = saved
    states, optimizer = pickle.loads(trainer._updaters[0].get_states(dump_optimizer=True))
    optimizer.param_dict, optimizer.lr = {}, np.float64(0.25)
    written = pickle.dumps((states, optimizer), protocol=3)  # writes names of modules as plain text
    both = re.sub(rb"cnumpy\._?core\.", f"c{core}.".encode(), written)
    Path(path).write_bytes(both)
    trainer.load_states(path)
    assert trainer.optimizer.lr == 0.25


SCHEDULERS = {
    "factor": lambda **kwargs: mx.lr_scheduler.FactorScheduler(2, 0.9, **kwargs),
    "multi factor": lambda **kwargs: mx.lr_scheduler.MultiFactorScheduler([3, 7], 0.3, **kwargs),
    "poly": lambda **kwargs: mx.lr_scheduler.PolyScheduler(20, pwr=3, **kwargs),
    "cosine": lambda **kwargs: mx.lr_scheduler.CosineScheduler(9, final_lr=1e-3, **kwargs)}


@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 2, "warmup_begin_lr": 0.01},
                                    {"warmup_steps": 6, "warmup_mode": "constant"}])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_mxnet_resume_exactly_without_being_given(name, warmup, path):
    scheduler = SCHEDULERS[name](base_lr=1 / 3, **warmup)
    net, trainer = scheduled(lr_scheduler=scheduler)
    fit(net, trainer, 5)
    trainer.save_states(path)
    _, resumed = scheduled()
    resumed.load_states(path)
    found = resumed.optimizer.lr_scheduler
    assert (type(found), vars(found)) == (type(scheduler), vars(scheduler))
    assert found is not scheduler
    assert [found(update) for update in range(6, 12)] == [scheduler(i) for i in range(6, 12)]


def test_loading_does_not_change_a_scheduler_of_the_script(path):
    """A script may keep a schedule of more epochs than the file's."""
    longer = mx.lr_scheduler.CosineScheduler(20)
    scheduled(lr_scheduler=mx.lr_scheduler.CosineScheduler(9))[1].save_states(path)
    _, trainer = scheduled(lr_scheduler=longer)
    trainer.load_states(path)
    assert trainer.optimizer.lr_scheduler.max_update == 9
    assert longer.max_update == 20


class Halving(mx.lr_scheduler.LRScheduler):
    """A scheduler of the user's without `state_dict`."""

    def __call__(self, num_update):
        self.last = num_update
        return self.base_lr / 2 ** num_update


class Plateau:
    """A scheduler of the user's, with `state_dict` and an attribute that no file can hold."""

    def __init__(self, base_lr):
        self.base_lr, self.bad, self.judge = base_lr, 0, lambda: None

    def __call__(self, num_update):
        return self.base_lr / 2 ** self.bad

    def state_dict(self):
        return {"bad": self.bad, "best": None}

    def load_state_dict(self, state):
        if not isinstance(state["bad"], int):
            raise ValueError("bad must be an integer")
        self.bad = state["bad"]


def scheduled(**kwargs):
    net = make()
    return net, amp.Trainer(net.collect_params(), "sgd", kwargs, loss_scale=8)


@pytest.mark.parametrize("cls", [Halving, Plateau])
def test_a_scheduler_of_the_user_is_given_again_and_gets_its_state(cls, path):
    net, first = scheduled(lr_scheduler=cls(base_lr=1.0))
    first.optimizer.lr_scheduler.bad = 3
    fit(net, first)
    first.save_states(path)
    again = cls(base_lr=4.0 if cls is Halving else 1.0)
    _, second = scheduled(lr_scheduler=again)
    second.load_states(path)
    assert second.learning_rate == first.learning_rate == 0.125
    assert second.optimizer.lr_scheduler is again
    assert again.last == 3 if cls is Halving else again.bad == 3


@pytest.mark.parametrize("other", [
    {"learning_rate": 1.0}, {"lr_scheduler": Plateau(1.0)},
    {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2, base_lr=1.0)}])
def test_a_scheduler_of_the_user_that_is_not_given_is_refused_by_its_name(other, path):
    net, first = scheduled(lr_scheduler=Halving(base_lr=1.0))
    fit(net, first)
    first.save_states(path)
    net, second = scheduled(**other)
    check_refused(second, net, path,
                  r"trainer\.states .*test_states\.Halving.*lr_scheduler=Halving")


def test_a_state_that_load_state_dict_refuses_changes_nothing(path):
    net, trainer = scheduled(lr_scheduler=Plateau(1.0))
    fit(net, trainer)
    trainer.optimizer.lr_scheduler.bad = 0.5
    trainer.save_states(path)
    trainer.optimizer.lr_scheduler.bad = 1
    check_refused(trainer, net, path, r"trainer\.states .*bad must be an integer")
    assert trainer.learning_rate == 0.5


@pytest.mark.parametrize("value", [print, object(), {1.5: 2}, 2 ** 70])
@pytest.mark.parametrize("owner", ["scheduler", "optimizer"])
def test_an_attribute_that_no_file_can_hold_is_refused_when_saved(owner, value, path):
    scheduler = Halving(base_lr=1.0)
    net, trainer = scheduled(lr_scheduler=scheduler)
    fit(net, trainer)
    (scheduler if owner == "scheduler" else trainer.optimizer).extra = [value]
    with pytest.raises(TypeError, match=r"(Halving|SGD)\.extra\[0\].*state_dict"):
        trainer.save_states(path)
    assert not Path(path).exists()


@pytest.mark.parametrize("name", ["Slow", "Counting"])
def test_an_optimizer_of_the_user_is_given_again(name, path):
    cls = globals()[name]
    net, trainer = with_trainer(make(), cls(learning_rate=0.5), loss_scale=8)
    fit(net, trainer)
    trainer.optimizer.lr = 0.25
    trainer.save_states(path)
    again = amp.Trainer(net.collect_params(), cls(learning_rate=0.5), loss_scale=8)
    again.load_states(path)
    assert type(again.optimizer).__name__ == name
    assert (again.optimizer.num_update, again.learning_rate) == (3, 0.25)
    assert vars(again.optimizer).get("seen") == vars(trainer.optimizer).get("seen")
    fit(net, again)
    check_refused(of(net), net, path, f"holds the states of {name}, not of SGD")


class Slow(mx.optimizer.SGD):
    """With attributes that it sets later."""

    def update(self, index, weight, grad, state):
        self.seen = (np.float32(0.1), {"a": [1, None], 7: np.arange(3).tolist()})
        super().update(index, weight, grad, state)


class Counting(mx.optimizer.SGD):
    """With `state_dict`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen, self.other = 0, object()

    def update(self, index, weight, grad, state):
        self.seen += 1
        super().update(index, weight, grad, state)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


# ---- damaged files

@pytest.mark.parametrize("first", cases([0], range(1, 5)))
def test_single_flipped_bit_is_refused(first, saved, path):
    net, trainer = saved
    data = Path(path).read_bytes()
    fit(net, trainer, 2)
    before = everything(net, trainer)
    for i in range(first, len(data), 5):
        Path(path).write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1:])
        with pytest.raises(ValueError, match=r"trainer\.states holds no .* or damaged"):
            trainer.load_states(path)
    assert same(before, everything(net, trainer))


@pytest.mark.filterwarnings("ignore:Exception ignored")  # MXNet's, for an incomplete array
@pytest.mark.parametrize("first", cases([0], [17, 34, 51]))
def test_flipped_bits_without_checksum_are_refused_or_load(first, saved, path):
    def load():
        try:
            trainer.load_states(path)
        except ValueError as error:
            return str(error)
        return None

    net, trainer = saved
    gluon.Trainer.save_states(trainer, path)
    data, refused = Path(path).read_bytes(), []
    for i in range(first, len(data), 68):
        Path(path).write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1:])
        before = everything(net, trainer)
        said = load()
        if said is None:
            net = make()
            trainer = of(net)
            fit(net, trainer)
        else:
            refused.append(i)
            assert path in said
            assert same(before, everything(net, trainer))
    assert refused


INVALID = [  # settings of an optimizer, pickled or in JSON
    {"lr": float("nan")}, {"wd": None}, {"momentum": float("inf")}, {"num_update": -1},
    {"clip_gradient": float("nan")}, {"wd_mult": []}, {"multi_precision": "yes"}]


def nested(depth, width):
    """Lists within each other, whose pickle is short and whose values are width ** depth."""
    value = []
    for _ in range(depth):
        value = [value] * width
    return value


@pytest.mark.parametrize("change", [
    *INVALID, {"lr_mult": {0: None}}, {"update": np.float64}, {"trainer_state": 3}, {"lr": ...},
    {"trainer_state": {"skipped": "many"}}, {"trainer_state": {"names": 3}},
    {"trainer_state": {"loss_scale": 5}},
    *({"state": value} for value in (nested(40, 2), nested(60, 1), np.complex64(1)))],
    ids=lambda change: next(iter(change)))
def test_invalid_pickled_settings_and_states_are_refused(change, saved, path):
    net, trainer = saved
    states, optimizer = pickle.loads(trainer._updaters[0].get_states(dump_optimizer=True))
    if "state" in change:
        states[0] = change["state"]
        change = {}
    vars(optimizer).update({"trainer_state": {}, **change}, param_dict={})
    if change == {"lr": ...}:  # missing
        del optimizer.lr
    Path(path).write_bytes(pickle.dumps((states, optimizer)))
    check_refused(trainer, net, path, r"trainer\.states")


def nested(depth, width):
    """Lists within each other, whose pickle is short and whose values are width ** depth."""
    value = []
    for _ in range(depth):
        value = [value] * width
    return value


def rewrite(path, change):
    """Changes the values in a file, and gives it a checksum that fits."""
    text, _, arrays = Path(path).read_bytes()[fuzz_states.HEAD:].partition(b"\n")
    saved = json.loads(text)
    change(saved)
    Path(path).write_bytes(fuzz_states.sealed(json.dumps(saved).encode() + b"\n" + arrays))


@pytest.mark.parametrize(("part", "change"), [
    *(("optimizer", change) for change in INVALID),
    ("optimizer", {"lr_mult": {"$dict": [[0, None]]}}), ("optimizer", {"update": 1}),
    ("optimizer", {"_all_index_update_counts": {"$dict": [[0, {"$dict": [[0, "1"]]}]]}}),
    ("optimizer", {"momentum": {"$array": ["nd", 64]}}), ("optimizer", {"momentum": {"$tuple": 5}}),
    ("optimizer", {"extra": {"$dict": [[2 ** 62, 1]]}}),
    # a scheduler without a later rate
    ("scheduler", {"final_lr": float("inf")}), ("scheduler", {"power": float("inf")}),
    ("scheduler", {"max_update": 0}), ("scheduler", {"warmup_steps": 5, "warmup_mode": "slow"}),
    ("scheduler", {"base_lr": "high"}),
    ("training", {"skipped": "many"}), ("training", {"names": 3}), ("training", {"loss_scale": 5}),
    ("training", {"loss_scale": {"scale": "x"}}), ("training", {"averaged": [3]}),
    ("training", {"averaged": 3}),
    *(("training", {"averaged": [{"decay": 0.5, "every": 1, "updates": 1, "count": 1,
                                  "averages": {"$dict": [[number, 1]]}}]}) for number in (0, 99)),
    ("optimizer", {"extra": 10 ** 25}),
    *((part, None) for part in ("states", "optimizer", "scheduler", "training"))])
def test_invalid_contents_with_a_checksum_are_refused(part, change, path):
    def invalid(contents):
        if change is None:  # the part is missing
            del contents[part]
        else:
            (contents[part] if part == "training" else contents[part][1]).update(change)

    net, trainer = with_trainer(make(), "sgd", {"momentum": 0.9, "lr_scheduler":
                                                SCHEDULERS["poly"](base_lr=0.1, warmup_steps=1)})
    amp.AveragedWeights(trainer, 0.5)
    fit(net, trainer)
    trainer.save_states(path)
    rewrite(path, invalid)
    check_refused(trainer, net, path, r"trainer\.states")


def test_data_after_the_end_are_refused(saved, path):
    net, trainer = saved
    body = Path(path).read_bytes()[fuzz_states.HEAD:]
    states = trainer._updaters[0].get_states(dump_optimizer=True)
    for content in (fuzz_states.sealed(body + b"0"), states + b"0", states[:-1] + b"N."):
        Path(path).write_bytes(content)
        check_refused(trainer, net, path, "after its end")


def test_long_digits_in_names_are_refused(saved, path):
    net, trainer = saved
    rewrite(path, lambda saved: saved["training"]["names"].__setitem__(0, "dense" + "9" * 10 ** 5))
    check_refused(trainer, net, path, "another order")


def other_rows(*rows):
    return lambda data: data[:-32] + struct.pack(f"<{len(rows)}q", *rows)


def other_head(place, form, number):
    """A change of the head of a 4 x 1 array, which is before its indices and values."""
    def change(data):
        data = bytearray(data)
        struct.pack_into(f"<{form}", data, len(data) - 32 - 16 - 76 + place, number)
        return bytes(data)
    return change


@pytest.mark.mx_nd("no sparse arrays")
@pytest.mark.parametrize("change", [
    other_rows(0, 4), other_rows(1, 1, 2, 3), other_rows(-1, 1, 2, 3), other_rows(3, 2, 1, 0),
    other_head(12, "q", 3),  # values
    other_head(60, "i", 4), other_head(64, "i", 2),  # type and axes of indices
    other_head(68, "q", 5), other_head(68, "q", -1)])  # more or fewer rows
def test_damaged_row_sparse_states_are_refused(change, path):
    trainer = sparse_trainer()
    trainer.save_states(path)
    data = Path(path).read_bytes()
    assert data.endswith(struct.pack("<4q", 0, 1, 2, 3))
    Path(path).write_bytes(fuzz_states.sealed(change(data)[fuzz_states.HEAD:]))
    before = numbers(trainer._updaters[0].states)
    with pytest.raises(ValueError, match=r"trainer\.states"):
        trainer.load_states(path)
    assert same(before, numbers(trainer._updaters[0].states))


def test_a_network_without_shapes_is_refused(saved, path):
    net = amp.convert(ready(sequence(nn.Dense(4), nn.BatchNorm(), nn.Dense(2), prefix="net_")))
    trainer = of(net)
    with pytest.raises(gluon.parameter.DeferredInitializationError):
        trainer.load_states(path)
    fit(net, trainer, 1)
    trainer.load_states(path)


def test_a_length_beyond_the_end_allocates_nothing(path):
    net = make()
    trainer = of(net)
    fit(net, trainer)
    Path(path).write_bytes(pickle.PROTO + b"\5" + pickle.BYTEARRAY8 + struct.pack("<Q", 2**28))
    tracemalloc.start()
    try:
        check_refused(trainer, net, path, "it ends within an array")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seeds", cases([range(30)], [range(30, 150)]))
def test_crafted_files_are_refused_or_load(seeds, tmp_path):
    for seed in seeds:
        fuzz_states.check(seed, str(tmp_path))
