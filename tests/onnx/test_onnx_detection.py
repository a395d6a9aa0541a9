"""`export_onnx` of detectors: boxes in onnxruntime are those of MXNet, in the same order.

GLUON_AMP_ONNX=1 adds networks of GluonCV, which must be installed.
"""
import os

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd, sym
from mxnet.gluon import nn

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx_models import run  # noqa: E402

x, regions = sym.var("data"), sym.var("regions")
probabilities, offsets, anchors = (sym.var(n) for n in ("probabilities", "offsets", "anchors"))
draw = np.random.RandomState(0)


def boxes(batch, count, centers=False):
    """Rows of class, score, box. No two scores are equal, and many boxes overlap."""
    middle, size = draw.uniform(0, 1, (batch, count, 2)), draw.uniform(0.1, 0.6, (batch, count, 2))
    place = [middle, size] if centers else [middle - size / 2, middle + size / 2]
    scores = draw.permutation(batch * count).reshape(batch, count, 1) / (batch * count)
    classes = draw.randint(-1, 3, (batch, count, 1))
    return np.concatenate([classes, scores, *place], -1).astype(np.float32)


def nms(data=None, **attributes):
    return sym.contrib.box_nms(x, **attributes), {"data": boxes(2, 30) if data is None else data}


def detection(**attributes):
    likely = draw.uniform(0, 1, (2, 4, 20)).astype(np.float32)
    return (sym.contrib.MultiBoxDetection(probabilities, offsets, anchors, **attributes),
            {"probabilities": likely / likely.sum(1, keepdims=True),
             "offsets": draw.normal(size=(2, 80)).astype(np.float32),
             "anchors": boxes(1, 20)[..., 2:]})


def prior(**attributes):
    of_data = sym.sum(x, keepdims=True).reshape((1, 1, 1))
    return (sym.broadcast_add(sym.contrib.MultiBoxPrior(x, **attributes), of_data),
            {"data": draw.normal(size=(1, 3, 5, 7)).astype(np.float32)})


def pooled(op, **attributes):
    corner = draw.uniform(0, 20, (5, 2))
    found = np.concatenate([draw.randint(0, 2, (5, 1)), corner, corner + draw.uniform(
        1, 30, (5, 2))], 1)
    return (op(x, regions, pooled_size=(3, 4), spatial_scale=0.25, **attributes),
            {"data": draw.normal(size=(2, 3, 12, 14)).astype(np.float32),
             "regions": found.astype(np.float32)})


def decoded(**attributes):
    return (sym.contrib.box_decode(x, anchors, **attributes),
            {"data": draw.normal(size=(2, 6, 4)).astype(np.float32),
             "anchors": boxes(1, 6)[..., 2:]})


CASES = {
    "box_nms": nms(), "box_nms by class": nms(id_index=0),
    "box_nms of some": nms(id_index=0, topk=7, valid_thresh=0.3),
    "box_nms of all classes": nms(id_index=0, force_suppress=True, overlap_thresh=0.2),
    "box_nms of centers": nms(boxes(2, 30, True), in_format="center", id_index=0),
    "box_nms to centers": nms(out_format="center", topk=5),
    "box_nms without a class": nms(background_id=1, id_index=0, overlap_thresh=0.05),
    "box_nms of nothing": nms(valid_thresh=2), "box_nms of none": nms(topk=0),
    "box_nms of a list": nms(boxes(1, 10)[0], id_index=0),
    "box_nms in four axes": nms(boxes(6, 10).reshape(2, 3, 10, 6), id_index=0),
    "box_nms of no area": nms(np.roll(boxes(2, 20), 2, -1)[..., [2, 3, 0, 1, 4, 5]],
                              overlap_thresh=0.01),
    "MultiBoxPrior": prior(sizes=(0.3, 0.7), ratios=(1, 2, 0.5)),
    "MultiBoxPrior clipped": prior(sizes=(0.9,), clip=True, steps=(0.2, 0.1), offsets=(0.3, 0.6)),
    "MultiBoxDetection": detection(variances=(1, 0.5, 0.3, 0.2)),
    "MultiBoxDetection of sure boxes": detection(threshold=0.4, clip=False),
    "MultiBoxDetection of some": detection(nms_topk=6, threshold=0.3),
    "MultiBoxDetection of all classes": detection(force_suppress=True, nms_threshold=0.2),
    "MultiBoxDetection of all boxes": detection(nms_threshold=0, threshold=0.35),
    "box_decode": decoded(format="center", std0=0.1, std1=0.2, std2=0.3, std3=0.4),
    "box_decode by default": decoded(std0=0.1),
    "box_decode of corners": decoded(format="corner", clip=0.5),
    "ROIAlign": pooled(sym.contrib.ROIAlign, sample_ratio=2),
    "ROIAlign of any ratio": pooled(sym.contrib.ROIAlign),
    "ROIPooling": pooled(sym.ROIPooling),
}


