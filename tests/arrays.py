"""Arrays in nested lists, tuples and dictionaries."""
import numpy as np


def flat(nest):
    """Yields the arrays in order."""
    if isinstance(nest, (list, tuple, dict)):
        for part in nest.values() if isinstance(nest, dict) else nest:
            yield from flat(part)
    elif nest is not None:
        yield nest


def numbers(nest):
    return [array.asnumpy() for array in flat(nest)]


def same(one, other):
    """Whether two lists or two dictionaries have equal arrays."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and same([*one.values()], [other[key] for key in one])
    return len(one) == len(other) and all(map(np.array_equal, one, other))
