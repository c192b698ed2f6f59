"""Opening and checking checkpoints: the released table, damaged files, headers only."""

import dataclasses
import json
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdi_exec.model.config_reader import read_config
from mdi_exec.weights.checkpoint import INDEX_FILE, Checkpoint, open_checkpoint
from mdi_exec.weights.names import TensorSpec, expected_tensors
from mdi_exec.weights.presets import released_config
from mdi_exec.weights.safetensors_header import CheckpointError, header_bytes, read_header
from mdi_shared.errors import ConfigError

FILE = "model.safetensors"


@pytest.fixture
def tiny(golden_path, tmp_path):
    """A writable copy of the golden checkpoint."""
    directory = tmp_path / "tiny"
    shutil.copytree(golden_path / "tiny", directory, copy_function=shutil.copyfile)
    return directory


def problems_of(directory):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).verify()
    assert "\n" not in str(caught.value)
    return caught.value.problems


def rewrite(directory, change, *, index=True):
    """Save the tensors again after `change(tensors)`; the index follows unless told not to."""
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE)
    if index:
        write_index(directory, dict.fromkeys(tensors, FILE))


def write_index(directory, weight_map):
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def read_index(directory):
    return json.loads((directory / INDEX_FILE).read_text())["weight_map"]


def test_the_released_table_has_the_released_size():
    table = expected_tensors(read_config(released_config()))
    assert len(table) == 96_085
    assert sum(spec.nbytes for spec in table.values()) == 510_286_023_000


def test_released_tensors_look_as_published():
    table = expected_tensors(read_config(released_config()))
    expected = {
        "layers.0.attn.wq_b.scale": TensorSpec("F8_E8M0", (1024, 40)),
        "layers.7.attn.wo_a.weight": TensorSpec("F8_E4M3", (8192, 4096)),
        "layers.39.ffn.experts.383.w2.weight": TensorSpec("I8", (5120, 1152)),
        "layers.39.ffn.experts.383.w2.scale": TensorSpec("F8_E8M0", (5120, 72)),
        "layers.14.engram.embed.weight": TensorSpec("F8_E4M3", (384_016_682, 256)),
        "layers.14.engram.wkv.scale": TensorSpec("F8_E8M0", (800, 192)),
        "layers.20.attn.indexer.wk.weight": TensorSpec("BF16", (128, 512)),
        "mtp.0.main_proj.scale": TensorSpec("F8_E8M0", (160, 480)),
        "mtp.2.confidence_head.proj.weight": TensorSpec("BF16", (1, 5376)),
        "aligner.w1.weight": TensorSpec("BF16", (5120, 9216)),
    }
    assert {name: table[name] for name in expected} == expected
    assert "layers.20.attn.compressor.wgate.weight" not in table  # one token per entry
    assert "layers.24.attn.indexer.wk.weight" not in table  # scores layer 20's keys
    per_layer = {
        layer: sum(name.startswith(f"layers.{layer}.") for name in table)
        for layer in (0, 1, 2, 14, 20, 24)
    }
    assert per_layer == {0: 2334, 1: 2340, 2: 2342, 14: 2348, 20: 2341, 24: 2337}


def test_table_without_draft_and_images_is_the_text_model():
    config = read_config(released_config())
    text_only = dataclasses.replace(
        config, vision=None, num_nextn_predict_layers=0,
        compress_ratios=config.compress_ratios[:40],
    )  # fmt: skip
    table = expected_tensors(text_only)
    assert {name.split(".")[0] for name in table} == {"embed", "layers", "norm", "head"}


def test_tensors_are_those_of_the_file(golden_path, tiny_tensors):
    checkpoint = open_checkpoint(golden_path / "tiny")
    checkpoint.verify()
    assert checkpoint.names == sorted(tiny_tensors.tensors)
    assert checkpoint.name == "tiny"
    assert checkpoint.weight_bytes == 7_692_496
    for name in checkpoint.names[::97]:
        found, expected = checkpoint.get(name), tiny_tensors.get(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    rows = checkpoint.get_rows("layers.1.engram.embed.scale", 5, 9)
    expected = tiny_tensors.get("layers.1.engram.embed.scale")[5:9]
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))


