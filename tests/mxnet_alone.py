"""MXNet without gluon_amp, on a numpy that MXNet alone does not import with."""
from pathlib import Path

from gluon_amp import _numpy

# before `import mxnet` in a process of its own
MXNET_ALONE = f"""
import sys
sys.path.insert(0, {str(Path(_numpy.__file__).parent)!r})
import _numpy
_numpy.install()
del sys.path[0]
"""
