"""What tfdist tells the user of a rank, on which a program can wait."""

import logging
import queue


class Told(logging.Handler):
    """Prints tfdist's messages from now on, and keeps them."""

    def __init__(self):
        super().__init__()
        self._messages = queue.SimpleQueue()
        logging.getLogger("tfdist").addHandler(self)

    def emit(self, record):
        print("LOG", record.getMessage(), flush=True)
        self._messages.put(record.getMessage())

    def wait_for(self, text, count):
        """Waits for a message that has a text so many times, as one for each rank that waits."""
        while self._messages.get(timeout=60).count(text) < count:
            pass  # told before all of them waited
