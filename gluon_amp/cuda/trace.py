"""Records the GPU calls of one training step of a network, without a GPU."""
from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from .._mxnet import mx
from ..annotations import Arrays, Network, Symbol
from ..checks import aligned
from ..cpu.arrays import dtype_name
from ..gluon.converted import ConvertedHybridBlock, blocks_kept, recording_names
from ..graph.graph import Graph
from ..policy import Policy, get_policy
from .environment import environment
from .recording import Call, sections
from .steps import HOW, PARTS

Data = Sequence[Tuple[Tuple[int, ...], str]]  # shapes and types


class Step:
    """The calls of one step.

    Attributes:
        parts: the calls of "forward", "backward" and "update".
        peak: the peak of GPU memory in bytes, workspaces included.
        violations: the number of calls that a GPU would have refused.
    """

    def __init__(self, parts: Mapping[str, List[Call]], peak: int, violations: int) -> None:
        self.parts, self.peak, self.violations = dict(parts), peak, violations

    @classmethod
    def read(cls, log: Path, said: Mapping[str, int]) -> Step:
        found = sections(str(log))
        return cls({part: found.get(part, []) for part in PARTS}, said["peak"], said["violations"])

    @property
    def calls(self) -> List[Call]:
        return [call for part in PARTS for call in self.parts[part]]

    def counts(self, part: Optional[str] = None) -> Dict[str, int]:
        """Returns the numbers of launches, casts, synchronizations, copies to the host, products,
        products on Tensor Cores, and sums in float16, by default of all parts."""
        calls = self.calls if part is None else self.parts[part]
        return {
            "launches": sum(c.is_launch for c in calls),
            "casts": sum(c.is_cast for c in calls),
            "synchronizations": sum(c.is_synchronization for c in calls),
            "copies to the host": sum(c.is_copy_to_host for c in calls),
            "products": sum(c.is_product for c in calls),
            "on Tensor Cores": sum(c.on_tensor_cores for c in calls),
            "sums in float16": sum(c.adds_in_half for c in calls)}


class Trace:
    """One step of a network in mixed precision, and the same in float32.

    Attributes:
        step: a `Step` in mixed precision.
        float32: a `Step` in float32.
    """

    def __init__(self, step: Step, float32: Step, policy: Policy, capability: int,
                 data: Data) -> None:
        self.step, self.float32 = step, float32
        self.policy, self.capability, self.data = policy, capability, data

    def facts(self) -> Dict[str, Any]:
        """Returns all results as JSON-serializable values."""
        return {
            "policy": self.policy.name, "compute capability": self.capability / 10,
            "data": [[list(shape), dtype] for shape, dtype in self.data],
            "step": {**{part: self.step.counts(part) for part in PARTS},
                     "all": self.step.counts(), "peak bytes": self.step.peak},
            "float32": {"all": self.float32.counts(), "peak bytes": self.float32.peak},
            "products": self.products(), "casts": self._named(lambda c: c.is_cast),
            "sums in float16": self._named(lambda c: c.adds_in_half),
            "refused": [c.record["why"] for c in self.step.calls if c.name == "VIOLATION"]}

    def products(self) -> List[Dict[str, Any]]:
        """Returns the products, equal ones grouped: the types of inputs and sums, and why they do
        not run on Tensor Cores, if so."""
        found = Counter((part, c.operator, c.name, c.factors, c.sums, why_not(c))
                        for part in PARTS for c in self.step.parts[part] if c.is_product)
        keys = ("part", "operator", "call", "factors", "sums", "not on Tensor Cores")
        return [{"calls": count, **dict(zip(keys, key))} for key, count in found.items()]

    def _named(self, wanted: Any) -> Dict[str, int]:
        return dict(Counter(c.operator for c in self.step.calls if wanted(c)))

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) for shape, _ in self.data)
        rows: List[Tuple[str, ...]] = [("", *PARTS, "the step", "float32's")]
        counts = [*(self.step.counts(part) for part in PARTS), self.step.counts(),
                  self.float32.counts()]
        rows += [(name, *(str(one[name]) for one in counts)) for name in counts[0]]
        rows.append(("peak memory, MiB", "", "", "", f"{self.step.peak / 2 ** 20:.0f}",
                     f"{self.float32.peak / 2 ** 20:.0f}"))
        lines = [f"One step: policy {self.policy.name}, data {shapes}, compute capability "
                 f"{self.capability / 10}.", "The calls are recorded, not executed.", "",
                 *aligned(rows), "", "Products:"]
        lines += aligned([("calls", "part", "call", "multiplies", "adds in", "Tensor Cores"), *(
            (str(p["calls"]), p["part"], p["call"], p["factors"], p["sums"],
             f"no: {p['not on Tensor Cores']}" if p["not on Tensor Cores"] else "yes")
            for p in self.products())])
        for title, named in (("Casts, by the operator that inserts them:",
                              self._named(lambda c: c.is_cast)),
                             ("Sums in float16 (compensated, except in products):",
                              self._named(lambda c: c.adds_in_half))):
            if named:
                lines += ["", title, *aligned([(str(n), name) for name, n in named.items()])]
        if self.step.violations:
            lines += ["", f"A GPU would refuse {self.step.violations} calls:",
                      *(str(c) for c in self.step.calls if c.name == "VIOLATION")]
        return "\n".join(lines)


