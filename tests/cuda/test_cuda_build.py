"""`gluon-amp cuda build`, with small compilers of the tests."""
import fcntl
import lzma
import os
import shutil
import threading
from pathlib import Path

import cuda_files
import cuda_trees
import pytest
from cuda_files import kernel, module
from gluon_amp.cuda import build, comparison, elf, fatbin, pack, ptx, sources, toolkit
from gluon_amp.tools.cli import main

NAME = next(name for name in cuda_trees.WHEEL[1] if name != "shared")


class Place:
    """The folders of a build, and its compilers."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.tree = cuda_trees.make(folder / "tree")
        monkeypatch.setenv("GLUON_AMP_CACHE", str(folder / "cache"))
        self.wheel()
        self.tools()

    def wheel(self, *arguments, **options):
        library = cuda_trees.wheel(self.folder / "cache", *arguments, **options)
        self.monkeypatch.setattr(pack, "LIBMXNET", cuda_files.sha256(library))

    def tools(self, **scripts):
        """Makes compilers that append a line to `log` for each file."""
        log = self.folder / "log"
        packages = cuda_trees.tools(self.folder / "nvidia", **{
            "nvcc": f"for last; do :; done; echo nvcc $last >> {log}",
            "ptxas": f'echo "$0 $*" >> {log}', **scripts})
        self.monkeypatch.setattr(build, "find", lambda: toolkit.find(packages))

    def build(self, *architectures, jobs=2, **options):
        return build.build(architectures or ("90",), self.tree, jobs, report=lambda line: None,
                           **options)

    def compiled(self):
        """What the compilers did since the last call, sorted: nvcc's source files and ptxas."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True) if lines else None
        return sorted(line.split("/")[-1] if line.startswith("nvcc") else "ptxas" for line in lines)

    def left(self):
        """The names of what the build's folder has, besides tools and the lock."""
        return sorted(path.name.split("-")[0] for path in
                      (self.folder / "cache" / "kernels-build").rglob("*")
                      if path.is_file() and "tools" not in path.parts and path.name != "lock")


@pytest.fixture
def place(tmp_path, monkeypatch):
    return Place(tmp_path, monkeypatch)


def names(path):
    return [part.kernels() for part in pack.read(path).parts]


# ---- packs


def test_pack_has_each_kernel_of_the_wheel_once(place):
    path, = place.build()
    assert path == pack.place(90)
    assert names(path) == [["one", "shared"], [NAME]]
    found = pack.installed(90)
    found.verify()
    assert [(part.source, part.index) for part in found.parts] == [
        ("src/operator/one.cu", 0), ("src/operator/two.cu", 1)]
    for part in found.parts:
        entry, = fatbin.entries(part.fat_binary)
        assert (entry.kind, entry.arch) == ("cubin", 90)
        assert sorted(elf.kernels(bytes(entry.code))) == part.kernels()
    assert found.manifest["libmxnet"] == pack.LIBMXNET
    assert found.manifest["versions"]["compiler"] == "nvcc 13.0.88, ptxas 11.8.89"
    assert {"NVIDIA/cub: BSD-3-Clause", "NVIDIA/thrust: Apache-2.0", "apache/mxnet: Apache-2.0"
            } <= set(found.manifest["licences"])


def test_ptx_is_compiled_once_for_several_architectures(place):
    paths = place.build("90", "100", "ptx")
    assert place.compiled() == ["one.cu", "ptxas", "ptxas", "ptxas", "ptxas", "two.cu"]
    assert [(pack.read(path).arch, pack.read(path).kind) for path in paths] == [
        (90, "cubin"), (100, "cubin"), (90, "ptx")]
    assert pack.read(paths[1]).manifest["versions"]["compiler"] == "nvcc 13.0.88, ptxas 13.0.88"
    place.build("90", "120")
    assert place.compiled() == ["ptxas", "ptxas"]


def test_ptx_has_what_the_kernels_use(place):
    path, = place.build("ptx")
    assert names(path) == [["one", "shared"], [NAME]]
    one, two = (bytes(fatbin.entries(part.fat_binary)[0].code).rstrip(b"\0").decode()
                for part in pack.read(path).parts)
    assert [item.name for item in ptx.parse(one).items] == ["table", "helper", "one", "shared"]
    assert [item.name for item in ptx.parse(two).items] == [NAME]
    assert all(text.startswith(".version 7.8\n.target sm_90\n") for text in (one, two))


def test_file_whose_kernels_earlier_files_have_is_not_compiled(place):
    place.wheel([cuda_trees.WHEEL[0], {"shared": [8]}, cuda_trees.WHEEL[1]])
    (place.tree / "src/operator/one_more.cu").write_text("not PTX")
    path, = place.build()
    assert names(path) == [["one", "shared"], [NAME]]
    assert [part.index for part in pack.read(path).parts] == [0, 2]


