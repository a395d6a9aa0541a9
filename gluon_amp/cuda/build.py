"""Builds packs: MXNet's kernels for GPUs that its wheel has no code for.

Each source file is compiled to PTX once, and the PTX to machine code for each architecture. Most
kernels are in several files, as instances of the same templates; a pack has each once, in the first
file of the wheel that has it. Finished parts remain in a folder, under a digest of their inputs, so
an interrupted build continues.
"""
import contextlib
import fcntl
import gzip
import hashlib
import lzma
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Sequence, Set

from .. import files
from ..checks import imports_of
from . import elf, fatbin, pack, ptx, sources
from .comparison import Differs, Source, compare, libmxnet, read
from .toolkit import HERE, Toolkit, find
from .wheel import cache

with imports_of("cuda-build", "gluon-amp cuda build"):
    from tqdm import tqdm

ARCHITECTURES = ("90", "100", "120", "ptx")
LICENCES = (*(f"{each.name}: {each.licence}" for each in sources.REPOSITORIES),
            "headers of CUDA 11.8: NVIDIA CUDA Toolkit EULA")
# The lowest architecture without code in the wheel; code for it also serves later ones as PTX.
VIRTUAL = 90
# PTX of nvcc 13 for it needs nothing of later versions; drivers from 520 on accept 7.8.
PTX_VERSION = "7.8"
_EDITS = 1  # to raise if ptx.py edits differently: parts of before become invalid
_FLAGS = ["-std=c++14", "-O3", "-w", "--expt-relaxed-constexpr", "-allow-unsupported-compiler",
          f"-arch=compute_{VIRTUAL}", "-ptx", *(f"-D{macro}" for macro in (
              # as in the wheel, as far as kernels depend on it
              "DMLC_MODERN_THREAD_LOCAL=0", "DMLC_LOG_STACK_TRACE_SIZE=0",
              "DMLC_LOG_FATAL_THROW=1", "DMLC_USE_CXX11=1", "DMLC_USE_CXX14=1",
              "MSHADOW_IN_CXX11", "NDEBUG=1", "MXNET_USE_CUDA=1", "MSHADOW_USE_CUDA=1",
              "MSHADOW_FORCE_STREAM", "MSHADOW_USE_CUDNN=1", "USE_CUDNN", "MXNET_USE_CUDNN=1",
              "MXNET_USE_NCCL=0", "MXNET_ENABLE_CUDA_RTC=1", "MXNET_USE_NVTX=0",
              "MSHADOW_USE_CBLAS=1", "MSHADOW_USE_MKL=0", "MSHADOW_USE_SSE=0",
              "MSHADOW_USE_F16C=0", "MSHADOW_INT64_TENSOR_SIZE=0", "MXNET_USE_BLAS_OPEN=1",
              "MXNET_USE_OPENMP=0", "MXNET_USE_LAPACK=1", "MXNET_USE_OPENCV=0",
              "MXNET_USE_OPERATOR_TUNING=1", "MXNET_USE_MKLDNN=0",
              "MXNET_USE_SIGNAL_HANDLER=1", "CUB_IGNORE_DEPRECATED_CPP_DIALECT",
              "THRUST_IGNORE_DEPRECATED_CPP_DIALECT"))]


class Memory:
    """Lends megabytes to jobs, which wait until they are free. One job runs in any case."""

    def __init__(self, megabytes: int) -> None:
        self.total = self.free = megabytes
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def lend(self, megabytes: int) -> Iterator[None]:
        with self.changed:
            self.changed.wait_for(lambda: self.free >= megabytes or self.free == self.total)
            self.free -= megabytes
        try:
            yield
        finally:
            with self.changed:
                self.free += megabytes
                self.changed.notify_all()


def available_megabytes() -> int:
    """Returns how much memory this process and its children can still use."""
    kilobytes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        kilobytes[name] = int(value.split()[0])
    free = kilobytes["MemAvailable"] * 1024
    with contextlib.suppress(OSError, ValueError):  # "max", or no control group
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free >> 20


