"""The scripts in example/ can be copied: public names, shared modules, no duplicated code."""
import argparse
import ast
import importlib
import io
import logging
import os
import re
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import command_line
import gluon_amp
import image_classification as recipe
import images
import model_zoo
import mxnet as mx
import numpy as np
import pytest
import recipes
import symbolic_fine_tune
import train_imagenet
from networks import ready
from PIL import Image
from processes import printed
from symbols import get_symbol
from traces import at_most_traces

EXAMPLES = Path(__file__).parents[2] / "example"
REFERENCE = "".join(path.read_text() for path in (EXAMPLES.parent / "docs" / "api").glob("*.md"))
FILES = {path.stem: ast.parse(path.read_text()) for path in EXAMPLES.glob("*.py")}
SHARED = {"command_line", "recipes", "images", "model_zoo", "gradient_penalty", "kinks"}
SCRIPTS = {name: tree for name, tree in FILES.items()
           if name not in SHARED and not name.startswith("minimal_")}
each_script = pytest.mark.parametrize("script", SCRIPTS)


def imported(tree):
    """Modules and names from modules that a script imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("file", FILES)
def test_only_public_names_are_used(file):
    for module, name in imported(FILES[file]):
        if module.split(".")[0] == "gluon_amp":
            assert module == "gluon_amp" and name in {None, *gluon_amp.__all__} \
                or f'<a id="{module}.{name}">' in REFERENCE, (module, name)
    names = {"amp": {*gluon_amp.__all__, "__version__"},
             "cli": {name for name in dir(command_line) if name[0] != "_"},
             "recipes": {name for name in dir(recipes) if name[0] != "_"},
             "images": {name for name in dir(images) if name[0] != "_"}}
    for node in ast.walk(FILES[file]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.attr in names.get(node.value.id, {node.attr}), node.attr


def test_package_attribute_error_names_location_of_recipes():
    with pytest.raises(AttributeError, match=r"'recipes'\. .* module is example/recipes\.py of"):
        gluon_amp.recipes  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'recipe'$"):
        gluon_amp.recipe  # noqa: B018


def parse(flags=()):
    """The flags of image_classification.py."""
    parser = command_line.Parser("")
    recipe.add_network_flags(parser)
    recipe.add_flags(parser)
    return parser.parse_args(flags)


def alone():
    return recipes.Workers(Namespace(kvstore="device", gpus=[]))


def parser_of(script, monkeypatch):
    """The script's own parser."""

    class FoundError(Exception):
        pass

    def found(self, args=None, namespace=None):
        raise FoundError(self)

    module = importlib.import_module(script)
    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", found)
        with pytest.raises(FoundError) as raised:
            module.main([])
    return raised.value.args[0]


@each_script
def test_every_flag_has_help(script, monkeypatch):
    parser = parser_of(script, monkeypatch)
    assert [a.dest for a in parser._actions if not a.help] == []
    parser.format_help()  # its % signs are escaped


@pytest.mark.parametrize(("script", "theirs", "ours"), [
    ("image_classification", "--num-epochs 3", "--epochs 3"),
    ("image_classification", "--num-gpus 2", "--gpus 0,1"),
    ("image_classification", "--num-gpus 0", ""),
    ("image_classification", "--num-data-workers 4", "--num-workers 4"),
    ("image_classification", "-j 4", "--num-workers 4"),
    ("image_classification", "--input-size 64", "--image-size 64"),
    ("image_classification", "--rec-train a.rec --rec-val b.rec", "--dataset a.rec --val b.rec"),
    ("image_classification", "--save-frequency 2", "--save-period 2"),
    ("image_classification", "--num-classes 7", "--classes 7"),
    ("image_classification", "--label-smoothing --last-gamma",
     "--last-gamma --label-smoothing 0.1"),
    ("train_imagenet", "--epochs 3", "--num-epochs 3"),
    ("train_imagenet", "--lr-decay 0.2 --lr-decay-epoch 4,5",
     "--lr-factor 0.2 --lr-step-epochs 4,5"),
    ("train_imagenet", "--rec-train a.rec --rec-val b.rec",
     "--data-train a.rec --data-val b.rec"),
    ("train_imagenet", "--momentum 0.8 --kvstore local", "--mom 0.8 --kv-store local")])