def test_output_folder_receives_compressed_packs(place):
    paths = place.build("90", "ptx", output=place.folder)
    assert [path.name for path in paths] == ["mxnet-cu112-1.9.1-sm_90.pack.xz",
                                             "mxnet-cu112-1.9.1-ptx.pack.xz"]
    assert pack.installed(90) is None
    plain = place.folder / "plain"
    for path in paths:
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        pack.read(plain).verify()


def test_command_builds_and_installs(place, capsys):
    assert main(["cuda", "build", "--source", str(place.tree), "-o", str(place.folder)]) == 0
    assert "sm_90.pack.xz: 3 kernels, all of the wheel" in capsys.readouterr().out
    file = place.folder / "mxnet-cu112-1.9.1-sm_90.pack.xz"
    assert main(["cuda", "install", str(file)]) == 0
    assert f"{pack.place(90)}: 3 kernels" in capsys.readouterr().out
    assert names(pack.place(90)) == [["one", "shared"], [NAME]]


# ---- finished parts


def test_finished_parts_are_kept_after_a_failure(place):
    place.tools(nvcc='case "$*" in *two.cu*) echo "two.cu(1): error: no such thing" >&2; exit 1;; '
                     "esac")
    with pytest.raises(OSError, match=r"nvcc fails for src/operator/two.cu: .*error: no such thi"):
        place.build(jobs=1)
    assert pack.installed(90) is None
    place.compiled()
    place.tools()
    place.build()
    assert "one.cu" not in place.compiled()


def test_changed_inputs_are_compiled_again(place):
    every_header, cudnn = place.tree / "include/mxnet/a.h", place.folder / "nvidia/cudnn/include"
    for changed in (every_header, cudnn / "cudnn.h"):
        place.build()
        assert place.compiled() == ["one.cu", "ptxas", "ptxas", "two.cu"]
        place.build()
        assert place.compiled() == []
        changed.write_text("// another version")
    place.build()
    assert place.compiled() == ["one.cu", "ptxas", "ptxas", "two.cu"]


def test_interrupted_build_continues(place, monkeypatch):
    """Ctrl-C while the second file compiles: the first is finished, the compiler ends."""
    replaced, parts = build.Builder.compile, []

    def compile_one(builder, source, architectures):
        if parts:
            builder._run(["sh", "-c", "sleep 600; true"], source, str(place.folder))
        replaced(builder, source, architectures)
        parts.append(source.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(build.Builder, "compile", compile_one)
    with pytest.raises(KeyboardInterrupt):
        place.build(jobs=1)
    assert place.left() == ["000", "000"]
    monkeypatch.setattr(build.Builder, "compile", replaced)
    place.compiled()
    place.build()
    assert place.compiled() == ["ptxas", "two.cu"]


def test_damaged_ptx_is_compiled_again(place):
    place.build()
    for number, path in enumerate(sorted((place.folder / "cache").rglob("*.gz"))):
        data = path.read_bytes()
        path.write_bytes(data[:20] if number else data[:-8] + bytes(8))
    place.compiled()
    place.build("100")
    assert place.compiled() == ["one.cu", "ptxas", "ptxas", "two.cu"]


def test_leftovers_of_a_killed_build_are_removed(place):
    folder = place.folder / "cache" / "kernels-build" / "writing-abc"
    folder.mkdir(parents=True)
    place.build()
    assert not folder.exists()


def test_two_builds_in_one_folder_are_refused(place):
    folder = place.folder / "cache" / "kernels-build"
    folder.mkdir()
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=r"another build uses .*kernels-build"):
            place.build()
    place.build()


# ---- the comparison with the wheel


@pytest.mark.parametrize(("kernels", "message"), [
    ({**cuda_trees.WHEEL[0], "more": [8]},
     "the PTX of src/operator/one.cu lacks kernels of the wheel: 1, such as more"),
    ({"shared": [8]},
     "the PTX of src/operator/one.cu has kernels that the wheel lacks: 1, such as one"),
    ({"one": [8, 8], "shared": [8]},
     "has kernels with other parameters: 1, such as one .wheel: 8 bytes at 0, 8 bytes at 8; here: "
     "8 bytes at 0, 4 bytes at 8"),
    ({"one": [8], "shared": [8]}, "such as one .wheel: 8 bytes at 0; here: 8 bytes at 0, 4 bytes")])
def test_difference_from_the_wheel_names_the_kernel(kernels, message, place):
    place.wheel([kernels, cuda_trees.WHEEL[1]])
    with pytest.raises(comparison.Differs, match=message):
        place.build()
    assert pack.installed(90) is None


