"""The axes of an algorithm: one file of pure functions an axis, named as its config group.

The order in which a step uses them, fixed, and written down here only:

1.  reward parts       text -> named rewards (`grpo_jax.rewards`, on the host)
2.  `filter`           drops groups by a *named* part, before any shaping
3.  `shaping`          adds a length penalty to the reward
4.  `kl` in reward     only when `kl.where == "reward"`
5.  `baseline`         what is subtracted from the reward
6.  `scale`            what the rest is divided by (`advantage.py` is 5 and 6 together)
7.  the rows are cut into minibatches, one an optimizer step
8.  `aggregation`      the weight of every token, once for the whole (global) minibatch
9.  `ratio`            how far the policy has moved since the rollout, in log space
10. `clip`             the objective of every token
11. `correction`       reweights it for a sampler that is not quite the trainer's policy
12. `kl` in loss       only when `kl.where == "loss"`

Steps 9 to 12 are the five lines of `grpo_jax/loss.py`. Functions take arrays first and their
constants as keywords, which a config binds with `functools.partial`; a constant may be traced. All
keep the float dtype of their inputs, so the same code runs in float32 and in float64.
"""
