"""Rows of sampling options for tests of the sampler, on any device."""

from mdi_exec.engine.sampling import draw_columns, sampling_needs
from mdi_exec.model.staging import Staging
from mdi_exec.ops.sampler import SamplingRows


def rows_of_draws(draws, device="cpu"):
    """Build from one draw per row of logits, in order."""
    return SamplingRows.place(Staging(device).upload(draw_columns(draws)), sampling_needs(draws))
