"""Make the ids of gguf_tokenizers.json again, with llama.cpp.

    pip install llama-cpp-python
    python tests/golden/make_gguf_tokenizers.py [SmolLM2-135M-Instruct.Q4_1.gguf]

The vocabularies and strings stay as they are in the file; each vocabulary is written as a GGUF file without tensors and
read by llama.cpp, which tokenizes every string with special tokens parsed and none added. Without the model's file, its
ids are kept.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp

PATH = Path(__file__).with_name("gguf_tokenizers.json")


def write_vocabulary(path: Path, fields: dict) -> None:
    """A GGUF file of nothing but ``tokenizer.ggml`` fields, and the sizes that llama.cpp wants to know."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_by_llama_cpp(path: Path, strings: list[str]) -> list[list[int]]:
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in strings]


def main(model: str | None = None) -> None:
    golden = json.loads(PATH.read_text())
    fields = {"spm": golden["spm"], "spm-without-prefix": {**golden["spm"], "add_space_prefix": False}}
    with tempfile.TemporaryDirectory() as folder:
        for kind, before in golden["ids"].items():
            if kind == "smollm2-135m":
                if model is None:
                    continue
                path = Path(model)
            else:
                path = Path(folder) / f"{kind}.gguf"
                write_vocabulary(path, fields.get(kind, {**golden["bpe"], "pre": kind}))
            golden["ids"][kind] = ids_by_llama_cpp(path, golden["strings"])
            changed = sum(a != b for a, b in zip(golden["ids"][kind], before, strict=True))
            print(f"{kind}: {len(before)} strings, {changed} changed")
    golden["made by"] = f"llama-cpp-python {llama_cpp.__version__}, vocabulary only, special tokens parsed, none added"
    PATH.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
