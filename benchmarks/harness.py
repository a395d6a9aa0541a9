"""Common code of the benchmarks: times pairs of steps, and measures memory.

Steps of two kinds alternate in one process. The result is the ratio of pairs, because other load
may slow down the machine. Memory is that of a separate process, which runs this file:

    python harness.py memory NETWORK POLICY step|prediction    bytes above those of imports
    python harness.py seconds NETWORK POLICY COUNT             seconds of each step
"""
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")  # before MXNet is imported: import this file first
if "amx_bf16" in Path("/proc/cpuinfo").read_text().split():
    os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE_AMX")  # bfloat16 products use AMX

import gluon_amp as amp
from gluon_amp._mxnet import mx, np
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp as contrib_amp
from networks import NETWORKS

SGD = {"learning_rate": 0.001, "momentum": 0.9}
CAST = "net.cast"  # in place of a policy: float16 as in MXNet's tutorial
CONTRIB = "mx.contrib.amp"  # the same in bfloat16, in a process with GLUON_AMP_ENGINE=off


def build(name, policy):
    """Returns an initialized, converted and hybridized network, and a batch."""
    mx.random.seed(1)
    np.random.seed(1)
    network = NETWORKS[name]
    net = network.make()
    net.initialize(mx.init.Xavier())
    data, target = network.batch()
    if policy == CAST:
        net.cast("float16")
        data = data.astype("float16")
    elif policy not in ("float32", CONTRIB):
        amp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    return net, data, target


def stepper(name, policy):
    """Returns a function that trains one step and waits for it, with a settled loss scale."""
    if policy == CONTRIB:
        contrib_amp.init("bfloat16")
    net, data, target = build(name, policy)
    loss_of = NETWORKS[name].loss
    if policy in ("float32", CAST, CONTRIB):
        scale = 128.0 if policy == CAST else 1.0
        trainer = gluon.Trainer(net.collect_params(), "sgd", {
            **SGD, "multi_precision": policy == CAST, "rescale_grad": 1 / scale})
        backward = autograd.backward
    else:
        trainer = amp.Trainer(net.collect_params(), "sgd", SGD)
        backward = trainer.backward

    def step():
        with autograd.record():
            output = net(data)
            if policy in ("pure_float16", CAST):
                output = in_float32(output)
            loss = loss_of(output, target)
            if policy == CAST:
                loss = loss * scale
        backward(loss)
        updated = trainer.step(1)
        nd.waitall()
        return updated is not False

    while not step():
        pass
    return step


def in_float32(output):
    if isinstance(output, (list, tuple)):
        return [in_float32(one) for one in output]
    return output.astype("float32")


def predictor(name, policy):
    """Returns a function that predicts one batch and waits for it."""
    net, data, _ = build(name, policy)

    def predict():
        net(data)
        nd.waitall()

    return predict


MAKERS = {"step": stepper, "prediction": predictor}


class Ratios(NamedTuple):
    """The result of pairs."""
    seconds: float  # median time of the first
    lowest: float  # ratio of the second to the first
    median: float
    highest: float
    pairs: int
    busy: float  # the share of CPU time of other processes during these pairs


def ratios(first, second, pairs=25, budget=20.0):
    """Times two functions alternately, for a number of quiet pairs or until the budget of seconds
    ends, but at least 5 pairs. In a quiet pair other processes use less than a tenth of the CPU
    time; 5 quiet pairs or more replace all others. Fast functions are repeated for 0.1 seconds."""
    first(), second()
    times = max(1, int(0.1 / seconds(first)))
    found, quiet, end = [], [], time.perf_counter() + budget
    while len(found) < 5 or len(quiet) < pairs and time.perf_counter() < end:
        start, before = time.perf_counter(), others_seconds()
        took = [seconds(function, times) for function in (first, second)]
        busy = (others_seconds() - before) / (time.perf_counter() - start) / os.cpu_count()
        found.append((took[1] / took[0], took[0], max(0.0, busy)))
        if busy < 0.1:
            quiet.append(found[-1])
    if len(quiet) >= 5:
        found = quiet
    shown, firsts, busy = zip(*found)
    return Ratios(median(firsts), min(shown), median(shown), max(shown), len(shown), median(busy))


def seconds(function, times=1):
    """Returns the mean time of a number of calls."""
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times


def others_seconds():
    """Returns the CPU time of all other processes, and on a virtual machine of the hypervisor."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def high_water():
    """Returns the peak memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status).group(1))


def peak_bytes(name, policy, kind):
    """Returns the memory of 10 steps, or of one prediction, above that of imports."""
    before = high_water()
    function = MAKERS[kind](name, policy)
    for _ in range(10 if kind == "step" else 1):
        function()
    return high_water() - before


def child(*args, file=__file__, stderr=None, **variables):
    """Runs a file, by default this one, in a new process with some environment variables. Returns
    its output."""
    command = [sys.executable, "-W", "ignore", str(file), *map(str, args)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=stderr, text=True,
                          env={**os.environ, **variables})
    return json.loads(done.stdout.splitlines()[-1])


def machine():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.split(":")[1].split())
    return "unknown"


def contrib_ratio(name, steps):
    """Returns the bfloat16 step of mx.contrib.amp over the float32 step, or its error: the median
    of processes, because it patches MXNet."""
    def took(policy, **variables):
        return median(child("seconds", name, policy, steps, stderr=subprocess.PIPE,
                            **variables)[2:])

    try:
        # AMX instructions end a process that has not requested them
        return took(CONTRIB, GLUON_AMP_ENGINE="off", DNNL_MAX_CPU_ISA="") / took("float32")
    except subprocess.CalledProcessError as failed:
        return f"fails: {failed.stderr.splitlines()[-1]}"


def torch_ratio(name, seconds):
    """Returns PyTorch's bfloat16 step over its float32 step; - without PyTorch, and for networks
    that torch_nets.py does not have."""
    if not find_spec("torch"):
        return "-"
    try:
        row = child("--only", name, "--dtype", "bfloat16", "--seconds", seconds, "--json",
                    file=Path(__file__).with_name("torch_nets.py"))
    except IndexError:  # no row in its output
        return "-"
    return row["bfloat16 autocast / float32"]


def memory_ratio(name, policy, kind, runs=1, **variables):
    """Returns the memory of a policy over float32's, the median of parallel processes: memory does
    not depend on speed."""
    variables.setdefault("OMP_WAIT_POLICY", "passive")

    def needed(policy):
        return median(child("memory", name, policy, kind, **variables) for _ in range(runs))

    with ThreadPoolExecutor(2) as pool:
        low, float32 = pool.map(needed, (policy, "float32"))
    return low / float32


class Table:
    """Prints rows as Markdown, or for bench_all.py as JSON objects, one per line."""

    def __init__(self, *columns, as_json=False):
        self.columns, self.as_json = columns, as_json
        if not as_json:
            limit = os.environ.get("DNNL_MAX_CPU_ISA", "not set")
            print(f"{machine()}, DNNL_MAX_CPU_ISA {limit}\n", flush=True)
            print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)

    def row(self, *cells):
        if self.as_json:
            print(json.dumps(dict(zip(self.columns, cells))), flush=True)
        else:
            print(f"| {' | '.join(map(shown, cells))} |", flush=True)


def shown(cell):
    """Formats numbers from 100 on without decimals, others with three digits."""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)


def main(what, name, policy, more):
    if what == "memory":
        print(peak_bytes(name, policy, more))
    else:
        step = stepper(name, policy)
        print([seconds(step) for _ in range(int(more))])


if __name__ == "__main__":
    main(*sys.argv[1:])
