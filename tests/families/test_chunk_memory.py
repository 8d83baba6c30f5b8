"""What a chunk of a prompt takes beside what the caches keep, which is what one layer takes, however many there are.

A window's keys and values are what tempts to more: those a chunk sees, those it overwrites, and the new ones.
"""

import gc

import mlx.core as mx
import pytest

from tests.families.models import build
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config

CHUNK, WINDOW, KV_HEADS, HEAD_DIM = 64, 256, 4, 64
RING_BYTES = 2 * WINDOW * KV_HEADS * HEAD_DIM * 4
VARIANTS = {"gemma4": "gemma4-dense", "llama": "mistral-mixed"}


def model(family, sliding):
    """A model with ``sliding`` layers that have windows before one that has none."""
    hf = tiny_config(family, VARIANTS[family])
    config = hf.get("text_config", hf)
    config |= {
        "layer_types": ["sliding_attention"] * sliding + ["full_attention"],
        "num_hidden_layers": sliding + 1,
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "sliding_window": WINDOW,
        "max_position_embeddings": 1024,
    }
    return build(hf)


def taken(family, sliding):
    with Runner(model(family, sliding), prefill_chunk=CHUNK, max_context=1024) as runner:
        runner.prefill([3 + position % 250 for position in range(WINDOW + CHUNK)])
        gc.collect()  # no other model may go meanwhile
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.prefill([5 + position % 250 for position in range(CHUNK)])
        return mx.get_peak_memory() - before


@pytest.mark.parametrize("family", VARIANTS)
def test_layers_do_not_add_up(family):
    # One layer's memory may go while the next one's comes.
    assert taken(family, 10) - taken(family, 2) < 2.5 * RING_BYTES
