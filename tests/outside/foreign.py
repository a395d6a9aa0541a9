"""`make -C tests foreign SOURCES=FOLDER`: unmodified third-party scripts in 16 bits on a CPU.

SOURCES has the checkouts that SCRIPTS name (mxnet: tag 1.9.1; mxnet-pull-14367: the head of that
pull request; gluon-cv and gluon-nlp: v0.10.0; gluonts: v0.14.4; HKO-7: sxjscience's; mtcnn:
Seanlinx's; mtcnn-exp: yangfly's). Each script runs for a dozen steps on random data in float32,
float16 and bfloat16. A script's own flag selects float16 if there is one. Otherwise this file
replaces MXNet's Trainer and Module with gluon_amp's, and applies `gluon_amp.convert`.

Among the networks are: outputs with `__layout__` in a chain of Modules (HKO-7), `group2ctxs`
(matrix_factorization), hard examples that a CustomOp selects (retinaface; mtcnn, whose only output
it is) or the loss (mtcnn-exp), csr inputs and row_sparse gradients (SkipGram), GPVAR.

A script passes if the losses in 16 bits differ from float32's by at most SHARE of the range of
float32's (root mean square over all steps), or by at most twice the largest difference of DRAWS
float32 runs whose initial weights are changed by a relative NOISE. Losses that are equal at all
steps fail: nothing ran in 16 bits. Scripts that fail in float32 are listed with the error.

The first network of each file of imgclsmob takes two steps; the larger float32 loss replaces the
range.

NAMES="arcface hand" runs the scripts whose path or arguments contain a name: NAMES=imgclsmob all
of its files, NAMES=msdnet one. Without NAMES, every sixth of its files runs.

In the scripts' processes, this file makes the substitutions and records the losses.
"""
import gc
import json
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import published
import zoo
from gluon_amp._mxnet import mx

STEPS = 12
NOISE = {"float16": 2**-6, "bfloat16": 2**-4}
DRAWS = 3  # of this noise; the largest effect counts
SHARE = {"float16": 0.01, "bfloat16": 0.08}  # of the range of float32's losses
MOST_TRACES = 8  # of a block: in training and prediction, for each nesting of its arguments
WORKERS = 2

# own: the arguments that enable float16; without them, this file converts the script's networks.
# missing: packages that are not installed; given: files that the script would download.
# substituted, start: functions of this file, the latter in place of running the script.
# loss: the outputs of a Module with the loss; "Loss": the results of Gluon losses, if the script
# scales its loss. here: runs in this environment, not in that of foreign.txt.
# keep: the argument of `convert`. scale: the Trainer's loss scale in float16. onednn: 0 if oneDNN
# fails in float32. root: a folder to import from.
Script = namedtuple(
    "Script", "path arguments own missing given substituted start loss here keep scale "
    "onednn root",
    defaults=("", None, (), (), (), None, "softmax", False, "", "dynamic", 1, ""))

ARCFACE = "insightface/recognition/arcface_mxnet/"
FACES = "--network {} --loss arcface --per-batch-size 4 --lr 0.0001 --verbose 6"
MXNET = "mxnet/example/gluon/"
RN50 = ("--data-backend synthetic --gpus 0 --batch-size 4 --image-shape 3,64,64 --num-classes 1000 "
        "--num-examples 64 --num-epochs 2 --mode train --dtype float32 --lr 0.01")
NHWC = "".join(f" --{of}-layout NHWC" for of in ("input", "conv", "batchnorm", "pooling"))
SCRIPTS = [
    Script(ARCFACE + "train.py", FACES.format("m05"), given=("faces",)),
    Script(ARCFACE + "train_parall.py", FACES.format("m05"), given=("faces",),
           substituted=("gpus_are_cpus",), loss="mulscalar"),
    Script(ARCFACE + "train_parall.py", FACES.format("r50"), own="--fp16-scale 128",
           given=("faces",), substituted=("gpus_are_cpus",), loss="mulscalar"),
    Script("insightface/detection/retinaface/train.py", "--network mnet --lr 0.001",
           given=("boxes",), start="retinaface", loss="cls_prob|bbox_loss|landmark_loss",
           root="insightface/detection/retinaface", scale="none"),
    Script("CrazyAra/DeepCrazyhouse/src/training/trainer_agent_gluon.py",
           missing=("mxboard", "rtpt", "zarr"), start="crazyara", root="CrazyAra"),
    Script("handwritten-text-recognition/ocr/handwriting_line_recognition.py",
           "-g -1 -e 3 -s 4 -a 32", missing=("mxboard",),
           substituted=("no_workers", "no_weights"), start="handwriting",
           root="handwritten-text-recognition"),
    Script("gluon-nlp/scripts/bert/run_pretraining.py",
           "--data masked.npz --data_eval masked.npz --optimizer lamb --num_dataset_workers 1 "
           "--num_batch_workers 1 --total_batch_size 16 --accumulate 2 --num_steps 20 "
           "--lr 1e-3 --warmup_ratio 0.1 --dtype float32", own="--dtype float16",
           given=("masked",), substituted=("small_bert",), loss="Loss"),
    Script("gluon-cv/scripts/segmentation/train.py",
           "--model fcn --backbone resnet50 --dataset drawn --crop-size 64 --base-size 64 "
           "--batch-size 4 --workers 0 --no-cuda --ngpus 1 --syncbn --no-val --epochs 3 --lr 0.001",
           substituted=("segments", "no_weights"), scale="none"),
    Script("gluon-cv/scripts/detection/center_net/train_center_net.py",
           "--data-shape 64 --batch-size 4 -j 0 --epochs 4",
           given=("objects",), substituted=("gpus_are_cpus", "no_weights")),
    Script("gluon-cv/scripts/depth/train.py",
           "--model_zoo monodepth2_resnet18_kitti_stereo_640x192 --model_zoo_pose "
           "monodepth2_resnet18_posenet_kitti_mono_640x192 --pretrained_base "
           "--no_gpu --height 64 --width 96 --batch_size 2 --num_workers 0 --frame_ids 0 -1 1",
           given=("drives",), substituted=("frames", "no_weights")),
    Script("gluon-cv/scripts/gan/wgan/train_wgan.py",
           "--dataset cifar10 --dataroot none --imageSize 32 --batchSize 8 --ngf 16 --ndf 16",
           missing=("mxboard", "lsun"), substituted=("drawn_sets", "no_workers")),
    Script("gluon-cv/scripts/gan/stylegan/train.py", "--gpu_ids -1 --max_size 8",
           missing=("lmdb",), substituted=("gpus_are_cpus",)),
    Script(MXNET + "sn_gan/train.py", "--batch-size 8", substituted=("drawn_sets",)),
    Script(MXNET + "tree_lstm/main.py", "--batch_size 2 --data . --word_embed glove.txt",
           given=("sentences",)),
    Script(MXNET + "lipnet/main.py", "--batch_size 2 --num_gpus 0 --image_path images "
           "--align_path align", given=("lips",)),
    Script(MXNET + "embedding_learning/train.py", "--data-path . --batch-size 6 --batch-k 3 "
           "--model resnet18_v2", missing=("bottleneck",), given=("birds",),
           keep=".*distanceweightedsampling0"),
    Script("mxnet-pull-14367/example/gluon/snail/main.py",
           "--GPU_COUNT 0 --batch_size 2 --N 5 --K 2",
           missing=("mxboard",), given=("characters",), start="snail",
           root="mxnet-pull-14367/example/gluon/snail"),
    Script("gluon-face/examples/mnist/train_mnist_arcloss.py", missing=("seaborn",),
           substituted=("gpus_are_cpus", "drawn_sets", "no_workers"), root="gluon-face"),
    Script("HKO-7/experiments/movingmnist/mnist_rnn_main.py",
           "--ctx cpu --batch_size 4 --save_dir . --lr 0.001",
           given=("moving_digits",), missing=("numba", "moviepy", "moviepy.editor"),
           start="hko", loss="reshape"),
    Script("mxnet/example/model-parallel/matrix_factorization/train.py",
           "--batch-size 64 --factor-size 8", given=("ratings",),
           substituted=("gpus_are_cpus",), loss="linearregression"),
    Script("mtcnn/example/train_P_net.py", "--frequent 1 --lr 0.0001", given=("crops",),
           substituted=("gpus_are_cpus",), start="mtcnn", loss="cls_out", scale="none"),
    Script("mtcnn-exp/tools/mtcnn/train.py", "--gpus= --batch-size 16 -j 1",
           given=("crops",), missing=("nn.mtcnnv2",), root="mtcnn-exp"),
    Script("gluonts/src/gluonts/mx/model/gpvar/_estimator.py", start="gpvar", root="gluonts/src"),
    Script("gluon-nlp/scripts/word_embeddings/train_sg_cbow.py",
           "--data toy --batch-size 64 --emsize 16 --ngram-buckets 100 --no-prefetch-batch",
           substituted=("words",)),
    Script("horovod/examples/mxnet/mxnet_mnist.py", "--no-cuda --batch-size 16",
           own="--dtype float16", given=("mnist",), here=True),
    *(Script("DeepLearningExamples/MxNet/Classification/RN50v1.5/train.py", RN50 + more, own=own,
             missing=("dllogger", "horovod", "horovod.mxnet", "nvidia", "nvidia.dali",
                      "nvidia.dali.pipeline", "nvidia.dali.plugin", "nvidia.dali.plugin.mxnet",
                      "nvidia.dali.ops", "nvidia.dali.types"),
             substituted=("gpus_are_cpus",), loss="Loss")
      for more, own in (("", None), ("", "--dtype float16"), (NHWC, "--dtype float16"),
                        (" --fuse-bn-relu 1", "--dtype float16"))),
    Script("Single-Path-One-Shot-NAS-MXNet/train_imagenet.py",
           "--data-dir images --model ShuffleNas --mode imperative --batch-size 4 -j 0 --lr 0.01 "
           "--num-epochs 2 --dtype float32 --input-size 64",
           own="--dtype float16", given=("folders",),
           substituted=("no_constraint",)),
]

