"""From a checkout to a wheel to training in an environment that contains nothing else."""
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from pythons import MINORS, ROOT, TRAIN, environment, find_python, numpys, output, run

pytestmark = [pytest.mark.long, pytest.mark.thorough]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files that git would archive, with uncommitted changes."""
    if run("git", "rev-parse", "--git-dir", cwd=ROOT).returncode:
        pytest.skip("this is no git checkout")
    folder = tmp_path_factory.mktemp("source")
    listed = output("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard",
                    cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """The sdist, and the wheel built from it by `make wheel`, which reuses objects that `make test`
    compiled from the same sources with the same flags."""
    output("make", "wheel", f"PYTHON={sys.executable}", cwd=source, timeout=1200,
           GLUON_AMP_OBJECTS=str(ROOT / "build" / "objects"))
    dist = source / "dist"
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert len(list(dist.iterdir())) == 2
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        return SimpleNamespace(wheel=wheel, in_wheel=set(archive.namelist()), in_sdist=packed)


def modules(source):
    return {path.relative_to(source).as_posix() for path in source.glob("gluon_amp/**/*.py")} \
        | {"gluon_amp_command.py"}


def train_in_new_environment(python, wheel, folder, numpy):
    """Installs the wheel with MXNet outside of the checkout, without a compiler, and trains."""
    installed = environment(python, wheel, folder / "env", numpy)
    shows = "\nprint(amp.__file__)\nprint(amp.__version__)"
    *_, file, version = output(installed, "-c", TRAIN + shows, cwd=folder).splitlines()
    assert (folder / "env").resolve() in Path(file).resolve().parents
    assert f"-{version}-" in wheel.name
    command = folder / "env" / "bin" / "gluon-amp"
    assert output(command, "--version", cwd=folder) == f"gluon-amp {version}\n"


# ---- the wheel and the sdist -----------------------------------------------


def test_wheel_has_modules_and_libraries_without_openmp_runtime(built, source):
    assert re.fullmatch(r"gluon_amp-[^-]+-cp38-abi3-manylinux_2_27_x86_64\.whl", built.wheel.name)
    assert modules(source) | {"gluon_amp/py.typed", "gluon_amp/cuda/functions.txt"} \
        <= built.in_wheel
    assert {name for name in built.in_wheel if ".so" in name} == {"gluon_amp/cpu/_engine.so", *(
        f"gluon_amp/cuda/_{name}.so" for name in (
            "kernels", "libcublas", "libcudnn", "libcufft", "libcusolver", "libnvToolsExt",
            "libnvrtc"))}


def test_sdist_contains_all_build_inputs_and_no_compiled_files(built, source):
    assert modules(source) | {"gluon_amp/py.typed", "gluon_amp/cpu/native.h", "setup.py",
                              "gluon_amp/cuda/forward/forward.h", "gluon_amp/cuda/functions.txt",
                              "gluon_amp/cuda/kernels.cc", "pyproject.toml", "LICENSE",
                              "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"} \
        <= built.in_sdist
    assert not [name for name in built.in_sdist if name.endswith((".so", ".o", ".pyc"))]


def test_network_trains_from_wheel_on_oldest_python(built, tmp_path):
    """`make -C tests pythons` tries all."""
    found = {sys.version_info[1]: sys.executable,
             **{minor: find_python(minor) for minor in MINORS if find_python(minor)}}
    minor = min(found)
    train_in_new_environment(found[minor], built.wheel, tmp_path, numpys(minor)[-1])


# ---- make ------------------------------------------------------------------


def complaint(code=2, **variables):
    """What `make check` says on stderr."""
    settings = {"PYTHON": sys.executable, **variables}
    done = run("make", "check", *(f"{name}={value}" for name, value in settings.items()),
               cwd=ROOT, timeout=10)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def test_make_check_succeeds_on_this_machine():
    complaint(code=0)


@pytest.mark.parametrize(("variables", "messages"), [
    ({"PYTHON": "python3.99"}, ["python3.99 is not installed",
                                "Install Python 3.8 or later: apt install python3 python3-venv"]),
    ({"CXX": "no-such-compiler"}, ["no C++ compiler (no-such-compiler): apt install g++"])])
def test_make_without_python_or_compiler_names_package_to_install(variables, messages):
    said = complaint(**variables)
    assert all(message in said for message in messages)


@pytest.mark.parametrize("minor", [6, 7])
def test_make_with_unsupported_python_names_supported_ones(minor):
    path = find_python(minor)
    if path is None:
        pytest.skip(f"not on PATH nor in pyenv: python3.{minor}")
    message = complaint(PYTHON=path)
    assert "gluon_amp needs Python 3.8 or later" in message
    assert f"is 3.{minor}." in message
    assert "PYTHON=python3.11 make" in message


def refused_build(source, *command, **variables):
    """The last line of a build that is refused."""
    done = run(sys.executable, *(command or ("setup.py", "build_ext")), cwd=source, **variables)
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


def test_build_without_compiler_names_package_to_install(source, tmp_path):
    line = refused_build(source, PATH=str(tmp_path))
    assert line.startswith("compiling gluon_amp's engine needs a C++ compiler, and there is no ")
    assert line.endswith(": apt install g++")


def test_build_with_compiler_without_openmp_names_package_to_install(source, tmp_path):
    compiler, said = tmp_path / "clang", "<stdin>:1:10: fatal error: 'omp.h' file not found"
    compiler.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1')
    compiler.chmod(0o755)
    assert refused_build(source, CC=str(compiler)) == (
        "compiling gluon_amp's engine needs a compiler with C++17, OpenMP and GCC's standard "
        f"library: apt install g++, or for clang also its libomp-dev. Received: {compiler}: {said}")


def test_build_for_another_processor_is_refused(source):
    build = "import platform, runpy, sys; platform.machine = lambda: 'aarch64'; " \
            "sys.argv = ['setup.py', 'build_ext']; runpy.run_path('setup.py')"
    assert refused_build(source, "-c", build) == (
        "gluon_amp's engine supports x86-64 only, like the wheels of MXNet 1.9.1. "
        "Received: aarch64")


def test_only_changed_sources_are_recompiled(tmp_path):
    compiler, log, cpu = tmp_path / "compiler", tmp_path / "log", tmp_path / "gluon_amp" / "cpu"
    shutil.copy(ROOT / "setup.py", tmp_path)
    for folder in ("kernels", "operators"):
        (cpu / folder).mkdir(parents=True)
    shutil.copytree(ROOT / "gluon_amp" / "cuda", tmp_path / "gluon_amp" / "cuda")
    for name in ("portable.cc", "variants.json"):
        shutil.copy(ROOT / "gluon_amp" / "cpu" / name, cpu)
    for name in ("one.cc", "operators/two.cc", "header.h", "kernels/three.cc", "kernels/own.h"):
        (cpu / name).write_text("// as it was")
    compiler.write_text(f"""#!/bin/sh
