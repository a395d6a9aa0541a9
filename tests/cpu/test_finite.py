import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from gluon_amp.cpu.arrays import all_finite, squares
from trainers import recorded

SIZES = [1, 17, 40001]


def array(values, dtype, device=None):
    return mx.nd.array(values, dtype=dtype, ctx=device or mx.cpu())


def test_only_finite_float16_values_pass():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    assert all_finite([array(halves[np.isfinite(halves)], "float16")])
    for bad in halves[~np.isfinite(halves)]:
        assert not all_finite([array([1, bad], "float16")])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_nonfinite_value_is_found_at_any_position(size, dtype, bad, rng):
    for place in {0, size // 2, size - 1}:
        values = rng.standard_normal(size)
        assert all_finite([array(values, dtype)])
        values[place] = bad
        assert not all_finite([array(np.ones(3), "float32"), array(values, dtype)])


def test_mixed_types_and_devices():
    arrays = [array([1], "float16"), array([1e38], "float32"), array([1], "float32", mx.cpu(1)),
              array([65504], "float16", mx.cpu(1))]
    assert all_finite(arrays)
    assert not all_finite([*arrays, array([np.inf], "float16", mx.cpu(1))])


def test_each_array_has_its_own_sum_of_squares(rng):
    sizes = [int(size) for size in 10 ** rng.uniform(0, 4.9, 300)]
    values = [rng.standard_normal(size).astype(rng.choice(["float16", "float32", "float64"]))
              for size in sizes]
    expected = [np.square(v.astype(np.float64)).sum() for v in values]
    assert max(sizes) > 32768 > min(sizes)  # with and without threads
    np.testing.assert_allclose(squares([array(v, v.dtype) for v in values]), expected, rtol=1e-12)


def test_row_sparse_arrays_are_summed():
    sparse = mx.nd.array([[0, 0], [3, 4], [0, 0]]).tostype("row_sparse")
    empty = mx.nd.sparse.zeros("row_sparse", (3, 2))
    assert squares([sparse, array([2], "float16"), empty]).tolist() == [25, 4, 0]


def test_empty_list_is_finite():
    assert all_finite([])


def test_other_types_are_refused():
    with pytest.raises(mx.MXNetError, match="takes arrays of floating numbers"):
        all_finite([array([1], "int32")])


@pytest.mark.parametrize("runs", [True, False])
def test_fresh_grad_marks_match_mxnet(runs, monkeypatch):
    if not runs:
        monkeypatch.setattr(library, "_table", None)
    weights = [mx.nd.ones(3) for _ in range(3)]
    for weight in weights:
        weight.attach_grad()
    recorded(lambda: (weights[0] * weights[2]).sum()).backward()
    assert list(map(bool, library.marks(weights))) == [True, False, True]
    assert list(map(bool, library.marks(weights, clear=True))) == [True, False, True]
    assert not any(library.marks(weights))
    assert not any(weight._fresh_grad for weight in weights)
