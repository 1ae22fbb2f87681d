"""Runs blocks of Python from the docs, each with names of its own; see `tests/test_docs.py`.

The blocks are in ``blocks.json`` of the folder that is named, ``{"where": …, "code": …}``; what went wrong with which
goes to ``failures.json``.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import keras

failures = {}
folder = Path(sys.argv[1])
for number, block in enumerate(json.loads((folder / "blocks.json").read_text())):
    block_folder = folder / str(number)
    block_folder.mkdir()
    os.chdir(block_folder)
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    try:
        exec(compile(block["code"], block["where"], "exec"), {"__name__": "__main__"})
    except (Exception, SystemExit):
        failures[block["where"]] = traceback.format_exc()
(folder / "failures.json").write_text(json.dumps(failures))
