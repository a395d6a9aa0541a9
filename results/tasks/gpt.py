"""A GPT over characters, the network of example/language_model.py: validation loss."""
import common
import mxnet as mx

run = common.Run(__doc__)
from language_model import GPT  # noqa: E402

LENGTH, BATCH, STEPS = 32, 16, 800
text = common.Text(LENGTH, BATCH)
net = GPT(len(text.alphabet), 64, 2, 4, LENGTH, 0.0)
net.initialize(mx.init.Normal(0.02))
run.convert(net)
schedule = mx.lr_scheduler.CosineScheduler(STEPS, 3e-3, warmup_steps=40)
trainer = run.trainer(net, "adamw", {"learning_rate": 3e-3, "lr_scheduler": schedule, "wd": 0.1},
                      clip_norm=1.0)
run.end(trainer, validation_loss=text.train(run, net, trainer, STEPS))
