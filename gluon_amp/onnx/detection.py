"""MXNet's operators of detectors in ONNX: anchors, boxes, non-maximum suppression, regions.

ONNX's NonMaxSuppression returns the indices of boxes, by class. MXNet returns the boxes themselves
in the order of their scores, those left over as -1.
"""
import ast
from typing import Any, List, Tuple

import numpy as np

from .writer import Operator

_LOWEST = float(np.finfo(np.float32).min)  # the score of a box that takes no part


def _numbers(node: Operator, name: str, default: str) -> Tuple[float, ...]:
    """Returns an attribute of one or several numbers."""
    numbers = ast.literal_eval(node.text(name, default))
    return tuple(numbers) if isinstance(numbers, (tuple, list)) else (float(numbers),)


def prior(node: Operator) -> str:
    """Writes the anchors, which depend on the shape of the data only, as a constant."""
    height, width = node.shape()[2:]
    sizes, ratios = _numbers(node, "sizes", "(1.0,)"), _numbers(node, "ratios", "(1.0,)")
    steps, offsets = _numbers(node, "steps", "(-1, -1)"), _numbers(node, "offsets", "(0.5, 0.5)")
    if min(steps) <= 0:
        steps = 1 / height, 1 / width
    y = (np.arange(height) + offsets[0]) * steps[0]
    x = (np.arange(width) + offsets[1]) * steps[1]
    pairs = [(size, ratios[0]) for size in sizes] + [(sizes[0], ratio) for ratio in ratios[1:]]
    half = np.array([(size * height / width * ratio ** 0.5 / 2, size / ratio ** 0.5 / 2)
                     for size, ratio in pairs])
    centers = np.stack(np.meshgrid(x, y), axis=-1)[:, :, None]
    boxes = np.concatenate([centers - half, centers + half], axis=-1).reshape(1, -1, 4)
    return node.constant(boxes.clip(0, 1) if node.flag("clip") else boxes)


def decode(node: Operator) -> str:
    """Writes boxes of predicted offsets from anchors."""
    deviations = [node.number(f"std{i}", 1.0) for i in range(4)]
    clip = node.number("clip", -1.0)
    return _decoded(node, node.input(0), node.input(1), deviations,
                    centers=node.text("format", "center") == "center",
                    largest=clip if clip > 0 else None)


def _decoded(node: Operator, offsets: str, anchors: str, deviations: Any, centers: bool,
             largest: Any = None) -> str:
    """Returns corners of boxes: `offsets` of centers and sizes, in units of the anchors."""
    place, size = _halves(node, anchors)
    if not centers:
        size = node.add("Sub", size, place)
        place = node.add("Add", place, node.add("Mul", size, node.constant(0.5)))
    moved, grown = _halves(node, node.add("Mul", offsets, node.constant(deviations)))
    middle = node.add("Add", node.add("Mul", moved, size), place)
    if largest is not None:
        grown = node.add("Min", grown, node.constant(largest))
    half = node.add("Mul", node.add("Mul", node.add("Exp", grown), size), node.constant(0.5))
    return node.add("Concat", node.add("Sub", middle, half), node.add("Add", middle, half), axis=2)


def _halves(node: Operator, boxes: str) -> List[str]:
    """Returns the first and the last two of the four numbers of boxes."""
    return node.outputs("Split", 2, boxes, node.constant([2, 2], "int64"), axis=2)


def nms(node: Operator) -> str:
    shape = node.shape()
    count, width = shape[-2:]
    topk = node.whole("topk", -1)
    keep = count if topk < 0 else min(count, topk)
    node.ignore("out_format")
    start, id_index = node.whole("coord_start", 2), node.whole("id_index", -1)
    in_format, out_format = node.text("in_format", "corner"), node.text("out_format", "corner")
    data = node.input(0) if len(shape) == 3 else node.reshape(
        node.input(0), (int(np.prod(shape[:-2])), count, width))
    scores = _column(node, data, node.whole("score_index", 1))
    valid = node.add("Greater", scores, node.constant(node.number("valid_thresh", 0.0)))
    background = node.number("background_id", -1.0)
    if id_index >= 0:
        ids = _column(node, data, id_index)
        valid = node.add("And", valid, node.add("Not", node.add("Equal", ids,
                                                                node.constant(background))))
    by_class = id_index >= 0 and not node.flag("force_suppress")
    if keep < 1:
        return node.input(0)
    rows, ranked = _best(node, data, scores, valid, keep)
    kept = _kept(node, ranked, _columns(node, rows, start, 4),
                 _column(node, rows, id_index) if by_class else None,
                 node.number("overlap_thresh", 0.5), in_format == "center")
    boxes = _to_front(node, rows, kept, keep)
    if in_format != out_format:
        boxes = _converted(node, boxes, start, width, out_format == "center")
    return _filled(node, boxes, keep, shape)


