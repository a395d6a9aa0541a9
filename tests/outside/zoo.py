"""`make -C tests zoo`: creates a venv for each package of zoo.txt and runs test_zoo.py in it."""
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
from pythons import find_python  # noqa: E402

FOLDER = ROOT / ".zoo"
TOOLS = ("pytest==8.3.5", "setuptools==59.8.0", "wheel==0.45.1", "matplotlib==3.7.5", "tqdm")


def packages(file="zoo.txt"):
    """The Python version and requirements of each package in a file."""
    lines = (line.split() for line in (HERE / file).read_text().splitlines()
             if not line.startswith("#"))
    return {package: (version, requirements) for package, version, *requirements in lines}


def venv(package, file="zoo.txt"):
    """Creates the package's venv and returns its Python; exits if no such Python is installed."""
    version, requirements = packages(file)[package]
    python = FOLDER / package / "bin" / "python"
    installed, all_requirements = FOLDER / package / "installed", " ".join([version, *requirements])
    if not installed.exists() or installed.read_text() != all_requirements:
        found = find_python(int(version.split(".")[1]))
        if found is None:
            sys.exit(f"{package} needs python{version} on PATH or in pyenv")
        subprocess.run([found, "-m", "venv", "--clear", str(FOLDER / package)], check=True)
        install = [str(python), "-m", "pip", "install", "-q"]
        *before, last = requirements
        subprocess.run([*install, *TOOLS, *(r for r in before if r != "--no-deps")], check=True)
        # the package last: some are built with packages installed before
        options = ["--no-build-isolation", *(r for r in before if r == "--no-deps")]
        subprocess.run([*install, *options, last], check=True)
        installed.write_text(all_requirements)
    return python


def main():
    failed = []
    for package in packages():
        python = venv(package)
        print(f"{package}:", flush=True)
        done = subprocess.run(
            [str(python), "-W", "ignore", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
             "tests/outside/test_zoo.py"], cwd=str(ROOT),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"})
        if done.returncode:
            failed.append(package)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
