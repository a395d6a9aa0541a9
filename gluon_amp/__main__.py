"""`python -m gluon_amp SCRIPT` runs a script; anything else is the command `gluon-amp`."""
import sys

from .tools import script
from .tools.cli import main

if __name__ == "__main__":
    if sys.argv[1:] and script.is_script(sys.argv[1]):
        script.run(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(main())
