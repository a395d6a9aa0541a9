"""Imports lead down the table of layers, and what stands around the core uses its public names
alone. The docs name every file and every private name of MXNet."""
import ast
import functools
import re
import sys
from pathlib import Path

import gluon_amp
import mxnet as mx
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn
from PIL import Image

PACKAGE = Path(gluon_amp.__file__).parent
DOCS = PACKAGE.parent / "docs"
sys.path.append(str(DOCS))
from packages import comment, files, imports, packages, picture  # noqa: E402


def cycle(graph):
    """The names on a cycle, or nothing."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name):]
        if name in done or name not in graph:
            return []
        path.append(name)
        for target in sorted(graph[name]):
            found = visit(target)
            if found:
                return found
        done.add(path.pop())
        return []

    return next(filter(None, map(visit, sorted(graph))), [])


def test_files_have_no_import_cycle():
    assert cycle(imports()) == []


# Each file or folder imports from its own layer and from those before it.
CORE = {
    "values and texts": "numpy_names version annotations checks files",
    # Before MXNet's import: what it loads, and the packs of kernels. What builds and installs packs
    # stands around the core.
    "CUDA libraries": "cuda/__init__ cuda/devices cuda/fatbin cuda/kernels cuda/libraries "
                      "cuda/load cuda/pack cuda/wheel",
    "MXNet's import": "_mxnet",
    "formats": "formats policy",
    "engine": "cpu",
    "graphs": "data graph record",
    "workers": "parallel",
    "training": "training",
    "networks": "gluon",
    "symbols": "symbolic"}
AROUND = {
    "reports": "reports",
    "inspection": "inspection",
    "ONNX": "onnx",
    "packs": "cuda/build cuda/comparison cuda/elf cuda/install cuda/ptx cuda/sources cuda/toolkit",
    "commands": "tools",
    "interface": "__init__ __main__"}
LAYERS = {**CORE, **AROUND}


def layer_of(name):
    """The layer of a file, which the table has, or of its folder."""
    return next(layer for layer, names in LAYERS.items()
                if {name, name.partition("/")[0]} & {*names.split()})


def test_files_import_from_lower_layers():
    order = [*LAYERS]
    wrong = [f"{name} imports {target}" for name, targets in imports().items()
             for target in targets if order.index(layer_of(target)) > order.index(layer_of(name))]
    assert wrong == []


def test_imports_are_relative():
    assert [name for name, tree in files().items() for node in ast.walk(tree)
            if isinstance(node, ast.Import) and any(a.name == "gluon_amp" or a.name.startswith(
                "gluon_amp.") for a in node.names)
            or isinstance(node, ast.ImportFrom) and not node.level
            and (node.module or "").split(".")[0] == "gluon_amp"] == []


PYTHON = {"_replace", "_asdict", "_fields"}  # of named tuples


def is_private(name):
    return bool(re.match("_[a-zA-Z]", name))


def private_names_of_others(tree):
    """Private names that a file imports, reads or sets of other objects than `self`, as (line,
    name); and those of `self`."""
    others, own = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            others += [(node.lineno, part) for part in (node.module or "").split(".")]
            others += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            is_own = getattr(node.value, "id", "") in ("self", "cls")
            (own if is_own else others).append((node.lineno, node.attr))
        elif isinstance(node, ast.Call):
            others += [(node.lineno, keyword.arg or "") for keyword in node.keywords]
            if getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr", "delattr"):
                others += [(node.lineno, str(a.value)) for a in node.args
                           if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) \
                and getattr(getattr(node.value, "func", None), "id", "") == "vars":
            others.append((node.lineno, str(node.slice.value)))
    return ([(line, name) for line, name in names if is_private(name)] for names in (others, own))


def names_defined(tree):
    """Names of functions and classes, and of attributes of `self` and of classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_around_the_core_no_file_uses_private_names_of_others():
    of_mxnet = PYTHON.union(*listed().values())
    around = {name: tree for name, tree in files().items() if layer_of(name) in AROUND}
    defined = {layer: set() for layer in AROUND}
    for name, tree in around.items():
        defined[layer_of(name)].update(names_defined(tree))
    wrong = []
    for name, tree in around.items():
        others, own = private_names_of_others(tree)
        own = [(line, each) for line, each in own if each not in defined[layer_of(name)]]
        wrong += [f"{name}.py, line {line}: {each}" for line, each in [*others, *own]
                  if each not in of_mxnet]
    assert wrong == []


