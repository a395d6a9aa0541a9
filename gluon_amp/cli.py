"""The command `gluon-amp`."""
import argparse
from typing import List, Optional

from . import __version__


def main(arguments: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="gluon-amp", description="Mixed-precision training for Apache MXNet Gluon.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train float32 and float16 side by side")
    demo.add_argument("--epochs", type=int, default=8, help="passes over the images (8)")
    options = parser.parse_args(arguments)

    from .demo import demo as run_demo
    run_demo(epochs=options.epochs)


if __name__ == "__main__":
    main()
