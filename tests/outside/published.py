"""`make -C tests published SOURCES=FOLDER`: unmodified published scripts in float16 on a CPU.

SOURCES has three checkouts: `mxnet` (apache/mxnet, tag 1.9.1), `gluon-cv` (dmlc/gluon-cv, tag
v0.10.0) and `gluon-nlp` (dmlc/gluon-nlp, tag v0.10.0). Each script runs as
`python -m gluon_amp SCRIPT ...`, in float32 and in float16, with the same seeds and data. MXNet's
scripts run in this environment, the others in those of zoo.py. All take a CPU unless a flag names
GPUs.

A script passes if float32 makes at least STEPS steps with a decreasing loss, and float16's loss
differs at no step by more than BOUND of that decrease. Losses that are equal at all steps fail:
nothing ran in float16. The printed table lists the substitutions.

In the scripts' processes, this file makes the substitutions and records the losses.
"""
import io
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zoo

ROOT = Path(__file__).parents[2]
STEPS = 24
BOUND = 0.1  # float16 at half the learning rate differs by 0.18 to 0.7
WORKERS = 2
PACKAGES = {"mxnet": None, "gluon-cv": "gluoncv", "gluon-nlp": "gluonnlp"}  # of zoo.txt
EXAMPLES = 192
WORDS = "a an the film story is was good great fine bad poor dull and but very quite".split()

# float16: additional arguments for float16; substituted: functions of this file; given: files that
# the script would download; ends: the exception that ends it, in float32 too
Script = namedtuple("Script", "path arguments float16 substituted given ends",
                    defaults=("--dtype float16", (), (), None))

IMAGES = f"{EXAMPLES} drawn images"
GLUON = "mxnet/example/gluon/image_classification.py"
DUMMY = "--dataset dummy --model mobilenet0.25 --batch-size 2 --epochs 1 --lr 0.01"
SYMBOLS = "mxnet/example/image-classification/"
RESNET_18 = "--network resnet --num-layers 18 --num-classes 10 --image-shape 3,64,64"
SCRIPTS = [
    Script(GLUON, f"{DUMMY} --mode hybrid"),
    Script(GLUON, f"{DUMMY} --mode symbolic", ends="no attribute 'save_parameters'"),
    Script(GLUON, "--dataset imagenet --data-dir {files} -j 0 --model mobilenet0.25 "
           "--batch-size 16 --epochs 2 --lr 0.01", given=(IMAGES,)),
    Script(SYMBOLS + "train_imagenet.py", f"--benchmark 1 {RESNET_18} --batch-size 8 "
           "--num-examples 192 --num-epochs 1 --lr 0.01"),
    Script(SYMBOLS + "fine-tune.py", f"{RESNET_18} --pretrained-model {{files}}/pretrained "
           "--load-epoch 1 --data-train {files}/images.rec --data-nthreads 1 --batch-size 16 "
           f"--num-examples {EXAMPLES} --num-epochs 3",
           given=(IMAGES, "weights of one step of train_imagenet.py")),
    Script(SYMBOLS + "train_cifar10.py", "--network resnet --num-layers 20 --data-nthreads 1 "
           f"--batch-size 32 --num-examples {EXAMPLES} --num-epochs 4 --lr 0.01", given=(IMAGES,)),
    Script("gluon-cv/scripts/classification/imagenet/train_imagenet.py", "--model resnet18_v1 "
           "--mode hybrid --data-dir {files} --input-size 64 -j 0 --batch-size 16 --num-epochs 2 "
           "--lr 0.003", given=(IMAGES,)),
    Script("gluon-cv/scripts/classification/cifar/train_cifar10.py", "--model cifar_resnet20_v1 "
           "--mode hybrid -j 0 --batch-size 32 --num-epochs 4 --lr 0.01", float16="",
           substituted=("any_sha1", "amp_init"), given=(IMAGES,)),
    # It clips scaled gradients: with the default epsilon, Adam's steps in float16 would be smaller,
    # on a GPU too.
    Script("gluon-nlp/scripts/bert/finetune_classifier.py", "--task_name SST --max_len 16 "
           "--batch_size 16 --epochs 2 --lr 5e-4 --epsilon 1e-13",
           substituted=("any_sha1", "small_bert"), given=(f"{EXAMPLES} drawn sentences",)),
]
PRETRAINED = Script(SYMBOLS + "train_imagenet.py", f"--benchmark 1 {RESNET_18} --batch-size 8 "
                    "--num-examples 8 --num-epochs 1 --model-prefix {files}/pretrained")


# ---- in the process of a script


