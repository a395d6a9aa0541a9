"""The script of `make -C tests transfer`, with a small wheel."""
import io
import tarfile

import cuda_files
import cuda_trees
import pytest
import transfer_size
from gluon_amp.cuda import pack


@pytest.fixture
def mxnet(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_AMP_CACHE", str(tmp_path))
    library = cuda_trees.wheel(tmp_path)
    monkeypatch.setattr(pack, "LIBMXNET", cuda_files.sha256(library))
    for name in ("__init__.py", "libopenblas.so.0", "include/mxnet/base.h",
                 "gluon/__pycache__/block.pyc", "gluon/block.py"):
        (library.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (library.parent / name).write_text(name)
    monkeypatch.setattr(transfer_size.library, "PATH", library)  # the engine takes seconds
    return library.parent


def test_pieces_of_62_mib_at_most_pass(mxnet, tmp_path, capsys):
    file = tmp_path / "file"
    with open(file, "wb") as made:
        made.truncate(2**20)
    transfer_size.main(str(file))
    *pieces, together = (line.split() for line in capsys.readouterr().out.splitlines())
    assert ["kernels", "1.0", "MiB"] in pieces
    assert len(pieces) == 5
    assert float(together[-2]) == pytest.approx(sum(float(piece[-2]) for piece in pieces), abs=0.3)
    with open(file, "ab") as made:
        made.truncate(62 * 2**20)
    with pytest.raises(SystemExit, match="at most 62 MiB together"):
        transfer_size.main(str(file))


def test_archive_has_what_python_imports(mxnet):
    with tarfile.open(fileobj=io.BytesIO(transfer_size.python_files(mxnet))) as archive:
        assert archive.getnames() == ["mxnet/__init__.py", "mxnet/gluon/block.py",
                                      "mxnet/libopenblas.so.0"]
