"""Refuses graphs that a device cannot run, when they are built or before they train.

MXNet executes asynchronously and reports an error only when a result is read.
"""
from typing import Iterator

from ..cpu import library
from ..policy import Policy
from .graph import Graph, Node

# Products for which the engine supports one format only, and their names in MXNet's API.
_OF_ONE_FORMAT = {"_npi_einsum": "einsum", "Convolution_v1": "Convolution_v1",
                  "_contrib_DeformableConvolution": "DeformableConvolution",
                  "_contrib_ModulatedDeformableConvolution": "ModulatedDeformableConvolution"}


def check_device(graph: Graph, policy: Policy, on_gpu: bool) -> None:
    """Refuses a graph or a policy that this kind of device does not support."""
    if on_gpu and policy.cpu_only:
        why = "a GPU accumulates in its own order" if policy.accumulate else \
            "on GPUs MXNet 1.9.1 has no arrays of its formats: use float16"
        raise ValueError(f"policy {policy.name} runs on CPUs only: {why}. Received: data on a GPU")
    if not on_gpu:
        library.load()
        for node in graph.nodes_within():
            _check_layout(node)


def _check_layout(node: Node) -> None:
    """Refuses channels-last convolutions, which MXNet supports on GPUs only."""
    layout = node.attrs.get("layout", "None")
    if node.op in ("Convolution", "Deconvolution") and layout.endswith("C"):
        raise ValueError(f"{node.name}: a CPU has no channels-last {node.op}. "
                         f"Valid: layout NCW, NCHW, NCDHW. Received: {layout}")


def check_formats(node: Node, policy: str) -> None:
    """Refuses a product for which the engine supports one format only."""
    if node.op in _OF_ONE_FORMAT:
        raise ValueError(f"policy {policy}: {_OF_ONE_FORMAT[node.op]} requires one format for "
                         f"product, between and gradient. Keep {node.name} in float32 (keep=), or "
                         "set the three to one format")


def check_loops(built: Graph, policy: str) -> None:
    """Refuses options of RNNs that our loop over time (cpu/operators) does not support."""
    for node in _in_loops(built):
        for option in ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max",
                       "use_sequence_length"):
            value = node.attrs.get(option, "None")
            if value not in ("None", "False", "0"):
                raise ValueError(f"policy {policy} has no code for RNNs with {option}. Valid: RNNs "
                                 f"without, or keep=, which leaves {node.name} in float32. "
                                 f"Received: {option}={value}")


def dropout_in_loops(built: Graph, policy: str) -> str:
    """Returns why a CPU cannot train this graph, if our loop runs an RNN with dropout; else ""."""
    for node in _in_loops(built):
        if int(node.attrs.get("num_layers", 1)) > 1 and float(node.attrs.get("p", 0)) > 0:
            return f"policy {policy} has no code for the training of RNNs with dropout between " \
                   f"their layers. Valid: RNNs without, or keep=, which leaves {node.name} in " \
                   f"float32. Received: dropout={node.attrs['p']}"
    return ""


def _in_loops(built: Graph) -> Iterator[Node]:
    return (node for node in built.nodes_within()
            if node.op == "RNN" and ("loop" in node.settings or "accumulate" in node.settings))


def devices_that_wait(graph: Graph) -> int:
    """Returns the number of devices that synchronize in the graph's norms during training."""
    return max((int(node.attrs.get("ndev", 1)) for node in graph.nodes()
                if node.op == "_contrib_SyncBatchNorm"), default=1)


def check_trains_on_cpus(devices: int) -> None:
    """Refuses SyncBatchNorm over several CPU devices, which would deadlock.

    MXNet's norm blocks until the other devices reach it. All CPU devices share four scratch arrays,
    which MXNet assigns in the order in which operators are called. Operators after the norm on the
    first device get them before operators that precede the norm on the second.
    """
    if devices > 1:
        raise ValueError("SyncBatchNorm over several devices waits for ever on CPUs, which share "
                         "scratch memory in MXNet. Valid: num_devices=1, or GPUs. Received: "
                         f"num_devices={devices}")
