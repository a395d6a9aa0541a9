"""The engine with other settings, processors and builds of MXNet."""
import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import processes
import pytest
from gluon_amp.cpu import library
from mxnet_alone import MXNET_ALONE

pytestmark = [pytest.mark.long, pytest.mark.isa]

PACKAGE = Path(amp.__file__).parent
START = """
import sys
import gluon_amp as amp
import numpy as np
from mxnet import autograd, gluon, nd
import mxnet as mx
mx.random.seed(1)
np.random.seed(1)
"""
PREDICT = START + """
net = gluon.nn.HybridSequential()
for _ in range(8):
    net.add(gluon.nn.Conv2D(16, 3, padding=1, activation="relu"))
for _ in range(3):
    net.add(gluon.nn.Conv2DTranspose(16, 3, padding=1), gluon.nn.Dense(16 * 144),
            gluon.nn.HybridLambda(lambda F, x: x.reshape((0, 16, 12, 12))))
net.initialize(mx.init.Xavier())
amp.convert(net)
x = nd.array(np.random.standard_normal((2, 16, 12, 12)))
first = net(x).asnumpy()
assert first.any()
for _ in range(1000):
    assert np.array_equal(net(x).asnumpy(), first)
print("the same")
"""
TRAIN = """
def main():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(16, 3, padding=1), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"),
            gluon.nn.Conv2D(16, 3), gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(2))
    net.initialize(mx.init.Xavier())
    images = np.random.standard_normal((64, 3, 8, 8)).astype("float32")
    wide = net(nd.array(images)).asnumpy()
    amp.convert(net)
    assert np.allclose(net(nd.array(images)).asnumpy(), wide, rtol=1e-2, atol=1e-3)
    labels = (images.mean((1, 2, 3)) > 0).astype("float32")
    images += 0.5 * labels[:, None, None, None]
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(images, labels), 16)
    trainer = amp.Trainer(net.collect_params(), amp.optimizer("sgd", learning_rate=0.1,
                                                              momentum=0.9))
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    totals = []
    for epoch in range(8):
        total = 0
        for x, y in data:
            x, y = x.as_in_context(mx.cpu()), y.as_in_context(mx.cpu())
            with autograd.record():
                batch = loss(net(x), y)
            trainer.backward(batch)
            trainer.step(16)
            total += batch.mean().asscalar()
        totals.append(total / 4)
    assert totals[-1] < 0.8 * totals[0], totals
    print(totals[-1])
main()
"""
ADD = START + """
import os
import threading

def threads():
    return set(os.listdir("/proc/self/task"))

def watch():
    while not done.is_set():
        seen.update(threads())

seen, done = set(), threading.Event()
x, y = nd.ones((1, 4000000), dtype="float16"), nd.ones((1, 4000000), dtype="float16")
net = amp.convert(gluon.nn.HybridLambda(lambda F, x, y: F.broadcast_add(x, y)))
net.hybridize()
net(x, y).wait_to_read()
sampler = threading.Thread(target=watch)
sampler.start()
known = threads()
for _ in range(20):
    net(x, y).wait_to_read()
done.set()
sampler.join()
assert seen <= known, seen - known
print("none")
"""

