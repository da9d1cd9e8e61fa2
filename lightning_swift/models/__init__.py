"""LightningModules and weight loading for Hugging Face models."""
