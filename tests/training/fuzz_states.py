"""`make fuzz-states`: random files of optimizer states, damaged or crafted, that a Trainer loads.

A seed determines a file: a good one whose bytes, opcodes, arrays or settings are changed, or a
pickle of random opcodes. A file is refused with a ValueError, and nothing changes; or it loads, and
the next step runs. No file ends the process or runs for more than LONGEST seconds.
"""
import contextlib
import functools
import io
import os
import pickle
import pickletools
import random
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

LONGEST = 10  # seconds for a file
CHUNK = 500  # files of one process
SCHEDULERS = [
    lambda: None, lambda: mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
    lambda: mx.lr_scheduler.MultiFactorScheduler([2, 4], 0.5, base_lr=0.1),
    lambda: mx.lr_scheduler.PolyScheduler(100, 0.1, warmup_steps=3),
    lambda: mx.lr_scheduler.CosineScheduler(100, 0.1), lambda: Halving(base_lr=0.1)]
OPTIMIZERS = ["sgd", "nag", "adam", "adamw", "lamb", "lars", "rmsprop", "nadam", "adagrad",
              "dcasgd"]
# Settings in place of a file's.
VALUES = [None, True, -1, 0, 1, 2.5, 2 ** 31, 2 ** 62, -2 ** 62, 10 ** 300, float("nan"),
          float("inf"), -float("inf"), 1e-320, "", "linear", "\ud800", b"\0", [], [1], [0, 0], (),
          {}, {0: None}, {0: {}}, {"a": {0: "b"}}, {1}, np.float16, np.float64("nan"), np.zeros(2),
          1j, range(10 ** 9), "9" * 20_000, [[[[]]]], mx.nd.ones(2), mx.optimizer.SGD(), object]
NAMES = ["mxnet.optimizer.optimizer Adam", "mxnet.ndarray.ndarray NDArray", "numpy ndarray",
         "numpy float64", "numpy dtype", "numpy._core.multiarray scalar",
         "numpy._core.multiarray _reconstruct", "builtins range", "builtins set", "builtins eval",
         "posix system", "mxnet.lr_scheduler FactorScheduler", "collections OrderedDict",
         "gluon_amp.training.optimizer _revive", "gluon_amp.training.optimizer _Decimal",
         "mxnet.ndarray.sparse RowSparseNDArray", "mxnet.ndarray.sparse CSRNDArray",
         "fuzz_states Halving", "builtins bytearray", "builtins object"]
CODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


class Halving(mx.lr_scheduler.LRScheduler):
    """A scheduler of the user."""

    def __call__(self, num_update):
        return self.base_lr / 2 ** min(num_update, 20)


@functools.lru_cache(maxsize=None)
def network(name, scheduler, policy):
    """A network and its Trainer, with a good file of its states, unsealed."""
    mx.random.seed(1)
    net = gluon.nn.HybridSequential(prefix="net_")
    net.add(gluon.nn.Dense(3, in_units=4, prefix="a_"), gluon.nn.Dense(2, in_units=3, prefix="b_"))
    net.initialize()
    amp.convert(net, policy)
    settings = {"momentum": 0.9} if name in ("sgd", "nag") else {}
    given = SCHEDULERS[scheduler]()
    if given is not None:
        settings["lr_scheduler"] = given
    trainer = amp.Trainer(net.collect_params(), name, settings,
                          loss_scale=amp.DynamicLossScale(64, growth_interval=5))
    for _ in range(3):
        train(net, trainer)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "good")
        trainer.save_states(path)
        return net, trainer, Path(path).read_bytes()[:-64 - len(b"\ngluon_amp sha256 ")]


def train(net, trainer):
    with autograd.record():
        loss = (net(nd.ones((2, 4))) ** 2).mean()
    trainer.backward(loss)
    trainer.step(2)
    nd.waitall()


# ---- crafted files


def noise(draw, count):
    return bytes(draw.randrange(256) for _ in range(count))


def flipped(data, draw):
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 10])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def spliced(data, draw):
    parts = [draw.randrange(len(data)) for _ in range(4)]
    a, b, c, d = sorted(parts)
    return draw.choice([data[:a], data[:a] + data[b:], data[:b] + data[a:],
                        data[:a] + data[c:d] + data[b:], data[:a] + draw.choice(CODES) + data[a:]])


def pieces(data):
    """The opcodes of a pickle, each with its argument."""
    at = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    return [data[i:j] for i, j in zip(at, at[1:])]


