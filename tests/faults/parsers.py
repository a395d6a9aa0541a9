"""Coverage-guided fuzzing of what reads files: make -C tests parsers

    python tests/faults/parsers.py 600 states       ten minutes
    python tests/faults/parsers.py 60               a minute for each parser

atheris changes good files and keeps those that reach new lines. A parser returns, or raises
ValueError with the file's name. Any other exception, ten seconds, or 2 GB end the run: the file
stays in the current folder, as NAME.crash or timeout-*.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gluon_amp"]):
    import gluon_amp as amp
    from gluon_amp import record
    from gluon_amp.cuda import pack
    from gluon_amp.inspection import saved
    from gluon_amp.reports import read_logs

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "reports")]  # for the imports of good files
LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=20000")
ERRORS = [0.9, 0.5, 0.3]


def network():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(2, in_units=3))
    net.initialize()
    net.hybridize()
    return net


# Each writes good files to a folder, and returns the function that reads one.


def states(folder):
    net = network()
    scaled = amp.Trainer(net.collect_params(), "adam", loss_scale="dynamic")
    for trainer in (scaled, gluon.Trainer(net.collect_params(), "adam", kvstore=None)):
        with autograd.record():
            loss = net(mx.nd.ones((1, 3))).mean()
        if trainer is scaled:
            trainer.backward(loss)
        else:
            loss.backward()
        trainer.step(1)
        trainer.save_states(f"{folder}/{type(trainer).__module__}")
    return scaled.load_states


def records(folder):
    net = amp.convert(network(), amp.Policy("mine", compute="float16"), keep=[".*dense0.*"])
    net.save_parameters(f"{folder}/net.params")
    os.remove(f"{folder}/net.params")
    return lambda path: record.Record.from_json(
        Path(path).read_text(encoding="utf-8", errors="replace"), path)


def packs(folder):
    code = [pack.Code("src/a.cu", 0, b"code" * 8, ["first", "second"])]
    pack.write(f"{folder}/90.pack", 90, code, libmxnet=pack.LIBMXNET, compiler="nvcc",
               licences=["Apache-2.0"])
    return lambda path: pack.read(path).verify()


def logs(folder):
    import training_logs
    for write in (training_logs.gluoncv, training_logs.module, training_logs.jsonl):
        Path(folder, write.__name__).write_text(write(ERRORS, dtype="float16"))
    Path(folder, "keras").write_text("epoch,loss,val_accuracy\n0,2.1,0.1\n1,1.2,0.5\n")
    return lambda path: read_logs([path])


def events(folder):
    """Messages in event files, whose checksums are right."""
    from test_report_events import VERSION, value
    from test_report_events import records as in_file
    for i, error in enumerate(ERRORS):
        Path(folder, str(i)).write_bytes(value(i, tag="val_acc", simple_value=error))

    def parse(path):
        file = f"{path}.events.out.tfevents.1.host"
        Path(file).write_bytes(in_file(VERSION, Path(path).read_bytes()))
        read_logs([file])
    return parse


def xrays(folder):
    net, rng = amp.convert(network()), np.random.default_rng(3)
    batch = mx.nd.array(rng.standard_normal((4, 3))), mx.nd.array([0, 1, 0, 1])
    amp.xray(net, [batch], gluon.loss.SoftmaxCrossEntropyLoss()).save(f"{folder}/view")
    os.replace(f"{folder}/view/xray.jsonl", f"{folder}/xray.jsonl")
    return saved.draw


PARSERS = {each.__name__: each for each in (states, records, packs, logs, events, xrays)}


def fuzz(name, seconds):
    """Fuzzes a parser; ends the process."""
    with tempfile.TemporaryDirectory() as folder:
        seeds, file = Path(folder, "seeds"), f"{folder}/input.jsonl"
        seeds.mkdir()
        parse = PARSERS[name](str(seeds))

        def one(data):
            Path(file).write_bytes(data)
            try:
                parse(file)
            except Exception as error:
                if not isinstance(error, ValueError) or "input" not in str(error):
                    Path(f"{name}.crash").write_bytes(data)
                    raise
        atheris.Setup([sys.argv[0], str(seeds), f"-max_total_time={seconds}", *LIMITS], one)
        atheris.Fuzz()


def main(seconds, *names):
    if len(names) == 1:
        fuzz(names[0], seconds)
    failed = [name for name in names or PARSERS if subprocess.run(
        [sys.executable, "-W", "ignore", __file__, seconds, name]).returncode]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
