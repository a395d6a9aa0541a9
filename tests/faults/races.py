"""Networks that train in four threads have the bits of one thread: make -C tests races

    python tests/faults/races.py 10000      steps of all threads together

With GLUON_AMP_ENGINE, an engine that is compiled with -fsanitize=thread, ThreadSanitizer reports
races of the engine's code: make -C tests thread-sanitizer
"""
import os
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ["MXNET_CPU_WORKER_NTHREADS"] = "4"  # threads that run operators at once; 1 by default

from stories import convolutional, create, dense, digest, recurrent, step

NETWORKS = ((dense, "float16"), (convolutional, "float16"), (recurrent, "mixed_float16"),
            (convolutional, "bfloat16"))


def trained(threads, steps):
    """Returns the bits of each network after its steps."""
    trainings = [create(*network) for network in NETWORKS]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda training: step(*training, steps=steps), trainings))
    return [digest(net, trainer) for net, trainer, *_ in trainings]


def main(steps):
    each = max(steps // len(NETWORKS), 1)
    if trained(1, each) != trained(len(NETWORKS), each):
        sys.exit("networks of several threads have other bits than those of one")
    print(f"{each * len(NETWORKS)} steps of {len(NETWORKS)} threads: the bits of one thread")


if __name__ == "__main__":
    main(int(sys.argv[1]))