@pytest.mark.parametrize(("scripts", "error", "message"), [
    ({"ptxas": "sed -i 's/.entry one(/.entry other(/' \"$4\""}, comparison.Differs,
     "the machine code for 90 of src/operator/one.cu lacks kernels of the wheel: 1, such as one"),
    # MXNet may launch it in blocks of 1,024 threads
    ({"ptxas": 'echo "// one_is_large" >> "$4"'}, comparison.Differs,
     "one takes 80 registers, of 64"),
    ({"nvcc": "kill -9 $$"}, OSError, "probably for lack of memory. Pass fewer jobs: -j 1")])
def test_results_of_compilers_are_checked(scripts, error, message, place):
    place.tools(**scripts)
    with pytest.raises(error, match=message):
        place.build()


def test_kernel_near_the_limit_of_registers_keeps_it(place):
    place.wheel(registers={"one": 62, "shared": 40})
    path, = place.build("ptx")
    text = bytes(fatbin.entries(pack.read(path).parts[0].fat_binary)[0].code).decode()
    one, shared = (item.text for item in ptx.parse(text.rstrip("\0")).items
                   if item.name in ("one", "shared"))
    assert "\n)\n.maxnreg 64\n{" in one
    assert ".maxnreg" not in shared


@pytest.mark.parametrize(("registers", "most"), [
    (1, 64), (64, 64), (65, 72), (72, 72), (73, 80), (81, 96), (97, 128), (128, 128), (129, 168),
    (169, 255), (255, 255)])
def test_most_registers_permit_the_same_blocks(registers, most):
    kernel = elf.Kernel((), registers)
    assert kernel.most_registers == most


# ---- the machine


def test_memory_is_lent_as_far_as_it_goes():
    memory = build.Memory(1000)
    running, most, lock, both = 0, 0, threading.Lock(), threading.Barrier(2)

    def job(megabytes, meet):
        nonlocal running, most
        with memory.lend(megabytes):
            with lock:
                running += megabytes
                most = max(most, running)
            if meet:
                both.wait(60)
            with lock:
                running -= megabytes

    small = [threading.Thread(target=job, args=(400, True)) for _ in range(2)]
    large = [threading.Thread(target=job, args=(700, False)) for _ in range(4)]
    for thread in (*small, *large):
        thread.start()
    for thread in (*small, *large):
        thread.join(60)
    assert most == 800
    assert memory.free == 1000
    with memory.lend(5000):  # one job runs in any case
        assert memory.free == -4000


def test_available_memory_is_that_of_this_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    assert 0 < build.available_megabytes() <= total


def full_disk(place):
    """Only finished parts reduce what is needed, not other files of an earlier build."""
    old = place.folder / "cache" / "kernels-build" / "source-old"
    old.mkdir(parents=True)
    with open(old / "file", "wb") as file:
        file.truncate(10**9)
    usage = shutil.disk_usage(place.folder)
    place.monkeypatch.setattr(build.shutil, "disk_usage", lambda path: usage._replace(free=10**9))


@pytest.mark.parametrize(("prepare", "arguments", "error", "message"), [
    (lambda place: place.monkeypatch.setattr(build, "available_megabytes", lambda: 500), {},
     OSError, "largest file needs 801 MB of memory. Available: 500 MB"),
    (full_disk, {}, OSError, "needs 1100 MB of disk space .* Available: 1000 MB"),
    (lambda place: None, {"architectures": ["90", "86"]}, ValueError,
     "--arch must be of 90, 100, 120, ptx. Received: 86"),
    (lambda place: None, {"output": Path("nowhere")}, FileNotFoundError,
     "--output must be a writable folder"),
    (lambda place: place.monkeypatch.setattr(pack, "LIBMXNET", "0" * 64), {}, ValueError,
     "must be of mxnet-cu112 1.9.1, SHA-256 000"),
    (lambda place: shutil.rmtree(place.folder / "cache" / "mxnet-cu112"), {}, FileNotFoundError,
     "pip download .* mxnet-cu112==1.9.1")])
def test_build_that_cannot_end_is_refused_before_the_first_file(
        prepare, arguments, error, message, place):
    prepare(place)
    with pytest.raises(error, match=message):
        place.build(*arguments.pop("architectures", ()), **arguments)
    assert place.compiled() == []


# ---- compilers