def seed(mx):
    import numpy as np
    for function in (random.seed, np.random.seed, mx.random.seed):
        function(0)


def begin():
    """Sets seeds, makes the substitutions, and records the loss of each training step."""
    import numpy as np
    from gluon_amp._mxnet import mx
    seed(mx)
    for name in os.environ["GLUON_AMP_SUBSTITUTED"].split():
        globals()[name](mx)
    recorded = open(os.environ["GLUON_AMP_LOSSES"], "w")  # noqa: SIM115  (until the process ends)
    loss_of, forward_backward = mx.gluon.loss.Loss.__call__, mx.mod.Module.forward_backward

    def record(losses):
        print(losses.mean(dtype="float64"), file=recorded, flush=True)

    def recorded_loss(self, *args):
        loss = loss_of(self, *args)
        if mx.autograd.is_recording():
            record(loss.asnumpy())
        return loss

    def recorded_batch(self, batch):
        forward_backward(self, batch)
        probabilities, labels = self.get_outputs()[0].asnumpy(), batch.label[0].asnumpy()
        record(-np.log(probabilities[np.arange(len(labels)), labels.astype(int)]))

    mx.gluon.loss.Loss.__call__ = recorded_loss
    mx.mod.Module.forward_backward = recorded_batch


def any_sha1(mx):
    """downloaded files have any checksum"""
    mx.gluon.utils.check_sha1 = mx.gluon.data.vision.datasets.check_sha1 = lambda *_: True


def amp_init(mx):
    """mx.contrib.amp.init() for float16, which the script has no flag for"""
    if os.environ["GLUON_AMP_TYPE"] == "float16":
        from mxnet.contrib import amp
        amp.init()


def small_bert(mx):
    """two layers of 64 units with random weights and a small vocabulary for pretrained BERT"""
    import gluonnlp as nlp
    bert = nlp.model.bert
    bert.bert_hparams["bert_12_768_12"].update(
        num_layers=2, units=64, embed_size=64, hidden_size=128, num_heads=4)
    bert._load_vocab = lambda *_, **__: nlp.vocab.BERTVocab(nlp.data.count_tokens(WORDS))
    bert._load_pretrained_params = lambda net, name, dataset, root, ctx, **_: net.initialize(
        mx.init.Normal(0.02), ctx=ctx)


# ---- files that scripts would download


def png(image):
    """The bytes of a file."""
    from PIL import Image
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def draw(folder):
    """Images with a coarse pattern for each of ten classes, and sentences of two vocabularies."""
    import numpy as np
    from gluon_amp._mxnet import mx
    rng = np.random.RandomState(0)
    patterns = rng.randint(40, 216, (10, 4, 4, 3))
    labels = np.arange(EXAMPLES) % 10

    def image(label, size):
        large = np.kron(patterns[label], np.ones((size // 4, size // 4, 1)))
        return (large + rng.uniform(-40, 40, large.shape)).astype(np.uint8)

    record = mx.recordio.MXRecordIO(str(folder / "images.rec"), "w")
    for i, label in enumerate(labels):
        picture = png(image(label, 72))
        record.write(mx.recordio.pack(mx.recordio.IRHeader(0, label, i, 0), picture))
        for part in ("train", "val"):
            path = folder / part / f"n{1440764 + label:08}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture)
    record.close()
    for name in ("train", "val"):  # of MXNet's train_cifar10.py
        path = folder / "data" / f"cifar10_{name}.rec"
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(folder / "images.rec")
    cifar, sst = (folder / "datasets" / name for name in ("cifar10", "glue_sst"))
    for made in (cifar, sst):
        made.mkdir(parents=True)
    images = [bytes([label]) + image(label, 32).transpose(2, 0, 1).tobytes() for label in labels]
    (cifar / "test_batch.bin").write_bytes(images[0])
    for i in range(5):
        (cifar / f"data_batch_{i + 1}.bin").write_bytes(b"".join(images[i::5]))
    sentences = [" ".join(rng.choice(WORDS[i % 2::2], 8)) for i in range(EXAMPLES)]
    for part, row in (("train", "{1}\t{0}"), ("dev", "{1}\t{0}"), ("test", "{0}\t{1}")):
        rows = [row.format(i % 2, sentence) for i, sentence in enumerate(sentences)]
        (sst / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *rows]))


# ---- the command


def run_recorded(python, command, substituted, scratch, begins, environment):
    """Runs a script in a folder, after one of these files. Returns the loss of each step, and the
    last line of output if it failed."""
    losses = scratch / "losses"
    losses.touch()
    (scratch / "sitecustomize.py").write_text(f"import {begins}\n{begins}.begin()\n")
    done = subprocess.run(
        [str(python), "-W", "ignore", "-m", "gluon_amp", *command],
        cwd=scratch, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": f"{scratch}:{ROOT}:{ROOT}/tests/outside",
             "OMP_NUM_THREADS": "1", "GLUON_AMP_SUBSTITUTED": " ".join(substituted),
             "GLUON_AMP_LOSSES": str(losses), **environment})
    said = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    return [*map(float, losses.read_text().split())], said[-1] if done.returncode else ""


