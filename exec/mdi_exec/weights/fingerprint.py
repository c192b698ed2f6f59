"""Tells checkpoints apart without reading them whole, so that ranks can make sure they serve one.

Read next: `parallel.py` (`require_equal`), `checkpoint.py`.
"""

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1 << 20  # of the beginning, which holds the header, and of the end


def checkpoint_fingerprint(directory: Path) -> str:
    """Hash names and sizes of a checkpoint's files, and the first and last MiB of each.

    Two checkpoints of one architecture differ in their weights almost everywhere, so the samples
    tell them apart. Returns 16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for file in sorted(p for p in directory.iterdir() if p.suffix in (".json", ".safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            digest.update(data.read(_SAMPLE_BYTES))
            data.seek(max(size - _SAMPLE_BYTES, 0))
            digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