def test_architecture_page_names_every_file():
    text = (DOCS / "architecture.md").read_text()
    names = [f"{name}.py" for name in files() if not name.split("/")[-1].startswith("__")]
    names += [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.cc")]
    assert [name for name in names if f"`{name.split('/')[-1]}`" not in text] == []


def test_architecture_page_orders_packages_as_the_layers():
    table = (DOCS / "architecture.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| `(\w+)/` \|", table)
    folders = {name.partition("/")[0] for name in files() if "/" in name}
    layers = [name for names in LAYERS.values() for name in names.split() if name in folders]
    assert [name for name in rows if name != "cuda"] == layers


def test_package_diagram_shows_every_package():
    drawn = {text.get_text() for text in picture().axes[0].texts}
    assert {f"{name}/" for name in packages()} <= drawn
    with Image.open(DOCS / "figures" / "packages.png") as figure:
        assert figure.text["Comment"] == comment()  # else: python docs/figures.py docs/figures


def listed():
    """The table of the docs: object, and its private names."""
    table = (DOCS / "mxnet_names.md").read_text()
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): re.findall(r"`(_\w+)`", row[2]) for row in rows}


def private_names_used():
    """Private names that files use or assign, also as strings, and those that they define."""
    used, defined = set(), set()
    for tree in files().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                defined.add(getattr(node.target, "attr", getattr(node.target, "id", "")))
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) \
                        and node.value.id == "self":
                    defined.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mxnet"):
                used.update(a.name for a in node.names)
            elif isinstance(node, ast.Call) and \
                    getattr(node.func, "id", "") in ("getattr", "hasattr"):
                used.update(a.value for a in node.args if isinstance(a, ast.Constant))
    return ({name for name in names if isinstance(name, str) and re.match("_[a-zA-Z]", name)}
            for names in (used, defined))


def test_docs_list_every_private_name_of_mxnet():
    used, defined = private_names_used()
    names = {name for row in listed().values() for name in row}
    others = {"_replace", "_fields", "_asdict", "_exit", "_actions", "_Unpickler",  # of Python
              "_bound_types", "_clean", "_options", "_reshaped", "_monitor",
              "_scales"}  # own, of executors
    assert sorted(used - defined - names - others) == []
    assert sorted(names - used) == []
    # Names that gluon_amp overrides; three names are equal by coincidence.
    theirs = {name for one in objects().values() for name in dir(one)}
    assert sorted((used | defined) & theirs - names - {"_monitor", "_shape", "_slice"}) == []


@functools.lru_cache(maxsize=None)
def objects():
    """One of each class in the table, with its initialized attributes."""
    net = nn.Dense(2, in_units=2)
    net.initialize()
    net.hybridize()
    with mx.autograd.record():
        net(nd.ones((1, 2))).backward()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    trainer.step(1)
    data = mx.sym.var("data")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=2), name="softmax")
    module = mx.mod.Module(symbol)
    bucketing = mx.mod.BucketingModule(lambda key: (symbol, ["data"], ["softmax_label"]), 1)
    for one in (module, bucketing):
        one.bind([("data", (1, 2))], [("softmax_label", (1,))])
        one.init_params()
        one.init_optimizer()
    return {"Block": net, "HybridBlock": net, "Parameter": net.weight, "NDArray": nd.ones(1),
            "Optimizer": trainer._optimizer, "gluon.Trainer": trainer, "Module": module,
            "BucketingModule": bucketing, "Executor": module._exec_group.execs[0],
            "mx.gluon.block._BlockScope": net._scope, "mx.kv.KVStore": mx.kv.create("local"),
            "mx.name.NameManager": mx.name.NameManager(), "nn.BatchNorm": nn.BatchNorm(),
            "nn.Dropout": nn.Dropout(0.5)}


@pytest.mark.parametrize("of", listed())
def test_mxnet_has_these_private_names(of):
    found = objects().get(of)
    if found is None:
        found = eval(of, {"mx": mx, "mxnet": mx})
    missing = [name for name in listed()[of] if not hasattr(found, name)]
    assert not missing, f"this MXNet's {of} has no {', '.join(missing)}"
