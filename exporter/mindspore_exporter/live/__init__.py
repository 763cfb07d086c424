"""The live page: a reader of `recorder.py`'s files, beside the training, never imported by it."""
