"""Packing host arrays into one buffer: what goes in comes out, whatever the shapes."""

import numpy as np
import torch

from mdi_exec.model.staging import ALIGNMENT, Packing, Staging

ARRAYS = {
    "odd": np.arange(3, dtype=np.int32),
    "none": np.empty(0, dtype=np.int64),
    "flags": np.array([True, False, True]),
    "table": np.arange(6, dtype=np.int64).reshape(2, 3),
    "shares": np.array([0.25, -1.0]),
    "column": np.arange(6, dtype=np.int64).reshape(2, 3)[:, 1],
}


def test_arrays_come_out_as_they_went_in():
    found = Staging("cpu").upload(ARRAYS)
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert torch.equal(found[name], torch.from_numpy(array.copy())), name
        assert found[name].data_ptr() % ALIGNMENT == 0 or not found[name].numel()


def test_uploads_do_not_share_memory():
    staging = Staging("cpu")
    first = staging.upload(ARRAYS)["table"]
    staging.upload({**ARRAYS, "table": ARRAYS["table"] + 1})
    assert first.tolist() == ARRAYS["table"].tolist()


def test_equal_shapes_pack_alike():
    other = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
    assert Packing.of(other) == Packing.of(ARRAYS)
