"""The scripts in example/ are for copying: public names, one shared module, each fact once."""
import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gluon_amp
import image_classification as recipe
import numpy as np
import pytest
import recipes
from gluon_amp._mxnet import mx
from gluon_amp.policy import APEX, POLICIES

EXAMPLES = Path(__file__).parents[1] / "example"
REFERENCE = (EXAMPLES.parent / "docs" / "api.md").read_text()
SCRIPTS = {path.stem: ast.parse(path.read_text()) for path in EXAMPLES.glob("*.py")
           if path.name != "recipes.py"}
each_script = pytest.mark.parametrize("script", SCRIPTS)


def imported(tree):
    """Modules, and names from modules, that a script imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@each_script
def test_only_public_names_of_gluon_amp_are_used(script):
    for module, name in imported(SCRIPTS[script]):
        if module.split(".")[0] == "gluon_amp":
            assert module == "gluon_amp" and name in {None, *gluon_amp.__all__} \
                or f"{module}.{name}\n" in REFERENCE, (module, name)
    for node in ast.walk(SCRIPTS[script]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = {"amp": {*gluon_amp.__all__, "__version__"},
                     "recipes": {name for name in dir(recipes) if name[0] != "_"}}
            assert node.attr in names.get(node.value.id, {node.attr}), node.attr


def beside(script, seen=()):
    """The other scripts that one needs, also by way of another."""
    names = {module for module, _ in imported(SCRIPTS[script])} & set(SCRIPTS) - {script, *seen}
    return names.union(*(beside(name, (script, *seen)) for name in names))


@each_script
def test_a_script_needs_the_shared_module_and_at_most_one_other_script(script):
    assert "recipes" in {module for module, _ in imported(SCRIPTS[script])}
    assert len(beside(script)) <= 1


def test_the_package_says_where_the_scripts_module_is():
    with pytest.raises(AttributeError, match=r"'recipes'\. .* module is example/recipes\.py of"):
        gluon_amp.recipes  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'recipe'$"):
        gluon_amp.recipe  # noqa: B018


def test_no_function_is_written_in_two_scripts():
    functions = [node.name for tree in SCRIPTS.values() for node in tree.body
                 if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "main"]
    both = {name for name in functions if functions.count(name) > 1}
    assert both <= {"add_arguments", "network"}  # of Gluon, and of a Module; new, and pretrained
    assert not set(functions) & set(dir(recipes))


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
def test_every_flag_has_a_line_of_help(script, monkeypatch):
    parser = parser_of(script, monkeypatch)
    assert [a.dest for a in parser._actions if not a.help] == []
    parser.format_help()  # its % are right


def test_every_policy_that_has_a_name_can_be_chosen(monkeypatch):
    actions = parser_of("image_classification", monkeypatch)._actions
    policy, = (action for action in actions if action.dest == "policy")
    assert list(policy.choices) == [*POLICIES, *APEX]


@pytest.mark.parametrize(("script", "theirs", "ours"), [
    ("image_classification", "--num-epochs 3", "--epochs 3"),
    ("image_classification", "--num-gpus 2", "--gpus 0,1"),
    ("image_classification", "--num-gpus 0", ""),
    ("image_classification", "--num-data-workers 4", "--num-workers 4"),
    ("image_classification", "-j 4", "--num-workers 4"),
    ("image_classification", "--input-size 64", "--image-size 64"),
    ("image_classification", "--rgb-mean 51,102,153", "--mean 0.2,0.4,0.6"),
    ("image_classification", "--rgb-std 51", "--std 0.2"),
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
def test_flags_have_the_names_of_gluoncv_too(script, theirs, ours, monkeypatch):
    parser = parser_of(script, monkeypatch)
    assert vars(parser.parse_args(theirs.split())) == vars(parser.parse_args(ours.split()))


@pytest.mark.parametrize("command", [
    "--rec-train /rec/train.rec --rec-train-idx /rec/train.idx --rec-val /rec/val.rec "
    "--rec-val-idx /rec/val.idx --model resnet50_v1b --mode hybrid --lr 0.4 --lr-mode cosine "
    "--num-epochs 120 --batch-size 128 --num-gpus 8 -j 60 --warmup-epochs 5 --dtype float16 "
    "--use-rec --last-gamma --no-wd --label-smoothing --save-dir params --logging-file best.log",
    "--num-epochs 240 --mode hybrid --num-gpus 2 -j 8 --batch-size 64 --wd 0.0001 --lr 0.1 "
    "--lr-decay 0.1 --lr-decay-epoch 80,160 --model cifar_resnet20_v1"])
def test_commands_that_gluoncv_publishes_are_understood(command, monkeypatch):
    parser_of("image_classification", monkeypatch).parse_args(command.split())


@pytest.mark.parametrize(("name", "text"), [
    ("flags.json", json.dumps({"batch-size": 8, "lr_decay_epoch": [3, 4], "mixup": True,
                               "no-wd": False, "gpus": None, "lr": 0.5, "num-epochs": 2})),
    ("flags.yaml", "batch-size: 8\nlr_decay_epoch: [3, 4]\nmixup: true\nno-wd: false\ngpus:\n"
                   "lr: 0.5\nnum-epochs: 2\n")])
def test_flags_can_stand_in_a_file_and_the_command_line_counts_more(name, text, tmp_path,
                                                                  monkeypatch):
    (tmp_path / name).write_text(text)
    parser = parser_of("image_classification", monkeypatch)
    args = parser.parse_args(["--config", str(tmp_path / name), "--lr", "0.25"])
    assert vars(args) == vars(parser.parse_args(
        "--batch-size 8 --lr-decay-epoch 3,4 --mixup --lr 0.25 --epochs 2".split()))


@pytest.mark.parametrize(("name", "text", "message"), [
    ("flags.yaml", "batchsize: 8", "there is no flag --batchsize. Did you mean --batch-size"),
    ("flags.yaml", "batch-size: 0", "--batch-size: must be a whole number from 1 on. Received"),
    ("flags.yaml", "[1, 2]", "must hold names of flags and their values. Received: list"),
    ("flags.yaml", "a: [", "flags.yaml is no YAML"),
    ("flags.json", "{", "Expecting property name"),
    ("flags.yaml", "config: other.yaml", "--config is written in full, and in the command line"),
    ("other.yaml", "", "flags.yaml does not exist")])
def test_a_wrong_file_of_flags_is_one_line(name, text, message, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_text(text)
    path = tmp_path / name.replace("other", "flags")
    with pytest.raises(SystemExit):
        parser_of("lr_find", monkeypatch).parse_args(["--config", str(path)])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("script", "flags", "message"), [
    ("image_classification", "--conf /dev/null", "--config is written in full, and in the"),
    ("lr_find", "--teacher resnet18_v1", "--teacher: the sweep begins with a new network"),
    ("lr_find", "--resume", "--resume: the sweep begins with a new network"),
    ("lr_find", "--resume-params a.params", "--resume-params: the sweep begins with a new"),
    ("fine_tune", "--pretrained a --model resnet18_v1", "unrecognized arguments: --model"),
    ("fine_tune", "--pretrained a --last-gamma", "unrecognized arguments: --last-gamma"),
    ("train_imagenet", "--loss cross", "argument --loss: invalid choice: 'cross'"),
    ("train_imagenet", "--load-epoch 0", "--load-epoch: must be a whole number from 1 on"),
    ("train_imagenet", "--rgb-mean 127", "--rgb-mean: takes three numbers, of red, green and")])
def test_a_flag_without_an_effect_is_refused(script, flags, message, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(script).main(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("flags", "message"), [
    ("--use-rec", "--use-rec needs --rec-train FILE.rec. Received: --dataset digits"),
    ("--rec-val a.rec", "digits has images of its own to validate. Received: --val a.rec"),
    ("--crop-ratio 0.875 --random-crop --rgb-mean 1", "the images of digits are used as they are, "
     "without --crop-ratio, --random-crop, --mean"),
    ("--input-size 64", "the images of digits are used as they are, without --image-size"),
    ("--rec-train-idx a.idx", "--rec-train-idx is for a .rec file. Received: digits")])
def test_a_flag_that_the_dataset_would_pass_over_is_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        recipes.image_loaders(recipe.parse(flags.split()), recipes.Ranks())


@pytest.mark.parametrize(("script", "flags", "message"), [
    ("image_classification", "--lr nan", "must be a finite number from 0 on. Received: 'nan'"),
    ("image_classification", "--label-smoothing 2", "must be a number from 0 to 1"),
    ("image_classification", "--mixup-alpha 0", "must be a finite number above 0"),
    ("image_classification", "--resume-epoch -1", "must be a whole number from 0 on"),
    ("image_classification", "--rgb-std 58,0,57", "must be above 0. Received: '58,0,57'"),
    ("fine_tune", "--freeze -1", "must be a whole number from 0 on. Received: '-1'"),
    ("train_imagenet", "--rgb-std 58,0,57", "must be above 0. Received: '58,0,57'"),
    ("train_imagenet", "--num-examples -5", "must be a whole number from 1 on. Received: '-5'"),
    ("train_imagenet", "--momentum 9", "must be a number from 0 to 1. Received: '9'")])
def test_a_number_that_makes_no_sense_is_one_line(script, flags, message, monkeypatch, capsys):
    parser = parser_of(script, monkeypatch)
    with pytest.raises(SystemExit):
        parser.parse_args(flags.split())
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("flags", "message"), [
    ("--top-k 50 --num-classes 10", "--top-k must be from 2 to --num-classes 10, or 0 for none"),
    ("--image-shape 3,-32,32", "--image-shape takes channels,height,width, such as 3,224,224")])
def test_impossible_sizes_are_one_line(flags, message):
    with pytest.raises(SystemExit, match=message):
        importlib.import_module("train_imagenet").main(["--network", "alexnet", *flags.split()])


@pytest.mark.parametrize(("optimizer", "momentum"), [
    ("sgd", 0.8), ("SGD", 0.8), ("lbsgd", 0.8), ("nag", 0.8), ("adam", None), ("adamw", None)])
def test_the_momentum_reaches_every_optimizer_that_has_one(optimizer, momentum):
    args = recipe.parse(["--optimizer", optimizer, "--momentum", "0.8"])
    trainer = recipe.trainer_of(args, recipe.network(args, [mx.cpu()]))
    assert getattr(trainer.optimizer, "momentum", None) == momentum


def test_the_rate_is_looked_for_on_the_images_that_are_trained_on():
    lr_find = importlib.import_module("lr_find")
    loader = [(mx.nd.arange(4).reshape((4, 1)), mx.nd.arange(4))]
    for flags, shape in (([], (4,)), (["--mixup"], (4, 10))):
        batches = lr_find.Batches(recipe.parse(flags), recipes.Ranks(), loader, mx.cpu())
        (_, label), = batches
        assert label.shape == shape


def test_help_tells_no_default_of_pixels_to_255_that_is_of_pixels_to_1(monkeypatch):
    text = parser_of("image_classification", monkeypatch).format_help()
    assert re.search(r"--mean of pixels\s+from 0 to 255\n", text)


def rates(steps, **options):
    schedule = recipes.schedule(0.8, 10, 4, **options)
    return [round(schedule(step), 6) for step in steps]


def test_the_schedule_warms_up_and_falls():
    assert rates([1, 20, 21, 31], decay_epochs=[2, 3], decay=0.5) == [0.8, 0.8, 0.4, 0.2]
    assert rates([0, 5, 10], warmup_epochs=1, warmup_lr=0.2) == [0.2, 0.5, 0.8]
    assert rates([0, 9, 10], warmup_epochs=1, warmup_lr=0.2, warmup_strategy="constant") == [
        0.2, 0.2, 0.8]
    assert rates([0, 20, 40], mode="cosine") == [0.8, 0.4, 0.0]


def test_epochs_of_steps_are_refused_where_the_rate_falls_as_a_cosine():
    with pytest.raises(ValueError, match=r"--lr-decay-epoch is for --lr-mode step\. Received: --"):
        rates([1], mode="cosine", decay_epochs=[2])


def test_a_warmup_that_leaves_nothing_to_the_cosine_is_refused():
    with pytest.raises(ValueError, match=r"below the 4 epochs of the training\. Received: 4"):
        rates([1], mode="cosine", warmup_epochs=4)


@pytest.mark.parametrize(("name", "near"), [
    ("resnet19_v1", "resnet18_v1"), ("mobilnet1.0", "mobilenet1.0"), ("vgg61", "vgg16")])
def test_a_mistyped_network_brings_up_its_right_name(name, near):
    with pytest.raises(ValueError, match=re.escape("Did you mean")) as raised:
        recipes.zoo_network(name)
    guesses = str(raised.value).partition("Did you mean ")[2].rstrip("?").split(" or ")
    assert near in guesses
    assert len(set(guesses)) == len(guesses)


@pytest.mark.skipif(find_spec("gluoncv") is None, reason="gluoncv is not installed")
@pytest.mark.parametrize("before", ["", "import torch; "])
def test_gluoncvs_networks_are_found_beside_pytorch_2(before, tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.13.0'")
    code = (f"import recipes; {before}recipes.zoo_network('cifar_resnet20_v1'); "
            "import torch; print(torch.__version__)")
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True,
                         text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(
                             [str(tmp_path), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])})
    assert ran.stdout == "2.13.0\n", ran.stderr


def test_a_mistyped_flag_brings_up_its_right_name_in_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parser_of("image_classification", monkeypatch).parse_args(["--batchsize=8"])
    line, = capsys.readouterr().err.splitlines()
    assert "unrecognized arguments: --batchsize=8. Did you mean --batch-size" in line


def test_a_network_that_is_like_no_other_is_refused_without_a_guess():
    with pytest.raises(ValueError, match=r"model zoo has zzzz$"):
        recipes.zoo_network("zzzz")


def test_an_option_that_a_network_does_not_take_is_named():
    with pytest.raises(ValueError, match="resnet18_v1 does not take all of last_gamma"):
        recipes.zoo_network("resnet18_v1", last_gamma=True)


def test_batch_norm_makes_a_vgg_with_batch_norms():
    plain, normed = (recipe.network(recipe.parse(["--model", "vgg11", *flags]),
                                    [mx.cpu()]).collect_params()
                     for flags in ([], ["--batch-norm"]))
    assert not [name for name in plain if "batchnorm" in name]
    assert [name for name in normed if "batchnorm" in name]


def test_weight_decay_spares_biases_and_norms_where_it_is_told_to():
    args = recipe.parse(["--no-wd"])
    net = recipe.network(args, [mx.cpu()])
    recipe.trainer_of(args, net)
    spared = {name.rsplit("_", 1)[-1] for name, p in net.collect_params().items()
              if p.wd_mult == 0}
    assert spared == {"beta", "gamma", "bias"}
    assert [p.wd_mult for name, p in net.collect_params(".*weight").items()] == [1.0] * 4


def test_random_crops_of_gluon_have_the_scale_of_validation(monkeypatch):
    parser = parser_of("image_classification", monkeypatch)
    columns = np.broadcast_to(np.arange(60, dtype="uint8")[None, :, None], (40, 60, 3))

    def pixels(train, *flags):
        args = parser.parse_args([*flags, "--mean", "0", "--std", "1"])
        image = recipes.image_transform(args, 35, train)(mx.nd.array(columns, dtype="uint8"))
        return (255 * image.asnumpy()[0, 0]).round()

    flags = ["--crop-ratio", "0.875", "--random-crop"]  # 35 / 0.875 is 40: nothing is stretched
    np.testing.assert_array_equal(pixels(False, *flags), np.arange(12, 47))  # the middle
    begins = set()
    for _ in range(20):
        row = pixels(True, *flags)
        row = row if row[0] < row[-1] else row[::-1]  # mirrored
        np.testing.assert_array_equal(row, row[0] + np.arange(35))
        begins.add(row[0])
    assert len(begins) > 5
    with pytest.raises(ValueError, match="--random-crop needs a --crop-ratio below 1"):
        pixels(True, "--random-crop")
