"""Lists the kernels of a step of gluon_amp by their time: python kernels.py NETWORK ROWS [BATCH]

PyTorch's profiler sees all kernels of the process. Each row has the calls and microseconds of a
kernel in STEPS steps. Other rows have the milliseconds of a step, and of plain forward and backward
passes; in a step, those in which the GPU runs nothing, and those from the copy of the overflow
check to the next kernel; and the longest pauses, with the kernels around them.
"""
import json
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import gluon_amp as amp  # noqa: E402
import mxnet as mx  # noqa: E402
from mxnet import autograd, nd  # noqa: E402
from rows import add, milliseconds  # noqa: E402
from speed import network  # noqa: E402

STEPS = 3
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of the profiler's file


def pauses(events):
    """When the GPU runs nothing: microseconds, and the names of what runs before and after."""
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events
                   if e.get("cat") in ON_GPU)
    found, (_, busy_until, before) = [], spans[0]
    for start, end, name in spans[1:]:
        if start > busy_until:
            found.append((start - busy_until, before, name))
        if end > busy_until:
            busy_until, before = end, name
    return found


def add_pauses(path, name, profile):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        found = pauses(json.loads(file.read_text())["traceEvents"])
    for part, some in (("idle", found), ("idle after the check",
                                         [one for one in found if "DtoH" in one[1]])):
        add(path, network=name, part=part, ms=sum(us for us, *_ in some) / 1e3 / STEPS)
    for us, before, after in sorted(found, reverse=True)[:8 * STEPS]:
        add(path, network=name, pause=us, before=before[:100], after=after[:100])


def main(name, path, batch=None):
    import torch
    from torch.profiler import ProfilerActivity, profile
    net, data = network(name, batch=batch and int(batch))
    net.initialize(mx.init.Xavier(), ctx=mx.gpu(0))
    data = data.as_in_context(mx.gpu(0))
    amp.convert(net)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9},
                          loss_scale="dynamic")

    def loss_of(data):
        return (net(data).astype("float32") ** 2).mean()

    def step():
        with autograd.record():
            loss = loss_of(data)
        trainer.backward(loss)
        trainer.step(1)

    def passes():
        with autograd.record():
            loss = loss_of(data)
        loss.backward()

    for _ in range(6):
        step()
    for what, run in ("step", step), ("passes", passes):
        add(path, network=name, part=what, ms=milliseconds(run, 10))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            step()
        nd.waitall()
        torch.cuda.synchronize()
    add_pauses(path, name, found)
    for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total):
        add(path, network=name, kernel=event.key[:300], count=event.count,
            us=event.self_device_time_total)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # with both libraries loaded, the process may end with a segmentation fault
