"""amp.data: data is cast, labels are not."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu.bfloat16 import BFLOAT16
from gluon_amp.formats import FORMATS
from mxnet import gluon, nd

TYPES = {"float16": np.float16, "bfloat16": BFLOAT16}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("transform", ["transform", "transform_first"])
def test_data_loader_casts_data_and_not_labels(transform, dtype, workers, rng):
    x, y = rng.standard_normal((8, 3)).astype("float32"), np.arange(5000, 5008, dtype="int32")
    dataset = getattr(gluon.data.ArrayDataset(x, y), transform)(amp.data.Cast(dtype))
    (data, label), = gluon.data.DataLoader(dataset, 8, num_workers=workers)
    assert data.dtype == TYPES[dtype]
    assert np.array_equal(data.asnumpy(), FORMATS[dtype].round(x))
    assert label.dtype == np.int32
    assert np.array_equal(label.asnumpy(), y)


def test_numpy_and_mxnet_arrays_are_cast_equally(rng):
    x = rng.standard_normal(1000).astype("float32")
    cast = amp.data.Cast()
    assert np.array_equal(cast(x), cast(nd.array(x)).asnumpy())
    ids = np.arange(3000)
    assert cast(ids) is ids


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("prefetched", [False, True])
def test_iterator_casts_data_and_not_labels(prefetched, dtype, rng):
    x, y = rng.standard_normal((20, 3)).astype("float32"), np.arange(4000, 4020, dtype="float32")
    plain = mx.io.NDArrayIter(x, y, 5)
    it = amp.data.CastIter(mx.io.PrefetchingIter(plain) if prefetched else plain, dtype)
    assert [(d.name, d.shape, d.dtype) for d in it.provide_data] == [("data", (5, 3), TYPES[dtype])]
    assert it.provide_label[0].dtype == np.float32
    for _ in range(2):
        batches = list(it)
        assert {b.data[0].dtype for b in batches} == {TYPES[dtype]}
        assert np.array_equal(np.concatenate([b.data[0].asnumpy() for b in batches]),
                              FORMATS[dtype].round(x))
        assert np.array_equal(np.concatenate([b.label[0].asnumpy() for b in batches]), y)
        it.reset()


def test_module_accepts_cast_iterator(rng):
    x, y = rng.standard_normal((20, 3)).astype("float32"), rng.integers(0, 2, 20)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    net = amp.convert_symbol(mx.sym.SoftmaxOutput(net, name="softmax"))
    module = amp.Module(net, loss_scale=64)
    module.fit(amp.data.CastIter(mx.io.NDArrayIter(x, y, 5)), num_epoch=1)
    assert module.get_params()[0]["fc_weight"].dtype == np.float16


def test_bucketing_module_accepts_cast_iterator():
    sentences = [[1, 2, 3]] * 4 + [[1, 2, 3, 4, 5, 6]] * 4
    it = amp.data.CastIter(mx.rnn.BucketSentenceIter(sentences, 4, buckets=[4, 10]))
    batches = list(it)
    assert sorted(batch.bucket_key for batch in batches) == [4, 10]
    for batch in batches:
        assert [a.shape for a in batch.data] == [d.shape for d in batch.provide_data]
        assert [a.shape for a in batch.label] == [d.shape for d in batch.provide_label]
        assert [d.dtype for d in batch.provide_data] == [np.float16]
    it.reset()

    def bucket(length):
        words = mx.sym.Embedding(mx.sym.var("data"), input_dim=10, output_dim=4, name="words")
        out = mx.sym.FullyConnected(mx.sym.reshape(words, (-1, 4)), num_hidden=10, name="out")
        label = mx.sym.reshape(mx.sym.var("softmax_label"), (-1,))
        net = amp.convert_symbol(mx.sym.SoftmaxOutput(out, label, name="softmax"))
        return net, ("data",), ("softmax_label",)

    module = amp.BucketingModule(bucket, 10, loss_scale=64)
    module.fit(it, num_epoch=1)
    assert module.get_params()[0]["out_weight"].dtype == np.float16


@pytest.mark.parametrize(("label", "said"), [
    *((label, "labels are float16, which counts to 2048 only") for label in (
        np.array([1, 2050], "float16"), nd.array([3e4], dtype="float16"), np.float16(4096),
        mx.np.array([3e4], dtype="float16"))),
    (nd.array([1, 258]).astype("bfloat16"), "labels are bfloat16, which counts to 256 only")])
def test_large_16_bit_labels_are_refused(label, said):
    with pytest.raises(ValueError, match=said):
        amp.data.Cast()(np.zeros(3, "float32"), label)
    if isinstance(label, nd.NDArray):
        it = amp.data.CastIter(_Batches(label))
        with pytest.raises(ValueError, match=f"{said}.*Received: a label of (30000|258)"):
            it.next()


class _Batches(mx.io.DataIter):
    def __init__(self, label):
        super().__init__(1)
        self.label = label
        self.provide_data, self.provide_label = [("data", (1, 3))], []

    def next(self):
        return mx.io.DataBatch([nd.zeros((1, 3))], [self.label], 0)


def test_small_float16_labels_and_other_types_are_accepted():
    for label in (np.array([2048], "float16"), np.zeros(0, "float16"),
                  np.array([10 ** 6], "int64"), 7, 3.5):
        assert amp.data.Cast()(np.zeros(3, "float32"), label)[1] is label


@pytest.mark.parametrize("make", [amp.data.Cast, lambda d: amp.data.CastIter(_Batches(None), d)])
def test_other_types_are_refused(make):
    with pytest.raises(ValueError, match=r"float16, bfloat16 or float32. Received: 'int8'"):
        make("int8")


def test_other_data_is_refused():
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(np.ones((2, 1))), 1)
    for given, name in ((None, "NoneType"), (loader, "DataLoader"), ([], "list")):
        with pytest.raises(TypeError, match=rf"takes a DataIter of .*Received: {name}, without"):
            amp.data.CastIter(given)
    for given in ([1, 2], None, 0.5):
        with pytest.raises(TypeError, match=r"arrays of MXNet or numpy. Received: "):
            amp.data.Cast()(given)


def test_numpy_arrays_of_mxnet_are_cast_to_bfloat16():
    with mx.util.np_shape(True), mx.util.np_array(True):
        for given in (mx.np.ones(3), np.ones(3, "float32")):
            cast = amp.data.Cast("bfloat16")(given)
            assert isinstance(cast, mx.np.ndarray)
            assert cast.dtype == BFLOAT16