def test_unknown_names_and_rows_are_errors(golden_path):
    checkpoint = open_checkpoint(golden_path / "tiny")
    with pytest.raises(CheckpointError, match=r"has no tensor 'layers\.99\.x'"):
        checkpoint.get("layers.99.x")
    with pytest.raises(ConfigError, match=r"rows of norm\.weight = \(0, 129\).*0 \.\. 128"):
        checkpoint.get_rows("norm.weight", 0, 129)
    with pytest.raises(ConfigError, match="rows of"):
        checkpoint.get_rows("norm.weight", 3, 2)


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("text_config", "n_routed_experts", 16_384, "n_routed_experts = 16,384 in"),
        ("vision_config", "num_hidden_layers", 2**62, "vision_config.num_hidden_layers = 4,611"),
    ],
)
def test_more_parts_than_the_files_can_hold_are_told_at_once(tiny, part, name, value, says):
    """The table of tensors would take gigabytes."""
    config = json.loads((tiny / "config.json").read_text())
    config[part][name] = value
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"too few for {says}"):
        open_checkpoint(tiny).verify()


def test_problems_are_shortened_in_the_message():
    assert len(str(CheckpointError("here", ["x" * 5_000] * 9))) < 2_000


def test_an_index_names_files_without_nul(tiny):
    write_index(tiny, {"norm.weight": "a\0b"})
    with pytest.raises(CheckpointError, match="names a file outside the directory"):
        open_checkpoint(tiny)


def test_the_model_prefix_is_optional(tiny):
    rewrite(tiny, lambda tensors: [
        tensors.update({f"model.{name}": tensors.pop(name)}) for name in list(tensors)
    ])  # fmt: skip
    checkpoint = open_checkpoint(tiny)
    checkpoint.verify()
    assert checkpoint.get("norm.weight").shape == (128,)


def test_a_name_with_and_without_prefix_is_an_error(tiny):
    write_index(tiny, {**read_index(tiny), "model.norm.weight": FILE})
    with pytest.raises(CheckpointError, match=r"'norm\.weight'.*with and without"):
        open_checkpoint(tiny)


def test_one_file_needs_no_index_and_two_do(tiny):
    (tiny / INDEX_FILE).unlink()
    open_checkpoint(tiny).verify()
    shutil.copyfile(tiny / FILE, tiny / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"2 \.safetensors files and no model\.safe"):
        open_checkpoint(tiny)


def test_shards_are_found_by_the_index(tiny):
    tensors = load_file(tiny / FILE)
    (tiny / FILE).unlink()
    weight_map = {}
    for part in range(3):
        shard = dict(list(tensors.items())[part::3])
        save_file(shard, tiny / f"part-{part}.safetensors")
        weight_map.update(dict.fromkeys(shard, f"part-{part}.safetensors"))
    write_index(tiny, weight_map)
    checkpoint = open_checkpoint(tiny)
    checkpoint.verify()
    assert all(torch.equal(checkpoint.get(n).view(torch.uint8), tensors[n].view(torch.uint8))
               for n in list(tensors)[::211])  # fmt: skip
    (tiny / "part-1.safetensors").unlink()
    problems = problems_of(tiny)
    assert problems == ["part-1.safetensors: cannot be read: No such file or directory"]
    lost = next(name for name, file in weight_map.items() if file == "part-1.safetensors")
    checkpoint = open_checkpoint(tiny)
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors: cannot be read"):
        checkpoint.get(lost)


def test_wrong_tensors_are_named(tiny):
    def damage(tensors):
        del tensors["norm.weight"]
        tensors["layers.3.surplus"] = torch.zeros(2)
        tensors["head.weight"] = tensors["head.weight"][:1000].clone()
        tensors["layers.0.hc_attn_base"] = tensors["layers.0.hc_attn_base"].to(torch.bfloat16)

    rewrite(tiny, damage)
    assert problems_of(tiny) == [
        f"{FILE}: tensor 'head.weight': has shape [1000, 128], must be [1024, 128]",
        f"{FILE}: tensor 'layers.0.hc_attn_base': is BF16, must be F32",
        f"{FILE}: tensor 'layers.3.surplus': the config knows no such tensor",
        "tensor 'norm.weight': is in no file, but the config asks for it",
    ]


def test_many_problems_are_counted_and_the_first_few_shown(tiny):
    rewrite(tiny, lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.2.ffn")])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tiny).verify()
    count = len(caught.value.problems)
    assert count == 16 * 6 + 6 + 3 + 1  # experts, shared, gate, norm
    assert f"{count} problems: " in str(caught.value)
    assert f"and {count - 4} more" in str(caught.value)
    assert str(caught.value).count("is in no file") == 4


def test_an_index_that_disagrees_with_the_file_is_named(tiny):
    rewrite(tiny, lambda tensors: tensors.pop("norm.weight"), index=False)
    weight_map = read_index(tiny)
    del weight_map["embed.weight"]
    write_index(tiny, weight_map)
    assert problems_of(tiny) == [
        f"{FILE}: tensor 'norm.weight': the index places it here, but it is not",
        f"{FILE}: tensor 'embed.weight': is here, but the index does not say so",
        "tensor 'embed.weight': is in no file, but the config asks for it",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "weight_map"), ('{"weight_map": {"a": 1}}', "file names"),
     ('{"weight_map": {"a": "../b.safetensors"}}', "outside the directory")],
)  # fmt: skip
def test_an_unusable_index_is_named(tiny, text, message):
    (tiny / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tiny)
    assert str(caught.value).startswith(INDEX_FILE)


