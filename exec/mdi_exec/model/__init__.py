"""The DeepSeek-V4.1 text model, one file per part. Start with `transformer.py`."""
