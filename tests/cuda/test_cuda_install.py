"""`gluon-amp cuda install`."""
import lzma
import shutil

import cuda_files
import pytest
from gluon_amp.cuda import fatbin, install, pack
from gluon_amp.tools.cli import main

CODE = [pack.Code("src/a.cu", 0, fatbin.fat_binary([fatbin.entry(cuda_files.cubin({"a": [8]}),
                                                                 90)]), ["a"])]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_AMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path, libmxnet=pack.LIBMXNET):
    pack.write(path, 90, CODE, libmxnet=libmxnet, compiler="nvcc", licences=["Apache-2.0"])
    return path


def nothing_is_left(cache):
    return not (cache / "kernels").exists() or not list((cache / "kernels").iterdir())


@pytest.mark.parametrize("compressed", [False, True])
def test_pack_is_installed(compressed, cache, tmp_path, capsys):
    file = write(tmp_path / "kernels.pack")
    if compressed:
        file.write_bytes(lzma.compress(file.read_bytes()))
        file = file.rename(tmp_path / "kernels.pack.xz")
    assert main(["cuda", "install", str(file)]) == 0
    assert capsys.readouterr().out == \
        f"{cache}/kernels/90.pack: 1 kernel, machine code for compute capability 9.0\n"
    assert [part.kernels() for part in pack.installed(90).parts] == [["a"]]
    assert [path.name for path in (cache / "kernels").iterdir()] == ["90.pack"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("part", [0, 0.01, 0.3, 0.99])
def test_truncated_file_is_refused(part, compressed, cache, tmp_path):
    file = write(tmp_path / "file")
    data = lzma.compress(file.read_bytes()) if compressed else file.read_bytes()
    file.write_bytes(data[:int(len(data) * part)])
    with pytest.raises(pack.PackError, match=rf"^{file} is (not a pack|truncated|incomplete)"):
        install.install(file)
    assert nothing_is_left(cache)


@pytest.mark.parametrize("content", [b"PK\3\4" * 1000, lzma.compress(b"PK\3\4" * 1000)])
def test_foreign_file_is_refused(content, cache, tmp_path, capsys):
    (tmp_path / "file").write_bytes(content)
    assert main(["cuda", "install", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == \
        f"gluon-amp cuda: {tmp_path}/file is not a pack of MXNet's kernels\n"
    assert nothing_is_left(cache)


@pytest.mark.parametrize("compressed", [False, True])
def test_each_damaged_byte_of_code_is_found(compressed, cache, tmp_path):
    file = write(tmp_path / "file")
    data = bytearray(file.read_bytes())
    data[data.index(b"code") + 1] ^= 4
    file.write_bytes(lzma.compress(data) if compressed else data)
    with pytest.raises(pack.PackError, match=rf"^{file} is damaged: the check sum of src/a.cu"):
        install.install(file)
    assert nothing_is_left(cache)


def test_pack_for_another_wheel_is_refused_and_the_installed_one_stays(cache, tmp_path):
    install.install(write(tmp_path / "file"))
    with pytest.raises(pack.PackError, match=r"must be for mxnet-cu112 1.9.1, .* Received: 0000"):
        install.install(write(tmp_path / "other", "0" * 64))
    assert pack.installed(90).manifest["libmxnet"] == pack.LIBMXNET
    assert [path.name for path in (cache / "kernels").iterdir()] == ["90.pack"]


def test_full_disk_is_an_error_before_the_first_byte(cache, tmp_path, monkeypatch):
    file = write(tmp_path / "file")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(OSError, match=rf"{file} needs 0 MB in {cache}/kernels. Available: 0 MB"):
        install.install(file)
    assert nothing_is_left(cache)


def test_disk_that_fills_up_leaves_nothing(cache, tmp_path, monkeypatch):
    file = write(tmp_path / "file")
    monkeypatch.setattr(install.os, "fsync", lambda number: (_ for _ in ()).throw(
        OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left on device"):
        install.install(file)
    assert nothing_is_left(cache)


def test_missing_file_is_named(cache, capsys):
    assert main(["cuda", "install", "nowhere.pack"]) == 1
    assert "nowhere.pack" in capsys.readouterr().err
