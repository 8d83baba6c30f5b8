"""Tokenizers that know bytes and a family's marks, to see how its conversations are written."""

import json
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from turbospark_mlx.tokenizer import Tokenizer


def byte_tokenizer(
    special: Mapping[str, int], template: str, config: dict, named: dict, generation: Sequence[int] = ()
) -> Tokenizer:
    """``special`` maps marks to ids; ``config`` is config.json, ``named`` tokenizer_config.json, and ``generation`` the
    stop ids of generation_config.json, which is absent where there are none."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({**{letter: i for i, letter in enumerate(letters)}, **special}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(named).encode(),
        "config.json": json.dumps(config).encode(),
        "chat_template.jinja": template.encode(),
    }
    if generation:
        files["generation_config.json"] = json.dumps({"eos_token_id": list(generation)}).encode()
    return Tokenizer.from_files(files)
