"""Runs tests of networks on software GPUs of capabilities 9.0, 10.0 and 12.0; these two have cuDNN
9. Then tests of recurrent layers, batch norms and layouts, on a computing GPU with cuDNN 9.

    python tests/software_gpu/newer_gpus.py FOLDER

FOLDER, a cache with MXNet's CUDA wheel, gets a folder `relabelled`: a cache with packs that have
the wheel's code for 8.6 under these architectures. No code runs on a recording GPU.
"""
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUN = [sys.executable, "-W", "ignore"]
GPU = [*RUN, HERE]


def main(cache):
    folder = cache / "relabelled"
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    for name in ("mxnet-cu112", *(path.name for path in cache.glob("software-gpu-*"))):
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(cache / name)
    for arch in (90, 100, 120):
        path = folder / "kernels" / f"{arch}.pack"
        subprocess.run([*GPU, "--capability", "86", *RUN,
                        HERE / "recorded" / "relabel.py", path, str(arch)], check=True)
        subprocess.run([*GPU, "--devices", "2", "--capability", str(arch),
                        "--cudnn", "8" if arch == 90 else "9", "--log",
                        cache / f"log-{arch}.jsonl", "env", f"GLUON_AMP_CACHE={folder}", *RUN,
                        "-m", "pytest", "-q", "-p", "no:cacheprovider",
                        HERE / "recorded" / "test_gpu_networks.py",
                        HERE / "recorded" / "test_gpu_operators.py"], check=True)
    subprocess.run([*GPU, "--devices", "2", "--cudnn", "9", "--compute",
                    "--log", cache / "log-rnn.jsonl", *RUN, "-m", "pytest", "-q", "-p",
                    "no:cacheprovider", "-k",
                    "rnn or RNN or lstm or gru or bidirectional or norms or layouts",
                    HERE / "computed"], check=True)


main(Path(sys.argv[1]).resolve())
