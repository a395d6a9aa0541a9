"""RecordIO files of images: looked through before training, and read in parts.

MXNet's iterator reads a damaged file as if it ended early, and fills its last batch up with
images that it has given before.
"""
import os
import struct
from array import array
from typing import Any, Sequence

from .._mxnet import mx

_MAGIC = 0xCED7230A  # begins each record
# What begins images that OpenCV reads: JPEG, PNG, BMP, WebP, TIFF, JPEG 2000, PNM, EXR, HDR, Sun.
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"P1",
           b"P2", b"P3", b"P4", b"P5", b"P6", b"v/1\x01", b"#?R", b"\x59\xa6\x6a\x95")


def records(path: str, classes: int) -> Sequence[int]:
    """The bytes at which the records of a RecordIO file begin. It is an error if the file is
    missing, empty or cut short, if a record holds no image, or if a label is no class."""
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist")
    size, at = os.path.getsize(path), 0
    if size == 0:
        raise ValueError(f"{path} is empty")
    begins = array("Q")
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            header = file.read(64).ljust(64, b"\0")
            magic, length, labels, label = struct.unpack("<IIIf", header[:16])
            if magic != _MAGIC:
                raise ValueError(f"{path} is no RecordIO file, or damaged: no record begins at "
                                 f"byte {at}")
            part, length = length >> 29, length & (1 << 29) - 1
            if part in (0, 1):  # a record's only or first part
                begins.append(at)
                one_label = labels == 0  # so it says
                if one_label and not (0 <= label < classes and label == int(label)):
                    raise ValueError(f"{path} has a label {label:g}, and the network {classes} "
                                     "classes, from 0 on: --num-classes")
                image = header[32 + 4 * labels:] if length > 24 else b""
                if labels <= 4 and at + 8 + length <= size and not image.startswith(_IMAGES):
                    raise ValueError(f"{path} has a record at byte {at} that is no image of a kind "
                                     "that MXNet reads")
            at += 8 + (length + 3) // 4 * 4
    if at > size:
        raise ValueError(f"{path} is cut short: its last record ends {at - size} bytes behind it")
    return begins


def records_of_part(path: str, index: str, begins: Sequence[int], part: int, parts: int) -> int:
    """How many records a rank reads that gives MXNet's iterators this `part_index` and `num_parts`.
    MXNet cuts the index, or else the file, into parts of one length; a record belongs to the part
    in which it begins."""
    if index:
        with open(index) as file:
            count = sum(1 for line in file if line.strip())
        step = -(-count // parts)
        return len(range(count)[step * part:step * (part + 1)])
    step = (-(-os.path.getsize(path) // parts) + 3) // 4 * 4
    return sum(step * part <= at < step * (part + 1) for at in begins)


class Unpadded(mx.io.DataIter):
    """A DataIter without what fills up its last batch, which a Module would count.

    Args:
        data_iter: one that begins anew after a reset, as with `round_batch=False`.
        examples: how many it has.
        least: the smallest last batch, since every device needs an example.
    """

    def __init__(self, data_iter: Any, examples: int, least: int = 1):
        super().__init__(data_iter.batch_size)
        self.data_iter, self.examples, self.least = data_iter, examples, least
        self.provide_data, self.provide_label = data_iter.provide_data, data_iter.provide_label
        self.given = 0

    def reset(self) -> None:
        self.data_iter.reset()
        self.given = 0

    def next(self) -> Any:
        if self.given >= self.examples:
            raise StopIteration
        batch = self.data_iter.next()
        count = min(self.batch_size, max(self.examples - self.given, self.least))
        self.given += count
        return mx.io.DataBatch([array[:count] for array in batch.data],
                               [array[:count] for array in batch.label], pad=0)
