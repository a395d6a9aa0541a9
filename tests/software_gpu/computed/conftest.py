import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gluon_amp  # noqa: F401  (before mxnet)
