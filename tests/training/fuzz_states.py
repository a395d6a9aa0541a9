"""`make -C tests fuzz-states`: damaged and crafted files of optimizer states that a Trainer loads.

A seed determines a file: a good one, of this version or a pickle of an earlier one, whose bytes,
opcodes, arrays, values or settings are changed, or a pickle of random opcodes. A file is refused
with a ValueError, and nothing changes; or it loads, and the next step runs. No file ends the
process or runs for more than LONGEST seconds.
"""
import contextlib
import copy
import functools
import hashlib
import io
import json
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
    """A network and its Trainer, with a good file of its states, and one of version 0.2.0 without
    its checksum."""
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
        trainer.optimizer.trainer_state = {
            "skipped": 0, "skipped_in_a_row": 0, "names": [p.name for p in trainer._params],
            "loss_scale": trainer._step.loss_scale.state_dict(), "averaged": [], "scales": []}
        old = pickle.dumps((trainer._updaters[0].states, trainer.optimizer))
        del trainer.optimizer.trainer_state
        return net, trainer, Path(path).read_bytes(), old


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


PICKLES = [flipped, spliced, other_opcodes, random_opcodes, other_array, other_settings,
           other_settings, other_settings, bomb]


# ---- crafted files of this version, most with a checksum that fits


HEAD = len(b"gluon_amp states 1 ") + 65
JSON = [None, True, -1, 0, 1, 2.5, 2 ** 31, 2 ** 62, 10 ** 400, float("nan"), float("-inf"), 1e-320,
        "", "linear", "\ud800", "9" * 20_000, [], [0, 0], {}, {"a": {}}, {"$tuple": []},
        {"$tuple": 3}, {"$dict": [[0, 1]]}, {"$dict": [[[], 1]]},
        {"$dict": [[2 ** 61 - 1, 0]] * 3},
        {"$array": ["nd", 64]}, {"$array": ["csr", 0]}, {"$array": ["nd", -1]}, {"$array": 1},
        {"$numpy": ["float64", "nan"]}, {"$numpy": ["object", [1]]}, {"$numpy": ["int8", [[1], 2]]},
        {"$other": 1}, ["mxnet.optimizer.optimizer.SGD", {}]]


def sealed(body):
    return b"gluon_amp states 1 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def resealed(change):
    """A change of what follows the checksum."""
    return lambda data, draw: sealed(change(data[HEAD:], draw))


def places(value):
    """The containers in a JSON value, each with its keys or indices."""
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        yield value, keys
        for key in keys:
            yield from places(value[key])


def other_values(data, draw):
    """Other values, or other keys, in the JSON."""
    text, _, arrays = data.partition(b"\n")
    value = json.loads(text)
    for _ in range(draw.choice([1, 1, 2, 4])):
        container, keys = draw.choice(list(places(value)))
        key = draw.choice(keys) if keys else None
        if isinstance(container, list):
            container.insert(key or 0, draw.choice(JSON))
        elif draw.random() < 0.2 and keys:
            container[draw.choice(["update", "x", "$tuple", "$array"])] = container.pop(key)
        else:
            container[key if keys else "x"] = copy.deepcopy(draw.choice(JSON))
    return json.dumps(value).encode() + b"\n" + arrays


def other_json(data, draw):
    """JSON that nests very often, or has long numbers."""
    text, _, arrays = data.partition(b"\n")
    bombs = [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"9" * 300_000, b"1e" + b"9" * 1000,
             b'{"$tuple":[' * 400 + b"]}" * 400, b'{"a":' * 900 + b"1" + b"}" * 900,
             b'{"$array":["nd",99999999999999]}', b'{"$array":["nd",10]}', b"\xff\xfe", b"NaN"]
    found = draw.choice([i for i in range(len(text)) if text[i:i + 1].isdigit()])
    return text[:found] + draw.choice(bombs) + text[found + 1:] + b"\n" + arrays


FILES = [flipped, spliced, resealed(flipped), resealed(spliced), resealed(other_array),
         resealed(other_array), *[resealed(other_values)] * 4, resealed(other_json)]


# ---- runs


def check(seed, folder):
    """Loads the file of a seed. Returns whether it was refused."""
    draw = random.Random(seed)
    net, trainer, good, old = network(draw.choice(OPTIMIZERS), draw.randrange(len(SCHEDULERS)),
                                      draw.choice(["float16", "bfloat16", "float32"]))
    path = os.path.join(folder, "file")
    if draw.random() < 0.5:
        good, crafted = old, draw.choice(PICKLES)
    else:
        crafted = draw.choice(FILES)
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
