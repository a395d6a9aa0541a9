"""The entry point of the command `gluon-amp`, outside the package, because its import can fail.

If MXNet cannot be imported, the command prints the error of `gluon_amp/_mxnet.py` in one line to
stderr, and exits with 1.
"""
import sys


def main() -> None:
    arguments = sys.argv[1:]
    try:
        from gluon_amp.tools.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        if "--debug" in arguments:
            raise
        sys.exit(f"gluon-amp: {error}")
    sys.exit(command(arguments))


if __name__ == "__main__":
    main()
