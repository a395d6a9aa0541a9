"""Imports a library, waits for a line, and runs a script: python turn.py LIBRARY SCRIPT [ARGUMENT]

Many such processes import at the same time, and then use the GPU one after another.
"""
import importlib
import runpy
import sys
from pathlib import Path

importlib.import_module(sys.argv[1])
sys.stdin.readline()
del sys.argv[:2]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
