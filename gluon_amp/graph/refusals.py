"""What a device has no code for, refused when a graph is made or is to train.

MXNet tells of an error in what runs only when somebody reads a result, so what is known before is
refused here.
"""
from typing import Iterator

from ..cpu import library
from ..policy import Policy
from .accumulate import ATTRIBUTE
from .graph import Graph, Node

LOOP = "__gluon_amp_loop__"  # of an RNN: our own loop over time, which knows several formats

# Products with a state, to which the engine can give one format only: how users call them.
_OF_ONE_FORMAT = {"_npi_einsum": "einsum", "Convolution_v1": "Convolution_v1",
                  "_contrib_DeformableConvolution": "DeformableConvolution",
                  "_contrib_ModulatedDeformableConvolution": "ModulatedDeformableConvolution"}


def check_device(graph: Graph, policy: Policy, on_gpu: bool) -> None:
    """Refuses a graph, or a policy, that this kind of device does not run."""
    if on_gpu and policy.cpu_only:
        why = "a GPU adds in its own way" if policy.accumulate else \
            "on GPUs MXNet 1.9.1 has no arrays of its formats: use float16"
        raise ValueError(f"policy {policy.name} runs on CPUs only: {why}. Received: data on a GPU")
    if not on_gpu:
        library.load()
        for node in graph.nodes_within():
            _check_layout(node)


def _check_layout(node: Node) -> None:
    """Refuses channels-last convolutions, which MXNet has on GPUs only."""
    layout = node.attrs.get("layout", "None")
    if node.op in ("Convolution", "Deconvolution") and layout.endswith("C"):
        raise ValueError(f"{node.name}: a CPU has no {node.op} with channels last. "
                         f"Valid: layout NCW, NCHW, NCDHW. Received: {layout}")


def check_formats(node: Node, policy: str) -> None:
    """Refuses a product that cannot have formats of its own."""
    if node.op in _OF_ONE_FORMAT:
        raise ValueError(f"policy {policy}: {_OF_ONE_FORMAT[node.op]} has one format for its "
                         "products, what lies between them, and gradients. Keep "
                         f"{node.name} in float32 (keep=), or give product, between and gradient "
                         "one format")


def check_loops(built: Graph, policy: str) -> None:
    """Refuses RNNs that our own loop (cpu/rnn_loop.cc) runs, with what it has no code for."""
    for node in _in_loops(built):
        for option in ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max",
                       "use_sequence_length"):
            value = node.attrs.get(option, "None")
            if value not in ("None", "False", "0"):
                raise ValueError(f"policy {policy} has no code for RNNs with {option}. Valid: RNNs "
                                 f"without, or keep=, which leaves {node.name} in float32. "
                                 f"Received: {option}={value}")


def dropout_in_loops(built: Graph, policy: str) -> str:
    """Why a CPU cannot train this graph, if our own loop runs an RNN with dropout."""
    for node in _in_loops(built):
        if int(node.attrs.get("num_layers", 1)) > 1 and float(node.attrs.get("p", 0)) > 0:
            return f"policy {policy} has no code for the training of RNNs with dropout between " \
                   f"their layers. Valid: RNNs without, or keep=, which leaves {node.name} in " \
                   f"float32. Received: dropout={node.attrs['p']}"
    return ""


def _in_loops(built: Graph) -> Iterator[Node]:
    return (node for node in built.nodes_within()
            if node.op == "RNN" and (LOOP in node.attrs or ATTRIBUTE in node.attrs))


def devices_that_wait(graph: Graph) -> int:
    """How many devices wait for each other in norms of the graph when it trains."""
    return max((int(node.attrs.get("ndev", 1)) for node in graph.nodes()
                if node.op == "_contrib_SyncBatchNorm"), default=1)


def check_trains_on_cpus(devices: int) -> None:
    """Refuses to train where devices wait for each other.

    MXNet's norm blocks until the other devices have come as far. All CPUs share four scratch
    arrays, which MXNet gives out in the order in which operators are called: those behind the norm
    on the first device stand in line before those ahead of the norm on the second.
    """
    if devices > 1:
        raise ValueError("SyncBatchNorm over several devices waits for ever on CPUs, which share "
                         "scratch memory in MXNet. Valid: num_devices=1, or GPUs. Received: "
                         f"num_devices={devices}")
