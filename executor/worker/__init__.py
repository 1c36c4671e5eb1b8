"""What runs on every rank. Only here may torch, accelerate, deepspeed or transformers be imported."""
