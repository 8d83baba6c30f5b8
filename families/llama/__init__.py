"""Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3: one decoder with switches."""
