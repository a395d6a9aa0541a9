"""`gluon-amp doctor --verify` on the computing GPU."""
import mxnet as mx
from gluon_amp.tools import verify

UNKNOWN = {"max", "take", "sort"}  # their kernels are unknown to the computing GPU


def test_all_cases_with_known_kernels_agree():
    facts = verify.verify(mx.gpu(0))
    assert {row["case"] for row in facts["cases"] if row["error"]} == UNKNOWN
