"""The house is as docs/architecture.md says: no circles, and MXNet's private names are listed."""
import ast
import functools
import re
from pathlib import Path

import gluon_amp
import mxnet as mx
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn

PACKAGE = Path(gluon_amp.__file__).parent
DOCS = PACKAGE.parent / "docs" / "architecture.md"


def files():
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text())
            for path in PACKAGE.rglob("*.py")}


def imports(name, tree, names):
    """The rooms that a room imports, also inside functions; a folder's `__init__` is one, too."""
    folder = name.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[:len(folder) - node.level + 1] + (node.module or "").split(".")
            base = [part for part in base if part]
            for alias in node.names:
                for target in ([*base, alias.name], [*base, alias.name, "__init__"], base,
                               [*base, "__init__"]):
                    if "/".join(target) in names:
                        yield "/".join(target)
                        break


def arrows():
    trees = files()
    return {name: set(imports(name, tree, trees)) for name, tree in trees.items()}


def circle(graph):
    """The names on a circle, or nothing."""
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


def test_no_files_import_each_other_in_a_circle():
    assert circle(arrows()) == []


def test_no_folders_import_each_other_in_a_circle():
    folders = {}
    for name, targets in arrows().items():
        if "/" in name:
            folders.setdefault(name.split("/")[0], set()).update(
                target.split("/")[0] for target in targets if "/" in target)
    for folder, targets in folders.items():
        targets.discard(folder)
    assert circle(folders) == []


def test_every_room_stands_in_the_docs():
    text = DOCS.read_text()
    rooms = [f"{name}.py" for name in arrows() if not name.endswith("__init__")]
    rooms += [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.cc")]
    assert [name for name in rooms if f"`{name.split('/')[-1]}`" not in text] == []


def test_folders_stand_in_the_docs_in_the_order_of_their_imports():
    table = DOCS.read_text().partition("## The rooms")[2].partition("\n## ")[0]
    order = re.findall(r"(?m)^\| `(\w+)/` \|", table)
    for name, targets in arrows().items():
        for target in targets:
            here, there = name.split("/")[0], target.split("/")[0]
            if "/" in name and "/" in target:
                assert order.index(there) <= order.index(here), f"{name} imports {target}"


def listed():
    """The docs' table: of what, and its private names."""
    table = DOCS.read_text().split("## Private names of MXNet")[1]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): re.findall(r"`(_\w+)`", row[2]) for row in rows}


def private_names_used():
    """Private names that rooms use or give, also as text, and those that rooms define."""
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


def test_every_private_name_of_mxnets_stands_in_the_docs():
    used, defined = private_names_used()
    names = {name for row in listed().values() for name in row}
    others = {"_replace", "_exit", "_actions", "_getframe",  # of tuples, os, argparse, sys
              "_bound_types", "_clean", "_options", "_reshaped", "_monitor"}  # ours, of executors
    assert sorted(used - defined - names - others) == []
    assert sorted(names - used) == []
    # What ours overrides; two names are the same by chance.
    theirs = {name for one in objects().values() for name in dir(one)}
    assert sorted((used | defined) & theirs - names - {"_monitor", "_shape"}) == []


def test_mxnet_has_the_local_variable_that_is_looked_at():
    assert "v" in mx.gluon.ParameterDict.get.__code__.co_varnames


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
            "mx.gluon.block._BlockScope": net._scope, "mx.kv.KVStore": mx.kv.create("local")}


@pytest.mark.parametrize("of", listed())
def test_mxnet_has_these_private_names(of):
    found = objects().get(of)
    if found is None:
        found = eval(of, {"mx": mx, "mxnet": mx})
    missing = [name for name in listed()[of] if not hasattr(found, name)]
    assert not missing, f"this MXNet's {of} has no {', '.join(missing)}"
