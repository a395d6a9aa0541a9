"""`import gluon_amp`: error messages of incomplete installations, and no side effects."""
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gluon_amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library

pytestmark = pytest.mark.long

PACKAGE = Path(gluon_amp.__file__).parent
OURS = ("MXNET_SAFE_ACCUMULATION", "GLUON_AMP_ISA", "PYTHONPATH", "PYTHONWARNINGS")
INSTALL = "pip install --no-deps mxnet==1.9.1 (or mxnet-cu112==1.9.1" \
    if np.__version__ >= "2" else "pip install '.[cpu]' in a checkout of gluon_amp ('.[cu112]'"
NET = """
import gluon_amp
from mxnet import gluon, nd
net = gluon.nn.Dense(2)
net.initialize()
gluon_amp.convert(net)
net(nd.ones((1, 3))).wait_to_read()
"""
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.split(".")[0] in {0!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
for name in {0!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
"""


def python(code, folder=PACKAGE.parent, *options, **variables):
    env = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run([sys.executable, *options, "-c", code], cwd=folder, text=True,
                          env={**env, "PYTHONPATH": str(folder), **variables},
                          capture_output=True, timeout=120)


def output(*args, **kwargs):
    done = python(*args, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def error(name, *args, **kwargs):
    done = python(*args, **kwargs)
    assert done.returncode == 1, done.stdout + done.stderr
    _, found, message = done.stderr.rpartition(f"{name}: ")
    assert found, done.stderr
    return message.strip()


def import_error(code, folder=PACKAGE.parent, *options):
    message = error("\nImportError", code, folder, *options)
    assert "\n" not in message
    return message


@pytest.fixture
def machine(tmp_path):
    """A folder of packages with only gluon_amp and numpy."""
    installed = Path(np.__file__).parents[1]
    for path in (PACKAGE, *installed.glob("numpy"), *installed.glob("numpy.libs")):
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def install(folder, name, code=None):
    info = folder / f"{name.replace('-', '_')}-1.9.1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.9.1\n")
    if code is not None:
        folder.joinpath("mxnet").mkdir()
        folder.joinpath("mxnet", "__init__.py").write_text(code)


def on_machine(folder):
    return import_error("import gluon_amp", folder, "-S")


# ---- missing packages------------------------------------------------------


def cannot_open(library_):
    return f"raise OSError('{library_}: cannot open shared object file: No such file or directory')"


@pytest.mark.parametrize(("packages", "words"), [
    ({}, ["gluon_amp needs MXNet 1.9.1", INSTALL, "for NVIDIA GPUs"]),
    ({"mxnet": "", "mxnet-cu112": None},
     ["two MXNet builds", "mxnet, mxnet-cu112", "pip uninstall -y mxnet mxnet-cu112", INSTALL]),
    ({"mxnet-cu112": cannot_open("libcuda.so.1"), "mxnet-model-server": None, "gluoncv": None,
      "keras-mxnet": None},  # which are no second build
     ["the NVIDIA driver (libcuda.so.1) is not installed", "install the driver",
      "pip uninstall -y mxnet-cu112; pip install '.[cpu]' in a checkout"]),
    ({"mxnet-cu112": cannot_open("libcudart.so.11.0")},
     ["libcudart.so.11.0", "pip install '.[cu112]'"]),
    ({"mxnet-cu117": cannot_open("libcusparse.so.11")},
     ["libcusparse.so.11", "pip uninstall -y mxnet-cu117", "pip install '.[cu112]'"]),
    ({"mxnet": cannot_open("libgomp.so.1")},
     ["MXNet needs the system's libgomp: apt install libgomp1"])])
def test_incomplete_installation_is_described_with_its_remedy(packages, words, machine):
    for name, code in packages.items():
        install(machine, name, code)
    message = on_machine(machine)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("name", ["mxnet-cu112", None])
def test_build_that_python_imports_is_the_one_that_counts(name, machine, tmp_path):
    """A wheel, or a build from source, which precedes another build in the path."""
    first = tmp_path / "first"
    first.mkdir()
    install(machine, "mxnet-cu117", code="")
    failing = cannot_open("libcudart.so.11.0")
    if name:
        install(first, name, failing)
    else:
        (first / "mxnet").mkdir()
        (first / "mxnet" / "__init__.py").write_text(failing)
    message = import_error(f"import sys; sys.path.insert(0, {str(first)!r}); import gluon_amp",
                           machine, "-S")
    assert "libcudart.so.11.0" in message
    assert "mxnet-cu117" not in message


def test_leftovers_of_broken_install_are_ignored(machine):
    machine.joinpath("~xnet-1.9.1.dist-info").mkdir()
    message = import_error("import gluon_amp", machine, "-S", "-W", "error")
    assert "gluon_amp needs MXNet 1.9.1" in message


def test_problem_of_the_visible_gpus_is_the_remedy(machine):
    install(machine, "mxnet-cu112", code="""
from types import SimpleNamespace
from gluon_amp.cuda import load
load.prepared = SimpleNamespace(problems=["no CUDA libraries serve T4: pip install this"])
raise OSError("libcudart.so.11.0: cannot open shared object file")""")
    assert on_machine(machine).endswith("no CUDA libraries serve T4: pip install this")


@pytest.mark.parametrize(("module", "package"), [("requests", "requests"),
                                                 ("distutils", "setuptools")])
def test_missing_dependency_of_mxnet_is_named(module, package):
    message = import_error(WITHOUT.format([module]) + "import gluon_amp")
    assert message == f"MXNet needs the package {package}: pip install {package}"


# ---- successful import------------------------------------------------------


TOOLS = ["matplotlib", "scipy", "tqdm", "sklearn", "onnx", "tensorboard"]  # no server has them
SERVER = """
import sys
import gluon_amp as amp, mxnet as mx
from mxnet import autograd, gluon, nd

def network():
    net = gluon.nn.HybridSequential(prefix="")
    net.add(gluon.nn.Dense(4, activation="relu", in_units=3), gluon.nn.Dense(2, in_units=4))
    net.initialize()
    return amp.convert(net), amp.Trainer(net.collect_params(), "sgd")

net, trainer = network()
data = nd.ones((8, 3))
with autograd.record():
    loss = net(data).mean()
trainer.backward(loss)
assert trainer.step(8)
net.save_parameters("net.params")
trainer.save_states("net.states")
net.export("net")
again, after = network()
again.load_parameters("net.params")
after.load_states("net.states")
served = gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0000.params")
assert (again(data) == net(data)).min().asscalar() == 1
assert abs(served(data) - net(data)).max().asscalar() < 1e-2
amp.xray(net, [(data, nd.zeros(8))], gluon.loss.SoftmaxCrossEntropyLoss()).save("xray")

def refused(use):
    try:
        use()
    except ImportError as error:
        print(error)

def build():
    import gluon_amp.cuda.build

def demo():
    from gluon_amp.tools.demo import demo
    demo()

open("log.csv", "w").write("epoch,fp16_top1_err\\n0,0.5\\n")
refused(lambda: amp.report(["log.csv"], "report"))
refused(lambda: amp.Monitor(net, trainer, "monitor.jsonl", tensorboard="events"))
refused(lambda: amp.export_onnx(amp.restore(net), "net.onnx", (1, 3)))
refused(demo)
refused(build)
"""


def test_a_server_needs_numpy_and_mxnet_alone(tmp_path):
    """Convert, train, save, load, predict and X-ray; errors of the rest name what to install."""
    said = output(f"import os; os.chdir({str(tmp_path)!r})\n" + WITHOUT.format(TOOLS) + SERVER)
    extras = ["tools", "tensorboard", "onnx", "demo", "cuda-build"]
    messages = said.splitlines()
    assert len(messages) == len(extras)
    for message, extra in zip(messages, extras):
        assert f"pip install '.[{extra}]' in a checkout of gluon_amp (No module named " in message


NAMES = "{name: id(value) for name, value in vars(numpy).items()}"


def test_numpy_is_not_modified():
    assert output(f"""
import numpy
import numpy.testing, numpy.random, scipy.stats, matplotlib.pyplot  # submodules become names
before = {NAMES}
import gluon_amp, mxnet.test_utils, mxnet.gluon.contrib.estimator
after = {NAMES}
print({{name for name in {{*before, *after}} if before.get(name) != after.get(name)}})
""") == "set()"


def test_mxnet_has_names_removed_from_numpy():
    assert output("""
import gluon_amp
import mxnet as mx
from mxnet.gluon.contrib.estimator import CheckpointHandler  # reads np.Inf
from mxnet.test_utils import default_rtols                 # reads np.bool
assert mx.np.bool is bool
assert len(default_rtols()) == 10
x = mx.np.arange(6).reshape(2, 3)
print(mx.nd.moveaxis(mx.nd.zeros((3, 4, 5)), 0, 1).shape,      # np.core
      mx.np.pad(x, ((1, 1), (1, 1)), mode="constant").shape,   # np.compat
      mx.np.alltrue(x), mx.np.trapz(x).tolist(), mx.np.in1d(x, x).sum(), mx.np.msort(x).shape)
""") == "(4, 3, 5) (4, 5) False [2.0, 8.0] 6 (2, 3)"


def test_functions_of_mxnet_import_no_numpy_with_removed_names():
    """They get numpy itself if they import it when they are called."""
    names = set()
    for path in Path(mx.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"(?m)^ +from numpy", text)
        for alias in re.findall(r"(?m)^ +import numpy as (\w+)$", text):
            names.update(re.findall(rf"\b{alias}\.(\w+)", text.partition(f"as {alias}\n")[2]))
    assert "float16" in names
    assert {name for name in names if not hasattr(np, name)} == set()


def test_numpy_integers_in_shapes_are_accepted():
    """The repr of numpy 2 is np.int64(2)."""
    assert output("""
import gluon_amp
import mxnet as mx, numpy as np
two, three = np.array([2, 3])
x = mx.sym.var("x", shape=(two, three))
y = mx.sym.reshape(x, shape=(three, two))
print(mx.nd.zeros((two, three)).shape, mx.nd.ones((4, 3)).reshape((two, -1)).shape,
      mx.nd.ones((2, 3))[np.int32(1):].shape, y.infer_shape()[1], x.attr("__shape__"),
      y.optimize_for("MKLDNN").name == y.name)
""") == "(2, 3) (2, 6) (1, 3) [(3, 2)] (2, 3) True"


def test_records_with_many_labels_are_packed():
    """MXNet calls `tostring`, which numpy 2.3 removed."""
    assert output("""
import gluon_amp
import mxnet as mx
header = mx.recordio.IRHeader(0, [1, 2.5], 7, 0)
print(*mx.recordio.unpack(mx.recordio.pack(header, b"data")))
""") == "HEADER(flag=2, label=array([1. , 2.5], dtype=float32), id=7, id2=0) b'data'"


def test_metrics_accumulate_in_float64():
    assert output("""
import gluon_amp
import mxnet as mx
metric = mx.metric.Loss()
for loss in (2 ** 24, 1, 1, 1):
    metric.update(None, mx.nd.array([loss]))
print(metric.sum_metric - 2 ** 24, metric.get_global()[1] * 4 - 2 ** 24)
metric.reset()
print(metric.get())
""") == "3.0 3.0\n('loss', nan)"


def test_replaced_functions_of_mxnet_keep_names_and_docstrings():
    import mxnet as mx
    expected = {mx.nd.NDArray: ["asnumpy", "astype", "copyto", "_sync_copyfrom"],
                mx.gluon.SymbolBlock: ["cast"], mx.gluon.Parameter: ["_load_init"],
                mx.autograd.Function: ["__call__"], mx.gluon.Block: ["load_parameters"],
                mx.gluon.Trainer: ["step", "update"]}
    for owner, names in expected.items():
        for name in names:
            function = getattr(owner, name)
            assert (function.__name__, function.__qualname__) == (
                name, f"{owner.__name__}.{name}")
            assert function.__module__.startswith("mxnet.")
    assert mx.nd.NDArray.asnumpy.__doc__.startswith("Returns a ``numpy.ndarray`` object")
    assert "copy" in inspect.signature(mx.nd.NDArray.astype).parameters
    assert mx.nd.save.__doc__.startswith("Saves a list")


def test_no_function_hides_a_module():
    hidden = output("""
import importlib, pkgutil, sys
import gluon_amp
for info in pkgutil.walk_packages(gluon_amp.__path__, "gluon_amp."):
    file = info.module_finder.find_spec(info.name).origin
    if not file.endswith((".so", "__main__.py")):
        importlib.import_module(info.name)
for name, module in sorted(sys.modules.items()):
    package, _, last = name.rpartition(".")
    if package.startswith("gluon_amp") and getattr(sys.modules[package], last) is not module:
        print(name)
""")
    assert hidden == ""
    assert gluon_amp.reports.read_logs.__name__ == "read_logs"


def test_functions_removed_from_numpy_name_their_package():
    assert "numpy-financial" in error("RuntimeError", "import gluon_amp, mxnet as mx; "
                                      "mx.np.npv(0.1, [1, 2])")


@pytest.mark.thorough
def test_only_packages_of_mxnet_ecosystem_get_removed_numpy_names(tmp_path):
    code = """
import numpy as np
import numpy.random as rnd
from numpy import float as his_float
assert rnd.rand and np.linalg.norm and np.Inf > 1e300
def late():
    import numpy
    return numpy.array(numpy.array([True], dtype=np.bool), dtype=np.int, copy=False)
"""
    for name in ("gluoncv", "gluoncv2", "of_today"):
        tmp_path.joinpath(name).mkdir()
        tmp_path.joinpath(name, "__init__.py").write_text(code)
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport gluon_amp\n"
    for name in ("gluoncv", "gluoncv2"):
        assert output(f"{path}import {name} as one; print(one.late(), one.his_float is float)") \
            == "[1] True"
    assert "float" in error("ImportError", f"{path}import of_today")


def test_import_works_after_failed_import_of_mxnet():
    assert output("""
import numpy
try:
    import mxnet
except AttributeError as error:
    print(error)
import gluon_amp
import mxnet as mx
print(mx.nd.ones(3).sum().asscalar())
""").endswith("3.0")


def test_import_emits_no_warnings():
    assert output("import warnings\n"
                  "warnings.filterwarnings('ignore', module=r'(.*/)?mxnet\\b')\n"
                  "import gluon_amp; print('quiet')", PACKAGE.parent, "-W", "error") == "quiet"


@pytest.mark.parametrize(("users", "then"), [({}, "1"), ({"MXNET_SAFE_ACCUMULATION": "0"}, "0")])
def test_safe_accumulation_is_default_and_can_be_disabled(users, then):
    assert output("import gluon_amp, os; print(os.environ['MXNET_SAFE_ACCUMULATION'])",
                  **users) == then


# ---- the kernels -----------------------------------------------------------


def test_unknown_instruction_set_lists_valid_ones():
    message = error("KernelError", NET, GLUON_AMP_ISA="nonsense")
    assert message.startswith("GLUON_AMP_ISA must be one of ")
    assert "portable on this processor" in message
    assert message.endswith("Received: 'nonsense'")


@pytest.mark.parametrize(("flags", "best"), [
    ("", "portable"), ("AVX512F AVX512BW AVX512VL AVX512DQ AVX2 F16C FMA3", "avx512")])
def test_best_instruction_set_is_chosen_unless_overridden(flags, best, monkeypatch):
    monkeypatch.delenv("GLUON_AMP_ISA", raising=False)
    monkeypatch.setattr(library, "__cpu_features__", dict.fromkeys(flags.split(), True))
    assert library.choose() == best
    monkeypatch.setenv("GLUON_AMP_ISA", "portable")
    assert library.choose() == "portable"
    monkeypatch.setenv("GLUON_AMP_ISA", "avx2")
    if best == "portable":
        with pytest.raises(library.KernelError, match=r"must be one of portable on .*'avx2'"):
            library.choose()


@pytest.mark.parametrize(("content", "said"), [
    (None, "CPU kernels are missing"),
    ("a text, and no library\n" * 100, "CPU kernels do not load: .*invalid ELF header")])
def test_missing_kernels_are_reported_with_build_command(content, said, tmp_path, monkeypatch):
    monkeypatch.delenv("GLUON_AMP_ENGINE", raising=False)  # of make coverage and make sanitize
    shutil.copytree(PACKAGE, tmp_path / "gluon_amp",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if content:
        (tmp_path / "gluon_amp" / "cpu" / library.PATH.name).write_text(content)
    message = error("KernelError", NET, tmp_path)
    assert re.search(said, message), message
    assert f"{tmp_path}{os.sep}gluon_amp" in message
    assert "in a checkout of gluon_amp, with a C++ compiler" in message
    assert "pip install --force-reinstall --no-deps . (make -B setup" in message


def test_workers_of_a_data_loader_are_forked_where_forkserver_is_the_default():
    said = output("""
import multiprocessing
multiprocessing.set_start_method("forkserver")  # the default since Python 3.14
import gluon_amp
from mxnet import gluon
class Squares(gluon.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return float(i * i)
print([batch.asnumpy().tolist()
       for batch in gluon.data.DataLoader(Squares(), 2, num_workers=1, timeout=60)])
print(multiprocessing.get_start_method())
""")
    assert said == "[[0.0, 1.0], [4.0, 9.0]]\nforkserver"
