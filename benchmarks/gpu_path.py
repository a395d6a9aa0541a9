"""Records the GPU calls of training steps without a GPU: make -C tests bench-gpu-path.

It writes gpu_path.md, with each network of networks.py in float32, under mx.contrib.amp and under
gluon_amp, and a step of ResNet-50. Each step runs in a separate process, `gpu_path.py NAME HOW`.
"""
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # its networks.py is another one

from gluon_amp.checks import aligned  # noqa: E402
from software_gpu import environment, recording, steps  # noqa: E402

COLUMNS = ("launches", "casts", "synchronizations", "copies to the host", "sums in float16")
RESNET_50 = "resnet50_v1"
RESNET_50_DATA = (64, 3, 224, 224)


def on_gpu(arrays):
    import mxnet as mx
    return [on_gpu(one) for one in arrays] if isinstance(arrays, (list, tuple)) \
        else arrays.as_in_context(mx.gpu(0))


def one(name, how):
    """Records a step, in a process with a recording GPU."""
    steps.begin(how)
    import mxnet as mx
    from networks import NETWORKS, Network, zoo_network
    network = NETWORKS[name] if name in NETWORKS else Network(
        lambda: zoo_network(RESNET_50), lambda: (mx.nd.zeros(RESNET_50_DATA), None),
        lambda output, _: (output.astype("float32") ** 2).mean())
    mx.random.seed(0)
    data, target = network.batch()
    net = network.make()
    net.initialize(mx.init.Xavier(), ctx=mx.gpu(0))
    labels = None if target is None else on_gpu(target)
    print(json.dumps(steps.record(net, on_gpu([data]), how, network.loss, labels)))


def step_of(name, how):
    """The calls of each part of a step, and the peak of memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        done = subprocess.run([sys.executable, "-W", "ignore", __file__, name, how], text=True,
                              capture_output=True, env=environment.environment(log))
        if done.returncode:
            raise SystemExit(f"{name}, {how}: {done.stderr.strip()[-2000:]}")
        facts = json.loads(done.stdout.splitlines()[-1])
        if facts["violations"]:
            raise SystemExit(f"{name}, {how}: a GPU would refuse {facts['violations']} calls")
        found = recording.sections(str(log))
    return {part: found.get(part, []) for part in steps.PARTS}, facts["peak"] / 2 ** 20


def calls_of(parts):
    return [call for part in steps.PARTS for call in parts[part]]


def row(name, how, parts, peak):
    counts = steps.counts(calls_of(parts))
    cells = [name, how, *(f"{counts[column]:,}" for column in COLUMNS),
             f"{counts['on Tensor Cores']}/{counts['products']}", f"{peak:,.0f}"]
    print(*cells, sep="  ", flush=True)
    return "| " + " | ".join(cells) + " |"


def trace(parts, peak, float32_parts, float32_peak):
    """A step's calls as text: counts, products, and casts by operator."""
    counts = [*(steps.counts(parts[part]) for part in steps.PARTS), steps.counts(calls_of(parts)),
              steps.counts(calls_of(float32_parts))]
    rows = [("", *steps.PARTS, "the step", "float32's"),
            *((name, *(str(column[name]) for column in counts)) for name in counts[0]),
            ("peak memory, MiB", "", "", "", f"{peak:.0f}", f"{float32_peak:.0f}")]
    products = Counter(
        (part, call.name, call.factors, call.sums, "yes" if call.on_tensor_cores else "no")
        for part in steps.PARTS for call in parts[part] if call.is_product)
    casts = Counter(call.operator for call in calls_of(parts) if call.is_cast)
    shape = "x".join(map(str, RESNET_50_DATA))
    return "\n".join([
        f"One step: policy float16, data {shape}, compute capability 7.0.",
        "The calls are recorded, not executed.", "", *aligned(rows), "", "Products:",
        *aligned([("calls", "part", "call", "multiplies", "adds in", "Tensor Cores"),
                  *((str(count), *key) for key, count in products.items())]),
        "", "Casts, by the operator that inserts them:",
        *aligned([(str(count), operator) for operator, count in casts.items()])])


def main():
    from networks import NETWORKS
    lines = ["| network | | launches | casts | syncs | copies | float16 sums | Tensor Cores | "
             "MiB |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name in NETWORKS:
        for how in steps.HOW:
            lines.append(row(name if how == "float32" else "", how, *step_of(name, how)))
    text = trace(*step_of(RESNET_50, "gluon_amp"), *step_of(RESNET_50, "float32"))
    page = ROOT / "benchmarks" / "gpu_path.md"
    introduction = page.read_text().partition("| network")[0]
    table = "\n".join(lines)
    page.write_text(f"{introduction}{table}\n\nA step of ResNet-50:\n\n```text\n{text}\n```\n")


if __name__ == "__main__":
    one(*sys.argv[1:]) if sys.argv[1:] else main()