PAGES = START + """
import resource

def step():
    with autograd.record():
        y = net(x)
    y.backward()
    nd.waitall()

net = gluon.nn.HybridSequential()
for channels in (32, 64, 128, 256):
    net.add(gluon.nn.Conv2D(channels, 3, strides=2, padding=1))
net.initialize()
amp.convert(net).hybridize(static_alloc=True)
x = nd.ones((8, 3, 192, 192))
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""

ERRNO = """
import ctypes, errno
import gluon_amp
import mxnet as mx
location = ctypes.CDLL(None).__errno_location
location.restype = ctypes.POINTER(ctypes.c_int)
x = mx.nd.ones(2, dtype="float16")
location()[0] = errno.ERANGE
print((x * 7e4).asnumpy())
"""

FORK = """
import os, signal
import gluon_amp
import mxnet as mx
x = mx.nd.ones(2 ** 18, dtype="float16")
(x + 1).wait_to_read()
child = os.fork()
signal.alarm(60)
if child == 0:
    print((x + 1)[-1].asscalar(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def python(code, folder=PACKAGE.parent, **variables):
    """The output of the code, run in a new process."""
    hidden = ("GLUON_AMP_ISA", "MXNET_ENGINE_TYPE", "DNNL_MAX_CPU_ISA", "PYTHONWARNINGS")
    env = {name: value for name, value in processes.environment().items() if name not in hidden}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=folder, text=True,
                          env={**env, **variables}, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- settings of MXNet and oneDNN --------------------------------------------------------


@pytest.mark.thorough
def test_repeated_predictions_with_four_workers():
    """MXNet reorders weights on its workers, while their old memory is reused."""
    assert "the same" in python(PREDICT, MXNET_CPU_WORKER_NTHREADS="4")


SETTINGS = {
    "an engine without threads": {"MXNET_ENGINE_TYPE": "NaiveEngine"},
    "an MXNet without oneDNN": {"MXNET_MKLDNN_ENABLED": "0"},
    "a processor with AVX2": {"DNNL_MAX_CPU_ISA": "AVX2", "GLUON_AMP_ISA": "avx2"},
    "an old processor": {"DNNL_MAX_CPU_ISA": "SSE41", "GLUON_AMP_ISA": "portable"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_network_learns_with(name):
    features = [library.__cpu_features__.get(f) for f in library.VARIANTS["avx2"]]
    if "AVX2" in name and not all(features):
        pytest.skip("this processor has no AVX2")
    python(START + TRAIN, **SETTINGS[name])


def test_fork_of_an_engine_without_threads_computes():
    """OpenMP's threads of the parent do not exist in the fork."""
    assert python(FORK, MXNET_ENGINE_TYPE="NaiveEngine", OMP_NUM_THREADS="2") == "2.0\n"


def test_constant_overflows_to_infinity_after_erange():
    """MXNet's parser does not clear errno, and refuses "inf" if it is ERANGE."""
    assert python(ERRNO, MXNET_ENGINE_TYPE="NaiveEngine") == "[inf inf]\n"


def test_operator_starts_no_threads():
    """OpenMP has waiting threads; new ones would wait milliseconds for a core in every call."""
    assert python(ADD, OMP_NUM_THREADS="2") == "none\n"


def test_step_reuses_memory_of_previous_step():
    """The kernel clears new pages one by one, which costs more than the computation."""
    assert float(python(PAGES, OMP_NUM_THREADS="2")) < 100


# ---- exported symbols --------------------------------------------------------------------


def test_library_exports_one_symbol():
    """Other symbols could collide with MXNet's."""
    if not shutil.which("nm"):
        pytest.skip("nm is not installed (binutils)")
    shown = subprocess.run(["nm", "-D", "--defined-only", str(library.PATH)], text=True,
                           capture_output=True, check=True).stdout.split()
    assert shown[1:] == ["T", "gluon_amp_functions"]


# ---- another MXNet -------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "compiler"), [
    ("1.9.1", b"GCC: (GNU) 9.4.0"), ("1.9.0", b"GCC: (GNU) 4.8.5 20150623"),
    ("2.0.0", b"clang version 14"), ("1.9.1", b"")])
def test_other_mxnet_is_refused_in_one_sentence(version, compiler):
    with pytest.raises(library.KernelError) as error:
        library.check_mxnet(version, compiler)
    assert str(error.value).startswith("float16 on a CPU needs the wheel mxnet 1.9.1")
    assert f"Received: MXNet {version}" in str(error.value)
    assert ("compiled by no name" in str(error.value)) == (not compiler)
    assert not {"\n", "\0"} & {*str(error.value)}


def test_installed_mxnet_is_accepted():
    names = library.compiler_of(Path(mx.base._LIB._name))
    assert library.COMPILER in names
    library.check_mxnet(mx.__version__, names)


def elf(more=b"", machine=62):
    """The header of a 64-bit ELF library, and data behind it."""
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<H", header, 18, machine)
    return bytes(header) + more


@pytest.mark.parametrize(("content", "said"), [
    *((content, "is not a 64-bit ELF library") for content in (
        b"", b"\x7fELF", b"MZ" + b"\0" * 100, b"\x7fELF\x01" + b"\0" * 100, b"GCC: (GNU) 4.8.5")),
    (elf(machine=183), "needs MXNet's wheel for x86-64. Received: .*libmxnet.so, for aarch64$")])
def test_file_of_another_kind_is_refused(content, said, tmp_path):
    path = tmp_path / "libmxnet.so"
    path.write_bytes(content)
    with pytest.raises(library.KernelError, match=said):
        library.compiler_of(path)


@pytest.mark.parametrize(("content", "name"), [
    (elf(b"\0GCC: (Debian) 12.2\0.shstrtab\0"), b"GCC: (Debian) 12.2"),
    (elf()[:40], b""), (elf(), b"")], ids=["ends with a zero byte", "truncated header", "no name"])
def test_name_of_compiler(content, name, tmp_path):
    path = tmp_path / "libmxnet.so"
    path.write_bytes(content)
    assert library.compiler_of(path) == name


def test_library_of_another_version_is_refused():
    """In a checkout whose Python files are newer than the compiled library."""
    with pytest.raises(library.KernelError, match=r"are of another version.* or build them in a"):
        library.table().a_new_function()


def test_unrelated_library_is_refused(monkeypatch):
    monkeypatch.setattr(library, "PATH", Path(mx.base._LIB._name))
    with pytest.raises(library.KernelError, match=r"kernels are not in .*libmxnet"):
        library.table.__wrapped__()


class Memory:
    """A buffer that can hold addresses of other buffers."""

    def __init__(self, size=4096):
        self.bytes = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.bytes)

    def put(self, at, *numbers, kind=ctypes.c_int64):
        for i, number in enumerate(numbers):
            kind.from_buffer(self.bytes, at + i * ctypes.sizeof(kind)).value = number
        return self


def fits(name, memory, *arguments):
    """Calls one of the library's checks of memory, with addresses or numbers."""
    address = ctypes.cast(getattr(library.table(), name), ctypes.c_void_p).value
    check = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int64] * len(arguments))
    return bool(check(address)(memory.address, *arguments))


