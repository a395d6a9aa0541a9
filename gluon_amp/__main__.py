"""`python -m gluon_amp` is the command `gluon-amp`."""
import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
