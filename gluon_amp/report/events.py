"""Reads TensorBoard's event files: their scalars, as epochs and steps of a run.

A file is a row of records: a length, its checksum, a message, its checksum. Of the messages
(protocol buffers) only these parts are read, and numbered so in their definition:

    Event: 2 step, 5 summary       Summary: 1 values
    Value: 1 tag, 2 number, 7 what MXBoard's texts have in place of a tag, 8 tensor
    TensorProto: 4 bytes, 5 floats, 6 doubles, 8 strings

What a scalar is stands in its tag: epoch/err_top1, validation/accuracy, val_loss, loss, lr,
gradient_norm, loss_scale, skipped; also Accuracy/val and Loss/train, and what stands in the name
of the folder that MXBoard makes for each of several curves. A text with the tag `arguments` holds
JSON.

A run that was resumed has several files in one folder: a later one that begins where the former
has come to goes on with it.
"""
import json
import math
import re
import struct
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from .runs import Epoch, Run, measurable
from .tables import VALIDATION, quantity_of

LONGEST_RECORD = 2 ** 26  # a longer one is a length that was written over
STEPS = {"loss": "loss", "lr": "lr", "scale": "scale", "skipped": "skipped",
         "gradient_norm": "gradient_norm"}
Series = Dict[int, float]  # step: value