NODE = 0x123456  # the only input of an operator


def test_inputs_of_node_are_found_at_one_offset_only():
    entry = Memory().put(0, NODE)  # of a list of inputs: a node, and the index of its output
    begin = entry.address

    def found(at, *words, node=NODE):
        return fits("inputs_fit", Memory().put(at, *words), node)

    sizes = [(at, size) for at in range(0, 256, 8) for size in range(8, 129, 8)
             if found(at, begin, begin + size, begin + size)]
    assert len(sizes) == 1
    (at, size), = sizes
    assert not found(at, begin, begin + size, begin + size, node=NODE + 8)
    for words in ((0, 0, 0), (begin, begin, begin), (begin, begin + 2 * size, begin + 2 * size),
                  (begin, begin + size, begin), (begin + 8, begin + 8 + size, begin + 8 + size),
                  (begin, begin + size, begin + size, begin),
                  (begin, begin + size, begin + size, 0, 0, 0, begin)):
        assert not found(at, *words), words


def test_attribute_map_must_have_size_of_operators():
    begin, each = 0x10000, 40  # a std::function of 32 bytes, and a number

    def found(*words, operators=700):
        return fits("map_fits", Memory().put(0, *words), operators)

    assert found(begin, begin + 700 * each, begin + 1024 * each)
    assert not found(begin, begin + 700 * each, begin + 1024 * each, operators=300)
    for words in ((0, 0, 0), (begin, begin, begin), (begin, begin - each, begin),
                  (begin, begin + 700 * each + 8, begin + 1024 * each),
                  (begin, begin + 700 * each, begin + each)):
        assert not found(*words), words