# Arguments of imgclsmob's files other than defaults. The blocks of KEPT read shapes or call an
# autograd.Function. NO_ONEDNN: in float32, oneDNN "could not construct a sub-memory", checks
# "!is_view", or divides by 0.
FAMILIES = "imgclsmob/gluon/gluoncv2/models"
SMALL, FIXED, AUDIO = (
    "centernet ibppose_coco lffd lwopenpose_cmupan".split(),
    "cgnet dabnet danet deeplabv3 fastscnn fcn8sd fpenet icnet lednet pspnet sinet".split(),
    "jasper jasperdr quartznet".split())
MADE_WITH = {
    **{name: {"in_size": (128, 128)} for name in SMALL},
    **{name: {"in_size": (128, 128), "fixed_size": True} for name in FIXED},
    **{name: {"in_channels": 64, "from_audio": False} for name in AUDIO},
    "superpointnet": {"in_size": (128, 128), "batch_size": 2},
    "simplepose_coco": {"return_heatmap": True},
}
INPUTS = {
    **dict.fromkeys(AUDIO, ((2, 64, 64), (2,))),
    "nvpattexp": ((2, 8, 16, 29), (2,)), "superpointnet": ((2, 1, 128, 128),),
    "visemenet": ((2, 8, 195), (2, 76)), "voca": ((2, 1, 16, 29), (2,)),
}
KEPT = {
    "efficientnetedge": ".*(effiinitblock|effidwsconvunit|effiinvresunit)[0-9]*",
    "irevnet": ".*irevdownscale[0-9]*", "isqrtcovresnet": ".*isqrtcovpool[0-9]*",
    "lednet": ".*(apn|breakblock|poolingbranch|interpolationblock)[0-9]*",
    "shakedropresnet_cifar": ".*shakedropresunit[0-9]*",
    "shakeshakeresnet_cifar": ".*shakeshakeresunit[0-9]*",
}
NO_ONEDNN = (
    "fpenet ghostnet hardnet ibndensenet jasper jasperdr mixnet msdnet nasnet pyramidnet "
    "pyramidnet_cifar quartznet res2net selecsls shakedropresnet_cifar shakeshakeresnet_cifar "
    "xdensenet_cifar".split())


# ---- in the process of a script


def begin():
    """Sets seeds, makes the substitutions, records losses, and converts the script's networks."""
    published.seed(mx)
    run = os.environ["GLUON_AMP_RUN"]
    sys.path[:0] = filter(None, [os.environ["GLUON_AMP_ROOT"]])
    for name in os.environ["GLUON_AMP_MISSING"].split():
        sys.modules[name] = MagicMock()
    for name in os.environ["GLUON_AMP_SUBSTITUTED"].split():
        globals()[name](mx)
    record = Recorder(mx)
    if run.startswith("noise"):
        add_noise(mx, *run.split()[1:], record)
    if "GLUON_AMP_CONVERTED" in os.environ:
        (convert if run in NOISE else hybridize)(mx, run, record)


