"""Numbers of the published algorithm that no config changes; JAX and Torch share them."""

# Statistics of gradients.
GRADIENT_LIMIT = 1000.0
FACTORED_FLOOR = 1e-30  # keeps a factored moment positive where squares underflow
LAST_COUNT = 2**31 - 1

# Features.
CLIP = 0.1
RMS_EPSILON = 1e-8
FACTORED_EPSILON = 1e-9

# The update.
EPSILON = 1e-9
MAGNITUDE_SCALE = 0.001
CLIP_RMS = 1.0
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_EPSILON = 1e-8

# The rate of Adam's branch, in learning rates: ours, see docs/learning-rate.md.
ADAM_MULTIPLIER = 8.0