def test_array_description_is_found_at_offset_24():
    def found(at=24, dimensions=(2, 3, 5, 7), axes=4, kind=3):  # 3: floats
        memory = Memory().put(at, axes, kind=ctypes.c_int32).put(at + 8, *dimensions)
        return fits("description_fits", memory.put(at + 8 + 12 * 8, kind, kind=ctypes.c_int32))

    assert found()
    assert not any([found(at=16), found(at=32), found(dimensions=(2, 3, 5, 8)), found(axes=5),
                    found(kind=1), fits("description_fits", Memory())])


def test_dropout_state_is_found_by_its_members():
    def found(keep=0.75, mode=1, axes=(1, 2), at=8, passes=1):
        memory = Memory().put(0, keep, kind=ctypes.c_float).put(4, mode, kind=ctypes.c_int32)
        memory.put(at, len(axes), kind=ctypes.c_int32).put(at + 8, *axes)
        return fits("dropout_fits", memory.put(at + 48, passes, kind=ctypes.c_int8))

    assert found()
    assert not any([found(keep=0.25), found(mode=0), found(axes=(1, 3)), found(axes=(1,)),
                    found(at=16), found(passes=0), fits("dropout_fits", Memory())])


FLOAT32 = """
from gluon_amp.cpu import library
assert not any(name.startswith(library.PREFIX) for name in library._operator_names())
try:
    nd.dot(nd.ones((2, 2), dtype="float16"), nd.ones((2, 2), dtype="float16")).asnumpy()
    raise AssertionError("MXNet's own code refuses it")
except mx.MXNetError as error:
    assert "dot only supports" in str(error)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(3, in_units=4))
net.initialize()
net.hybridize()
x = nd.ones((2, 4))
before = net(x).asnumpy()
amp.convert(net)
try:
    net(x)
except amp.cpu.library.KernelError as error:
    print(error)
graph, types = net.mixed_graph(["float32"])  # what a GPU would run
assert any(node.op == "amp_cast" for node in graph.nodes())
amp.restore(net)
assert np.allclose(net(x).asnumpy(), before, rtol=1e-3, atol=1e-3)
"""


def test_other_mxnet_disables_only_float16_on_cpu():
    other = "import mxnet; mxnet.__version__ = '1.9.9'"
    said = python(MXNET_ALONE + other + START + FLOAT32)
    assert said.startswith("float16 on a CPU needs the wheel mxnet 1.9.1")
    assert "Received: MXNet 1.9.9, compiled by GCC: (GNU) 4.8.5" in said
    assert said.count("\n") == 1


@pytest.fixture
def not_started(monkeypatch):
    monkeypatch.setattr(library, "_table", None)
    monkeypatch.setattr(library, "_error", None)


@pytest.mark.parametrize("check", ["choose", "compiler_of", "check_mxnet", "table"])
def test_failed_check_is_reported_at_first_use(check, not_started, monkeypatch):
    def refuse(*_):
        raise library.KernelError("not this one")

    monkeypatch.setattr(library, check, refuse)
    library.start("")  # as in the import: raises nothing
    for _ in range(2):
        with pytest.raises(library.KernelError, match="not this one"):
            library.load()


def test_unfit_memory_layout_is_refused_in_one_sentence(not_started, monkeypatch):
    class Probed:
        def probe(self, *_):
            return b"operators have no code for CPUs"

        def start(self, *_):
            raise AssertionError("nothing may be registered")

    monkeypatch.setattr(library, "table", Probed)
    library.start("")
    with pytest.raises(library.KernelError) as error:
        library.load()
    assert str(error.value) == "this MXNet 1.9.1 is laid out differently from PyPI's wheels, so " \
        "float16 cannot run on a CPU: operators have no code for CPUs"