class Recorder:
    """Writes the loss of each step, and ends the script after STEPS of them."""

    def __init__(self, mx):
        self._depth = 0
        self.begun, self._left = False, int(os.environ["GLUON_AMP_STEPS"])
        self._loss = os.environ["GLUON_AMP_LOSS"]
        backward, one_backward = mx.autograd.backward, mx.nd.NDArray.backward
        update, loss_of = mx.mod.Module.update, mx.gluon.loss.Loss.__call__
        if self._loss == "Loss":
            mx.gluon.loss.Loss.__call__ = lambda *args: self.losses(loss_of(*args))
            return
        mx.autograd.backward = lambda heads, *args, **kwargs: self.around(
            lambda: self.heads(heads), backward, heads, *args, **kwargs)
        mx.nd.NDArray.backward = lambda head, *args, **kwargs: self.around(
            lambda: self.heads(head), one_backward, head, *args, **kwargs)
        mx.mod.Module.update = lambda module: self.around(
            lambda: self.outputs(module), update, module)

    def around(self, losses, run, *args, **kwargs):
        """Records a call before it runs, unless it is nested in a recorded call."""
        if not self._depth and self._loss != "Loss":
            self.write(losses())
        self._depth += 1
        try:
            return run(*args, **kwargs)
        finally:
            self._depth -= 1

    def write(self, losses):
        if losses is None:
            return
        self.begun = True
        if not self._left:  # other threads may wait forever
            sys.stdout.flush()
            for child in multiprocessing.active_children():
                child.terminate()
            os._exit(0)
        self._left -= 1
        with open(os.environ["GLUON_AMP_LOSSES"], "a") as file:
            print(losses, file=file)

    def losses(self, losses):
        if mx.autograd.is_recording():
            self.write(self.heads(losses))
        return losses

    def heads(self, heads):
        heads = heads if isinstance(heads, (list, tuple)) else [heads]
        return sum(float(head.asnumpy().astype("float64").mean()) for head in heads)

    def outputs(self, module):
        """The mean loss of a Module, from predictions, probabilities, logits, or other outputs."""
        losses = [self.output(output, module._exec_group.label_arrays)
                  for name, output in zip(module.output_names, module.get_outputs())
                  if re.search(self._loss, name)]
        return sum(losses) if losses else None

    def output(self, output, labels):
        numbers = output.asnumpy().astype("float64")
        label = np.concatenate([part.asnumpy().ravel() for _, part in labels[0]]) if labels else []
        if len(label) != len(numbers):
            return (numbers**2).mean()
        numbers = numbers.reshape(len(label), -1)
        if numbers.shape[1] == 1:  # of a regression
            return ((numbers[:, 0] - label)**2).mean()
        if abs(numbers.sum(axis=1) - 1).max() > 0.01:  # logits
            numbers = np.exp(numbers - numbers.max(axis=1, keepdims=True))
            numbers /= numbers.sum(axis=1, keepdims=True)
        return -np.log(numbers[np.arange(len(label)), label.astype(int)] + 1e-30).mean()


def add_noise(mx, dtype, draw, record):
    """Changes each initial weight by a relative NOISE at most."""
    rng = np.random.RandomState(int(draw))
    initialize, set_data = mx.init.Initializer.__call__, mx.gluon.Parameter.set_data

    def changed(array):
        return array * mx.nd.array(1 + rng.uniform(-NOISE[dtype], NOISE[dtype], array.shape))

    def initialized(self, desc, array):
        initialize(self, desc, array)
        array[:] = changed(array)

    mx.init.Initializer.__call__ = initialized
    mx.gluon.Parameter.set_data = lambda parameter, data: set_data(
        parameter, data if record.begun else changed(data))


def convert(mx, policy, record):
    """Replaces MXNet's Trainer and Module with gluon_amp's, and converts their networks."""
    import gluon_amp as amp
    from traces import at_most_traces
    record.traces = at_most_traces(MOST_TRACES)
    record.traces.__enter__()
    trainers, converted, settings = [], [], {}
    if os.environ["GLUON_AMP_SCALE"] == "none":
        settings["loss_scale"] = None
    elif policy == "float16":
        settings["loss_scale"] = "dynamic"

    class Trainer(amp.Trainer):
        def __init__(self, params, *args, **kwargs):
            for net in networks(mx, params):
                if not any(net is other for other in converted):
                    amp.convert(net, policy, kept(net))
                    converted.append(net)
            super().__init__(params, *args, **{"loss_scale": None, **settings, **kwargs})
            trainers.append(self)

    class Module(amp.Module):
        def __init__(self, symbol, *args, **kwargs):
            super().__init__(amp.convert_symbol(symbol, policy), *args, **settings, **kwargs)

        def update(self):
            return record.around(lambda: record.outputs(self), super().update)

    def scaled(heads, head_grads=None, retain_graph=False, train_mode=True):
        record.around(lambda: record.heads(heads), amp.backward, heads, trainers, retain_graph)

    for package, cls in (mx.gluon, Trainer), (mx.module, Module):
        replace_class(package, cls)
    plain, one = mx.autograd.backward, mx.nd.NDArray.backward
    mx.autograd.backward = lambda heads, *args, **kwargs: (
        scaled if trainers and not record._depth else plain)(heads, *args, **kwargs)
    mx.nd.NDArray.backward = lambda head, *args, **kwargs: (
        scaled if trainers and not record._depth else one)(head, *args, **kwargs)


def kept(net):
    """The blocks to keep in float32."""
    names = os.environ["GLUON_AMP_KEEP"]
    return [b for b in within(net) if names and re.fullmatch(names, b.name)]


def hybridize(mx, *_):
    """Hybridizes as `convert` does, so that both draw random numbers in the same order."""
    class Trainer(mx.gluon.Trainer):
        def __init__(self, params, *args, **kwargs):
            for net in networks(mx, params):
                outer = {b for k in kept(net) for b in within(net) if k in within(b)}
                for block in set(within(net)) - outer:
                    if isinstance(block, mx.gluon.HybridBlock):
                        block._active = True
            super().__init__(params, *args, **kwargs)

    replace_class(mx.gluon, Trainer)


def within(block):
    return [block, *(b for child in block._children.values() for b in within(child))]


def replace_class(package, cls):
    """Replaces the class for later imports; MXNet's module keeps its own."""
    name = f"{package.__name__}.{cls.__name__.lower()}"
    own = sys.modules[name]
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(vars(own), original=own, **{cls.__name__: cls})
    setattr(package, cls.__name__, cls)


def networks(mx, params):
    """The outermost blocks with some of these parameters."""
    wanted = {id(p) for p in (params.values() if hasattr(params, "values") else params)}
    blocks = [b for b in gc.get_objects() if isinstance(b, mx.gluon.Block)
              and any(id(p) in wanted for p in b.collect_params().values())]
    inner = {id(child) for b in blocks for child in b._children.values()}
    return [b for b in blocks if id(b) not in inner]


def gpus_are_cpus(mx):
    """mx.cpu for mx.gpu"""
    mx.gpu = mx.context.gpu = lambda i=0: mx.cpu(i)


