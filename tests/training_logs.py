"""Training logs with given errors in the formats of GluonCV, MXNet's Module and gluon_amp's
recipes, and the values read from them."""
import json

from gluon_amp.reports import read_logs
from hypothesis import HealthCheck, settings

ASCTIME = "2026-01-02 03:04:05,678 Node[0] "
ERRORS = [0.9, 0.512345, 0.3]
RECIPE = {"model": "resnet50_v1b", "dtype": "float16", "batch_size": 128, "num_gpus": 8,
          "lr_decay_epoch": "40,60", "label_smoothing": True, "wd": 0.0001, "params": None}
SAME_FOLDER = settings(max_examples=40, deadline=None,
                       suppress_health_check=[HealthCheck.function_scoped_fixture])


def header(prefix="", **arguments):
    return prefix + "Namespace({})\n".format(
        ", ".join(f"{name}={value!r}" for name, value in sorted(arguments.items())))


def gluoncv(errors, start=0, prefix="", metric="accuracy", speed=1000, seconds=100, tail="",
            batches=3, **arguments):
    """With its Namespace, if there are arguments."""
    lines = [header(prefix, **arguments)] if arguments else []
    for epoch, error in enumerate(errors, start):
        lines += [f"{prefix}Epoch[{epoch}] Batch [{50 * i + 49}]\tSpeed: {speed:f} samples/sec\t"
                  f"{metric}=0.250000\tlr={0.1 / (epoch + 1):f}{tail}\n" for i in range(batches)]
        lines += [f"{prefix}[Epoch {epoch}] training: {metric}=0.250000\n",
                  f"{prefix}[Epoch {epoch}] speed: {speed:d} samples/sec\ttime cost: {seconds:f}\n",
                  f"{prefix}[Epoch {epoch}] validation: err-top1={error:f} err-top5={error / 4:f}"
                  f"{tail}\n"]
    return "".join(lines)


def module(errors, start=0, prefix=ASCTIME, speeds=(1000.0, 1000.0), seconds=100, tail="",
           **arguments):
    lines = [header(f"{prefix}start with arguments ", **arguments)] if arguments else []
    for epoch, error in enumerate(errors, start):
        lines += [f"{prefix}Epoch[{epoch}] Batch [{20 * i}-{20 * i + 20}]\tSpeed: {speed:.2f} "
                  f"samples/sec\taccuracy=0.250000{tail}\n" for i, speed in enumerate(speeds)]
        lines += [f"{prefix}Epoch[{epoch}] Train-accuracy=0.250000\n",
                  f"{prefix}Epoch[{epoch}] Time cost={seconds:.3f}\n",
                  f"{prefix}Epoch[{epoch}] Validation-accuracy={1 - error:f}\n",
                  f"{prefix}Epoch[{epoch}] Validation-top_k_accuracy_5={1 - error / 4:f}\n"]
    return "".join(lines)


def jsonl(errors, start=0, scales=None, **arguments):
    lines = [{"arguments": arguments}] if arguments else []
    lines += [{"epoch": epoch, "accuracy": 0.25, "err_top1": error, "err_top5": error / 4,
               "samples_per_second": 1000.0, "seconds": 100.0, "lr": 0.1,
               "loss_scale": scales[epoch] if scales else 1.0, "skipped": 2 * epoch}
              for epoch, error in enumerate(errors, start)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def steps(errors, dtype="float16", **arguments):
    """log.jsonl of version 2, with each step, one of which is skipped, and losses."""
    lines = [{"version": 2, "arguments": {"dtype": dtype, **arguments}}]
    scale = 1024.0 if dtype == "float16" else 1.0
    for epoch, error in enumerate(errors):
        for batch in range(4):
            skip = dtype == "float16" and epoch == batch == 0
            lines.append({"epoch": epoch, "batch": batch, "loss": 2.0 - epoch - batch / 5,
                          "gradient_norm": None if skip else 1.0 + batch, "lr": 0.1 / (epoch + 1),
                          "loss_scale": 2 * scale if skip else scale,
                          "skipped": int(dtype == "float16"), **({"skip": True} if skip else {})})
        lines.append({"epoch": epoch, "accuracy": 0.25, "err_top1": error, "err_top5": error / 4,
                      "loss": 1.5 - epoch, "validation_loss": 1.6 - epoch,
                      "samples_per_second": 1000.0 + epoch, "seconds": 100.0,
                      "lr": 0.1 / (epoch + 1), "loss_scale": scale,
                      "skipped": int(dtype == "float16") + epoch * (dtype == "float16")})
    return "".join(json.dumps(line) + "\n" for line in lines)


def read_text(folder, text, name="a.log"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_logs([path])


def top1(run):
    return {number: round(epoch.top1, 9) for number, epoch in run.epochs.items()
            if epoch.top1 is not None}


def numbered(errors, start=0):
    return {number: round(error, 9) for number, error in enumerate(errors, start)}
