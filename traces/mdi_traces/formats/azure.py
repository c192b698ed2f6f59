"""Azure LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset).

`TIMESTAMP` is wall-clock time with up to nine fractional digits, without a zone (2023) or with one
such as +00:00 (2024); a file keeps to one of the two. There are no sessions and no prefix ids.
"""

from collections.abc import Set

from mdi_traces.formats.base import Format, Imported, Options, length_columns
from mdi_traces.formats.rows import Rows


def _matches(names: Set[str]) -> bool:
    return names >= {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}


def _read(rows: Rows, options: Options) -> Imported:
    prompt, output = rows.tokens("ContextTokens"), rows.tokens("GeneratedTokens")
    return Imported(
        columns=length_columns(rows.times_ns("TIMESTAMP", None), prompt, output),
        licence="CC-BY-4.0 (Azure Public Dataset: 2023 Patel et al., ISCA 2024; "
        "2024 Stojkovic et al., HPCA 2025)",
    )


AZURE = Format(
    name="azure",
    needs="TIMESTAMP, ContextTokens, GeneratedTokens",
    matches=_matches,
    read=_read,
    no_sessions="records no sessions",
)
