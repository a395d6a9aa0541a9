"""Writes a pack of the wheel's code for 8.6 under another architecture, on the software GPU.

    python tests/software_gpu --capability 86 python RELABEL.PY PACK ARCH [NAME ...]

The pack lists each kernel once, as `gluon-amp cuda build` does, and none whose name contains a
NAME.
"""
import ctypes
import struct
import sys
from collections import defaultdict
from pathlib import Path

import gluon_amp  # noqa: F401  (before mxnet)
from gluon_amp.cuda import fatbin, pack, wheel
from software_gpu import recording


def registered(folder):
    """The mangled names of the kernels of each fat binary, by its index."""
    listing = folder / "kernels"
    recording._library().recording_gpu_write_kernels(str(listing).encode())
    found = defaultdict(set)
    for line in listing.read_text().splitlines():
        wrapper, name = line.split()
        found[(int(wrapper) - wheel.wrapper(0)) // 24].add(name)
    listing.unlink()
    return found


def library_base():
    with open("/proc/self/maps") as maps:
        return next(int(line.split("-")[0], 16) for line in maps if "libmxnet.so" in line)


def code(index, arch):
    wrapper = ctypes.string_at(library_base() + wheel.wrapper(index), 24)
    address, = struct.unpack_from("<Q", wrapper, 8)
    size, = struct.unpack_from("<Q", ctypes.string_at(address, 16), 8)
    found = fatbin.entries(ctypes.string_at(address, 16 + size))
    return fatbin.fat_binary(entry.relabelled(arch) for entry in found if entry.arch == 86)


def main(path, arch, *without):
    parts, seen = [], set()
    for index, names in sorted(registered(Path(path).parent).items()):
        wanted = [name for name in names - seen if not any(word in name for word in without)]
        seen |= names
        if wanted:
            parts.append(pack.Code(f"{index}.cu", index, code(index, arch), wanted))
    pack.write(path, arch, parts, libmxnet=pack.LIBMXNET, compiler="none: relabelled",
               licences=["Apache-2.0"])


main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