def test_gluoncv_flag_names_are_accepted(script, theirs, ours, monkeypatch):
    parser = parser_of(script, monkeypatch)
    assert vars(parser.parse_args(theirs.split())) == vars(parser.parse_args(ours.split()))


@pytest.mark.parametrize("command", [
    "--rec-train /rec/train.rec --rec-train-idx /rec/train.idx --rec-val /rec/val.rec "
    "--rec-val-idx /rec/val.idx --model resnet50_v1b --mode hybrid --lr 0.4 --lr-mode cosine "
    "--num-epochs 120 --batch-size 128 --num-gpus 8 -j 60 --warmup-epochs 5 --dtype float16 "
    "--use-rec --last-gamma --no-wd --label-smoothing --save-dir params --logging-file best.log",
    "--num-epochs 240 --mode hybrid --num-gpus 2 -j 8 --batch-size 64 --wd 0.0001 --lr 0.1 "
    "--lr-decay 0.1 --lr-decay-epoch 80,160 --model cifar_resnet20_v1"])
def test_published_gluoncv_commands_are_accepted(command, monkeypatch):
    parser_of("image_classification", monkeypatch).parse_args(command.split())


@pytest.mark.parametrize(("script", "flags", "message"), [
    ("image_classification", "--lr nan", "must be a finite number >= 0. Received: 'nan'"),
    ("image_classification", "--label-smoothing 2", "must be a number from 0 to 1"),
    ("image_classification", "--mixup-alpha 0", "must be a finite number > 0"),
    ("image_classification", "--resume-epoch -1", "must be an integer >= 0"),
    ("image_classification", "--rgb-std 58,0,57", "must be above 0. Received: '58,0,57'"),
    ("image_classification", "--batchsize=8", "unrecognized arguments: --batchsize=8 ("),
    ("fine_tune", "--freeze -1", "must be an integer >= 0. Received: '-1'"),
    ("train_imagenet", "--rgb-std 58,0,57", "must be above 0. Received: '58,0,57'"),
    ("train_imagenet", "--num-examples -5", "must be an integer >= 1. Received: '-5'"),
    ("train_imagenet", "--momentum 9", "must be a number from 0 to 1. Received: '9'"),
    ("image_classification", "--dtyp float16", "unrecognized arguments: --dtyp"),
    ("train_imagenet", "--data-trai a.rec", "unrecognized arguments: --data-trai"),
    ("lr_find", "--teacher resnet18_v1", "--teacher: the sweep starts with a new network"),
    ("lr_find", "--resume", "--resume: the sweep starts with a new network"),
    ("lr_find", "--resume-params a.params", "--resume-params: the sweep starts with a new"),
    ("fine_tune", "--pretrained a --model resnet18_v1", "unrecognized arguments: --model"),
    ("fine_tune", "--pretrained a --last-gamma", "unrecognized arguments: --last-gamma"),
    ("train_imagenet", "--loss cross", "argument --loss: invalid choice: 'cross'"),
    ("train_imagenet", "--image-shape 3,-32,32", "takes channels,height,width, such as 3,224"),
    ("train_imagenet", "--load-epoch 0", "--load-epoch: must be an integer >= 1"),
    ("image_classification", "--rgb-mean nan", "--rgb-mean: must be one finite number or three"),
    ("image_classification", "--rgb-mean 5,4", "--rgb-mean: must be one finite number or three"),
    ("image_classification", "--gpus 0,x", "must be integers >= 0, such as 0,2. Received: '0,x'"),
    ("image_classification", "--gpus=-1", "must be integers >= 0, such as 0,2. Received: '-1'"),
    ("image_classification", "--crop-ratio 0", "--crop-ratio: must be above 0, and at most 1"),
    ("image_classification", "--temperature 0", "--temperature: must be a finite number > 0"),
    ("image_classification", "--seed 5000000000", "--seed: must be an integer from 0 to")])
