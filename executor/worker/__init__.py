"""The code of every rank. Only here may torch, accelerate, deepspeed or transformers be imported."""
