"""Learning by reward: rollouts, what they are worth, the gradient."""
