"""Counts what a reader follows: files, changes of file over calls, classes and functions.

The network has two dense layers. A change of file is a call of a function of the package whose
predecessor, the function of the package called before it, is in another file. Calls of MXNet, and
comprehensions, do not count.
"""
import argparse
import ast
import functools
import sys
from pathlib import Path

import harness
from gluon_amp._mxnet import mx, np
from harness import amp
from mxnet import autograd, gluon
from mxnet.gluon import nn

PACKAGE = Path(amp.__file__).parent
COMPREHENSIONS = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}
SETTLED = 12  # steps after which the first loss scale has been found


def calls(function):
    """Returns the calls of functions of the package: a file, a line and a name of each."""
    found = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS \
                and PACKAGE in Path(code.co_filename).parents:
            file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            found.append((file, code.co_firstlineno, code.co_name))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@functools.lru_cache(maxsize=None)
def classes_in(file):
    """Returns the names of a file's classes, with their first and last lines."""
    tree = ast.parse((PACKAGE / file).read_text())
    return [(node.name, node.lineno, node.end_lineno) for node in tree.body
            if isinstance(node, ast.ClassDef)]


def classes(found):
    """Returns the classes that have one of these functions."""
    return {(file, name) for file, line, _ in found
            for name, first, last in classes_in(file) if first <= line <= last}


def walks():
    """Yields names and calls of what users do."""
    rng = np.random.RandomState(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    data, label = mx.nd.array(rng.rand(8, 5)), mx.nd.array(np.arange(8) % 4)
    net(data)

    def step():
        with autograd.record():
            loss = loss_fn(net(data), label)
        trainer.backward(loss)
        trainer.step(8)

    yield "convert", calls(lambda: amp.convert(net))
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    yield "first step", calls(step)
    for _ in range(SETTLED):
        step()
    yield "later step", calls(step)
    yield "X-ray of two batches", calls(lambda: amp.xray(net, [(data, label)] * 2, loss_fn))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", action="store_true", help="list all calls, too")
    args = parser.parse_args()
    table = harness.Table("path", "files", "changes of file", "classes", "functions",
                          as_json=args.json)
    for name, made in walks():
        files = [file for file, _, _ in made]
        table.row(name, len(set(files)), sum(a != b for a, b in zip(files, files[1:])),
                  len(classes(made)), len(set(made)))
        if args.calls:
            print(*(f"  {file} {line} {function}" for file, line, function in made), sep="\n")


if __name__ == "__main__":
    main()
