"""WGAN-GP on eight Gaussians: the sliced Wasserstein distance of its samples."""
import common
import mxnet as mx
import numpy as np
from gradient_penalty import gradient_penalty
from mxnet import autograd
from mxnet.gluon import nn

run = common.Run(__doc__)
BATCH, STEPS, CRITIC_STEPS, WIDTH = 128, 800, 3, 128


def data(rng, count):
    angles = rng.randint(8, size=count) * np.pi / 4
    return np.stack([np.cos(angles), np.sin(angles)], 1) + rng.normal(0, 0.05, (count, 2))


def network(outputs):
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Dense(WIDTH, "tanh", in_units=2), nn.Dense(WIDTH, "tanh", in_units=WIDTH),
                nn.Dense(outputs, in_units=WIDTH))
    return net


generator, critic = network(2), network(1)
for net in (generator, critic):
    net.initialize(mx.init.Xavier(magnitude=2))
run.convert(generator)
run.convert(critic, mixed=True)
settings = {"learning_rate": 1e-3, "beta1": 0.5, "beta2": 0.9}
of_generator, of_critic = (run.trainer(net, "adam", settings) for net in (generator, critic))


def noise(rng, count=BATCH):
    return mx.nd.array(rng.normal(size=(count, 2)))


for _ in run.steps(STEPS):
    for _ in range(CRITIC_STEPS):
        real = mx.nd.array(data(run.rng, BATCH))
        fake = generator(noise(run.rng)).astype("float32")
        share = mx.nd.array(run.rng.uniform(size=(BATCH, 1)))
        with autograd.record():
            penalty = gradient_penalty(critic, share * real + (1 - share) * fake)
            loss = (critic(fake) - critic(real)).reshape(-1) + 10 * penalty
        of_critic.backward(loss)
        of_critic.step(BATCH)
    with autograd.record():
        loss = -critic(generator(noise(run.rng))).reshape(-1)
    run.update(of_generator, loss, BATCH)

# Distances of sorted projections on 64 directions
rng = run.validation_rng
samples, real = generator(noise(rng, 4096)).asnumpy().astype("float32"), data(rng, 4096)
angles = np.arange(64) * np.pi / 64
directions = np.stack([np.cos(angles), np.sin(angles)])
distance = np.abs(np.sort(samples @ directions, 0) - np.sort(real @ directions, 0)).mean()
run.end(of_generator, distance=float(distance), critic_skipped=of_critic.skipped)
