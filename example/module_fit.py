"""Trains a symbol with gluon_amp.Module: the flags and the log lines of MXNet's own
image-classification example."""
import logging
import os
import platform

import gluon_amp as amp
import image_data
import mxnet as mx
import numpy as np
import records
from command import devices_of, numbers, positive


def add_arguments(parser):
    train = parser.add_argument_group("training")
    train.add_argument("--gpus", type=numbers, default=[],
                       help="such as 0 or 0,2,5; none: the CPU")
    train.add_argument("--kv-store", default="device")
    train.add_argument("--batch-size", type=positive, default=128)
    train.add_argument("--num-epochs", type=positive, default=80)
    train.add_argument("--lr", type=float, default=0.1)
    train.add_argument("--lr-factor", type=float, default=0.1)
    train.add_argument("--lr-step-epochs", type=numbers, default=[30, 60],
                       help="after which epochs the rate is multiplied by --lr-factor")
    train.add_argument("--warmup-epochs", type=float, default=0)
    train.add_argument("--optimizer", default="sgd")
    train.add_argument("--mom", type=float, default=0.9)
    train.add_argument("--wd", type=float, default=1e-4)
    train.add_argument("--dtype", default="float32", choices=("float32", "float16"))
    train.add_argument("--loss-scale", default="",
                       help="a number or dynamic (default: dynamic for float16, else none)")
    train.add_argument("--disp-batches", type=positive, default=20, help="of a line of the log")
    train.add_argument("--top-k", type=int, default=0, help="also log the top-k accuracy")
    train.add_argument("--model-prefix", help="save each epoch under this name")
    train.add_argument("--load-epoch", type=int, help="go on from --model-prefix at this epoch")
    train.add_argument("--monitor", type=int, default=0,
                       help="log outputs' sizes every so many batches")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--save-dir", help="write log.jsonl there (records.py says what is in it)")
    records.add_arguments(train)


def loss_scale(args):
    text = args.loss_scale or ("dynamic" if args.dtype == "float16" else "none")
    if text in ("dynamic", "none"):
        return None if text == "none" else text
    try:
        return amp.StaticLossScale(float(text))
    except ValueError:
        raise SystemExit("--loss-scale takes a positive number, dynamic or none. "
                         f"Received: {text}") from None


def schedule(args, epoch_size):
    """The learning rate by updates, counted from the first epoch's first."""
    steps = [epoch * epoch_size for epoch in args.lr_step_epochs]
    warmup = int(args.warmup_epochs * epoch_size)
    if not steps:
        steps = [1 << 60]
    return mx.lr_scheduler.MultiFactorScheduler(steps, args.lr_factor, args.lr,
                                                warmup_steps=warmup)


def fit(args, symbol, arg_params=None, aux_params=None, fixed=None):
    """Trains, and returns the module."""
    mx.random.seed(args.seed)
    np.random.seed(args.seed)
    if args.batch_size % max(1, len(args.gpus)):
        raise SystemExit(f"--batch-size {args.batch_size} does not divide over {len(args.gpus)} "
                         "GPUs")
    contexts, scale = devices_of(args.gpus), loss_scale(args)
    if args.model_prefix:
        os.makedirs(os.path.dirname(args.model_prefix) or ".", exist_ok=True)
    kvstore = mx.kvstore.create(args.kv_store)
    logging.basicConfig(level=logging.INFO, force=True,
                        format=f"%(asctime)-15s Node[{kvstore.rank}] %(message)s")
    train, val, examples = image_data.iterators(args, kvstore.rank, kvstore.num_workers)
    logging.info("start with arguments %s", args)
    logging.info("gluon_amp %s, MXNet %s, Python %s", amp.__version__, mx.__version__,
                 platform.python_version())
    epoch_size = max(1, examples // kvstore.num_workers // args.batch_size)
    begin = args.load_epoch or 0
    options = {"context": contexts, "loss_scale": scale, "fixed_param_names": fixed}
    if begin:
        if not args.model_prefix:
            raise SystemExit("--load-epoch needs --model-prefix")
        states = os.path.exists(f"{args.model_prefix}-{begin:04d}.states")
        module = amp.Module.load(args.model_prefix, begin, states, **options)
    else:
        module = amp.Module(symbol, **options)
    optimizer = {"learning_rate": args.lr, "wd": args.wd, "begin_num_update": begin * epoch_size,
                 "lr_scheduler": schedule(args, epoch_size)}
    if args.optimizer in ("sgd", "nag", "signum", "lars", "dcasgd"):
        optimizer["momentum"] = args.mom
    metrics = ["accuracy"]
    if args.top_k:
        metrics.append(mx.metric.create("top_k_accuracy", top_k=args.top_k))
    record = start_record(args, begin, epoch_size)
    callbacks = records.FitCallbacks(record, module, args.disp_batches, args.batch_size)
    epoch_ends = [callbacks.epoch_end]
    if args.model_prefix:
        epoch_ends.append(mx.callback.module_checkpoint(module, args.model_prefix,
                                                        save_optimizer_states=True))
    module.fit(
        train, val, metrics, kvstore=kvstore if "dist" in args.kv_store else args.kv_store,
        optimizer=args.optimizer, optimizer_params=optimizer, begin_epoch=begin,
        num_epoch=args.num_epochs, arg_params=arg_params, aux_params=aux_params,
        allow_missing=arg_params is not None,
        initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        batch_end_callback=[callbacks.batch_end,
                            amp.Speedometer(args.batch_size, args.disp_batches)],
        epoch_end_callback=epoch_ends, eval_batch_end_callback=callbacks.validation_batch_end,
        eval_end_callback=callbacks.validation_end,
        monitor=mx.mon.Monitor(args.monitor) if args.monitor else None)
    record.save()
    record.end()
    return module


def start_record(args, begin, epoch_size):
    """The run's record; with --load-epoch behind what log.jsonl has of the epochs before."""
    if not args.save_dir:
        return records.Records(args, None, steps=begin * epoch_size)
    os.makedirs(args.save_dir, exist_ok=True)
    path, lines = os.path.join(args.save_dir, "log.jsonl"), []
    if begin and os.path.exists(path):
        lines = [line for line in records.read(path)[1] if line["epoch"] < begin]
    elif os.path.exists(path):
        raise SystemExit(f"{path} is there: --save-dir names another place, --load-epoch goes on")
    return records.Records(args, path, lines, begin * epoch_size)
