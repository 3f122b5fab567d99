"""What is minimized: pure functions of log-probs, advantages, masks and counts.

`divergence` compares student and teacher on one support, `policy` holds advantages and the clipped surrogate,
`sampler` the weight for a sampler that is not the trainer, and `objective` masks, weighs and reduces them into the
loss of a microbatch.
"""