class Builder:
    """Compiles sources to parts of packs, in a folder."""

    def __init__(self, folder: Path, toolkit: Toolkit, tree: Path, inputs: str) -> None:
        self.folder, self.toolkit, self.tree = folder, toolkit, tree
        self.inputs = inputs
        self.tools = _private_tools(folder / "tools", toolkit)
        self.running: Set[subprocess.Popen] = set()  # type: ignore[type-arg]  # Python 3.8
        self.stopped = False
        self.starting = threading.Lock()

    def part(self, source: Source, architecture: str) -> Path:
        """Returns the file of a source's part of a pack; it exists if it is finished."""
        key = _key(self.inputs, source.name, self.compilers(architecture))
        return self.folder / architecture / f"{source.index:03d}-{key}.fatbin"

    def compilers(self, architecture: str) -> str:
        """Returns the names and versions of the compilers for an architecture."""
        nvcc = f"nvcc {self.toolkit.nvcc.version}"
        if architecture == "ptx":
            return nvcc
        return f"{nvcc}, ptxas {self.toolkit.assembler(int(architecture)).version}"

    def compile(self, source: Source, architectures: Sequence[str]) -> None:
        """Makes the parts of a source that are missing."""
        for architecture in architectures:
            part = self.part(source, architecture)
            if part.exists():
                continue
            text = self._ptx(source)
            if architecture == "ptx":
                code = ptx.with_version(text, PTX_VERSION).encode() + b"\0"
                entry = fatbin.entry(code, VIRTUAL, "ptx")
            else:
                code = self._assemble(source, text, int(architecture))
                entry = fatbin.entry(code, int(architecture))
            _keep(part, fatbin.fat_binary([entry]))

    def _ptx(self, source: Source) -> str:
        """Returns the PTX of a source's first kernels, named as in the wheel."""
        kept = self.folder / "compiled" / f"{source.index:03d}-{_key(self.inputs, source.name)}.gz"
        if kept.exists():
            with contextlib.suppress(OSError, EOFError, zlib.error):  # damaged: compiled again
                return gzip.decompress(kept.read_bytes()).decode()
        with self._scratch() as scratch:
            compiled = Path(scratch, "kernels.ptx")
            include = [self.tree / path for path in sources.INCLUDE]
            self._run([self.tools / "bin" / "nvcc", *_FLAGS,
                       *(f"-I{path}" for path in (*include, *self.toolkit.headers, HERE)),
                       "-o", compiled, self.tree / source.name], source, scratch)
            text = compiled.read_text()
        module = ptx.parse(ptx.rename_namespace(text, source.kernels))
        compare(source, {item.name: ptx.parameters(item) for item in module.items
                         if item.is_kernel}, list(source.kernels), "the PTX")
        text = str(ptx.limit_registers(ptx.select(module, source.first), source.limits))
        _keep(kept, gzip.compress(text.encode(), 6))
        return text

    def _assemble(self, source: Source, text: str, architecture: int) -> bytes:
        """Returns machine code."""
        ptxas = self.toolkit.assembler(architecture)
        if ptxas == self.toolkit.old_ptxas:
            text = ptx.with_version(text, PTX_VERSION)
        with self._scratch() as scratch:
            source_file, object_file = Path(scratch, "kernels.ptx"), Path(scratch, "kernels.cubin")
            source_file.write_text(text)
            self._run([ptxas.path, "-w", "-m64", f"-arch=sm_{architecture}", source_file, "-o",
                       object_file], source, scratch)
            code = object_file.read_bytes()
        ours, what = elf.kernels(code, str(object_file)), f"the machine code for {architecture}"
        compare(source, {name: each.parameters for name, each in ours.items()}, source.first, what)
        for item in ptx.parse(text).items:
            if not item.is_kernel or item.has_launch_bounds:
                continue
            most = source.kernels[item.name].most_registers
            if ours[item.name].registers > most:
                raise Differs(f"{what} of {source.name} permits smaller blocks than the wheel's: "
                              f"{item.name} takes {ours[item.name].registers} registers, of {most}")
        return code

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="writing-") as scratch:
            yield scratch

    def _run(self, command: Sequence[object], source: Source, scratch: str) -> None:
        """Runs a compiler; raises OSError with its first error if it fails."""
        log = Path(scratch, "log")
        with self.starting, open(log, "wb") as file:
            if self.stopped:
                raise OSError("the build was stopped")
            process = subprocess.Popen([str(word) for word in command], stdout=file, stderr=file,
                                       stdin=subprocess.DEVNULL, start_new_session=True,
                                       env={**os.environ, "TMPDIR": scratch})
            self.running.add(process)
        code = process.wait()
        self.running.discard(process)
        if code == 0:
            return
        if self.stopped:
            raise OSError("the build was stopped")
        lines = log.read_text(errors="replace").splitlines()
        why = next((line for line in lines if "error" in line or "fatal" in line),
                   lines[-1] if lines else "")
        if code == -9 or "Killed" in why or "signal 9" in why:
            why = "it was killed, probably for lack of memory. Pass fewer jobs: -j 1"
        raise OSError(f"{Path(str(command[0])).name} fails for {source.name}: "
                      f"{why or f'exit code {code}'}")

    def stop(self) -> None:
        """Ends the running compilers, with the programs that they run."""
        with self.starting:
            self.stopped = True
            for process in list(self.running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def _private_tools(folder: Path, toolkit: Toolkit) -> Path:
    """Returns a folder with an nvcc that searches no headers of its own, and does not assemble.

    `nvcc -ptx` assembles the PTX as a check, which takes as long as the rest.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").symlink_to(toolkit.nvcc.path)
    (folder / "bin" / "nvcc.profile").write_text(
        f"TOP = {toolkit.nvcc.path.parents[1]}\nCICC_PATH = $(TOP)/nvvm/bin\n"
        "NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice\nPATH += $(CICC_PATH):$(_HERE_):\n")
    (folder / "bin" / "ptxas").write_text("#!/bin/sh\n")
    (folder / "bin" / "ptxas").chmod(0o755)
    return folder


def _key(*inputs: str) -> str:
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def _keep(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace_bytes(str(path), content)


def build(architectures: Sequence[str], source: Optional[Path] = None, jobs: Optional[int] = None,
          output: Optional[Path] = None, report: Callable[[str], None] = print) -> List[Path]:
    """Builds packs and returns their files.

    Args:
        architectures: of `ARCHITECTURES`: "90" for capability 9.0; "ptx": for all from 9.0 on.
        source: a tree of MXNet's sources. Default: fetched by git.
        jobs: the number of compilers at a time. Default: one per processor.
        output: a folder for compressed packs. Default: the packs are installed.
        report: receives lines for the user.
    """
    unknown = [each for each in architectures if each not in ARCHITECTURES]
    if unknown or not architectures:
        raise ValueError(f"--arch must be of {', '.join(ARCHITECTURES)}. "
                         f"Received: {', '.join(unknown) or 'none'}")
    if output is not None and not (output.is_dir() and os.access(output, os.W_OK)):
        raise FileNotFoundError(f"--output must be a writable folder. Received: {output}")
    if source is not None:
        sources.check(source)
    toolkit = find()
    library = libmxnet()
    folder = cache() / "kernels-build"
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        for left in folder.glob("writing-*"):
            shutil.rmtree(left, ignore_errors=True)
        tree = source or sources.fetch(folder)
        report(f"kernels of {library}, sources in {tree}, nvcc {toolkit.nvcc.version}; parts in "
               f"{folder}")
        wheel = [source for source in read(library, sources.device_files(tree)) if source.first]
        builder = Builder(folder, toolkit, tree, _key(
            sources.digest(tree), sources.digest(*toolkit.headers, HERE), toolkit.nvcc.version,
            repr(_FLAGS), str(_EDITS), pack.LIBMXNET))
        _check_space(builder, wheel, architectures)
        _compile_all(builder, wheel, architectures, jobs or len(os.sched_getaffinity(0)))
        packs = []
        for each in architectures:
            packs.append(_pack(builder, wheel, each, output))
            report(f"{packs[-1]}: {sum(len(source.first) for source in wheel)} kernels, all of the "
                   "wheel, with its names and parameters")
        return packs


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a lock; raises if another build has it."""
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another build uses {folder}: wait for its end") from None
        yield


def _check_space(builder: Builder, wheel: List[Source], architectures: Sequence[str]) -> None:
    needed = 300 + 800 * len(architectures)  # megabytes: PTX; parts and a pack of each
    free = shutil.disk_usage(builder.folder).free // 10**6
    parts = (builder.part(source, each) for source in wheel for each in architectures)
    needed -= sum(part.stat().st_size for part in parts if part.exists()) // 10**6
    if free < needed:
        raise OSError(f"the build needs {needed} MB of disk space in {builder.folder}. Available: "
                      f"{free} MB. Free some, or set GLUON_AMP_CACHE")


def _compile_all(builder: Builder, wheel: List[Source], architectures: Sequence[str],
                 jobs: int) -> None:
    """Compiles all sources, the largest first, with a bar that shows the remaining time."""
    left = [source for source in wheel
            if not all(builder.part(source, each).exists() for each in architectures)]
    memory = Memory(available_megabytes())
    largest = max((source.megabytes for source in left), default=0)
    if largest > memory.total:
        raise OSError(f"compiling the largest file needs {largest} MB of memory. Available: "
                      f"{memory.total} MB")

    def compile_one(source: Source) -> Source:
        with memory.lend(source.megabytes):
            builder.compile(source, architectures)
        return source

    done = sum(map(_work, wheel)) - sum(map(_work, left))
    bar = tqdm(total=sum(map(_work, wheel)), initial=done, smoothing=0.05,
               bar_format="{percentage:3.0f}% |{bar}| {elapsed}, remaining {remaining}{postfix}")
    with bar, ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(compile_one, source)
                   for source in sorted(left, key=_work, reverse=True)}
        try:
            for number, job in enumerate(as_completed(waiting), 1 + len(wheel) - len(left)):
                source = job.result()
                bar.set_postfix_str(f"{number} of {len(wheel)} files", refresh=False)
                bar.update(_work(source))
        except BaseException:
            for job in waiting:
                job.cancel()
            builder.stop()
            raise


