"""The sources of MXNet's CUDA code: MXNet 1.9.1, and what it includes, by commit."""
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import List, NamedTuple, Tuple

# $GLUON_AMP_GIT/apache/mxnet and so on are cloned from: a mirror, or a folder of repositories.
GIT = "https://github.com"


class Repository(NamedTuple):
    """A repository at a commit: its folder in the tree, and the paths that the build reads."""
    name: str
    commit: str
    folder: str
    paths: Tuple[str, ...]
    licence: str


REPOSITORIES = (
    Repository("apache/mxnet", "3f8f3be9987e259491ddc5a78aa9c6903e0b21e3", ".",  # tag 1.9.1
               ("LICENSE", "include", "src", "3rdparty/mshadow", "3rdparty/ctc_include"),
               "Apache-2.0"),
    Repository("dmlc/dmlc-core", "5df8305fe699d3b503d10c60a231ab0223142407", "3rdparty/dmlc-core",
               ("LICENSE", "include"), "Apache-2.0"),
    Repository("dmlc/ps-lite", "34fd45cae457d59850fdcb2066467778d0673f21", "3rdparty/ps-lite",
               ("LICENSE", "include"), "Apache-2.0"),
    Repository("dmlc/dlpack", "3efc489b55385936531a06ff83425b719387ec63", "3rdparty/dlpack",
               ("LICENSE", "include"), "Apache-2.0"),
    Repository("apache/tvm", "9bd2c7b44208ed992061f8c2688e1137357f1db1", "3rdparty/tvm",
               ("LICENSE", "include", "nnvm/include"), "Apache-2.0"),
    Repository("oneapi-src/oneDNN", "5818c40f07bdb6307f9bc64e929836fe036da644",
               "3rdparty/mkldnn", ("LICENSE", "include"), "Apache-2.0"),
    # Not MXNet's submodule: the wheel's kernels have the names of CUDA 11.2's CUB and Thrust.
    Repository("NVIDIA/cub", "a3ee304a1f8e22f278df10600df2e4b333012592", "3rdparty/nvidia_cub",
               ("LICENSE.TXT", "cub"), "BSD-3-Clause"),
    Repository("NVIDIA/thrust", "0ef5c509856e12cc408f0f00ed586b4c5b1a155c", "3rdparty/thrust",
               ("LICENSE", "thrust"), "Apache-2.0"),
)
INCLUDE = ("include", "src", "3rdparty", *(f"3rdparty/{name}" for name in (
    "mshadow", "dmlc-core/include", "ps-lite/include", "dlpack/include", "tvm/include",
    "tvm/nnvm/include", "mkldnn/include", "nvidia_cub", "thrust")))


def fetch(folder: Path) -> Path:
    """Returns the tree of all sources below a folder; fetches it by git if it is missing."""
    digest = hashlib.sha256(repr(REPOSITORIES).encode()).hexdigest()[:16]
    tree = folder / f"source-{digest}"
    if not tree.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="writing-") as scratch:
            for repository in REPOSITORIES:
                _fetch_one(repository, Path(scratch))
            os.replace(Path(scratch, "tree"), tree)
    return tree


def _fetch_one(repository: Repository, scratch: Path) -> None:
    url = f"{os.environ.get('GLUON_AMP_GIT', GIT).rstrip('/')}/{repository.name}"
    bare = str(scratch / "git")
    _git(url, "init", "-q", "--bare", bare)
    _git(url, "-C", bare, "fetch", "-q", "--depth=1", "--no-tags", url, repository.commit)
    archive = scratch / "archive.tar"
    _git(url, "-C", bare, "archive", "-o", str(archive), repository.commit, *repository.paths)
    target = scratch / "tree" / repository.folder
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as file:
        file.extractall(target)
    shutil.rmtree(bare)


def _git(url: str, *arguments: str) -> None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True,
                              env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    except FileNotFoundError:
        raise FileNotFoundError("fetching MXNet's sources needs git: apt install git; or pass "
                                "--source TREE") from None
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"git {arguments[0]} fails"
        raise OSError(f"cannot fetch {url}: {why}. Set GLUON_AMP_GIT to the address of a mirror, "
                      "or pass --source TREE, a tree that another machine has fetched")


def check(tree: Path) -> Path:
    """Returns a tree of sources, or raises an error that names what it lacks."""
    if not tree.is_dir():
        raise FileNotFoundError(f"--source must be a folder. Received: {tree}")
    missing = [str(Path(repository.folder, path)) for repository in REPOSITORIES
               for path in repository.paths if not (tree / repository.folder / path).exists()]
    if missing:
        raise FileNotFoundError(
            f"{tree} lacks {', '.join(missing)}. Valid: MXNet 1.9.1 with its submodules, CUB "
            "1.10.0 in 3rdparty/nvidia_cub, and Thrust 1.10.0 in 3rdparty/thrust")
    for path, name, wanted in (
            ("include/mxnet/base.h", "MXNET_MINOR", "9"),
            ("include/mxnet/base.h", "MXNET_PATCH", "1"),
            ("3rdparty/nvidia_cub/cub/version.cuh", "CUB_VERSION", "101000"),
            ("3rdparty/thrust/thrust/version.h", "THRUST_VERSION", "101000")):
        text = (tree / path).read_text(encoding="utf-8", errors="replace")
        definition = re.search(rf"#define {name}\s+(\w+)", text)
        if definition is None or definition.group(1) != wanted:
            raise ValueError(f"{tree / path} must define {name} as {wanted}. Received: "
                             f"{definition.group(1) if definition else 'no definition'}")
    return tree


def device_files(tree: Path) -> List[str]:
    """Returns MXNet's CUDA files, relative to the tree, in the order of linking."""
    return sorted(str(path.relative_to(tree)) for path in (tree / "src").rglob("*.cu"))


def digest(*folders: Path) -> str:
    """Returns the SHA-256 of all files of folders: their paths and contents."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*")
                           if path.is_file() and path.suffix != ".pyc"):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder)} {content}\n".encode())
    return total.hexdigest()
