"""Records the GPU calls of training steps without a GPU: make bench-gpu-path.

It writes docs/gpu_table.txt, with each network of networks.py in float32, under mx.contrib.amp and
under gluon_amp, and docs/gpu_resnet50.txt, a step of ResNet-50. The optimizer is SGD with momentum;
the loss scale is settled. Each step runs in a separate process, `gpu_path.py NAME HOW`.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gluon_amp.cuda import environment, steps
from gluon_amp.cuda.trace import Step, trace_symbol
from gluon_amp.policy import get_policy
from gluon_amp.tools.footprint import load

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = ("launches", "casts", "synchronizations", "copies to the host", "sums in float16")


def on_gpu(arrays):
    import mxnet as mx
    return [on_gpu(one) for one in arrays] if isinstance(arrays, (list, tuple)) \
        else arrays.as_in_context(mx.gpu(0))


def one(name, how):
    """Records a step, in a process with a recording GPU."""
    steps.begin(how)
    import mxnet as mx
    from networks import NETWORKS
    network = NETWORKS[name]
    mx.random.seed(0)
    data, target = network.batch()
    net = network.make()
    net.initialize(mx.init.Xavier(), ctx=mx.gpu(0))
    print(json.dumps(steps.record(net, on_gpu([data]), how, policy=get_policy("float16"),
                                  loss_fn=network.loss, labels=on_gpu(target))))


def step_of(name, how):
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        done = subprocess.run([sys.executable, "-W", "ignore", __file__, name, how], text=True,
                              capture_output=True, env=environment.environment(log))
        if done.returncode:
            raise SystemExit(f"{name}, {how}: {done.stderr.strip()[-2000:]}")
        return Step.read(log, json.loads(done.stdout.splitlines()[-1]))


def row(name, how, step):
    counts = step.counts()
    cells = [name, how, *(f"{counts[column]:,}" for column in COLUMNS),
             f"{counts['on Tensor Cores']}/{counts['products']}", f"{step.peak / 2 ** 20:,.0f}"]
    print(*cells, sep="  ", flush=True)
    return "| " + " | ".join(cells) + " |"


def main():
    from networks import NETWORKS
    lines = ["| network | | launches | casts | syncs | copies | float16 sums | Tensor Cores | "
             "MiB |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name in NETWORKS:
        for how in steps.HOW:
            lines.append(row(name if how == "float32" else "", how, step_of(name, how)))
    (DOCS / "gpu_table.txt").write_text("\n".join(lines) + "\n")
    trace = trace_symbol(load("resnet50_v1"), ["data"], [((64, 3, 224, 224), "float32")])
    (DOCS / "gpu_resnet50.txt").write_text(f"{trace}\n")


if __name__ == "__main__":
    one(*sys.argv[1:]) if sys.argv[1:] else main()
