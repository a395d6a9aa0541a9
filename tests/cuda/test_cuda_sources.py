"""MXNet's sources for `gluon-amp cuda build`, from git repositories that the tests make."""
import os
import subprocess

import cuda_trees
import pytest
from gluon_amp.cuda import sources


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder with all repositories, each at one commit."""
    identity = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")}
    made = []
    for repository in sources.REPOSITORIES:
        folder = tmp_path / "hub" / repository.name
        for path, text in cuda_trees.content(repository).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        (folder / "example").mkdir()
        (folder / "example" / "unneeded").write_text("not fetched")

        def git(*arguments, folder=folder):
            return subprocess.run(["git", "-C", str(folder), *arguments], check=True, text=True,
                                  capture_output=True, env={**os.environ, **identity}).stdout

        git("init", "-q")
        git("add", ".")
        git("commit", "-q", "-m", "the commit that is fetched")
        commit = git("rev-parse", "HEAD").strip()
        git("commit", "-q", "--allow-empty", "-m", "a later one")
        made.append(repository._replace(commit=commit))
    monkeypatch.setattr(sources, "REPOSITORIES", tuple(made))
    monkeypatch.setenv("GLUON_AMP_GIT", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_sources_are_fetched_once_by_commit(hub, tmp_path, monkeypatch):
    tree = sources.fetch(tmp_path / "build")
    assert sources.check(tree) == tree
    assert sources.device_files(tree) == ["src/operator/one.cu", "src/operator/two.cu"]
    assert not list(tree.rglob("unneeded"))
    assert [path.name for path in (tmp_path / "build").iterdir()] == [tree.name]
    hub.rename(tmp_path / "moved")
    assert sources.fetch(tmp_path / "build") == tree


def test_failed_fetch_names_address_and_remedy_and_leaves_nothing(hub, tmp_path):
    (hub / "NVIDIA" / "thrust").rename(hub / "elsewhere")
    with pytest.raises(OSError, match=r"cannot fetch .*/hub/NVIDIA/thrust: .*--source TREE"):
        sources.fetch(tmp_path / "build")
    assert list((tmp_path / "build").iterdir()) == []


def test_other_commit_fails(hub, tmp_path, monkeypatch):
    first, *others = sources.REPOSITORIES
    monkeypatch.setattr(sources, "REPOSITORIES", (first._replace(commit="1" * 40), *others))
    with pytest.raises(OSError, match=r"cannot fetch .*/hub/apache/mxnet: "):
        sources.fetch(tmp_path / "build")


def test_missing_git_is_named(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="needs git: apt install git; or pass --source"):
        sources.fetch(tmp_path / "build")


def test_missing_parts_of_a_tree_are_named(tmp_path):
    tree = cuda_trees.make(tmp_path / "tree")
    (tree / "3rdparty/dlpack/include").rename(tree / "away")
    with pytest.raises(FileNotFoundError, match="lacks 3rdparty/dlpack/include"):
        sources.check(tree)
    with pytest.raises(FileNotFoundError, match="--source must be a folder"):
        sources.check(tmp_path / "nowhere")


@pytest.mark.parametrize(("path", "found", "name"), [
    ("include/mxnet/base.h", "#define MXNET_MAJOR 1\n#define MXNET_MINOR 9", "MXNET_PATCH"),
    ("include/mxnet/base.h", "#define MXNET_MINOR 8\n#define MXNET_PATCH 1", "MXNET_MINOR"),
    ("3rdparty/nvidia_cub/cub/version.cuh", "#define CUB_VERSION 100800", "CUB_VERSION"),
    ("3rdparty/thrust/thrust/version.h", "#define THRUST_VERSION 101700", "THRUST_VERSION")])
def test_other_versions_are_refused(path, found, name, tmp_path):
    tree = cuda_trees.make(tmp_path / "tree")
    (tree / path).write_text(found)
    with pytest.raises(ValueError, match=f"must define {name} as"):
        sources.check(tree)


def test_digest_depends_on_names_and_contents(tmp_path):
    tree = cuda_trees.make(tmp_path / "tree")
    before = sources.digest(tree)
    assert before == sources.digest(cuda_trees.make(tmp_path / "same"))
    (tree / "src/operator/one.cu").rename(tree / "src/operator/renamed.cu")
    renamed = sources.digest(tree)
    (tree / "src/operator/renamed.cu").write_text("changed")
    assert len({before, renamed, sources.digest(tree)}) == 3