def cut(data, header_end):
    return data[:-1]


def grown(data, header_end):
    return data + b"\0"


def no_json(data, header_end):
    return data[:8] + b"!" + data[9:]


def stub(data, header_end):
    return data[:5]


def cut_in_the_header(data, header_end):
    return data[: header_end - 1]


def huge_header(data, header_end):
    return (2**40).to_bytes(8, "little") + data[8:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut, "is cut short: it ends at byte"), (grown, "1 bytes behind its last tensor"),
     (no_json, "its header is not JSON"), (stub, "is no safetensors file or is cut short"),
     (cut_in_the_header, "cut short"), (huge_header, "is no safetensors file")],
)  # fmt: skip
def test_damaged_files_are_named(tiny, damage, message):
    data = (tiny / FILE).read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    (tiny / FILE).write_bytes(damage(data, header_end))
    problems = problems_of(tiny)
    assert problems[0].startswith(f"{FILE}: ")
    assert message in problems[0]
    if damage is not grown:  # whose tensors are all there: only verify() minds
        checkpoint = open_checkpoint(tiny)
        with pytest.raises(CheckpointError, match=rf"^{FILE}: "):
            checkpoint.get("norm.weight")


@pytest.mark.parametrize(
    ("entry", "message"),
    [({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes, but F32 of shape [2]"),
     ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "starts at byte 4"),
     ({"dtype": "F32", "shape": [1]}, "lacks a usable"), (7, "lacks a usable")],
)  # fmt: skip
def test_header_entries_must_make_sense(tmp_path, entry, message):
    text = json.dumps({"a": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "tensor 'a'" in str(caught.value)
    assert message in str(caught.value)


def test_verifying_the_released_size_reads_no_data(tmp_path):
    config = released_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = list(expected_tensors(read_config(config)).items())
    weight_map = {}
    for shard in range(48):
        file = f"model-{shard + 1:05}-of-00048.safetensors"
        tensors = dict(table[shard::48])
        header = header_bytes(tensors)
        with (tmp_path / file).open("wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(spec.nbytes for spec in tensors.values()))  # a hole
        weight_map.update(dict.fromkeys(tensors, file))
    write_index(tmp_path, weight_map)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.verify()
    assert len(checkpoint.names) == 96_085
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head = checkpoint.get("head.weight")  # 1.3 GB, of which one row is touched
    assert not head[129_000].any()
    assert torch.equal(checkpoint.get_rows("head.weight", 129_000, 129_002), head[129_000:129_002])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100_000


def test_a_file_that_cannot_be_mapped_is_named(tiny, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("unable to mmap 5 bytes: Cannot allocate memory")

    monkeypatch.setattr("mdi_exec.weights.checkpoint.safe_open", refuse)
    with pytest.raises(CheckpointError, match=rf"^{FILE}: cannot be mapped: unable to mmap"):
        open_checkpoint(tiny).get("norm.weight")


def test_what_is_no_checkpoint_is_named(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for given, message in [
        ("some/where/else", "no directory here and no hub id"),
        (tiny / FILE, "must be a directory or a hub id, not a file"),
        ("nobody-at-all/no-such-model", "the hub did not give it"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            open_checkpoint(given)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="at revision v9"):
        open_checkpoint("nobody-at-all/no-such-model", "v9")
    with pytest.raises(ConfigError, match="revision = 'main'"):
        open_checkpoint(tiny, "main")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        open_checkpoint(tmp_path / "empty")
    (tiny / FILE).unlink()
    (tiny / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"has 0 \.safetensors files"):
        open_checkpoint(tiny)


def test_a_hub_id_opens_what_was_downloaded(golden_path, monkeypatch):
    asked = []

    def download(hub_id, *, revision, allow_patterns):
        asked.append((hub_id, revision, tuple(allow_patterns)))
        return str(golden_path / "tiny")

    monkeypatch.setattr("mdi_exec.weights.checkpoint.snapshot_download", download)
    checkpoint = open_checkpoint("some-org/some-model", "v1")
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.name == "some-org/some-model"
    assert asked == [("some-org/some-model", "v1", ("*.json", "*.safetensors"))]