def test_invalid_flag_is_one_line(script, flags, message, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(script).main(flags.split())
    line, = capsys.readouterr().err.splitlines()
    assert message in line


def test_missing_dataset_is_named_before_existing_run(monkeypatch, tmp_path):
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # global
    (tmp_path / "checkpoint.json").write_text("{}")
    flags = ["--dataset", str(tmp_path / "missing"), "--save-dir", str(tmp_path)]
    with pytest.raises(ValueError, match="missing does not exist"):
        recipe.main(flags)


def test_top_k_beyond_the_classes_is_one_line():
    with pytest.raises(ValueError, match="--top-k must be from 2 to --num-classes 10, or 0"):
        train_imagenet.main(["--network", "alexnet", "--top-k", "50", "--num-classes", "10"])


@pytest.mark.parametrize(("optimizer", "momentum"), [
    ("sgd", 0.8), ("SGD", 0.8), ("lbsgd", 0.8), ("nag", 0.8), ("adam", None), ("adamw", None)])
def test_momentum_reaches_every_optimizer_that_has_one(optimizer, momentum):
    args = parse(["--optimizer", optimizer, "--momentum", "0.8"])
    trainer = recipe.make_trainer(args, recipe.make_network(args, [mx.cpu()]))
    assert getattr(trainer.optimizer, "momentum", None) == momentum


def test_lr_find_uses_training_images():
    lr_find = importlib.import_module("lr_find")
    loader = [(mx.nd.arange(4).reshape((4, 1)), mx.nd.arange(4))]
    for flags, shape in (([], (4,)), (["--mixup"], (4, 10))):
        batches = lr_find.Batches(parse(flags), loader, mx.cpu())
        (_, label), = batches
        assert label.shape == shape


def loaders(flags):
    return images.image_loaders(parse(flags.split()), alone())


def rates(steps, flags):
    """The learning rates after these steps: --lr 0.8, 4 epochs of 10 steps."""
    args = parse(["--lr", "0.8", "--epochs", "4", *flags.split()])
    schedule = recipes.lr_schedule(args, 10)
    return [round(schedule(step), 6) for step in steps]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_last_batch_of_validation_may_be_smaller_than_number_of_devices(count):
    net = ready(mx.gluon.nn.Dense(3, in_units=2), ctx=[mx.cpu(0), mx.cpu(1)])
    data, label = mx.nd.random.normal(shape=(count, 2)), mx.nd.arange(count) % 3
    loss_fn = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    results = [images.validate(net, [(data, label)], devices, loss_fn)
               for devices in ([mx.cpu(0)], [mx.cpu(0), mx.cpu(1)])]
    assert results[0] == pytest.approx(results[1])


@pytest.mark.parametrize("prefix", ["output_", "fc_output"])
def test_head_with_output_in_its_name_is_found(prefix):
    data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name=f"{prefix}fwd")
    symbol = mx.sym.FullyConnected(data, num_hidden=3, name=f"{prefix}head")
    assert symbolic_fine_tune.without_head(symbol).name == f"{prefix}fwd"
    for layer in (f"{prefix}fwd", f"{prefix}fwd_output"):
        assert symbolic_fine_tune.without_head(symbol, layer).name == f"{prefix}fwd"


@pytest.mark.parametrize("error", [gluon_amp.LossScaleError("diverged"), ImportError("no package")])
def test_user_errors_are_one_line(error):
    def main():
        raise error
    with pytest.raises(SystemExit, match=f"{error} .DEBUG=1 shows where.$"):
        command_line.run(main)


