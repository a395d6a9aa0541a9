"""Counts the traces of converted networks."""
from collections import Counter
from contextlib import contextmanager
from unittest import mock


@contextmanager
def at_most_traces(most):
    """Fails if a converted block is traced more than `most` times. Yields the traces by block."""
    from gluon_amp.gluon.converted import ConvertedHybridBlock
    trace, traces = ConvertedHybridBlock._trace, Counter()

    def counted(block, *args):
        traces[block] += 1
        assert traces[block] <= most, f"{block.name} is traced more than {most} times"
        return trace(block, *args)

    with mock.patch.object(ConvertedHybridBlock, "_trace", counted):
        yield traces
