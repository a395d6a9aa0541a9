"""Lets the n-th call of a function fail, for n = 1, 2, ...: make -C tests faults

    python tests/faults/run.py                          all stories and functions
    python tests/faults/run.py --most 5 "dense step"    at most five calls of each function
    python tests/faults/run.py --function mmap --verbose    where MXNet calls what ends the process
    python tests/software_gpu --compute python tests/faults/run.py    calls of CUDA's libraries

Each trial is a fork of this process, which has imported MXNet and computed nothing. It fails if

    the story does not end in ten seconds (`--limit`)
    an error does not name the cause
    a story without an error has other bits than an undisturbed one
    a file has neither the contents of before nor those of afterwards
    the process crashes, unless the code of MXNet or numpy has called the function
"""
import argparse
import ctypes
import faulthandler
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

ON_GPU = "RECORDING_GPU_COUNT" in os.environ
FUNCTIONS = ("cudaMalloc", "cudaMemcpy", "cudaLaunchKernel", "cudnn", "cublas", "nvrtc") \
    if ON_GPU else ("posix_memalign", "malloc", "write", "fsync", "rename", "mmap")  # as in fail.c
CAUSES = r"CUDA|cuda|CUDNN|cudnn|CUBLAS|cublas|NVRTC|nvrtc" if ON_GPU else \
    r"[Mm]emory|alloc|No space|Input/output error|MemoryError"
# MXNet's RNNs pass on oneDNN's "could not create a primitive", forward and backward
ONEDNN_IN_MXNET = \
    r"_ZN4dnnl9primitiveC1.*\n.*/libmxnet\.so\(_ZN5mxnet2op\d+(RnnPrimitive|GetRnnBwdPrim)"
HERE = Path(__file__).parent


def build(folder):
    """Compiles the library that lets calls fail, and returns its path."""
    library = f"{folder}/fail.so"
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", library,
                    HERE / "fail.c", "-ldl"], check=True)
    return library


def in_fork(function, folder, limit):
    """Runs a function in a fork for some seconds at most. Returns its result, what ended it early,
    and its stderr."""
    result, errors = Path(folder, "result"), Path(folder, "stderr")
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, limit)  # SIGALRM ends the process
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        faulthandler.enable(all_threads=False)  # before MXNet's handler
        result.write_bytes(pickle.dumps(function()))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    text = errors.read_text(errors="replace")
    if status:
        ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) \
            else f"exit status {os.WEXITSTATUS(status)}"
        ended = "hangs" if ended == "SIGALRM" else ended
        return None, ended, text
    return pickle.loads(result.read_bytes()), None, text


def library_alone(function, stack):
    """Returns the library that has made a call without the engine, "MXNet" or "numpy", whose ufuncs
    do not check for their buffers; also MXNet's oneDNN, which maps the code that it generates."""
    callers = [line for line in stack.splitlines() if "/fail.so" not in line]
    if callers and "_multiarray_umath" in callers[0]:
        return "numpy"
    return "MXNet" if "libmxnet.so" in stack and (
        "_engine.so" not in stack or function == "mmap" and "libmxnet.so" in callers[0]) else None