def no_weights(mx):
    """random weights for pretrained ones"""
    load = mx.gluon.Block.load_parameters

    def loaded(net, path, ctx=None, **kwargs):
        if path != "random" and "multiple_inputs" not in path:
            return load(net, path, ctx, **kwargs)
        net.initialize(mx.init.Xavier(), ctx=ctx)
        if any(p._deferred_init for p in net.collect_params().values()):
            channels = 3 if path == "random" else 6
            net(mx.nd.zeros((1, channels, 64, 64), ctx=ctx[0] if isinstance(ctx, list) else ctx))

    mx.gluon.Block.load_parameters = loaded
    stores = [mx.gluon.model_zoo.model_store]
    if "gluon-cv" in os.environ["GLUON_AMP_PATH"]:
        from gluoncv.model_zoo import model_store
        stores.append(model_store)
    for store in stores:
        store.get_model_file = lambda *_, **__: "random"
    mx.gluon.model_zoo.vision.resnet.get_model_file = lambda *_, **__: "random"


def no_workers(mx):
    """data is loaded in the script's process: its random numbers follow one another"""
    loader = mx.gluon.data.DataLoader.__init__
    mx.gluon.data.DataLoader.__init__ = lambda *args, **kwargs: loader(
        *args, **{**kwargs, "num_workers": 0})


def no_constraint(mx):
    """train_constraint_method=None, which no argument gives"""
    import argparse
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *args):
        options = parse(self, *args)
        options.train_constraint_method = None
        return options

    argparse.ArgumentParser.parse_args = parsed


def crazyara(sources):
    """its network for chess with 2 blocks, its classes called with drawn boards"""
    from DeepCrazyhouse.configs.train_config import TrainConfig, TrainObjects
    from DeepCrazyhouse.src.domain.neural_net.architectures.a0_resnet import AlphaZeroResnet
    from DeepCrazyhouse.src.domain.variants.constants import NB_CHANNELS_TOTAL, NB_LABELS
    from DeepCrazyhouse.src.training import trainer_agent_gluon as agent
    from DeepCrazyhouse.src.training.lr_schedules.lr_schedules import (
        MomentumSchedule,
        OneCycleSchedule,
    )
    from DeepCrazyhouse.src.training.train_util import get_metrics
    rng = np.random.RandomState(0)

    def games(dataset_type="train", **_):
        number = 96 if dataset_type == "train" else 16
        policy = np.eye(NB_LABELS, dtype="float32")[rng.randint(0, 20, number)]
        boards = rng.randint(0, 2, (number, NB_CHANNELS_TOTAL, 8, 8)).astype("float32")
        return None, boards, rng.choice([-1, 0, 1], number).astype("float32"), policy, None, None

    agent.load_pgn_dataset, agent.tqdm_notebook = games, list
    config = TrainConfig(
        batch_size=16, batch_steps=6, total_it=STEPS, nb_parts=1, context="cpu", cpu_count=0,
        framework="gluon", max_lr=0.05, use_spike_recovery=False, use_wdl=False,
        use_plys_to_end=False, sparse_policy_label=False, select_policy_from_plane=False)
    objects = TrainObjects()
    objects.metrics = get_metrics(config)
    objects.lr_schedule = OneCycleSchedule(0.01, 0.05, STEPS)
    objects.momentum_schedule = MomentumSchedule(objects.lr_schedule, 0.01, 0.05, 0.8, 0.95)
    net = AlphaZeroResnet(n_labels=NB_LABELS, channels=32, num_res_blocks=2)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    Path("weights").mkdir()
    _, x, value, policy, plys, _ = games("val")
    validation = agent.get_data_loader(x, value, policy, plys, config, shuffle=False)
    agent.TrainerAgentGluon(net, validation, config, objects, use_rtpt=True).train(0)


def retinaface(sources, *arguments):
    """its configuration for images of 96 pixels, boxes in numpy for Cython's, random weights"""

    def overlaps(boxes, others):
        low = np.maximum(boxes[:, None, :2], others[None, :, :2])
        high = np.minimum(boxes[:, None, 2:4], others[None, :, 2:4])
        both = np.prod(np.maximum(high - low + 1, 0), axis=2)
        sizes = [np.prod(b[:, 2:4] - b[:, :2] + 1, axis=1) for b in (boxes, others)]
        return both / (sizes[0][:, None] + sizes[1][None] - both)

    def anchors(height, width, stride, base):
        y, x = np.mgrid[:height, :width] * stride
        return base + np.stack([x, y, x, y], axis=2)[:, :, None].astype("float32")

    for name in ("", ".bbox", ".anchors", ".cpu_nms", ".gpu_nms"):
        sys.modules["rcnn.cython" + name] = MagicMock(
            bbox_overlaps_cython=overlaps, anchors_cython=anchors)
    import rcnn.sample_config as sample
    sys.modules["rcnn.config"] = sample
    sample.config.PRE_SCALES, sample.config.SCALES = [(96, 96)], [(96, 96)]
    sample.network.mnet.BATCH_IMAGES = 4
    sample.dataset.retinaface.update(root_path=os.getcwd(), dataset_path=os.getcwd())
    sample.default.update(root_path=os.getcwd(), dataset_path=os.getcwd())
    backbone = mx.gluon.model_zoo.vision.mobilenet0_25(prefix="mobilenet0_")
    backbone.initialize(mx.init.Xavier())
    backbone.hybridize()
    backbone(mx.nd.zeros((1, 3, 96, 96)))
    backbone.export(sample.network.mnet.pretrained)
    run_script(f"{sources}/insightface/detection/retinaface/train.py", arguments)


def imgclsmob(sources, *families):
    """hybridized, unless keep=; a drawn batch of 2"""
    errors = {}
    for i, family in enumerate(families, 1):
        for call in (lambda family=family: two_steps(mx, family)), mx.nd.waitall:
            try:
                call()
            except Exception as error:  # any error: continue with the next one
                said = str(error).strip().splitlines()[-1:]
                errors.setdefault(family, " ".join([f"{type(error).__name__}:", *said]))
        losses = Path(os.environ["GLUON_AMP_LOSSES"])
        lines = losses.read_text().splitlines()
        losses.write_text("".join(f"{line}\n" for line in (lines + ["nan"] * 2)[:2 * i]))
    if errors:
        sys.exit(json.dumps(errors))


def two_steps(mx, family):
    """Trains the first network of the file."""
    from gluoncv2 import model_provider
    published.seed(mx)
    make = next(make for make in model_provider._models.values()
                if make.__module__.endswith(f".{family}"))
    net = make(**MADE_WITH.get(family, {}))
    net.initialize(mx.init.MSRAPrelu())
    os.environ["GLUON_AMP_KEEP"] = KEPT.get(family, "")
    if family not in KEPT:
        net.hybridize()
    shapes = INPUTS.get(family) or [(2, 3, *net.in_size)]
    rng = np.random.RandomState(0)
    inputs = [mx.nd.array(rng.randn(*shape) if len(shape) > 2 else np.full(shape, 3))
              for shape in shapes]
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    for _ in range(2):
        with mx.autograd.record():
            outputs = net(*inputs)
            while isinstance(outputs, (list, tuple)):
                outputs = outputs[0]
            loss = mx.nd.log(1 + outputs.astype("float32")**2).mean()
        loss.backward()
        trainer.step(1)