def detection(node: Operator) -> str:
    """Writes `MultiBoxDetection`. A suppressed box keeps its place and has class -1; so do those
    beyond `nms_topk`, which stay in the order of their anchors."""
    if node.whole("background_id", 0) != 0:
        node.refuse(f"background_id must be 0. Received: {node.text('background_id')}")
    count = node.shape()[2]
    probabilities, offsets, anchors = node.x
    best, ids = _of_objects(node, probabilities)
    boxes = _decoded(node, node.reshape(offsets, (node.shape()[0], count, 4)), anchors,
                     _numbers(node, "variances", "(0.1, 0.1, 0.2, 0.2)"), centers=False)
    if node.flag("clip", True):
        boxes = node.add("Clip", boxes, node.constant(0), node.constant(1))
    valid = node.add("GreaterOrEqual", best, node.constant(node.number("threshold", 0.01)))
    valid = node.add("And", valid, node.add("Greater", best, node.constant(-1)))
    data = node.add("Concat", node.unsqueeze(ids, 2), node.unsqueeze(best, 2), boxes, axis=2)
    anchored = _to_front(node, data, valid, count)
    threshold, topk = node.number("nms_threshold", 0.5), node.whole("nms_topk", -1)
    by_class = not node.flag("force_suppress")
    if not 0 < threshold <= 1:
        return anchored
    keep = min(topk, count) if topk > 0 else count
    rows, ranked = _best(node, data, best, valid, keep)
    kept = _kept(node, ranked, _columns(node, rows, 2, 4),
                 _column(node, rows, 0) if by_class else None,
                 np.nextafter(np.float32(threshold), np.float32(0)), False)  # of this overlap, too
    taking_part = node.add("Greater", ranked, node.constant(_LOWEST))
    none = node.constant(-1)
    left = node.add("Where", node.unsqueeze(taking_part, 2), _columns(node, rows, 1, 5), none)
    classes = node.add("Where", node.unsqueeze(kept, 2), _columns(node, rows, 0, 1), none)
    result = node.add("Concat", classes, left, axis=2)
    if keep == count:
        return result
    rest = node.slice(anchored, [keep], [count], [1])
    beyond = node.add("Sub", node.add("Mul", _columns(node, rest, 0, 1), node.constant(0)),
                      node.constant(1))
    rest = node.add("Concat", beyond, _columns(node, rest, 1, 5), axis=2)
    return node.add("Concat", result, rest, axis=1)


def _of_objects(node: Operator, probabilities: str) -> Tuple[str, str]:
    """Returns each anchor's largest probability of a class but the background, and the class."""
    objects = node.slice(probabilities, [1], [node.shape()[1]], [1])
    best = node.add("ReduceMax", objects, axes=[1], keepdims=0)
    ids = node.add("ArgMax", objects, axis=1, keepdims=0)
    return best, node.writer.cast(ids, "float32")


def _column(node: Operator, data: str, index: int) -> str:
    return node.add("Gather", data, node.constant(index, "int64"), axis=2)


def _columns(node: Operator, data: str, start: int, number: int) -> str:
    return node.add("Gather", data, node.constant(range(start, start + number), "int64"), axis=2)


def _best(node: Operator, data: str, scores: str, valid: str, keep: int) -> Tuple[str, str]:
    """Returns the rows with the best scores, the best first, and their scores, which are _LOWEST
    for rows that are not valid."""
    scores = node.add("Where", valid, scores, node.constant(_LOWEST))
    ranked, places = node.outputs("TopK", 2, scores, node.constant([keep], "int64"), axis=1)
    return _picked(node, data, places), ranked


def _picked(node: Operator, data: str, places: str) -> str:
    """Returns the rows at these places of each batch."""
    return node.add("GatherND", data, node.unsqueeze(places, 2), batch_dims=1)


