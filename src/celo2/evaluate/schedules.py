"""Learning-rate schedules, the same for every optimizer."""

import optax

from celo2.evaluate.config import RunConfig


def schedule_shape(config: RunConfig, updates: int) -> optax.Schedule:
    """The learning rate at each of `updates` updates, as a fraction of its highest value.

    It rises linearly from zero over the first part and then falls to zero at the end, along a
    cosine or a line, or stays.

    >>> shape = schedule_shape(RunConfig("digits-mlp", schedule="linear", warmup=0.2), 10)
    >>> [round(float(shape(count)), 2) for count in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    warmup = round(config.warmup * updates)
    rest = max(1, updates - warmup)
    decay = {
        "cosine": optax.cosine_decay_schedule(1.0, rest),
        "linear": optax.linear_schedule(1.0, 0.0, rest),
        "constant": optax.constant_schedule(1.0),
    }[config.schedule]
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup), decay], [warmup])
