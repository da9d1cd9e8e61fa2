"""Data modules for text."""
