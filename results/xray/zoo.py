"""Counts X-ray's false positives on fifty networks of MXNet's and GluonCV's model zoos.

The networks are fresh: random weights, random data, classes at random. If an X-ray has findings,
the network trains in float32, in float32 with the weights changed by up to 2^-12, and in float16.
The findings are confirmed if float16 differs from float32 by more than 1 % plus 0.005 and by more
than twice what the changed weights do; otherwise they are false positives.

    python results/xray/zoo.py [--networks NAME ...] [--output CSV]
"""
import sys
import time

import gluon_amp as amp
import numpy as np
from common import agree, change, last, losses, tabulate
from gluon_amp._mxnet import mx
from gluoncv import model_zoo
from mxnet import gluon, nd

CLASSES = 10
STEPS = 20
PIXELS = 64
LARGER = {"inceptionv3": 299, "googlenet": 224, "alexnet": 96, "densenet121": 224, "xception": 96,
          "squeezenet1.0": 224, "squeezenet1.1": 224, "resnest26": 224}
NETWORKS = """
    resnet18_v1 resnet34_v1 resnet50_v1 resnet18_v2 resnet34_v2 resnet50_v2 vgg11 vgg13 vgg11_bn
    vgg13_bn alexnet densenet121 squeezenet1.0 squeezenet1.1 inceptionv3 mobilenet1.0 mobilenet0.5
    mobilenet0.25 mobilenetv2_1.0 mobilenetv2_0.5 mobilenetv2_0.25 mobilenetv3_small
    mobilenetv3_large se_resnet18_v1 se_resnet34_v1 se_resnet18_v2 se_resnet50_v1 shufflenet_v1
    shufflenet_v2 googlenet xception darknet53 resnet18_v1b resnet34_v1b resnet50_v1b
    cifar_resnet56_v2 resnet50_v1c resnet50_v1d resnet50_v1e resnet50_v1s resnext50_32x4d
    se_resnext50_32x4d resnest14 cifar_resnet20_v1 cifar_resnet56_v1 cifar_resnet20_v2
    cifar_wideresnet16_10 resnest26 hrnet_w18_small_v1_c dla34
""".split()
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def made(name, policy):
    """Returns an initialized and converted network and its batches."""
    mx.random.seed(3)
    np.random.seed(3)
    net = model_zoo.get_model(name, pretrained=False, classes=CLASSES)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    rng = np.random.default_rng(3)
    pixels = 32 if name.startswith("cifar") else LARGER.get(name, PIXELS)
    batches = [(nd.array(rng.standard_normal((4, 3, pixels, pixels))),
                nd.array(rng.integers(0, CLASSES, 4))) for _ in range(2)]
    net(batches[0][0])
    if policy != "float32":
        amp.convert(net, policy)
        net(batches[0][0])
    return net, batches


def trained(name, policy, seed=None):
    """Returns the mean of the last ten losses; infinite if no loss scale has finite gradients."""
    net, batches = made(name, policy)
    if seed is not None:
        change(net, seed)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, clip_norm=1.0,
                          loss_scale=None if policy == "float32" else "dynamic")

    def loss_of(data, label):
        mx.random.seed(3)  # the same dropout
        return LOSS(net(data), label)
    try:
        return last(losses(trainer, batches, loss_of, STEPS))
    except amp.LossScaleError:
        return float("inf")


def examine(name):
    """Returns a row of the table."""
    net, batches = made(name, "float16")
    begin = time.process_time()
    view = amp.xray(net, batches, LOSS, steps=2)
    row = {"network": name, "findings": " ".join(finding.node for finding in view.findings),
           "reasons": "; ".join(dict.fromkeys(finding.reason for finding in view.findings)),
           "keep": " ".join(view.keep), "notes": len(view.notes), "false positive": False,
           "seconds": round(time.process_time() - begin, 1)}
    if view.findings:
        right, changed, found = (trained(name, "float32"), trained(name, "float32", seed=1),
                                 trained(name, "float16"))
        confirmed = not agree(found, right) and abs(found - right) > 2 * abs(changed - right)
        row.update({"float32": round(right, 4), "changed": round(changed, 4),
                    "float16": round(found, 4), "false positive": not confirmed})
    return row


def main():
    table = tabulate(__doc__, "networks", NETWORKS, examine, [
        "network", "findings", "reasons", "keep", "notes", "float32", "changed", "float16",
        "false positive", "seconds"])
    print(f"{len(table)} networks: {sum(bool(row['findings']) for row in table)} with findings, "
          f"{sum(row['false positive'] for row in table)} false positives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