def snail(sources, *arguments):
    """its data one folder up"""
    Path("run").mkdir()
    os.chdir("run")
    run_script(f"{sources}/mxnet-pull-14367/example/gluon/snail/main.py", arguments)


def run_script(path, arguments):
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def mtcnn(sources, *arguments):
    """translated to Python 3, its missing module tools, no out_grad= of a patched MXNet"""
    import shutil
    from lib2to3.main import main as translate

    shutil.copytree(f"{sources}/mtcnn", "mtcnn")
    translate("lib2to3.fixes", "--write --nobackups --no-diffs --nofix=import mtcnn".split())
    sys.modules["tools"] = sys.modules["tools.load_model"] = MagicMock()
    sys.modules["tools"].image_processing.transform = lambda image: (
        image.transpose(2, 0, 1)[np.newaxis] / 128 - 1)
    regression = mx.symbol.LinearRegressionOutput
    mx.symbol.LinearRegressionOutput = lambda out_grad, **kwargs: regression(**kwargs)
    sys.path[:0] = ["mtcnn", "mtcnn/core", "mtcnn/example"]
    run_script("mtcnn/example/train_P_net.py", arguments)


def hko(sources, *arguments):
    """one small recurrent layer; no clipping, as its norm adds up gradients of several types"""
    import shutil
    for name in ("nowcasting", "experiments"):
        shutil.copytree(f"{sources}/HKO-7/{name}", name)
    sys.path[:0] = [".", "experiments/movingmnist"]
    from nowcasting.config import cfg
    from nowcasting.my_module import MyModule
    MyModule.clip_by_global_norm = lambda *_, **__: 0.0
    cfg.MOVINGMNIST.update(IN_LEN=3, OUT_LEN=2)
    cfg.MODEL.update(IN_LEN=3, OUT_LEN=2)
    model = cfg.MODEL.ENCODER_FORECASTER
    model.update(HAS_MASK=False, FEATMAP_SIZE=[16], FIRST_CONV=[8, 4, 4, 0],
                 LAST_DECONV=[8, 4, 4, 0], DOWNSAMPLE=[], UPSAMPLE=[])
    model.RNN_BLOCKS.update(LAYER_TYPE=["ConvGRU"], STACK_NUM=[1], NUM_FILTER=[8],
                            H2H_KERNEL=[(3, 3)], H2H_DILATE=[(1, 1)], I2H_KERNEL=[(3, 3)],
                            I2H_PAD=[(1, 1)], L=[5])
    run_script("experiments/movingmnist/mnist_rnn_main.py", arguments)


def gpvar(sources):
    """its estimator, as in its test"""
    from gluonts.dataset.artificial import constant_dataset
    from gluonts.dataset.multivariate_grouper import MultivariateGrouper
    from gluonts.mx.distribution.lowrank_gp import LowrankGPOutput
    from gluonts.mx.model.gpvar import GPVAREstimator
    from gluonts.mx.trainer import Trainer
    about, series, _ = constant_dataset()
    GPVAREstimator(
        distr_output=LowrankGPOutput(rank=2), num_cells=8, num_layers=1, target_dim=10,
        freq=about.metadata.freq, prediction_length=about.prediction_length, pick_incomplete=True,
        trainer=Trainer(epochs=1, num_batches_per_epoch=2 * STEPS, learning_rate=0.01),
    ).train(MultivariateGrouper(max_target_dim=10)(series))


def words(mx):
    """drawn words for text8"""
    import gluonnlp
    rng = np.random.RandomState(0)
    gluonnlp.data.Text8 = lambda **_: rng.choice(published.WORDS, (2, 800)).tolist()


def small_bert(mx):
    """two layers of 64 units and a small vocabulary for BERT"""
    published.small_bert(mx)


