"""`make -C tests isa`: tests with the marker `isa`, forced down to each smaller instruction set.

The largest one is that of `make test`. It prints which ones this processor lacks, and pytest the
tests that need one of these: AVX512_BF16 without AMX for bfloat16 convolutions in their
layout (test_bfloat16_layout.py), AVX512_BF16 or AMX for the processor's bfloat16 products
(test_bfloat16_products.py).

GLUON_AMP_ISA limits the engine's own loops, DNNL_MAX_CPU_ISA those of oneDNN.
"""
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FLAGS = set(Path("/proc/cpuinfo").read_text().split())
LIMITS = (  # flag of the processor, limits of the engine and of oneDNN
    ("avx2", "avx2", "AVX2"), ("avx512bw", "avx512", "AVX512_CORE"),
    ("avx512_bf16", "avx512", "AVX512_CORE_BF16"), ("amx_bf16", "avx512", "AVX512_CORE_AMX"))


def main():
    failed, ran = [], []
    for flag, _, onednn in LIMITS:
        if flag not in FLAGS:
            print(f"left out, since this processor has no {flag}: {onednn}", flush=True)
    *smaller, largest = [limit for limit in LIMITS if limit[0] in FLAGS]
    print(f"left out, since make test runs it: {largest[2]}", flush=True)
    for _, engine, onednn in smaller:
        print(f"limit: {onednn}", flush=True)
        ran.append(onednn)
        limits = {"GLUON_AMP_ISA": engine, "DNNL_MAX_CPU_ISA": onednn, "OMP_WAIT_POLICY": "passive"}
        variables = {**os.environ, **limits}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile",
                   "-m", "isa", str(TESTS), *sys.argv[1:]]
        if subprocess.run(command, env=variables).returncode:
            failed.append(onednn)
    print(f"ran with the limits: {', '.join(ran) or 'none'}", flush=True)
    sys.exit(f"failed with the limit {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
