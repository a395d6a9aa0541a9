"""Files are written atomically."""
import os
import stat
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import pytest
from gluon_amp.cuda.wheel import cuda_mxnet
from gluon_amp.files import new_folder, replace_file


def test_concurrent_writers_leave_a_complete_file(tmp_path):
    path, failed = tmp_path / "trainer.states", []

    def save(text):
        try:
            for _ in range(10):
                replace_file(str(path), lambda beside: Path(beside).write_text(text))
        except OSError as error:
            failed.append(error)

    texts = [str(rank) * 100_000 for rank in range(4)]
    threads = [threading.Thread(target=save, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or path.read_text() in texts
    assert not failed
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [
    lambda path: amp.export_onnx(mx.sym.relu(mx.sym.var("data")), path, (1, 2)),
    lambda path: replace_file(path, lambda beside: None)])
def test_missing_folder_error_names_file_as_given(write, tmp_path):
    path = tmp_path / "missing" / "net.onnx"
    with pytest.raises(FileNotFoundError) as caught:
        write(str(path))
    assert caught.value.filename == str(path)


def text_into(path, text="new"):
    replace_file(str(path), lambda beside: Path(beside).write_text(text))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_replaced_file_keeps_its_permissions(tmp_path, mode):
    path, seen = tmp_path / "net.params", []
    path.write_text("old")
    path.chmod(mode)

    def write(beside):
        seen.append(stat.S_IMODE(os.stat(beside).st_mode))
        Path(beside).write_text("new")

    replace_file(str(path), write)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert not seen[0] & ~(mode | 0o200)  # no one else reads it meanwhile


def test_new_file_has_the_permissions_of_open(tmp_path):
    (tmp_path / "opened").write_text("")
    text_into(tmp_path / "replaced")
    assert (tmp_path / "replaced").stat().st_mode == (tmp_path / "opened").stat().st_mode


@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_link_stays_one(tmp_path, exists):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "epoch3.params", tmp_path / "last.params"
    if exists:
        target.write_text("old")
    link.symlink_to(Path("disk", "epoch3.params"))
    text_into(link)
    assert os.readlink(str(link)) == os.path.join("disk", "epoch3.params")
    assert target.read_text() == "new"
    assert {p.name for p in tmp_path.rglob("*")} == {"disk", "epoch3.params", "last.params"}


def test_device_is_written_to_and_folder_is_refused(tmp_path):
    os.mkfifo(str(tmp_path / "pipe"))
    reader = os.open(str(tmp_path / "pipe"), os.O_RDONLY | os.O_NONBLOCK)
    text_into(tmp_path / "pipe")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        text_into(tmp_path / "folder")


@pytest.mark.parametrize("fails", [True, False])
def test_unrelated_files_beside_stay(tmp_path, fails):
    (tmp_path / "x.writing").write_text("mine")

    def write(beside):
        Path(beside).write_text("half")
        if fails:
            raise OSError("No space left on device")

    if fails:
        with pytest.raises(OSError, match="No space"):
            replace_file(str(tmp_path / "x"), write)
    else:
        replace_file(str(tmp_path / "x"), write)
    assert (tmp_path / "x.writing").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2 - fails


def test_new_folder_is_complete_or_absent(tmp_path):
    with pytest.raises(KeyError), new_folder(str(tmp_path / "out")):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with new_folder(f"{tmp_path / 'new' / 'out'}/") as beside:
        Path(beside, "file").write_text("")
        assert not (tmp_path / "new" / "out").exists()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]
    with pytest.raises(FileExistsError, match="out"), new_folder(str(tmp_path / "new" / "out")):
        pass
    assert [p.name for p in (tmp_path / "new" / "out").iterdir()] == ["file"]


def test_processes_that_unpack_one_wheel_share_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_AMP_CACHE", str(tmp_path))
    with zipfile.ZipFile(tmp_path / "mxnet_cu112-1.9.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mxnet/libmxnet.so", "code")
    both = threading.Barrier(2)
    unpack = zipfile.ZipFile.extractall

    def extractall(self, *args):
        both.wait()  # neither has its folder yet
        unpack(self, *args)
        both.wait()

    monkeypatch.setattr(zipfile.ZipFile, "extractall", extractall)
    with ThreadPoolExecutor(2) as pool:
        folders = {made.result() for made in [pool.submit(cuda_mxnet) for _ in range(2)]}
    assert folders == {tmp_path / "mxnet-cu112"}
    assert (tmp_path / "mxnet-cu112" / "mxnet" / "libmxnet.so").read_text() == "code"
    assert len(list(tmp_path.iterdir())) == 2