def test_schedule_warms_up_and_decays():
    assert rates([1, 20, 21, 31], "--lr-decay-epoch 2,3 --lr-decay 0.5") == [0.8, 0.8, 0.4, 0.2]
    warmup = "--lr-mode step --warmup-epochs 1 --warmup-lr 0.2"
    assert rates([0, 5, 10], warmup) == [0.2, 0.5, 0.8]
    assert rates([0, 9, 10], f"{warmup} --warmup-strategy constant") == [0.2, 0.2, 0.8]
    assert rates([0, 20, 40], "") == [0.8, 0.4, 0.0]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: rates([1], "--lr-mode cosine --lr-decay-epoch 2"),
     r"--lr-decay-epoch is for --lr-mode step\. Received: --.* needs --lr-decay-epoch ''"),
    (lambda: rates([1], "--warmup-epochs 4"),
     r"below the 4 epochs of the training\. Received: 4"),
    (lambda: rates([], "--lr-decay-epoch 2,1"), "must be an increasing"),
    (lambda: rates([], "--lr-decay-epoch 0"), "greater or equal than 1"),
    (lambda: rates([], "--lr-mode step --warmup-epochs 1 --warmup-lr 1"), "has to be higher"),
    (lambda: rates([], "--lr-mode step --warmup-lr 1"), "has to be higher"),
    (lambda: loaders("--use-rec"),
     "--use-rec needs --rec-train FILE.rec. Received: --dataset digits"),
    (lambda: loaders("--rec-val a.rec"),
     "digits has its own validation images. Received: --val a.rec"),
    (lambda: loaders("--crop-ratio 0.875 --random-crop"),
     "the images of digits are not preprocessed: remove"),
    (lambda: loaders("--input-size 64"), "the images of digits are not preprocessed: remove"),
    (lambda: model_zoo.zoo_network("zzzz"), r"model zoo has zzzz$"),  # which has no similar name
    (lambda: model_zoo.zoo_network("resnet18_v1", last_gamma=True),
     "resnet18_v1 does not take all of last_gamma"),
    (lambda: recipe.make_network(parse(["--last-gamma"]), [mx.cpu()]),
     "small does not take all of classes, last_gamma"),
    (lambda: recipe.convert(parse(["--policy", "float17"]), model_zoo.small_network(10)),
     "Received: 'float17'"),
    (lambda: recipe.make_network(parse(["--use-pretrained"]), [mx.cpu()]),
     "small does not take all of pretrained"),
    (lambda: recipe.make_loss(parse(["--teacher", "resnet18_v1"]))(
        mx.nd.ones((2, 10)), mx.nd.ones(2), mx.nd.ones((2, 1000))),
     "resnet18_v1 has 1000 classes, and the network 10"),
    (lambda: train_imagenet.check_network(get_symbol("alexnet", 10, "3,48,48", "float16"),
                                          (3, 48, 48)),
     r"does not take --image-shape 3,48,48: .*exceeds")])
def test_incompatible_flags_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("name", "near"), [
    ("resnet19_v1", "resnet18_v1"), ("mobilnet1.0", "mobilenet1.0"), ("vgg61", "vgg16")])
def test_mistyped_network_suggests_correct_name(name, near):
    with pytest.raises(ValueError, match=re.escape("Did you mean")) as raised:
        model_zoo.zoo_network(name)
    guesses = str(raised.value).partition("Did you mean ")[2].rstrip("?").split(" or ")
    assert near in guesses
    assert len(set(guesses)) == len(guesses)


