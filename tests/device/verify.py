"""`gluon-amp doctor --verify FILE`. With --small, on the computing GPU, the cases whose kernels it
lacks may fail."""
import sys

from gluon_amp.tools import cli, verify

UNKNOWN = {"max", "take", "sort"}  # to the computing GPU: tests/software_gpu/computed


def main(file, *small):
    if small:
        import mxnet as mx
        facts = verify.verify(mx.gpu(0))
        print(verify.describe(facts))
        return {row["case"] for row in facts["cases"] if row["error"]} != UNKNOWN
    return cli.main(["doctor", "--verify", file])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
