"""The strategy whose processes sum gradients, at once or a step late."""