def test_compiler_on_path_serves_if_the_package_is_missing(tmp_path, monkeypatch):
    packages = cuda_trees.tools(tmp_path)
    (packages / "cu13").rename(tmp_path / "cuda")
    start = cuda_files.compiler(tmp_path / "path", "nvcc", "13.0.88",
                                f"echo '#$ TOP={tmp_path}/cuda/bin/..'")
    monkeypatch.setenv("PATH", str(start.parent), prepend=os.pathsep)
    assert toolkit.find(packages).nvcc.path == (tmp_path / "cuda" / "bin" / "nvcc").resolve()


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda packages: (packages / "cudnn" / "include" / "cudnn.h").unlink(), FileNotFoundError,
     r"lacks cudnn.h: pip install '.\[cuda-build\]' .* new virtual environment"),
    (lambda packages: (packages / "cuda_runtime" / "include" / "cuda_runtime_api.h").write_text(
        "#define CUDART_VERSION 11070"), ValueError, "must be of CUDA 11.8 .* Received: 11070"),
    (lambda packages: shutil.rmtree(packages / "cu13"), FileNotFoundError,
     "needs nvcc 13: pip install"),
    (lambda packages: cuda_files.compiler(packages / "cu13" / "bin", "nvcc", "12.9.86", ""),
     ValueError, "needs nvcc 13. Received: .*version 12.9.86")])
def test_missing_or_other_tools_are_named(change, error, message, tmp_path, monkeypatch):
    packages = cuda_trees.tools(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    change(packages)
    with pytest.raises(error, match=message):
        toolkit.find(packages)


def test_ptxas_of_nvcc_serves_without_the_old_one(tmp_path):
    packages = cuda_trees.tools(tmp_path)
    assert toolkit.find(packages).assembler(90).path == packages / "cuda_nvcc" / "bin" / "ptxas"
    assert toolkit.find(packages).assembler(100).path == packages / "cu13" / "bin" / "ptxas"
    (packages / "cuda_nvcc" / "bin" / "ptxas").unlink()
    assert toolkit.find(packages).assembler(90).path == packages / "cu13" / "bin" / "ptxas"


# ---- PTX and ELF


def test_incomplete_ptx_is_refused():
    text = module(kernel("a", "u64"))
    assert ptx.parse(text).kernels == ["a"]
    with pytest.raises(ValueError, match=r"incomplete: it ends within .visible .entry a"):
        ptx.parse(text.rstrip().rstrip("}"))
    with pytest.raises(ValueError, match="incomplete: it has no header"):
        ptx.parse("")


@pytest.mark.parametrize(("kinds", "expected"), [
    ((), []), (("u64",), [(0, 8)]), (("u32", "u64", "f32"), [(0, 4), (8, 8), (16, 4)]),
    (("u8", "f16", "s32", "f64"), [(0, 1), (2, 2), (4, 4), (8, 8)])])
def test_parameters_lie_at_multiples_of_their_sizes(kinds, expected):
    item, = ptx.parse(module(kernel("a", *kinds))).items
    assert [(each.offset, each.size) for each in ptx.parameters(item)] == expected


def test_parameters_of_structures_have_an_alignment():
    text = (".visible .entry a(\n\t.param .align 1 .b8 a_param_0[3],\n\t.param .align 8 .b8 "
            "a_param_1[24],\n\t.param .u64 .ptr .global .align 4 a_param_2\n)\n{\n\tret;\n}\n")
    item, = ptx.parse(module(text)).items
    assert [(each.offset, each.size) for each in ptx.parameters(item)] == [(0, 3), (8, 24), (32, 8)]


def test_launch_bounds_stay():
    text = kernel("a", "u64").replace(")\n{", ")\n.maxntid 256\n.minnctapersm 1\n{")
    limited = ptx.limit_registers(ptx.parse(module(text, kernel("b"))), {"a": 64, "b": 64})
    assert [".maxnreg" in item.text for item in limited.items] == [False, True]
    assert ptx.parse(str(limited)).kernels == ["a", "b"]


@pytest.mark.parametrize("cut", [0, 3, 63, 100, -100, -1])
def test_truncated_cubin_is_refused(cut):
    data = cuda_files.cubin({"a": [8]})
    assert elf.kernels(data)["a"].parameters == ((0, 0, 8),)
    with pytest.raises(ValueError, match=r"thing (is truncated|is not a 64-bit ELF file)"):
        elf.kernels(data[:cut], "thing")


def test_host_part_is_all_but_the_code_for_gpus(tmp_path):
    (tmp_path / "lib.so").write_bytes(cuda_files.library([b"code for GPUs"]))
    before, after = elf.host_part(tmp_path / "lib.so")
    assert b"host code" in before
    assert b"host data" in after
    assert b"code for GPUs" not in before + after


def test_library_without_code_is_refused(tmp_path):
    (tmp_path / "lib.so").write_bytes(cuda_files.elf([(".text", 1, 0, b"", 0)]))
    with pytest.raises(ValueError, match=r"must be libmxnet.so of mxnet-cu112 1.9.1, with code for "
                                         r"GPUs. Received: a library without .nvFatBinSegment"):
        elf.host_part(tmp_path / "lib.so")


def test_repositories_are_pinned_by_commit():
    assert all(len(each.commit) == 40 for each in sources.REPOSITORIES)
