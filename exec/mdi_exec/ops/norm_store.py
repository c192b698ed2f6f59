"""What becomes of a product that makes a cached vector: it is normalised, rotated, rounded, stored.

Window keys, compressed entries and index keys all go this way, each with a format of its own; a
kernel does it in one pass over the product's parts.
"""

from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.rms_norm import rms_norm_ref
from mdi_exec.ops.rope import Rotation, rotate_ref
from mdi_exec.ops.row_pool import RowPool, store_rows_ref


def norm_store_ref(
    product: Partial, weight: Tensor, eps: float, rotation: Rotation, pool: RowPool, index: Tensor
) -> Tensor:
    normed = rms_norm_ref(product.rounded(), weight, eps)
    store_rows_ref(pool, index, rotate_ref(normed, rotation, inverse=False))
    return normed


def norm_store(
    product: Partial, weight: Tensor, eps: float, rotation: Rotation, pool: RowPool, index: Tensor
) -> Tensor:
    """Store RMS-normed and rotated rows of a product [T, d] at pool rows `index`, int64 [T].

    weight [d]; -1 in `index` as in `store_rows`. Returns the normed rows before their rotation,
    [T, d] in the activations' dtype.
    """
    run = select(product.like, ref=norm_store_ref, kernel="norm_store.norm_store")
    return run(product, weight, eps, rotation, pool, index)
