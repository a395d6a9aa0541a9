"""`Monitor`: what a network's tensors are during training, in every n-th step.

In an observed step, an `EngineObserver` counts the values of selected nodes in the CPU engine, or a
`HookObserver` reads the tensors. All other steps run as without a monitor.
"""
from __future__ import annotations

import json
import logging
import os
import re
from contextlib import ExitStack
from typing import Iterable, List, Optional, Union

import mxnet as mx

from ..annotations import Block, Network, Trainer
from ..checks import did_you_mean, whole_number
from ..formats import BFLOAT16
from ..gluon.observe import hybrid_blocks, is_observed, policy_in_use
from ..graph.graph import Graph
from ..graph.keep import operator_names
from ..reports.events import EventFile
from .hooks import OBSERVED, HookObserver, plain_graphs
from .lines import Line, tensor_line
from .watch import EngineObserver

log = logging.getLogger("gluon_amp")


class Monitor:
    """Writes statistics of a network's tensors every `interval` steps of its training.

    Training does not change by a bit. Call `step` once after each step of the trainer:

        with amp.Monitor(net, trainer, "statistics.jsonl", interval=100) as monitor:
            for data, label in batches:
                with autograd.record():
                    loss = loss_fn(net(data), label)
                trainer.backward(loss)
                trainer.step(len(label))
                monitor.step()

    Each line of the file is a JSON object with one tensor of one step:

    - `step`: the number of steps so far; `node`: the operator; `tensor`: `output`, or for a
      gradient the name of its variable, such as `dense0_weight`; `index`: that of the output,
      or of the input; `kind`: `output` or `gradient`; `format`.
    - `numbers`: the number of elements; `zero`, `underflow`, `subnormal`, `overflow`: the
      shares that were 0 before rounding, became 0, are subnormal, or became infinite; `nan`: the
      number of NaNs.
    - `rms`: the root of the mean square; `least`, `largest`: the binary exponents of the
      smallest and largest number other than 0; `bins`: pairs of such an exponent and the number
      of values with it.
    - `loss_scale`: the scale of a gradient, which is counted scaled.

    A converted network on CPUs is counted before values are rounded. Otherwise, and under bfloat16
    policies, tensors are counted as they are stored, and `underflow` is null. On a GPU,
    `least` and `bins` are null, too, and `largest` is null if the tensor is not finite.
    `gluon-amp xray statistics.jsonl` writes a page of the file.

    Args:
        net: a network that `convert` has converted, or with hybridized blocks.
        trainer: a `gluon_amp.Trainer`, or MXNet's.
        path: the file of JSON lines; an existing file is appended to.
        interval: the number of steps from one observed step to the next.
        layers: the observed blocks, and regular expressions for names of operators. None: all
            operators.
        tensorboard: a folder for TensorBoard's event files, with the shares, `rms` and `largest` as
            scalars. It needs the extra `tensorboard`.

    Raises:
        TypeError: `net` is neither converted nor hybridized, or an argument has another type.
        ValueError: `layers` is empty or has an invalid regular expression.
        RuntimeError: another Monitor observes the network.
    """

    def __init__(self, net: Network, trainer: Trainer,
                 path: Union[str, os.PathLike[str]], interval: int = 100,
                 layers: Optional[Iterable[Union[str, Block]]] = None,
                 tensorboard: Optional[str] = None) -> None:
        """See the class for the arguments."""
        self._blocks = hybrid_blocks(net) if isinstance(net, mx.gluon.Block) else []
        if not self._blocks and not plain_graphs(net):
            raise TypeError("Monitor takes a network that gluon_amp.convert has converted, with a "
                            "HybridBlock in it, or a hybridized one. Received: "
                            f"{type(net).__name__}")
        if not isinstance(trainer, mx.gluon.Trainer):
            raise TypeError("trainer is a gluon_amp.Trainer, or MXNet's. "
                            f"Received: {type(trainer).__name__}")
        self.interval = whole_number(interval, "interval", least=1)
        self._net, self._trainer = net, trainer
        self._layers = _layers(layers)
        on_cpus = all(c.device_type == "cpu" for c in trainer._contexts)
        # To count products of bfloat16, the engine computes them in float32, with other bits.
        exact = not any(policy_in_use(block).compute == BFLOAT16 for block in self._blocks)
        in_engine = on_cpus and exact and not plain_graphs(net)
        self._observer: Union[EngineObserver, HookObserver] = (
            EngineObserver if in_engine else HookObserver)(net, trainer, self._is_chosen)
        self._observing = ExitStack()
        self.steps, self._closed = 0, False
        self._path = os.fspath(path)
        self._append([])  # raises now if the file is not writable
        self._events = EventFile(tensorboard) if tensorboard is not None else None
        self._arm()

    def step(self) -> None:
        """Counts a step, and writes its statistics if it was observed. Call it after each step.

        Raises:
            RuntimeError: the Monitor is closed.
        """
        if self._closed:
            raise RuntimeError(f"the Monitor of {self._path} is closed: a new one appends to it")
        self.steps += 1
        if self.steps % self.interval == 0:
            self._observer.deliver(float(getattr(self._trainer, "loss_scale", 1.0)))
            self._observing.close()
            self._write()
        self._arm()

    def close(self) -> None:
        """Stops observing and closes the files."""
        self._closed = True
        self._observing.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _arm(self) -> None:
        """Observes the next step, if it is one of the interval."""
        if (self.steps + 1) % self.interval:
            return
        if any(is_observed(block) for block in self._blocks):
            raise RuntimeError(OBSERVED)
        self._observing.enter_context(self._observer)

    def _is_chosen(self, name: str) -> bool:
        return self._layers is None or any(each.fullmatch(name) for each in self._layers)

    # ---- lines

    def _write(self) -> None:
        if not self._observer.inputs and self._observer.ops:
            blocks = [*self._blocks, *plain_graphs(self._net)]
            names = sorted(set().union(*(operator_names(Graph.read(block._cached_graph[1]))
                                         for block in blocks if block._cached_graph)))
            wanted = self._layers[0].pattern if self._layers else ""
            raise ValueError("layers match no operator of the network. "
                             f"Received: {wanted!r}{did_you_mean(wanted, names)}")
        if not self._observer.passes:
            log.warning("Monitor: no statistics of step %d, because the network did not train",
                        self.steps)
        lines: List[Line] = []
        for key, measured in self._observer.totals().items():
            inputs = self._observer.inputs.get(key.node)
            if inputs is None or key.backward and key.which not in range(len(inputs)):
                continue
            name = inputs[key.which] if key.backward else \
                f"output {key.which}" if key.which else "output"
            dtype = self._observer.formats.get(key) or self._observer.formats[key.node]
            lines.append(tensor_line(self.steps, key, name, dtype, *measured,
                                     self._observer.before_rounding))
        self._append(lines)
        if self._events is not None:
            for line in lines:
                for name in _SCALARS:
                    if line[name] is not None:
                        self._events.add(self.steps, f"{line['node']}/{line['tensor']}/{name}",
                                         line[name])

    def _append(self, lines: List[Line]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


_SCALARS = ("rms", "largest", "zero", "underflow", "subnormal", "overflow")


def _layers(layers: Optional[Iterable[Union[str, Block]]]) -> Optional[List[re.Pattern[str]]]:
    """Returns regular expressions for the names of the selected operators."""
    if layers is None:
        return None
    patterns = []
    several = isinstance(layers, Iterable) and not isinstance(layers, (str, mx.gluon.Block))
    for layer in layers if several else [layers]:
        if isinstance(layer, mx.gluon.Block):
            layer = re.escape(layer.prefix) + ".*"
        if not isinstance(layer, str):
            raise TypeError("layers takes blocks and regular expressions. "
                            f"Received: {layer!r}")
        try:
            patterns.append(re.compile(layer))
        except re.error as error:
            raise ValueError(f"layers: {layer!r} is not a regular expression: {error}") from None
    if not patterns:
        raise ValueError("layers is empty. Valid: None for all operators, blocks and regular "
                         "expressions. Received: []")
    return patterns
