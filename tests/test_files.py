"""Files are written atomically."""
import threading
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import pytest
from gluon_amp.files import replace_file


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
