"""LoRA adapters and quantised layers: what is wrapped, with which first values, and what then trains."""
