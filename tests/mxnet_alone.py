"""Imports MXNet without gluon_amp with a numpy that MXNet alone fails to import with."""
from pathlib import Path

# before `import mxnet` in a new process
MXNET_ALONE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "gluon_amp")!r})
import numpy_names
numpy_names.install()
del sys.path[0]
"""
