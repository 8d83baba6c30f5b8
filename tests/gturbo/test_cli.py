"""``turbospark-mlx info`` and ``turbospark-mlx verify``."""

import json

import pytest

from turbospark_mlx.cli import info, verify
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.gturbo import Install, InstallWriter, TensorSpec
from turbospark_mlx.gturbo.formats import role_of
from turbospark_mlx.protocols import AffineFormat
from turbospark_mlx.testing import make_tiny_install

from . import handmade
from .test_experts import mxfp4_moe
from .test_install import flip


def command(module, *arguments):
    """Run a subcommand; returns its exit code."""
    import argparse

    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))


def test_verify_says_that_all_is_well(made, tmp_path, capsys):
    directory = made.write(tmp_path / "i.gturbo")
    assert command(verify, directory) == 0
    total = sum(record["size"] for record in made.manifest["files"].values())
    assert f"all {len(made.files)} files match ({total:,} bytes)" in capsys.readouterr().out
    with Install.open(directory, verify="off") as install:
        assert install.has_receipt


def test_verify_names_damaged_and_unlisted_files(tmp_path, capsys):
    directory = handmade.rust_dense().write(tmp_path / "i.gturbo")
    flip(directory / "model_weights.bin")
    (directory / "odd\x1bname").write_text("")
    assert command(verify, directory) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"damaged: {directory}/model_weights.bin: has SHA-256 ")
    assert "not hashed (the manifest does not list it): tokenizer.json" in lines
    assert r"unexpected, ignored: odd\x1bname" in lines
    assert lines[-1].endswith("1 of 2 files are damaged")


def test_verify_prints_json(tmp_path, capsys):
    directory = handmade.rust_dense().write(tmp_path / "i.gturbo")
    assert command(verify, directory, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["files"], document["faults"]) == (True, 2, [])
    flip(directory / "model_weights.bin")
    assert command(verify, directory, "--json") == 1
    assert "model_weights.bin" in json.loads(capsys.readouterr().out)["faults"][0]
    (directory / "manifest.json").unlink()
    assert command(verify, directory, "--json") == 1
    assert "no manifest.json" in json.loads(capsys.readouterr().out)["faults"][0]


def test_verify_refuses_what_is_structurally_wrong(tmp_path):
    directory = handmade.rust_dense().write(tmp_path / "i.gturbo")
    (directory / "model_weights.bin").unlink()
    with pytest.raises(InstallError, match=r"model_weights\.bin: is missing"):
        command(verify, directory)


def test_an_install_that_we_cannot_run_is_verified_and_described(tmp_path, capsys):
    directory = mxfp4_moe().write(tmp_path / "i.gturbo")
    assert command(verify, directory) == 0
    assert command(info, directory, "--json") == 0
    document = json.loads(capsys.readouterr().out.split("bytes)\n")[1])
    assert "MXFP4 blocks" in document["engines"]["turbospark-mlx"][0]
    assert document["engines"]["turbospark (Rust)"] == []


def llama(directory):
    """A llama install that the family's configuration accepts."""
    from turbospark_mlx.families import family_for_manifest

    family = family_for_manifest("llama")
    config = family.config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
        }
    )
    arch, extension = config.to_manifest()
    stored = {"embedding": AffineFormat(8, 32, "float16"), "vector": "bfloat16"}
    specs = [
        TensorSpec(name, shape, stored.get(role_of(name, shape), AffineFormat(4, 64, "bfloat16")))
        for name, shape in family.expected(config).items()
    ]
    directory.mkdir()
    writer = InstallWriter(directory, specs)
    for spec in specs:
        for part, size in spec.parts.items():
            writer.write(spec.name, part, bytes(size))
    writer.finish(
        arch=arch, extension=extension, elder_assumption=config.elder_assumption(), model_id="someone/tiny\x1b[31m"
    )
    return directory


