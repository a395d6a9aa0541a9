"""Imports MXNet without gluon_amp with a numpy that MXNet alone fails to import with."""
from pathlib import Path

from gluon_amp import _numpy

# before `import mxnet` in a new process
MXNET_ALONE = f"""
import sys
sys.path.insert(0, {str(Path(_numpy.__file__).parent)!r})
import _numpy
_numpy.install()
del sys.path[0]
"""