while [ $# -gt 1 ]; do
    case $1 in -c) echo "$2" >> {log};; -o) : > "$2";; esac
    shift
done""")
    compiler.chmod(0o755)

    def compiled():  # of the engine
        log.write_text("")
        output(sys.executable, "setup.py", "build_ext", cwd=tmp_path, CC=str(compiler),
               CXX=str(compiler), GLUON_AMP_OBJECTS=str(tmp_path / "objects"))
        return sorted(Path(line).name for line in log.read_text().splitlines()
                      if "/cuda/" not in line and "portable.cc" not in line)

    kernels = ["one.cc", *["three.cc"] * 9]  # 3 instruction sets, 3 types
    assert compiled() == sorted([*kernels, "two.cc", "headers.cc"])
    assert len(list((tmp_path / "objects").iterdir())) == 13  # and portable.cc
    shutil.rmtree(tmp_path / "build")
    assert compiled() == []
    (cpu / "operators" / "two.cc").write_text("// changed")
    assert compiled() == ["two.cc"]
    (cpu / "header.h").write_text("// changed")
    assert compiled() == ["headers.cc", "one.cc", "two.cc"]
    (cpu / "kernels" / "own.h").write_text("// changed")
    assert compiled() == sorted([*kernels, "two.cc", "headers.cc"])