def is_events(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(12)
    return len(head) == 12 and _masked_crc(head[:8]) == struct.unpack("<I", head[8:])[0]


def read(path: Path, name: str) -> List[Run]:
    """The run that a file is of; ValueError where it has no result of an epoch."""
    scalars, arguments = _scalars(path)
    run = Run(name, arguments)
    of_epochs: Dict[str, Series] = {}
    of_steps: Dict[str, Series] = {}
    known = _all_known({tag: tag for tag in scalars})
    if not known and len(scalars) == 1:
        known = _all_known(dict.fromkeys(scalars, path.parent.name))
    validated = {of[0] for tag, of in known.items() if VALIDATION.search(_as_column(tag))}
    for tag, (quantity, value_of) in known.items():
        if quantity in ("top1", "top5") and not VALIDATION.search(_as_column(tag)):
            if quantity in validated:  # acc is of training where there is a val_acc
                continue
            if re.fullmatch("train(ing)?", path.parent.name) and value_of is not float:
                raise ValueError(f"{path}: {tag} is of training, as the folder's name says. Give "
                                 "the file of validation")
        series = scalars[tag]
        values = {step: value_of(value) for step, value in series.items() if measurable(value)}
        by_step = quantity in STEPS and not tag.startswith("epoch")
        (of_steps if by_step else of_epochs).setdefault(quantity, {}).update(values)
    steps = sorted({step for name, series in of_epochs.items() for step in series
                    if name in ("top1", "top5")})
    if not steps:
        raise ValueError(f"{path} has no scalar of validation by epoch. Known: epoch/err_top1, "
                         "validation/accuracy, val_acc and the like. Its tags: "
                         f"{', '.join(scalars) or 'none':.200}")
    numbers = _epoch_numbers(steps)
    if max(steps) > len(steps) and list(numbers.values()) == list(range(len(steps))):
        run.notes.append(f"its {len(steps)} results stand at steps {steps[0]:,} to {steps[-1]:,}; "
                         "each is taken for an epoch")
    for quantity, series in of_epochs.items():
        for step, value in series.items():
            if step in numbers:
                setattr(run.epochs.setdefault(numbers[step], Epoch()), quantity, value)
    run.epochs = dict(sorted(run.epochs.items()))
    _add_steps(run, of_steps)
    return [run]


def continues(run: Run, former: Run) -> bool:
    """Whether a file of the same folder goes on with the run that was resumed."""
    def which(one: Run) -> Tuple[Any, ...]:  # a resumed run may train more epochs
        return one.dtype, one.seed, one.model, one.dataset
    return 0 < min(run.epochs) <= former.done and which(run) == which(former)


def _all_known(names: Dict[str, str]) -> Dict[str, Tuple[str, Any]]:
    """For each tag whose name is that of a quantity, what `_known` says of the name."""
    found = {tag: _known(name) for tag, name in names.items()}
    return {tag: of for tag, of in found.items() if of}


def _as_column(tag: str) -> str:
    """How a table would call what this tag is of: Accuracy/val is val_accuracy."""
    name = re.sub(r"\W+", "_", tag.lower())
    return re.sub(r"^(.+)_(train|training|val|valid|validation|test|eval)$", r"\2_\1", name)


def _known(tag: str) -> Optional[Tuple[str, Any]]:
    """Which quantity a tag names, and how its value becomes ours."""
    name = _as_column(tag)
    if re.search(r"grad(ient)?_norm$", name):
        return "gradient_norm", float
    if re.search(r"train(ing)?_loss$", name):
        return "loss", float
    found = quantity_of(name)
    if not found:
        return None
    quantity = found[1]
    return quantity.split()[0], (lambda value: 1 - value) if "accuracy" in quantity else float


def _epoch_numbers(steps: List[int]) -> Dict[int, int]:
    """The number of the epoch at each step: where steps count one by one, they are epochs; else
    the first step is epoch 0, the second epoch 1, and so on."""
    begin = steps[0] if steps[0] in (0, 1) else 0
    if steps == list(range(steps[0], steps[0] + len(steps))):
        return {step: step - begin if begin else step for step in steps}
    return {step: number for number, step in enumerate(steps)}


def _add_steps(run: Run, series: Dict[str, Series]) -> None:
    last = max((step for values in series.values() for step in values), default=0)
    run.batches = max(1, math.ceil((last + 1) / run.done))
    skipped = series.get("skipped", {})
    for quantity, values in series.items():
        for step, value in sorted(values.items()):
            epoch, batch = divmod(step, run.batches)
            if quantity == "scale":
                run.follow(epoch, batch, value, skipped.get(step))
            elif quantity != "skipped":
                run.add_step(STEPS[quantity], epoch, batch, value)


# ---- the file

def _scalars(path: Path) -> Tuple[Dict[str, Series], Dict[str, Any]]:
    """Values by tag and step, and the run's arguments."""
    found: Dict[str, Series] = {}
    arguments: Dict[str, Any] = {}
    for record in _records(path):
        step, summary = 0, b""
        for field, value in _fields(record):
            if field == 2 and isinstance(value, int):
                step = value
            elif field == 5 and isinstance(value, bytes):
                summary = value
        for field, value in _fields(summary):
            if field != 1 or not isinstance(value, bytes):
                continue
            parts = dict(_fields(value))
            tag = parts.get(1, parts.get(7))
            name = tag.decode(errors="replace") if isinstance(tag, bytes) else ""
            number, text = _value(parts)
            if number is not None:
                found.setdefault(name, {})[step] = number
            elif name.split("/")[0] == "arguments" and text is not None:
                arguments = _arguments(text)
    return found, arguments


def _value(parts: Dict[int, Any]) -> Tuple[Optional[float], Optional[bytes]]:
    """The number, or the text, of a summary's value."""
    if isinstance(parts.get(2), bytes) and len(parts[2]) == 4:
        return struct.unpack("<f", parts[2])[0], None
    tensor = dict(_fields(parts[8])) if isinstance(parts.get(8), bytes) else {}
    for field, form in ((5, "<f"), (6, "<d"), (4, "<f")):
        content = tensor.get(field)
        if isinstance(content, bytes) and len(content) == struct.calcsize(form):
            return struct.unpack(form, content)[0], None
    return None, tensor.get(8) if isinstance(tensor.get(8), bytes) else None


def _arguments(text: bytes) -> Dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _records(path: Path) -> Iterator[bytes]:
    """The file's records that are whole: a run that was killed leaves a part of one at the end."""
    with open(path, "rb") as file:
        while True:
            head = file.read(12)
            if len(head) < 12:
                return
            length, crc = struct.unpack("<QI", head)
            if crc != _masked_crc(head[:8]) or length > LONGEST_RECORD:
                raise ValueError(f"{path} is damaged at byte {file.tell() - 12}")
            data = file.read(length + 4)
            if len(data) < length + 4:
                return
            yield data[:length]


def _fields(message: bytes) -> Iterator[Tuple[int, Any]]:
    """The numbered parts of a message: whole numbers, or bytes; ends where it makes no sense."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _varint(message, at)
        if length is None or at + length > len(message):
            return
        yield key >> 3, message[at:at + length]
        at += length


def _varint(message: bytes, at: int) -> Tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    return value, at


def _crc_table() -> List[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC = _crc_table()  # CRC-32C, as these files have it


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
