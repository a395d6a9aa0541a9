"""Measures between which values each threshold of X-ray's rules may lie with the same judgement.

It X-rays the networks of planted.py, elsewhere.py and reported.py, and healthy ones of model zoos.
It judges their counts again with each threshold divided and multiplied by powers of two, up to 2^8.
A case is judged otherwise if the faulty block or operator leaves the first three findings, or
enters them, or if a healthy network has a finding.

    python results/xray/thresholds.py [--output CSV]
"""
import argparse
import sys

import elsewhere
import gluon_amp as amp
import planted
import reported
import zoo
from common import BARE, write_csv
from gluon_amp.inspection import judge, tensors, xray

MOST = 8  # powers of two
HEALTHY = """resnet18_v1 resnet18_v2 cifar_resnet20_v1 cifar_resnet20_v2 mobilenet0.25
    mobilenetv2_0.25 mobilenetv3_small shufflenet_v1 shufflenet_v2 se_resnet18_v1 vgg11""".split()
THRESHOLDS = [(judge, name) for name in (
    "_MOST_LOST", "_LOST", "_STANDS_OUT", "_CANCELS", "_JUMPS")] + [
    (tensors, name) for name in ("_BELOW_ROUNDING", "_LEAST_DECIBELS")]


def counted(run):
    """Returns the arguments of the first judgement of an X-ray that `run` takes."""
    arguments = []

    def findings(*args):
        arguments.append(args)
        return original(*args)

    original, keep = judge.findings, xray.XrayRun.keep
    judge.findings, xray.XrayRun.keep = findings, lambda run, view, numbers: (view, {})
    try:
        run()
    finally:
        judge.findings, xray.XrayRun.keep = original, keep
    return arguments[0]


def planted_case(network, fault):
    def run():
        net, batches = planted.made(network, planted.FAULTS.get(fault))
        amp.xray(net, batches, planted.LOSS, steps=2)
    return counted(run), "planted_" if fault else ""


def reported_case(name, policy):
    return counted(lambda: reported.xrayed(reported.FAULTS[name], policy)), "net_reported_"


def healthy_case(name):
    def run():
        net, batches = zoo.made(name, "float16")
        amp.xray(net, batches, zoo.LOSS, steps=2)
    return counted(run), ""


def judgement(arguments, faulty):
    """Returns whether the faulty nodes are named; of a healthy network, whether any is."""
    layout, _, _, parameters = arguments
    for tensor in (*layout.tensors, *parameters):
        tensor.__post_init__()  # its lowest SNR
    first = judge.findings(*arguments)[0][:3]
    return any(faulty in finding.node for finding in first)


def limit(cases, module, name, base):
    """Returns the last value that judges all cases alike, on the way by factors of `base`, and the
    number of cases that the next one judges otherwise."""
    value = getattr(module, name)
    usual = [judgement(*case) for case in cases]
    last, others = value, 0
    for power in range(1, MOST + 1):
        setattr(module, name, value * base ** power)
        others = sum(judgement(*case) != before for case, before in zip(cases, usual))
        if others:
            break
        last = value * base ** power
    setattr(module, name, value)
    return last, others


def bits(all_cases, cases):
    """Returns the row of tensors._BITS, which acts while a step is counted: two X-rays of each."""
    value, others = tensors._BITS, []
    for tensors._BITS in (2, 15):
        others.append(sum(judgement(*case) != judgement(*usual)
                          for case, usual in zip(all_cases(), cases)))
    tensors._BITS = value
    return {"threshold": "_BITS", "value": value, "from": 2, "to": 15,
            "cases otherwise below": others[0], "cases otherwise above": others[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", metavar="CSV")
    options = parser.parse_args()
    names = [(network, fault) for network in planted.NETWORKS for fault in (*planted.FAULTS, "")]
    planted.NETWORKS.update(elsewhere.NETWORKS)
    planted.FAULTS.update((fault, function) for _, fault, function in elsewhere.FAULTS)
    names += [(network, fault) for network, fault, _ in elsewhere.FAULTS]

    def all_cases():
        return [planted_case(*name) for name in names] + [
            reported_case(name, policy) for name in reported.FAULTS
            for policy in ("float16", BARE)] + [healthy_case(name) for name in HEALTHY]

    cases = all_cases()
    table = [bits(all_cases, cases)]
    for module, name in THRESHOLDS:
        (low, below), (high, above) = (limit(cases, module, name, base) for base in (0.5, 2))
        table.append({"threshold": name, "value": getattr(module, name), "from": low, "to": high,
                      "cases otherwise below": below, "cases otherwise above": above})
        print(", ".join(f"{key} {each}" for key, each in table[-1].items()), flush=True)
    print(f"of {len(cases)} cases")
    if options.output:
        write_csv(options.output, list(table[0]), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