def _work(source: Source) -> int:
    """The time that a source takes, in that of one kernel."""
    return 90 + len(source.kernels)


def _pack(builder: Builder, wheel: List[Source], architecture: str,
          output: Optional[Path]) -> Path:
    """Writes the pack of an architecture; returns its file."""
    arch, kind = (VIRTUAL, "ptx") if architecture == "ptx" else (int(architecture), "cubin")
    codes = [pack.Code(source.name, source.index, builder.part(source, architecture), source.first)
             for source in wheel]

    def write(path: Path) -> None:
        pack.write(path, arch, codes, libmxnet=pack.LIBMXNET, licences=LICENCES, kind=kind,
                   compiler=builder.compilers(architecture))

    if output is None:
        target = pack.place(arch, kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        write(target)
        return target
    name = f"mxnet-cu112-1.9.1-{'ptx' if kind == 'ptx' else f'sm_{arch}'}.pack"
    with tempfile.TemporaryDirectory(dir=builder.folder, prefix="writing-") as scratch:
        write(Path(scratch, name))
        _compress(Path(scratch, name), output / f"{name}.xz")
    return output / f"{name}.xz"


def _compress(source: Path, target: Path) -> None:
    def write(beside: str) -> None:
        with open(source, "rb") as file, lzma.open(beside, "wb", preset=9) as compressed:
            shutil.copyfileobj(file, compressed, 1 << 20)

    files.replace_file(str(target), write)
