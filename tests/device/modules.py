"""Loads each part of the packs in a folder by the driver, without MXNet, and finds a kernel in it.

    python3 modules.py FOLDER
"""
import ctypes
import json
import mmap
import struct
import sys
import time
from pathlib import Path


def driver():
    """The driver, with a current context on GPU 0."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for status in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
                   cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
                   cuda.cuCtxSetCurrent(context)):
        if status:
            sys.exit(f"the driver fails: error {status}")
    return cuda


def parts(path):
    """The source, the address of the fat binary and of the first kernel's name of each part."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _, _, length = struct.unpack_from("<8sII", data)
    manifest = json.loads(data[16:16 + length])
    body = 16 + length + -(16 + length) % 16
    base = ctypes.addressof(ctypes.c_char.from_buffer(data)) + body
    for part in manifest["parts"]:
        names = part["names"]
        yield part["source"], base + part["offset"], base + names["offset"], names["count"]


def main(folder):
    cuda, bad = driver(), 0
    for path in sorted(Path(folder).glob("*.pack")):
        begin, count, kernels = time.monotonic(), 0, 0
        for source, code, name, in_part in parts(path):
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            status = cuda.cuModuleLoadFatBinary(ctypes.byref(module), ctypes.c_void_p(code))
            if not status:
                if in_part:
                    status = cuda.cuModuleGetFunction(ctypes.byref(function), module,
                                                      ctypes.c_void_p(name))
                cuda.cuModuleUnload(module)
            if status:
                bad += 1
                print(f"{source}: error {status}", flush=True)
            count, kernels = count + 1, kernels + in_part
        print(f"{path.name}: {count} modules, {kernels} kernels, {bad} fail, "
              f"{time.monotonic() - begin:.1f} s")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1])))
