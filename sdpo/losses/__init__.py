"""What is minimized: pure functions of log-probs, advantages, masks and counts.

`divergence` compares student and teacher on one support, `policy` holds advantages and the clipped surrogate,
`objective` masks, weighs and reduces both into the loss of a microbatch.
"""
