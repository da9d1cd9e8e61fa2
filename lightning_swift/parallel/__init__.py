"""Parallelism as pure functions of (model, device_mesh, settings); knows nothing of Lightning."""
