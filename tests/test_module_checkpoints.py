"""Checkpoints of amp.Module, and amp.BucketingModule."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from modules import (
    OPTIMIZERS,
    OVERFLOW,
    TWO,
    batch,
    dynamic,
    everything,
    learn,
    made,
    net,
    same,
    train,
    values,
)
from mxnet import nd
from mxnet import symbol as S

# ---- checkpoints

def resumed(prefix, optimizer, **kwargs):
    mod = amp.Module.load(prefix, 1, True, label_names=["head_label"],
                          **{"loss_scale": "dynamic", **kwargs})
    mod.bind([("data", (6, 3, 6, 6))], [("head_label", (6, 3))])
    mod.init_optimizer(optimizer=optimizer[0], optimizer_params=optimizer[1])
    return mod


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "scheduled"])
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("saves_before", [False, True])
def test_a_loaded_checkpoint_goes_on_bit_by_bit(optimizer, policy, saves_before, tmp_path):
    prefix = str(tmp_path / "net")

    def maker():  # as a new process makes it
        schedule = mx.lr_scheduler.FactorScheduler(4, 0.5, base_lr=0.1)
        return OPTIMIZERS.get(optimizer, ("sgd", {"momentum": 0.9, "lr_scheduler": schedule}))

    overflow = batch(label=OVERFLOW)
    mod = made(net(policy), optimizer=maker(), loss_scale=dynamic(growth_interval=4))
    train(mod, 10)
    if saves_before:
        mod.save_checkpoint(prefix, 0, True)
    assert learn(mod, overflow) is False
    mod.save_checkpoint(prefix, 1, True)
    other = resumed(prefix, maker(), loss_scale=dynamic(growth_interval=4))
    assert same(everything(mod), everything(other))
    for m in (mod, other):
        assert learn(m, overflow) is False
        train(m, 10, first=10)
    assert same(everything(mod), everything(other))


def test_a_checkpoint_holds_a_symbol_for_mxnets_module(tmp_path):
    mod = made(net(), loss_scale=64)
    train(mod, 1)
    mod.save_checkpoint(str(tmp_path / "net"), 1)
    text = (tmp_path / "net-symbol.json").read_text()
    assert "_gluon_amp" not in text
    assert "gluon_amp_loss_scale" not in text
    stock = mx.mod.Module.load(str(tmp_path / "net"), 1, label_names=["head_label"])
    assert stock.symbol.tojson() == net().tojson()


@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_a_float32_checkpoint_trains_under_a_float16_symbol(context, tmp_path):
    prefix = str(tmp_path / "net")
    made(net(None), mx.mod.Module).save_checkpoint(prefix, 1)
    net().save(f"{prefix}-symbol.json")
    mod = amp.Module.load(prefix, 1, label_names=["head_label"], context=context, loss_scale=64)
    mod.bind([("data", (6, 3, 6, 6))], [("head_label", (6, 3))])
    mod.init_optimizer()
    assert learn(mod, batch())


@pytest.mark.parametrize("kind", ["cut", "foreign", "adam", "network"])
def test_states_that_do_not_fit_are_clear_errors_and_change_nothing(kind, tmp_path):
    path = tmp_path / "m.states"
    mod = made(net(), loss_scale=dynamic())
    train(mod, 3)
    if kind == "network":
        donor = made(S.LinearRegressionOutput(S.FullyConnected(S.var("data"), num_hidden=3),
                                              name="head"), loss_scale=dynamic(4))
    else:
        donor = made(net(), optimizer="adam" if kind == "adam" else "momentum",
                     loss_scale=dynamic(4))
    train(donor, 2)
    donor.save_optimizer_states(str(path))
    if kind in ("cut", "foreign"):
        path.write_bytes(path.read_bytes()[:-20] if kind == "cut" else b"no states")
    before = everything(mod)
    with pytest.raises(ValueError, match=r"m\.states"):
        mod.load_optimizer_states(str(path))
    assert same(everything(mod), before)


def test_a_failing_save_leaves_the_old_files_whole(tmp_path, monkeypatch):
    mod = made(net(), loss_scale=dynamic())
    mod.save_checkpoint(str(tmp_path / "net"), 1, True)
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    train(mod, 1)

    def full(path, *args):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(nd, "save", full)
    with pytest.raises(OSError, match="No space"):
        mod.save_checkpoint(str(tmp_path / "net"), 1, True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old


# ---- buckets

def words(length, seed=0):
    rng = np.random.default_rng(seed)
    return mx.io.DataBatch([nd.array(rng.integers(0, 20, (4, length)))],
                           [nd.array(rng.integers(0, 3, 4))], bucket_key=length,
                           provide_data=[("data", (4, length))],
                           provide_label=[("softmax_label", (4,))])


def sentences(length, policy):
    x = S.Embedding(S.var("data"), input_dim=20, output_dim=6, name="embed")
    x = S.FullyConnected(S.sum(x, axis=1), num_hidden=3, name="fc")
    return amp.convert_symbol(S.SoftmaxOutput(x, name="softmax"), policy), ["data"], \
        ["softmax_label"]


def bucketing(policy="float16", cls=amp.BucketingModule, **kwargs):
    mod = cls(lambda length: sentences(length, policy), default_bucket_key=9, **kwargs)
    mod.bind(words(9).provide_data, words(9).provide_label)
    mx.random.seed(3)
    mod.init_params(mx.init.Xavier())
    mod.init_optimizer(optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    return mod


@pytest.mark.parametrize("scale", [None, 1024, "dynamic"])
def test_float32_buckets_train_bit_by_bit_as_with_mxnets_module(scale):
    mod, stock = bucketing("float32", loss_scale=scale), \
        bucketing("float32", mx.mod.BucketingModule)
    for seed, length in enumerate((9, 5, 7, 5, 9)):
        learn(mod, words(length, seed))
        learn(stock, words(length, seed))
    assert same(values(mod), values(stock))


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_buckets_share_parameters_scale_and_loaded_states(policy, tmp_path):
    mod, other = (bucketing(policy, loss_scale=dynamic(growth_interval=2)) for _ in range(2))
    for length in (9, 5, 9):
        learn(mod, words(length))
    mod.save_optimizer_states(str(tmp_path / "m.states"))
    other.switch_bucket(5, words(5).provide_data, words(5).provide_label)
    other.set_params(*mod.get_params())
    other.load_optimizer_states(str(tmp_path / "m.states"))
    for length in (5, 9, 7):
        learn(mod, words(length))
        learn(other, words(length))
        assert same(values(mod), values(other)), length
    assert mod.loss_scale == other.loss_scale == 2 ** 13


def test_all_buckets_are_clipped():
    mod = bucketing("float32", clip_norm=1e-3)
    for length in (9, 5):
        before = values(mod)
        learn(mod, words(length))
        moved = sum(((v - before[k]) ** 2).sum() for k, v in values(mod).items())
        assert moved ** 0.5 < 2e-4  # learning rate 0.1, and some momentum


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_every_bucket_gives_out_parameters_that_were_set(policy):
    mod = bucketing(policy)
    learn(mod, words(5))
    args, aux = mod.get_params()
    mod.set_params({k: nd.full(a.shape, 7) for k, a in args.items()}, aux)
    mod.forward(words(9), is_train=False)
    assert all((v == 7).all() for v in values(mod).values())


def test_a_bucketing_checkpoint_loads_with_a_loss_scale(tmp_path):
    mod, prefix = bucketing(loss_scale=64), str(tmp_path / "net")
    learn(mod, words(5))
    mod.save_checkpoint(prefix, 1)
    loaded = amp.BucketingModule.load(prefix, 1, lambda n: sentences(n, "float16"), 9,
                                      loss_scale=64)
    loaded.bind(words(9).provide_data, words(9).provide_label)
    loaded.init_optimizer()
    assert learn(loaded, words(9))


def test_a_scale_that_is_not_taken_over_is_said(caplog, tmp_path):
    prefix = str(tmp_path / "net")
    mod = made(net(), loss_scale="dynamic")
    train(mod, 3)
    mod.save_checkpoint(prefix, 1, True)
    resumed(prefix, OPTIMIZERS["momentum"], loss_scale=None)
    assert f"dynamic loss scale, {mod.loss_scale:g}, is left: here loss_scale is None" \
        in caplog.text


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none-symbol\.json does not exist"):
        amp.Module.load(str(tmp_path / "none"), 3)
    with pytest.raises(FileNotFoundError, match=r"none-0003\.params does not exist"):
        amp.BucketingModule.load(str(tmp_path / "none"), 3, lambda key: None, 10)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("mxnets", [False, True])
def test_states_go_on_on_another_number_of_devices(mxnets, first, then, tmp_path):
    """A kvstore of MXNet's numbers them by name, ours by parameter and device. MXNet's Module
    saves no counts, which Adam needs."""
    prefix, optimizer = str(tmp_path / "net"), "momentum" if mxnets else "adam"
    symbol = S.LinearRegressionOutput(S.FullyConnected(S.var("data"), num_hidden=3, name="fc"),
                                      name="head")  # no batch norm: each device has its own
    kwargs = {} if mxnets else {"loss_scale": 64}
    mod = made(symbol, mx.mod.Module if mxnets else amp.Module, optimizer, context=TWO[:first],
               **kwargs)
    train(mod, 3)
    mod.save_checkpoint(prefix, 1, True)
    other = resumed(prefix, OPTIMIZERS[optimizer], loss_scale=64, context=TWO[:then])
    for one in (mod, other):
        train(one, 1, first=3)
    expected = values(mod)
    for group in other._exec_group.param_arrays:
        assert all(np.array_equal(group[0].asnumpy(), one.asnumpy()) for one in group)
    for name, value in values(other).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
