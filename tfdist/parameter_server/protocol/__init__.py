"""What workers and servers say to each other: values, messages, frames, and the line that they travel on."""