def other_opcodes(data, draw):
    found = pieces(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        i, j = draw.randrange(len(found)), draw.randrange(len(found))
        found[i] = draw.choice([b"", found[j], found[i] * 2, found[i] + found[j],
                                draw.choice(CODES),
                                b"c" + draw.choice(NAMES).replace(" ", "\n").encode() + b"\n",
                                pickle.dumps(draw.choice(VALUES), 3)[2:-1]])
    return b"".join(found)


def random_opcodes(data, draw):
    made = [b"\x80\x04"]
    for _ in range(draw.randrange(1, 60)):
        made.append(draw.choice([
            draw.choice(CODES), draw.choice(CODES) + noise(draw, draw.choice([1, 2, 4, 8])),
            b"c" + draw.choice(NAMES).replace(" ", "\n").encode() + b"\n", b"(", b"t", b"\x85R",
            b"}", b")", b"R", b"b", b"\x94", b"h\0", b"r" + noise(draw, 4), b"B\xff\xff\xff\x7f",
            b"\x8e" + b"\xff" * 8, pickle.dumps(draw.choice(VALUES), 3)[2:-1]]))
    return b"".join(made) + b"."


def other_array(data, draw):
    """Another header, or other bytes, of one of MXNet's arrays."""
    header = b"\xc9\xfa\x93\xf9"
    at = [i for i in range(len(data)) if data.startswith(header, i)]
    if not at:
        return flipped(data, draw)
    i = draw.choice(at) + 4 * draw.randrange(16)
    number = draw.choice([0, 1, 2, 3, -1, 4, 6, 12, 99, 2 ** 31 - 1, -2 ** 31, 2 ** 20])
    return data[:i] + struct.pack("<i", number) + data[i + 4:]


def other_settings(data, draw):
    """Another value of the optimizer, its scheduler or the Trainer."""
    states, optimizer = pickle.loads(data)
    optimizer.param_dict = {}
    state = optimizer.trainer_state
    owners = [vars(optimizer), vars(optimizer), state, states, state["loss_scale"]]
    if optimizer.lr_scheduler is not None:
        owners += [vars(optimizer.lr_scheduler)] * 2
    for _ in range(draw.choice([1, 1, 2])):
        into = draw.choice(owners)
        key = draw.choice([*into, draw.choice(["update", "x", 0, -1, 2 ** 61])])
        if draw.random() < 0.1:
            into.pop(key, None)
        else:
            into[key] = draw.choice(VALUES)
    vars(optimizer).setdefault("param_dict", {})  # MXNet does not write it
    return pickle.dumps((states, optimizer), draw.choice([3, 4, 5]))


def bomb(data, draw):
    """Containers that contain themselves or each other very often, and long numbers."""
    nested = b"]" * 30_000 + b"a" * 29_999
    doubled = b"]\x94" + b"".join(b"]\x94(h%ch%ce" % (i, i) for i in range(60))
    shared = draw.choice([
        nested, doubled, b"]\x94h\0a", b"}\x94K\0h\0s",
        b")" + b"\x85" * 50_000 + b"}\x94" + b"h\0s",
        b"I" + b"9" * 300_000 + b"\n", b"L" + b"9" * 300_000 + b"L\n", b"(" * 100_000,
        b"\x8b" + struct.pack("<i", 300_000) + b"\x7f" * 300_000,
        b"}(" + b"".join(b"\x8a\x0a" + (i * (2 ** 61 - 1)).to_bytes(10, "little") + b"N"
                         for i in range(20_000)) + b"u",
        b"c__builtin__\nset\nc__builtin__\nrange\nJ\0\xca\x9a;\x85R\x85R",
        b"cbuiltins\nset\ncbuiltins\nrange\nJ\0\xca\x9a;\x85R\x85R",
        b"r\xff\xff\xff\xff", b"Nr\xff\xff\xff\x7f"])
    if draw.random() < 0.5:
        return b"\x80\x04" + shared + b"."
    found = pieces(data)
    i = draw.randrange(1, len(found))
    return b"".join(found[:i]) + shared + b"".join(found[i:])


CRAFTED = [flipped, spliced, other_opcodes, random_opcodes, other_array, other_settings,
           other_settings, other_settings, bomb]


# ---- runs


def check(seed, folder):
    """Loads the file of a seed. Returns whether it was refused."""
    draw = random.Random(seed)
    crafted = draw.choice(CRAFTED)
    net, trainer, good = network(draw.choice(OPTIMIZERS), draw.randrange(len(SCHEDULERS)),
                                 draw.choice(["float16", "bfloat16", "float32"]))
    path = os.path.join(folder, "file")
    Path(path).write_bytes(good)
    trainer.load_states(path)
    Path(path).write_bytes(crafted(good, draw))
    before = everything(net, trainer)
    refusal = ""
    try:
        trainer.load_states(path)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert path in refusal, refusal
        assert everything(net, trainer) == before, f"it was refused, but changed: {refusal}"
        return True
    with contextlib.suppress(amp.LossScaleError):
        train(net, trainer)
    for parameter in net.collect_params().values():  # weights may be infinite
        parameter.set_data(nd.ones(parameter.shape))
    return False


def everything(net, trainer):
    """The complete state that a step depends on."""
    states = [trainer._updaters[0].states[i] for i in sorted(trainer._updaters[0].states)]
    settings = {**vars(trainer.optimizer), "param_dict": None, "_master_sync": None}
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 4)
    pickler.fast = False
    pickler.dump([[p.data().asnumpy().tobytes() for p in net.collect_params().values()], states,
                  trainer.loss_scale, trainer.skipped, settings])
    return stream.getvalue()


def too_long(number, frame):
    raise TimeoutError(f"a file took more than {LONGEST} seconds")


def run(first, count):
    """Checks files; prints the seed before each, for the process that counts."""
    signal.signal(signal.SIGALRM, too_long)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            print(seed, flush=True)
            signal.alarm(LONGEST)
            refused += check(seed, folder)
            signal.alarm(0)
    print(f"refused {refused}", flush=True)


def main(count, first):
    refused, failed = 0, []
    for start in range(first, first + count, CHUNK):
        done = subprocess.run([sys.executable, "-W", "ignore", __file__, "run", str(start),
                               str(min(CHUNK, first + count - start))], text=True,
                              capture_output=True)
        last = done.stdout.split("\n")[-2:][0]
        if done.returncode:
            failed.append(last)
            print(f"SEED={last}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        else:
            refused += int(last.split()[1])
    print(f"{count} files of optimizer states: {refused} refused, {len(failed)} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
