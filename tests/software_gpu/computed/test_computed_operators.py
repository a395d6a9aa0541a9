"""Each operator of the table gives the same results on a GPU as on a CPU, or its unknown kernel is
listed in unknown_kernels.txt.

    FILE=tests/software_gpu/computed/test_computed_operators.py
    python tests/software_gpu --compute --log build/log.jsonl python $FILE

writes that file anew.
"""
import contextlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "recorded")]

import gluon_amp  # noqa: E402, F401  (before mxnet)
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from gluon_amp.graph.build import cached_op  # noqa: E402
from operator_cases import CALLED, Alone, cases  # noqa: E402
from software_gpu import recording  # noqa: E402
from test_gpu_operators import NO_CASE, NOT_ON_GPUS  # noqa: E402

LIST = HERE / "unknown_kernels.txt"
# They draw device-dependent random numbers; MXNet's GPU code copies half of an int64.
DIFFERENT = {"Dropout", "_shuffle", "_random_uniform_like", "_random_normal_like", "size_array"}
# The CPU does not run the case, or there are no inputs to run it with.
NOT_COMPARED = {
    "_contrib_interleaved_matmul_selfatt_qk", "_contrib_interleaved_matmul_selfatt_valatt",
    "_contrib_interleaved_matmul_encdec_qk", "_contrib_interleaved_matmul_encdec_valatt", "sort",
    "multi_sum_sq", "_contrib_fft",
    "_contrib_ifft", "_contrib_count_sketch", "argmax_channel", "_npi_indices", "_zeros",
    "_npi_zeros", "_ones", "_npi_ones", "_full", "_arange", "_npi_arange", "_eye", "_npi_eye",
    "_linspace", "_npi_logspace", "_npi_identity", "_npi_blackman", "_npi_hamming",
    "_npi_hanning", "batch_take", "_slice_assign", "_slice_assign_scalar", "_npi_share_memory",
    "_npi_delete", "_npi_insert_scalar", "_npi_insert_slice", "_npi_insert_tensor",
    "_npi_copysign_scalar", "_npi_rcopysign_scalar", "_grad_add", "_contrib_allclose",
    "all_finite", "multi_all_finite"}
# The inputs whose gradients backward passes write. Those of labels and boxes stay what memory was.
DIFFERENTIABLE = {"Output": slice(1), "CTCLoss": slice(1), "_contrib_MultiBoxTarget": slice(2, 3)}
NAMES = [name for name in CALLED if name not in NOT_ON_GPUS | NO_CASE | DIFFERENT | NOT_COMPARED]


def computed(name, case, context, dtype="float16"):
    """Outputs and gradients; None if the backward pass does not run."""
    alone = Alone(name, *case, None if dtype == "float32" else dtype, context)
    names = alone.symbol.list_inputs()
    auxiliary = set(alone.symbol.list_auxiliary_states())
    arrays = [alone.arrays[n] for n in names]
    op, _ = cached_op(alone.symbol, names, {})
    outputs = op(*arrays)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    made = [out.asnumpy() for out in outputs]
    wanted = [a for n, a in zip(names, arrays)
              if n not in auxiliary and a.dtype in (np.float16, np.float32)]
    wanted = wanted[DIFFERENTIABLE.get("Output" if name.endswith("Output") else name, slice(None))]
    for array in wanted:
        array.attach_grad()
    try:
        with mx.autograd.record():
            outputs = op(*arrays)
        mx.autograd.backward(outputs)
        return made, [array.grad.asnumpy() for array in wanted]
    except mx.MXNetError:
        return made, None


def position():
    """The end of the log after all calls have run or failed."""
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()
    return recording.position()


def unknown_kernels(begin):
    position()
    found = set()
    for call in recording.calls(begin):
        if call.name == "VIOLATION" and "unknown" in call.record["why"]:
            of = re.sub(r"mxnet::|op::|mshadow::|mx\w+_op::|mshadow_op::|expr::|half::|^void ", "",
                        call.record["of"])
            what = call.record["why"].partition("unknown: ")[2]
            found.add(f"{of.partition('(')[0][:100]} ({what})")
    return sorted(found)


def outcome(name):
    """The unknown kernels of an operator, and the largest difference from the CPU's results,
    relative to their largest number."""
    with mx.util.np_shape(name.startswith("_np")):
        for case in cases(name):
            begin = position()
            try:
                on_cpu = computed(name, case, mx.cpu())
                mx.nd.waitall()
            except (mx.MXNetError, ValueError):
                continue
            try:
                on_gpu = computed(name, case, mx.gpu(0))
            except (mx.MXNetError, ValueError):
                on_gpu = None
            unknown = unknown_kernels(begin)
            if unknown or on_gpu is None:
                return unknown, None
            pairs = list(zip(*(of[0] + (of[1] or []) for of in (on_cpu, on_gpu))))
            return [], max((distance(a, b) for a, b in pairs if a.size), default=0)
    return [], None


def distance(one, other):
    one, other = (np.nan_to_num(x.astype("float64"), posinf=7e4, neginf=-7e4) for x in (one, other))
    return np.abs(one - other).max() / max(np.abs(one).max(), 1e-3)


def listed():
    rows = (line.partition(": ") for line in LIST.read_text().splitlines())
    return {name: kernel for name, _, kernel in rows}


@pytest.mark.parametrize("name", NAMES)
def test_operator_matches_cpu(name):
    unknown, difference = outcome(name)
    assert "; ".join(unknown) == listed().get(name, "")
    assert unknown or difference < 4e-3


if __name__ == "__main__":
    rows = []
    for each in NAMES:
        unknown, difference = outcome(each)
        if unknown:
            rows.append(f"{each}: {'; '.join(unknown)}\n")
        print(each, "unknown" if unknown else difference, flush=True)
    LIST.write_text("".join(rows))
