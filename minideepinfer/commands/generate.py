"""`mdi generate`: prompts in, text out, on the real model.

Read next: `executor.py` (options), `mdi_exec/engine/llm.py`.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from mdi_shared.errors import ConfigError
from minideepinfer.commands import options as o
from minideepinfer.commands.executor import is_first_rank, open_model
from minideepinfer.commands.screen import show_json, show_table, tell

if TYPE_CHECKING:
    from mdi_exec.engine.request_state import RequestOutput


def generate(
    model: o.ModelPath,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts.", show_default=False)
    ] = None,
    *,
    ids: Annotated[
        list[str] | None,
        typer.Option("--ids", metavar="1,2,3", help="A prompt as token ids; repeatable."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most output tokens.")] = 16,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(metavar="P", help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="-1 is off.")] = -1,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End an output before this; repeatable."),
    ] = None,
    n: Annotated[int, typer.Option("--n", metavar="N", help="Outputs per prompt.")] = 1,
    seed: o.Seed = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past end of sequence.")] = False,
    ranks: o.Ranks = None,
    device: o.Device = "cpu",
    set_options: o.Pairs = None,
    as_json: o.Json = False,
) -> None:
    """Generate from prompts given as texts or, with --ids, as token ids."""
    given: list[str | list[int]] = [*(prompts or []), *[_token_ids(text) for text in ids or []]]
    if not given:
        raise ConfigError("PROMPT", None, "give at least one text, or --ids")
    from mdi_exec.engine.sampling import SamplingParams

    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            ignore_eos=ignore_eos,
            stop=stop or (),
            n=n,
            seq_seed=(seed or 0) + index * n,
        )
        for index in range(len(given))
    ]
    with open_model(model, device, set_options, data_parallel_size=ranks or 1) as llm:
        if is_first_rank():
            tell(f"loaded {model} on {device}")
        outputs = llm.generate(given, params)
    if not is_first_rank():
        return
    if as_json:
        show_json({"outputs": [_document(output) for output in outputs]})
        return
    for output in outputs:
        text = output.text or " ".join(str(token) for token in output.token_ids)
        show_table(f"[{output.req_id}] {text!r} ({output.finish_reason})")


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError("ids", text, "must be whole numbers with commas, like 100,200") from error


def _document(output: "RequestOutput") -> dict[str, object]:
    return {
        "req_id": output.req_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
        "logprobs": [list(entry.values())[-1] for entry in output.logprobs],
    }