def _kept(node: Operator, ranked: str, boxes: str, ids: Any, overlap: float, centers: bool) -> str:
    """Returns which rows, sorted by scores, remain after non-maximum suppression.

    Args:
        ids: the classes; None suppresses boxes of all classes.
        overlap: a larger overlap suppresses.
        centers: whether boxes have centers and sizes instead of corners.
    """
    if not centers:  # ONNX sorts the corners of a box; MXNet's area of it is 0
        low, high = _halves(node, boxes)
        boxes = node.add("Concat", low, node.add("Max", low, high), axis=2)
    of_classes = node.unsqueeze(ranked, 1)
    if ids is not None:
        classes = node.add("Reshape", node.add("Unique", ids), node.constant([1, -1, 1], "int64"))
        of_classes = node.add("Where", node.add("Equal", node.unsqueeze(ids, 1), classes),
                              of_classes, node.constant(_LOWEST))
    chosen = node.add("NonMaxSuppression", boxes, of_classes,
                     node.constant([np.iinfo(np.int32).max], "int64"),
                     node.constant([overlap], "float32"), node.constant([_LOWEST / 2], "float32"),
                     center_point_box=int(centers))
    at = node.add("Gather", chosen, node.constant([0, 2], "int64"), axis=1)
    number = node.slice(node.add("Shape", chosen), [0], [1])
    ones = node.add("Expand", node.constant(1.0), number)
    zeros = node.writer.cast(node.add("Less", ranked, ranked), "float32")
    return node.writer.cast(node.add("ScatterND", zeros, at, ones), "bool")


def _to_front(node: Operator, rows: str, kept: str, count: int) -> str:
    """Returns kept rows first, in their order, and -1 in the others."""
    order = node.add("Mul", node.writer.cast(kept, "float32"),
                     node.constant(np.arange(count, 0, -1), "float32"))
    ranks, places = node.outputs("TopK", 2, order, node.constant([count], "int64"), axis=1)
    first = node.unsqueeze(node.add("Greater", ranks, node.constant(0)), 2)
    return node.add("Where", first, _picked(node, rows, places), node.constant(-1))


def _converted(node: Operator, rows: str, start: int, width: int, centers: bool) -> str:
    """Returns rows with centers and sizes of boxes instead of corners, or the reverse. As in
    MXNet, boxes whose first number is negative do not change."""
    first, second = _halves(node, _columns(node, rows, start, 4))
    if centers:
        parts = [node.add("Div", node.add("Add", first, second), node.constant(2)),
                 node.add("Sub", second, first)]
    else:
        half = node.add("Div", second, node.constant(2))
        parts = [node.add("Sub", first, half), node.add("Add", first, half)]
    boxes = node.add("Where", node.add("Less", _columns(node, rows, start, 1), node.constant(0)),
                     _columns(node, rows, start, 4), node.add("Concat", *parts, axis=2))
    around = [_columns(node, rows, at, number) for at, number in
              ((0, start), (start + 4, width - start - 4)) if number]
    return node.add("Concat", *around[:bool(start)], boxes, *around[bool(start):], axis=2)


def _filled(node: Operator, rows: str, keep: int, shape: Tuple[int, ...]) -> str:
    """Returns rows of the input's shape; those beyond `keep` are -1."""
    if keep < shape[-2]:
        pads = node.constant([0, 0, 0, 0, shape[-2] - keep, 0], "int64")
        rows = node.add("Pad", rows, pads, node.constant(-1))
    return rows if len(shape) == 3 else node.reshape(rows, shape)


def roi_pooling(node: Operator) -> str:
    return node.add("MaxRoiPool", *node.x, pooled_shape=node.several("pooled_size"),
                    spatial_scale=node.number("spatial_scale"))


def roi_align(node: Operator) -> str:
    """Regions of five numbers begin with the index of their image."""
    node.unset("position_sensitive", "aligned")
    data, regions = node.x
    height, width = node.several("pooled_size")
    count, numbers = node.shape(1)
    if numbers == 5:
        images = node.writer.cast(node.add("Gather", regions, node.constant(0, "int64"), axis=1),
                                  "int64")
        regions = node.add("Gather", regions, node.constant([1, 2, 3, 4], "int64"), axis=1)
    else:
        images = node.constant([0] * count, "int64")
    return node.add("RoiAlign", data, regions, images, output_height=height, output_width=width,
                    sampling_ratio=max(node.whole("sample_ratio", -1), 0),
                    spatial_scale=node.number("spatial_scale"))