def drawn_set(size, channels, count=512):
    """A data set like MNIST or CIFAR-10."""

    class Drawn(mx.gluon.data.ArrayDataset):
        def __init__(self, root=None, train=True, transform=None):
            rng = np.random.RandomState(0)
            labels = np.arange(count if train else 16, dtype="int32") % 10
            patterns = rng.randint(40, 216, (10, 4, 4, channels))
            images = np.kron(patterns[labels], np.ones((1, size // 4, size // 4, 1)))
            images = (images + rng.uniform(-40, 40, images.shape)).astype("uint8")
            pairs = [(mx.nd.array(image, dtype="uint8"), label)
                     for image, label in zip(images, labels)]
            pairs = [transform(*pair) for pair in pairs] if transform else pairs
            super().__init__(*(list(part) for part in zip(*pairs)))

    return Drawn


def drawn_sets(mx):
    """drawn images for MNIST and CIFAR-10"""
    vision = mx.gluon.data.vision
    vision.MNIST = drawn_set(28, 1)
    vision.CIFAR10 = drawn_set(32, 3)


def frames(mx):
    """drawn frames for KITTI's"""
    import gluoncv.data

    class Frames(mx.gluon.data.Dataset):
        def __init__(self, path, names, height, width, frame_ids, num_scales, **_):
            self._length, self._height, self._width = len(names), height, width
            self._frames, self._scales = frame_ids, num_scales

        def __len__(self):
            return self._length

        def __getitem__(self, index):
            rng = np.random.RandomState(index)
            coarse, item = rng.rand(3, self._height // 8, self._width // 8 + 4), {}
            for i in self._frames:
                scene = np.kron(coarse, np.ones((1, 8, 8)))[:, :, 16 + 4 * i:][:, :, :self._width]
                for scale in range(self._scales):
                    small = mx.nd.array(scene[:, ::2**scale, ::2**scale])
                    item["color", i, scale] = item["color_aug", i, scale] = small
            for scale in range(self._scales):
                camera = np.eye(4, dtype="float32")
                camera[0, 0], camera[0, 2] = 0.58 * self._width, 0.5 * self._width
                camera[1, 1], camera[1, 2] = 1.92 * self._height, 0.5 * self._height
                camera[:2] /= 2**scale
                item["K", scale] = mx.nd.array(camera)
                item["inv_K", scale] = mx.nd.array(np.linalg.pinv(camera))
            return item

    gluoncv.data.KITTIRAWDataset = Frames


def segments(mx):
    """a data set of drawn shapes"""
    import gluoncv.data

    class Shapes(gluoncv.data.segbase.SegmentationDataset):
        NUM_CLASS = 3
        CLASSES = ("background", "left", "right")

        def __init__(self, split="train", mode=None, transform=None, **kwargs):
            super().__init__(".", split, mode, transform, **kwargs)

        def __getitem__(self, index):
            rng = np.random.RandomState(index)
            label = np.kron(rng.randint(0, 3, (4, 4)), np.ones((16, 16))).astype("int32")
            image = np.stack([label * 60] * 3, axis=2) + rng.randint(0, 60, (64, 64, 3))
            return self.transform(mx.nd.array(image.astype("uint8"), dtype="uint8")), \
                mx.nd.array(label, dtype="int32")

        def __len__(self):
            return 16

        @property
        def pred_offset(self):
            return 0

    gluoncv.data.datasets["drawn"] = Shapes


def handwriting(sources, *arguments):
    """drawn lines of text for the IAM data set"""
    def lines(*_, train, **__):
        rng = np.random.RandomState(train)
        texts = [[" ".join(rng.choice(published.WORDS, 3))] for _ in range(16 if train else 4)]
        return mx.gluon.data.SimpleDataset(
            [(rng.randint(0, 256, (30, 400)).astype("uint8"), text) for text in texts])

    import ocr.utils.iam_dataset as iam
    iam.IAMDataset = lines
    Path("model_checkpoint").mkdir()
    sys.argv[1:] = arguments
    runpy.run_module("ocr.handwriting_line_recognition", run_name="__main__", alter_sys=True)


# ---- files that scripts read


def faces(folder, sources):
    """192 drawn faces of 10 people, a configuration for them"""
    rng = np.random.RandomState(0)
    patterns = rng.randint(40, 216, (10, 7, 7, 3))
    record = mx.recordio.MXIndexedRecordIO(
        str(folder / "train.idx"), str(folder / "train.rec"), "w")
    for i in range(192):
        large = np.kron(patterns[i % 10], np.ones((16, 16, 1)))
        image = (large + rng.uniform(-40, 40, large.shape)).astype(np.uint8)
        record.write_idx(i, mx.recordio.pack(
            mx.recordio.IRHeader(0, i % 10, i, 0), published.png(image)))
    record.close()
    (folder / "config.py").write_text(
        "from sample_config import *\nfrom sample_config import dataset\n"
        f"dataset.emore.dataset_path = {str(folder)!r}\n"
        "dataset.emore.num_classes = 10\ndataset.emore.val_targets = []\n"
        "config.count_flops = False\n")


def square(rng, pixels, most):
    """A drawn image with a square, and the place and size of that."""
    image = rng.randint(0, 60, (pixels, pixels, 3))
    x, y, size = *rng.randint(5, 40, 2), rng.randint(16, most)
    image[y:y + size, x:x + size] += 120
    return published.png(image.astype("uint8")), x, y, size


def boxes(folder, sources):
    """16 drawn images with boxes"""
    rng = np.random.RandomState(0)
    images = folder / "train" / "images"
    images.mkdir(parents=True)
    lines = []
    for i in range(16):
        picture, x, y, size = square(rng, 96, 48)
        (images / f"{i}.png").write_bytes(picture)
        points = [f"{x + dx * size:.1f} {y + dy * size:.1f} 0.0" for dx, dy in (
            (.3, .3), (.7, .3), (.5, .5), (.3, .7), (.7, .7))]
        lines += [f"# {i}.png", f"{x} {y} {size} {size} {' '.join(points)} 0.5"]
    (folder / "train" / "label.txt").write_text("\n".join(lines) + "\n")
    for name in ("cache", "model"):
        (folder / name).mkdir()


def drives(folder, sources):
    """names of 32 frames"""
    splits = folder / ".mxnet" / "datasets" / "kitti" / "splits" / "eigen_zhou"
    splits.mkdir(parents=True)
    models = folder / ".mxnet" / "models"
    models.mkdir()
    (models / "resnet18_v1b_multiple_inputs.params").touch()  # not to be read: no_weights
    for part in ("train", "val"):
        (splits / f"{part}_files.txt").write_text("drive 1 l\n" * 32)


def objects(folder, sources):
    """16 drawn images in the form of Pascal VOC"""
    rng = np.random.RandomState(0)
    for year, parts in (("VOC2007", ("trainval", "test")), ("VOC2012", ("trainval",))):
        root = folder / ".mxnet" / "datasets" / "voc" / year
        for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (root / name).mkdir(parents=True)
        for part in parts:
            names = [f"{part}{i}" for i in range(16)]
            (root / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(names) + "\n")
            for name in names:
                picture, x, y, size = square(rng, 80, 36)
                (root / "JPEGImages" / f"{name}.jpg").write_bytes(picture)
                (root / "Annotations" / f"{name}.xml").write_text(
                    "<annotation><size><width>80</width><height>80</height></size><object>"
                    "<name>cat</name><difficult>0</difficult><bndbox>"
                    f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + size}</xmax>"
                    f"<ymax>{y + size}</ymax></bndbox></object></annotation>")


def sentences(folder, sources):
    """pairs of drawn sentences with trees, drawn word vectors"""
    rng = np.random.RandomState(0)
    for part, count in (("train", 32), ("dev", 4), ("test", 4)):
        (folder / part).mkdir()
        for side in "ab":
            lengths = rng.randint(3, 8, count)
            (folder / part / f"{side}.toks").write_text("".join(
                " ".join(rng.choice(published.WORDS, n)) + "\n" for n in lengths))
            (folder / part / f"{side}.parents").write_text("".join(
                " ".join(["0", *(str(rng.randint(1, i + 1)) for i in range(1, n))]) + "\n"
                for n in lengths))
        (folder / part / "sim.txt").write_text("".join(
            f"{score:.1f}\n" for score in rng.uniform(1, 5, count)))
    (folder / "glove.txt").write_text("".join(
        f"{word} {' '.join(f'{x:.4f}' for x in rng.randn(32))}\n" for word in published.WORDS))


def masked(folder, sources):
    """drawn sentences with masks"""
    rng = np.random.RandomState(0)
    ids = rng.randint(5, 20, (192, 16))
    places = np.sort(np.argsort(rng.rand(192, 14))[:, :3] + 1)
    np.savez(folder / "masked.npz", input_ids=ids, segment_ids=(np.arange(16) > 8) * ids // ids,
             masked_lm_positions=places, masked_lm_ids=np.take_along_axis(ids, places, 1),
             masked_lm_weights=np.ones((192, 3), "float32"),
             next_sentence_labels=rng.randint(0, 2, 192), valid_lengths=np.full(192, 16))


def lips(folder, sources):
    """films of 75 drawn images with a sentence each"""
    rng = np.random.RandomState(0)
    (folder / "align").mkdir()
    (folder / "checkpoint").mkdir()
    for i, speaker in enumerate(["s3"] * 6 + ["s1"] * 2):
        film = folder / "images" / speaker / f"film{i}"
        film.mkdir(parents=True)
        for frame in range(75):
            picture = rng.randint(0, 256, (50, 100, 3)).astype("uint8")
            (film / f"{frame:03}.png").write_bytes(published.png(picture))
        (folder / "align" / f"film{i}.align").write_text("".join(
            f"{1000 * j} {1000 * (j + 1)} {word}\n"
            for j, word in enumerate(["sil", *rng.choice(published.WORDS, 3), "sil"])))


def birds(folder, sources):
    """drawn birds of 102 kinds"""
    rng = np.random.RandomState(0)
    (folder / "images").mkdir()
    rows = [(i, f"{i}.png", i // 3 + 1) for i in range(306)]
    for _, name, kind in rows:
        picture = rng.randint(0, 60, (64, 64, 3)) + kind
        picture[:, kind % 60:] += 60
        (folder / "images" / name).write_bytes(published.png(picture.astype("uint8")))
    (folder / "images.txt").write_text("".join(f"{i} {name}\n" for i, name, _ in rows))
    (folder / "image_class_labels.txt").write_text("".join(f"{i} {k}\n" for i, _, k in rows))
    (folder / "bounding_boxes.txt").write_text("".join(f"{i} 0 0 64 64\n" for i, _, _ in rows))


def characters(folder, sources):
    """drawn characters for Omniglot's"""
    rng = np.random.RandomState(0)
    root = folder / "dataset" / "omniglot"
    (root / "splits" / "vinyals").mkdir(parents=True)
    for part in ("train", "test"):
        names = [f"{part}/character{i}" for i in range(10)]
        for name in names:
            (root / "data" / name).mkdir(parents=True)
            pattern = np.kron(rng.randint(0, 2, (4, 4)), np.ones((7, 7)))
            for i in range(4):
                picture = 255 * (pattern != (rng.rand(28, 28) < 0.1)).astype("uint8")
                (root / "data" / name / f"{i}.png").write_bytes(published.png(picture))
        (root / "splits" / "vinyals" / f"{part}.txt").write_text(
            "".join(f"{name}/rot000\n" for name in names))


def mnist(folder, sources):
    """drawn digits"""
    import zipfile

    rng = np.random.RandomState(0)
    (folder / "data-0").mkdir()
    with zipfile.ZipFile(folder / "data-0" / "mnist.zip", "w") as archive:
        for part, count in (("train", 192), ("t10k", 32)):
            labels = (np.arange(count) % 10).astype("uint8")
            images = np.kron(rng.randint(0, 216, (10, 4, 4))[labels], np.ones((1, 7, 7)))
            images = (images + rng.uniform(0, 40, images.shape)).astype("uint8")
            for name, array in (("images-idx3", images), ("labels-idx1", labels)):
                head = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
                archive.writestr(f"{part}-{name}-ubyte", head + array.tobytes())


def folders(folder, sources):
    """folders of drawn images"""
    rng = np.random.RandomState(0)
    for part, count in (("train", 64), ("val", 8)):
        for i in range(count):
            picture = rng.randint(0, 60, (72, 72, 3)) + i % 4 * 40
            path = folder / "images" / part / f"n{i % 4}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(published.png(picture.astype("uint8")))


def moving_digits(folder, sources):
    """drawn digits for MNIST, folders for radar images"""
    for name in ("hko_data/radarPNG", "hko_data/radarPNG_mask", "mnist_data"):
        (folder / name).mkdir(parents=True)
    digits = np.kron(np.random.RandomState(0).randint(0, 256, (10, 7, 7)), np.ones((4, 4)))
    images = np.tile(digits.reshape(10, 784).astype("uint8"), (5000, 1))
    labels = np.arange(50000) % 10
    np.savez(folder / "mnist_data" / "mnist.npz", X=images, Y=labels, X_test=images[:10],
             Y_test=labels[:10])


def ratings(folder, sources):
    """drawn ratings for MovieLens"""
    rng = np.random.RandomState(0)
    (folder / "ml-10m.zip").touch()
    (folder / "ml-10M100K").mkdir()
    for part in ("train", "test"):
        rows = rng.randint(0, 40, (1024, 2))
        (folder / "ml-10M100K" / f"r1.{part}").write_text("".join(
            f"{user}::{film}::{1 + (user + film) % 5}::0\n" for user, film in rows))


def crops(folder, sources):
    """drawn faces of 12 pixels with offsets of their boxes, as files and as records"""
    rng = np.random.RandomState(0)
    files, records = folder / "data" / "mtcnn", folder / "data" / "widerface" / "mtcnn"
    for path in (files / "images", files / "imglists", records, folder / "model"):
        path.mkdir(parents=True)
    record = mx.recordio.MXIndexedRecordIO(
        str(records / "pnet_train.idx"), str(records / "pnet_train.rec"), "w")
    lines = []
    for i in range(512):
        kind = rng.choice([1, 0, -1])  # a face, background, part of a face
        box = rng.uniform(-0.3, 0.3, 4) * abs(kind)
        image = rng.randint(0, 60, (12, 12, 3))
        image[:, 6 - 6 * abs(kind):] += 80 + 60 * kind
        picture = published.png(image.astype("uint8"))
        (files / "images" / f"{i}.png").write_bytes(picture)
        lines.append(f"{i}.png {kind} {' '.join(map(str, box))}\n")
        overlap = {1: 0.9, 0: 0.1, -1: 0.5}[kind]
        record.write_idx(i, mx.recordio.pack(
            mx.recordio.IRHeader(0, [overlap, *box], i, 0), picture))
    record.close()
    (files / "imglists" / "train_12.txt").write_text("".join(lines))
    for end in ("idx", "rec"):
        (records / f"pnet_val.{end}").symlink_to(records / f"pnet_train.{end}")


# ---- the command


def train(script, run, sources):
    """Runs a script. Returns the loss of each step, and the last line of output if it failed."""
    own = script.own if run == "float16" and script.own else ""
    environment = {
        "CUDA_VISIBLE_DEVICES": "", "GLUON_AMP_RUN": run, "GLUON_AMP_LOSS": script.loss,
        "GLUON_AMP_KEEP": script.keep, "GLUON_AMP_PATH": script.path,
        "GLUON_AMP_SCALE": script.scale, "GLUON_AMP_STEPS": str(STEPS),
        "GLUON_AMP_ROOT": str(sources / script.root) if script.root else "",
        "GLUON_AMP_MISSING": " ".join(script.missing)}
    if script.own is None:
        environment["GLUON_AMP_CONVERTED"] = "1"
    if not script.onednn:
        environment.update(MXNET_MKLDNN_ENABLED="0", MXNET_STORAGE_FALLBACK_LOG_VERBOSE="0")
    with tempfile.TemporaryDirectory() as scratch:
        environment["HOME"] = scratch
        for name in script.given:
            globals()[name](Path(scratch), sources)
        command = [str(sources / script.path)]
        if script.start:
            command = [__file__, script.start, str(sources)]
        python = sys.executable if script.here else zoo.venv("foreign", "foreign.txt")
        return published.run_recorded(
            python, [*command, *script.arguments.split(), *own.split()],
            script.substituted, Path(scratch), "foreign", environment)


def kinds_of(script):
    return ["float16"] if script.own is not None else ["float16", "bfloat16"]


def rms(losses, others):
    """The difference of losses, NaN if one of them is NaN."""
    return (sum((a - b)**2 for a, b in zip(losses, others)) / (len(losses) or 1))**0.5


def judge(script, done, kind, sources):
    """The difference of a type, its bound, and the failure if any."""
    (losses, said), (losses16, said16) = done["float32"], done[kind]
    one_network = script.start == "imgclsmob"
    steps = 2 if one_network else STEPS
    error, _, message = said.partition(": ")  # gluon_amp's errors quote the message they follow
    if said16 and said16.split(":")[0] != error and not (message and message in said16):
        return 0, 0, f"float32 ends with {said or 'no error'}, {kind} with {said16}"
    if len(losses) < (0 if said else steps) or len(losses16) < len(losses):
        return 0, 0, f"{len(losses)} steps, {kind} {len(losses16)}"
    if not losses:
        return 0, 0, ""
    difference = rms(losses, losses16)
    bound = SHARE[kind] * (max(losses) - (0 if one_network else min(losses)))
    if difference == 0:
        return 0, bound, f"nothing runs in {kind}"
    if not difference <= bound:
        for run in (f"noise {less} {draw}" for less in NOISE if NOISE[less] <= NOISE[kind]
                    for draw in range(DRAWS)):
            (_, noise), = parts(script, {run: train(script, run, sources)})
            bound = max(bound, 2 * rms(losses, noise[run][0]))
    return difference, bound, "" if difference <= bound else f"{kind} trains otherwise"


def parts(script, done):
    """The script and its runs; of imgclsmob, those of each network."""
    if script.start != "imgclsmob":
        return [(script, done)]
    names = script.arguments.split()
    return [(script._replace(path=f"{FAMILIES}/{name}.py", arguments=name,
                             keep=KEPT.get(name, "")),
             {run: of_network(i, name, *result) for run, result in done.items()})
            for i, name in enumerate(names)]


def of_network(i, name, losses, said):
    """The losses of the network, and its error."""
    own = [loss for loss in losses[2 * i:2 * i + 2] if loss == loss]
    if said[:1] in ("", "{"):
        return own, json.loads(said or "{}").get(name, "")
    return (own, "") if len(own) == 2 else ([], said)  # the process ended at this one or before


def rows(script, done, sources):
    """The rows of the table, and whether the script passes."""
    head = [f"{script.path}\n    {script.arguments}" + (f" [{script.own}]" if script.own else "")]
    substituted = [*(f"no {name}" for name in script.missing),
                   *(globals()[name].__doc__ for name in (
                       *script.given, *script.substituted, *filter(None, [script.start])))]
    if not script.onednn:
        substituted.append("MXNET_MKLDNN_ENABLED=0")
    if script.own is None:
        kept = f", keep={script.keep}" if script.keep else ""
        scale = ", loss_scale=None" if script.scale == "none" else ""
        substituted.append(f"gluon_amp's Trainer and Module for MXNet's{kept}{scale}")
    head.append(f"    substituted: {'; '.join(substituted)}")
    passes = True
    losses, said = done["float32"]
    for kind in kinds_of(script):
        difference, bound, wrong = judge(script, done, kind, sources)
        passes = passes and not wrong
        verdict = wrong or ("passes" if losses else "not compared")
        last, last16 = (run[-1] if run else float("nan") for run in (losses, done[kind][0]))
        head.append(f"    {kind:9}{len(losses):5}{last:11.4f}{last16:11.4f}"
                    f"{difference:12.5f}{bound:12.5f}  {verdict}")
    if said:
        head.append(f"    ends in float32, too, with {said}")
    return "\n".join(head), passes


def files_of(folder, chosen):
    """Scripts for the files of imgclsmob, several in one process."""
    names = sorted(path.stem for path in Path(folder, FAMILIES).glob("*.py"))
    names = chosen([n for n in names if n not in ("__init__", "common", "model_store")])
    for onednn in (1, 0):
        own = [name for name in names if (name not in NO_ONEDNN) == onednn]
        for i in range(0, len(own), STEPS // 2):
            yield Script(f"{FAMILIES}/__init__.py", " ".join(own[i:i + STEPS // 2]),
                         start="imgclsmob", here=True, onednn=onednn, root="imgclsmob/gluon")


def main(folder):
    names = os.environ.get("NAMES", "").split()
    scripts = [*SCRIPTS, *files_of(folder, lambda files: files[::6])] if not names else [
        *(s for s in SCRIPTS if any(n in f"{s.path} {s.arguments} {s.own}" for n in names)),
        *files_of(folder, lambda files: [
            file for file in files if any(n in f"{FAMILIES}/{file}.py" for n in names)])]
    needed = {s.path for s in scripts}
    if not names or not scripts:
        needed.add(f"{FAMILIES}/__init__.py")
    missing = sorted(path for path in needed if not folder or not Path(folder, path).is_file())
    if missing:
        sys.exit("make -C tests foreign SOURCES=FOLDER needs the checkouts that "
                 f"tests/outside/foreign.py names. Missing: {', '.join(missing)}")
    if not all(script.here for script in scripts):
        zoo.venv("foreign", "foreign.txt")
    sources = Path(folder).resolve()
    failed = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [{run: pool.submit(train, script, run, sources)
                 for run in ("float32", *kinds_of(script))} for script in scripts]
        print("    type     steps    float32       type  difference       bound  verdict")
        for script, job in zip(scripts, jobs):
            done = {run: future.result() for run, future in job.items()}
            for part, own in parts(script, done):
                text, passes = rows(part, own, sources)
                print(text, flush=True)
                failed += not passes
    print("float32, type: the last loss. difference: of float32's losses and the type's, root mean "
          "square\nover the steps. bound: the range of float32's losses (of a network of "
          f"imgclsmob, the larger)\ntimes {SHARE}; where that is exceeded, twice\n"
          "what float32's losses differ by with initial weights changed by up to\n"
          f"{NOISE}. substituted in all: the seeds.")
    sys.exit(f"{failed} fail" if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:]:
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        main(os.environ.get("SOURCES", ""))
