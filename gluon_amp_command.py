"""Where the command `gluon-amp` begins: outside the package, whose import itself can fail.

`gluon_amp/_mxnet.py` says in one sentence why MXNet cannot be imported. Here that becomes a line on
stderr, and the exit code 1.
"""
import json
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
        if "doctor" in arguments and "--json" in arguments:
            print(json.dumps({"trains": False, "reason": str(error)}))
        sys.exit(f"gluon-amp: {error}")
    sys.exit(command(arguments))


if __name__ == "__main__":
    main()
