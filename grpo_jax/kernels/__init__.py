"""The axes of an algorithm: one file of pure functions an axis, named as its config group.

The order in which a step uses them, fixed, and written down here only:

1.  reward parts       text -> named rewards (`grpo_jax.rewards`, on the host)
2.  `filter`           drops groups by a *named* part, before any shaping
3.  `shaping`          adds a length penalty to the reward
4.  `kl` in reward     only when `kl.where == "reward"`
5.  `combine`          whether the parts are one reward, or each goes through 6 and 7 alone
6.  `baseline`         what is subtracted from the reward
7.  `scale`            what the rest is divided by (`advantage.py` is 6 and 7 together)
8.  `truncation`       takes answers that were cut off out of the loss, not out of their group
9.  `entropy`          the coefficient of the entropy bonus on this rollout
10. the rows are cut into minibatches, one an optimizer step
11. `aggregation`      the weight of every token, once for the whole (global) minibatch
12. `ratio`            how far the policy has moved since the rollout, in log space
13. `correction`       weights for a sampler that is not quite the trainer's policy
14. `clip`             the objective of every token, times those weights
15. `select`           which tokens' objective counts
16. `kl` in loss       only when `kl.where == "loss"`

Steps 12 to 16 are `grpo_jax/loss.py`. Functions take arrays first and their constants as keywords,
which a config binds with `functools.partial`; a constant may be traced. A rule that needs more than
its axis passes asks for it by name (`grpo_jax/rules.py`). All keep the float dtype of their inputs,
so the same code runs in float32 and in float64. Not axes: `masked`, `advantage`, `draws`
(chances within a group), `clip_covariance` (two values of `clip`), `sampling`, `logprobs`.
"""