def why_not(call: Call) -> str:
    """Returns why a product does not run on Tensor Cores; "" if it does."""
    if call.on_tensor_cores:
        return ""
    if call.factors != "half":
        return f"its factors are {call.factors}"
    if call.sums != "float":
        return f"MXNet requests sums in {call.sums}"
    return "MXNet requests cuDNN's default math" if call.name.startswith("cudnn") \
        else "MXNet requests cuBLAS' default math"


def gpu_trace(net: Network, batch: Arrays, policy: Union[str, Policy] = "float16",
              optimizer: str = "sgd", capability: int = 70) -> Trace:
    """Records the GPU calls of one training step of a network, without a GPU.

    It needs the host code of MXNet's CUDA wheel. The loss is the mean of the outputs' squares. The
    network does not change.

    Args:
        net: an initialized HybridBlock, converted or not.
        batch: its data, or a list of its arguments.
        policy: as for `gluon_amp.convert`; a converted network keeps its own.
        optimizer: a name, as for `gluon_amp.optimizer`.
        capability: the GPU's compute capability, such as 70 for a V100, 80 for an A100.

    Returns:
        A `Trace`.

    Raises:
        TypeError: `net` is not a HybridBlock.
        ValueError: the policy runs on CPUs only.
        FileNotFoundError: the CUDA wheel is missing; the message has the command to get it.
    """
    data = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    if not isinstance(net, mx.gluon.HybridBlock):
        raise TypeError(f"gpu_trace takes a HybridBlock. Received: {type(net).__name__}")
    keep: Set[str] = set()
    if isinstance(net, ConvertedHybridBlock):
        policy = net._amp.policy
        keep |= net._amp.keep_nodes
    before, net._cached_graph = net._cached_graph, ()
    try:
        with mx.autograd.train_mode(), recording_names(blocks_kept(net), keep.add):
            inputs, outputs = net._get_graph(*data)
    finally:
        net._cached_graph = before
    return trace_symbol(outputs, [i.name for i in inputs],
                        [(tuple(a.shape), dtype_name(a.dtype)) for a in data], policy, optimizer,
                        capability, sorted(keep))


def trace_symbol(symbol: Symbol, names: Sequence[str], data: Data,
                 policy: Union[str, Policy] = "float16", optimizer: str = "sgd",
                 capability: int = 70, keep: Sequence[str] = ()) -> Trace:
    """Records the calls of a symbol, given the names, shapes and types of its inputs."""
    policy = get_policy(policy)
    if policy.cpu_only:
        raise ValueError(f"policy {policy.name} runs on CPUs only. Valid: float16, mixed_float16, "
                         "pure_float16, or a float16 Policy of your own")
    graph = Graph.read(symbol)
    for node in graph.nodes():
        if node.is_variable:  # a converted network's parameters: the process converts them again
            node.attrs.pop("__dtype__", None)
    said = {"symbol": graph.symbol().tojson(remove_amp_cast=False), "names": list(names),
            "data": list(data), "policy": policy, "optimizer": optimizer,
            "keep": [re.escape(name) for name in keep]}
    float32, step = (_run({**said, "how": how}, capability) for how in (HOW[0], HOW[2]))
    return Trace(step, float32, policy, capability, data)


def _run(said: Mapping[str, Any], capability: int) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder, "log.jsonl"), Path(folder, "step.pickle")
        file.write_bytes(pickle.dumps(said))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "gluon_amp.cuda.steps", str(file)],
            capture_output=True, text=True, env=environment(log, capability=capability))
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"the step in {said['how']} fails on the recording GPU: {lines[-1]}")
        return Step.read(log, json.loads(done.stdout.splitlines()[-1]))
