"""The strategy of parameter servers: what workers send and read, and how data are dealt to them."""
