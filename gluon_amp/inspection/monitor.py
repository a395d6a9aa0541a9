"""`Monitor`: statistics of a network's tensors during training, in every n-th step.

In an observed step, a `Watch` counts the values of selected nodes. All other steps run as without a
monitor.
"""
from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from contextlib import ExitStack
from typing import Any, Dict, Iterable, List, Optional, Union

from .._mxnet import mx
from ..annotations import Block, Network, Trainer
from ..checks import imports_of, nearest, whole_number
from ..formats import FORMATS
from ..graph.graph import Graph
from ..graph.keep import operator_names
from .tensors import Counts, Key
from .watch import Watch, deliver_counts, hybrid_blocks

log = logging.getLogger("gluon_amp")


class Monitor:
    """Writes statistics of a converted network's tensors every `interval` steps of its training.

    Training does not change by a bit. Call `step` once after each step of the trainer:

    .. code-block:: python

        with amp.Monitor(net, trainer, "statistics.jsonl", interval=100) as monitor:
            for data, label in batches:
                with autograd.record():
                    loss = loss_fn(net(data), label)
                trainer.backward(loss)
                trainer.step(len(label))
                monitor.step()

    Each line of the file is a JSON object with one tensor of one step:

    - ``step``: the number of steps so far; ``node``: the operator; ``tensor``: ``output``, or for a
      gradient the name of its variable, such as ``dense0_weight``; ``kind``: ``output`` or
      ``gradient``; ``format``.
    - ``numbers``: the number of elements; ``zero``, ``underflow``, ``subnormal``, ``overflow``: the
      shares that were 0 before rounding, became 0, are subnormal, or became infinite; ``nan``: the
      number of NaNs.
    - ``rms``: the root of the mean square; ``least``, ``largest``: the binary exponents of the
      smallest and largest number other than 0.
    - ``loss_scale``: the scale of a gradient, which is counted scaled.

    Args:
        net: a network that `convert` has converted, on CPUs.
        trainer: a `gluon_amp.Trainer`, or MXNet's.
        path: the file of JSON lines; an existing file is appended to.
        interval: the number of steps from one observed step to the next.
        layers: the observed blocks, and regular expressions for names of operators. None: all
            operators.
        tensorboard: a folder for TensorBoard's event files, with the shares, `rms` and `largest` as
            scalars (`pip install 'gluon-amp[tensorboard]'`).

    Raises:
        TypeError: `net` is not converted, or an argument has another type.
        ValueError: `layers` is empty or has an invalid regular expression.
        RuntimeError: another Monitor observes the network.
    """

    def __init__(self, net: Network, trainer: Trainer,
                 path: Union[str, os.PathLike[str]], interval: int = 100,
                 layers: Optional[Iterable[Union[str, Block]]] = None,
                 tensorboard: Optional[str] = None) -> None:
        """See the class for the arguments."""
        self._blocks = hybrid_blocks(net)
        if not self._blocks:
            raise TypeError("Monitor takes a network that gluon_amp.convert has converted, with a "
                            f"HybridBlock in it. Received: {type(net).__name__}")
        if not isinstance(trainer, mx.gluon.Trainer):
            raise TypeError("trainer is a gluon_amp.Trainer, or MXNet's. "
                            f"Received: {type(trainer).__name__}")
        self.interval = whole_number(interval, "interval", least=1)
        self._trainer: Any = trainer
        self._layers = _layers(layers)
        self._watch = Watch(net, trainer, self._is_chosen)
        self._observing = ExitStack()
        self.steps = 0
        self._path = os.fspath(path)
        self._append([])  # raises now if the file is not writable
        self._events = _Events(tensorboard) if tensorboard is not None else None
        self._arm()

    def step(self) -> None:
        """Counts a step, and writes its statistics if it was observed. Call it after each step."""
        self.steps += 1
        if self.steps % self.interval == 0:
            deliver_counts(float(getattr(self._trainer, "loss_scale", 1.0)))
            self._observing.close()
            self._write()
        self._arm()

    def close(self) -> None:
        """Stops observing and closes the files."""
        self._observing.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _arm(self) -> None:
        """Makes the engine count in the next step, if it is observed."""
        if (self.steps + 1) % self.interval:
            return
        if any(block._amp.stand_in is not None for block in self._blocks):
            raise RuntimeError("this network is observed by another Monitor: close that one first, "
                               "or use one Monitor for all layers")
        self._observing.enter_context(self._watch)

    def _is_chosen(self, name: str) -> bool:
        return self._layers is None or any(each.fullmatch(name) for each in self._layers)

    # ---- statistics

    def _write(self) -> None:
        if not self._watch.nodes and self._watch.ops:
            names = sorted(set().union(*(operator_names(Graph.read(block._cached_graph[1]))
                                         for block in self._blocks if block._cached_graph)))
            wanted = self._layers[0].pattern if self._layers else ""
            raise ValueError("layers match no operator of the network. Similar names: "
                             f"{', '.join(nearest(wanted, names))}. Received: {wanted!r}")
        if not self._watch.passes:
            log.warning("Monitor: no statistics of step %d, because the network did not train",
                        self.steps)
        lines = [self._line(key, scale, counts)
                 for key, (scale, counts) in self._watch.counts().items() if self._is_known(key)]
        self._append(lines)
        if self._events is not None:
            self._events.add(self.steps, lines)

    def _append(self, lines: List[Dict[str, Any]]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _is_known(self, key: Key) -> bool:
        node = self._watch.nodes.get(key.node)
        return node is not None and (not key.backward or 0 <= key.which < len(node.inputs))

    def _line(self, key: Key, scale: float, counts: Counts) -> Dict[str, Any]:
        node = self._watch.nodes[key.node]
        line = {"step": self.steps, "node": key.node,
                "tensor": node.inputs[key.which] if key.backward else
                "output" if key.which == 0 else f"output {key.which}",
                "kind": "gradient" if key.backward else "output", "format": node.dtype,
                **statistics(counts, node.dtype)}
        if key.backward:
            line["loss_scale"] = scale
        return line


_SCALARS = ("rms", "largest", "zero", "underflow", "subnormal", "overflow")


def statistics(counts: Counts, dtype: str) -> Dict[str, Any]:
    """Returns a line's statistics of a tensor."""
    many = max(counts.numbers, 1)
    finite = max(many - counts.infinite - counts.nan, 1)
    low, high = counts.range or (None, None)
    subnormal = counts.shares(FORMATS[dtype])["subnormal"] if dtype in FORMATS else 0.0
    return {"numbers": counts.numbers, "rms": math.sqrt(counts.squares / finite), "least": low,
            "largest": high, "zero": counts.zero / many, "underflow": counts.flushed / many,
            "subnormal": subnormal, "overflow": (counts.overflowed + counts.infinite) / many,
            "nan": counts.nan}


def _layers(given: Optional[Iterable[Union[str, Block]]]) -> Optional[List[re.Pattern[str]]]:
    """Returns regular expressions for the names of the selected operators."""
    if given is None:
        return None
    made = []
    for layer in [given] if isinstance(given, (str, mx.gluon.Block)) else given:
        if isinstance(layer, mx.gluon.Block):
            layer = re.escape(layer.prefix) + ".*"
        if not isinstance(layer, str):
            raise TypeError("layers takes blocks and regular expressions. "
                            f"Received: {layer!r}")
        try:
            made.append(re.compile(layer))
        except re.error as error:
            raise ValueError(f"layers: {layer!r} is not a regular expression: {error}") from None
    if not made:
        raise ValueError("layers is empty. Valid: None for all operators, blocks and regular "
                         "expressions. Received: []")
    return made


class _Events:
    """A writer of scalars to TensorBoard's event files."""

    def __init__(self, folder: str) -> None:
        with imports_of("tensorboard", "tensorboard="):
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._event, self._summary, self._file = Event, Summary, EventFileWriter(folder)

    def add(self, step: int, lines: List[Dict[str, Any]]) -> None:
        summary = self._summary(value=[
            self._summary.Value(tag=f"{line['node']}/{line['tensor']}/{name}",
                                simple_value=line[name])
            for line in lines for name in _SCALARS if line[name] is not None])
        self._file.add_event(self._event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        self._file.close()
