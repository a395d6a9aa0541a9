raise ImportError("MXNet imports it if it is installed: see tests/processes.py")