def train(script, dtype, sources, files):
    """Runs a script. Returns the loss of each step, and the last line of output if it failed."""
    package = PACKAGES[script.path.split("/")[0]]
    python = zoo.venv(package) if package else sys.executable
    arguments = f"{script.arguments} {script.float16 if dtype == 'float16' else ''}"
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "data").symlink_to(files / "data")
        return run_recorded(
            python, [str(sources / script.path), *arguments.format(files=files).split()],
            script.substituted, Path(scratch), "published",
            {"MXNET_HOME": str(files), "GLUON_AMP_TYPE": dtype})


def judge(script, full, half):
    """The largest difference relative to the decrease in float32, and the failure if any."""
    (losses, said), (losses16, said16) = full, half
    fall = losses[0] - losses[-1] if losses else 0
    differences = [abs(a - b) / (fall or 1) for a, b in zip(losses, losses16)]
    largest = max(differences, key=lambda d: (d != d, d), default=0)  # NaN counts as the largest
    for dtype, error in (("float32", said), ("float16", said16)):
        if bool(error) != bool(script.ends) or error and not re.search(script.ends, error):
            return largest, f"{dtype} ends with {error or 'no error'}"
    if len(losses) < STEPS or not fall > 0:
        return largest, f"float32 does not train: {len(losses)} steps, and the loss falls by {fall}"
    if len(losses) != len(losses16):
        return largest, f"float16 takes {len(losses16)} steps"
    if largest == 0:
        return largest, "nothing runs in float16"
    return largest, "" if largest <= BOUND else "float16 trains otherwise"


def row(script, full, half):
    """A row of the table, and whether the script passes."""
    largest, wrong = judge(script, full, half)
    verdict = wrong or ("passes; float32 ends so, too: " + full[1] if script.ends else "passes")
    last, last16 = (losses[-1] if losses else float("nan") for losses, _ in (full, half))
    package = PACKAGES[script.path.split("/")[0]]
    packages = [zoo.packages()[package][1][-1]] if package else []
    substituted = "; ".join([*packages, *script.given,
                             *(globals()[name].__doc__ for name in script.substituted)])
    return (f"{script.path:{WIDTH}}{len(full[0]):6}{last:9.4f}{last16:9.4f}{largest:12.4f}  "
            f"{verdict}\n    {script.arguments} [{script.float16}]\n    "
            f"substituted: {substituted or 'nothing'}", not wrong)


WIDTH = max(len(script.path) for script in SCRIPTS)


def main(folder):
    missing = sorted({script.path for script in SCRIPTS
                      if not folder or not (Path(folder) / script.path).is_file()})
    if missing:
        sys.exit("make -C tests published SOURCES=FOLDER needs the checkouts that "
                 f"tests/outside/published.py names. Missing: {', '.join(missing)}")
    for package in filter(None, PACKAGES.values()):
        zoo.venv(package)
    sources = Path(folder).resolve()
    with tempfile.TemporaryDirectory() as files, ThreadPoolExecutor(WORKERS) as pool:
        files = Path(files)
        draw(files)
        _, error = train(PRETRAINED, "float32", sources, files)
        if error:
            sys.exit(f"{PRETRAINED.path} ends with {error}")
        runs = [pool.submit(train, script, dtype, sources, files)
                for script in SCRIPTS for dtype in ("float32", "float16")]
        print(f"{'script':{WIDTH}} steps  float32  float16  difference  verdict", flush=True)
        passed = []
        for script, full, half in zip(SCRIPTS, runs[::2], runs[1::2]):
            text, passes = row(script, full.result(), half.result())
            print(text, flush=True)
            passed.append(passes)
    print("float32, float16: the last loss. difference: the largest of a step, as a part of the\n"
          f"fall of float32's loss; at most {BOUND}. substituted in all: the seeds.")
    sys.exit(0 if all(passed) else f"{passed.count(False)} of {len(passed)} scripts fail")


if __name__ == "__main__":
    main(os.environ.get("SOURCES"))
