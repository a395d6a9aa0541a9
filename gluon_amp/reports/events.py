"""TensorBoard's event files: reads their scalars, as epochs and steps of a run, and writes files.

The package of TensorBoard reads and writes the file; it is the extra `tensorboard`.

The tag of a scalar names its quantity: epoch/err_top1, validation/accuracy, val_loss, loss, lr,
gradient_norm, loss_scale, skipped; also Accuracy/val and Loss/train, and the name of a folder with
one curve. A text with the tag `arguments` is JSON.

A resumed run has several files in one folder. A later file continues a former one if its first step
follows the last step of that.
"""
import json
import math
import re
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from ..checks import imports_of
from .runs import STEPS, Epoch, Run, measurable
from .tables import QUANTITIES, VALIDATION, known, put_all

Series = Dict[int, float]  # step: value


def is_events(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return b"brain.Event:" in file.read(64)  # the version, in its first record


def read(path: Path, name: str) -> List[Run]:
    """Returns the run of a file. Raises ValueError if it has no result of an epoch."""
    scalars, arguments = _scalars(path)
    run = Run(name, arguments)
    of_epochs: Dict[str, Series] = {}
    of_steps: Dict[str, Series] = {}
    columns = {tag: _as_column(tag) for tag in scalars}
    quantities = known(columns)
    if not quantities and len(scalars) == 1:
        quantities = known(dict.fromkeys(scalars, path.parent.name))
    for tag, (_, quantity) in quantities.items():
        if "accuracy" in quantity and not VALIDATION.search(columns[tag]) \
                and re.fullmatch("train(ing)?", path.parent.name):
            raise ValueError(f"{path}: {tag} is of training, as the folder's name says. Give the "
                             "file of validation")
        by_step = quantity in STEPS and not tag.startswith("epoch")
        (of_steps if by_step else of_epochs).setdefault(quantity, {}).update(
            {step: value for step, value in scalars[tag].items() if measurable(value)})
    results = [quantity for quantity in of_epochs if quantity.startswith("top")] or \
        of_epochs.keys() - QUANTITIES.keys() or of_epochs.keys() & {"validation_loss"}
    steps = sorted({step for quantity in results for step in of_epochs[quantity]})
    if not steps:
        raise ValueError(f"{path} has no scalar of validation by epoch. Known: epoch/err_top1, "
                         "validation/accuracy, val_acc and the like. Its tags: "
                         f"{', '.join(scalars) or 'none':.200}")
    numbers = _epoch_numbers(steps)
    if max(steps) > len(steps) and list(numbers.values()) == list(range(len(steps))):
        run.notes.append(f"its {len(steps)} results stand at steps {steps[0]:,} to {steps[-1]:,}; "
                         "each is taken for an epoch")
    run.epochs = {number: Epoch() for number in numbers.values()}
    put_all((run.epochs[numbers[step]], quantity, value) for quantity, series in of_epochs.items()
            for step, value in series.items() if step in numbers)
    last = max((step for values in of_steps.values() for step in values), default=0)
    run.batches = max(1, math.ceil((last + 1) / run.done))
    for quantity, values in of_steps.items():
        for step, value in sorted(values.items()):
            run.add_step(*divmod(step, run.batches), {quantity: value})
    return [run]


def continues(run: Run, former: Run) -> bool:
    """Whether a run continues a former one of the same folder."""
    alike = ("dtype", "seed", "model", "dataset")  # a resumed run may train more epochs
    return 0 < min(run.epochs) <= former.done and all(
        getattr(run, name) == getattr(former, name) for name in alike)


def _as_column(tag: str) -> str:
    """Returns the name of a tag's quantity in tables: val_accuracy for Accuracy/val."""
    name = re.sub(r"\W+", "_", tag.lower())
    return re.sub(r"^(.+)_(train|training|val|valid|validation|test|eval)$", r"\2_\1", name)


def _epoch_numbers(steps: List[int]) -> Dict[int, int]:
    """Returns the epoch of each step: consecutive steps are epochs; otherwise the first step is
    epoch 0, the second epoch 1, and so on."""
    if steps == list(range(steps[0], steps[0] + len(steps))):
        return {step: step - (steps[0] == 1) for step in steps}
    return {step: number for number, step in enumerate(steps)}


# ---- the file

def _scalars(path: Path) -> Tuple[Dict[str, Series], Dict[str, Any]]:
    """Returns values by tag and step, and the run's arguments."""
    series: Dict[str, Series] = {}
    arguments: Dict[str, Any] = {}
    for event in _events(path):
        for value in event.summary.value:
            content = value.simple_value if value.HasField("simple_value") else \
                _content(value.tensor)
            if isinstance(content, float):
                series.setdefault(value.tag, {})[event.step] = content
            elif isinstance(content, bytes) and value.tag.split("/")[0] == "arguments":
                with suppress(ValueError):
                    parsed = json.loads(content)
                    arguments = parsed if isinstance(parsed, dict) else {}
    return series, arguments


def _events(path: Path) -> Iterator[Any]:
    """Yields the file's complete records; a killed run leaves a partial one at the end. A record
    is a length and its checksum, and an event and its checksum."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
    except ImportError as error:
        raise ValueError(f"{path} is TensorBoard's, whose package reads it: pip install "
                         f"tensorboard ({error})") from None
    with open(path, "rb") as file:
        begin = 0
        while len(head := file.read(12)) == 12:
            length, checksum = struct.unpack("<QI", head)
            right = checksum == masked_crc32c(head[:8])
            record, checksum = (file.read(length), file.read(4)) if right else (b"", b"")
            if right and len(checksum) < 4:
                return
            try:
                if not right or checksum != struct.pack("<I", masked_crc32c(record)):
                    raise DecodeError
                yield Event.FromString(record)
            except DecodeError:
                raise ValueError(f"{path} is damaged at byte {begin}") from None
            begin = file.tell()


def _content(tensor: Any) -> Optional[Any]:
    """Returns the single number, or the text, of a tensor."""
    from tensorboard.util.tensor_util import make_ndarray
    try:
        array = make_ndarray(tensor)
    except (TypeError, ValueError):  # of a type, or of sizes, that no array has
        return None
    return array.item() if array.size == 1 else None


class EventFile:
    """Writes numbers and texts to a TensorBoard event file."""

    def __init__(self, folder: str) -> None:
        with imports_of("tensorboard", "tensorboard="):
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._tensor = tensor_pb2.TensorProto
        self._file = EventFileWriter(folder)
        self.close = self._file.close

    def add(self, step: int, tag: str, value: Union[float, str]) -> None:
        """Adds a number or a text."""
        scalar = self._summary.Value(tag=tag)
        if isinstance(value, str):
            scalar.metadata.plugin_data.plugin_name = "text"
            scalar.tensor.CopyFrom(self._tensor(dtype="DT_STRING", string_val=[value.encode()]))
        else:
            scalar.simple_value = value
        self._file.add_event(self._event(step=step, wall_time=time.time(),
                                         summary=self._summary(value=[scalar])))
