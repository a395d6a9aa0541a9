"""Loads each library of MXNet's CUDA build alone, and prints the first that fails."""
import ctypes
import subprocess
import sys

CHILD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print("loads", flush=True)
if "cudart" in sys.argv[1]:
    count, pointer = ctypes.c_int(), ctypes.c_void_p()
    print("devices", library.cudaGetDeviceCount(ctypes.byref(count)), count.value, flush=True)
    print("malloc", library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1024)), flush=True)
if "cublas" in sys.argv[1]:
    handle = ctypes.c_void_p()
    print("handle", library.cublasCreate_v2(ctypes.byref(handle)), flush=True)
if "cudnn" in sys.argv[1]:
    handle = ctypes.c_void_p()
    print("handle", library.cudnnCreate(ctypes.byref(handle)), flush=True)
"""


def main():
    from gluon_amp.cuda import load
    print(load.prepared, flush=True)
    choice = load.prepared and load.prepared.choice
    for name, path in (choice.paths if choice else {"libcudart.so.11.0": "libcudart.so.11.0"}
                       ).items():
        done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True,
                              text=True, timeout=30, check=False)
        print(name, path, done.returncode, done.stdout.split(), done.stderr[-300:], flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None)
    main()