class Faults:
    """The trials of a story.

    Args:
        name: the story's name.
        folder: an empty folder.
        limit: the seconds in which a trial must end.
    """

    def __init__(self, name, folder, limit):
        from stories import READERS, STORIES
        self.name, self.story, self.reader = name, STORIES[name], READERS.get(name)
        self.folder, self.limit = folder, limit
        self.expected, self.wholes = None, []

    def arm(self, function, n, stack):
        """Counts the calls of a function from now on, and lets call n fail. Returns the number of
        calls before."""
        if ON_GPU:
            return ctypes.CDLL("libcudart.so.11.0").recording_gpu_fail(function.encode(),
                                                                       ctypes.c_longlong(n), stack)
        library = ctypes.CDLL(None)
        calls = library.fault_disarm()
        if function:
            library.fault_arm(FUNCTIONS.index(function) + 1, ctypes.c_long(n), stack)
        return calls

    def trial(self, function, n):
        """Runs the story with a failure of call n; 0: of none. Returns its result or error, its
        number of calls, and the stack of the call."""
        files = Path(self.folder, "files")
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()

        def run():
            stack = os.open(f"{self.folder}/stack", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            result, error, calls = None, None, 0

            @contextmanager
            def failing():
                nonlocal calls
                self.arm(function, n, stack)
                try:
                    yield
                finally:
                    calls = self.arm("", 0, stack)

            try:
                result = self.story(str(files), failing)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            return result, error, calls
        return in_fork(run, self.folder, self.limit)

    def read(self):
        return in_fork(lambda: self.reader(f"{self.folder}/files"), self.folder, self.limit)

    def undisturbed(self):
        """Runs the story and its reader without a failure; with one in the first call that
        must succeed, the files are those of before."""
        outcome, ended, text = self.trial(FUNCTIONS[0], 0)
        if ended or outcome[1]:
            raise RuntimeError(f"{self.name}: {ended or outcome[1]}\n{text}")
        self.expected = outcome[0]
        if self.reader:
            after, _, text = self.read()
            self.trial("cudaMemcpy" if ON_GPU else "posix_memalign", 1)
            before, _, text = self.read()
            self.wholes = [before, after]
            if None in self.wholes:
                raise RuntimeError(f"{self.name}: {text}")

    def fault(self, function, n):
        """Lets call n fail. Returns (what happened, whether it is a defect, details)."""
        outcome, ended, text = self.trial(function, n)
        stack = Path(self.folder, "stack").read_text(errors="replace")
        if ended:
            library = ended != "hangs" and library_alone(function, stack)
            return (f"{ended} in {library}", False, stack) if library \
                else (ended, True, f"{text[:2000]}\n{stack}")
        result, error, _ = outcome
        if error and not re.search(CAUSES, error) and not re.search(ONEDNN_IN_MXNET, stack):
            return "error without the cause", True, f"{error}\n{stack}"
        if not error and result != self.expected:
            return "other bits", True, stack
        if self.reader:
            files, ended, text = self.read()
            if files is None:
                return f"files: {ended}", True, f"{error}\n{text[-2000:]}\n{stack}"
            if any(part not in parts for part, parts in zip(files, zip(*self.wholes))):
                return "other files", True, f"{error}\n{stack}"
        return "error" if error else "no effect", False, error


def run(names, functions, most, limit, verbose):
    """Runs stories; prints a row for each function, and the defects. Returns their number."""
    defects = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            faults = Faults(name, folder, limit)
            faults.undisturbed()
            for function in functions:
                (_, _, calls), _, _ = faults.trial(function, 0)
                numbers = range(1, calls + 1)
                if most and calls > most:
                    numbers = [numbers[i * calls // most] for i in range(most)]
                counts = Counter()
                for n in numbers:
                    happened, is_defect, details = faults.fault(function, n)
                    counts[happened] += 1
                    defects += is_defect
                    if is_defect or verbose:
                        print(f"{name}: {function} {n} of {calls}: {happened}\n{details}\n",
                              flush=True)
                if numbers:
                    print(f"{name}: {function}: {calls} calls, {len(numbers)} failed: " + ", ".join(
                        f"{count} {happened}" for happened, count in counts.items()), flush=True)
    return defects


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="stories; all by default")
    parser.add_argument("--function", choices=FUNCTIONS, help="all by default")
    parser.add_argument("--most", type=int, help="calls of each function that fail, evenly spaced; "
                        "all by default")
    parser.add_argument("--limit", type=float, default=10, help="seconds for each trial")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    if not ON_GPU and "GLUON_AMP_FAULTS" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "LD_PRELOAD": build(folder), "GLUON_AMP_FAULTS": "1",
                           "OMP_NUM_THREADS": "2"}
            sys.exit(subprocess.run([sys.executable, "-W", "ignore", *sys.argv],
                                    env=environment).returncode)
    sys.path.insert(0, str(HERE))
    from stories import ON_CPU, STORIES
    names = args.names or [name for name in STORIES if not (ON_GPU and name in ON_CPU)]
    functions = [args.function] if args.function else FUNCTIONS
    sys.exit(bool(run(names, functions, args.most, args.limit, args.verbose)))


if __name__ == "__main__":
    main()