def test_info_adds_up(tmp_path, capsys):
    directory = llama(tmp_path / "i.gturbo")
    assert command(info, directory, "--json", "--max-context", 10) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row.pop("role"): row for row in document["roles"]}
    # At 4 bits in groups of 64, a weight takes half a byte and a 64th of two companions of two bytes.
    attention, feed_forward = 3 * 64 * (64 + 32 + 32 + 64), 3 * 3 * 64 * 128
    packed = "4 bits, groups of 64, bfloat16 scales"
    embed = 100 * 64 + 2 * 100 * 2 * 2
    assert rows == {
        "embedding": {
            "format": "8 bits, groups of 32, float16 scales",
            "tensors": 1,
            "weights": 6400,
            "bytes": embed,
        },
        "attention": {"format": packed, "tensors": 12, "weights": attention, "bytes": attention * 9 // 16},
        "shared_expert": {"format": packed, "tensors": 9, "weights": feed_forward, "bytes": feed_forward * 9 // 16},
        "vector": {"format": "bfloat16", "tensors": 7, "weights": 7 * 64, "bytes": 7 * 128},
    }
    weights = embed + (attention + feed_forward) * 9 // 16 + 7 * 128
    # Keys and values of 3 layers, 10 tokens, 2 heads of 16, at 2 and at 4 bytes.
    half, full = 2 * 3 * 10 * 2 * 16 * 2, 2 * 3 * 10 * 2 * 16 * 4
    assert document["memory"] == {
        "maxContext": 10,
        "weights": weights,
        "expertSlots": 0,
        "experts": 0,
        "cache": {"half": half, "float32": full},
        "products": {"half": 0, "float32": 0},
        "total": {"half": weights + half, "float32": weights + full},
    }
    assert document["engines"]["turbospark-mlx"] == []
    assert document["bytes"] == sum(
        len(data) for name, data in handmade.snapshot(directory).items() if name != "manifest.json"
    )
    assert document["architecture"]["attention"] == {"full": 3}


def test_info_says_when_tensors_are_missing(tmp_path, capsys):
    made = handmade.rust_dense()
    made.manifest["arch"] |= {"headDim": 32, "attentionScale": 32**-0.5}
    assert command(info, made.write(tmp_path / "i.gturbo"), "--json") == 0
    (reason,) = json.loads(capsys.readouterr().out)["engines"]["turbospark-mlx"]
    assert "lacks tensor 'language_model.model.layers.0." in reason


def test_info_in_words(tmp_path, capsys):
    directory = llama(tmp_path / "i.gturbo")
    assert command(info, directory) == 0
    text = capsys.readouterr().out
    assert r"someone/tiny\x1b[31m" in text
    assert "layers         3 (3 full)" in text
    assert "turbospark-mlx           can run it" in text
    assert "The install needs turbospark-mlx's extension" in text
    assert "memory at 2,048 tokens" in text
    assert "receipt        none" in text


def test_info_counts_the_products_of_a_prompt(tmp_path, capsys):
    directory = make_tiny_install("llama", tmp_path / "i.gturbo", variant="qwen3-moe")
    assert command(info, directory, "--json", "--max-context", 4000) == 0
    document = json.loads(capsys.readouterr().out)
    memory, top_k = document["memory"], document["experts"]["topK"]
    # As many products of ``hidden`` float32 a token as it has experts, for as many tokens as are run at once.
    assert memory["products"] == {"half": 2048 * top_k * 64 * 4, "float32": 512 * top_k * 64 * 4}
    parts = memory["weights"] + memory["experts"] + memory["cache"]["float32"] + memory["products"]["float32"]
    assert memory["total"]["float32"] == parts
    assert command(info, directory, "--json", "--max-context", 100) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["products"]["float32"] == 100 * top_k * 64 * 4
    assert command(info, directory) == 0
    assert "+ products of a prompt " in capsys.readouterr().out


def test_info_counts_expert_slots(tmp_path, capsys):
    directory = handmade.rust_moe().write(tmp_path / "i.gturbo")
    assert command(info, directory, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["experts"] == {
        "layers": 2,
        "expertsPerLayer": 3,
        "topK": 2,
        "expertBytes": 20480,
        "stride": 20480,
        "bytes": 3 * (8192 + 20480),
    }
    (routed,) = [row for row in document["roles"] if row["role"] == "routed_expert"]
    # Two layers of three experts with three 64 x 64 matrices at 4 bits, and a scale and a bias for each row.
    assert (routed["tensors"], routed["weights"], routed["bytes"]) == (18, 18 * 4096, 18 * (2048 + 2 * 128))
    assert document["memory"]["experts"] == 3 * (8192 + 20480)
    assert command(info, directory, "--json", "--expert-slots", 2) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["experts"] == 2 * (8192 + 20480)
    # As a run does, it takes more slots than there are experts for all of them.
    assert command(info, directory, "--json", "--expert-slots", 4) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert (memory["expertSlots"], memory["experts"]) == (3, 3 * (8192 + 20480))
    assert command(info, directory) == 0
    assert "2 layers of 3, 2 a token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (handmade.rust_moe, ("--expert-slots", 1), "at least 2 slots"),
        (handmade.rust_moe, ("--expert-slots", 0), "at least 1"),
        (handmade.rust_dense, ("--expert-slots", 1), "no routed experts"),
        (handmade.rust_dense, ("--max-context", 0), "at least 1"),
    ],
)
def test_info_refuses_what_cannot_be(make, arguments, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        command(info, make().write(tmp_path / "i.gturbo"), *arguments)


@pytest.mark.parametrize(("free", "slots"), [(1 << 31, 3), (1 << 20, 2)])
def test_info_takes_auto_for_what_a_run_would_take_here(free, slots, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("turbospark_mlx.memory.available_bytes", lambda device: free)
    directory = handmade.rust_moe().write(tmp_path / "i.gturbo")
    monkeypatch.setattr("turbospark_mlx.experts.resolve.AUTO_SLOTS", (2,))
    assert command(info, directory, "--json", "--expert-slots", "auto") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert (memory["expertSlots"], memory["experts"]) == (slots, slots * (8192 + 20480))
    assert command(info, handmade.rust_dense().write(tmp_path / "d.gturbo"), "--expert-slots", "auto") == 0


def test_info_hashes_nothing(tmp_path):
    directory = handmade.rust_dense().write(tmp_path / "i.gturbo")
    flip(directory / "model_weights.bin")
    assert command(info, directory) == 0


def test_info_lists_what_no_logit_depends_on(tmp_path, capsys):

    for family, variant, expected in (
        ("gemma4", "gemma4-dense", ["language_model.model.layers.2.layer_scalar"]),
        ("llama", "llama", []),
    ):
        path = make_tiny_install(family, tmp_path / f"{variant}.gturbo", variant=variant)
        assert command(info, path, "--json") == 0
        assert list(json.loads(capsys.readouterr().out)["unused"]) == expected
        assert command(info, path) == 0
        assert ("without effect on any logit" in capsys.readouterr().out) == bool(expected)
