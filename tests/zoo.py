"""`make test-zoo`: runs test_zoo.py in a venv for each package of zoo.txt, which it makes first."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".zoo"
TOOLS = ("pytest==8.3.5", "setuptools==59.8.0", "wheel==0.45.1", "matplotlib==3.7.5", "tqdm")


def venv(package, version, requirements):
    """The Python of the package's venv; None if there is no Python of that version here."""
    python = FOLDER / package / "bin" / "python"
    if not (FOLDER / package / "installed").exists():
        found = shutil.which(f"python{version}")
        if found is None:
            return None
        subprocess.run([found, "-m", "venv", "--clear", str(FOLDER / package)], check=True)
        install = [str(python), "-m", "pip", "install", "-q"]
        *before, last = requirements
        subprocess.run([*install, *TOOLS, *(r for r in before if r != "--no-deps")], check=True)
        # the package itself last: some are built with what was installed before
        options = ["--no-build-isolation", *(r for r in before if r == "--no-deps")]
        subprocess.run([*install, *options, last], check=True)
        (FOLDER / package / "installed").touch()
    return python


def main():
    failed = []
    for line in (ROOT / "tests" / "zoo.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        package, version, *requirements = line.split()
        python = venv(package, version, requirements)
        if python is None:
            print(f"{package}: needs python{version}, which is not in PATH")
            failed.append(package)
            continue
        print(f"{package}:", flush=True)
        done = subprocess.run(
            [str(python), "-W", "ignore", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
             "tests/test_zoo.py"], cwd=str(ROOT),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"})
        if done.returncode:
            failed.append(package)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
