"""The strategy whose processes sum gradients in each step, or a step late."""
