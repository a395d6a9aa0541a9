"""What `import gluon_amp` changes in MXNet: docs/import.md is complete, and float32 programs give
the bits of MXNet alone."""
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import float32_graphs
import pytest
from cases import ALL
from gluon_amp.cpu import library
from mxnet_alone import MXNET_ALONE
from processes import printed

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "import.md").read_text()
COUNT = 200 if ALL else 50
IMPORTED = "import gluon_amp\nassert gluon_amp.cpu.library.load()"


def rows(title):
    """The rows of the table under a title of the page, as lists of fields."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[field.strip() for field in line.strip("|").split(" | ")] for line in lines[2:]]


# ---- the page --------------------------------------------------------------


CHANGES = """
import os, sys
import mxnet
import mxnet.gluon.contrib.estimator

def names():
    found = {}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "mxnet"]:
        for key, value in vars(module).items():
            found[f"{module.__name__}.{key}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.update({f"{module.__name__}.{key}.{k}": v for k, v in vars(value).items()})
    found.update({f"mxnet.base._LIB.{k}": v for k, v in vars(mxnet.base._LIB).items()})
    found.update({f"registry.{k}": v for k, v in mxnet.optimizer.Optimizer.opt_registry.items()})
    return found

variables, before = dict(os.environ), names()
mxnet.base._LIB.MXNotifyShutdown  # loaded at its first use
before = names()
import gluon_amp
imported, modules = names(), {*sys.modules}
for name, value in imported.items():
    if name in before and before[name] is not value:
        print(name)
net = mxnet.gluon.nn.HybridSequential()
net.add(mxnet.gluon.nn.Dense(4, in_units=3), mxnet.gluon.nn.BatchNorm(in_channels=4))
net.initialize()
gluon_amp.convert(net)(mxnet.nd.ones((2, 3))).wait_to_read()
gluon_amp.optimizer("sgd")
assert gluon_amp.cpu.library.load() in gluon_amp.cpu.library.VARIANTS
after = names()
later = {name for name in {*imported, *after} if imported.get(name) is not after.get(name)}
print(*(f"later:{name}" for name in later if "_LIB" not in name
        and not any(name.startswith(f"{module}.") for module in {*sys.modules} - modules)))
for name, value in os.environ.items():
    if variables.get(name) != value:
        print(name + "=" + value)
"""


def test_page_lists_every_function_and_variable_that_the_import_changes():
    """And a converted network changes nothing more."""
    names = {"MXNET_SAFE_ACCUMULATION", "MXNET_SUBGRAPH_VERBOSE"}
    unset = "".join(f"import os; os.environ.pop({name!r}, None)\n" for name in names)
    changes = printed(MXNET_ALONE + unset + CHANGES).split()
    listed = {name for row in rows("Functions of MXNet's Python")
              for name in re.findall(r"`([\w.]+)`", row[0])}
    # MXNet reads this variable at its first use
    assert {name for name in changes if name.startswith("later:")} \
        <= {"later:mxnet.ndarray.ndarray._INT64_TENSOR_SIZE_ENABLED"}
    functions = [name for name in changes if not re.search("=|later:", name)]
    assert len(functions) > 20
    assert [name for name in functions if not any(
        name.endswith(f".{each}") for each in listed)] == []
    set_by_import = {row[0].strip("`"): row[1].strip("`") for row in rows("Environment variables")}
    variables = dict(change.split("=") for change in changes if "=" in change)
    assert variables.keys() == names
    assert variables.items() <= set_by_import.items()


def test_page_lists_every_repair():
    table = [(row[0], frozenset(re.findall(r"\w+", row[1]))) for row in rows("Repairs of MXNet")]
    assert table == [(defect, names) for defect, names, _ in library.repairs()]


@pytest.mark.parametrize("test", [test for _, _, test in library.repairs()])
def test_repair_names_its_test(test):
    path, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text()


# ---- random graphs ---------------------------------------------------------


def is_repaired(seed):
    """Whether the import may change a graph's results, by the page's table of repairs."""
    operators = float32_graphs.operators(seed)
    return bool(operators & {"empty", "custom", "hard_sigmoid", "while_loop", "Convolution",
                             "Deconvolution", "Pooling"}) or operators >= {"twice",
                                                                          "FullyConnected"}


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """Of each graph in each process. The allocator fills memory differently in the first two."""
    folder = tmp_path_factory.mktemp("graphs")
    processes = {"alone": (MXNET_ALONE, {}), "again": (MXNET_ALONE, {"MALLOC_PERTURB_": "170"}),
                 "imported": (IMPORTED, {}),
                 "without repairs": (IMPORTED, {"GLUON_AMP_REPAIRS": "off"})}
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(float32_graphs.run, start, folder / name, COUNT,
                                  **{"MALLOC_PERTURB_": "85", **variables})
                for name, (start, variables) in processes.items()}
        return {name: run.result() for name, run in runs.items()}


@pytest.fixture(scope="module")
def comparable(digests):
    """The graphs that MXNet alone computes twice alike."""
    alone, again = digests["alone"], digests["again"]
    died = [seed for seed in alone if float32_graphs.DIED in (alone[seed], again[seed])]
    differ = [seed for seed in alone if seed not in died and alone[seed] != again[seed]]
    print(f"of {COUNT} graphs MXNet alone ends its process in {len(died)}, and {len(differ)} "
          "differ from run to run")
    assert len(died) + len(differ) < .1 * COUNT
    return [seed for seed in alone if seed not in (*died, *differ)]


def test_float32_graphs_have_the_bits_of_mxnet_alone(digests, comparable):
    found, expected = digests["imported"], digests["alone"]
    different = [seed for seed in comparable if found[seed] != expected[seed]]
    assert [seed for seed in different if not is_repaired(seed)] == []
    assert different  # some graph needs a repair


def test_float32_graphs_without_repairs_have_the_bits_of_mxnet_alone(digests, comparable):
    found, expected = digests["without repairs"], digests["alone"]
    assert [seed for seed in comparable if found[seed] != expected[seed]] == []


def test_graphs_have_values_that_are_not_finite_and_every_kind():
    kinds = set().union(*(float32_graphs.operators(seed) for seed in range(200)))
    assert kinds >= {"executor", "static", "block", "imperative", "twice", "empty", "custom",
                     "BatchNorm", "RNN", "foreach", "while_loop", "hard_sigmoid", "Dropout"}
    assert not os.environ.get("GLUON_AMP_REPAIRS")