def check(symbol, file, data):
    """Compares the results of a file with those of MXNet."""
    arrays = {name: nd.array(a) for name, a in data.items()}
    expected = symbol.bind(mx.cpu(), arrays, grad_req="null").forward()[0].asnumpy()
    found, = run(file, data).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_operator_matches_mxnet(case, tmp_path):
    symbol, data = CASES[case]
    file, shapes = str(tmp_path / "one.onnx"), {name: a.shape for name, a in data.items()}
    amp.export_onnx(symbol, file, shapes, "float32", params={})
    check(symbol, file, data)


@pytest.mark.parametrize("case", ["box_nms of some", "MultiBoxDetection",
                                  "MultiBoxDetection of some"])
def test_any_batch_size(case, tmp_path):
    symbol, data = CASES[case]
    file = str(tmp_path / "any.onnx")
    amp.export_onnx(symbol, file, {name: a.shape if name == "anchors" else (None, *a.shape[1:])
                                   for name, a in data.items()}, "float32", params={})
    for batch in (1, 2, 3):
        check(symbol, file, {name: a if name == "anchors" else np.concatenate([a, a[::-1]])[:batch]
                             for name, a in data.items()})


class Detector(gluon.HybridBlock):
    """Anchors of two scales, as in an SSD."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.scales, self.classes, self.places = (nn.HybridSequential() for _ in range(3))
            for _ in range(2):
                self.scales.add(nn.Conv2D(8, 3, strides=2, padding=1, activation="relu"))
                self.classes.add(nn.Conv2D(4 * 3, 3, padding=1))
                self.places.add(nn.Conv2D(4 * 3, 3, padding=1))

    def hybrid_forward(self, F, x):
        found = []
        for scale, classes, places in zip(self.scales, self.classes, self.places):
            x = scale(x)
            found.append((classes(x).transpose((0, 2, 3, 1)).reshape((0, -1, 4)),
                          places(x).transpose((0, 2, 3, 1)).reshape((0, -1)),
                          F.contrib.MultiBoxPrior(x, sizes=(0.3, 0.5), ratios=(1, 2))))
        likely, places, anchors = (F.concat(*each, dim=1) for each in zip(*found))
        likely = F.softmax(likely).transpose((0, 2, 1))
        return F.contrib.MultiBoxDetection(likely, places, anchors, nms_topk=40)


@pytest.mark.parametrize("batch", [2, None])
def test_detector_predicts_as_in_mxnet(batch, tmp_path):
    mx.random.seed(3)
    net, file = Detector(), str(tmp_path / "net.onnx")
    net.initialize(mx.init.Xavier(magnitude=6))
    data = nd.random.normal(shape=(2, 3, 16, 16))
    expected = net(data).asnumpy()
    amp.export_onnx(net, file, (batch, 3, 16, 16), "float32")
    found, = run(file, {"data": data.asnumpy()}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    amp.export_onnx(amp.convert(net), file, (2, 3, 16, 16))
    half, = run(file, {"data": data.asnumpy()}).values()
    # the best boxes; others may change their order
    np.testing.assert_allclose(half[:, 0], expected[:, 0], rtol=0.02, atol=0.01)


@pytest.mark.skipif(not os.environ.get("GLUON_AMP_ONNX"), reason="takes GluonCV and a minute")
@pytest.mark.parametrize(("name", "size"), [("ssd_512_mobilenet1.0_voc", 128),
                                            ("yolo3_mobilenet1.0_voc", 96)])
def test_gluoncv_detector_predicts_as_in_mxnet(name, size, tmp_path):
    from gluoncv import model_zoo
    net = model_zoo.get_model(name, pretrained=False, pretrained_base=False)
    net.initialize()
    net(nd.zeros((1, 3, size, size)))
    for key, parameter in net.collect_params().items():
        shape = parameter.shape
        if key.endswith("weight") and len(shape) == 4:
            values = draw.normal(size=shape) * np.sqrt(1.5 / np.prod(shape[1:]))
            parameter.set_data(nd.array(values / 4 if "predictor" in key else values))
        elif key.endswith("bias"):
            parameter.set_data(nd.array(draw.normal(size=shape) * 0.1))
        elif key.endswith(("gamma", "var")):
            parameter.set_data(nd.array(draw.uniform(0.8, 1.2, shape)))
    data, file = nd.array(draw.uniform(-1, 1, (2, 3, size, size))), str(tmp_path / "net.onnx")
    ids, scores, places = (output.asnumpy() for output in net(data))
    for batch in (2, None):
        amp.export_onnx(net, file, (batch, 3, size, size), "float32")
        found = list(run(file, {"data": data.asnumpy()}).values())
        np.testing.assert_allclose(found[1], scores, rtol=1e-5)
        same = (found[0] == ids)[..., 0] & (abs(found[2] - places) < 1e-3).all(-1)
        assert same.mean() > 0.98  # boxes whose scores differ by rounding may change places


def test_what_onnx_lacks_is_refused(tmp_path):
    symbol, data = pooled(sym.contrib.ROIAlign, aligned=True)
    with pytest.raises(ValueError, match="aligned must be False"):
        amp.export_onnx(symbol, str(tmp_path / "net.onnx"),
                        {name: a.shape for name, a in data.items()}, "float32", params={})
    assert not list(tmp_path.iterdir())
