"""`Monitor`: statistics of a network's tensors during training, in every n-th step.

In an observed step, other CachedOps replace the network's. They run the same graphs, and the engine
counts the values of selected nodes. All other steps run as without a monitor.
"""
import json
import logging
import math
import os
import re
import time
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

from mxnet import autograd

from .._mxnet import mx
from ..annotations import Block, Network
from ..checks import imports_of, nearest, whole_number
from ..formats import FORMATS
from ..gluon.converted import ConvertedHybridBlock
from ..gluon.state import Op, blocks_in, parameters_in
from ..graph.build import WATCH, build, cached_op
from ..graph.graph import Graph
from ..graph.refusals import check_device
from .statistics import Counted, Counts, Key, read_all

log = logging.getLogger("gluon_amp")

_STATIC = ("static_alloc", "static_shape")  # left out: they would hold memory between steps


class _Node(NamedTuple):
    """An observed node: its operator, and the type of its output."""
    inputs: List[str]
    dtype: str


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

    def __init__(self, net: Network, trainer: "mx.gluon.Trainer",
                 path: Union[str, "os.PathLike[str]"], interval: int = 100,
                 layers: Optional[Iterable[Union[str, Block]]] = None,
                 tensorboard: Optional[str] = None) -> None:
        self._blocks: List[Any] = [b for b in blocks_in(net) if isinstance(b, ConvertedHybridBlock)]
        if not self._blocks:
            raise TypeError("Monitor takes a network that gluon_amp.convert has converted, with a "
                            f"HybridBlock in it. Received: {type(net).__name__}")
        if not isinstance(trainer, mx.gluon.Trainer):
            raise TypeError("trainer is a gluon_amp.Trainer, or MXNet's. "
                            f"Received: {type(trainer).__name__}")
        self.interval = whole_number(interval, "interval", least=1)
        self._trainer: Any = trainer
        self._layers = _layers(layers)
        self._ops: Dict[Any, Tuple[Any, Op]] = {}  # each with its graph
        self._nodes: Dict[str, _Node] = {}
        self._passes: List[Tuple[float, Counted]] = []
        self.steps = 0
        self._path = os.fspath(path)
        self._append([])  # raises now if the file is not writable
        self._events = _Events(tensorboard) if tensorboard is not None else None
        self._arm()

    def step(self) -> None:
        """Counts a step, and writes its statistics if it was observed. Call it after each step."""
        self.steps += 1
        if self._observes(self.steps):
            self._disarm()
            self._write()
        self._arm()

    def close(self) -> None:
        """Stops observing and closes the files."""
        self._disarm()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- an observed step

    def _observes(self, step: int) -> bool:
        return step % self.interval == 0

    def _arm(self) -> None:
        """Makes the engine count in the next step, if it is observed."""
        if not self._observes(self.steps + 1):
            return
        if any(block._amp.stand_in is not None for block in self._blocks):
            raise RuntimeError("this network is observed by another Monitor: close that one first, "
                               "or use one Monitor for all layers")
        read_all()  # discards earlier counts
        self._passes = []
        for block in self._blocks:
            block._amp.stand_in = self._stand_in
        if hasattr(self._trainer, "after_pass"):
            self._trainer.after_pass = self._after_pass

    def _disarm(self) -> None:
        for block in self._blocks:
            block._amp.stand_in = None
        if hasattr(self._trainer, "after_pass"):
            self._trainer.after_pass = None

    def _after_pass(self, scale: float) -> None:
        self._passes += [(scale, counted) for counted in read_all() if len(counted)]

    def _stand_in(self, block: Block, key: Tuple[bool, Tuple[str, ...]], arrays: List[Any]) -> Op:
        """Returns the CachedOp of a block's graph in which the engine counts during training."""
        on_gpu, dtypes = key
        if on_gpu:
            raise ValueError("Monitor supports networks on CPUs only. Received: data on a GPU")
        data, traced = block._cached_graph
        trains = autograd.is_training()
        where = id(traced), dtypes, trains
        if where not in self._ops:
            self._ops[where] = traced, self._op(block, [d.name for d in data], dtypes, trains)
        return self._ops[where][1]

    def _op(self, block: Block, data: List[str], dtypes: Tuple[str, ...], watch: bool) -> Op:
        graph, types = block.mixed_graph(dtypes)
        policy = block._amp.policy
        check_device(graph, policy, on_gpu=False)
        built = build(graph, types, policy, watch, scales=block._amp.scales, place=block.place)
        if watch:
            self._choose(built, graph, types)
        symbol = built.symbol()
        if isinstance(block._cached_graph[1], mx.sym.numpy._Symbol):
            symbol = symbol.as_np_ndarray()
        flags = [flag for flag in block._flags if flag[0] not in _STATIC]
        return cached_op(symbol, data, parameters_in(block), flags)

    def _choose(self, built: Graph, graph: Graph, types: Mapping[str, str]) -> None:
        """Selects the nodes that the engine counts; none in the bodies of loops."""
        for entry, dtype in graph.types(types).items():
            node = entry.node
            if not node.is_variable and self._is_chosen(node.name) and dtype is not None:
                self._nodes[node.name] = _Node(
                    [e.node.name.split("_amp_cast_")[0] for e in node.inputs], dtype)
        for node in built.nodes_within():
            if node.name not in self._nodes:
                node.attrs.pop(WATCH, None)

    def _is_chosen(self, name: str) -> bool:
        return self._layers is None or any(each.fullmatch(name) for each in self._layers)

    # ---- statistics

    def _write(self) -> None:
        self._after_pass(float(getattr(self._trainer, "loss_scale", 1.0)))
        if not self._nodes and self._ops:
            names = sorted({n.name for block in self._blocks if block._cached_graph
                            for n in Graph.read(block._cached_graph[1]).nodes()
                            if not n.is_variable})
            wanted = self._layers[0].pattern if self._layers else ""
            raise ValueError("layers match no operator of the network. Similar names: "
                             f"{', '.join(nearest(wanted, names))}. Received: {wanted!r}")
        if not self._passes:
            log.warning("Monitor: no statistics of step %d, because the network did not train",
                        self.steps)
        lines = [self._line(key, scale, counts)
                 for key, scale, counts in _last_of_each(self._passes) if self._is_known(key)]
        self._append(lines)
        if self._events is not None:
            self._events.add(self.steps, lines)

    def _append(self, lines: List[Dict[str, Any]]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _is_known(self, key: Key) -> bool:
        node = self._nodes.get(key.node)
        return node is not None and (not key.backward or 0 <= key.which < len(node.inputs))

    def _line(self, key: Key, scale: float, counts: Counts) -> Dict[str, Any]:
        node = self._nodes[key.node]
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


def _last_of_each(passes: List[Tuple[float, Counted]]) -> Iterator[Tuple[Key, float, Counts]]:
    """Yields the counts of each tensor. A repeated backward pass, at another loss scale, replaces
    the previous one; several forward passes add up."""
    found: Dict[Key, Tuple[float, Counts]] = {}
    before: Dict[Key, Tuple[float, Counts]] = {}  # counts before the last forward pass
    for scale, counted in passes:
        if any(not key.backward for key in counted):
            before = dict(found)
        for key, counts in counted.items():
            if key.backward and scale == 0:  # the check for operators that start gradients
                continue
            held = before.get(key)
            found[key] = scale, counts if held is None else held[1] + counts
    for key, (scale, counts) in found.items():
        yield key, scale, counts


def _layers(given: Optional[Iterable[Union[str, Block]]]) -> Optional[List["re.Pattern[str]"]]:
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
