"""WGAN-GP on eight Gaussians: the sliced Wasserstein distance of its samples."""
import common
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

run = common.Run(__doc__)
BATCH, STEPS, CRITIC_STEPS, WIDTH, STEP = 128, 800, 3, 128, 0.01


def data(rng, count):
    angles = rng.randint(8, size=count) * np.pi / 4
    return np.stack([np.cos(angles), np.sin(angles)], 1) + rng.normal(0, 0.05, (count, 2))


def network(outputs, prefix, params=None):
    net = nn.HybridSequential(prefix=prefix, params=params)
    with net.name_scope():
        net.add(nn.Dense(WIDTH, "tanh", in_units=2), nn.Dense(WIDTH, "tanh", in_units=WIDTH),
                nn.Dense(outputs, in_units=WIDTH))
    return net


generator, critic = network(2, "generator_"), network(1, "critic_")
for net in (generator, critic):
    net.initialize(mx.init.Xavier(magnitude=2))
twin = network(1, "critic_", critic.collect_params())
twin.hybridize()
run.convert(generator)
run.convert(critic, mixed=True)  # the penalty's float32 twin reads its parameters
settings = {"learning_rate": 1e-3, "beta1": 0.5, "beta2": 0.9}
of_generator, of_critic = (run.trainer(net, "adam", settings) for net in (generator, critic))


def noise(rng, count=BATCH):
    return mx.nd.array(rng.normal(size=(count, 2)))


def penalty(points):
    """Has the gradient of the penalty (norm - 1)^2, as a central difference: docs/howto.md."""
    points.attach_grad()
    with autograd.record():
        output = twin(points)
    slope = autograd.grad(output, [points])[0]
    norm = (slope ** 2).sum(axis=1, keepdims=True).sqrt() + 1e-6
    direction = 2 * (norm - 1) * slope / norm
    with autograd.record():
        return (twin(points + STEP * direction) - twin(points - STEP * direction)) / (2 * STEP)


for _ in run.steps(STEPS):
    for _ in range(CRITIC_STEPS):
        real = mx.nd.array(data(run.rng, BATCH))
        fake = generator(noise(run.rng)).astype("float32")
        share = mx.nd.array(run.rng.uniform(size=(BATCH, 1)))
        added = penalty(share * real + (1 - share) * fake)
        with autograd.record():
            loss = (critic(fake) - critic(real) + 10 * added).reshape(-1)
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
