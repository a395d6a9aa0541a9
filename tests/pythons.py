"""`make -C tests pythons`, `make -C tests wheel`: the wheel on each installed CPython from 3.8 on.

Each Python gets an empty environment under .pythons for each numpy of `NUMPYS`, with MXNet as in
README and no compiler on PATH. `test-wheel` imports and trains there; `test-pythons` runs
pythons_story.py. PYTHONS="3.8 3.13" selects versions.
"""
import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MINORS = range(8, 15)
NEWEST_NUMPY_1, NUMPY_2 = "numpy 1", "numpy 2"  # the newest for the Python
# numpy 1.20, with the last pillow for it: later ones, which reports use, require 1.21
NUMPYS = {8: ("numpy==1.20.3 pillow==10.2.0", NEWEST_NUMPY_1), 13: (NUMPY_2,),
          14: (NUMPY_2,)}
# Set by `make` and by the checkout.
INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV", "GLUON_AMP_ISA",
             "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "CXX")
# A network learns in float16.
TRAIN = """
import gluon_amp as amp, mxnet as mx, numpy
from mxnet import autograd, gluon, nd
net = gluon.nn.Dense(4)
net.initialize()
amp.convert(net)
data, label = nd.random.uniform(shape=(8, 8)), nd.arange(8) % 4
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
losses = []
for _ in range(5):
    with autograd.record():
        loss = loss_fn(net(data), label)
    trainer.backward(loss)
    trainer.step(8)
    losses.append(float(loss.mean().asscalar()))
assert net.weight.data().dtype == numpy.float16 and losses[-1] < losses[0], losses
print("trains: numpy", numpy.__version__)
"""


def run(*command, cwd=None, timeout=600, **variables):
    env = {name: value for name, value in os.environ.items() if name not in INHERITED}
    env.update(variables)
    return subprocess.run([str(word) for word in command], cwd=cwd, env=env, timeout=timeout,
                          capture_output=True, text=True)


def output(*command, **kwargs):
    done = run(*command, **kwargs)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@functools.lru_cache(maxsize=None)
def find_python(minor):
    """A Python 3.minor with venv from PATH or pyenv, or None."""
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for path in [shutil.which(name), *sorted(pyenv.glob(f"3.{minor}.*/bin/{name}"))]:
        if path and run(path, "-c", "import ensurepip, venv").returncode == 0:
            return path
    return None


def numpys(minor):
    return NUMPYS.get(minor, (NEWEST_NUMPY_1, NUMPY_2))


def environment(python, wheel, folder, numpy):
    """The Python of an environment with the wheel and MXNet, installed as in README. PATH has no
    commands."""
    output(python, "-m", "venv", folder)
    installed = folder / "bin" / "python"

    def install(*what):
        output(installed, "-m", "pip", "install", "-q", *what, cwd=folder, PATH=str(folder))

    if numpy == NUMPY_2:
        install(f"{wheel}[numpy2,tools]")
        install("--no-deps", "mxnet==1.9.1")
    else:
        install(f"{wheel}[cpu]", *([] if numpy == NEWEST_NUMPY_1 else numpy.split()))
    return installed


def attempt(python, wheel, folder, numpy, code):
    """The last line of the output, or the error."""
    try:
        installed = environment(python, wheel, folder, numpy)
        return True, output(installed, *code, cwd=folder, OMP_NUM_THREADS="2").splitlines()[-1]
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(what):
    wheel = max((ROOT / "dist").glob("*.whl"), key=os.path.getmtime)
    code = ["-c", TRAIN] if what == "train" else [ROOT / "tests" / "pythons_story.py"]
    chosen = os.environ.get("PYTHONS", "").split()
    failed = passed = 0
    for minor in MINORS:
        python = find_python(minor)
        if chosen and f"3.{minor}" not in chosen:
            continue
        if python is None:
            print(f"3.{minor}: neither on PATH nor in pyenv", flush=True)
            continue
        for numpy in numpys(minor):
            begun = time.time()
            folder = ROOT / ".pythons" / f"3.{minor}-{numpy.replace(' ', '-')}"
            shutil.rmtree(folder, ignore_errors=True)
            fine, said = attempt(python, wheel, folder, numpy, code)
            failed, passed = failed + (not fine), passed + fine
            print(f"3.{minor}, {numpy}: {'passed' if fine else 'FAILED'} in "
                  f"{time.time() - begun:.0f} s: {said}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main(sys.argv[1])
