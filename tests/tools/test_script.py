"""`python -m gluon_amp SCRIPT` runs old scripts for MXNet unchanged."""

import gluon_amp
import processes
import pytest

pytestmark = pytest.mark.long

PUBLISHED = """
import argparse
import numpy as np
import mxnet as mx
from mxnet import autograd, gluon
from common import data

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
args = parser.parse_args()

class Squares(gluon.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return np.full((2,), i, dtype=np.float), np.float32(data.square(i))

def main():
    net = gluon.nn.Dense(1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
    for epoch in range(args.epochs):
        for x, y in gluon.data.DataLoader(Squares(), batch_size=4, num_workers=2):
            with autograd.record():
                loss = ((net(x.astype("float32")) - y) ** 2).mean()
            loss.backward()
            trainer.step(1)
    print("epochs", args.epochs, np.bool is bool, np.isfinite(loss.asscalar()))

if __name__ == "__main__":
    main()
"""


def run(*arguments, **variables):
    return processes.run("-m", "gluon_amp", *arguments, **variables)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path
    return write


def test_published_script_trains_unchanged(script, tmp_path):
    tmp_path.joinpath("common").mkdir()
    tmp_path.joinpath("common", "data.py").write_text(
        "import numpy\ndef square(i):\n    return numpy.int(i) ** 2\n")
    done = run(script(PUBLISHED), "--epochs", "2")
    assert done.stdout == "epochs 2 True True\n", done.stderr


def test_script_runs_as_main(script):
    path = script("import pickle, sys\n"
                  "class Mine: pass\n"
                  "assert type(pickle.loads(pickle.dumps(Mine()))) is Mine\n"
                  "print(__name__, __file__, sys.argv, sys.path[0])")
    assert run(path, "report", "-x").stdout \
        == f"__main__ {path} {[str(path), 'report', '-x']} {path.parent}\n"


def test_exit_code_and_errors_of_script_are_kept(script):
    assert run(script("import sys; sys.exit(3)")).returncode == 3
    done = run(script("import mxnet\nundefined"))
    assert done.returncode == 1
    assert done.stderr.endswith("NameError: name 'undefined' is not defined\n")
    assert 'train.py", line 2' in done.stderr


def test_other_modules_get_unmodified_numpy(script):
    assert run(script("import numpy as np, scipy.stats, sys\n"
                      "print('float' in vars(np), 'float' in vars(sys.modules['numpy']),"
                      " scipy.stats.norm.cdf(np.float(0)))"), **processes.WITH_ALL).stdout \
        == "True False 0.5\n"


def test_missing_script_is_one_line():
    done = run("nosuch.py")
    assert (done.returncode, done.stderr) == (1, "gluon-amp: there is no script nosuch.py\n")


@pytest.mark.thorough
def test_module_without_script_runs_gluon_amp_command():
    assert run("--version").stdout == f"gluon-amp {gluon_amp.__version__}\n"
    assert run().returncode == 2
    assert "report" in run("report", "--help").stdout
    assert "invalid choice: 'nosuch'" in run("nosuch").stderr