@pytest.mark.skipif(find_spec("gluoncv") is None, reason="gluoncv is not installed")
@pytest.mark.parametrize("before", ["", "import torch; "])
def test_gluoncv_networks_load_beside_pytorch_2(before, tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.13.0'")
    code = (f"import model_zoo; {before}model_zoo.zoo_network('cifar_resnet20_v1'); "
            "import torch; print(torch.__version__)")
    path = os.pathsep.join([str(tmp_path), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    assert printed(code, PYTHONPATH=path) == "2.13.0\n"


def test_batch_norm_flag_adds_batch_norms_to_vgg():
    plain, normed = (recipe.make_network(parse(["--model", "vgg11", *flags]),
                                    [mx.cpu()]).collect_params()
                     for flags in ([], ["--batch-norm"]))
    assert not [name for name in plain if "batchnorm" in name]
    assert [name for name in normed if "batchnorm" in name]


def test_no_wd_excludes_biases_and_norms_from_weight_decay():
    args = parse(["--no-wd"])
    net = recipe.make_network(args, [mx.cpu()])
    recipe.make_trainer(args, net)
    spared = {name.rsplit("_", 1)[-1] for name, p in net.collect_params().items()
              if p.wd_mult == 0}
    assert spared == {"beta", "gamma", "bias"}
    assert [p.wd_mult for name, p in net.collect_params(".*weight").items()] == [1.0] * 4


def test_random_crops_have_scale_of_validation(monkeypatch):
    parser = parser_of("image_classification", monkeypatch)
    columns = np.broadcast_to(np.arange(60, dtype="uint8")[None, :, None], (40, 60, 3))

    def pixels(train, *flags):
        args = parser.parse_args(flags)
        return images.image_transform(args, 35, train)(mx.nd.array(columns, dtype="uint8"))[0, :, 0]

    flags = ["--crop-ratio", "0.875", "--random-crop"]  # 35 / 0.875 is 40: no scaling
    np.testing.assert_array_equal(pixels(False, *flags), np.arange(12, 47))  # the center
    begins = set()
    for _ in range(20):
        row = pixels(True, *flags)
        row = row if row[0] < row[-1] else row[::-1]  # mirrored
        np.testing.assert_array_equal(row, row[0] + np.arange(35))
        begins.add(row[0])
    assert len(begins) > 5
    with pytest.raises(ValueError, match="--random-crop needs a --crop-ratio below 1"):
        pixels(True, "--random-crop")


PNG = b"\x89PNG"  # the first bytes of an image


def test_distillation_loss_matches_hinton():
    args = parse(["--temperature", "3", "--hard-weight", "0.25", "--classes", "4"])
    rng = np.random.default_rng(0)
    out, taught = rng.standard_normal((2, 5, 4))
    label = np.arange(5) % 4

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    hard = -log_softmax(out)[np.arange(5), label]
    soft = -(np.exp(log_softmax(taught / 3)) * log_softmax(out / 3)).sum(1)
    found = recipe.make_loss(args)(*map(mx.nd.array, (out, label, taught)))
    np.testing.assert_allclose(found.asnumpy(), 0.25 * hard + 0.75 * 9 * soft, rtol=1e-5)


def test_checkpoint_of_another_network_or_type_is_refused(tmp_path):

    def network(dtype, **flags):
        return get_symbol("resnet-v1", 10, "3,32,32", dtype, **flags)

    prefix = str(tmp_path / "net")
    network("float16", num_layers=20).save(f"{prefix}-symbol.json")
    train_imagenet.check_network(network("float16", num_layers=20), (3, 32, 32), prefix)
    for other in (network("float32", num_layers=20), network("float16", num_layers=32)):
        with pytest.raises(ValueError, match=r"net-symbol.json has another network or --dtype"):
            train_imagenet.check_network(other, (3, 32, 32), prefix)


@pytest.mark.parametrize(("label", "contents", "message"), [
    (float("nan"), PNG, "has a label nan"), (-1, PNG, "has a label -1"),
    (0.5, PNG, "has a label 0.5"),
    ([2.0], PNG, "has a label 2, and the network 2 classes"),
    ([0.0, 1.0], PNG, "has 2 labels, and the network 2 classes"),
    (1, PNG, None), ([1.0], PNG, None)])
def test_invalid_record_is_refused_before_training(label, contents, message, tmp_path):
    path = write_records(tmp_path / "a.rec", [(0, PNG), (label, contents)])
    if message is None:
        assert images.check_records(path, 2) == 2
    else:
        with pytest.raises(ValueError, match=f"a.rec {message}"):
            images.check_records(path, 2)


@pytest.mark.parametrize("contents", [b"no image", b""])
def test_record_without_an_image_is_refused(contents, recorded):
    recorded.file = write_records(recorded.folder / "a.rec", [
        *((0, png(Image.new("RGB", (4, 4)))) for _ in range(4)), (0, contents)])
    with pytest.raises(mx.MXNetError):
        recorded.fit("--num-epochs", "1")
    _, loader, _ = folder_loaders(recorded.file, recorded.file)
    with pytest.raises(mx.MXNetError):
        [data.wait_to_read() for _ in range(9) for data, _ in loader]


def write_records(path, rows):
    """Writes labels and images into a RecordIO file with an index."""
    path = str(path)
    record = mx.recordio.MXIndexedRecordIO(path.replace(".rec", ".idx"), path, "w")
    for i, (label, image) in enumerate(rows):
        record.write_idx(i, mx.recordio.pack(mx.recordio.IRHeader(0, label, i, 0), image))
    record.close()
    return path


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_images(folder, **counts):
    """Writes gray images of 8 x 8 pixels, darker for each class, into folders of classes."""
    for i, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for j in range(count):
            Image.new("RGB", (8, 8), (40 * i + 1,) * 3).save(folder / name / f"{j}.png")
    return str(folder)


def folder_loaders(train, val, *more):
    args = parse(["--dataset", train, "--val", val, "--image-size", "8", "--batch-size", "4",
                         *more])
    return args, *images.image_loaders(args, alone())[1:]


def test_folders_of_validation_have_the_classes_of_training(tmp_path):
    train = write_images(tmp_path / "train", a=4, b=4, c=4)
    (tmp_path / "train" / "aa").mkdir()  # without images, but a class: MXNet counts it
    val = write_images(tmp_path / "val", b=1, c=2)
    (tmp_path / "val" / "a").mkdir()  # without images
    write_images(tmp_path / "val", **{".ipynb_checkpoints": 3})
    args, _, loader = folder_loaders(train, val)
    assert [label.asnumpy().tolist() for _, label in loader] == [[2, 3, 3]]
    assert images.number_of_classes(args) == 4
    args = parse(["--dataset", "imagenet", "--data-dir", str(tmp_path), "--batch-size", "4"])
    images.image_loaders(args, alone())
    assert images.number_of_classes(args) == 1000
    other = write_images(tmp_path / "other", a=1, d=1)
    with pytest.raises(ValueError, match=r"other has the classes d, which the training data lacks"):
        folder_loaders(train, other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no images: it must have a folder for each"):
        folder_loaders(train, str(tmp_path / "empty"))


def test_some_examples_of_a_folder_have_all_classes(tmp_path):
    train = write_images(tmp_path / "train", a=30, b=30)
    _, loader, _ = folder_loaders(train, train, "--examples", "20")
    labels = np.concatenate([label.asnumpy() for _, label in loader])
    assert len(labels) == 20
    assert set(labels) == {0, 1}


def test_damaged_image_of_a_folder_is_named(tmp_path):
    train = write_images(tmp_path / "train", a=4)
    path = tmp_path / "train" / "a" / "2.png"
    path.write_bytes(path.read_bytes()[:50])
    _, _, loader = folder_loaders(train, train)
    with pytest.raises(ValueError, match=r"a/2\.png is not an image that MXNet can read"):
        list(loader)


def test_label_of_a_record_may_be_an_array_of_one(tmp_path):
    image = png(Image.new("RGB", (8, 8)))
    path = write_records(tmp_path / "a.rec", [([label], image) for label in range(4)])
    _, _, loader = folder_loaders(path, path)
    (_, label), = loader
    assert label.asnumpy().tolist() == [0, 1, 2, 3]


# ---- train_imagenet.py

class Recorded:
    """A RecordIO file of 10 images, and trainings with it."""

    def __init__(self, folder):
        self.folder, self.file = folder, write_records(folder / "a.rec", [
            (i % 2, png(Image.new("RGB", (4, 4), (25 * i,) * 3))) for i in range(10)])

    def flags(self, *more):
        parser = command_line.Parser("")
        train_imagenet.add_flags(parser)
        return train_imagenet.parse_flags(parser, [
            "--data-train", self.file, "--data-train-idx", str(self.folder / "a.idx"),
            "--data-val", self.file, "--num-classes", "2", "--image-shape", "3,4,4",
            "--batch-size", "4", "--disp-batches", "1", "--rgb-std", "99,99,99",
            "--save-dir", str(self.folder / "run"), "--model-prefix",
            str(self.folder / "run" / "net"), *more])

    def fit(self, *more):
        """Trains; returns the lines of the log."""
        dense = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.var("data")), num_hidden=2, name="out")
        train_imagenet.fit(self.flags(*more), mx.sym.SoftmaxOutput(dense, name="softmax"))
        return gluon_amp.reports.Log.read(str(self.folder / "run" / "log.jsonl"))[1]


@pytest.fixture()
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # global
    return Recorded(tmp_path)


def test_rate_decays_after_epochs_that_batches_do_not_divide(recorded):
    lines = recorded.fit("--num-epochs", "4", "--lr-step-epochs", "2,3")
    rates = {(line["epoch"], line["batch"]): line["lr"] for line in lines if "batch" in line}
    assert [rates[epoch, 0] for epoch in range(4)] == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert len(rates) == 4 * 2


def test_validation_loss_is_the_mean_over_images(recorded, caplog):
    with caplog.at_level(logging.INFO):
        *_, last = recorded.fit("--num-epochs", "1", "--loss", "ce")
    of_mxnet, = re.findall(r"Validation-cross-entropy=(\S+)", caplog.text)
    assert last["validation_loss"] == pytest.approx(float(of_mxnet), rel=1e-4)


@pytest.mark.parametrize("seed", ["0", "2147483647"])
def test_resumed_training_draws_other_random_numbers(seed, recorded):
    def order(completed_epochs):
        train, *_ = train_imagenet.iterators(recorded.flags("--seed", seed),
                                             completed_epochs=completed_epochs)
        return [float(image.mean().asscalar()) for batch in train for image in batch.data[0]]
    assert order(0) == order(0)
    assert order(1) != order(0)
    assert sorted(order(1)[:10]) == sorted(order(0)[:10])


@pytest.mark.filterwarnings("ignore:Parameters already initialized")  # of MXNet
def test_resumed_training_needs_its_flags(recorded):
    recorded.fit("--num-epochs", "1", "--resume")
    with pytest.raises(ValueError, match=r"flags of the original run: lr was 0.1, is 0.2"):
        recorded.fit("--num-epochs", "2", "--resume", "--lr", "0.2")
    with pytest.raises(ValueError, match=r"flags of the original run: batch_size was 4, is 2"):
        recorded.fit("--num-epochs", "2", "--resume", "--batch-size", "2")
    lines = recorded.fit("--num-epochs", "2", "--resume", "--loss", "ce")
    assert [line["epoch"] for line in lines if "batch" not in line] == [0, 1]


def test_log_of_another_prefix_is_not_overwritten(recorded):
    before = recorded.fit("--num-epochs", "2")
    other = str(recorded.folder / "other")
    recorded.fit("--num-epochs", "1", "--model-prefix", other, "--save-dir", "")
    for prefix in (other, str(recorded.folder / "none")):
        with pytest.raises(ValueError, match="flags of the original run: model_prefix was"):
            recorded.fit("--num-epochs", "2", "--resume", "--model-prefix", prefix)
    with pytest.raises(ValueError, match=r"log\.jsonl exists"):
        recorded.fit("--num-epochs", "2", "--model-prefix", other)
    assert gluon_amp.reports.Log.read(str(recorded.folder / "run" / "log.jsonl"))[1] == before


def test_log_without_the_epoch_of_the_checkpoint_is_not_overwritten(recorded):
    before = recorded.fit("--num-epochs", "1")
    recorded.fit("--num-epochs", "2", "--save-dir", "")
    with pytest.raises(ValueError, match=r"has no end of epoch 1, and .*net-0002\.params is of"):
        recorded.fit("--num-epochs", "3", "--resume")
    assert gluon_amp.reports.Log.read(str(recorded.folder / "run" / "log.jsonl"))[1] == before


def test_interrupted_validation_does_not_lose_an_epoch(recorded, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_imagenet, "validate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            recorded.fit("--num-epochs", "1")
    lines = recorded.fit("--num-epochs", "2", "--resume")
    assert [line["epoch"] for line in lines if "validation_loss" in line] == [0, 1]


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("examples", "steps"), [("4", 1), ("40", 2)])
def test_epochs_have_at_most_the_images_of_the_file(examples, steps, recorded):
    *_, last = recorded.fit("--num-epochs", "1", "--num-examples", examples)
    assert last["steps"] == steps


def test_last_epoch_is_saved_besides_every_nth(recorded):
    recorded.fit("--num-epochs", "3", "--save-period", "2")
    assert sorted(path.name for path in (recorded.folder / "run").glob("*.params")) == \
        ["net-0002.params", "net-0003.params"]


def test_training_that_ended_before_its_first_checkpoint_starts_again(recorded, monkeypatch):
    monkeypatch.setattr(gluon_amp.Module, "save_checkpoint", lambda *args, **options: None)
    recorded.fit("--num-epochs", "1", "--resume")
    lines = recorded.fit("--num-epochs", "2", "--resume")
    assert [line["epoch"] for line in lines if "batch" not in line] == [0, 1]


def test_skipped_update_of_a_macrobatch_has_one_line(recorded):
    lines = recorded.fit("--num-epochs", "1", "--macrobatch-size", "4", "--batch-size", "2",
                         "--loss-scale", "2", "--rgb-std", "1e-37")  # infinite images
    assert [line.get("skip") for line in lines if "batch" in line] == [True, True]
    assert lines[-1]["skipped"] == lines[-1]["steps"] == 2


def test_damaged_checkpoint_is_named(recorded):
    recorded.fit("--num-epochs", "1")
    path = recorded.folder / "run" / "net-0001.params"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"net-0001.params is damaged"):
        recorded.fit("--num-epochs", "2", "--resume")


def test_missing_index_is_named(tmp_path):
    path = write_records(tmp_path / "a.rec", [(1, PNG)])
    (tmp_path / "a.idx").unlink()
    args = parse(["--dataset", path, "--batch-size", "1"])
    with pytest.raises(ValueError, match=r"a.rec needs an index next to it: .*a\.idx"):
        images.image_loaders(args, alone())
    args.rec_train_idx = "b.idx"
    with pytest.raises(ValueError, match=r"a\.idx\. Received: b\.idx"):
        images.image_loaders(args, alone())
    whole = (tmp_path / "a.rec").read_bytes()
    (tmp_path / "a.rec").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"a\.rec is damaged: its last record is cut"):
        images.image_loaders(args, alone())


