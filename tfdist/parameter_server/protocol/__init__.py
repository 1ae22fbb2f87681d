"""The protocol between workers and servers: values, messages, frames, and the sockets that carry them."""
