"""What `num_draft_tokens` asks of a model and of where it runs."""

from mdi_exec.model.config import ModelConfig
from mdi_shared.errors import ConfigError


def require_drafts(count: int, config: ModelConfig, *, device: str, has_head: bool = True) -> None:
    """Raise `ConfigError` unless `count` drafts a sequence can be made and verified; 0 always can.

    `has_head`: the model has been, or will be, loaded with its draft head.
    """
    if not count:
        return
    most = config.dspark_block_size

    def refuse(why: str) -> ConfigError:
        return ConfigError("num_draft_tokens", count, why)

    if not config.num_nextn_predict_layers:
        raise refuse("the model has no draft head: num_nextn_predict_layers = 0")
    if count > most:
        raise refuse(f"must be at most {most}, the block that the model's draft head was made for")
    if device != "cpu":
        raise refuse(f"drafts have run on a CPU only so far, not on {device}; set it to 0")
    if not has_head:
        raise refuse("the model was loaded without its draft head; another LLM may have it")
