"""The quickstart: fine-tune a real small model on real text, then merge, check, export and try it."""
