"""Checkpoints by damaged files of the tiny one: refused in one line, or good to generate with.

config.json, index, tokenizer.json and the header of the tensor file lose, swap or change a value,
or their bytes; so do the tensors' own bytes. Some of those that open are loaded, and asked for two
tokens.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.weights.checkpoint import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE
from mdi_exec.weights.safetensors_header import LENGTH_BYTES
from mdi_exec.weights.source import open_model
from tests.fuzz.damage import damaged
from tests.fuzz.mutations import mutated
from tests.fuzz.suite import drawn, refusal

TINY = Path(__file__).parent.parent / "golden" / "tiny"
TENSORS = "model.safetensors"
FILES = (CONFIG_FILE, CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, TENSORS, TENSORS)
OPTIONS = {"max_model_len": 640, "max_num_seqs": 4, "num_blocks": 40}
LOADED_SHARE = 0.15


def checkpoints(folder):
    """Return the suite; damaged checkpoints go to `folder`."""
    contents = {name: (TINY / name).read_bytes() for name in set(FILES)}
    documents = {name: json.loads(raw) for name, raw in contents.items() if name != TENSORS}
    header, data = _parted(contents[TENSORS])
    documents[TENSORS] = json.loads(header)

    def case(seed, counts: Counter[str]):
        rng = drawn("checkpoints", seed)
        place = folder / "tiny"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        name = rng.choice(FILES)
        for other in contents.keys() - {name}:
            (place / other).symlink_to(TINY / other)
        if rng.random() < 0.6:
            text = mutated(documents[name], rng).encode()
            raw = _joined(text, data) if name == TENSORS else text
        elif name == TENSORS:
            raw = _damaged_tensors(header, data, rng)
        else:
            raw = damaged(contents[name], rng)
        (place / name).write_bytes(raw)
        _, refused = refusal(open_model, place)
        outcome = "refused" if refused else "opened"
        if refused is None and rng.random() < LOADED_SHARE:
            _, refused = refusal(_generate, place)
            outcome = "opened, refused when loaded" if refused else "opened and served"
        counts[f"{name} {outcome}"] += 1

    return case


def _generate(place):
    with LLM(place, **OPTIONS) as llm:
        prompts = ["Once upon a time"] if llm.tokenizer is not None else [[5, 6, 7]]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        assert [len(output.token_ids) for output in outputs] == [2]
        assert isinstance(outputs[0].text, str)


def _parted(raw):
    end = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    return raw[LENGTH_BYTES:end], raw[end:]


def _joined(header, data):
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + data


def _damaged_tensors(header, data, rng):
    """Return the file with header, length or tensors damaged."""
    where = rng.randrange(3)
    if where == 0:
        return _joined(damaged(header, rng), data)
    if where == 1:
        at = rng.randrange(len(data))
        return _joined(header, data[:at] + damaged(data[at : at + 4096], rng, is_text=False)
                       + data[at + 4096 :])  # fmt: skip
    return rng.randbytes(rng.choice((0, 1, 8))) + _joined(header, data)[rng.choice((0, 1, 8)) :]
