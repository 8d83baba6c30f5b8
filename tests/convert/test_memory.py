"""Peak memory does not grow with the checkpoint."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest

from .checkpoints import TOKENIZER, shapes
from .ggufs import write_gguf

CONFIG = {
    "model_type": "llama",
    "vocab_size": 75_000,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# The embedding and the head are 307 MB each in bfloat16.
LIMIT_MB = 200
PROGRAM = """
import resource, sys
from turbospark_mlx.convert import convert
bits = int(sys.argv[3]) or None
convert(sys.argv[1], sys.argv[2], bits=bits, progress=False)
try:
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
except FileNotFoundError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak)
"""


def peak_mb(source, dest, bits):
    command = [sys.executable, "-c", PROGRAM, str(source), str(dest), str(bits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1e6


def write_large(directory, config, named):
    """A checkpoint of several 100 MB, written a piece at a time: this process is not to need the memory either."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes(TOKENIZER)
    header, at = {}, 0
    for name, shape in named.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    piece = np.random.default_rng(0).integers(0x3C00, 0x3F00, 1 << 22, dtype=np.uint16).tobytes()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, at, len(piece)):
            file.write(piece[: at - start])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 16])
def test_a_large_checkpoint(tmp_path, bits):
    write_large(tmp_path / "source", CONFIG, shapes(CONFIG))
    assert peak_mb(tmp_path / "source", tmp_path / "out.gturbo", bits) < LIMIT_MB


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 16])
def test_large_stacks_of_experts(tmp_path, bits):
    """400 MB in two tensors, gate and up joined."""
    config = CONFIG | {
        "model_type": "mixtral",
        "vocab_size": 64,
        "intermediate_size": 2048,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    }
    named = {name: shape for name, shape in shapes(config).items() if ".mlp." not in name}
    named |= {
        "model.layers.0.mlp.gate.weight": (16, 2048),
        "model.layers.0.mlp.experts.gate_up_proj": (16, 4096, 2048),
        "model.layers.0.mlp.experts.down_proj": (16, 2048, 2048),
    }
    write_large(tmp_path / "source", config, named)
    assert (tmp_path / "source" / "model.safetensors").stat().st_size > 400e6
    assert peak_mb(tmp_path / "source", tmp_path / "out.gturbo", bits) < LIMIT_MB


@pytest.mark.slow
def test_a_large_gguf_file(tmp_path):
    rows, blocks = CONFIG["vocab_size"], CONFIG["hidden_size"] // 32
    block = np.frombuffer(np.float16(0.01).tobytes() + bytes(range(32)), np.uint8)
    stored = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), np.tile(block, (rows, blocks)))
    values = {name: np.ones(shape, np.float32) for name, shape in shapes(CONFIG).items() if shape[0] != rows}
    types = dict.fromkeys(stored, "Q8_0")
    write_gguf(
        tmp_path / "m.gguf", CONFIG, types, values=values | dict.fromkeys(stored), stored=stored, dequantize=False
    )
    assert (tmp_path / "m.gguf").stat().st_size > 300e6
    for bits in (0, 4):
        assert peak_mb(tmp_path / "m.gguf", tmp_path / f"{bits}.gturbo", bits) < LIMIT_MB