def test_images_of_records_are_normalized_and_keep_their_order(tmp_path):
    rng = np.random.RandomState(0)
    pixels = rng.randint(0, 256, (6, 5, 5, 3)).astype("uint8")
    path = write_records(tmp_path / "a.rec", enumerate(map(png, map(Image.fromarray, pixels))))
    args = parse(["--dataset", path, "--val", path, "--image-size", "5", "--batch-size", "4",
                         "--rgb-mean", "127.5,102,76.5", "--rgb-std", "51"])
    _, loader, val_loader = images.image_loaders(args, alone())
    expected = (pixels.transpose(0, 3, 1, 2) / 255
                - np.float32([0.5, 0.4, 0.3])[:, None, None]) / 0.2
    for _ in range(2):  # the second time, from memory
        data, labels = (np.concatenate([part.asnumpy() for part in parts])
                        for parts in zip(*val_loader))
        np.testing.assert_array_equal(labels, np.arange(6))
        np.testing.assert_allclose(data, expected, rtol=1e-5, atol=1e-6)
        for data, labels in loader:
            for image, label in zip(data.asnumpy(), labels.asnumpy()):
                right = expected[int(label)]
                assert any(np.allclose(image, each, rtol=1e-5, atol=1e-6)
                           for each in (right, right[:, :, ::-1]))


def test_skipped_epochs_count_for_learning_rate(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # global
    flags = ["--examples", "16", "--batch-size", "8", "--epochs", "4", "--resume-epoch"]
    with pytest.raises(ValueError, match=r"--resume-epoch 4 leaves none of the 4 epochs"):
        recipe.main([*flags, "4"])
    with at_most_traces(2):  # of training and of prediction
        recipe.main([*flags, "3", "--lr", "0.8", "--lr-decay-epoch", "2"])
    _, lines = gluon_amp.reports.Log.read("runs/image_classification/log.jsonl")
    line, = (line for line in lines if "batch" not in line)
    assert line["epoch"] == 3
    assert line["lr"] == pytest.approx(0.08)
